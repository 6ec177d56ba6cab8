"""Local steps in the engine: each replica trains by itself, and takes outer steps with the others.

Tied weights are summed over the stages of one replica in inner steps. In outer steps each stage averages its own part
with the same stage of other replicas, tied weights apart from the rest: every stage that holds one puts in the same
values and draws the same random numbers, and so comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.checkpoint.reshard_read import names_in_every_cut
from pipecomp.engine.gradient_exchange import GradientExchange
from pipecomp.engine.precedence import Precedence
from pipecomp.errors import ConfigError
from pipecomp.local_steps.outer_steps import OuterSteps
from pipecomp.local_steps.second_moments import SecondMoments
from pipecomp.stages.link.transport import Transport
from pipecomp.utils.files import atomic_write


class LocalExchanges(NamedTuple):
    """What a rank exchanges with others; None where there is nothing of the kind, or DeepSpeed does it.

    inner: sums gradients of tied weights over one replica's stages. outer: averages over replicas. rows: averages a few
    numbers of each row over replicas, exactly.
    """

    inner: GradientExchange | None = None
    outer: GradientExchange | None = None
    rows: GradientExchange | None = None


class LocalTraining:
    """Local steps of one rank. engine: complete; its weights are the same on all replicas.

    Attributes:
        exchanges: What inner and outer steps exchange.
        outer: The outer steps.
        synchronous: Whether the present step, or the last one, averages gradients over replicas.
    """

    def __init__(self, engine: Any, exchanges: LocalExchanges) -> None:
        self._engine, self.exchanges = engine, exchanges
        names = names_in_every_cut(engine.stage)
        weights = {names[own]: p for own, p in engine.stage.named_parameters() if p.requires_grad}
        options = engine.pipecomp_config.gradients.local
        tied = set(engine.stage.tied_parameters()) & set(weights)
        moments = SecondMoments(weights, lambda: engine.optimizer.state) if options.second_moments == "rows" else None
        replicas = engine.grid.data_parallel_size
        self.outer = OuterSteps(options, weights, tied, exchanges.outer, replicas, exchanges.rows, moments)
        self.synchronous = self.outer.synchronous
        self._precedence = Precedence(())

    def give_way(self, transports: Collection[Transport]) -> None:
        """Let what is averaged while inner steps go on wait for the packets of these transports."""
        if self._engine.pipecomp_config.gradients.local.overlap > 0:
            self._precedence = Precedence(transports)
            for exchange in (self.exchanges.outer, self.exchanges.rows):
                if exchange is not None:
                    exchange.give_way(self._precedence.wait)

    def begin_step(self) -> None:
        """Begin an inner step."""
        self.synchronous = not self.begins_alone()

    def begins_alone(self) -> bool:
        """Whether the step that begins next is the replica's own."""
        self.outer.start(self._engine.global_steps)
        return not self.outer.synchronous

    def end_step(self) -> None:
        """Take the outer step, if it is time to."""
        with self._engine.reporting.part("reduce", None):
            self.outer.after_step(self._engine.global_steps)

    @contextmanager
    def own_loss(self) -> Iterator[None]:
        """Let DeepSpeed average the loss inside over this replica alone, without waiting for others, in local steps."""
        before = self._engine.is_data_parallel
        self._engine.is_data_parallel = before and self.synchronous
        try:
            yield
        finally:
            self._engine.is_data_parallel = before

    def states(self) -> Iterator[tuple[str, State]]:
        """What exchanges on this rank, with its residuals, by name."""
        for exchange in self.exchanges:
            if exchange is not None:
                yield from exchange.states()

    def stats(self) -> dict[str, Any]:
        """Where the run is between outer steps, and for how long they gave way, as JSON values."""
        return {**self.outer.stats(), "gave_way_seconds": self._precedence.waited_s}

    # -- checkpoints

    def save(self, folder: Path) -> None:
        """Write this rank's own weights and optimizer states beside DeepSpeed's files, which have the common weights.

        The first replica's optimizer states are in DeepSpeed's; it writes what all replicas share.
        """
        engine, state = self._engine, self.outer.state_dict()
        replica = engine.grid.data_parallel_id
        if replica > 0:
            del state["shared"]
            state["optimizer"] = engine.optimizer.state_dict()
        with atomic_write(_file(folder, engine.stage_id, replica)) as file:
            torch.save(state, file)

    def load(self, folder: Path, pipeline: dict[str, Any] | None, *, same: bool, with_optimizer: bool) -> None:
        """Go on as the checkpoint, whose common weights and first replica's optimizer states have been loaded.

        pipeline: what wrote it; None if it has no local steps. same: whether that was cut as this one, with as many
        replicas. Another one, or one with other intervals, goes on from the mean of the replicas' own weights, all with
        the first one's optimizer states.
        """
        engine = self._engine
        if pipeline is None:
            self.outer.forget()
            return
        stage, replica = engine.stage_id, engine.grid.data_parallel_id
        stages = [stage] if same else list(range(len(pipeline["cuts"]) - 1))
        first = {index: _open(folder, index, 0) for index in stages}
        shared = _merged([first[index]["shared"] for index in stages])
        if same and self.outer.fits(shared):
            own = _open(folder, stage, replica)
            self.outer.load_state_dict({**own, "shared": shared}, engine.global_steps)
            if with_optimizer and replica > 0:
                # Copied: the optimizer keeps what it is given, and these lie in the file, which may be written again.
                engine.optimizer.load_state_dict(deepcopy(own["optimizer"]))
            return
        weights: dict[str, Tensor] = {}
        for index in stages:
            replicas = [_open(folder, index, r)["weights"] for r in range(pipeline["replicas"])]
            weights |= {name: _mean([each[name] for each in replicas]) for name in replicas[0]}
        self.outer.load_state_dict({"weights": weights, "shared": shared, "recut": not same}, engine.global_steps)


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What replicas share, of several stages together: these take outer steps after the same inner steps."""
    flights = [dict(flight) for flight in parts[0]["flights"]]
    by_name = {key: dict(parts[0][key]) for key in ("common", "momentum")}
    for part in parts[1:]:
        for key, found in by_name.items():
            found.update(part[key])
        for mine, other in zip(flights, part["flights"], strict=True):
            for key in ("mean", "sums", "row_means"):
                mine[key] = {**mine[key], **other[key]}
    return {**parts[0], **by_name, "flights": flights}


def _mean(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / len(values)


def _open(folder: Path, stage: int, replica: int) -> dict[str, Any]:
    path = _file(folder, stage, replica)
    if not path.is_file():
        raise ConfigError("load_dir", str(folder), f"a folder with all replicas' files on this machine; no {path.name}")
    found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return found


def _file(folder: Path, stage: int, replica: int) -> Path:
    return folder / f"pipecomp-local-steps-stage-{stage}-replica-{replica}.pt"
