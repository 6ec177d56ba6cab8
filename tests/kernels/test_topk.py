"""Top-k, positions and bit streams against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels import dispatch, ops

BACKENDS = ["torch", "native"] if not isinstance(dispatch.load_native(), str) else ["torch"]


def plain_select(row, fraction, group):
    """(position, value) of the kept values of one row, by sorting each group."""
    kept = []
    for start in range(0, len(row), group):
        part = list(range(start, min(start + group, len(row))))
        k = max(1, math.floor(fraction * len(part) + 0.5))
        kept += sorted(sorted(part, key=lambda i: (-abs(row[i]), i))[:k])
    return [(i, row[i]) for i in kept]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 3).flatmap(
        lambda n: st.lists(st.lists(st.integers(-6, 6), min_size=37, max_size=37), min_size=n, max_size=n)
    ),
    fraction=st.sampled_from([0.01, 0.2, 0.5, 0.99, 1.0]),
    group=st.sampled_from([None, 1, 5, 16, 100]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_top_k_keeps_the_largest_and_of_equals_the_first(backend, rows, fraction, group, dtype):
    x = torch.tensor(rows, dtype=dtype) / 4
    values, index = ops.top_k_select(x, fraction, group_size=group, backend=backend)
    K = ops.top_k_kept(37, fraction, group)
    assert values.shape == index.shape == (len(rows), K)
    for row, got_v, got_i in zip(x.tolist(), values.tolist(), index.tolist(), strict=True):
        assert list(zip(got_i, got_v, strict=True)) == plain_select(row, fraction, group or 37)
    dense = ops.top_k_scatter(values, index, 37)
    assert torch.equal(dense.gather(1, index.long()), values)
    assert int((dense != 0).sum()) == int((values != 0).sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_values_quantize_with_one_scale_a_group(backend):
    torch.manual_seed(0)
    x = torch.randn(4, 50)
    values, index = ops.top_k_select(x, 0.2, group_size=16, backend=backend)
    size = ops.top_k_group_size(50, 0.2, 16)
    codes, scale = ops.quantize(values, 8, group_size=size, backend=backend)
    assert torch.equal(scale, ops.quantize(x, 8, group_size=16)[1]), "a group's largest value is among its kept ones"
    back = ops.top_k_scatter(ops.dequantize(codes, scale, 8, values.shape, group_size=size), index, 50)
    kept = back != 0
    assert int(kept.sum()) == 4 * ops.top_k_kept(50, 0.2, 16)
    assert float((back - x)[kept].abs().max()) < 0.02
    assert ops.top_k_group_size(50, 0.2) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_rows_and_not_finite_values(backend):
    x = torch.randn(2, 40_000)
    x[0, 7], x[0, 9], x[1, 39_999] = math.nan, -math.inf, math.inf
    values, index = ops.top_k_select(x, 0.00005, backend=backend)
    assert index.tolist()[0] == [7, 9]
    assert math.isnan(values[0, 0])
    assert index[1, 1] == 39_999
    wide = torch.randn(3, 64)[:, ::2]
    assert torch.equal(
        ops.top_k_select(wide, 0.3, backend=backend)[1], ops.top_k_select(wide.contiguous(), 0.3, backend="torch")[1]
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("H", "K"), [(1, 1), (8, 8), (100, 1), (100, 14), (100, 15), (1600, 3), (1600, 320), (65, 64)])
def test_positions_round_trip_in_the_shorter_form(backend, H, K):
    index = torch.stack([torch.randperm(H)[:K].sort().values for _ in range(3)]).int()
    form, size = ops.position_bytes(H, K)
    bits = max(1, (H - 1).bit_length())
    assert size == min(-(-H // 8), -(-K * bits // 8))
    assert form == ("indices" if size < -(-H // 8) else "bitmap")
    packed = ops.pack_positions(index, H, backend=backend)
    assert packed.shape == (3, size)
    if form == "bitmap":
        number = int.from_bytes(bytes(packed[0].tolist()), "little")
        assert [i for i in range(H) if number >> i & 1] == index[0].tolist()
    assert torch.equal(ops.unpack_positions(packed, H, K, backend=backend), index)


def test_invalid_positions_are_rejected():
    index = torch.arange(30, dtype=torch.int32).unsqueeze(0)
    packed = ops.pack_positions(index, 100)
    with pytest.raises(ShapeError, match="30 positions"):
        ops.unpack_positions(packed ^ 1, 100, 30)
    with pytest.raises(ShapeError, match="positions"):
        ops.unpack_positions(packed[:, :-1], 100, 30)
    with pytest.raises(ShapeError, match="below 1600"):
        ops.unpack_positions(ops.pack_bits(torch.tensor([[3, 1600]]), 11), 1600, 2)
    with pytest.raises(ShapeError, match="index"):
        ops.top_k_scatter(torch.zeros(1, 2), index, 100)
    for fraction in (0, 1.5, -1, True, "all", math.nan):
        with pytest.raises(ConfigError, match="fraction"):
            ops.top_k_select(torch.zeros(4), fraction)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(1, 24),
    n=st.integers(0, 75),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_bit_streams(backend, bits, n, dtype, seed):
    torch.manual_seed(seed)
    bits = min(bits, torch.iinfo(dtype).bits)
    values = torch.randint(0, 1 << bits, (2, n)).to(dtype)
    packed = ops.pack_bits(values, bits, backend=backend)
    for row, got in zip(values.tolist(), packed.tolist(), strict=True):
        number = sum((v & ((1 << bits) - 1)) << (i * bits) for i, v in enumerate(row))
        assert bytes(got) == number.to_bytes(-(-n * bits // 8), "little")
    back = ops.unpack_bits(packed, bits, n, backend=backend)
    assert torch.equal(back, values.to(torch.int32) & ((1 << bits) - 1))


def test_bit_stream_arguments_are_checked():
    with pytest.raises(ConfigError, match="bits"):
        ops.pack_bits(torch.zeros(3, dtype=torch.int32), 25)
    with pytest.raises(ShapeError, match="values"):
        ops.pack_bits(torch.zeros(3), 4)
    with pytest.raises(ShapeError, match="codes"):
        ops.unpack_bits(torch.zeros(3, dtype=torch.uint8), 4, 7)
