"""`pipecomp bench kernels`: every kernel compared with memcpy of the bytes it must move.

A kernel reads its inputs and writes its outputs once, at least; memcpy of half as many bytes reads and writes as many.
Both run in turn, in the same process, on buffers of their own, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from pipecomp.errors import KernelError, require
from pipecomp.kernels import ops
from pipecomp.kernels.ops import QuantizerOptions
from pipecomp.kernels.reference.batches import DecodeItem, EncodeItem
from pipecomp.utils.tables import table

Row = dict[str, Any]
SHAPES = ((1, 1024, 1600), (8, 128, 768), (8192, 1600))
BITS = (2, 3, 4, 6, 8)
OPERATIONS = (
    *(
        "delta_quantize",
        "delta_quantize stochastic",
        "encode_batch",
        "encode_batch channels",
        "decode_batch channels",
        "encode_fewest",
        "quantize",
        "dequantize",
        "dequantize into m",
    ),
    *("exponential encode", "exponential reduce", "exponential decode"),
    *("linear encode", "linear reduce", "linear decode", "cluster assignment", "top-k 20 %", "crc32"),
)
SAMPLES = 8  # of a micro-batch
LEAST_REPEATS, MOST_REPEATS = 3, 60
FLUSHED_BYTES = 512 << 20  # more than any GPU's cache
SLEPT_CYCLES = 2_000_000  # of a GPU's clock: one or two milliseconds


Call = Callable[[], object]


class Case(NamedTuple):
    """One kernel on one input."""

    operation: str
    bits: int | None
    moved_bytes: int
    call: Call


def bench_kernels(
    *,
    shapes: Sequence[Sequence[int]] = SHAPES,
    bits: Sequence[int] = BITS,
    backends: Sequence[str] = ("auto", "torch"),
    operations: Sequence[str] | None = None,
    threads: int = 1,
    seconds: float = 0.5,
    device: str = "cpu",
) -> list[Row]:
    """Measure every kernel (or those of OPERATIONS that `operations` names) on float32 activations.

    threads: how many both torch and the kernels use, on a CPU; memcpy always uses one. seconds: for one case.
    Returns one row per operation, shape, bits and backend: `ms` and `memcpy_ms` (medians), `gb_per_s` and
    `memcpy_gb_per_s` (1e9 bytes moved a second), `ratio` (the median over neighbouring pairs of memcpy's time over the
    kernel's), `repeats`.
    Raises ConfigError for what there is not, KernelError without the device.
    """
    for name in operations or ():
        require(name in OPERATIONS, "operation", name, ", ".join(OPERATIONS))
    require(threads >= 1, "threads", threads, "a whole number of at least 1")
    require(device in ("cpu", "cuda"), "device", device, "cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise KernelError(f"bench kernels: torch {torch.__version__} finds no CUDA device here")
    rows = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in shapes:
            for backend in backends:
                for case in cases(tuple(shape), bits, backend, device):
                    if operations is None or case.operation in operations:
                        where = {"shape": "x".join(map(str, shape)), "backend": backend, "threads": threads}
                        rows.append(where | measure(case, seconds, device))
    finally:
        torch.set_num_threads(before)
    return rows


def cases(shape: tuple[int, ...], bits: Sequence[int], backend: str, device: str) -> Iterator[Case]:
    """Yield every kernel on one shape, with the bytes it must move."""
    generator = torch.Generator().manual_seed(0)
    # Two inputs in turn: with one, m would equal it after a few calls, and there would be no change to quantize.
    first, second, m = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
    inputs, out = cycle([first, second]), torch.empty_like(m)
    n, H = m.numel(), shape[-1]
    scales = 4 * n // H
    for b in bits:
        packed = n // H * ops.row_bytes(H, b) + scales
        options: Row = {"bits": b, "backend": backend}
        stochastic = options | {"rounding": "stochastic"}
        yield Case("delta_quantize", b, 12 * n + packed, partial(delta, inputs, m, options))
        yield Case("delta_quantize stochastic", b, 12 * n + packed, partial(delta, inputs, m, stochastic))
        payload = torch.empty(packed, dtype=torch.uint8, device=device)
        yield Case(
            "encode_batch", b, 12 * n + packed, partial(batch, inputs, m, payload, QuantizerOptions(b, None), backend)
        )
        channels = QuantizerOptions(b, None, "channels", gain="unbiased")
        longer = torch.empty(packed + H, dtype=torch.uint8, device=device)
        encode = partial(batch, inputs, m, longer, channels, backend)
        encode()
        yield Case("encode_batch channels", b, 12 * n + packed + H, encode)
        yield Case("decode_batch channels", b, 8 * n + packed + H, partial(decoded, longer, m, channels, backend))
        fewest = partial(fitted, inputs, m, payload, QuantizerOptions(b, None), backend)
        yield Case("encode_fewest", b, 12 * n + packed, fewest)
        yield Case("quantize", b, 4 * n + packed, partial(ops.quantize, first, **options))
        codes, scale = ops.quantize(first, b)
        decode = partial(ops.dequantize, codes, scale, shape=shape, **options)
        yield Case("dequantize", b, 4 * n + packed, partial(decode, out=out))
        yield Case("dequantize into m", b, 8 * n + packed, partial(decode, add_to=m))
    yield from gradient_cases(first.reshape(-1), second.reshape(-1), out.reshape(-1), backend)
    yield Case("top-k 20 %", None, 4 * n + 8 * (n // 5), partial(ops.top_k_select, first, 0.2, backend=backend))
    if device == "cpu" and backend == "auto":
        yield Case("crc32", None, 4 * n, partial(ops.crc32, first))


def gradient_cases(g: Tensor, h: Tensor, out: Tensor, backend: str) -> Iterator[Case]:
    """Yield the data-parallel kernels on flat gradients g and h."""
    n, norm = g.numel(), float(torch.maximum(g.abs(), h.abs()).max())
    for b in (8, 4):
        options: Row = {"bits": b, "backend": backend}
        a_codes = ops.exponential_encode(g, norm, bits=b, workers=MOST_REPEATS)
        b_codes = ops.exponential_encode(h, norm, bits=b, workers=MOST_REPEATS, seed=1)
        both = 4 * n + a_codes.numel()
        encode = partial(ops.exponential_encode, g, norm, workers=2, **options)
        decode = partial(ops.exponential_decode, a_codes.clone(), n, norm, workers=2, out=out, **options)
        yield Case("exponential encode", b, both, encode)
        yield Case("exponential reduce", b, 3 * a_codes.numel(), partial(reduce, a_codes, b_codes, n, options))
        yield Case("exponential decode", b, both, decode)
    for s in (127, 7):
        b = ops.linear_bits(s)
        parts = [ops.linear_encode(v, norm, s) for v in (g, h)]
        sums = ops.linear_reduce(parts, n, s)
        encode = partial(ops.linear_encode, g, norm, s, backend=backend)
        add = partial(ops.linear_reduce, parts, n, s, backend=backend)
        decode = partial(ops.linear_decode, sums, n, norm, s, workers=2, out=out, backend=backend)
        yield Case("linear encode", b, 4 * n + parts[0].numel(), encode)
        yield Case("linear reduce", b, 2 * parts[0].numel() + sums.numel(), add)
        yield Case("linear decode", b, 4 * n + sums.numel(), decode)
    centers = torch.linspace(-2, 2, 16, device=g.device)
    yield Case("cluster assignment", 4, 5 * n, partial(ops.kmeans_assign, g, centers, backend=backend))


def delta(inputs: Iterator[Tensor], m: Tensor, options: Row) -> object:
    """Run the sender's side of one visit."""
    return ops.delta_quantize_(next(inputs), m, **options)


def batch(inputs: Iterator[Tensor], m: Tensor, payload: Tensor, options: QuantizerOptions, backend: str) -> object:
    """Run the sender's side of a micro-batch of SAMPLES samples, without waiting for its flag."""
    return ops.encode_batch(micro_batch(inputs, m, options), payload, backend=backend)


def fitted(inputs: Iterator[Tensor], m: Tensor, payload: Tensor, options: QuantizerOptions, backend: str) -> object:
    """Run the same with the fewest bits that keep an error; all bits are needed."""
    error = min(0.9, 4 / 2**options.bits)  # of normal values and max scales
    return ops.encode_fewest(micro_batch(inputs, m, options), payload, error, 1, options.bits, backend=backend)


def decoded(payload: Tensor, m: Tensor, options: QuantizerOptions, backend: str) -> None:
    """Run the receiver's side of a micro-batch of SAMPLES samples."""
    samples = m.view(-1, m.shape[-1]).chunk(SAMPLES)
    ops.decode_batch(payload, [DecodeItem(m, options, True) for m in samples], backend=backend)


def micro_batch(inputs: Iterator[Tensor], m: Tensor, options: QuantizerOptions) -> list[EncodeItem]:
    """Make SAMPLES samples of the next input and m, all changes."""
    H = m.shape[-1]
    samples = zip(next(inputs).view(-1, H).chunk(SAMPLES), m.view(-1, H).chunk(SAMPLES), strict=True)
    return [EncodeItem(x, m, options, True) for x, m in samples]


def reduce(a: Tensor, b: Tensor, n: int, options: Row) -> object:
    """Reduce as one node of a tree does. `a` grows from call to call, for which `workers` leaves it room."""
    return ops.exponential_reduce_(a, b, n, **options)


def measure(case: Case, seconds: float, device: str) -> Row:
    """Run the kernel and memcpy in turn for about `seconds`."""
    size = case.moved_bytes // 2
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> object:
        if device == "cpu":
            return ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        return target.copy_(source)

    timed = host_seconds if device == "cpu" else partial(device_seconds, flushed(device))
    timed(case.call)
    timed(copy)
    times: list[float] = []
    copies: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < LEAST_REPEATS or (len(times) < MOST_REPEATS and time.perf_counter() < end):
        copies.append(timed(copy))
        times.append(timed(case.call))
    kernel_s, copy_s = statistics.median(times), statistics.median(copies)
    return {
        "operation": case.operation,
        "bits": case.bits,
        "ms": kernel_s * 1e3,
        "memcpy_ms": copy_s * 1e3,
        "gb_per_s": case.moved_bytes / kernel_s / 1e9,
        "memcpy_gb_per_s": case.moved_bytes / copy_s / 1e9,
        "ratio": statistics.median(c / t for c, t in zip(copies, times, strict=True)),
        "repeats": len(times),
    }


def host_seconds(call: Call) -> float:
    """Time a call on the CPU."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@functools.cache
def flushed(device: str) -> Tensor:
    """Memory that is written before each call on a GPU to flush the cache."""
    return torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)


def device_seconds(flush: Tensor, call: Call) -> float:
    """Time a call on the GPU, from its first kernel's start to its last one's end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    # The host must have asked for all of the call before the GPU begins with it: a GPU that waits for the host would be
    # timed, and not the kernels. Writing the memory takes it a fraction of a millisecond; what a host takes to ask for
    # a micro-batch's kernels can be longer.
    torch.cuda._sleep(SLEPT_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def kernels_table(rows: Sequence[Row]) -> Table:
    """Tabulate the rows for people."""
    cells = (
        (
            row["operation"],
            "" if row["bits"] is None else str(row["bits"]),
            row["shape"],
            row["backend"],
            str(row["threads"]),
            f"{row['ms']:.3f}",
            f"{row['memcpy_ms']:.3f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['memcpy_gb_per_s']:.1f}",
            f"{row['ratio']:.2f}",
        )
        for row in rows
    )
    left = ("operation", "shape", "backend")
    headings = (*left[:1], "bits", *left[1:], "threads", "ms", "memcpy ms", "GB/s", "memcpy GB/s", "ratio")
    return table(headings, cells, left=left, title="Kernels against memcpy of the bytes they must move")
