"""Scripts that let torch make tensors of another dtype: what is kept and handed to kernels is float32 all the same.

transformers does so for all threads while it loads a model of half precision, beside averages that are under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.allreduce.loopback import LoopbackGroup, run_threads
from pipecomp.buffers.value import ValueFormat, unpack
from pipecomp.stages.link.endpoint import Position
from tests.link_fixtures import layout, link

SECTIONS: dict[str, dict[str, Any]] = {
    "changes": {"method": "aqsgd", "forward_bits": 3, "first_visit": 8, "backward_method": "delta"},
    "an error": {"method": "aqsgd", "forward_bits": {"error": 0.05}, "first_visit": {"error": 0.05}},
}
METHODS: dict[str, dict[str, Any]] = {
    "double_squeeze": {"bits": 2},
    "casq": {"interval": 2},
    "global_qsgd": {"sparse": True},
}


@contextmanager
def half() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def crossed(section: dict[str, Any]) -> list[Tensor]:
    """Activations and gradients of three visits, as they arrive."""
    up, down = link(section)
    out: list[Tensor] = []
    for step in range(3):
        x, at = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float32), step
        up.send_activation(x, layout(range(2)), Position(at, 0))
        out.append(down.recv_activation(Position(at, 0))[0])
        down.send_gradient(x, layout(range(2)), Position(at, 0))
        out.append(up.recv_gradient(layout(range(2)), Position(at, 0)))
    return out


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_links_carry_the_same(section: dict[str, Any]) -> None:
    expected = crossed(section)
    with half():
        found = crossed(section)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def averaged(method: str, options: dict[str, Any]) -> list[Tensor]:
    def mean(group: LoopbackGroup) -> list[Tensor]:
        state = State(method, group=group, **options)
        draw = torch.Generator().manual_seed(group.rank)
        out = []
        for _ in range(3):
            x = torch.randn(40, 25, generator=draw, dtype=torch.float32)
            out.append(state.submit(x, "x").wait())
        state.close()
        return out

    return run_threads(2, mean)[0]


@pytest.mark.parametrize("method", METHODS)
def test_averages_are_the_same(method: str) -> None:
    expected = averaged(method, METHODS[method])
    with half():
        found = averaged(method, METHODS[method])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bits", [2, 16, 32])
@pytest.mark.parametrize("n", [0, 3])
def test_stored_values_are_the_same(bits: int, n: int) -> None:
    m_nH = torch.linspace(-2, 2, n * 5, dtype=torch.float32).view(n, 5)
    value = ValueFormat(bits).pack(1, 1, m_nH, "here")
    expected = unpack(value, "here").m_nH
    with half():
        found = unpack(value, "here").m_nH
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
