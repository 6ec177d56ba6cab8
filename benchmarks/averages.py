"""Averages of gradients by every method, timed over ranks on this machine.

Ranks are processes that talk over 127.0.0.1, which is faster than any network: what compression saves there is little,
what it costs shows. In each round all methods average the same new gradients, one after the other, so that whatever
else the machine does meets all; the round with the median time counts. The reference is gloo's own all-reduce in
float32.

d: values in a bucket, n: ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from pipecomp.allreduce import State, ddp_hook
from pipecomp.allreduce.call import PARTS
from pipecomp.allreduce.method import GradientMethod
from pipecomp.allreduce.methods import METHODS
from pipecomp.allreduce.methods.powersgd import new_state
from pipecomp.allreduce.predict import plan_of
from pipecomp.config.gradients import METHODS as OPTIONS
from pipecomp.config.gradients import Gradients
from pipecomp.distributed.collectives import broadcast
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import require
from pipecomp.stats import ring_bytes

Shapes = tuple[tuple[int, ...], ...]
SAMPLES = 64  # T


def shapes_of(size: int | Sequence[Sequence[int]]) -> Shapes:
    """Give a bucket's parameters: of a number of values one matrix, as square as can be; shapes as they are."""
    if not isinstance(size, int):
        return tuple(map(tuple, size))
    rows = next((r for r in range(math.isqrt(max(size, 0)), 0, -1) if size % r == 0), 1)
    return ((rows, size // rows),)


def values_in(shapes: Shapes) -> int:
    """Count d."""
    return sum(map(math.prod, shapes))


class Bucket:
    """Gradients of parameters in one flat buffer, as DDP gives them to hooks."""

    def __init__(self, shapes: Shapes) -> None:
        self._flat = torch.zeros(values_in(shapes))
        parts = self._flat.split([math.prod(shape) for shape in shapes])
        self._gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def index(self) -> int:
        """Give its number in the backward pass."""
        return 0

    def buffer(self) -> Tensor:
        """Give all values, flat."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace all values."""
        self._flat.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """Give views of the buffer, in the parameters' shapes."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """Give the same as `gradients`: there are no others."""
        return self._gradients

    def is_last(self) -> bool:
        """Return True: a step has this bucket only."""
        return True


def gradient(shapes: Shapes, rank: int, turn: int) -> Tensor:
    """Make a rank's gradients in one round, float32 [d], of linear layers over T samples.

    A layer's is the sum over samples of the outer products of output gradients and inputs. Both have features of
    unequal size, and a mean that ranks and rounds share. A vector's values are normal.
    """
    fixed = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + rank + 1000 * turn)
    parts = []
    for shape in shapes:
        if len(shape) == 1:
            parts.append(torch.randn(shape, generator=own) / SAMPLES)
            continue
        sides = []
        for width in (shape[0], math.prod(shape[1:])):
            scale, mean = torch.randn(width, generator=fixed).exp(), torch.randn(width, generator=fixed)
            sides.append(scale * (0.5 * mean + torch.randn(SAMPLES, width, generator=own)))
        parts.append((sides[0].T @ sides[1]).reshape(-1) / SAMPLES)
    return torch.cat(parts)


# -- measuring

Row = dict[str, Any]
SIZES = (1 << 16, 1 << 20, 6_553_600)  # the last fills one of DDP's buckets, 25 MiB
WARM_UP = 3  # rounds: PowerSGD compresses from its third on
LEAST_ROUNDS, MOST_ROUNDS = 3, 60
TIMEOUT_S = 300


@dataclass(frozen=True)
class Variant:
    """A method with its options. torchs_own: torch's function itself, without a State ("none" is dist.all_reduce)."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    torchs_own: bool = False

    @property
    def label(self) -> str:
        """Name it, as in "global_qsgd linear 4"."""
        if self == FP32:
            return "fp32"
        values = [key if value is True else value for key, value in self.options.items()]
        words = [",".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values]
        return " ".join([self.method, *words, *(["(torch)"] if self.torchs_own else [])])


FP32 = Variant("none", torchs_own=True)


def _torchs_own(method: type[GradientMethod]) -> bool:
    return method.hook is not GradientMethod.hook


def _variants() -> tuple[Variant, ...]:
    """List what the methods say is to be measured: the baseline, those of torch's own by name, then the others."""
    methods = sorted(METHODS.items(), key=lambda item: (item[0] != "none", item[0] if _torchs_own(item[1]) else "~"))
    return tuple(
        Variant(name, dict(options), own)
        for name, method in methods
        for options in OPTIONS[name].measured
        for own in ((False, True) if _torchs_own(method) else (False,))
    )


VARIANTS = _variants()


def bench_allreduce(
    *,
    sizes: Sequence[int | Sequence[Sequence[int]]] = SIZES,
    ranks: Sequence[int] = (2,),
    variants: Sequence[Variant] = VARIANTS,
    seconds: float = 0.5,
    run: Callable[..., dict[int, list[Row]]] = run_ranks,
) -> list[Row]:
    """Measure each variant, and float32, on buckets of each size over each number of ranks.

    Args:
        sizes: values in a bucket (one matrix, as square as can be), or the shapes of its parameters.
        ranks: numbers of processes.
        variants: methods with their options.
        seconds: for one case.
        run: starts the ranks, as `run_ranks`.

    Returns:
        One row per number of ranks, size and variant. Times in milliseconds, of the round whose total is the median,
        means over ranks: `total_ms`, and of it `quantize_ms`, `wait_ms`, `reduce_ms`, `decode_ms` (torch's own
        functions: all `wait`; the rest is handing over to a state's thread and measuring its error). `bytes_raw`,
        `bytes_sent`: of one call, of the rank that sends most. `error`: ‖mean − exact mean‖ / ‖exact mean‖;
        `state_error`: as State.stats() tells it, None where it does not. `speedup`: float32's time over this one's, the
        median over rounds. `rounds`: how many.

    Raises:
        ConfigError: for numbers that are not above 0.
    """
    buckets = [shapes_of(size) for size in sizes]
    for key, values in (("ranks", ranks), ("sizes", [values_in(bucket) for bucket in buckets])):
        for value in values:
            require(value >= 1, key, value, "whole numbers of at least 1")
    require(seconds > 0, "seconds", seconds, "a number above 0")
    cases = (FP32, *(v for v in variants if v != FP32))
    timeout_s = TIMEOUT_S + 10 * seconds * len(cases) * len(buckets)
    rows = []
    for n in ranks:
        by_rank = run(n, _measure, buckets, cases, seconds, timeout_s=timeout_s)
        rows += [_merged(parts) for parts in zip(*(by_rank[rank] for rank in range(n)), strict=True)]
    return rows


def variants_of(methods: str) -> tuple[Variant, ...]:
    """Choose those of VARIANTS whose method is one of the comma-separated names.

    Raises:
        ConfigError: for a name that is none of a method's.
    """
    known = list(dict.fromkeys(v.method for v in VARIANTS))
    wanted = [name.strip() for name in methods.split(",")]
    for name in wanted:
        require(name in known, "methods", name, f"{', '.join(known)} (float32 is always measured)")
    return tuple(v for v in VARIANTS if v.method in wanted)


# -- one rank


def _measure(
    rank: int, n: int, note: object, buckets: Sequence[Shapes], variants: Sequence[Variant], seconds: float
) -> list[Row]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        return [row for shapes in buckets for row in _measure_bucket(rank, n, shapes, variants, seconds)]
    finally:
        dist.destroy_process_group()


def _measure_bucket(rank: int, n: int, shapes: Shapes, variants: Sequence[Variant], seconds: float) -> list[Row]:
    """All variants on one bucket, on this rank; the first is what others are compared with."""
    cases = [_Case(variant, shapes, n) for variant in variants]
    end = 0.0
    for turn in range(WARM_UP + MOST_ROUNDS):
        if turn == WARM_UP:
            end = time.perf_counter() + seconds * len(cases)
        elif turn >= WARM_UP + LEAST_ROUNDS and not broadcast(time.perf_counter() < end):
            break
        inputs = [gradient(shapes, r, turn) for r in range(n)]
        exact_d = torch.stack(inputs).mean(dim=0, dtype=torch.float64).float()
        for case in cases:
            case.run(inputs[rank], exact_d, counts=turn >= WARM_UP)
    return [case.row(cases[0].totals) for case in cases]


class _Case:
    """One variant on one bucket, and what was measured of it."""

    def __init__(self, variant: Variant, shapes: Shapes, n: int) -> None:
        self._variant, self._shapes, self._n = variant, shapes, n
        self._bucket = Bucket(shapes)
        self._state = None if variant.torchs_own else State(variant.method, **variant.options)
        self._average = _average(variant, self._state)
        self._parts: list[dict[str, float]] = []
        self._errors: list[float] = []
        self._sent: list[int] = []
        self.totals: list[float] = []

    def run(self, x_d: Tensor, exact_d: Tensor, *, counts: bool) -> None:
        """Average once; counts: whether it belongs to the result."""
        self._bucket.set_buffer(x_d)
        before = self._state.stats() if self._state else None
        dist.barrier()
        begin = time.perf_counter()
        mean_d = self._average(self._bucket)
        took = time.perf_counter() - begin
        if not counts:
            return
        self.totals.append(took)
        self._errors.append(float(torch.linalg.vector_norm(mean_d - exact_d) / torch.linalg.vector_norm(exact_d)))
        if self._state is None or before is None:
            self._parts.append(dict.fromkeys(PARTS, 0.0) | {"wait": took})
            return
        after = self._state.stats()
        self._sent.append(after["bytes_sent"] - before["bytes_sent"])
        self._parts.append({part: after["seconds"][part] - before["seconds"][part] for part in PARTS})

    def row(self, reference: Sequence[float]) -> Row:
        """Sum up all rounds. reference: the other one's seconds in each."""
        variant, d = self._variant, values_in(self._shapes)
        middle = self.totals.index(statistics.median_low(self.totals))
        times = {"total": self.totals[middle]} | self._parts[middle]
        row_values = {
            "label": variant.label,
            "method": variant.method,
            "options": variant.options,
            "torchs_own": variant.torchs_own,
            "d": d,
            "n": self._n,
            "rounds": len(self.totals),
            **{f"{part}_ms": 1e3 * seconds for part, seconds in times.items()},
            "bytes_raw": ring_bytes(4 * d, self._n),
            "bytes_sent": round(statistics.median(self._sent)) if self._state else self._torchs_bytes(d),
            "error": statistics.median(self._errors),
            "state_error": self._state.stats()["relative_error"] if self._state else None,
            "speedup": statistics.median(a / b for a, b in zip(reference, self.totals, strict=True)),
        }
        if self._state is not None:
            self._state.close()
        return row_values

    def _torchs_bytes(self, d: int) -> int:
        """Count what torch's own function puts on this rank's links, if its all-reduce is a ring."""
        variant = self._variant
        if variant == FP32:
            return ring_bytes(4 * d, self._n)
        options = Gradients(method=variant.method, **variant.options)
        plan = plan_of(options, d, self._n, self._shapes if options.method_options.by_matrix else None)
        return round(sum(exchange.sends[0] for exchange in plan.exchanges()))


def _average(variant: Variant, state: State | None) -> Callable[[Any], Tensor]:
    """Make what puts the mean into a bucket and returns it."""
    if state is not None:
        return lambda bucket: ddp_hook(state, bucket).wait()
    if variant == FP32:
        return _plain_mean
    if variant.method == "fp16":
        return lambda bucket: default_hooks.fp16_compress_hook(dist.group.WORLD, bucket).wait()
    memory = new_state(variant.options["rank"], dist.group.WORLD)
    return lambda bucket: powerSGD_hook.powerSGD_hook(memory, bucket).wait()


def _plain_mean(bucket: Bucket) -> Tensor:
    dist.all_reduce(bucket.buffer())
    return bucket.buffer().div_(dist.get_world_size())


def _merged(rows: Sequence[Row]) -> Row:
    """One case's rows of all ranks in one."""
    merged = dict(rows[0])
    for key in (*(f"{part}_ms" for part in ("total", *PARTS)), "speedup"):
        merged[key] = statistics.fmean(row[key] for row in rows)
    merged["bytes_sent"] = max(row["bytes_sent"] for row in rows)
    return merged


# -- for people

HEADINGS = ("method", "ms", "quantize", "wait", "reduce", "decode", "kB sent", "ratio", "error", "own", "speedup")


def cells(row: Row) -> tuple[str, ...]:
    """Write a row under HEADINGS. ratio: bytes raw over sent; own: the state's error; speedup: against float32."""
    sent = row["bytes_sent"]
    ratio = digits(row["bytes_raw"] / sent) if sent else "–"
    own = "–" if row["state_error"] is None else digits(row["state_error"])
    times = (digits(row[f"{part}_ms"]) for part in ("total", *PARTS))
    return (row["label"], *times, digits(sent / 1e3), ratio, digits(row["error"]), own, digits(row["speedup"]))


def digits(value: float) -> str:
    """Write about three digits, no more than two after the point."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
