"""The exchange of compressed gradients between replicas and stages, on top of `pipecomp.allreduce`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.errors import ConfigError, require
from pipecomp.gradient_config import Gradients
from pipecomp.kernels import ops
from pipecomp.kernels.staging import Staging
from pipecomp.optim import QuantizedAdam


@dataclass(frozen=True, slots=True)
class TiedRanks:
    """The holders of a tied weight. ranks: global, in one group that averages it. stages: how many share it."""

    ranks: tuple[int, ...]
    stages: int


class GradientExchange:
    """Averages one rank's gradients over replicas, and sums those of tied weights over the stages that share them.

    Note: [Tied gradients] All stages and replicas that hold a tied weight average its gradient in one group, and draw
    the same random numbers. If each stage averaged with its own replicas, their buckets would hold other neighbours,
    the compression errors would differ, and the copies would drift apart. The sum over stages is the mean times their
    number.

    Args:
        options: Method and bucket size. If the method's optimizer exchanges (quantized_adam), only tied weights are
            summed here, over the stages of one replica.
        replicas: Global ranks of the replicas of `stage`.
        tied: Holders of its tied parameters, by name.
        stage: Index of this rank's stage. Stages draw different random numbers.
        seed: Of the run.
        timeout_s: How long an average waits for a rank.
        prefix: Of the groups' names.
    """

    def __init__(
        self,
        options: Gradients,
        replicas: list[int],
        tied: dict[str, TiedRanks],
        *,
        stage: int,
        seed: int,
        timeout_s: float,
        prefix: str = "",
    ) -> None:
        average_options = options.state_options()
        self._tied_ranks, self._prefix = tied, prefix

        def state(ranks: list[int] | tuple[int, ...], seed: int) -> State:
            return State(group=list(ranks), seed=seed, timeout_s=timeout_s, **average_options)

        alone = len(replicas) == 1 or options.exchanges_in_optimizer
        self._data = None if alone else state(replicas, ops.mix_seed(seed, stage))
        self._tied = {name: state(t.ranks, ops.mix_seed(seed, *name.encode())) for name, t in tied.items()}

    @property
    def averages_replicas(self) -> bool:
        """True if it needs all gradients, not only those of tied weights."""
        return self._data is not None

    def average(self, grads: dict[str, Tensor], loss_scale: float = 1.0) -> None:
        """Replace gradients, by parameter name, in place. NaN or Inf of any rank becomes NaN on all of its group."""
        for _, state in self.states():
            state.loss_scale = loss_scale
        self.submit_named(grads)()

    def submit_named(self, grads: dict[str, Tensor], *, label: str = "") -> Callable[[], None]:
        """Start an average in the background.

        Args:
            grads: By parameter name; must not change until the average is done.
            label: If only some parameters are given, a name for this subset, which must be the same every time.

        Returns:
            A function that waits for the average and writes it into `grads`.
        """
        pending = []
        for name, state in self._tied.items():
            if name in grads:
                g = grads[name]
                out = g if g.is_contiguous() else None
                pending.append((state.submit(g, "weight", out=out), g, self._tied_ranks[name].stages))
        rest = {name: g for name, g in grads.items() if name not in self._tied}
        finish_rest = None if self._data is None else self._data.submit_named(rest, label=label)

        def finish() -> None:
            for future, g, stages in pending:
                mean = future.wait()
                if g.data_ptr() != mean.data_ptr():
                    g.copy_(mean.view_as(g))
                if stages > 1:
                    g.mul_(stages)
            if finish_rest is not None:
                finish_rest()

        return finish

    def give_way(self, before_message: Callable[[], None]) -> None:
        """Call `before_message`, which may wait, before every background message. Set it before the first average."""
        for _, state in self.states():
            state.group.give_way = before_message

    def states(self) -> Iterator[tuple[str, State]]:
        """The state of each group, by the name under which it is reported and saved."""
        if self._data is not None:
            yield f"{self._prefix}data parallel", self._data
        for name, state in self._tied.items():
            yield f"{self._prefix}tied {name}", state


class ReplicaAdam(QuantizedAdam):
    """QuantizedAdam of one stage.

    Each rank saves its own error-feedback residuals beside DeepSpeed's checkpoint, which has one replica's state.

    Attributes:
        norm: Computes the norm over all stages from parameters and their gradients; set by GradientReduction.
    """

    norm: Callable[[list[Tensor], list[Tensor]], float]

    def _norm(self, parameters: list[Tensor], gradients: list[Tensor]) -> float:
        return self.norm(parameters, gradients)

    def momentum_state(self) -> State:
        """The exchange of the momentum, with its residuals."""
        return self._exchange.momenta

    def use_staging(self, staging: Staging) -> None:
        """Copy between device and host with `staging`."""
        self._exchange.use_staging(staging)

    def state_dict(self) -> dict[str, Any]:
        """The state without residuals."""
        state = super().state_dict()
        state["exchange"]["memories"] = None
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of torch's Adam, after which the variance warms up as long as needed.

        Raises:
            ConfigError: The state is of another optimizer.
        """
        if "exchange" not in state_dict:
            state = {}
            for number, saved in state_dict["state"].items():
                allowed = "'none' to continue with the states of another optimizer than Adam"
                adam = saved.keys() == {"step", "exp_avg", "exp_avg_sq"}
                require(adam, "gradients.method", "quantized_adam", allowed)
                state[number] = {**saved, "step": int(saved["step"]), "frozen_at": 0, "unit": 1.0}
            exchange: dict[str, Any] = {**self._exchange.settings, "frozen": [], "memories": None}
            state_dict = {**state_dict, "state": state, "exchange": exchange}
        super().load_state_dict(state_dict)


def save_residuals(states: Iterable[tuple[str, State]], folder: Path, rank: int) -> None:
    """Write the error-feedback residuals of a rank into a checkpoint, one file for each name in `states`."""
    for name, state in states:
        state.save(folder / _residuals_file(name, rank))


def load_residuals(states: Iterable[tuple[str, State]], folder: Path, rank: int, device: torch.device) -> None:
    """Load the files of `save_residuals`. Residuals start at zero if no rank of a group has a file.

    Raises:
        ConfigError: Only some ranks of a group have their file. Their random draws would differ.
    """
    for name, state in states:
        file = folder / _residuals_file(name, rank)
        exists = state.group.gather_numbers([float(file.is_file())])
        missing = [r for r, (there,) in zip(state.group.ranks, exists, strict=True) if not there]
        if not missing:
            state.load(file, device)
        elif len(missing) < len(exists):
            files = ", ".join(_residuals_file(name, r) for r in missing)
            raise ConfigError("load_dir", str(folder), f"a folder with {files} on the machines of these ranks")
        else:
            state.forget()


def _residuals_file(name: str, rank: int) -> str:
    return f"pipecomp-gradients-{name.replace(' ', '-')}-rank-{rank}.safetensors"
