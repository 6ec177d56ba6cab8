"""Outer steps of one replica, and the common weights of all replicas between outer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pipecomp.config.gradients import LocalSteps, Outer
from pipecomp.errors import ConfigError
from pipecomp.local_steps.row_statistics import SecondMoments, row_rates, row_sums

_HALF = (torch.float16, torch.bfloat16)


class CommonWeights:
    """The weights that all replicas share, updated by the outer optimizer.

    They start as a copy of the replica's weights, which are the same on all replicas then. They are float32 if weights
    are half precision, otherwise of the weights' dtype, and on their device.

    Args:
        weights: the replica's own weights, by name.
        outer: the outer optimizer.
        replicas: number of replicas.
    """

    def __init__(self, weights: Mapping[str, Tensor], outer: Outer, replicas: int) -> None:
        self._weights, self._averages, self._replicas = weights, outer.keeps_equal_weights, replicas
        self._common = {
            name: w.detach().to(torch.float32 if w.dtype in _HALF else w.dtype, copy=True)
            for name, w in weights.items()
        }
        lr, nesterov = 1.0 if outer.lr is None else outer.lr, outer.optimizer == "nesterov"
        parameters = [{"params": list(self._common.values())}]  # a stage that trains nothing has none
        self._sgd = torch.optim.SGD(parameters, lr=lr, momentum=outer.momentum, nesterov=nesterov)

    def outer_gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the difference of common and own weights, the outer gradient; new tensors."""
        gradients = {}
        for name in names:
            common, own = self._common[name], self._weights[name].detach()
            # Half-precision weights started from rounded common ones; the rounding is not a movement.
            gradients[name] = common - own if own.dtype == common.dtype else common.to(own.dtype) - own.to(common.dtype)
        return gradients

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        """Take an outer step.

        Note:
            If replicas have moved in different directions, their mean movement is shorter than each one's, by √R for
            pure noise. With `sums` each row of a weight is moved about 1.4 times as far as the replicas' own rows.

        Args:
            gradients: mean of the replicas' outer gradients, by name.
            sums: mean of the replicas' `row_sums`, by name; empty for a given outer learning rate.
        """
        for name, gradient in gradients.items():
            if name in sums:
                rates = row_rates(gradient, sums[name], self._replicas)
                shape = (-1, *(1,) * (gradient.dim() - 1)) if gradient.dim() else ()
                gradient = gradient * rates.to(gradient.dtype).view(shape)
            self._common[name].grad = gradient
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step_synchronous(self) -> None:
        """Take an outer step after a synchronous inner step, when all replicas have the same weights."""
        if self._averages:
            for name, common in self._common.items():
                common.copy_(self._weights[name])
        else:
            self.step(self.outer_gradients(self._common), {})
            self.copy_to_replica(self._common)

    @torch.no_grad()
    def copy_to_replica(self, names: Iterable[str], keep: float = 0.0) -> None:
        """Set the replica's weights to the common ones, mixed with the share `keep` of its own."""
        for name in names:
            own, common = self._weights[name], self._common[name]
            if keep:
                common = torch.lerp(common, own.to(common.dtype), keep)
            own.copy_(common)

    @torch.no_grad()
    def hand_out_with_progress(self, before: Mapping[str, Tensor]) -> None:
        """Set the replica's weights to the common ones plus its own progress since `before`."""
        for name, then in before.items():
            own = self._weights[name]
            own.copy_(self._common[name] + (own - then))

    def before(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of the replicas' weights, given their mean outer gradients; new tensors."""
        return {name: self._common[name] - gradient for name, gradient in gradients.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the replica's weights by the common ones during the body."""
        own = {name: w.data for name, w in self._weights.items()}
        for name, w in self._weights.items():
            w.data = self._common[name].to(w.dtype)
        try:
            yield
        finally:
            for name, w in self._weights.items():
                w.data = own[name]

    def momentum(self) -> dict[str, Tensor]:
        """Return the outer optimizer's momentum, by name, of weights with an outer step."""
        buffers = {name: self._sgd.state[common].get("momentum_buffer") for name, common in self._common.items()}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def full_precision(self) -> dict[str, Tensor]:
        """Return the common weights that a half-precision file of the model cannot represent."""
        return {name: common for name, common in self._common.items() if self._weights[name].dtype != common.dtype}

    @torch.no_grad()
    def load(self, full_precision: Mapping[str, Tensor], momentum: Mapping[str, Tensor]) -> None:
        """Restore, before the first step, the return values of `full_precision` and `momentum`."""
        for name, common in self._common.items():
            if name in full_precision:
                common.copy_(full_precision[name])
            if name in momentum:
                self._sgd.state[common]["momentum_buffer"] = momentum[name].to(common, copy=True)


class Timetable:
    """A sequence of intervals of inner steps.

    In an interval of h steps, fragment k of F is sent after step ⌈(k + 1)·h / F⌉, the last one after the last step.
    Intervals only grow, so a fragment is sent at most every h steps. All ranks count the same steps, and so agree
    without communication.

    Attributes:
        began: step after which the current interval began.
    """

    def __init__(self, options: LocalSteps, began: int = 0) -> None:
        self._options, self.began = options, began

    @property
    def length(self) -> int:
        """Steps of the current interval."""
        return self._options.interval(self.began)

    @property
    def overlap(self) -> int:
        """Steps while a fragment is averaged, fewer than an interval, so that it arrives before it is sent again."""
        return min(self._options.overlap, self.length - 1)

    def due(self, step: int) -> list[int]:
        """Return the fragments to send after `step` steps of the run."""
        fragments, length = self._options.fragments, self.length
        return [k for k in range(fragments) if -(-(k + 1) * length // fragments) == step - self.began]

    def finish_step(self, step: int) -> None:
        """Begin the next interval if the current one ends with `step`."""
        if step - self.began >= self.length:
            self.began = step


def fragments_of(weights: Mapping[str, Tensor], tied: Set[str], count: int) -> list[list[str]]:
    """Divide weights, in order, into fragments of about equal size with at least one weight each.

    Tied weights are all in the first fragment: every stage that shares them must average them after the same step.

    Args:
        weights: by name.
        tied: names of those that other stages share.
        count: F.

    Raises:
        ConfigError: for more fragments than weights.

    Example:
        >>> fragments_of({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(4)}, set(), 2)
        [['a', 'b'], ['c']]
    """
    if not weights:  # of a stage that trains nothing
        return [[] for _ in range(count)]
    order = [name for name in weights if name in tied] + [name for name in weights if name not in tied]
    most = len(order) - max(0, len(tied & set(order)) - 1)
    if count > most:
        hint = "Each fragment needs a trained weight of the stage; tied weights count as one."
        raise ConfigError("gradients.fragments", count, f"at most {most}", hint)
    total, before = sum(weights[name].numel() for name in order), 0
    fragments: list[list[str]] = [[] for _ in range(count)]
    for place, name in enumerate(order):
        middle = before + weights[name].numel() / 2
        before += weights[name].numel()
        target = 0 if name in tied else int(middle * count / max(1, total))
        filled = next((k for k in range(count) if not fragments[k]), count)  # the first empty fragment
        last = count - (len(order) - place)  # leaves enough weights for the remaining fragments
        fragments[min(max(target, last), filled, count - 1)].append(name)
    return fragments


class ReplicaAverages(Protocol):
    """Averages named tensors over replicas."""

    def submit_named(self, tensors: dict[str, Tensor], *, label: str = "") -> Callable[[], None]:
        """Start to replace tensors by their means over replicas; the returned function waits until it is done.

        label: identifies this set of tensors.
        """


@dataclass(kw_only=True, slots=True)
class _FragmentAverage:
    """A running average of a fragment.

    Attributes:
        fragment: its number.
        sent_at: step after which it was sent.
        lands: step after which its result is applied.
        keep: share of its own weights that the replica keeps then; None to keep its progress since `sent`.
        sent: the replica's weights when it was sent, if `keep` is None.
        mean: mean of the replicas' outer gradients.
        sums: mean of the replicas' `row_sums`.
        rows: this replica's row means of second moments.
        row_means: mean of all replicas' `rows`.
        waits: functions that wait for the averages.
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
        """Wait for the averages."""
        while self.waits:
            self.waits.pop(0)()


class OuterSteps:
    """Averages a replica's weights with those of the others after H inner steps (arXiv:2311.08105, Algorithm 1).

    Note: [Synchronous intervals]
        In an interval of one step, gradients are averaged before the inner optimizer's step, as in plain data
        parallelism. Replicas and their optimizer states then stay equal, and the outer step needs no exchange. So H = 1
        with an outer SGD of rate 1 is plain averaging, bit for bit.

    Args:
        options: H, the outer optimizer, fragments and overlap.
        weights: the replica's own, by name; the same on all replicas at first.
        tied: names of those that other stages share.
        averages: averages over replicas.
        replicas: number of replicas.
        exact: averages a few numbers of each row, uncompressed; None if not needed, see `LocalSteps.shares_rows`.
        moments: second moments whose row means replicas share; None if each keeps its own.

    Attributes:
        taken: outer steps so far, each of one fragment, or of all weights after a synchronous inner step.
        averaged_at: inner steps of the run at the last change of the common weights.

    Raises:
        ConfigError: for more fragments than weights.
    """

    def __init__(
        self,
        options: LocalSteps,
        weights: Mapping[str, Tensor],
        tied: Set[str],
        averages: ReplicaAverages | None,
        replicas: int,
        exact: ReplicaAverages | None = None,
        moments: SecondMoments | None = None,
    ) -> None:
        weights = {name: w for name, w in weights.items() if w.numel()}  # empty rows have no means
        self._exact, self._moments = exact, moments
        self._options, self._weights, self._averages, self._replicas = options, weights, averages, replicas
        self._fragments = fragments_of(weights, tied, options.fragments)
        self._timetable = Timetable(options)
        self._common: CommonWeights | None = None
        self._running: list[_FragmentAverage] = []
        self.taken, self.averaged_at = 0, 0
        self._even: dict[int, int] = {}  # by fragment, the last step after which all replicas had the same weights

    @property
    def synchronous(self) -> bool:
        """True if the next step averages gradients, so that all replicas have the same weights."""
        return self._timetable.length == 1

    def start(self, step: int) -> None:
        """Begin after `step` steps of the run, unless begun already, with weights that are the same on all replicas."""
        if self._common is None:
            self._common = CommonWeights(self._weights, self._options.outer, self._replicas)
            self._timetable.began = self.averaged_at = step

    def forget(self) -> None:
        """Restart with the next step, after weights were loaded that are the same on all replicas."""
        self._apply_due(None)
        self._common, self._even = None, {}

    def after_step(self, step: int) -> None:
        """Send and apply the fragments due after `step` inner steps; called by every replica after each step."""
        assert self._common is not None, "call start before"
        if self.synchronous:
            self._common.step_synchronous()
            self._even = dict.fromkeys(range(len(self._fragments)), step)
            self.taken, self.averaged_at = self.taken + 1, step
        else:
            self._apply_due(step)
            for fragment in self._timetable.due(step):
                self._send(fragment, step, overlap=self._timetable.overlap)
            self._apply_due(step)
        self._timetable.finish_step(step)

    def synchronize(self, step: int) -> None:
        """Average all differences after `step` inner steps, so that all replicas have the same weights.

        Called by every replica; the next interval begins. A fragment sent after this very step is not sent again: there
        is no movement for another outer step, only momentum.
        """
        if self._common is None or self.synchronous:
            return
        for flight in self._running:
            flight.lands = step
            if flight.sent_at == step:
                flight.keep = 0.0
        self._apply_due(step)
        for fragment in range(len(self._fragments)):
            if self._even.get(fragment) != step:
                self._send(fragment, step, overlap=0)
        self._apply_due(step)
        self._timetable.began = step

    def _send(self, fragment: int, step: int, *, overlap: int) -> None:
        assert self._common is not None
        assert self._averages is not None
        names = self._fragments[fragment]
        moved = self._common.outer_gradients(names)
        label = f"fragment-{fragment}-" if len(self._fragments) > 1 else ""
        sums = {}
        if self._options.outer.lr is None:
            sums = {name: row_sums(own, step) for name, own in moved.items()}
        rows = {} if self._moments is None else self._moments.rows(names)
        means = {name: own.clone() for name, own in rows.items()}
        waits = [self._averages.submit_named(moved, label=label)]
        for kind, few in (("sums-", sums), ("moments-", means)):
            if few:
                assert self._exact is not None, "required by LocalSteps.shares_rows"
                waits.append(self._exact.submit_named(few, label=label + kind))
        keep = self._options.mixing if overlap else 0.0
        sent = {name: self._weights[name].detach().clone() for name in names} if keep is None else {}
        self._running.append(
            _FragmentAverage(
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

    def _apply_due(self, step: int | None) -> None:
        """Apply the fragments due after `step` steps; with None discard all."""
        for flight in list(self._running):
            if step is not None and flight.lands > step:
                continue
            flight.arrive()
            self._running.remove(flight)
            if step is not None and self._common is not None:
                self._common.step(flight.mean, flight.sums)
                if flight.keep is None:
                    self._common.hand_out_with_progress(flight.sent)
                else:
                    self._common.copy_to_replica(flight.mean, flight.keep)
                    if not flight.keep:
                        self._even[flight.fragment] = step
                if self._moments is not None:
                    self._moments.scale_to(flight.rows, flight.row_means)
                self.taken += 1
                self.averaged_at = step

    def arrive(self) -> None:
        """Wait for running averages, which are still applied when due."""
        for flight in self._running:
            flight.arrive()

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Replace the replica's weights by the common ones during the body, for evaluation and saving."""
        if self._common is None:
            yield
            return
        with self._common.in_place():
            yield

    def stats(self) -> dict[str, Any]:
        """Return the position between outer steps, as JSON values."""
        return {
            "interval": self._timetable.length,
            "began": self._timetable.began,
            "outer_steps": self.taken,
            "averaged_at": self.averaged_at,
            "in_flight": [flight.fragment for flight in self._running],
        }

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state beside the common weights, after running averages are done.

        Returns:
            Plain containers and CPU tensors. "weights": the replica's own, by name; "rows" and "sent": row means of
            second moments and weights when each running fragment was sent; "shared": the same on all replicas.
        """
        self.arrive()
        flights = [
            {
                "fragment": f.fragment,
                "sent_at": f.sent_at,
                "lands": f.lands,
                "keep": f.keep,
                "mean": _copy_to_cpu(f.mean),
                "sums": _copy_to_cpu(f.sums),
                "row_means": _copy_to_cpu(f.row_means),
            }
            for f in self._running
        ]
        common = self._common
        return {
            "weights": _copy_to_cpu(self._weights),
            "rows": [_copy_to_cpu(flight.rows) for flight in self._running],
            "sent": [_copy_to_cpu(flight.sent) for flight in self._running],
            "shared": {
                "options": self._options.as_dict(),
                "begun": common is not None,
                "began": self._timetable.began,
                "taken": self.taken,
                "averaged_at": self.averaged_at,
                "even": dict(self._even),
                "common": {} if common is None else _copy_to_cpu(common.full_precision()),
                "momentum": {} if common is None else _copy_to_cpu(common.momentum()),
                "flights": flights,
            },
        }

    def fits(self, shared: Mapping[str, Any]) -> bool:
        """Return whether a state has the same intervals and fragments, so that an interval can be continued."""
        own, saved = self._options.as_dict(), dict(shared["options"])
        return {**saved, "outer": None} == {**own, "outer": None}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the return value of `state_dict`, of other cuts too; the weights must be the common ones.

        If the state `fits`, its interval is continued. Otherwise a new one begins after `step` steps, and running
        fragments are applied now. Only this replica's names are read.
        """
        shared = state["shared"]
        self.forget()
        if not shared["begun"]:
            return
        self._common = CommonWeights(self._weights, self._options.outer, self._replicas)
        self._common.load(shared["common"], shared["momentum"])
        for name, own in self._weights.items():
            own.copy_(state["weights"][name])
        self.taken, self.averaged_at = shared["taken"], shared["averaged_at"]
        within = self.fits(shared) and not state.get("recut", False)
        self._timetable.began = shared["began"] if self.fits(shared) else step
        # With other cuts all replicas have the first one's optimizer states, which saved row means do not belong to.
        nothing: list[dict[str, Tensor]] = [{} for _ in shared["flights"]]
        its_own = (state["rows"], state["sent"]) if within else (nothing, nothing)
        for flight, rows, sent in zip(shared["flights"], *its_own, strict=True):
            keep, moved = flight["keep"], self._local_tensors(flight["mean"])
            before = {} if keep is not None else self._local_tensors(sent) if within else self._common.before(moved)
            self._running.append(
                _FragmentAverage(
                    fragment=flight["fragment"],
                    sent_at=flight["sent_at"],
                    lands=flight["lands"] if within else step,
                    keep=keep,
                    sent=before,
                    mean=moved,
                    # The learning rate of this run applies, not that of the saved one.
                    sums=self._local_tensors(flight["sums"] if self._options.outer.lr is None else {}),
                    rows=self._local_tensors(rows),
                    row_means=self._local_tensors(flight["row_means"] if rows else {}),
                )
            )
        if not within:
            self._apply_due(step)
        self._even = dict(shared["even"]) if within else {}  # numbered by this cut's fragments

    def _local_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of this replica's weights, on their devices."""
        weights = self._weights
        return {name: t.to(weights[name].device, copy=True) for name, t in tensors.items() if name in weights}


def _copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
