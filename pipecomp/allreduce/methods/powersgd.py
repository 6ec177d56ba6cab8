"""PowerSGD by torch's DDP hook, with one rank for all matrices or a rank for each layer.

Note: [Ranks of layers]
    torch keeps residuals and factors of a whole bucket. With `adaptive` they belong to layers: the layers of a bucket
    that have the same rank form a group with a state of torch's. When layers change their ranks, or DDP its buckets,
    the groups are split into layers and combined anew. Residuals are unchanged by that; of a layer's factor Q, the
    columns that fit the new rank are kept, and further ones are drawn.
    The squared error of a rank is that of the best matrix of that rank, which the power iteration approaches: the sum
    of the squares of the smaller singular values of this worker's gradient.

Sources: arXiv:1905.13727 (PowerSGD), arXiv:2210.17357 (L-GreCo).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from pipecomp.allreduce.adaptive import Planner
from pipecomp.allreduce.call import Counters, Name
from pipecomp.allreduce.method import FLOAT, Exchange, ExchangePlan, GradientMethod, HookAverage, PiecePlan, Shapes
from pipecomp.allreduce.methods.baselines import SingleTensorBucket, count_wait, require_distributed
from pipecomp.config.gradients import Adaptive, PowerSgdOptions
from pipecomp.stats import ring_bytes

COMPRESSES_FROM = 2  # the step; all values are sent before it
SPARE = 4  # directions beyond the largest rank, for the accuracy of singular values
_STATE_NAMES = ("error_dict", "p_memory_dict", "q_memory_dict")  # memory of torch's state, by bucket
ParameterShape = tuple[int, ...]
Future = torch.futures.Future[Tensor]


class PowerSgd(GradientMethod):
    """`powersgd`."""

    options: PowerSgdOptions

    def hook(self, group: Any, adaptive: Adaptive | None = None) -> HookAverage:
        group, rank = require_distributed("powersgd", group), self.options.rank
        return PowerSgdHook(rank, group) if adaptive is None else LayerwisePowerSgd(rank, adaptive, group)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> ExchangePlan:
        """From the first compressed step on. shapes: None for one vector."""
        flat, factors = sent_values(shapes or [(d,)], self.options.rank)
        sent = ring_bytes(FLOAT * (flat + factors), n)
        reductions = (flat > 0) + 2 * (factors > 0)
        return ExchangePlan((), ((PiecePlan(Exchange((sent,) * n, sent, hops=2 * (n - 1) * reductions)),),))


class PowerSgdHook:
    """torch's hook; counts the bytes of its ring all-reduces."""

    saved_as = "torch"

    def __init__(self, rank: int, group: Any) -> None:
        self._rank, self._group = rank, group
        self._states: dict[str, Any] = {}
        self._last: torch.futures.Future[Tensor] | None = None

    def _state(self, key: str) -> Any:
        """Return the state of DDP's buckets, or of a tensor by itself, whose steps are counted separately."""
        if key not in self._states:
            self._states[key] = new_state(self._rank, self._group)
        return self._states[key]

    def run(self, bucket: Any, key: str, counters: Counters, layers: Sequence[Name]) -> torch.futures.Future[Tensor]:
        """Average a bucket."""
        state, buffer = self._state(key), bucket.buffer()
        values = buffer.numel()
        if state.iter >= COMPRESSES_FROM:
            values = sum(sent_values([g.shape for g in bucket.gradients()], self._rank))
        # Note: the hook's callbacks run in gloo's few threads and wait there for more of gloo's work. Two at a time can
        # deadlock, so the previous bucket is waited for.
        if self._last is not None:
            self._last.wait()
        future = self._last = run_torch_hook(state, bucket, counters)
        counters.bytes_sent += ring_bytes(values * buffer.element_size(), dist.get_world_size(self._group))
        return future

    def state_dict(self) -> dict[Any, Any]:
        """Return the memory of torch's states by key."""
        return {
            key: {
                name: {i: memories.cpu().clone() for i, memories in getattr(state, name).items()}
                for name in _STATE_NAMES
            }
            for key, state in self._states.items()
        }

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """Restore it. The next two steps are uncompressed, as at the start, as DDP may rebuild its buckets in them."""
        for key, kept in state.items():
            for name in _STATE_NAMES:
                setattr(self._state(key), name, {i: x.to(device, copy=True) for i, x in kept[name].items()})


def new_state(rank: int, group: Any) -> Any:
    """Return a state of torch's hook."""
    return powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=COMPRESSES_FROM,
        min_compression_rate=1,
    )


def run_torch_hook(state: Any, bucket: Any, counters: Counters) -> Future:
    """Run torch's hook. If the mean is not finite, restore the hook's memory: NaN would stay in it forever."""
    memories, place = (state.error_dict, state.p_memory_dict, state.q_memory_dict), bucket.index()
    error, p, q = (memory.get(place) for memory in memories)
    before = error, p, None if q is None else q.clone()  # torch changes Q in place, and makes P anew

    def check(done: Future) -> Tensor:
        mean: Tensor = done.value()
        if not bool(mean.isfinite().all()):
            for memory, value in zip(memories, before, strict=True):
                memory.pop(place, None)
                if value is not None:
                    memory[place] = value
        return mean

    return count_wait(lambda: powerSGD_hook.powerSGD_hook(state, bucket), counters).then(check)


def sent_values(shapes: Iterable[Sequence[int]], rank: int) -> tuple[int, int]:
    """Return the number of values in all-reduces: uncompressed parameters, and the matrices P and Q."""
    flat = factors = 0
    for shape in shapes:
        rows, columns = matrix(shape)
        r = columns_of(shape, rank)
        if r:
            factors += (rows + columns) * r
        else:
            flat += rows * columns
    return flat, factors


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a parameter."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def columns_of(shape: Sequence[int], rank: int) -> int:
    """Return the number of columns of P and Q; 0 for a parameter that is sent whole because they are no smaller."""
    rows, columns = matrix(shape)
    r = min(rows, columns, rank)
    return r if len(shape) > 1 and (rows + columns) * r < rows * columns else 0


def squared_errors(gradient: Tensor, ranks: Sequence[int]) -> list[float]:
    """Return ‖M − best matrix of that rank‖² for each rank, 0 where M is sent whole; all 0 for NaN and Inf."""
    m = gradient.detach().reshape(gradient.shape[0], -1).to(torch.float32)
    used = [columns_of(gradient.shape, rank) for rank in ranks]
    width = min(*m.shape, max(used) + SPARE)
    if not bool(m.isfinite().all()):
        return [0.0] * len(ranks)
    largest = float(m.abs().max()) or 1.0
    m = m / largest  # float32 may not hold the squares
    start = torch.randn(m.shape[1], width, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(m.device)
    basis = torch.linalg.qr(m @ start).Q
    for _ in range(2):
        basis = torch.linalg.qr(m @ (m.T @ basis)).Q
    strengths = torch.linalg.svdvals(basis.T @ m).double().square()
    total = float(m.double().square().sum())
    return [max(0.0, total - float(strengths[:r].sum())) * largest**2 if r else 0.0 for r in used]


@dataclass(frozen=True, slots=True)
class _LayerMemory:
    """Memory of a layer: its residual [d] and the factor Q [columns, r]."""

    residual: Tensor
    q: Tensor


class _GroupBucket(SingleTensorBucket):
    """A copy of some gradients of a bucket, concatenated."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(torch.cat([g.reshape(-1) for g in gradients]), 0)
        pieces = self.buffer().split([g.numel() for g in gradients])
        self._gradients = [piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]

    def gradients(self) -> list[Tensor]:
        """Return the gradients in their shapes."""
        return self._gradients


@dataclass(slots=True)
class _LayerGroup:
    """Layers of one bucket and rank with a state of torch's. Layers of a shape are adjacent, as in torch's order."""

    rank: int
    shapes: dict[Name, ParameterShape]
    state: Any

    def split(self) -> dict[Name, _LayerMemory]:
        """Return the memory of each layer, as views of the state's tensors."""
        residuals = self.state.error_dict[0].split([math.prod(shape) for shape in self.shapes.values()])
        widths = [columns_of(shape, self.rank) for shape in self.shapes.values()]
        heights = [matrix(shape)[1] for shape in self.shapes.values()]
        qs = self.state.q_memory_dict[0].split([h * w for h, w in zip(heights, widths, strict=True)])
        rows = zip(self.shapes, residuals, qs, heights, widths, strict=True)
        return {layer: _LayerMemory(e, q.view(h, w)) for layer, e, q, h, w in rows}


class LayerwisePowerSgd:
    """Averages each layer with a rank of its own. own: the rank before the first plan."""

    saved_as = "adaptive"

    def __init__(self, own: int, adaptive: Adaptive, group: Any) -> None:
        self._adaptive, self._process_group = adaptive, group
        self._planner = Planner(adaptive, own, _code_bytes)
        self._groups: dict[tuple[str, int], _LayerGroup] = {}
        self._group_of: dict[Name, tuple[str, int]] = {}
        self._ungrouped: dict[Name, _LayerMemory] = {}
        self._last: Future | None = None

    @property
    def values(self) -> dict[Name, Any]:
        """Ranks of the last plan, by layer."""
        return self._planner.values

    def run(self, bucket: Any, key: str, counters: Counters, layers: Sequence[Name]) -> Future:
        """Average a bucket."""
        self._wait()
        gradients = dict(zip(layers, bucket.gradients(), strict=True))
        place = f"{key} {bucket.index()}"
        self._planner.begin(place, counters, lambda row: self._gather(row, bucket.buffer().device, counters))
        if self._planner.measures:
            self._measure(gradients, counters)
        if self._planner.step < COMPRESSES_FROM:
            counters.bytes_sent += self._ring_bytes(bucket.buffer(), bucket.buffer().numel())
            return count_wait(lambda: default_hooks.allreduce_hook(self._process_group, bucket), counters)
        by_rank = self._by_rank(gradients)
        for rank, chosen in by_rank.items():
            # As in PowerSgdHook.run, two hooks at a time can deadlock.
            self._wait()
            self._last = self._run_group((place, rank), chosen, counters)
        assert self._last is not None, "a bucket has gradients"

        def result(done: Future) -> Tensor:
            done.value()  # raises the hook's error
            buffer: Tensor = bucket.buffer()
            return buffer

        return self._last.then(result)

    def _wait(self) -> None:
        """Wait for the last hook."""
        if self._last is not None:
            self._last.wait()

    def _by_rank(self, gradients: dict[Name, Tensor]) -> dict[int, dict[Name, Tensor]]:
        """Group gradients by rank, those of a shape adjacent; layers always sent whole have the lowest rank."""
        ranks = {layer: self._planner.value(layer) for layer, g in gradients.items() if self._plannable(g)}
        lowest = min(ranks.values(), default=self._adaptive.values[0])
        by_rank: dict[int, dict[Name, Tensor]] = {}
        for layer, g in sorted(gradients.items(), key=lambda item: matrix(item[1].shape)):
            by_rank.setdefault(ranks.get(layer, lowest), {})[layer] = g
        return by_rank

    def _plannable(self, gradient: Tensor) -> bool:
        """Return whether a layer is compressed with some rank."""
        return any(columns_of(gradient.shape, rank) for rank in self._adaptive.values)

    def _run_group(self, place: tuple[str, int], gradients: dict[Name, Tensor], counters: Counters) -> Future:
        """Run torch's hook for the layers of one rank; their gradients are replaced by means."""
        part: Any = _GroupBucket(list(gradients.values()))
        group = self._group(place, part, list(gradients))
        counters.bytes_sent += self._ring_bytes(part.buffer(), sum(sent_values(group.shapes.values(), group.rank)))
        future = run_torch_hook(group.state, part, counters)

        def put_back(done: Future) -> Tensor:
            for g, mean in zip(gradients.values(), part.gradients(), strict=True):
                g.copy_(mean)
            return done.value()

        return future.then(put_back)

    def _ring_bytes(self, values: Tensor, count: int) -> int:
        return ring_bytes(count * values.element_size(), dist.get_world_size(self._process_group))

    # -- memory

    def _group(self, place: tuple[str, int], part: _GroupBucket, layers: list[Name]) -> _LayerGroup:
        """Return the group of these layers, with the memory that each had before."""
        shapes = {layer: tuple(g.shape) for layer, g in zip(layers, part.gradients(), strict=True)}
        group = self._groups.get(place)
        if group is not None and list(group.shapes.items()) == list(shapes.items()):
            return group
        for old in {self._group_of[layer] for layer in layers if layer in self._group_of} | {place} & set(self._groups):
            self._ungrouped |= self._groups[old].split()
            for layer in self._groups.pop(old).shapes:
                del self._group_of[layer]
        created = self._groups[place] = _LayerGroup(place[1], shapes, new_state(place[1], self._process_group))
        self._group_of |= dict.fromkeys(layers, place)
        self._fill(created, part)
        return created

    def _fill(self, group: _LayerGroup, part: _GroupBucket) -> None:
        """Fill torch's state with the memory of the group's layers. New columns are the same on all ranks."""
        draw = torch.Generator().manual_seed(self._planner.step)
        residuals, qs, rows = [], [], 0
        for (layer, shape), g in zip(group.shapes.items(), part.gradients(), strict=True):
            memory = self._ungrouped.pop(layer, None)
            residuals.append(torch.zeros_like(g).view(-1) if memory is None else memory.residual)
            r = columns_of(shape, group.rank)
            if memory is not None and memory.q.shape[1] == r:
                q = memory.q
            else:
                q = torch.randn(matrix(shape)[1], r, generator=draw, dtype=torch.float32).to(g)
                if memory is not None:
                    q[:, : memory.q.shape[1]] = memory.q[:, :r]
            qs.append(q.reshape(-1))
            rows += matrix(shape)[0] * r
        group.state.iter = COMPRESSES_FROM
        group.state.error_dict = {0: torch.cat(residuals)}
        group.state.q_memory_dict = {0: torch.cat(qs)}
        group.state.p_memory_dict = {0: part.buffer().new_empty(rows)}

    def state_dict(self) -> dict[Any, Any]:
        """Return the plan and the memory of layers."""
        self._wait()
        memories = dict(self._ungrouped)
        for group in self._groups.values():
            memories |= group.split()
        layers = {layer: (k.residual.cpu().clone(), k.q.cpu().clone()) for layer, k in memories.items()}
        return {"plan": self._planner.state_dict(), "layers": layers}

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """Restore the return value of `state_dict`."""
        self._planner.load_state_dict(state["plan"])
        self._groups, self._group_of = {}, {}
        self._ungrouped = {layer: _LayerMemory(e.to(device), q.to(device)) for layer, (e, q) in state["layers"].items()}

    # -- planning

    def _measure(self, gradients: dict[Name, Tensor], counters: Counters) -> None:
        with counters.part("quantize"):
            for layer, g in gradients.items():
                if self._plannable(g):
                    self._planner.add_errors(layer, tuple(g.shape), squared_errors(g, self._adaptive.values))

    def _gather(self, row: list[float], device: torch.device, counters: Counters) -> list[list[float]]:
        """Gather the numbers of all ranks."""
        own = torch.tensor(row, dtype=torch.float64, device=device)
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size(self._process_group))]
        dist.all_gather(rows, own, group=self._process_group)
        counters.bytes_sent += (len(rows) - 1) * own.numel() * own.element_size()
        return [values.tolist() for values in rows]


def _code_bytes(rank: int, shape: ParameterShape, n: int) -> float:
    """Return the bytes of a layer through a rank's link."""
    shapes: Shapes = [shape]
    return ring_bytes(FLOAT * sum(sent_values(shapes, rank)), max(n, 2))
