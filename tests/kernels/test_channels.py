"""Scales of channels: what they bound, what an unbiased gain keeps, what is refused, and the bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipecomp.errors import NonFiniteError, ShapeError
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.ops import DecodeItem, EncodeItem, QuantizerOptions
from pipecomp.kernels.reference import channels
from pipecomp.kernels.reference.layout import RMS_LOADING

O4 = QuantizerOptions(4, None, "channels")
BACKENDS = ["torch", *(["native"] if not isinstance(dispatch.load_native(), str) else [])]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def encoded(items: list[EncodeItem], backend: str) -> Tensor:
    payload = torch.empty(ops.batch_bytes(items), dtype=torch.uint8)
    ops.encode_batch(items, payload, backend=backend).check()
    return payload


def decoded(x: Tensor, o: QuantizerOptions, backend: str) -> tuple[Tensor, Tensor]:
    """Decoded rows, and their channels' scales."""
    y = torch.empty_like(x)
    payload = encoded([EncodeItem(x, None, o)], backend)
    ops.decode_batch(payload, [DecodeItem(y, o)], backend=backend)
    return y, channels.decode_block(payload[: x.shape[1]])


def spread(rows: int, H: int, seed: int = 0) -> Tensor:
    """Gaussian values whose channels differ by two orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, H, generator=g) * torch.logspace(-1, 1, H)


def test_golden_bytes(backend: str) -> None:
    x = torch.tensor([[1.0, -0.5, 4.0], [3.0, 0.25, -8.0]])
    o = QuantizerOptions(2, None, "channels")
    payload = encoded([EncodeItem(x, None, o)], backend)
    assert bytes(payload.tolist()).hex() == "e7bfff00000039b6c30739320b"


def test_scales_are_the_channels_rms(backend: str) -> None:
    x = spread(300, 77)
    payload = encoded([EncodeItem(x[:100], None, O4), EncodeItem(x[100:].clone(), None, O4)], backend)
    c = channels.decode_block(payload[:77]).double()
    rms = x.double().square().mean(0).sqrt()
    ratio = (c / c.max()) / (rms / rms.max())
    assert float(ratio.log2().abs().max()) < 1 / 32 + 1e-6
    assert int(payload[:77].max()) == 255


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_channels_lose_alike_and_less_than_with_other_scales(backend: str, bits: int) -> None:
    x = spread(256, 96)
    errors = {}
    for scale in ("max", "rms", "channels"):
        y, _ = decoded(x, QuantizerOptions(bits, None, scale), backend)
        errors[scale] = (x - y).square().sum(0).sqrt() / x.square().sum(0).sqrt()
    assert float(errors["channels"].max()) < 2 * float(errors["channels"].min())
    assert float(errors["channels"].max()) < 0.5 * float(errors["max"].median())
    assert float(errors["channels"].max()) < 0.5 * float(errors["rms"].median())


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    H=st.sampled_from([1, 5, 8, 31, 64, 100]),
    bits=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    kinds=st.lists(st.sampled_from(["plain", "one value", "huge", "tiny", "zero", "outlier"]), min_size=1, max_size=8),
)
def test_no_input_loses_more_than_a_bound(
    backend: str, rows: int, H: int, bits: int, seed: int, kinds: list[str]
) -> None:
    """A packet's error is at most sqrt(1 + 1.1 λ² / 4**b) of its norm, whatever its values are."""
    x = spread(rows, H, seed)
    for i, row in enumerate(x):
        kind = kinds[i % len(kinds)]
        if kind == "one value":
            row[1:] = 0
        elif kind == "outlier":
            row[i % H] *= 1e6
        elif kind != "plain":
            row.mul_({"huge": 2.0**40, "tiny": 2.0**-60, "zero": 0.0}[kind])
    y, _ = decoded(x, QuantizerOptions(bits, None, "channels"), backend)
    limit = math.sqrt(1 + 1.1 * RMS_LOADING[bits] ** 2 / 4**bits)
    assert float((x - y).double().norm()) <= limit * float(x.double().norm()) * (1 + 1e-5)


@pytest.mark.parametrize("scale", ["rms", "channels"])
@pytest.mark.parametrize(("bits", "H"), [(2, 24), (3, 100), (4, 384), (4, 512)])
def test_a_large_value_among_zeros_loses_no_more_than_the_bound(backend: str, scale: str, bits: int, H: int) -> None:
    """Each in another channel, whose scales are then alike; zeros err by half a step."""
    x = torch.eye(H)
    y, _ = decoded(x, QuantizerOptions(bits, None, scale), backend)
    assert float((x - y).norm()) <= math.sqrt(1 + 1.1 * RMS_LOADING[bits] ** 2 / 4**bits) * math.sqrt(H)


@pytest.mark.parametrize("scale", ["rms", "channels", "cached_channels"])
def test_a_large_value_is_not_clipped_where_steps_are_fine(backend: str, scale: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(64, 96)
    x[::2, 5] = 20.0  # not of all rows, so that its channel's scale does not make up for it
    for bits, most in ((4, 0.4), (6, 0.1), (8, 0.025)):
        y, _ = decoded(x, QuantizerOptions(bits, None, scale), backend)
        assert float(((x - y).norm(dim=1) / x.norm(dim=1)).max()) < most  # clipped: 0.8


@pytest.mark.parametrize("group_size", [None, 24])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_unbiased_rows_keep_their_length(backend: str, bits: int, group_size: int | None) -> None:
    x = spread(64, 96, bits)
    y, c = decoded(x, QuantizerOptions(bits, group_size, "channels", gain="unbiased"), backend)
    z, w = (x / c).double().view(64, -1, group_size or 96), (y / c).double().view(64, -1, group_size or 96)
    along = (z * w).sum(-1) / z.square().sum(-1)
    assert float((along - 1).abs().max()) < 5e-4
    shrunk, c = decoded(x, QuantizerOptions(bits, group_size, "channels"), backend)
    z, w = (x / c).double(), (shrunk / c).double()
    assert bits > 4 or float((z * w).sum() / z.square().sum()) < 0.99


def test_a_gain_has_a_limit(backend: str) -> None:
    """A row of one value would need a larger gain, and its other values would lose more."""
    x = torch.zeros(2, 4096)
    x[0, 7] = 1.0
    x[1] = 1.0  # all channels alike
    y, _ = decoded(x, QuantizerOptions(2, None, "channels", gain="unbiased"), backend)
    least, _ = decoded(x, QuantizerOptions(2, None, "channels"), backend)
    torch.testing.assert_close(y[0], 4 * least[0])


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (3, 1), (2, 7)])
@pytest.mark.parametrize("gain", ["least_error", "unbiased"])
def test_small_shapes_zero_and_tiny_channels(backend: str, shape: tuple[int, int], gain: str) -> None:
    o = QuantizerOptions(3, None, "channels", gain=gain)
    x = torch.ones(shape)
    assert torch.equal(decoded(torch.zeros(shape), o, backend)[0], torch.zeros(shape))
    for tiny in (2.0**-149, 2.0**-126, 1e-30, 0.0):
        x[:, 0] = tiny
        y, _ = decoded(x, o, backend)
        assert torch.isfinite(y).all()
        if shape[1] > 1:
            assert float((x - y).norm() / x.norm()) < 0.3
    for large in (2.0**100, -(2.0**100)):
        assert torch.isfinite(decoded(torch.full(shape, large), o, backend)[0]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**101])
@pytest.mark.parametrize("row", [0, 700])
def test_values_that_cannot_be_encoded(backend: str, bad: float, row: int) -> None:
    x = torch.randn(701, 8)
    x[row, 3] = bad
    with pytest.raises(NonFiniteError, match=f"row {row}"):
        encoded([EncodeItem(x, None, O4)], backend)


def test_scales_of_long_packets_come_from_some_rows(backend: str) -> None:
    x = spread(3000, 16)
    stride = channels.sampled_stride(3000)
    assert stride % 2 == 1
    assert 3000 / stride <= channels.SAMPLED_ROWS
    kept = x.clone()
    kept[1::stride] *= 100  # rows that the scales do not see
    assert torch.equal(
        encoded([EncodeItem(x, None, O4)], backend)[:16], encoded([EncodeItem(kept, None, O4)], backend)[:16]
    )


def test_changes_and_first_visits_have_their_own_scales(backend: str) -> None:
    x, m = spread(40, 24), spread(40, 24, 1)
    o = QuantizerOptions(3, None, "channels")
    items = [
        EncodeItem(x[:9].clone(), m[:9].clone(), o, True),
        EncodeItem(x[9:20].clone(), torch.empty(11, 24), o._replace(bits=5)),
        EncodeItem(x[20:20].clone(), m[20:20].clone(), o, True),
        EncodeItem(x[20:].clone(), m[20:].clone(), o, True),
    ]
    start = [item.m.clone() if item.delta else torch.empty_like(item.m) for item in items]
    payload = encoded(items, backend)
    changes = torch.cat([x[:9] - m[:9], x[20:] - m[20:]])
    assert torch.equal(payload[:24], channels.encode_block(channels.sum_squares([changes]), "channels"))
    assert torch.equal(payload[24:48], channels.encode_block(channels.sum_squares([x[9:20]]), "channels"))
    ops.decode_batch(
        payload, [DecodeItem(m, v.options, v.delta) for m, v in zip(start, items, strict=True)], backend=backend
    )
    assert all(torch.equal(m, v.m) for m, v in zip(start, items, strict=True))


@pytest.mark.parametrize("gain", ["least_error", "unbiased"])
def test_cached_scales_are_computed_by_both_ends(backend: str, gain: str) -> None:
    o = QuantizerOptions(2, None, "cached_channels", gain=gain)
    m = spread(50, 32)
    x = m + 0.1 * spread(50, 32)
    here, there = m.clone(), m.clone()
    items = [EncodeItem(x, here, o, True)]
    payload = encoded(items, backend)
    assert payload.numel() == 50 * ops.quantized_row_bytes(32, 2)  # no byte more
    ops.decode_batch(payload, [DecodeItem(there, o, True)], backend=backend)
    assert torch.equal(here, there)
    assert float((x - here).norm() / (x - m).norm()) < 0.5
    nothing = torch.zeros(3, 32)
    encoded([EncodeItem(x[:3].contiguous(), nothing, o, True)], backend)
    assert float((x[:3] - nothing).norm() / x[:3].norm()) < 1


def test_samples_that_cannot_share_scales_are_refused(backend: str) -> None:
    items = [EncodeItem(torch.randn(2, 8), None, O4), EncodeItem(torch.randn(2, 9), None, O4)]
    with pytest.raises(ShapeError, match="one width"):
        ops.batch_bytes(items)


@pytest.mark.parametrize("scale", ["channels", "cached_channels"])
@pytest.mark.parametrize("gain", ["least_error", "unbiased"])
def test_the_fewest_bits_are_chosen_by_the_error_that_is_made(backend: str, scale: str, gain: str) -> None:
    o, m = QuantizerOptions(8, None, scale, gain=gain), spread(30, 40)
    x = m + spread(30, 40, 1)

    def error(bits: int) -> float:
        moved = m.clone()
        encoded([EncodeItem(x, moved, o._replace(bits=bits), True)], backend)
        return float((x - moved).double().norm() / x.double().norm())

    errors = {bits: error(bits) for bits in range(1, 9)}
    measured = ops.distortion([EncodeItem(x, m.clone(), o, True)], list(errors), backend=backend).sum(1)
    for bits, found in zip(errors, (measured[1:] / measured[0]).sqrt().tolist(), strict=True):
        assert found == pytest.approx(errors[bits], rel=1e-4)
    for limit in (0.3, 0.1, 0.03):
        chosen = ops.fewest_bits([EncodeItem(x, m, o, True)], limit, 1, 8, backend=backend)
        assert errors[chosen] <= limit < errors[chosen - 1]
        payload = torch.empty(ops.batch_bytes([EncodeItem(x, m, o, True)]), dtype=torch.uint8)
        moved = m.clone()
        bits, flag = ops.encode_fewest([EncodeItem(x, moved, o, True)], payload, limit, 1, 8, backend=backend)
        flag.check()
        assert int(bits) == chosen
        assert float((x - moved).double().norm() / x.double().norm()) == pytest.approx(errors[chosen])
