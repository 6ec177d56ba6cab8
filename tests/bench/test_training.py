"""BF16 products through float32: the values, in the backward pass too, and nothing else."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from pipecomp.bench import training
from pipecomp.bench.training import Line, products_in_float32, through_float32


def test_products_are_those_of_float32_rounded_once():
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(24, 24, generator=draw).bfloat16().requires_grad_() for _ in range(2))
    bias = torch.randn(24, generator=draw).bfloat16()
    seen = []
    product = torch.Tensor.float

    def noticed(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.dtype)
        return product(tensor)

    torch.Tensor.float = noticed  # type: ignore[method-assign]
    try:
        with products_in_float32(True):
            out = torch.addmm(bias, x, w)
            out.sum().backward()
    finally:
        torch.Tensor.float = product  # type: ignore[method-assign]
    assert seen == [torch.bfloat16] * 7  # addmm has three operands, the two products of its backward two each
    assert torch.equal(out, (bias.float() + x.float() @ w.float()).bfloat16())
    ones = torch.ones(24, 24)
    assert torch.equal(x.grad, (ones @ w.float().T).bfloat16())
    assert torch.equal(w.grad, (x.float().T @ ones).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "device", "has_products", "detour"),
    [
        ("bf16", "cpu", False, True),
        ("bf16", "cpu", True, False),
        ("fp32", "cpu", False, False),
        ("bf16", "cuda", False, False),
    ],
)
def test_only_a_cpu_without_bf16_takes_the_detour(monkeypatch, dtype, device, has_products, detour):
    monkeypatch.setattr(training, "cpu_multiplies_bf16", lambda: has_products)
    context = through_float32(Line(name="a line", dtype=dtype), torch.device(device))
    assert isinstance(context, nullcontext) != detour
