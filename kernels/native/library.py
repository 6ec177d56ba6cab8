"""The compiled library of native kernels: its interface, version and instruction sets.

The library is the package's optional extension, `_native*.so` in the folder of `pipecomp.kernels`.
`python -m pipecomp.kernels.build` compiles it in a source tree.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

import torch

from pipecomp.errors import KernelError

ABI = 13
ISAS = ("portable", "avx2", "avx512")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _fields(*kinds: tuple[type, str]) -> tuple[tuple[str, type], ...]:
    """List a structure's fields from (type, names) pairs."""
    return tuple((name, kind) for kind, names in kinds for name in names.split())


class QuantizeArgs(ctypes.Structure):
    """`QuantizeArgs` of shared.h."""

    _fields_ = _fields(
        (c_void_p, "x m fresh codes scales channels inverse"),
        (c_int64, "x_stride m_stride rows H group"),
        (c_uint64, "seed"),
        (c_int32, "dtype bits rms stochastic unbiased"),
    )


class DequantizeArgs(ctypes.Structure):
    """`DequantizeArgs` of shared.h."""

    _fields_ = _fields(
        (c_void_p, "codes scales channels out"),
        (c_int64, "out_stride rows H group"),
        (c_int32, "dtype bits stochastic add"),
    )


class ChannelsArgs(ctypes.Structure):
    """`ChannelsArgs` of shared.h."""

    _fields_ = _fields((c_void_p, "block channels"), (c_int64, "H"), (c_double, "floor"), (c_int32, "cached"))


class LinearArgs(ctypes.Structure):
    """`LinearArgs` of shared.h."""

    _fields_ = _fields(
        (c_void_p, "g index levels codes"),
        (c_int64, "d"),
        (c_uint64, "seed start"),
        (c_float, "norm"),
        (c_int32, "dtype offset bits count"),
    )


class LinearReduceArgs(ctypes.Structure):
    """`LinearReduceArgs` of shared.h."""

    _fields_ = _fields((c_void_p, "codes out"), (c_int64, "d"), (c_int32, "parts bits sum_bits"))


class LinearDecodeArgs(ctypes.Structure):
    """`LinearDecodeArgs` of shared.h."""

    _fields_ = _fields((c_void_p, "codes index factors out"), (c_int64, "d"), (c_int32, "bits offset add count"))


class ExponentialArgs(ctypes.Structure):
    """`ExponentialArgs` of shared.h."""

    _fields_ = _fields(
        (c_void_p, "g codes out"),
        (c_int64, "d"),
        (c_uint64, "seed start"),
        (c_float, "norm"),
        (c_int32, "dtype bits depth add"),
    )


class ReduceArgs(ctypes.Structure):
    """`ReduceArgs` of shared.h."""

    _fields_ = _fields((c_void_p, "a b"), (c_int64, "d"), (c_uint64, "seed extension_seed"), (c_int32, "bits"))


class FeedbackArgs(ctypes.Structure):
    """`FeedbackArgs` of shared.h."""

    _fields_ = _fields((c_void_p, "x e codes scales"), (c_int64, "d group"), (c_int32, "dtype bits mean"))


class FeedbackReduceArgs(ctypes.Structure):
    """`FeedbackReduceArgs` of shared.h."""

    _fields_ = _fields((FeedbackArgs, "to"), (c_void_p, "scratch in_codes in_scales"), (c_int32, "parts"))


class SketchArgs(ctypes.Structure):
    """`SketchArgs` of shared.h."""

    _fields_ = _fields(
        (c_void_p, "x bounds size first last codes means out sums numbers"),
        (c_int64, "d slots"),
        (c_uint64, "seed"),
        (c_float, "divisor"),
        (c_int32, "bits clusters add rounds"),
    )


def struct_of(block: type[ctypes.Structure]) -> struct.Struct:
    """Describe an argument block to `struct`, which fills it several times faster than field by field."""
    codes = {c_void_p: "P", c_int64: "q", c_uint64: "Q", c_int32: "i", c_float: "f", c_double: "d"}
    return struct.Struct("".join(codes[kind] for _, kind, *_ in block._fields_) + "0q")


BLOCKS: dict[str, type[ctypes.Structure]] = {  # by function: those that take one argument block
    **{"quantize": QuantizeArgs, "dequantize": DequantizeArgs},
    **{"linear_encode": LinearArgs, "linear_reduce": LinearReduceArgs, "linear_decode": LinearDecodeArgs},
    **{"exponential_encode": ExponentialArgs, "exponential_decode": ExponentialArgs, "exponential_reduce": ReduceArgs},
    **{"feedback_quantize": FeedbackArgs, "feedback_reduce": FeedbackReduceArgs},
    **{"sketch_encode": SketchArgs, "sketch_decode": SketchArgs},
}
_BATCH = (c_void_p, c_int64, c_int64, c_void_p, c_int32)  # samples, their number and values; scales of channels
PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {  # by function: its result and arguments
    **{name: (None, [c_void_p, c_int32, c_int32]) for name in BLOCKS},  # block, instruction set, threads
    "quantize": (c_int64, [c_void_p, c_int32, c_int32]),
    "abi": (c_int32, []),
    "best_isa": (c_int32, []),
    "crc32": (c_uint32, [c_uint32, c_void_p, c_int64]),
    "encode_batch": (c_int64, [*_BATCH, c_void_p, c_int64, c_int32, c_int32]),
    "decode_batch": (None, [*_BATCH, c_int32, c_int32]),
    "distortion": (None, [*_BATCH, c_void_p, c_int64, c_void_p, c_int32, c_int32]),
    "fewest_bits": (c_int32, [c_void_p, c_int64, c_int64, c_double, c_int32, c_int32, c_void_p, c_int32, c_int32]),
    "scale_index": (None, [c_void_p, c_void_p, c_int32, c_int64, c_float, c_void_p, c_int32, c_int32, c_int32]),
    "kmeans_assign": (None, [c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_int32, c_int32, c_int32]),
    "pack": (None, [c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int32, c_int32]),
    "unpack": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32]),
    "select": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32, *[c_int64] * 6, c_int32, c_int32]),
}


def library_path() -> Path | None:
    """Find the newest library in the folder of `pipecomp.kernels`; None if it was never built."""
    folder = Path(__file__).resolve().parents[1]
    paths = [p for p in folder.glob("_native*") if p.suffix in (".so", ".dylib", ".pyd")]
    return max(paths, key=lambda p: p.stat().st_mtime, default=None)


class Library:
    """The loaded library on one instruction set.

    isa: "portable", "avx2" or "avx512"; None takes the best of this CPU. threads: None follows torch.
    Raises KernelError if the library does not load or the CPU lacks the instruction set.
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
        """Maximum number of threads of a call."""
        return torch.get_num_threads() if self.fixed_threads is None else self.fixed_threads
