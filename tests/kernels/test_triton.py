"""Triton kernels compiled without a GPU: they compile, and round every operation.

What they compute is tested in Triton's interpreter (test_backends.py) and on a GPU (../gpu/test_kernels_gpu.py).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipecomp.errors import KernelError
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.reference.batches import DecodeItem, EncodeItem
from pipecomp.kernels.reference.layout import QuantizerOptions
from tests.device_copies import DeviceCopies

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

# Rows of several groups; rows, then a bucket, of one value, where Triton takes most arguments for constants.
CASES = {
    "fp32 [3, 100]": (torch.float32, (3, 100), QuantizerOptions(3, 24, "max", "stochastic", 5)),
    "bf16 [3, 1]": (torch.bfloat16, (3, 1), QuantizerOptions(8, None)),
    "fp16 [1, 1]": (torch.float16, (1, 1), QuantizerOptions(4, None, "rms")),
    "fp32 [3, 100] nearest": (torch.float32, (3, 100), QuantizerOptions(2, None, "rms")),
}


@pytest.fixture(scope="module")
def launches() -> dict[str, list[Any]]:
    """The first launch of each compiled kernel, by case."""
    from tests.kernels import triton_launches

    found: dict[str, list[Any]] = {}
    seen: set[str] = set()
    for case, (dtype, shape, options) in CASES.items():
        with triton_launches.recorded() as noted:
            triton_launches.launch_all(torch.empty(shape, dtype=dtype, device="meta"), options)
        new = {launch.key(): launch for launch in reversed(noted)}
        found[case] = [launch for key, launch in new.items() if key not in seen]
        seen |= new.keys()
    assert {launch.name for launch in itertools.chain(*found.values())} == set(triton_launches.KERNELS)
    return found


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("case", CASES)
def test_compiled_kernels_round_every_step(launches, case):
    for launch in launches[case]:
        check(launch, 80)


def test_compiled_kernels_round_every_step_on_newer_gpus(launches):
    for launch in {launch.name: launch for launch in itertools.chain(*launches.values())}.values():
        check(launch, 90)


def check(launch: Any, capability: int) -> None:
    text = launch.ptx(capability)
    assert f".target sm_{capability}" in text
    assert not re.search(r"\b(fma|mad)(\.\w+)*\.f(32|64)", text), launch
    assert not re.search(r"\b(sqrt|rcp)\.approx", text), launch
    assert ".ftz" not in text, f"denormals would be flushed to zero: {launch}"
    assert "div.full" not in text, launch
    assert "div.approx" not in text, launch
    assert launch.options["enable_fp_fusion"] is False, f"Triton warns of its default: {launch}"


def test_the_check_above_can_fail(launches):
    first = next(launch for launch in launches["fp32 [3, 100]"] if launch.name == "quantize_kernel")
    assert re.search(r"\bfma\.rn\.f32", first.ptx(enable_fp_fusion=True))


def test_norms_may_be_whole_numbers():
    """Triton would treat them as integers and not divide by them."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels.reference.gradients import LinearCodes
    from pipecomp.kernels.triton import BACKEND
    from tests.kernels.triton_launches import recorded

    g_d = torch.empty(100, device="meta")
    with recorded() as launches:
        BACKEND.linear_encode(g_d, 2, LinearCodes((7,), None, 4), 5, 0)
        BACKEND.exponential_encode(g_d, 2, 8, 1, 5, 0)
        BACKEND.scale_index(g_d, 2, (7, 30))
    assert len(launches) == 3
    for launch in launches:
        assert "div.rn.f32" in launch.ptx(), launch


@pytest.mark.parametrize("rows", [[5, 1, 40], [8000, 192]], ids=str)
def test_a_batch_copies_a_few_numbers_per_sample(rows):
    """In one copy, with no numbers per row: a copy of more than 64 KiB would wait for the device."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels.triton import BACKEND
    from tests.kernels.triton_launches import recorded

    o, x = QuantizerOptions(4, None), torch.zeros(sum(rows), 2, device="meta")
    payload = torch.empty(ops.payload_bytes(*x.shape, o, x.dtype), dtype=torch.uint8, device="meta")
    with recorded() as launches, DeviceCopies() as copied:
        BACKEND.encode_batch([EncodeItem(each, each, o, True) for each in x.split(rows)], payload, None)
        BACKEND.decode_batch(payload, [DecodeItem(each, o, True) for each in x.split(rows)])
    for launch in launches:
        values = launch.arguments["table"].numel(), launch.arguments["w"].numel()
        assert values == (len(rows) * launch.arguments["FIELDS"], 1 << o.bits)
    assert copied.values == [8 * len(rows) + 8] * 2  # two values of w have the bytes of one of the table


@pytest.mark.parametrize("scale", ["channels", "cached_channels"])
def test_scales_of_channels_take_one_more_launch(scale):
    """Of a packet's sums; its values are read twice and written once, as with other scales."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels.triton import BACKEND
    from tests.kernels.triton_launches import recorded

    o, x = QuantizerOptions(2, None, scale, gain="unbiased"), torch.zeros(192, 32, device="meta")
    items = [EncodeItem(each, each, o, True) for each in x.split(64)]
    payload = torch.empty(ops.batch_bytes(items), dtype=torch.uint8, device="meta")
    with recorded() as launches:
        BACKEND.encode_batch(items, payload, None)
        BACKEND.decode_batch(payload, [DecodeItem(v.m, o, True) for v in items])
    sums = ["channel_sums_kernel"]
    assert [launch.name for launch in launches] == [
        *(*sums, "encode_kernel"),
        *(*(sums if scale == "cached_channels" else []), "decode_kernel"),
    ]
    assert "sqrt.rn.f64" in launches[1].ptx()
    assert "div.rn.f64" in launches[1].ptx()


def test_encode_fewest_copies_once():
    """The result stays on the device."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels.triton import BACKEND
    from tests.kernels.triton_launches import recorded

    o, x = QuantizerOptions(8, None), torch.zeros(192, 2, device="meta")
    payload = torch.empty(ops.payload_bytes(*x.shape, o, x.dtype), dtype=torch.uint8, device="meta")
    with recorded() as launches, DeviceCopies() as copied:
        BACKEND.encode_fewest([EncodeItem(each, each, o, True) for each in x.split(64)], 0.1, 2, 8, payload)
    assert [launch.name for launch in launches] == ["distortion_kernel", "choose_kernel", "encode_kernel"]
    assert copied.values == [8 * 3 + 255]  # the samples' numbers; what codes stand for, two in one


@pytest.mark.parametrize("shift", [0, 1])
def test_aligned_values_are_moved_four_at_a_time(shift):
    """At other addresses a GPU would raise an error."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels.triton import BACKEND
    from tests.kernels.triton_launches import recorded

    o, H = QuantizerOptions(4, None), 1024
    x, m = torch.randn(5 * H), torch.randn(5 * H + shift)
    samples = [(x[: 2 * H].view(2, H), m[: 2 * H].view(2, H)), (x[2 * H :].view(3, H), m[2 * H + shift :].view(3, H))]
    payload = torch.empty(ops.payload_bytes(5, H, o, torch.float32), dtype=torch.uint8)
    with recorded() as launches:
        BACKEND.encode_batch([EncodeItem(a, b, o, True) for a, b in samples], payload, None)
        BACKEND.decode_batch(payload, [DecodeItem(b, o, True) for _, b in samples])
    assert [launch.name for launch in launches] == ["encode_kernel", "decode_kernel"]
    for launch in launches:
        text = launch.ptx()
        for way in ("ld", "st"):
            assert bool(re.search(rf"\b{way}\.global(\.\w+)*\.v[24]\.", text)) == (not shift), (launch.name, way)


def test_kernels_run_where_their_tensors_are(monkeypatch):
    """Triton launches on the current device, not on that of the tensors."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels.triton import BACKEND, rows

    current: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x, y, o = torch.empty(2, 8), torch.empty(2, 8), QuantizerOptions(4, None)
    monkeypatch.setattr(rows, "OPERATIONS", {})
    found = rows.operation(lambda *args: list(current))
    assert found(x, y, o)[0] is x
    assert found([x, y], 4)[0] is x
    assert found([EncodeItem(x, y, o)], y, None)[0] is x
    assert found([], y)[0] is y
    assert not current
    for name, function in vars(BACKEND).items():
        assert function.__code__ is found.__code__, name


def test_a_long_row_fits_into_a_grid(monkeypatch):
    """The second and third dimension end at 65,535."""
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels.triton import BACKEND, gradients, rows
    from tests.kernels.triton_launches import recorded

    d, o = 100_000_000, QuantizerOptions(4, None, "rms")
    x, codes = torch.empty(1, d, device="meta"), torch.empty(1, d // 2, dtype=torch.uint8, device="meta")
    with recorded() as launches:
        rows.launch_quantize(x, None, o)
        rows.launch_dequantize(codes, x[:, :1], o, x, False)
        BACKEND.pack_bits(x.to(torch.int32), 8)
        BACKEND.unpack_bits(codes, 4, d)
        BACKEND.select(x, 0.1, 1000)
        item = EncodeItem(x, None, o._replace(group_size=1000, scale="max"))
        BACKEND.encode_batch([item], torch.empty(d, dtype=torch.uint8, device="meta"), None)
        BACKEND.decode_batch(torch.empty(d, dtype=torch.uint8, device="meta"), [DecodeItem(x, o)])
    assert gradients.flat_grid(d, 10) == rows.grid(1, d, 10) == (d // 10,)
    assert {launch.name for launch in launches} == {
        *("quantize_kernel", "measure_kernel", "squares_kernel", "dequantize_kernel", "pack_kernel", "unpack_kernel"),
        *("select_kernel", "encode_kernel", "decode_kernel"),
    }
    for launch in launches:
        first, *others = launch.grid
        assert 65_535 < first < 2**31, launch
        assert all(other <= 65_535 for other in others), launch


def test_triton_does_not_take_cpu_tensors_outside_its_interpreter():
    with pytest.raises(KernelError, match=r"triton.*(GPU tensors|not installed)"):
        ops.quantize(torch.zeros(2, 8), 4, backend="triton")
    assert isinstance(dispatch.load_triton("cpu"), str)
