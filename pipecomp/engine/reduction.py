"""Gradient reduction of one rank: over replicas, over stages that share weights, and for the global norm.

`GradientReduction` takes the place of DeepSpeed's reduction; what is compressed goes through a `GradientExchange`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME, get_comm_dtype, has_comm_dtype
from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket
from torch import Tensor
from torch.nn import Parameter

from pipecomp.allreduce import State
from pipecomp.errors import ConfigError, require
from pipecomp.gradient_config import Gradients
from pipecomp.interfaces import EngineState, StageContext
from pipecomp.kernels import ops
from pipecomp.kernels.staging import Staging
from pipecomp.optim import QuantizedAdam
from pipecomp.stats import WEIGHTS, GroupStats


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
        seed: Seed of the run.
        timeout_s: How long an average waits for a rank.
        prefix: Prefix of the groups' names.

    Attributes:
        averages_replicas: True if it needs all gradients, not only those of tied weights.
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

        self.averages_replicas = len(replicas) > 1 and not options.exchanges_in_optimizer
        self._data = state(replicas, ops.mix_seed(seed, stage)) if self.averages_replicas else None
        self._tied = {name: state(t.ranks, ops.mix_seed(seed, *name.encode())) for name, t in tied.items()}

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


class ReplicaExchanges(NamedTuple):
    """The exchanges of a rank; None if one is not needed, or DeepSpeed does it.

    synchronous: averages gradients over replicas. With local steps: inner sums gradients of tied weights over the
    stages of one replica, outer averages weight changes over replicas, rows averages a few numbers of each row,
    uncompressed.
    """

    synchronous: GradientExchange | None = None
    inner: GradientExchange | None = None
    outer: GradientExchange | None = None
    rows: GradientExchange | None = None


class ReplicaAdam(QuantizedAdam):
    """QuantizedAdam of one stage.

    Each rank saves its own error-feedback residuals beside DeepSpeed's checkpoint, which has one replica's state.

    Attributes:
        norm: Computes the norm over all stages from parameters and their gradients; set by GradientReduction.
    """

    norm: Callable[[list[Tensor], list[Tensor]], float]

    def _norm(self, parameters: list[Tensor], gradients: list[Tensor]) -> float:
        return self.norm(parameters, gradients)

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
            exchange: dict[str, Any] = {**self.settings, "frozen": [], "memories": None}
            state_dict = {**state_dict, "state": state, "exchange": exchange}
        super().load_state_dict(state_dict)


class GradientReduction:
    """Reduces the gradients of one stage: sums tied weights over stages and averages replicas.

    Args:
        context: Context of the stage.
        engine: DeepSpeed's, after its __init__.
        tied_groups: Process group of each tied weight of this stage, by the weight's name in the plan.
        exchanges: Exchanges of compressed gradients.

    Attributes:
        synchronous: Whether this step averages over replicas.
    """

    def __init__(
        self,
        context: StageContext,
        engine: EngineState,
        tied_groups: dict[str, dist.ProcessGroup],
        exchanges: ReplicaExchanges,
    ) -> None:
        self._context, self._engine, self._tied_groups = context, engine, tied_groups
        self._exchanges, self.synchronous = exchanges, True
        exchange = exchanges.synchronous
        self._optimizer = cast(Any, engine.optimizer)  # DeepSpeed's optimizers have no common type
        self._adam = engine.optimizer if isinstance(engine.optimizer, ReplicaAdam) else None
        self._placeholder = getattr(engine.module, "placeholder", None)
        self._counters: dict[str, GroupStats] = {}
        stage = context.stage
        first_holder = {g.name: g.stages[0] == stage.index for g in context.plan.tied}
        self._tied = {name: p for name, p in stage.tied_parameters().items() if p.requires_grad}
        for name, parameter in self._tied.items():
            parameter.ds_pipe_replicated = not first_holder[name]  # type: ignore[attr-defined]
        if self._adam is not None:
            self._adam.norm = self.norm
        if engine.using_bf16_optimizer:
            groups = enumerate(self._optimizer.bf16_groups)
            self._in_bf16 = {id(p): (i, j) for i, group in groups for j, p in enumerate(group)}
        # Whether DeepSpeed's reduction hands gradients to the optimizer. The bf16 optimizer has them already.
        self._zero_reduces = engine.zero_optimization() and not engine.using_bf16_optimizer
        if self._zero_reduces:
            if exchange is not None:
                # DeepSpeed moves gradients to the ranks that update them; they are averaged before that.
                self._optimizer.reduce_scatter = False
                self._optimizer.gradient_reduction_w_predivide = lambda tensor, dtype: tensor
            self._keep_precision(list(self._tied.values() if exchange is None else stage.parameters()))

    def _keep_precision(self, parameters: list[Any]) -> None:
        """Prevent ZeRO from rounding these gradients, as it does with torch_autocast for linear layers.

        A tied weight is an embedding on another stage, where it would not be rounded, and the copies would drift apart.
        Compressed gradients are averaged already.
        """
        for parameter in filter(has_comm_dtype, parameters):
            delattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME)
            self._optimizer.ipg_buckets.setdefault(get_comm_dtype(parameter), IPGBucket())

    def _trained(self) -> Iterator[tuple[str, Parameter]]:
        parameters = self._engine.module.named_parameters()
        return ((name, p) for name, p in parameters if p.requires_grad and p is not self._placeholder)

    @property
    def _exchange(self) -> GradientExchange | None:
        """The exchange of this step's gradients."""
        return self._exchanges.synchronous if self.synchronous else self._exchanges.inner

    def sum_tied(self) -> None:
        """Sum the gradients of tied weights over the stages that hold them, unless an exchange does."""
        if self._exchange is not None:
            return
        for name, parameter in self._tied.items():
            grad, group = self._gradient(parameter), self._tied_groups[name]
            with self._counted(f"tied {name}", [grad], dist.get_world_size(group)):
                dist.all_reduce(grad, group=group)

    def average_replicas(self, stock: Callable[[], None]) -> None:
        """Average over replicas: compressed, or by `stock`, DeepSpeed's own reduction, counted."""
        if self._placeholder is not None:
            if self._engine.using_bf16_optimizer or self._zero_reduces:  # whose steps expect a gradient
                self._gradient(self._placeholder)
            if self._zero_reduces:
                stock()
            return
        replicas, tied = self._context.replicas, {id(p) for p in self._tied.values()}
        others = {n: p for n, p in self._trained() if id(p) not in tied}
        if self._exchange is not None:
            averaged = self._tied | (others if self._exchange.averages_replicas else {})
            scale = float(getattr(self._optimizer, "cur_scale", 1.0))
            self._exchange.average({name: self._gradient(p) for name, p in averaged.items()}, scale)
            if self._zero_reduces:
                stock()
        elif self.synchronous:
            shared = [*self._tied.values(), *others.values()] if replicas > 1 else []
            sent = sum(p.numel() * self._reduced_dtype(p).itemsize for p in shared)
            with self._counted("data parallel", [self._gradient(p) for p in shared], replicas, sent):
                stock()

    def count_weights(self) -> None:
        """After the optimizer's step: count the weights that replicas receive from those that updated them."""
        engine, n = self._engine, self._context.replicas
        sharded = engine.using_bf16_optimizer or engine.zero_optimization()
        size = sum(p.numel() * p.element_size() for _, p in self._trained())
        if size and sharded and n > 1 and engine.was_step_applied():
            counter = self._counters.setdefault(WEIGHTS, GroupStats())
            counter.calls += 1
            counter.bytes_raw += size * (n - 1) // n
            counter.bytes_sent += size * (n - 1) // n

    def _reduced_dtype(self, parameter: Any) -> torch.dtype:
        """The precision in which DeepSpeed averages a gradient; ZeRO with torch_autocast has one per parameter."""
        if self._zero_reduces:
            dtype: torch.dtype = self._optimizer.get_param_comm_dtype(parameter)
            return dtype
        return self._engine.communication_data_type

    def _gradient(self, parameter: Any) -> Tensor:
        """Return the gradient that the optimizer will use; half-precision training may keep it apart from `.grad`.

        Zeros, as in DeepSpeed, if this rank's samples gave none: another replica may have one, and all must exchange
        the same parameters.
        """
        optimizer = self._optimizer
        if self._engine.using_bf16_optimizer:
            group, place = self._in_bf16[id(parameter)]
            optimizer.fp32_groups_has_gradients[group][place] = True
            grad: Tensor = optimizer.fp32_groups_gradients[group][place]
            return grad
        zero = self._engine.zero_optimization()
        name = "grad_accum" if zero and optimizer.use_grad_accum_attribute else "grad"
        if getattr(parameter, name, None) is None:
            dtype = optimizer.gradient_accumulation_dtype if name == "grad_accum" else parameter.dtype
            setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))
        found: Tensor = getattr(parameter, name)
        return found

    @contextlib.contextmanager
    def _counted(self, group: str, grads: list[Tensor], ranks: int, sent: int | None = None) -> Iterator[None]:
        """Count the reduction in the body. sent: its bytes, if these are not the bytes of `grads`."""
        began = time.perf_counter()
        yield
        if ranks > 1:
            raw = sum(g.numel() * g.element_size() for g in grads)
            counter = self._counters.setdefault(group, GroupStats())
            counter.add(raw, raw if sent is None else sent, ranks, time.perf_counter() - began)

    def clip(self, max_norm: float) -> float:
        """Clip float32 gradients to a norm over all stages; returns the norm before that."""
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = self.norm(parameters, gradients)
        scale = max_norm / (norm + 1e-6)
        if scale < 1 and gradients:
            torch._foreach_mul_(gradients, scale)
        return norm

    def norm(self, parameters: list[Any], gradients: list[Tensor]) -> float:
        """L2 norm of the gradients of all stages, tied weights counted once; every stage must call this."""
        pairs = zip(parameters, gradients, strict=True)
        counted = [g for p, g in pairs if not getattr(p, "ds_pipe_replicated", False)]
        norms = (
            torch.stack(torch._foreach_norm(counted))
            if counted
            else torch.zeros(1, device=self._context.device, dtype=torch.float32)
        )
        square = norms.double().square().sum()
        dist.all_reduce(square, group=self._context.grid.get_pipe_parallel_group())
        return float(square.sqrt())

    def states(self) -> Iterator[tuple[str, State]]:
        """The states that exchange compressed gradients or momentum on this rank, by name."""
        for exchange in filter(None, self._exchanges):
            yield from exchange.states()
        if self._adam is not None:
            yield "momentum", self._adam.momenta

    def stats(self) -> dict[str, Any]:
        """Gradient traffic by group of ranks."""
        exchanged = {name: state.stats() for name, state in self.states()}
        if self._adam is not None:
            exchanged["momentum"] = self._adam.stats()
        groups = {name: asdict(stats) for name, stats in self._counters.items()}
        return groups | {name: {**s, "wait_seconds": s["seconds"]["wait"]} for name, s in exchanged.items()}

    def use_staging(self, staging: Staging) -> None:
        """Copy between device and host with `staging`."""
        for _, state in self.states():
            state.staging = staging
        if self._adam is not None:
            self._adam.use_staging(staging)

    def close(self, *, failed: bool = False) -> None:
        """End the exchanging threads, see `State.close`; may be called twice."""
        if self._adam is not None:
            self._adam.close(failed=failed)
        for _, state in self.states():
            state.close(failed=failed)


def save_residuals(states: Iterable[tuple[str, State]], folder: Path, number: int) -> None:
    """Write the error-feedback residuals of a rank into a checkpoint, one file for each name in `states`.

    number: number of the rank's state.
    """
    for name, state in states:
        state.save(folder / residuals_file(name, number))


def load_residuals(states: Iterable[tuple[str, State]], folder: Path, number: int, device: torch.device) -> None:
    """Load the files of `save_residuals`. Residuals start at zero if no rank of a group has a file.

    Raises:
        ConfigError: Only some ranks of a group have their file. Their random draws would differ.
    """
    for name, state in states:
        file = folder / residuals_file(name, number)
        exists = state.group.gather_numbers([float(file.is_file()), float(number)])
        missing = [int(other) for there, other in exists if not there]
        if not missing:
            state.load(file, device)
        elif len(missing) < len(exists):
            files = ", ".join(residuals_file(name, other) for other in missing)
            raise ConfigError("load_dir", str(folder), f"a folder with {files} on the machines of these ranks")
        else:
            state.forget()


def residuals_file(name: str, number: int) -> str:
    """Return the name of a rank's file of residuals in a checkpoint. number: of its state."""
    return f"pipecomp-gradients-{name.replace(' ', '-')}-rank-{number}.safetensors"
