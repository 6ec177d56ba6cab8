"""Recorded launches of Triton kernels, with meta tensors and without a GPU, compiled for any target.

Signatures are those of a real launch: an integer of 1 is a constant, others have the width that they need, and
divisibility by 16 is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipecomp.kernels.reference.batches import DecodeItem, EncodeItem
from pipecomp.kernels.reference.gradients import LinearCodes
from pipecomp.kernels.reference.layout import QuantizerOptions
from pipecomp.kernels.triton import BACKEND, batches, fewest_bits, gradients, rows

MODULES = (rows, gradients, batches, fewest_bits)
KERNELS = {name: kernel for module in MODULES for name, kernel in vars(module).items() if name.endswith("_kernel")}
POINTERS = {
    **{torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"},
    **{torch.float64: "*fp64", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"},
}


class Launch(NamedTuple):
    """One launch: arguments by name, and options of the compiler."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def source(self) -> ASTSource:
        """The source that Triton would compile."""
        signature, constants, attributes = {}, {}, {}
        for parameter in KERNELS[self.name].params:
            value = self.arguments[parameter.name]
            kind, divisible = _kind(value)
            if parameter.do_not_specialize:
                kind, divisible = "i32" if kind == "constexpr" else kind, False
            if parameter.is_constexpr or kind == "constexpr":
                constants[parameter.num,] = value
                kind = "constexpr"
            elif divisible:
                attributes[parameter.num,] = [["tt.divisibility", 16]]
            signature[parameter.name] = kind
        return ASTSource(KERNELS[self.name], signature, constants, attributes)

    def key(self) -> str:
        """Identify the compiled kernel."""
        source = self.source()
        return f"{self.name} {source.signature} {source.constants} {source.attrs} {self.options}"

    def ptx(self, capability: int = 80, **options: Any) -> str:
        """Compile it for a GPU. options: override the launch's own."""
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(self.source(), target=target, options={**self.options, **options})
        text: str = compiled.asm["ptx"]
        return text


def _kind(value: Any) -> tuple[str, bool]:
    """An argument's type, and whether 16 divides it."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype], True
    if isinstance(value, int):
        kind = "constexpr" if value == 1 else "i32" if -(2**31) <= value < 2**31 else "i64"
        return kind, value % 16 == 0
    return "fp32", False


class _Recorder:
    def __init__(self, name: str, launches: list[Launch]) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        names = KERNELS[self._name].arg_names

        def launch(*args: Any, **kwargs: Any) -> None:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            options = {key: given.pop(key) for key in list(given) if key not in names}
            self._launches.append(Launch(self._name, grid, given, options))

        return launch


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches instead of executing them."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patched:
        for module in MODULES:
            for name in KERNELS.keys() & vars(module).keys():
                patched.setattr(module, name, _Recorder(name, launches))
        yield launches


def launch_all(x: torch.Tensor, options: QuantizerOptions) -> None:
    """Call everything that launches kernels, with x [R, H], a meta tensor of a dtype that the quantizer takes."""
    m, g_d = torch.empty_like(x, dtype=torch.float32), x.reshape(-1)
    bits, group = options.bits, options.group_size
    codes, scales, bad = rows.launch_quantize(x, None, options)
    rows.launch_quantize(x, m, options)
    rows.launch_dequantize(codes, scales, options, m, False)
    rows.launch_dequantize(codes, scales, options, m, True, bad)
    if options.scale == "rms":  # as with scales of channels
        rows.launch_quantize(x, m, options._replace(gain="unbiased"))
        rows.launch_dequantize(codes, scales, options, m, True, bad, m[0])
    gradients.quantize_with_scales(m.reshape(-1), scales.reshape(-1), bits, group or x.shape[1])
    BACKEND.unpack_bits(BACKEND.pack_bits(x.to(torch.int32), bits), bits, x.shape[1])
    BACKEND.select(x, 0.3, group)
    payload = torch.empty(8 * x.numel(), dtype=torch.uint8, device=x.device)
    for delta in (False, True):
        BACKEND.encode_batch([EncodeItem(x, m, options, delta)], payload, None)
        BACKEND.decode_batch(payload, [DecodeItem(m, options, delta)])
    BACKEND.encode_batch([EncodeItem(x, None, options)], payload, None)
    if options.rounding == "nearest":
        own = options._replace(scale="channels", gain="unbiased")
        for delta in (False, True):
            BACKEND.encode_batch([EncodeItem(x, m, own, delta)], payload, None)
            BACKEND.decode_batch(payload, [DecodeItem(m, own, delta)])
    for item in (EncodeItem(x, m, options, True), EncodeItem(x, None, options)):
        BACKEND.encode_fewest([item], 0.1, 2, 4 if item.delta else 8, payload)
    _launch_gradients(g_d, m.reshape(-1))


def _launch_gradients(g_d: torch.Tensor, out_d: torch.Tensor) -> None:
    index = BACKEND.scale_index(g_d, 1.0, (7, 30))
    for start, levels, where in ((0, (7,), None), (2**31, (7, 30), index)):
        form = LinearCodes(levels, where, 4)
        codes = BACKEND.linear_encode(g_d, 1.0, form, 5, start)
        BACKEND.linear_decode(codes, 1.0, form, 1, out_d, start > 0)
    BACKEND.linear_reduce([codes], g_d.numel(), 4, 8)
    for bits, depth in ((4, 2), (8, 1)):
        codes = BACKEND.exponential_encode(g_d, 1.0, bits, depth, 5, 0)
        BACKEND.exponential_decode(codes, 1.0, bits, depth, 3, out_d, bits == 4)
        BACKEND.exponential_reduce_(codes, codes, g_d.numel(), bits, 5)
    BACKEND.kmeans_assign(g_d, torch.empty(15, device=g_d.device))
