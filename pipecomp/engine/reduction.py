"""How the engine reduces gradients: over replicas, over stages that share weights, and for the global norm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import engine as deepspeed_pipe
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.engine.gradient_exchange import GradientExchange, ReplicaAdam
from pipecomp.errors import PipecompError
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import SplitPlan
from pipecomp.stages.partition.splitting import Stage
from pipecomp.stats import GroupStats


class ReducingEngine(deepspeed_pipe.PipelineEngine):
    """DeepSpeed's engine with tied weights and the norm right over all stages, and with gradients compressed.

    tied_groups: process group of each tied weight that this stage holds, by the name in `plan`. exchange: averages
    gradients where they are compressed; otherwise DeepSpeed does.
    """

    plan: SplitPlan

    def __init__(self, *, tied_groups: dict[str, Any], exchange: GradientExchange | None, **ds: Any) -> None:
        self._tied_groups, self._exchange = tied_groups, exchange
        self._reductions: dict[str, GroupStats] = {}
        super().__init__(**ds)
        stage = self.stage
        first_holder = {g.name: g.stages[0] == stage.index for g in self.plan.tied}
        self._tied = {name: p for name, p in stage.tied_parameters().items() if p.requires_grad}
        for name, parameter in self._tied.items():
            parameter.ds_pipe_replicated = not first_holder[name]  # type: ignore[attr-defined]
        if exchange is not None and self.zero_optimization():
            # DeepSpeed moves gradients to the ranks that update them; they are averaged before that.
            self.optimizer.reduce_scatter = False
            self.optimizer.gradient_reduction_w_predivide = lambda tensor, dtype: tensor

    @property
    def stage(self) -> Stage | ModuleStage:
        """The part of the model that this rank trains."""
        return self.module.forward_funcs[0]

    def _exec_reduce_tied_grads(self) -> None:
        """Sum the gradients of tied weights over the stages that hold them."""
        if self._exchange is not None:
            return  # together with the replicas'
        for name, parameter in self._tied.items():
            grad = self._gradient(parameter)
            if grad is None:
                raise PipecompError(f"tied weight {name} has no gradient on stage {self.stage_id}")
            with self._counted(f"tied {name}", [grad], dist.get_world_size(self._tied_groups[name])):
                dist.all_reduce(grad, group=self._tied_groups[name])

    def _exec_reduce_grads(self) -> None:
        """Average over the replicas: compressed, or by DeepSpeed's own reduction, counted."""
        if self._exchange is not None:
            self._reduce_compressed(self._exchange)
            return
        grads = [g for p in self.module.parameters() if (g := self._gradient(p)) is not None]
        with self._counted("data parallel", grads, self.dp_world_size):
            super()._exec_reduce_grads()

    def _reduce_compressed(self, exchange: GradientExchange) -> None:
        names = {id(p): name for name, p in self._tied.items()}
        grads = {
            names.get(id(p), name): g
            for name, p in self.module.named_parameters()
            if (g := self._gradient(p)) is not None
        }
        exchange.average(grads)
        if self.zero_optimization():
            super()._exec_reduce_grads()

    def _gradient(self, parameter: Any) -> Tensor | None:
        """What the optimizer will use: half-precision training may accumulate apart from `.grad`. None if frozen."""
        grad: Tensor | None
        if not parameter.requires_grad:
            grad = None
        elif self.using_bf16_optimizer:
            grad = parameter._hp_grad
        elif self.zero_optimization():
            grad = self.optimizer.get_gradient_for_reduction(parameter)
        else:
            grad = parameter.grad
        return grad

    @contextlib.contextmanager
    def _counted(self, group: str, grads: list[Tensor], ranks: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if ranks > 1:
            raw = sum(g.numel() * g.element_size() for g in grads)
            self._reductions.setdefault(group, GroupStats()).add(raw, ranks, time.perf_counter() - began)

    def exchange_states(self) -> Iterator[tuple[str, State]]:
        """What exchanges compressed gradients or momentum on this rank, with its error-feedback residuals, by name."""
        if self._exchange is not None:
            yield from self._exchange.states()
        if isinstance(self.optimizer, ReplicaAdam):
            yield "momentum", self.optimizer.momentum_state()

    def group_stats(self) -> dict[str, Any]:
        """Traffic of gradients by group of ranks."""
        groups = {name: stats.as_dict() for name, stats in self._reductions.items()}
        if isinstance(self.optimizer, ReplicaAdam):
            stats = self.optimizer.stats()
            groups["momentum"] = {**stats, "wait_seconds": stats["seconds"]["wait"]}
        return groups if self._exchange is None else groups | self._exchange.stats()

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages, tied weights counted once (DeepSpeed counts the first stage only)."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        counted = [
            p.grad
            for p in self.module.parameters()
            if p.grad is not None and not getattr(p, "ds_pipe_replicated", False)
        ]
        norms = torch.stack(torch._foreach_norm(counted)) if counted else torch.zeros(1, device=self.device)
        square = norms.double().square().sum()
        dist.all_reduce(square, group=self.grid.get_pipe_parallel_group())
        norm = square.sqrt()
        self._global_grad_norm = float(norm)
        scale = self.gradient_clipping() / (norm + 1e-6)
        if float(scale) < 1:
            torch._foreach_mul_(grads, float(scale))
