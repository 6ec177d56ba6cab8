"""A warning where gradients jump by a power of two, error feedback is on, and no loss scale was set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipecomp.allreduce import State, allreduce_mean


def warnings(sizes: list[float], caplog: Any, use: Callable[[State], None] = lambda state: None, **options: Any) -> int:
    """Average gradients of these sizes; returns the number of warnings."""
    state = State(**{"method": "double_squeeze", "bits": 8, **options})
    draw = torch.Generator().manual_seed(0)
    for size in sizes:
        use(state)
        allreduce_mean(state, size * torch.randn(3000, generator=draw), key="x")
    state.close()
    return caplog.text.count("state.loss_scale = scaler.get_scale()")


CALM = [1.0, 1.1, 0.95, 1.05]


@pytest.mark.parametrize("factor", [2.0, 0.5, 2.0**16])
def test_a_jump_is_told_once(caplog: Any, factor: float) -> None:
    sizes = [*CALM, *(factor * x for x in CALM), *CALM]
    assert warnings(sizes, caplog) == 1
    assert f"{factor:g} times as large" in caplog.text


@pytest.mark.parametrize(
    "sizes",
    [
        [1.0, 1.4, 0.8, 1.6, 2.5, 1.2, 2.0, 0.9],  # noise
        [*CALM, 2.0, *CALM],  # a spike
        [*CALM, *(1.45 * x for x in CALM)],  # another factor
        [0.85**step for step in range(20)],
        [0.0, 0.0, 0.0, 0.0, 1.0, 1.0],
    ],
)
def test_what_is_no_change_of_a_scale(caplog: Any, sizes: list[float]) -> None:
    assert warnings(sizes, caplog) == 0


def test_where_it_does_no_harm(caplog: Any) -> None:
    sizes = [*CALM, *(2 * x for x in CALM)]
    assert warnings(sizes, caplog, method="global_qsgd") == 0, "without feedback"
    assert warnings(sizes, caplog, lambda state: setattr(state, "loss_scale", 1.0)) == 0, "the scale is known"
