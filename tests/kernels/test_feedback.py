"""Quantizing with an error-feedback residual: the definition in float64, invalid arguments, the residual."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipecomp.errors import ConfigError, ShapeError
from pipecomp.kernels import dispatch, ops

BACKENDS = ["torch", "native"] if not isinstance(dispatch.load_native(), str) else ["torch"]


def groups_of(x: Tensor, size: int) -> list[Tensor]:
    return [x[i : i + size].double() for i in range(0, x.numel(), size)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize(("d", "group_size"), [(1, 8), (1000, 64), (1000, 4096), (513, 7)])
def test_codes_and_residual_add_up_to_the_sum(backend, bits, d, group_size):
    torch.manual_seed(d)
    x, e = torch.randn(d), 0.3 * torch.randn(d)
    total, options = x + e, {"group_size": group_size, "backend": backend}
    codes, scale = ops.feedback_quantize_(x, e, bits, **options)
    for found, group in zip(scale, groups_of(total, group_size), strict=True):
        assert found.bfloat16() == found  # and the smallest such number that is large enough
        assert 0 <= found - group.abs().max() < found / 128
    decoded = ops.dequantize(codes, scale, bits, (d,), **options)
    assert torch.equal(e, total - decoded)
    bound = scale.repeat_interleave(group_size)[:d] / 2**bits * (1 + 1e-4)  # t + 1 rounds
    assert bool((e.abs() <= bound).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_bit_decodes_to_the_mean_magnitude(backend):
    x, e = torch.randn(300), torch.randn(300)
    x[7] = e[7] = -0.0
    total, options = x + e, {"group_size": 50, "backend": backend}
    decoded = ops.dequantize(*ops.feedback_quantize_(x, e, 1, scale="mean", **options), 1, (300,), **options)
    for values, sums in zip(groups_of(decoded, 50), groups_of(total, 50), strict=True):
        assert torch.allclose(values.abs(), sums.abs().mean().expand(50), rtol=1 / 128)
        assert bool((values[sums < 0] < 0).all())
        assert bool((values[sums > 0] > 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["max", "mean"])
def test_non_finite_groups_keep_their_residual(backend, kind):
    options = {"group_size": 8, "scale": kind, "backend": backend}
    for bad in (math.nan, math.inf, -math.inf, 2.0**101):
        x, e = torch.ones(40), torch.ones(40)
        x[25] = bad
        codes, scale = ops.feedback_quantize_(x, e, 4, **options)
        assert scale.isnan().tolist() == [False, False, False, True, False]
        assert e[24:32].tolist() == [1.0] * 8
        assert bool((e[:24] < 0.5).all())
        decoded = ops.dequantize(codes, scale, 4, (40,), group_size=8, backend=backend)
        assert decoded.isnan().tolist() == [24 <= i < 32 for i in range(40)]
    x, e = torch.full((8,), 2.0**-120), torch.full((8,), 2.0**-120)
    codes, scale = ops.feedback_quantize_(x, e, 4, **options)
    assert (codes.tolist(), scale.tolist()) == ([0] * 4, [0.0])
    assert e.tolist() == [2.0**-119] * 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("bits", "kind"), [(4, "max"), (1, "mean")])
def test_mean_of_workers_with_a_residual(backend, n, bits, kind):
    pairs = [ops.quantize(torch.randn(1000), bits, group_size=64) for _ in range(n)]
    mean = torch.stack([ops.dequantize(*pair, bits, (1000,), group_size=64) for pair in pairs]).double().mean(0)
    before = 0.1 * torch.randn(1000)
    e = before.clone()
    codes, scales = zip(*pairs, strict=True)
    found, scale = ops.feedback_reduce_(codes, scales, bits, e, group_size=64, scale=kind, backend=backend)
    decoded = ops.dequantize(found, scale, bits, (1000,), group_size=64)
    assert torch.allclose((decoded + e).double(), mean + before, rtol=0, atol=1e-6)
    again = ops.feedback_quantize_(mean.float(), before, bits, group_size=64, scale=kind)[1]
    assert torch.allclose(scale, again, rtol=1 / 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mean_that_overflows_with_its_residual_has_scale_nan(backend):
    codes, scale = ops.quantize(torch.full((40,), 2.0**99), 4, group_size=8)
    e = torch.zeros(40)
    e[17] = 2.0**100
    before = e.clone()
    found, scales = ops.feedback_reduce_([codes] * 2, [scale] * 2, 4, e, group_size=8, backend=backend)
    decoded = ops.dequantize(found, scales, 4, (40,), group_size=8)
    assert decoded.isnan().tolist() == [16 <= i < 24 for i in range(40)]
    assert torch.equal(e[16:24], before[16:24])
    assert bool((e[:16] != 0).all())


def test_arguments_are_checked():
    x, e = torch.randn(20), torch.zeros(20)
    codes, scale = ops.feedback_quantize_(x, e, 4, group_size=8)
    for call in (
        lambda: ops.feedback_quantize_(x, e, 4, group_size=8, scale="rms"),
        lambda: ops.feedback_quantize_(x, e, 4, group_size=0),
        lambda: ops.feedback_quantize_(x, e, 9, group_size=8),
        lambda: ops.feedback_reduce_([], [], 4, e, group_size=8),
        lambda: ops.feedback_reduce_([codes], [scale, scale], 4, e, group_size=8),
        lambda: ops.feedback_reduce_([codes], [scale], 4, e, group_size=8, scale="rms"),
    ):
        with pytest.raises(ConfigError):
            call()
    for call in (
        lambda: ops.feedback_quantize_(x.double(), e, 4, group_size=8),
        lambda: ops.feedback_quantize_(x.view(4, 5), e.view(4, 5), 4, group_size=8),
        lambda: ops.feedback_quantize_(x, e.double(), 4, group_size=8),
        lambda: ops.feedback_quantize_(x, torch.zeros(40)[::2], 4, group_size=8),
        lambda: ops.feedback_quantize_(x, e[:19], 4, group_size=8),
        lambda: ops.feedback_reduce_([codes[:-1]], [scale], 4, e, group_size=8),
        lambda: ops.feedback_reduce_([codes], [scale], 4, torch.zeros(40)[::2], group_size=8),
    ):
        with pytest.raises(ShapeError):
            call()
