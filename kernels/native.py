"""The native backend: C++ kernels for CPU tensors, called through ctypes, which releases the GIL for the call.

The library is the optional extension of the package, `_native*.so` beside this file; `python -m pipecomp.kernels.build`
makes it in a source tree. Threads: as many as torch uses, where there is enough to do; results do not depend on them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipecomp.errors import KernelError
from pipecomp.kernels import dithering, layout, reference, topk
from pipecomp.kernels.layout import Options
from pipecomp.kernels.rng import MASK64

ABI = 2
ISAS = ("portable", "avx2", "avx512")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class QuantizeArgs(ctypes.Structure):
    """`QuantizeArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "m", "codes", "scales")),
        *((name, c_int64) for name in ("x_stride", "m_stride", "rows", "H", "group")),
        ("seed", c_uint64),
        *((name, c_int32) for name in ("dtype", "bits", "rms", "stochastic", "bf16_scale")),
    )


class DequantizeArgs(ctypes.Structure):
    """`DequantizeArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "out")),
        *((name, c_int64) for name in ("out_stride", "rows", "H", "group")),
        *((name, c_int32) for name in ("bits", "stochastic", "add")),
    )


class LinearArgs(ctypes.Structure):
    """`LinearArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("g", "index", "levels", "codes")),
        ("d", c_int64),
        *((name, c_uint64) for name in ("seed", "start")),
        ("norm", c_float),
        *((name, c_int32) for name in ("dtype", "offset", "bits")),
    )


class ExponentialArgs(ctypes.Structure):
    """`ExponentialArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("g", "codes", "out")),
        ("d", c_int64),
        *((name, c_uint64) for name in ("seed", "start")),
        ("norm", c_float),
        *((name, c_int32) for name in ("dtype", "bits", "depth")),
    )


class ReduceArgs(ctypes.Structure):
    """`ReduceArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b")),
        ("d", c_int64),
        *((name, c_uint64) for name in ("seed", "extension_seed")),
        ("bits", c_int32),
    )


PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "abi": (c_int32, []),
    "best_isa": (c_int32, []),
    "quantize": (c_int64, [c_void_p, c_int32, c_int32]),
    "dequantize": (None, [c_void_p, c_int32, c_int32]),
    "linear_encode": (None, [c_void_p, c_int32, c_int32]),
    "linear_add": (None, [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_int32]),
    "linear_decode": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32]),
    "scale_index": (None, [c_void_p, c_void_p, c_int32, c_int64, c_float, c_void_p, c_int32, c_int32, c_int32]),
    "exponential_encode": (None, [c_void_p, c_int32, c_int32]),
    "exponential_decode": (None, [c_void_p, c_int32, c_int32]),
    "exponential_reduce": (None, [c_void_p, c_int32, c_int32]),
    "kmeans_assign": (None, [c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_int32, c_int32, c_int32]),
    "pack": (None, [c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int32, c_int32]),
    "unpack": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32]),
    "select": (
        c_int32,
        [c_void_p, c_void_p, c_void_p, c_int32, *[c_int64] * 6, c_int32, c_int32],
    ),
    "crc32": (c_uint32, [c_uint32, c_void_p, c_int64]),
}


def row_stride(x: Tensor) -> int | None:
    """Values from one row of [..., H] to the next, if rows are dense and evenly spaced without overlap; else None."""
    H = x.shape[-1]
    if x.is_contiguous():
        return H
    if H > 1 and x.stride(-1) != 1:
        return None
    stride, step = H, None
    for size, this in reversed(list(zip(x.shape[:-1], x.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if step is None:
            stride = step = this
            if this < H:
                return None
        elif this != step:
            return None
        step = this * size
    return stride


def with_stride(x: Tensor) -> tuple[Tensor, int]:
    """x itself where its rows can be walked, else a contiguous copy; and its row stride."""
    stride = row_stride(x)
    return (x.contiguous(), x.shape[-1]) if stride is None else (x, stride)


def rows_of(shape: Sequence[int]) -> int:
    """Product of all dimensions but the last."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


class Backend:
    """The native kernels under the names that `dispatch` looks for, on one instruction set.

    isa: "portable", "avx2" or "avx512"; None takes the best this CPU has. threads: None follows torch.
    Raises KernelError if the library or this CPU does not have what is asked for.
    """

    def __init__(self, path: Path, isa: str | None = None, threads: int | None = None) -> None:
        try:
            self.library = ctypes.CDLL(str(path))
            for name, (result, arguments) in PROTOTYPES.items():
                function = getattr(self.library, f"pipecomp_{name}")
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise KernelError(f"native kernels: {path.name} does not load ({error})") from error
        if self.library.pipecomp_abi() != ABI:
            raise KernelError(f"native kernels: {path.name} is of another version, build it again")
        best = self.library.pipecomp_best_isa()
        self.isa = ISAS[best] if isa is None else isa
        if self.isa not in ISAS[: best + 1]:
            raise KernelError(f"native kernels: instruction set {isa!r}, allowed here: {', '.join(ISAS[: best + 1])}")
        self.isa_index = ISAS.index(self.isa)
        self.fixed_threads = threads

    @property
    def threads(self) -> int:
        """Threads that a call may use."""
        return torch.get_num_threads() if self.fixed_threads is None else self.fixed_threads

    def quantize(self, x: Tensor, options: Options, name: str = "x") -> tuple[Tensor, Tensor]:
        """As `reference.quantize`."""
        return self._quantize(x, None, options, name)

    def delta_quantize_(self, a: Tensor, m: Tensor, options: Options, name: str = "a - m") -> tuple[Tensor, Tensor]:
        """As `reference.delta_quantize_`."""
        walkable, _ = with_stride(m)
        pair = self._quantize(a, walkable, options, name)
        if walkable is not m:
            m.copy_(walkable)
        return pair

    def _quantize(self, x: Tensor, m: Tensor | None, options: Options, name: str) -> tuple[Tensor, Tensor]:
        shape, H = tuple(x.shape), x.shape[-1]
        x, x_stride = with_stride(x)
        codes = torch.empty((*shape[:-1], layout.row_bytes(H, options.bits, options.group_size)), dtype=torch.uint8)
        scales = torch.empty(layout.scale_shape(shape, options.group_size), dtype=torch.float32)
        args = QuantizeArgs(
            x=x.data_ptr(),
            m=None if m is None else m.data_ptr(),
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            x_stride=x_stride,
            m_stride=H if m is None else row_stride(m) or H,
            rows=rows_of(shape),
            H=H,
            group=H if options.group_size is None else min(options.group_size, H),
            seed=options.seed & MASK64,
            dtype=DTYPES[x.dtype],
            bits=options.bits,
            rms=options.scale == "rms",
            stochastic=options.rounding == "stochastic",
            bf16_scale=options.scale_dtype == torch.bfloat16,
        )
        if x.numel():
            bad = self.library.pipecomp_quantize(ctypes.byref(args), self.isa_index, self.threads)
            if bad >= 0:
                raise reference.non_finite(name, bad)
        return codes, scales

    def dequantize(
        self,
        codes: Tensor,
        scale: Tensor,
        bits: int,
        shape: tuple[int, ...],
        group_size: int | None,
        rounding: str,
        out: Tensor | None,
        add: bool,
    ) -> Tensor:
        """As `reference.dequantize`."""
        codes, scale = codes.contiguous(), scale.contiguous()
        target = torch.empty(shape, dtype=torch.float32) if out is None else out
        out, stride = with_stride(target)
        args = DequantizeArgs(
            codes=codes.data_ptr(),
            scales=scale.data_ptr(),
            out=out.data_ptr(),
            out_stride=stride,
            rows=rows_of(shape),
            H=shape[-1],
            group=shape[-1] if group_size is None else min(group_size, shape[-1]),
            bits=bits,
            stochastic=rounding == "stochastic",
            add=add,
        )
        if out.numel():
            self.library.pipecomp_dequantize(ctypes.byref(args), self.isa_index, self.threads)
        return target if out is target else target.copy_(out)

    def pack_bits(self, values: Tensor, bits: int) -> Tensor:
        """As `bitpack.pack_bits`."""
        values = values.contiguous()
        n = values.shape[-1]
        codes = torch.empty((*values.shape[:-1], (n * bits + 7) // 8), dtype=torch.uint8)
        size, rows = values.element_size(), rows_of(values.shape)
        if codes.numel():
            self.library.pipecomp_pack(codes.data_ptr(), values.data_ptr(), size, rows, n, bits, self.isa_index)
        return codes

    def unpack_bits(self, codes: Tensor, bits: int, count: int) -> Tensor:
        """As `bitpack.unpack_bits`."""
        codes = codes.contiguous()
        values = torch.empty((*codes.shape[:-1], count), dtype=torch.int32)
        if values.numel():
            rows = rows_of(codes.shape)
            self.library.pipecomp_unpack(values.data_ptr(), codes.data_ptr(), rows, count, bits, self.isa_index)
        return values

    def select(self, x: Tensor, fraction: float, group_size: int | None) -> tuple[Tensor, Tensor]:
        """As `topk.select`."""
        H = x.shape[-1]
        x, stride = with_stride(x)
        group = H if group_size is None else min(group_size, H)
        K = topk.row_kept(H, fraction, group_size)
        values = torch.empty((*x.shape[:-1], K), dtype=torch.float32)
        index = torch.empty((*x.shape[:-1], K), dtype=torch.int32)
        kept, kept_last = topk.kept(group, fraction), topk.kept(H % group or group, fraction)
        if values.numel() and self.library.pipecomp_select(
            values.data_ptr(),
            index.data_ptr(),
            x.data_ptr(),
            DTYPES[x.dtype],
            stride,
            rows_of(x.shape),
            H,
            group,
            kept,
            kept_last,
            self.isa_index,
            self.threads,
        ):
            raise KernelError(f"native kernels: no memory to order {group} values")
        return values, index

    def crc32(self, data: memoryview, value: int) -> int:
        """As `zlib.crc32`, of contiguous bytes."""
        array = np.frombuffer(data, dtype=np.uint8) if data.nbytes else np.empty(0, np.uint8)
        crc: int = self.library.pipecomp_crc32(value & 0xFFFFFFFF, array.ctypes.data, array.size)
        return crc

    def linear_encode(
        self,
        g_d: Tensor,
        norm: float,
        levels: tuple[int, ...],
        index_d: Tensor | None,
        bits: int,
        seed: int,
        start: int,
    ) -> Tensor:
        """As `dithering.linear_encode`."""
        g_d = g_d.contiguous()
        index_d = None if index_d is None else index_d.contiguous()
        table = (c_float * len(levels))(*levels)
        codes = torch.empty((g_d.numel() * bits + 7) // 8, dtype=torch.uint8)
        args = LinearArgs(
            g=g_d.data_ptr(),
            index=None if index_d is None else index_d.data_ptr(),
            levels=ctypes.addressof(table),
            codes=codes.data_ptr(),
            d=g_d.numel(),
            seed=seed & MASK64,
            start=start,
            norm=norm,
            dtype=DTYPES[g_d.dtype],
            offset=min(levels),
            bits=bits,
        )
        self.library.pipecomp_linear_encode(ctypes.byref(args), self.isa_index, self.threads)
        return codes

    def linear_add_(self, total_d: Tensor, codes: Tensor, bits: int, offset: int) -> Tensor:
        """As `dithering.linear_add_`."""
        total, codes = total_d.contiguous(), codes.contiguous()
        d = total.numel()
        self.library.pipecomp_linear_add(
            total.data_ptr(), codes.data_ptr(), d, bits, offset, self.isa_index, self.threads
        )
        return total_d if total is total_d else total_d.copy_(total)

    def linear_decode(
        self,
        total_d: Tensor,
        norm: float,
        levels: tuple[int, ...],
        index_d: Tensor | None,
        workers: int,
        out: Tensor | None,
    ) -> Tensor:
        """As `dithering.linear_decode`."""
        total_d = total_d.contiguous()
        index_d = None if index_d is None else index_d.contiguous()
        factors = (c_float * len(levels))(*dithering.linear_factors(norm, levels, workers))
        out = torch.empty(total_d.numel(), dtype=torch.float32) if out is None else out
        index = None if index_d is None else index_d.data_ptr()
        self.library.pipecomp_linear_decode(
            out.data_ptr(), total_d.data_ptr(), index, factors, out.numel(), self.isa_index, self.threads
        )
        return out

    def scale_index(self, g_d: Tensor, norm: float, levels: tuple[int, ...]) -> Tensor:
        """As `dithering.scale_index`."""
        g_d = g_d.contiguous()
        d, count = g_d.numel(), len(levels)
        table = (c_float * count)(*levels)
        out = torch.empty(d, dtype=torch.uint8)
        dtype = DTYPES[g_d.dtype]
        self.library.pipecomp_scale_index(
            out.data_ptr(), g_d.data_ptr(), dtype, d, norm, table, count, self.isa_index, self.threads
        )
        return out

    def exponential_encode(self, g_d: Tensor, norm: float, bits: int, depth: int, seed: int, start: int) -> Tensor:
        """As `dithering.exponential_encode`."""
        g_d = g_d.contiguous()
        codes = torch.empty((g_d.numel() * bits + 7) // 8, dtype=torch.uint8)
        args = ExponentialArgs(
            g=g_d.data_ptr(),
            codes=codes.data_ptr(),
            d=g_d.numel(),
            seed=seed & MASK64,
            start=start,
            norm=norm,
            dtype=DTYPES[g_d.dtype],
            bits=bits,
            depth=depth,
        )
        self.library.pipecomp_exponential_encode(ctypes.byref(args), self.isa_index, self.threads)
        return codes

    def exponential_decode(
        self, codes: Tensor, d: int, norm: float, bits: int, depth: int, workers: int, out: Tensor | None
    ) -> Tensor:
        """As `dithering.exponential_decode`."""
        codes = codes.contiguous()
        out = torch.empty(d, dtype=torch.float32) if out is None else out
        factor = dithering.exponential_factor(norm, workers)
        args = ExponentialArgs(codes=codes.data_ptr(), out=out.data_ptr(), d=d, norm=factor, bits=bits, depth=depth)
        self.library.pipecomp_exponential_decode(ctypes.byref(args), self.isa_index, self.threads)
        return out

    def exponential_reduce_(self, a: Tensor, b: Tensor, d: int, bits: int, seed: int) -> Tensor:
        """As `dithering.exponential_reduce_`."""
        target, b = a.contiguous(), b.contiguous()
        args = ReduceArgs(
            a=target.data_ptr(),
            b=b.data_ptr(),
            d=d,
            seed=seed & MASK64,
            extension_seed=dithering.extension(seed),
            bits=bits,
        )
        self.library.pipecomp_exponential_reduce(ctypes.byref(args), self.isa_index, self.threads)
        return a if target is a else a.copy_(target)

    def kmeans_assign(self, x_d: Tensor, bounds: Tensor) -> Tensor:
        """As `dithering.kmeans_assign`."""
        x_d, bounds = x_d.contiguous(), bounds.contiguous()
        d, count, dtype = x_d.numel(), bounds.numel(), DTYPES[x_d.dtype]
        out = torch.empty(d, dtype=torch.uint8)
        self.library.pipecomp_kmeans_assign(
            out.data_ptr(), x_d.data_ptr(), dtype, d, bounds.data_ptr(), count, self.isa_index, self.threads
        )
        return out


def library_path() -> Path | None:
    """The built library beside this file, the newest if there are several; None if it was never built."""
    found = [p for p in Path(__file__).resolve().parent.glob("_native*") if p.suffix in (".so", ".dylib", ".pyd")]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def self_check(backend: Backend) -> None:
    """Raise KernelError unless the kernels give the reference's bytes on a small sample.

    Catches what no build flag can rule out: a compiler that contracts multiply and add, a CPU that flushes denormals.
    """
    values = torch.linspace(-3, 3, 210).sin().reshape(3, 70) ** 3
    for rounding in reference.layout.ROUNDINGS:
        options = Options(bits=3, group_size=None, rounding=rounding, seed=7)
        m, m_again = values * 0.3, values * 0.3
        mine, theirs = backend.delta_quantize_(values, m, options), reference.delta_quantize_(values, m_again, options)
        if not all(torch.equal(a, b) for a, b in zip((*mine, m), (*theirs, m_again), strict=True)):
            raise KernelError(f"native kernels: {backend.isa} code gives other bytes than the reference")


_lock = threading.Lock()


@cache
def _load() -> Backend | str:
    path = library_path()
    if path is None:
        return "native kernels are not built (no C++ compiler at install time?)"
    try:
        backend = Backend(path)
        self_check(backend)
    except KernelError as error:
        return str(error)
    return backend


def load() -> Backend | str:
    """The backend on this CPU's best instruction set, or a sentence saying why there is none."""
    with _lock:
        return _load()
