"""PowerSGD whose matrices have ranks of their own: torch's hook for each rank, on the layers of a bucket that have it.

torch keeps residuals and factors of a whole bucket. Here they belong to layers: when layers change their ranks, or DDP
its buckets, the groups that had them are taken apart, and new ones put together from what was kept. Residuals come
through that unchanged. Of a layer's factor Q, the columns that the new rank has room for stay, further ones are drawn.

The squared error of a rank is that of the best matrix of that rank, which the iteration approaches: what is beyond the
largest singular values of this worker's gradient.
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

from pipecomp.allreduce.adaptive_options import Adaptive
from pipecomp.allreduce.adaptive_planner import Planner
from pipecomp.allreduce.call import Counters, Name
from pipecomp.allreduce.exchanges import FLOAT, Shapes
from pipecomp.allreduce.methods.torch_hooks import LoneBucket, timed
from pipecomp.stats import ring_bytes

COMPRESSES_FROM = 2  # the step; before that all values are sent
SPARE = 4  # directions beyond the largest rank, for the singular values' sake
Shape = tuple[int, ...]
Future = torch.futures.Future[Tensor]


def new_state(rank: int, group: Any) -> Any:
    """What torch's hook keeps from step to step."""
    return powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=COMPRESSES_FROM,
        min_compression_rate=1,
    )


def averaged(state: Any, bucket: Any, counters: Counters) -> Future:
    """Run torch's hook. Where a mean is not finite, as all ranks see, what it keeps stays: NaN would never leave it."""
    kept, place = (state.error_dict, state.p_memory_dict, state.q_memory_dict), bucket.index()
    error, p, q = (memory.get(place) for memory in kept)
    before = error, p, None if q is None else q.clone()  # torch changes Q in place, and makes P anew

    def check(done: Future) -> Tensor:
        mean: Tensor = done.value()
        if not bool(mean.isfinite().all()):
            for memory, value in zip(kept, before, strict=True):
                memory.pop(place, None)
                if value is not None:
                    memory[place] = value
        return mean

    return timed(lambda: powerSGD_hook.powerSGD_hook(state, bucket), counters).then(check)


def sent_values(shapes: Iterable[Sequence[int]], rank: int) -> tuple[int, int]:
    """Values that enter all-reduces: of what is too small or flat to compress, and of the matrices P and Q."""
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
    """Rows and columns of a parameter."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def columns_of(shape: Sequence[int], rank: int) -> int:
    """Of P and Q; 0 where they would not be smaller than the parameter, which is sent as it is."""
    rows, columns = matrix(shape)
    r = min(rows, columns, rank)
    return r if len(shape) > 1 and (rows + columns) * r < rows * columns else 0


def squared_errors(gradient: Tensor, ranks: Sequence[int]) -> list[float]:
    """‖M − the best matrix of that rank‖² for each rank, 0 where M is not compressed; all 0 for NaN and Inf."""
    m = gradient.detach().reshape(gradient.shape[0], -1).to(torch.float32)
    used = [columns_of(gradient.shape, rank) for rank in ranks]
    width = min(*m.shape, max(used) + SPARE)
    if not bool(m.isfinite().all()):
        return [0.0] * len(ranks)
    largest = float(m.abs().max()) or 1.0
    m = m / largest  # squares of values that float32 just holds
    start = torch.randn(m.shape[1], width, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(m.device)
    basis = torch.linalg.qr(m @ start).Q
    for _ in range(2):
        basis = torch.linalg.qr(m @ (m.T @ basis)).Q
    strengths = torch.linalg.svdvals(basis.T @ m).double().square()
    total = float(m.double().square().sum())
    return [max(0.0, total - float(strengths[:r].sum())) * largest**2 if r else 0.0 for r in used]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a layer has from one step to the next: its residual [d], and the factor Q [columns, r]."""

    residual: Tensor
    q: Tensor


class _Part(LoneBucket):
    """Some gradients of a bucket, copied one behind the other."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(torch.cat([g.reshape(-1) for g in gradients]), 0)
        pieces = self.buffer().split([g.numel() for g in gradients])
        self._gradients = [piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]

    def gradients(self) -> list[Tensor]:
        """In their shapes."""
        return self._gradients


@dataclass(slots=True)
class _Group:
    """Layers of one bucket and rank, and torch's state of them. Those of a shape stand together, as torch puts them."""

    rank: int
    shapes: dict[Name, Shape]
    state: Any

    def take_apart(self) -> dict[Name, _Kept]:
        """What each layer has; views of the state's own tensors."""
        residuals = self.state.error_dict[0].split([math.prod(shape) for shape in self.shapes.values()])
        widths = [columns_of(shape, self.rank) for shape in self.shapes.values()]
        heights = [matrix(shape)[1] for shape in self.shapes.values()]
        qs = self.state.q_memory_dict[0].split([h * w for h, w in zip(heights, widths, strict=True)])
        rows = zip(self.shapes, residuals, qs, heights, widths, strict=True)
        return {layer: _Kept(e, q.view(h, w)) for layer, e, q, h, w in rows}


class LayerwisePowerSgd:
    """Averages each layer with a rank of its own; see HookAverage.

    own: the rank before the first plan. All but the last of a bucket's ranks are waited for: see `run`.
    """

    saved_as = "adaptive"

    def __init__(self, own: int, adaptive: Adaptive, group: Any) -> None:
        self._adaptive, self._process_group = adaptive, group
        self._planner = Planner(adaptive, own, _code_bytes)
        self._groups: dict[tuple[str, int], _Group] = {}
        self._group_of: dict[Name, tuple[str, int]] = {}
        self._kept: dict[Name, _Kept] = {}  # of layers that are in no group
        self._last: Future | None = None

    @property
    def values(self) -> dict[Name, Any]:
        """What layers have, those of the last plan."""
        return self._planner.values

    def run(self, bucket: Any, key: str, counters: Counters, layers: Sequence[Name]) -> Future:
        """See HookAverage."""
        self._wait()
        gradients = dict(zip(layers, bucket.gradients(), strict=True))
        place = f"{key} {bucket.index()}"
        self._planner.begin(place, counters, lambda row: self._gather(row, bucket.buffer().device, counters))
        if self._planner.measures:
            self._measure(gradients, counters)
        if self._planner.step < COMPRESSES_FROM:
            counters.bytes_sent += self._ring_bytes(bucket.buffer(), bucket.buffer().numel())
            return timed(lambda: default_hooks.allreduce_hook(self._process_group, bucket), counters)
        by_rank = self._by_rank(gradients)
        for rank, chosen in by_rank.items():
            # Its callbacks wait, in gloo's few threads, for more of gloo's work: two at a time can block each other.
            self._wait()
            self._last = self._start((place, rank), chosen, counters)
        assert self._last is not None, "a bucket has gradients"
        return self._last.then(lambda done: _of(done, bucket.buffer()))

    def _wait(self) -> None:
        """Until nothing is under way."""
        if self._last is not None:
            self._last.wait()

    def _by_rank(self, gradients: dict[Name, Tensor]) -> dict[int, dict[Name, Tensor]]:
        """Layers by rank, those of a shape together; what is never compressed goes with the lowest rank."""
        ranks = {layer: self._planner.value(layer) for layer, g in gradients.items() if self._plannable(g)}
        lowest = min(ranks.values(), default=self._adaptive.values[0])
        by_rank: dict[int, dict[Name, Tensor]] = {}
        for layer, g in sorted(gradients.items(), key=lambda item: matrix(item[1].shape)):
            by_rank.setdefault(ranks.get(layer, lowest), {})[layer] = g
        return by_rank

    def _plannable(self, gradient: Tensor) -> bool:
        """Whether its rank makes a difference."""
        return any(columns_of(gradient.shape, rank) for rank in self._adaptive.values)

    def _start(self, place: tuple[str, int], gradients: dict[Name, Tensor], counters: Counters) -> Future:
        """torch's hook for the layers of one rank; their gradients become means."""
        part: Any = _Part(list(gradients.values()))
        group = self._group(place, part, list(gradients))
        counters.bytes_sent += self._ring_bytes(part.buffer(), sum(sent_values(group.shapes.values(), group.rank)))
        future = averaged(group.state, part, counters)

        def put_back(done: Future) -> Tensor:
            for g, mean in zip(gradients.values(), part.gradients(), strict=True):
                g.copy_(mean)
            return done.value()

        return future.then(put_back)

    def _ring_bytes(self, values: Tensor, count: int) -> int:
        return ring_bytes(count * values.element_size(), dist.get_world_size(self._process_group))

    # -- what is kept

    def _group(self, place: tuple[str, int], part: _Part, layers: list[Name]) -> _Group:
        """The layers of a bucket that have this rank, with what each had before."""
        shapes = {layer: tuple(g.shape) for layer, g in zip(layers, part.gradients(), strict=True)}
        found = self._groups.get(place)
        if found is not None and list(found.shapes.items()) == list(shapes.items()):
            return found
        for old in {self._group_of[layer] for layer in layers if layer in self._group_of} | {place} & set(self._groups):
            self._kept |= self._groups[old].take_apart()
            for layer in self._groups.pop(old).shapes:
                del self._group_of[layer]
        made = self._groups[place] = _Group(place[1], shapes, new_state(place[1], self._process_group))
        self._group_of |= dict.fromkeys(layers, place)
        self._fill(made, part)
        return made

    def _fill(self, group: _Group, part: _Part) -> None:
        """Give torch's state what the group's layers have kept. New columns are the same on all ranks."""
        draw = torch.Generator().manual_seed(self._planner.step)
        residuals, qs, rows = [], [], 0
        for (layer, shape), g in zip(group.shapes.items(), part.gradients(), strict=True):
            kept = self._kept.pop(layer, None)
            residuals.append(torch.zeros_like(g).view(-1) if kept is None else kept.residual)
            r = columns_of(shape, group.rank)
            if kept is not None and kept.q.shape[1] == r:
                q = kept.q
            else:
                q = torch.randn(matrix(shape)[1], r, generator=draw, dtype=torch.float32).to(g)
                if kept is not None:
                    q[:, : kept.q.shape[1]] = kept.q[:, :r]
            qs.append(q.reshape(-1))
            rows += matrix(shape)[0] * r
        group.state.iter = COMPRESSES_FROM
        group.state.error_dict = {0: torch.cat(residuals)}
        group.state.q_memory_dict = {0: torch.cat(qs)}
        group.state.p_memory_dict = {0: part.buffer().new_empty(rows)}

    def state_dict(self) -> dict[Any, Any]:
        """See Stateful: the plan, and what layers have."""
        self._wait()
        kept = dict(self._kept)
        for group in self._groups.values():
            kept |= group.take_apart()
        layers = {layer: (k.residual.cpu().clone(), k.q.cpu().clone()) for layer, k in kept.items()}
        return {"plan": self._planner.state_dict(), "layers": layers}

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """See Stateful."""
        self._planner.load_state_dict(state["plan"])
        self._groups, self._group_of = {}, {}
        self._kept = {layer: _Kept(e.to(device), q.to(device)) for layer, (e, q) in state["layers"].items()}

    # -- planning

    def _measure(self, gradients: dict[Name, Tensor], counters: Counters) -> None:
        with counters.part("quantize"):
            for layer, g in gradients.items():
                if self._plannable(g):
                    self._planner.add(layer, tuple(g.shape), squared_errors(g, self._adaptive.values))

    def _gather(self, row: list[float], device: torch.device, counters: Counters) -> list[list[float]]:
        """Numbers of all ranks."""
        mine = torch.tensor(row, dtype=torch.float64, device=device)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._process_group))]
        dist.all_gather(rows, mine, group=self._process_group)
        counters.bytes_sent += (len(rows) - 1) * mine.numel() * mine.element_size()
        return [values.tolist() for values in rows]


def _code_bytes(rank: int, shape: Shape, n: int) -> float:
    """What passes a rank's link for a layer."""
    shapes: Shapes = [shape]
    return ring_bytes(FLOAT * sum(sent_values(shapes, rank)), max(n, 2))


def _of(done: Future, buffer: Tensor) -> Tensor:
    """The bucket's means, once they are there; the error of what failed."""
    done.value()
    return buffer
