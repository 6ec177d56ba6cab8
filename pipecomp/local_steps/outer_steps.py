"""The outer steps of one replica: it sends how far it has moved, and takes what all have agreed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pipecomp.allreduce.local_options import LocalSteps
from pipecomp.local_steps.common import CommonWeights
from pipecomp.local_steps.row_rates import sums_of_rows
from pipecomp.local_steps.second_moments import SecondMoments
from pipecomp.local_steps.timetable import Timetable, fragments_of


class Averages(Protocol):
    """What averages over replicas."""

    def submit(self, tensors: dict[str, Tensor], *, label: str = "") -> Callable[[], None]:
        """Start to replace tensors, by name, by their means over replicas; done when what is returned has been called.

        label: names the same tensors every time.
        """


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A fragment that is being averaged. sent_at, lands: the steps after which it was sent and is taken.

    waits: for what has not arrived. keep: the share of its own weights that a replica keeps then; None where it keeps
    how far it has come since `sent`, its own weights when it was sent. mean: of the replicas' outer gradients. sums: of
    rows of these, the mean of the replicas' own. rows: its own means of rows of second moments; row_means: of all.
    """

    fragment: int
    sent_at: int
    lands: int
    keep: float | None
    sent: dict[str, Tensor]
    mean: dict[str, Tensor]
    sums: dict[str, Tensor]
    rows: dict[str, Tensor]
    row_means: dict[str, Tensor]
    waits: list[Callable[[], None]] = field(default_factory=list)

    def arrive(self) -> None:
        while self.waits:
            self.waits.pop(0)()


class OuterSteps:
    """Averages a replica's weights with those of the others after H inner steps (arXiv:2311.08105, Algorithm 1).

    In an interval of one step gradients are averaged before the inner optimizer takes it, as plain data parallelism
    does, so that replicas stay equal, their optimizers' states too; the outer step then needs no exchange. H = 1 with
    an outer SGD of rate 1 therefore is plain averaging, bit for bit.

    Args:
        options: H, the outer optimizer, fragments and overlap.
        weights: The replica's own, by name, the same on all replicas at first.
        tied: Names of those that other stages hold too.
        averages: Averages over replicas.
        replicas: How many there are.
        exact: Averages a few numbers of each row, not compressed. None where nothing of the kind is needed, see
            `LocalSteps.shares_rows`.
        moments: The second moments of which replicas share the rows' means; None where each has its own.

    Attributes:
        taken: Outer steps so far, each of one fragment, or of all weights after a synchronous inner step.
        averaged_at: Inner steps of the run that were over when the common weights last changed.

    Raises:
        ConfigError: For more fragments than weights.
    """

    def __init__(
        self,
        options: LocalSteps,
        weights: Mapping[str, Tensor],
        tied: Set[str],
        averages: Averages | None,
        replicas: int,
        exact: Averages | None = None,
        moments: SecondMoments | None = None,
    ) -> None:
        weights = {name: w for name, w in weights.items() if w.numel()}  # rows of nothing have no means
        self._exact, self._moments = exact, moments
        self._options, self._weights, self._averages, self._replicas = options, weights, averages, replicas
        self._fragments = fragments_of(weights, tied, options.fragments)
        self._timetable = Timetable(options)
        self._common: CommonWeights | None = None
        self._flights: list[_Flight] = []
        self.taken, self.averaged_at = 0, 0
        self._even: dict[int, int] = {}  # the step after which all replicas last had the same of a fragment

    @property
    def synchronous(self) -> bool:
        """Whether the step to come averages gradients, and all replicas have the same weights."""
        return self._timetable.length == 1

    def start(self, step: int) -> None:
        """Begin after `step` steps of the run, unless it has begun: the weights are what replicas have in common."""
        if self._common is None:
            self._common = CommonWeights(self._weights, self._options.outer, self._replicas)
            self._timetable.began = self.averaged_at = step

    def forget(self) -> None:
        """Begin anew with the next step: weights were loaded that are the same on all replicas."""
        self._land(None)
        self._common, self._even = None, {}

    def after_step(self, step: int) -> None:
        """Do what is due after `step` inner steps of the run; every replica must call this after every step."""
        assert self._common is not None, "start comes first"
        if self.synchronous:
            self._common.step_alike()
            self._even = dict.fromkeys(range(len(self._fragments)), step)
            self.taken, self.averaged_at = self.taken + 1, step
        else:
            self._land(step)
            for fragment in self._timetable.due(step):
                self._send(fragment, step, overlap=self._timetable.overlap)
            self._land(step)
        self._timetable.passed(step)

    def meet(self, step: int) -> None:
        """Take an outer step with what replicas differ in after `step` inner steps: all have the same weights then.

        Every replica must call this; the next interval begins. What was sent after this very step takes none but that:
        there is no movement for another one, only momentum.
        """
        if self._common is None or self.synchronous:
            return
        for flight in self._flights:
            flight.lands = step
            if flight.sent_at == step:
                flight.keep = 0.0
        self._land(step)
        for fragment in range(len(self._fragments)):
            if self._even.get(fragment) != step:
                self._send(fragment, step, overlap=0)
        self._land(step)
        self._timetable.began = step

    def _send(self, fragment: int, step: int, *, overlap: int) -> None:
        assert self._common is not None
        assert self._averages is not None
        names = self._fragments[fragment]
        moved = self._common.moved(names)
        label = f"fragment-{fragment}-" if len(self._fragments) > 1 else ""
        sums = {}
        if self._options.outer.lr is None:
            sums = {name: sums_of_rows(own, step) for name, own in moved.items()}
        rows = {} if self._moments is None else self._moments.rows(names)
        means = {name: own.clone() for name, own in rows.items()}
        waits = [self._averages.submit(moved, label=label)]
        for kind, few in (("sums-", sums), ("moments-", means)):
            if few:
                assert self._exact is not None, "see shares_rows"
                waits.append(self._exact.submit(few, label=label + kind))
        keep = self._options.mixing if overlap else 0.0
        sent = {name: self._weights[name].detach().clone() for name in names} if keep is None else {}
        self._flights.append(
            _Flight(
                fragment=fragment,
                sent_at=step,
                lands=step + overlap,
                keep=keep,
                sent=sent,
                mean=moved,
                sums=sums,
                rows=rows,
                row_means=means,
                waits=waits,
            )
        )

    def _land(self, step: int | None) -> None:
        """Take the fragments that are due after `step` steps; with None all of them, to be let go."""
        for flight in list(self._flights):
            if step is not None and flight.lands > step:
                continue
            flight.arrive()
            self._flights.remove(flight)
            if step is not None and self._common is not None:
                self._common.step(flight.mean, flight.sums)
                if flight.keep is None:
                    self._common.hand_out_since(flight.sent)
                else:
                    self._common.hand_out(flight.mean, flight.keep)
                    if not flight.keep:
                        self._even[flight.fragment] = step
                if self._moments is not None:
                    self._moments.follow(flight.rows, flight.row_means)
                self.taken += 1
                self.averaged_at = step

    def arrive(self) -> None:
        """Wait for what is being averaged, which lands when it is due all the same."""
        for flight in self._flights:
            flight.arrive()

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Let the replica's weights be the common ones inside, for evaluation and saving."""
        if self._common is None:
            yield
            return
        with self._common.in_place():
            yield

    def stats(self) -> dict[str, Any]:
        """Tell where the run is between outer steps, as JSON values."""
        return {
            "interval": self._timetable.length,
            "began": self._timetable.began,
            "outer_steps": self.taken,
            "averaged_at": self.averaged_at,
            "in_flight": [flight.fragment for flight in self._flights],
        }

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on beside the common weights; waits for what is being averaged.

        Returns:
            "weights": the replica's own, by name, on the CPU; "rows", of second moments, and "sent", weights, as they
            were when what is on its way was sent; "shared": the same on all replicas. Plain containers.
        """
        self.arrive()
        flights = [
            {
                "fragment": f.fragment,
                "sent_at": f.sent_at,
                "lands": f.lands,
                "keep": f.keep,
                "mean": _copied(f.mean),
                "sums": _copied(f.sums),
                "row_means": _copied(f.row_means),
            }
            for f in self._flights
        ]
        common = self._common
        return {
            "weights": _copied(self._weights),
            "rows": [_copied(flight.rows) for flight in self._flights],
            "sent": [_copied(flight.sent) for flight in self._flights],
            "shared": {
                "options": self._options.as_dict(),
                "begun": common is not None,
                "began": self._timetable.began,
                "taken": self.taken,
                "averaged_at": self.averaged_at,
                "even": dict(self._even),
                "common": {} if common is None else _copied(common.beyond_weights()),
                "momentum": {} if common is None else _copied(common.momentum()),
                "flights": flights,
            },
        }

    def fits(self, shared: Mapping[str, Any]) -> bool:
        """Whether a run with the same intervals and fragments wrote it, so that this one can go on within."""
        mine, saved = self._options.as_dict(), dict(shared["options"])
        return {**saved, "outer": None} == {**mine, "outer": None}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on with what `state_dict` returned, of another run too; the weights are the common ones at this moment.

        Within its interval where it `fits`; otherwise another begins after `step` steps, and what was on its way
        arrives now. Weights may be of other cuts: only own names are looked for.
        """
        shared = state["shared"]
        self.forget()
        if not shared["begun"]:
            return
        self._common = CommonWeights(self._weights, self._options.outer, self._replicas)
        self._common.go_on(shared["common"], shared["momentum"])
        for name, own in self._weights.items():
            own.copy_(state["weights"][name])
        self.taken, self.averaged_at = shared["taken"], shared["averaged_at"]
        within = self.fits(shared) and not state.get("recut", False)
        self._timetable.began = shared["began"] if self.fits(shared) else step
        # Another cut has the first replica's optimizer states on all replicas, which no row means belong to.
        nothing: list[dict[str, Tensor]] = [{} for _ in shared["flights"]]
        its_own = (state["rows"], state["sent"]) if within else (nothing, nothing)
        for flight, rows, sent in zip(shared["flights"], *its_own, strict=True):
            keep, moved = flight["keep"], self._here(flight["mean"])
            before = {} if keep is not None else self._here(sent) if within else self._common.before(moved)
            self._flights.append(
                _Flight(
                    fragment=flight["fragment"],
                    sent_at=flight["sent_at"],
                    lands=flight["lands"] if within else step,
                    keep=keep,
                    sent=before,
                    mean=moved,
                    # The rate of this run counts, not that of when it was sent.
                    sums=self._here(flight["sums"] if self._options.outer.lr is None else {}),
                    rows=self._here(rows),
                    row_means=self._here(flight["row_means"] if rows else {}),
                )
            )
        if not within:
            self._land(step)
        self._even = dict(shared["even"]) if within else {}  # of this cut's fragments

    def _here(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of this replica's own weights, on their devices."""
        weights = self._weights
        return {name: t.to(weights[name].device, copy=True) for name, t in tensors.items() if name in weights}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
