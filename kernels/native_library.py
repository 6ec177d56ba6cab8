"""Finding and loading the library of native kernels: its interface, its version, its instruction sets.

The library is the optional extension of the package, `_native*.so` beside this file; `python -m pipecomp.kernels.build`
makes it in a source tree.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

import torch

from pipecomp.errors import KernelError

ABI = 11
ISAS = ("portable", "avx2", "avx512")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def layout_of(block: type[ctypes.Structure]) -> struct.Struct:
    """Describe an argument block to `struct`, which fills it several times faster than one field after the other."""
    codes = {c_void_p: "P", c_int64: "q", c_uint64: "Q", c_int32: "i", c_float: "f"}
    return struct.Struct("".join(codes[kind] for _, kind, *_ in block._fields_) + "0q")


class QuantizeArgs(ctypes.Structure):
    """`QuantizeArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "m", "fresh", "codes", "scales")),
        *((name, c_int64) for name in ("x_stride", "m_stride", "rows", "H", "group")),
        ("seed", c_uint64),
        *((name, c_int32) for name in ("dtype", "bits", "rms", "stochastic")),
    )


class DequantizeArgs(ctypes.Structure):
    """`DequantizeArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "out")),
        *((name, c_int64) for name in ("out_stride", "rows", "H", "group")),
        *((name, c_int32) for name in ("dtype", "bits", "stochastic", "add")),
    )


class LinearArgs(ctypes.Structure):
    """`LinearArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("g", "index", "levels", "codes")),
        ("d", c_int64),
        *((name, c_uint64) for name in ("seed", "start")),
        ("norm", c_float),
        *((name, c_int32) for name in ("dtype", "offset", "bits", "count")),
    )


class LinearReduceArgs(ctypes.Structure):
    """`LinearReduceArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "out")),
        ("d", c_int64),
        *((name, c_int32) for name in ("parts", "bits", "sum_bits")),
    )


class LinearDecodeArgs(ctypes.Structure):
    """`LinearDecodeArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "index", "factors", "out")),
        ("d", c_int64),
        *((name, c_int32) for name in ("bits", "offset", "add", "count")),
    )


class ExponentialArgs(ctypes.Structure):
    """`ExponentialArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("g", "codes", "out")),
        ("d", c_int64),
        *((name, c_uint64) for name in ("seed", "start")),
        ("norm", c_float),
        *((name, c_int32) for name in ("dtype", "bits", "depth", "add")),
    )


class ReduceArgs(ctypes.Structure):
    """`ReduceArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b")),
        ("d", c_int64),
        *((name, c_uint64) for name in ("seed", "extension_seed")),
        ("bits", c_int32),
    )


class FeedbackArgs(ctypes.Structure):
    """`FeedbackArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "e", "codes", "scales")),
        *((name, c_int64) for name in ("d", "group")),
        *((name, c_int32) for name in ("dtype", "bits", "mean")),
    )


class FeedbackReduceArgs(ctypes.Structure):
    """`FeedbackReduceArgs` of native.h."""

    _fields_ = (
        ("to", FeedbackArgs),
        *((name, c_void_p) for name in ("scratch", "in_codes", "in_scales")),
        ("parts", c_int32),
    )


class SketchArgs(ctypes.Structure):
    """`SketchArgs` of native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "bounds", "size", "first", "last", "codes", "means", "out")),
        *((name, c_void_p) for name in ("sums", "numbers")),
        *((name, c_int64) for name in ("d", "slots")),
        ("seed", c_uint64),
        ("divisor", c_float),
        *((name, c_int32) for name in ("bits", "clusters", "add", "rounds")),
    )


PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "abi": (c_int32, []),
    "best_isa": (c_int32, []),
    "quantize": (c_int64, [c_void_p, c_int32, c_int32]),
    "dequantize": (None, [c_void_p, c_int32, c_int32]),
    "encode_batch": (c_int64, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32, c_int32]),
    "decode_batch": (None, [c_void_p, c_int64, c_int64, c_int32, c_int32]),
    "distortion": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int32, c_int32]),
    "fewest_bits": (
        c_int32,
        [c_void_p, c_int64, c_int64, c_double, c_int32, c_int32, c_void_p, c_int32, c_int32],
    ),
    "linear_encode": (None, [c_void_p, c_int32, c_int32]),
    "linear_reduce": (None, [c_void_p, c_int32, c_int32]),
    "linear_decode": (None, [c_void_p, c_int32, c_int32]),
    "scale_index": (None, [c_void_p, c_void_p, c_int32, c_int64, c_float, c_void_p, c_int32, c_int32, c_int32]),
    "exponential_encode": (None, [c_void_p, c_int32, c_int32]),
    "exponential_decode": (None, [c_void_p, c_int32, c_int32]),
    "exponential_reduce": (None, [c_void_p, c_int32, c_int32]),
    "feedback_quantize": (None, [c_void_p, c_int32, c_int32]),
    "feedback_reduce": (None, [c_void_p, c_int32, c_int32]),
    "kmeans_assign": (None, [c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_int32, c_int32, c_int32]),
    "sketch_encode": (None, [c_void_p, c_int32, c_int32]),
    "sketch_decode": (None, [c_void_p, c_int32, c_int32]),
    "pack": (None, [c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int32, c_int32]),
    "unpack": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32]),
    "select": (
        c_int32,
        [c_void_p, c_void_p, c_void_p, c_int32, *[c_int64] * 6, c_int32, c_int32],
    ),
    "crc32": (c_uint32, [c_uint32, c_void_p, c_int64]),
}


def library_path() -> Path | None:
    """Find the built library beside this file, the newest if there are several; None if it was never built."""
    found = [p for p in Path(__file__).resolve().parent.glob("_native*") if p.suffix in (".so", ".dylib", ".pyd")]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


class Library:
    """The loaded library on one instruction set; the kernels that use it are methods of subclasses.

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
