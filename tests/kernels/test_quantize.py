"""The quantizer against a second, plain implementation: one value at a time, in numpy float32 scalars."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.errors import ConfigError, KernelError, NonFiniteError, ShapeError
from pipecomp.kernels import dispatch, ops

BACKENDS = ["torch", "native"] if not isinstance(dispatch.load_native(), str) else ["torch"]
F = np.float32
LOADING = {1: 1.596, 2: 1.991, 3: 2.344, 4: 2.682, 5: 3.01, 6: 3.33, 7: 3.64, 8: 3.94}
M64 = 2**64 - 1


def plain_random(seed: int, index: int) -> np.float32:
    """24 random bits over 2**24, from the hash's definition."""
    z = (seed + 0x9E3779B97F4A7C15 * ((index >> 32) + 1)) & M64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    z ^= z >> 31
    h = (index + z) & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x7FEB352D & 0xFFFFFFFF
    h = (h ^ h >> 15 ^ z >> 32) * 0x846CA68B & 0xFFFFFFFF
    h ^= h >> 16
    return F(h >> 8) * F(2.0**-24)


def plain_scale(values: list[np.float32], bits: int, scale: str) -> np.float32:
    """The scale of one group."""
    most = max(abs(v) for v in values)
    if scale == "rms" and most >= F(2.0**-100):
        inv = F(1) / most
        total = 0
        for v in values:
            t = v * inv
            total += int(np.rint(np.float64(t * t) * 2**30))
        root = math.sqrt(total / (len(values) * 2.0**30))
        share = LOADING[bits] * root
        if len(values) * (1 + share) > 3 * 4**bits * (1 - share) or root * 2**bits < 1:
            most = min(most, F(float(most) * LOADING[bits] * root))
    return most if most >= F(2.0**-100) else F(0)


def plain_quantize(row, bits, group, scale, rounding, seed, first):
    """Code bytes, scales and decoded values of one row, from the formulas of docs/algorithms.md, 1.2."""
    stream, scales, decoded = bytearray(), [], []
    for start in range(0, len(row), group):
        values = row[start : start + group]
        s = plain_scale(values, bits, scale)
        scales.append(s)
        number = 0
        for i, v in enumerate(values):
            c = 0
            if s:
                u = v * (F(1) / s) + F(1)
                if rounding == "nearest":
                    c = math.floor(u * F(2 ** (bits - 1)))
                else:
                    c = math.floor(u * F(2**bits - 1) / F(2) + plain_random(seed, first + start + i))
                c = min(max(c, 0), 2**bits - 1)
            number |= c << (i * bits)
            if rounding == "nearest":
                w = F((c + 0.5) / 2 ** (bits - 1) - 1)
            else:
                w = F(-1.0 + 2.0 * c / (2**bits - 1))
            decoded.append(s * w if s else F(0))
        stream += number.to_bytes(math.ceil(len(values) * bits / 8), "little")
    return bytes(stream), scales, decoded


VALUES = st.one_of(
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 3e20]),
    st.sampled_from([2.0**-149, -(2.0**-126), 2.0**-101, 2.0**100, -(2.0**100)]),
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(st.lists(VALUES, min_size=9, max_size=9), min_size=1, max_size=3),
    bits=st.integers(1, 8),
    group=st.sampled_from([None, 1, 4, 8, 9, 20]),
    mode=st.sampled_from([("max", "nearest"), ("rms", "nearest"), ("max", "stochastic")]),
    seed=st.integers(0, 2**64 - 1),
)
def test_codes_scales_and_values_follow_the_definition(backend, rows, bits, group, mode, seed):
    scale, rounding = mode
    x = torch.tensor(rows, dtype=torch.float32)
    codes, scales = ops.quantize(x, bits, group_size=group, scale=scale, rounding=rounding, seed=seed, backend=backend)
    back = ops.dequantize(codes, scales, bits, x.shape, group_size=group, rounding=rounding, backend=backend)
    assert scales.shape == ((len(rows),) if group is None else (len(rows), ops.groups(9, group)))
    for i, row in enumerate(x.numpy()):
        stream, want_scales, decoded = plain_quantize(row, bits, group or 9, scale, rounding, seed, 9 * i)
        assert bytes(codes[i].tolist()) == stream
        assert scales[i].reshape(-1).tolist() == [float(s) for s in want_scales]
        assert back[i].numpy().tobytes() == np.array(decoded, dtype=F).tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_bytes(backend):
    x = torch.tensor([[-1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 0.75, -0.25, 0.1]])
    want = {1: "7c01", 2: "a47f02", 3: "10eb7f04", 4: "40a8fc6e08", 8: "004080a0c0ffe0608c"}
    for bits, hexed in want.items():
        codes, scale = ops.quantize(x, bits, backend=backend)
        assert (bytes(codes[0].tolist()).hex(), scale.tolist()) == (hexed, [1.0])
    codes, _ = ops.quantize(x, 4, rounding="stochastic", seed=1, backend=backend)
    assert bytes(codes[0].tolist()).hex() == "3098fb6d09"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_delta_moves_m_as_the_receiver_does(backend, dtype):
    torch.manual_seed(0)
    a, m = torch.randn(4, 3, 37).to(dtype), torch.randn(4, 3, 37)
    before, other_end = m.clone(), m.clone()
    codes, scale = ops.delta_quantize_(a, m, 4, group_size=16, backend=backend)
    want_codes, want_scale = ops.quantize(a.float() - before, 4, group_size=16, backend="torch")
    assert torch.equal(codes, want_codes)
    assert torch.equal(scale, want_scale)
    returned = ops.dequantize(codes, scale, 4, m.shape, group_size=16, add_to=other_end, backend=backend)
    assert returned is other_end
    assert torch.equal(m, other_end)
    assert torch.equal(m, before + ops.dequantize(codes, scale, 4, m.shape, group_size=16, backend=backend))
    assert (a.float() - m).abs().max() < (a.float() - before).abs().max() / 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**101, -3e38])
def test_non_finite_values_raise_and_m_is_unchanged(backend, value):
    torch.manual_seed(0)
    a, m = torch.randn(300, 50), torch.randn(300, 50)
    for broken in (a, m):
        kept = broken[271, 49].item()
        broken[271, 49] = value
        before = m.clone()
        with pytest.raises(NonFiniteError, match=r"link 3: .* row 271"):
            ops.delta_quantize_(a, m, 2, backend=backend, name="link 3")
        assert m.numpy().tobytes() == before.numpy().tobytes()
        broken[271, 49] = kept
    a[5, 3] = value
    for scale in ("max", "rms"):
        with pytest.raises(NonFiniteError, match="row 5"):
            ops.quantize(a, 2, scale=scale, group_size=20, backend=backend)
    with pytest.raises(NonFiniteError, match="row 0"):
        ops.quantize(a.reshape(1, -1).repeat(1, 5), 2, backend=backend)  # one group, long enough to be cut


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_count_as_zeros(backend):
    x = torch.tensor([[2.0**-101, -(2.0**-149), 0.0, -0.0], [2.0**-100, 0.0, 0.0, 0.0]])
    codes, scale = ops.quantize(x, 3, backend=backend)
    assert scale.tolist() == [0.0, 2.0**-100]
    assert codes[0].tolist() == [0, 0]
    back = ops.dequantize(codes, scale, 3, x.shape, backend=backend)
    assert back[0].numpy().tobytes() == bytes(16)
    assert not torch.equal(back[1], torch.zeros(4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_error_stays_within_half_a_step(backend, bits):
    torch.manual_seed(2)
    x = torch.randn(20, 200)
    codes, scale = ops.quantize(x, bits, backend=backend)
    error = (ops.dequantize(codes, scale, bits, x.shape, backend=backend) - x).abs()
    assert bool((error <= scale.unsqueeze(1) * (2.0**-bits * (1 + 1e-5))).all())


@pytest.mark.parametrize("bits", range(1, 9))
def test_rms_scale_is_better_for_a_gaussian_and_a_local_optimum(bits):
    torch.manual_seed(3)
    x = torch.randn(1, 200_000)
    codes, scale = ops.quantize(x, bits, scale="rms")
    error = (ops.dequantize(codes, scale, bits, x.shape) - x).square().mean()
    codes_max, scale_max = ops.quantize(x, bits)
    assert error < (ops.dequantize(codes_max, scale_max, bits, x.shape) - x).square().mean()
    for factor in (0.9, 1.1):
        clipped = x.clamp(-float(scale) * factor, float(scale) * factor)
        codes_2, scale_2 = ops.quantize(clipped, bits)
        assert error < (ops.dequantize(codes_2, scale_2, bits, x.shape) - x).square().mean() * 1.0005


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_is_unbiased(bits):
    torch.manual_seed(4)
    row = torch.cat([torch.tensor([1.0]), torch.rand(30) * 2 - 1])
    draws = 4000
    x = row.repeat(draws, 1)
    codes, scale = ops.quantize(x, bits, rounding="stochastic", seed=99)
    back = ops.dequantize(codes, scale, bits, x.shape, rounding="stochastic").double()
    standard_error = back.std(0) / draws**0.5
    assert bool(((back.mean(0) - row).abs() <= 4 * standard_error + 1e-7).all())
    assert float(back.std(0)[1:].min()) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_be_strided_and_m_a_view(backend):
    torch.manual_seed(5)
    wide = torch.randn(6, 4, 80)
    views = [
        lambda t: t[:, :, 10:60],  # rows cut out of longer ones
        lambda t: t[::2, 1:3, :50],  # leading dimensions that do not merge
        lambda t: t.transpose(0, 2)[:50, :, :5],  # last dimension not dense
        lambda t: t[0, 0, 3:53],  # one row
    ]
    for view in views:
        a, m = view(wide * 2), view(wide.clone())
        dense_a, dense_m = a.clone().contiguous(), m.clone().contiguous()
        frame = m._base.clone()
        pair = ops.delta_quantize_(a, m, 3, backend=backend)
        dense = ops.delta_quantize_(dense_a, dense_m, 3, backend=backend)
        assert torch.equal(pair[0], dense[0])
        assert torch.equal(m, dense_m)
        view(frame).copy_(dense_m)
        assert torch.equal(m._base, frame), "values outside the view changed"
        out = view(torch.zeros(6, 4, 80))
        got = ops.dequantize(*pair, 3, out.shape, out=out, backend=backend)
        assert got is out
        assert torch.equal(out, ops.dequantize(*pair, 3, out.shape, backend="torch"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_foreign_scales(backend):
    empty = torch.empty(0, 5)
    codes, scale = ops.quantize(empty, 3, group_size=2, backend=backend)
    assert (tuple(codes.shape), tuple(scale.shape)) == ((0, 3), (0, 3))
    assert ops.dequantize(codes, scale, 3, (0, 5), group_size=2, backend=backend).shape == (0, 5)
    codes = torch.arange(5, dtype=torch.uint8).repeat(6, 1)
    scale = torch.tensor([2.0**-130, -3.0, math.nan, math.inf, 2.0**120, -0.0])
    got = ops.dequantize(codes, scale, 8, (6, 5), backend=backend)
    want = torch.stack([(torch.arange(5) + 0.5) / 128 - 1 for _ in scale]) * scale.unsqueeze(1) + 0.0
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_row_bytes_and_groups():
    assert [ops.row_bytes(10, b) for b in (1, 3, 8)] == [2, 4, 10]
    assert ops.row_bytes(10, 3, 4) == 2 + 2 + 1
    assert ops.row_bytes(10, 3, 400) == 4
    assert (ops.groups(10), ops.groups(10, 4), ops.groups(10, 400)) == (1, 3, 1)


def test_options_are_checked():
    x = torch.zeros(2, 4)
    cases = [
        ("bits", dict(bits=0)),
        ("bits", dict(bits=9)),
        ("bits", dict(bits=True)),
        ("bits", dict(bits=2.0)),
        ("group_size", dict(bits=2, group_size=0)),
        ("scale", dict(bits=2, scale="l2")),
        ("scale", dict(bits=2, scale="rms", rounding="stochastic")),
        ("rounding", dict(bits=2, rounding="up")),
        ("seed", dict(bits=2, seed=1.5)),
        ("backend", dict(bits=2, backend="cuda")),
    ]
    for key, options in cases:
        with pytest.raises(ConfigError) as caught:
            ops.quantize(x, **options)
        assert caught.value.key == key
    codes, scale = ops.quantize(x, 2)
    with pytest.raises(ConfigError, match="out"):
        ops.dequantize(codes, scale, 2, x.shape, add_to=x, out=x.clone())


@pytest.mark.parametrize(
    "bad",
    [torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.float64), torch.tensor(1.0), torch.zeros(2, 0)],
)
def test_shapes_and_dtypes_are_checked(bad):
    with pytest.raises(ShapeError, match="acts"):
        ops.quantize(bad, 4, name="acts")


def test_codes_and_messages_are_checked():
    x = torch.randn(2, 9)
    codes, scale = ops.quantize(x, 3)
    with pytest.raises(ShapeError, match="codes"):
        ops.dequantize(codes[:, :-1], scale, 3, x.shape)
    with pytest.raises(ShapeError, match="scale"):
        ops.dequantize(codes, scale[:1], 3, x.shape)
    with pytest.raises(ShapeError, match="add_to"):
        ops.dequantize(codes, scale, 3, x.shape, add_to=torch.zeros(2, 8))
    for m in (torch.zeros(2, 8), torch.zeros(2, 9, dtype=torch.float64)):
        with pytest.raises(ShapeError, match="m: "):
            ops.delta_quantize_(x, m, 3)
    with pytest.raises((KernelError, ShapeError)):
        ops.quantize(x.to("meta"), 3, backend="native")
