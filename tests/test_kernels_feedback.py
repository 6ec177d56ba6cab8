"""Quantizing with an error memory: the definition in float64, what is refused, what the memory keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
from pipecomp.kernels import native, ops

BACKENDS = ["torch", "native"] if not isinstance(native.load(), str) else ["torch"]


def groups_of(x: Tensor, size: int) -> list[Tensor]:
    return [x[i : i + size].double() for i in range(0, x.numel(), size)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize(("d", "group_size"), [(1, 8), (1000, 64), (1000, 4096), (513, 7)])
def test_codes_and_memory_make_up_the_sum(backend, bits, d, group_size):
    torch.manual_seed(d)
    x, e = torch.randn(d), 0.3 * torch.randn(d)
    total, options = x + e, {"group_size": group_size, "backend": backend}
    scale = ops.feedback_scales(x, e, **options)
    assert scale.tolist() == [float(g.abs().max()) for g in groups_of(total, group_size)]
    codes = ops.feedback_quantize_(x, e, scale, bits, **options)
    decoded = ops.dequantize(codes, scale, bits, (d,), **options)
    assert torch.equal(e, total - decoded)
    bound = scale.repeat_interleave(group_size)[:d] / 2**bits * (1 + 1e-4)  # t + 1 rounds
    assert bool((e.abs() <= bound).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_bit_decodes_to_the_mean_magnitude(backend):
    x, e = torch.randn(300), torch.randn(300)
    x[7] = e[7] = -0.0
    total, options = x + e, {"group_size": 50, "backend": backend}
    scale = ops.feedback_scales(x, e, scale="mean", **options)
    decoded = ops.dequantize(ops.feedback_quantize_(x, e, scale, 1, **options), scale, 1, (300,), **options)
    for values, sums in zip(groups_of(decoded, 50), groups_of(total, 50), strict=True):
        assert torch.allclose(values.abs(), sums.abs().mean().expand(50), rtol=1e-6)
        assert bool((values[sums < 0] < 0).all())
        assert bool((values[sums > 0] > 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["max", "mean"])
def test_what_cannot_be_quantized_leaves_the_memory_alone(backend, kind):
    for bad in (math.nan, math.inf, -math.inf, 2.0**101):
        x, e = torch.ones(40), torch.ones(40)
        x[25] = bad
        scale = ops.feedback_scales(x, e, group_size=8, scale=kind, backend=backend)
        assert scale.isinf().tolist() == [False, False, False, True, False]
        with pytest.raises(NonFiniteError):
            ops.feedback_quantize_(x, e, scale, 4, group_size=8, backend=backend)
        assert e.tolist() == [1.0] * 40
    x, e = torch.full((8,), 2.0**-120), torch.full((8,), 2.0**-120)
    scale = ops.feedback_scales(x, e, group_size=8, scale=kind, backend=backend)
    assert scale.tolist() == [0.0]
    assert ops.feedback_quantize_(x, e, scale, 4, group_size=8, backend=backend).tolist() == [0] * 4
    assert e.tolist() == [2.0**-119] * 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_mean_of_workers(backend, n):
    pairs = [ops.quantize(torch.randn(1000), 4, group_size=64) for _ in range(n)]
    wanted = torch.stack([ops.dequantize(*pair, 4, (1000,), group_size=64) for pair in pairs]).double().mean(0)
    out = torch.full((1000,), math.nan)
    codes, scales = zip(*pairs, strict=True)
    mean = ops.dequantize_mean(codes, scales, 4, 1000, group_size=64, out=out, backend=backend)
    assert mean is out
    assert torch.allclose(mean.double(), wanted, rtol=0, atol=1e-6)


def test_arguments_are_checked():
    x, e = torch.randn(20), torch.zeros(20)
    scale = ops.feedback_scales(x, e, group_size=8)
    codes = ops.feedback_quantize_(x, e, scale, 4, group_size=8)
    for call in (
        lambda: ops.feedback_scales(x, e, group_size=8, scale="rms"),
        lambda: ops.feedback_scales(x, e, group_size=0),
        lambda: ops.feedback_quantize_(x, e, scale, 9, group_size=8),
        lambda: ops.dequantize_mean([], [], 4, 20, group_size=8),
        lambda: ops.dequantize_mean([codes], [scale, scale], 4, 20, group_size=8),
    ):
        with pytest.raises(ConfigError):
            call()
    for call in (
        lambda: ops.feedback_scales(x.double(), e, group_size=8),
        lambda: ops.feedback_scales(x.view(4, 5), e.view(4, 5), group_size=8),
        lambda: ops.feedback_scales(x, e.double(), group_size=8),
        lambda: ops.feedback_scales(x, torch.zeros(40)[::2], group_size=8),
        lambda: ops.feedback_quantize_(x, e[:19], scale, 4, group_size=8),
        lambda: ops.feedback_quantize_(x, e, scale[:2], 4, group_size=8),
        lambda: ops.dequantize_mean([codes[:-1]], [scale], 4, 20, group_size=8),
        lambda: ops.dequantize_mean([codes], [scale], 4, 20, group_size=8, out=torch.zeros(19)),
    ):
        with pytest.raises(ShapeError):
            call()
