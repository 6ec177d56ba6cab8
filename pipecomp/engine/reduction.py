"""How a rank reduces its gradients: over replicas, over stages that share weights, and for the global norm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME, get_comm_dtype, has_comm_dtype
from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.engine.gradient_exchange import GradientExchange, ReplicaAdam
from pipecomp.engine.local_steps import LocalTraining
from pipecomp.kernels.staging import Staging
from pipecomp.stats import WEIGHTS, GroupStats


class GradientReduction:
    """Gradients of one rank's stage: tied weights and the norm right over all stages, replicas' compressed.

    engine: DeepSpeed's, complete. tied_groups: process group of each tied weight that this stage holds, by the name in
    the plan. exchange: averages gradients where they are compressed; otherwise DeepSpeed does. local: None unless
    replicas take local steps, in which their gradients stay their own.
    """

    def __init__(
        self,
        engine: Any,
        tied_groups: dict[str, Any],
        exchange: GradientExchange | None,
        local: LocalTraining | None = None,
    ) -> None:
        self._engine, self._tied_groups, self._over_replicas, self._local = engine, tied_groups, exchange, local
        self._counters: dict[str, GroupStats] = {}
        stage = engine.stage
        first_holder = {g.name: g.stages[0] == stage.index for g in engine.plan.tied}
        self._tied = {name: p for name, p in stage.tied_parameters().items() if p.requires_grad}
        for name, parameter in self._tied.items():
            parameter.ds_pipe_replicated = not first_holder[name]
        if isinstance(engine.optimizer, ReplicaAdam):
            engine.optimizer.norm = self.norm
        if engine.using_bf16_optimizer:
            groups = enumerate(engine.optimizer.bf16_groups)
            self._in_bf16 = {id(p): (i, j) for i, group in groups for j, p in enumerate(group)}
        if exchange is not None and self._zero_reduces:
            # DeepSpeed moves gradients to the ranks that update them; they are averaged before that.
            engine.optimizer.reduce_scatter = False
            engine.optimizer.gradient_reduction_w_predivide = lambda tensor, dtype: tensor
        if self._zero_reduces:
            own = self._tied.values() if exchange is None else stage.parameters()
            self._reduce_as_they_are([p for p in own if has_comm_dtype(p)])

    def _reduce_as_they_are(self, parameters: list[Any]) -> None:
        """Let ZeRO round none of these gradients, as torch_autocast has it do with those of linear layers.

        A tied weight is an embedding on another stage, where it would not: its copies would come apart. What is
        compressed is averaged already.
        """
        for parameter in parameters:
            delattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME)
            self._engine.optimizer.ipg_buckets.setdefault(get_comm_dtype(parameter), IPGBucket())

    @property
    def _zero_reduces(self) -> bool:
        """Whether DeepSpeed's reduction is what hands gradients to the optimizer: that for bf16 has them already."""
        return bool(self._engine.zero_optimization()) and not self._engine.using_bf16_optimizer

    @property
    def _alone(self) -> bool:
        """Whether this step is the replica's own."""
        return self._local is not None and not self._local.synchronous

    @property
    def _exchange(self) -> GradientExchange | None:
        """What exchanges gradients in this step."""
        if self._local is None or self._local.synchronous:
            return self._over_replicas
        return self._local.exchanges.inner

    def sum_tied(self) -> None:
        """Sum the gradients of tied weights over the stages that hold them."""
        if self._exchange is not None:
            return  # together with the replicas'
        for name, parameter in self._tied.items():
            grad = self._gradient(parameter)
            with self._counted(f"tied {name}", [grad], dist.get_world_size(self._tied_groups[name])):
                dist.all_reduce(grad, group=self._tied_groups[name])

    def average_replicas(self, stock: Callable[[], None]) -> None:
        """Average over the replicas: compressed, or by `stock`, DeepSpeed's own reduction, counted."""
        engine, tied = self._engine, {id(p) for p in self._tied.values()}
        others = {n: p for n, p in engine.module.named_parameters() if p.requires_grad and id(p) not in tied}
        if self._exchange is None:
            if self._alone:
                return
            shared = [*self._tied.values(), *others.values()] if engine.dp_world_size > 1 else []
            sent = sum(p.numel() * self._travels_in(p).itemsize for p in shared)
            with self._counted("data parallel", [self._gradient(p) for p in shared], engine.dp_world_size, sent):
                stock()
            return
        averaged = self._tied | (others if self._exchange.averages_replicas else {})
        scale = float(getattr(engine.optimizer, "cur_scale", 1.0))
        self._exchange.average({name: self._gradient(p) for name, p in averaged.items()}, scale)
        if self._zero_reduces:
            stock()

    def updated(self) -> None:
        """Count, after the optimizer's step, the weights that replicas get from those that have updated them."""
        engine, n = self._engine, self._engine.dp_world_size
        sharded = engine.using_bf16_optimizer or engine.zero_optimization()
        if sharded and n > 1 and engine.was_step_applied():
            size = sum(p.numel() * p.element_size() for p in engine.module.parameters() if p.requires_grad)
            counted = self._counters.setdefault(WEIGHTS, GroupStats())
            counted.calls += 1
            counted.bytes_raw += size * (n - 1) // n
            counted.bytes_sent += size * (n - 1) // n

    def _travels_in(self, parameter: Any) -> torch.dtype:
        """In which precision DeepSpeed averages a gradient; ZeRO with torch_autocast has one for each parameter."""
        engine = self._engine
        found: torch.dtype = (
            engine.optimizer.get_param_comm_dtype(parameter) if self._zero_reduces else engine.communication_data_type
        )
        return found

    def _gradient(self, parameter: Any) -> Tensor:
        """What the optimizer will use: half-precision training may accumulate apart from `.grad`.

        Zeros where this rank's samples gave none, as DeepSpeed has it: another replica's may have, and all have to
        exchange the same parameters.
        """
        optimizer = self._engine.optimizer
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
        """Count what is reduced inside. sent: as how many bytes, where not as those of the gradients."""
        began = time.perf_counter()
        yield
        if ranks > 1:
            raw = sum(g.numel() * g.element_size() for g in grads)
            counted = self._counters.setdefault(group, GroupStats())
            counted.add(raw, raw if sent is None else sent, ranks, time.perf_counter() - began)

    def clip(self, largest: float) -> float:
        """Clip float32 gradients to a norm over all stages, tied weights counted once. The norm before it.

        DeepSpeed counts the first stage only. ReplicaAdam clips by itself, what it has averaged.
        """
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        norm = self.norm(parameters, [p.grad for p in parameters])
        scale = largest / (norm + 1e-6)
        if scale < 1:
            torch._foreach_mul_([p.grad for p in parameters], scale)
        return norm

    def norm(self, parameters: list[Any], gradients: list[Tensor]) -> float:
        """The L2 norm of all stages' gradients; every stage must call this."""
        pairs = zip(parameters, gradients, strict=True)
        counted = [g for p, g in pairs if not getattr(p, "ds_pipe_replicated", False)]
        norms = (
            torch.stack(torch._foreach_norm(counted))
            if counted
            else torch.zeros(1, device=self._engine.device, dtype=torch.float32)
        )
        square = norms.double().square().sum()
        dist.all_reduce(square, group=self._engine.grid.get_pipe_parallel_group())
        return float(square.sqrt())

    def states(self) -> Iterator[tuple[str, State]]:
        """What exchanges compressed gradients or momentum on this rank, with its residuals, by name."""
        if self._over_replicas is not None:
            yield from self._over_replicas.states()
        if self._local is not None:
            yield from self._local.states()
        if isinstance(self._engine.optimizer, ReplicaAdam):
            yield "momentum", self._engine.optimizer.momentum_state()

    def stats(self) -> dict[str, Any]:
        """Traffic of gradients by group of ranks."""
        exchanged = {name: state.stats() for name, state in self.states()}
        if isinstance(self._engine.optimizer, ReplicaAdam):
            exchanged["momentum"] = self._engine.optimizer.stats()
        groups = {name: asdict(stats) for name, stats in self._counters.items()}
        return groups | {name: {**s, "wait_seconds": s["seconds"]["wait"]} for name, s in exchanged.items()}

    def use_staging(self, staging: Staging) -> None:
        """Copy between device and host with this one."""
        for _, state in self.states():
            state.staging = staging
        if isinstance(self._engine.optimizer, ReplicaAdam):
            self._engine.optimizer.use_staging(staging)

    def close(self, *, failed: bool = False) -> None:
        """End the threads that exchange, see `State.close`; safe to call twice."""
        if isinstance(self._engine.optimizer, ReplicaAdam):
            self._engine.optimizer.close(failed=failed)
        for _, state in self.states():
            state.close(failed=failed)
