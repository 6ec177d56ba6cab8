"""Triton kernels compiled for a GPU that need not be there: they compile, and nothing in them rounds differently.

What they compute is tested in Triton's interpreter (test_kernels_backends.py) and on a GPU (gpu/test_kernels_gpu.py).
"""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipecomp.errors import KernelError
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.layout import Options
from pipecomp.kernels.ragged import Arriving, Visit

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

FLOATS, INT = "*fp32", "i32"
GROUPS = dict.fromkeys(("x_stride", "m_stride", "H", "GROUP", "GROUPS", "GROUP_BYTES", "ROW_BYTES"), INT)
QUANTIZE = {"x": FLOATS, "m": FLOATS, "codes": "*u8", "scales": FLOATS, "bad": "*i64", "keys": "*i64", **GROUPS}
DEQUANTIZE = {"codes": "*u8", "scales": FLOATS, "w": FLOATS, "out": FLOATS, "bad": "*i64", "out_stride": INT, **GROUPS}
ENCODE = {"g": FLOATS, "codes": "*u8", "keys": "*i64", "start": "i64", "d": INT, "divisor": "fp32", "size_bytes": INT}
KEPT = dict.fromkeys(("K", "KEPT", "KEPT_LAST"), INT)
KERNELS = {
    "quantize_kernel": (
        QUANTIZE,
        {"BITS": 3, "DELTA": True, "MEASURE": True, "STOCHASTIC": True, "BF16_SCALE": True, "OCT": 128},
    ),
    "squares_kernel": ({**QUANTIZE, "largest": "*fp32", "sums": "*i64"}, {"DELTA": True, "BLOCK": 256}),
    "dequantize_kernel": (DEQUANTIZE, {"BITS": 3, "ADD": True, "GUARDED": True, "BLOCK": 256}),
    "linear_encode_kernel": (
        {**ENCODE, "index": "*u8", "levels": "*fp32", "offset": "i32"},
        {"BITS": 4, "INDEXED": True, "OCT": 32},
    ),
    "exponential_encode_kernel": ({**ENCODE, "smallest": "fp32", "depth": "i32"}, {"BITS": 4, "OCT": 32}),
    "exponential_reduce_kernel": (
        {"a": "*u8", "b": "*u8", "keys": "*i64", "extension_keys": "*i64", "d": "i32", "size_bytes": "i32"},
        {"BITS": 8, "OCT": 32},
    ),
    "select_kernel": ({"values": "*fp32", "index": "*i32", "x": "*fp32", **GROUPS, **KEPT}, {"BLOCK": 256}),
}


def ptx(name: str, fuse: bool) -> str:
    """PTX of a kernel for compute capability 8.0."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pipecomp.kernels import triton_gradient, triton_quantize

    kernel = getattr(triton_quantize, name, None) or getattr(triton_gradient, name)
    types, constants = KERNELS[name]
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in kernel.arg_names},
        constexprs={(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": fuse})
    text: str = compiled.asm["ptx"]
    return text


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_kernels_round_every_step(name):
    text = ptx(name, fuse=False)
    assert not re.search(r"\b(fma|mad)(\.\w+)*\.f32", text)
    assert ".ftz" not in text, "denormals would be flushed to zero"
    assert "div.full" not in text
    assert "div.approx" not in text


def test_the_check_above_can_fail():
    assert re.search(r"\bfma\.rn\.f32", ptx("quantize_kernel", fuse=True))


@pytest.mark.parametrize("rows", [[5, 0, 40], [8000, 192]], ids=str)
def test_of_a_batch_the_device_gets_some_numbers_a_sample(rows):
    """Not some a row: a copy of more than 64 KiB would wait for the device."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels import triton_ragged

    copied: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if args and isinstance(args[0], torch.Tensor) and args[0].device != out.device:
                copied.append(out.numel())
            return out

    for device in ("cpu", "meta"):
        x, part = torch.zeros(sum(rows), 2, device=device), torch.zeros(1, dtype=torch.uint8, device=device)
        batch = [(i, each, None, part, i) for i, each in enumerate(x.split(rows))]
        with Copies():
            _, table, of_rows = triton_ragged._table(batch, x, x, part, 4, None)
        if device == "cpu":
            assert of_rows.tolist() == [i for i, n in enumerate(rows) for _ in range(n)]
            assert table.view(len(rows), -1)[:, 4].tolist() == [sum(rows[:i]) for i in range(len(rows))]
        assert of_rows.device == table.device == part.device
    assert copied == [len(rows) * (triton_ragged.FIELDS + 1)]


def test_a_long_row_fits_into_a_grid(monkeypatch):
    """Its second dimension and its third end at 65,535."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels import triton_backend, triton_buckets, triton_gradient, triton_quantize, triton_ragged
    from pipecomp.kernels import triton_rows as rows

    grids: dict[str, tuple[int, ...]] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]):
            grids[self._name] = grid
            return lambda *args, **kwargs: None

    for module in (triton_quantize, triton_gradient, triton_ragged):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(name))

    d, o = 100_000_000, Options(4, None, "rms")
    x, codes = torch.empty(1, d, device="meta"), torch.empty(1, d // 2, dtype=torch.uint8, device="meta")
    rows.launch_quantize(x, None, o)
    rows.launch_dequantize(codes, x[:, :1], 4, x, None, "nearest", False)
    triton_backend.pack_bits(x.to(torch.int32), 8)
    triton_backend.unpack_bits(codes, 4, d)
    triton_backend.select(x, 0.1, 1000)
    visit = Visit(x, None, o._replace(group_size=1000, scale="max"))
    triton_backend.encode_batch([visit], torch.empty(d, dtype=torch.uint8, device="meta"), None)
    triton_backend.decode_batch(torch.empty(d, dtype=torch.uint8, device="meta"), [Arriving(x, o)])
    few = 10
    assert triton_buckets.flat_grid(d, few) == rows.grid(1, d, few) == (d // few,)
    assert set(grids) == {
        *("quantize_kernel", "measure_kernel", "squares_kernel", "dequantize_kernel", "pack_kernel", "unpack_kernel"),
        *("select_kernel", "encode_kernel", "decode_kernel"),
    }
    for name, (first, *others) in grids.items():
        assert 65_535 < first < 2**31, name
        assert all(other <= 65_535 for other in others), name


def test_triton_does_not_take_cpu_tensors_outside_its_interpreter():
    with pytest.raises(KernelError, match=r"triton.*(GPU tensors|not installed)"):
        ops.quantize(torch.zeros(2, 8), 4, backend="triton")
    assert isinstance(dispatch.load_triton("cpu"), str)
