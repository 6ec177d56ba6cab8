"""The choice of the fewest bits against trying every number of bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.reference.batches import halved_sum

KINDS = ("gaussian", "heavy tail", "few large columns", "one large token", "sparse")


def values(kind: str, rows: int, H: int, seed: int) -> Tensor:
    """Rows like those of activations and gradients."""
    g = torch.Generator().manual_seed(seed)
    x_RH = torch.randn(rows, H, generator=g)
    if kind == "heavy tail":
        x_RH = x_RH / torch.rand(rows, H, generator=g).clamp_min(0.01)
    if kind == "few large columns":
        x_RH[:, :: max(1, H // 3)] *= 60
    if kind == "one large token":
        x_RH[0] *= 100
    if kind == "sparse":
        x_RH = x_RH * (torch.rand(rows, H, generator=g) < 0.1)
    return x_RH


def error(items: list[ops.EncodeItem], bits: int) -> float:
    """‖decoded − x‖ / ‖x‖, by encoding and decoding."""
    left = norm = 0.0
    for i, v in enumerate(items):
        assert v.options is not None
        y = v.x.float() - v.m if v.delta and v.m is not None else v.x.float()
        o = v.options._replace(bits=bits, seed=i)
        how: dict[str, Any] = {"group_size": o.group_size, "rounding": o.rounding}
        codes, scale = ops.quantize(y, bits, scale=o.scale, seed=o.seed, backend="torch", **how)
        off = y - ops.dequantize(codes, scale, bits, tuple(y.shape), backend="torch", **how)
        left, norm = left + float(off.double().square().sum()), norm + float(v.x.double().square().sum())
    return (left / norm) ** 0.5


def fewest(items: list[ops.EncodeItem], most: float, low: int, high: int) -> int:
    return next((b for b in range(low, high) if error(items, b) <= most), high)


@st.composite
def packets(draw: st.DrawFn) -> list[ops.EncodeItem]:
    H, kind = draw(st.sampled_from([33, 64, 256])), draw(st.sampled_from(KINDS))
    options = ops.QuantizerOptions(8, draw(st.sampled_from([None, 32])), draw(st.sampled_from(["max", "rms"])))
    seed = draw(st.integers(0, 2**32))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    items = []
    for i in range(draw(st.integers(1, 3))):
        x_nH = values(kind, draw(st.integers(8, 40)), H, seed + i).to(dtype)
        change_nH = draw(st.sampled_from([0.05, 0.3])) * x_nH.float() * values("gaussian", *x_nH.shape, seed + i + 9)
        m_nH = x_nH.float() - change_nH if draw(st.booleans()) else None
        items.append(ops.EncodeItem(x_nH, m_nH, options, m_nH is not None))
    return items


@settings(max_examples=60, deadline=None)
@given(items=packets(), most=st.floats(0.01, 0.5), low=st.integers(1, 4), high=st.integers(5, 8))
def test_the_bits_chosen_are_the_fewest_that_keep_the_error(
    items: list[ops.EncodeItem], most: float, low: int, high: int
) -> None:
    chosen, wanted = ops.fewest_bits(items, most, low, high), fewest(items, most, low, high)
    # Where the error of some bits is just the one allowed, the last float32 digit decides.
    borders = [b for b in range(low, high) if abs(error(items, b) / most - 1) < 1e-5]
    assert chosen == wanted or borders


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_error_of_a_change_is_relative_to_x(backend: str) -> None:
    x_RH = values("gaussian", 64, 128, 0)
    m_RH = x_RH - 0.05 * values("gaussian", 64, 128, 1)
    options = ops.QuantizerOptions(8, None)
    change = x_RH - m_RH
    assert ops.fewest_bits([ops.EncodeItem(x_RH, m_RH, options, True)], 0.025, 1, 8, backend=backend) == 2
    assert ops.fewest_bits([ops.EncodeItem(change, None, options)], 0.025, 1, 8, backend=backend) == 7
    assert ops.fewest_bits([ops.EncodeItem(x_RH, m_RH, options, False)], 0.025, 1, 8, backend=backend) == 7


def test_stochastic_rounding_measures_the_expected_error() -> None:
    for seed in range(20):
        items = [
            ops.EncodeItem(
                values("gaussian", 64, 128, seed), None, ops.QuantizerOptions(8, None, rounding="stochastic")
            )
        ]
        squares = ops.distortion(items, (2, 5))
        for b, left in zip((2, 5), halved_sum(squares)[1:].tolist(), strict=True):
            norm = float(halved_sum(squares)[0])
            assert (left / norm) ** 0.5 == pytest.approx(error(items, b), rel=0.03)
        chosen = ops.fewest_bits(items, 0.1, 1, 8)
        assert error(items, chosen) <= 0.1 * 1.02 < error(items, chosen - 1) * 1.04


def test_distortion_equals_the_quantization_error() -> None:
    for kind in KINDS:
        x_RH = values(kind, 16, 100, 3)
        for o in (ops.QuantizerOptions(8, None), ops.QuantizerOptions(8, 24, "rms")):
            found = ops.distortion([ops.EncodeItem(x_RH, None, o)], (1, 2, 4, 8))
            norm, *left = halved_sum(found).tolist()
            for b, got in zip((1, 2, 4, 8), left, strict=True):
                assert (got / norm) ** 0.5 == pytest.approx(error([ops.EncodeItem(x_RH, None, o)], b), rel=1e-4)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 100, 255])
def test_a_sum_by_halves_is_a_sum(n: int) -> None:
    assert float(halved_sum(torch.arange(n, dtype=torch.float64))) == n * (n - 1) / 2


def test_the_ends_of_the_range() -> None:
    options = ops.QuantizerOptions(8, None)
    x_RH = values("gaussian", 16, 64, 0)
    assert ops.fewest_bits([], 0.1, 2, 8) == 2
    assert ops.fewest_bits([ops.EncodeItem(x_RH[:0], None, options)], 0.1, 3, 8) == 3
    assert ops.fewest_bits([ops.EncodeItem(torch.zeros(4, 8), None, options)], 0.1, 3, 8) == 3
    assert ops.fewest_bits([ops.EncodeItem(torch.zeros(4, 8), torch.ones(4, 8), options, True)], 0.1, 3, 7) == 7
    assert ops.fewest_bits([ops.EncodeItem(x_RH, None, options)], 1e-6, 3, 7) == 7, "even the most do not suffice"
    assert ops.fewest_bits([ops.EncodeItem(x_RH, None, options)], 0.9, 3, 7) == 3
    for bad in (torch.nan, torch.inf, 2.0**101):
        assert ops.fewest_bits([ops.EncodeItem(x_RH.clone().fill_(bad), None, options)], 0.9, 3, 7) == 7


@pytest.mark.skipif(isinstance(dispatch.load_native(), str), reason="native kernels are not built")
@pytest.mark.parametrize("kind", KINDS)
def test_native_kernels_mostly_find_the_bits_in_one_pass(kind: str) -> None:
    backend, found = dispatch.load_native(), 0
    assert not isinstance(backend, str)
    for seed, error in enumerate(0.02 * 1.1**i for i in range(20)):
        x_RH = values(kind, 64, 256, seed)
        for m_RH in (None, x_RH - 0.2 * values("gaussian", 64, 256, seed + 99)):
            item = ops.EncodeItem(x_RH, m_RH, ops.QuantizerOptions(8, None), m_RH is not None)
            found += backend.fit([item], error, 2, 8, None) > 0
    assert found >= 36


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_encode_fewest_equals_encode_batch_with_these_bits(backend: str, rounding: str) -> None:
    x_RH = values("heavy tail", 40, 100, 5)

    def items(x_RH: Tensor, bits: int) -> list[ops.EncodeItem]:
        options = ops.QuantizerOptions(bits, 32, rounding=rounding, seed=3)
        m_RH = torch.zeros_like(x_RH) if bool(x_RH.isnan().any()) else x_RH + 0.1 * values("gaussian", *x_RH.shape, 6)
        return [
            ops.EncodeItem(x_RH, None, options),
            ops.EncodeItem(x_RH, m_RH, options, True),
            ops.EncodeItem(x_RH, m_RH + 1, options),
        ]

    def size(its: list[ops.EncodeItem]) -> int:
        return sum(ops.payload_bytes(*v.x.shape, v.options, v.x.dtype) for v in its)

    for x in (x_RH, x_RH[:0], torch.zeros(3, 8), x_RH * torch.nan):
        for count in (1, 2, 3):
            given = items(x, 8)[:count]
            wanted = ops.fewest_bits(given, 0.1, 2, 8, backend="torch")
            payload = torch.empty(size(given), dtype=torch.uint8)
            bits, flag = ops.encode_fewest(given, payload, 0.1, 2, 8, backend=backend)
            assert (int(bits), bits.device) == (wanted, payload.device)
            same = items(x, wanted)[:count]
            part = torch.empty(size(same), dtype=torch.uint8)
            verdicts = (flag, ops.encode_batch(same, part, backend=backend))
            if bool(x.isnan().any()):
                for each in verdicts:
                    with pytest.raises(NonFiniteError):
                        each.check()
            else:
                flag.check()
                assert torch.equal(payload[: part.numel()], part)
                assert all(v.m is None or torch.equal(v.m, w.m) for v, w in zip(given, same, strict=True))


def test_invalid_arguments_are_rejected() -> None:
    item = ops.EncodeItem(torch.zeros(4, 8), None, ops.QuantizerOptions(8, None))
    for low, high, most in ((0, 8, 0.1), (2, 9, 0.1), (5, 4, 0.1), (2, 8, 0.0), (2, 8, 1.0)):
        with pytest.raises(ConfigError):
            ops.fewest_bits([item], most, low, high)
    for wrong in (item._replace(options=None), item._replace(delta=True), item._replace(x=torch.zeros(8, 4).t())):
        with pytest.raises(ShapeError):
            ops.distortion([wrong], (2,))
    payload = torch.empty(4 * (4 + 8), dtype=torch.uint8)
    for wrong in (item._replace(options=None), item._replace(m=item.x[:1]), item._replace(x=torch.zeros(4, 0))):
        with pytest.raises(ShapeError):
            ops.encode_fewest([wrong], payload, 0.1, 2, 8)
    with pytest.raises(ShapeError):
        ops.encode_fewest([item], payload[1:], 0.1, 2, 8)
