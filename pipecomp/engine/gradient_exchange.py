"""What replicas exchange in a step of the pipeline engine: gradients, averaged through `pipecomp.allreduce`.

Weights that are tied across stages are averaged over all stages and replicas that hold them, in one group: averaged
apart by each stage's replicas, whose buckets differ, they would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipecomp.allreduce import State, saving
from pipecomp.allreduce.named import submit_named
from pipecomp.errors import ConfigError, require
from pipecomp.gradient_config import Gradients
from pipecomp.kernels import ops
from pipecomp.kernels.staging import Staging
from pipecomp.optim import QuantizedAdam
from pipecomp.stages.partition.planning import SplitPlan


@dataclass(frozen=True, slots=True)
class TiedRanks:
    """Who holds a tied weight: `ranks` of the group that averages it, `stages` that share it."""

    ranks: tuple[int, ...]
    stages: int


def check_gradients(options: Gradients, ds_config: dict[str, Any], plan: SplitPlan, replicas: int) -> None:
    """ConfigError where compressing gradients would have no effect, or DeepSpeed would reduce past it."""
    if options.local is not None:
        _check_local(options, ds_config, replicas)
    if options.method == "none":
        return
    key = "gradients.method"
    if replicas == 1 and (options.exchanges_in_optimizer or not plan.trained_ties):
        raise ConfigError(key, options.method, "'none' with one replica: no gradients are exchanged")
    zero = ds_config.get("zero_optimization", {})
    if zero.get("stage", 0) >= 1:
        for name, wanted in (("overlap_comm", False), ("contiguous_gradients", True)):
            if zero.get(name, wanted) is not wanted:
                raise ConfigError(f"zero_optimization.{name}", zero[name], f"{wanted} with compressed gradients")
    if ds_config.get("communication_data_type") is not None:
        got = ds_config["communication_data_type"]
        raise ConfigError("communication_data_type", got, f"nothing with gradients.method {options.method!r}")
    if options.exchanges_in_optimizer:
        half = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")]
        if half or zero.get("stage", 0) >= 1:
            raise ConfigError(key, options.method, "float32 training without ZeRO, whose optimizers are cut by ranks")
        kind = ds_config.get("optimizer", {}).get("type", "")
        if kind.lower() not in ("adam", "adamw"):
            raise ConfigError("optimizer.type", kind, f"Adam or AdamW with gradients.method {options.method!r}")


def _check_local(options: Gradients, ds_config: dict[str, Any], replicas: int) -> None:
    key, steps = "gradients.local_steps", options.local_steps
    require(replicas > 1, key, steps, "null with one replica: there is nothing to average")
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    require(stage == 0, "zero_optimization.stage", stage, f"0 with {key}: replicas cannot share optimizer states")
    for name in ("bf16", "fp16"):
        enabled = ds_config.get(name, {}).get("enabled", False)
        allowed = f"false with {key}, as DeepSpeed's optimizers for it share their states among replicas"
        require(not enabled, f"{name}.enabled", enabled, allowed)


class GradientExchange:
    """Averages one rank's gradients over replicas, and sums those of tied weights over the stages that share them.

    replicas: global ranks of the replicas of `stage`. tied: of its tied parameters, by name. With a method whose
    optimizer exchanges (quantized_adam) only tied weights are summed here, over the stages of one replica. seed: of the
    run; stages draw apart from each other, and all who hold a tied weight alike. prefix: of the groups' names.
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
        given = options.of_average()
        self._tied_ranks, self._prefix = tied, prefix

        def state(ranks: list[int] | tuple[int, ...], seed: int) -> State:
            return State(group=list(ranks), seed=seed, timeout_s=timeout_s, **given)

        alone = len(replicas) == 1 or options.exchanges_in_optimizer
        self._data = None if alone else state(replicas, ops.mix_seed(seed, stage))
        self._tied = {name: state(t.ranks, ops.mix_seed(seed, *name.encode())) for name, t in tied.items()}

    @property
    def averages_replicas(self) -> bool:
        """Whether it wants all gradients, not those of tied weights alone."""
        return self._data is not None

    def average(self, grads: dict[str, Tensor], loss_scale: float = 1.0) -> None:
        """Replace gradients, by parameter name, in place. NaN or Inf of any rank becomes NaN on all of its group."""
        for _, state in self.states():
            state.loss_scale = loss_scale
        self.submit(grads)()

    def submit(self, grads: dict[str, Tensor], *, label: str = "") -> Callable[[], None]:
        """Start what `average` does; it is done when what is returned has been called. `grads` must not change before.

        label: where only some parameters are given, names these, the same ones every time.
        """
        waiting = []
        for name, state in self._tied.items():
            if name in grads:
                g = grads[name]
                out = g if g.is_contiguous() else None
                waiting.append((state.submit(g, "weight", out=out), g, self._tied_ranks[name].stages))
        rest = {name: g for name, g in grads.items() if name not in self._tied}
        finish_rest = None if self._data is None else submit_named(self._data, rest, label=label)

        def finish() -> None:
            for future, g, stages in waiting:
                mean = future.wait()
                if g.data_ptr() != mean.data_ptr():
                    g.copy_(mean.view_as(g))
                if stages > 1:
                    g.mul_(stages)
            if finish_rest is not None:
                finish_rest()

        return finish

    def give_way(self, before_message: Callable[[], None]) -> None:
        """Call this before messages are sent, in the background; it may wait. To be set before the first exchange."""
        for _, state in self.states():
            state.group.give_way = before_message

    def states(self) -> Iterator[tuple[str, State]]:
        """Every group's state by the name under which it is reported and saved."""
        if self._data is not None:
            yield f"{self._prefix}data parallel", self._data
        for name, state in self._tied.items():
            yield f"{self._prefix}tied {name}", state


class ReplicaAdam(QuantizedAdam):
    """QuantizedAdam of one stage. norm: of gradients over all stages, by parameters and their gradients.

    The engine saves its error-feedback residuals, each rank its own: DeepSpeed saves one replica's state.
    """

    norm: Callable[[list[Tensor], list[Tensor]], float]

    def _norm(self, parameters: list[Tensor], gradients: list[Tensor]) -> float:
        return self.norm(parameters, gradients)

    def momentum_state(self) -> State:
        """What exchanges the momentum, with its memories."""
        return self._exchange.momenta

    def use_staging(self, staging: Staging) -> None:
        """Copy between device and host with this one."""
        self._exchange.use_staging(staging)

    def state_dict(self) -> dict[str, Any]:
        """Without memories."""
        state = super().state_dict()
        state["exchange"]["memories"] = None
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of torch's Adam: its next steps warm up the variance, as long as they must.

        Raises ConfigError for a state of another optimizer.
        """
        if "exchange" not in state_dict:
            state = {}
            for number, kept in state_dict["state"].items():
                allowed = "'none' to go on with the states of another optimizer than Adam"
                require(kept.keys() == {"step", "exp_avg", "exp_avg_sq"}, "gradients.method", "quantized_adam", allowed)
                state[number] = {**kept, "step": int(kept["step"]), "frozen_at": 0, "unit": 1.0}
            exchange: dict[str, Any] = {**self._exchange.settings, "frozen": [], "memories": None}
            state_dict = {**state_dict, "state": state, "exchange": exchange}
        super().load_state_dict(state_dict)


def save_residuals(states: Iterable[tuple[str, State]], folder: Path, rank: int) -> None:
    """Write a rank's error-feedback residuals, by name, to files of its own in a checkpoint's folder."""
    for name, state in states:
        saving.save(state, folder / _file(name, rank))


def load_residuals(states: Iterable[tuple[str, State]], folder: Path, rank: int, device: torch.device) -> None:
    """Go on with what `save_residuals` wrote; they start empty where the checkpoint was made without.

    Raises ConfigError if only some of a group's ranks have theirs: their random draws would not be the same any more.
    """
    for name, state in states:
        file = folder / _file(name, rank)
        found = state.group.gather_numbers([float(file.is_file())])
        if all(there for (there,) in found):
            saving.load(state, file, device)
        elif any(there for (there,) in found):
            lacking = [r for r, (there,) in zip(state.group.ranks, found, strict=True) if not there]
            files = ", ".join(_file(name, r) for r in lacking)
            raise ConfigError("load_dir", str(folder), f"a folder that also has {files} on the machines of these ranks")
        else:
            state.forget()


def _file(name: str, rank: int) -> str:
    return f"pipecomp-gradients-{name.replace(' ', '-')}-rank-{rank}.safetensors"
