"""How a rank reduces its gradients: over replicas, over stages that share weights, and for the global norm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.engine.gradient_exchange import GradientExchange, ReplicaAdam
from pipecomp.errors import PipecompError
from pipecomp.stats import GroupStats


class GradientReduction:
    """Gradients of one rank's stage: tied weights and the norm right over all stages, replicas' compressed.

    engine: DeepSpeed's, complete. tied_groups: process group of each tied weight that this stage holds, by the name in
    the plan. exchange: averages gradients where they are compressed; otherwise DeepSpeed does.
    """

    def __init__(self, engine: Any, tied_groups: dict[str, Any], exchange: GradientExchange | None) -> None:
        self._engine, self._tied_groups, self._exchange = engine, tied_groups, exchange
        self._counters: dict[str, GroupStats] = {}
        stage = engine.stage
        first_holder = {g.name: g.stages[0] == stage.index for g in engine.plan.tied}
        self._tied = {name: p for name, p in stage.tied_parameters().items() if p.requires_grad}
        for name, parameter in self._tied.items():
            parameter.ds_pipe_replicated = not first_holder[name]
        if exchange is not None and engine.zero_optimization():
            # DeepSpeed moves gradients to the ranks that update them; they are averaged before that.
            engine.optimizer.reduce_scatter = False
            engine.optimizer.gradient_reduction_w_predivide = lambda tensor, dtype: tensor

    def sum_tied(self) -> None:
        """Sum the gradients of tied weights over the stages that hold them."""
        if self._exchange is not None:
            return  # together with the replicas'
        for name, parameter in self._tied.items():
            grad = self._gradient(parameter)
            if grad is None:
                raise PipecompError(f"tied weight {name} has no gradient on stage {self._engine.stage_id}")
            with self._counted(f"tied {name}", [grad], dist.get_world_size(self._tied_groups[name])):
                dist.all_reduce(grad, group=self._tied_groups[name])

    def average_replicas(self, stock: Callable[[], None]) -> None:
        """Average over the replicas: compressed, or by `stock`, DeepSpeed's own reduction, counted."""
        parameters = self._engine.module.named_parameters()
        if self._exchange is None:
            grads = [g for _, p in parameters if (g := self._gradient(p)) is not None]
            with self._counted("data parallel", grads, self._engine.dp_world_size):
                stock()
            return
        names = {id(p): name for name, p in self._tied.items()}
        self._exchange.average(
            {names.get(id(p), name): g for name, p in parameters if (g := self._gradient(p)) is not None}
        )
        if self._engine.zero_optimization():
            stock()

    def _gradient(self, parameter: Any) -> Tensor | None:
        """What the optimizer will use: half-precision training may accumulate apart from `.grad`. None if frozen."""
        grad: Tensor | None
        if not parameter.requires_grad:
            grad = None
        elif self._engine.using_bf16_optimizer:
            grad = parameter._hp_grad
        elif self._engine.zero_optimization():
            grad = self._engine.optimizer.get_gradient_for_reduction(parameter)
        else:
            grad = parameter.grad
        return grad

    @contextlib.contextmanager
    def _counted(self, group: str, grads: list[Tensor], ranks: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if ranks > 1:
            raw = sum(g.numel() * g.element_size() for g in grads)
            self._counters.setdefault(group, GroupStats()).add(raw, ranks, time.perf_counter() - began)

    def clip(self, largest: float) -> float:
        """Clip float32 gradients to a norm over all stages, tied weights counted once. The norm before it.

        DeepSpeed counts the first stage only.
        """
        engine = self._engine
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        counted = [p.grad for p in parameters if not getattr(p, "ds_pipe_replicated", False)]
        norms = torch.stack(torch._foreach_norm(counted)) if counted else torch.zeros(1, device=engine.device)
        square = norms.double().square().sum()
        dist.all_reduce(square, group=engine.grid.get_pipe_parallel_group())
        norm = square.sqrt()
        scale = float(largest / (norm + 1e-6))
        if scale < 1:
            torch._foreach_mul_([p.grad for p in parameters], scale)
        return float(norm)

    def states(self) -> Iterator[tuple[str, State]]:
        """What exchanges compressed gradients or momentum on this rank, with its residuals, by name."""
        if self._exchange is not None:
            yield from self._exchange.states()
        if isinstance(self._engine.optimizer, ReplicaAdam):
            yield "momentum", self._engine.optimizer.momentum_state()

    def stats(self) -> dict[str, Any]:
        """Traffic of gradients by group of ranks."""
        groups = {name: stats.as_dict() for name, stats in self._counters.items()}
        optimizer = self._engine.optimizer
        if isinstance(optimizer, ReplicaAdam):
            stats = optimizer.stats()
            groups["momentum"] = {**stats, "wait_seconds": stats["seconds"]["wait"]}
        return groups if self._exchange is None else groups | self._exchange.stats()

    def close(self) -> None:
        """End the threads that exchange; safe to call twice."""
        if self._exchange is not None:
            self._exchange.close()
