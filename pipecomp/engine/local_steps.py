"""Local steps in the engine: each replica trains on its own and takes outer steps with the others.

In inner steps the gradients of tied weights are summed over the stages of one replica. In outer steps each stage
averages with the same stage of the other replicas, tied weights apart from the rest: all stages that hold one submit
the same values and draw the same random numbers, so that their copies stay equal bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipecomp.checkpoint.reshard import names_in_every_cut
from pipecomp.engine.reduction import ReplicaExchanges
from pipecomp.errors import ConfigError
from pipecomp.interfaces import StageContext
from pipecomp.local_steps.outer_steps import OuterSteps
from pipecomp.local_steps.row_statistics import SecondMoments
from pipecomp.stages.link.transport import Transport
from pipecomp.utils.files import atomic_write

MAX_WAIT_S = 0.125  # for one slice of an exchange, so that it also completes on a link that is never idle
_POLL_S = 0.002


class TrafficPriority:
    """Lets the packets of some transports go before the other messages of this process.

    Note: [Priority on a machine's link] Stages wait for packets, but not for averages of replicas that run in the
    background. The kernel cannot tell them apart, so the background thread asks here before every message.

    Attributes:
        waited_s: Seconds for which messages were held back, in total.

    Example:
        >>> exchange.give_way(TrafficPriority(transports).wait)
    """

    def __init__(self, transports: Collection[Transport]) -> None:
        self._transports = list(transports)
        self.waited_s = 0.0

    def wait(self) -> None:
        """Return when no packet is queued or being sent, or after `MAX_WAIT_S`."""
        began = now = time.monotonic()
        while now - began < MAX_WAIT_S and any(transport.sending() for transport in self._transports):
            time.sleep(_POLL_S)
            now = time.monotonic()
        self.waited_s += now - began


class LocalTraining:
    """Local steps of one rank.

    Args:
        context: Its weights are the same on all replicas at first.
        optimizer: Optimizer of the stage.
        exchanges: Exchanges of outer steps.

    Attributes:
        exchanges: The argument.
        outer: The outer steps.
        synchronous: Whether the current step, or the last one, averages gradients over replicas.
    """

    def __init__(self, context: StageContext, optimizer: torch.optim.Optimizer, exchanges: ReplicaExchanges) -> None:
        self._context, self._optimizer, self.exchanges = context, optimizer, exchanges
        stage, options = context.stage, context.settings.gradients.local
        assert options is not None
        names = names_in_every_cut(stage)
        weights = {names[own]: p for own, p in stage.named_parameters() if p.requires_grad}
        tied = set(stage.tied_parameters()) & set(weights)
        moments = SecondMoments(weights, lambda: optimizer.state) if options.second_moments == "rows" else None
        self.outer = OuterSteps(options, weights, tied, exchanges.outer, context.replicas, exchanges.rows, moments)
        self.synchronous = self.outer.synchronous
        self._overlaps = options.overlap > 0
        self._priority = TrafficPriority(())

    def give_way(self, transports: Collection[Transport]) -> None:
        """Let averages that overlap with inner steps wait for the packets of these transports."""
        if self._overlaps:
            self._priority = TrafficPriority(transports)
            for exchange in (self.exchanges.outer, self.exchanges.rows):
                if exchange is not None:
                    exchange.give_way(self._priority.wait)

    def begins_alone(self, step: int) -> bool:
        """Return True if inner step `step`, the next one, is local to the replica."""
        self.outer.start(step)
        return not self.outer.synchronous

    def begin_step(self, step: int) -> None:
        """Begin inner step `step`."""
        self.synchronous = not self.begins_alone(step)

    def stats(self) -> dict[str, Any]:
        """Progress between outer steps, and "gave_way_seconds", as JSON values."""
        return {**self.outer.stats(), "gave_way_seconds": self._priority.waited_s}

    # -- checkpoints

    def save(self, folder: Path) -> None:
        """Write this rank's own weights and optimizer states; DeepSpeed's files have the common weights."""
        for name, state in self.files().items():
            with atomic_write(folder / name) as file:
                torch.save(state, file)

    def files(self) -> dict[str, Any]:
        """Return the content of the file that `save` writes, by its name.

        The first replica's optimizer states are in DeepSpeed's files; it also has what all replicas share.
        """
        state, replica = self.outer.state_dict(), self._context.replica
        if replica > 0:
            del state["shared"]
            state["optimizer"] = self._optimizer.state_dict()
        return {_local_file(Path(), self._context.stage_id, replica).name: state}

    def load(
        self, folder: Path, pipeline: dict[str, Any] | None, step: int, *, same: bool, with_optimizer: bool
    ) -> None:
        """Continue from a checkpoint whose common weights and first replica's optimizer states have been loaded.

        Args:
            folder: The checkpoint.
            pipeline: Describes the pipeline that wrote it; None if it has no local steps.
            step: Inner steps so far.
            same: Whether that pipeline has the same cuts and as many replicas. Otherwise, or with other intervals, all
                replicas continue from the mean of the saved weights, with the optimizer states of the first one.
            with_optimizer: Whether optimizer states are loaded.
        """
        if pipeline is None:
            self.outer.forget()
            return
        stage, replica = self._context.stage_id, self._context.replica
        stages = [stage] if same else list(range(len(pipeline["cuts"]) - 1))
        shared = _merged([_open_local(folder, index, 0)["shared"] for index in stages])
        if same and self.outer.fits(shared):
            own = _open_local(folder, stage, replica)
            self.outer.load_state_dict({**own, "shared": shared}, step)
            if with_optimizer and replica > 0:
                # Copied: the optimizer keeps the tensors, and these are mapped from a file that may be overwritten.
                self._optimizer.load_state_dict(deepcopy(own["optimizer"]))
            return
        weights: dict[str, Tensor] = {}
        for index in stages:
            replicas = [_open_local(folder, index, r)["weights"] for r in range(pipeline["replicas"])]
            weights |= {name: _mean([each[name] for each in replicas]) for name in replicas[0]}
        self.outer.load_state_dict({"weights": weights, "shared": shared, "recut": not same}, step)


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The shared states of several stages as one; all stages take outer steps after the same inner steps."""
    flights = [dict(flight) for flight in parts[0]["flights"]]
    by_name = {key: dict(parts[0][key]) for key in ("common", "momentum")}
    for part in parts[1:]:
        for key, values in by_name.items():
            values.update(part[key])
        for mine, other in zip(flights, part["flights"], strict=True):
            for key in ("mean", "sums", "row_means"):
                mine[key] = {**mine[key], **other[key]}
    return {**parts[0], **by_name, "flights": flights}


def _mean(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / len(values)


def _open_local(folder: Path, stage: int, replica: int) -> dict[str, Any]:
    path = _local_file(folder, stage, replica)
    if not path.is_file():
        raise ConfigError("load_dir", str(folder), f"a folder with all replicas' files; no {path.name} on this machine")
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return state


def _local_file(folder: Path, stage: int, replica: int) -> Path:
    return folder / f"pipecomp-local-steps-stage-{stage}-replica-{replica}.pt"
