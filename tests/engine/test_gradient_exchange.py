"""What the engine's gradients become, exactly: means over replicas, sums over the stages that share a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomp.allreduce import State, allreduce_mean
from pipecomp.engine.gradient_exchange import GradientExchange, TiedRanks
from pipecomp.gradient_config import Gradients

SIGNS = {"method": "global_qsgd", "levels": "linear", "bits": 2}  # of −1, 0 and 1 nothing is lost


@pytest.mark.parametrize("stages", [2, 3])
def test_a_tied_weights_gradient_is_the_sum_over_its_stages(stages: int) -> None:
    """One process stands for all ranks: their mean is its gradient, and the sum that times the number of stages."""
    exchange = GradientExchange(
        Gradients(**SIGNS), [0, 1], {"tied": TiedRanks((0, 1), stages)}, stage=0, seed=0, timeout_s=5.0
    )
    grads = {"tied": torch.tensor([[1.0, -1.0], [0.0, 1.0]]), "own": torch.tensor([0.0, -1.0, 1.0])}
    wanted = {"tied": stages * grads["tied"], "own": grads["own"].clone()}
    exchange.average(grads)
    exchange.close()
    assert torch.equal(grads["tied"], wanted["tied"])
    assert torch.equal(grads["own"], wanted["own"])


def test_gradients_come_back_to_their_own_parameters() -> None:
    """Bucketed together, of several shapes and not contiguous: the same as each averaged by itself."""
    draw = torch.Generator().manual_seed(1)
    shapes: dict[str, Any] = {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (1,)}
    signs = {name: torch.randint(-1, 2, shape, generator=draw).float() for name, shape in shapes.items()}
    for x in signs.values():
        x.view(-1)[0] = 1.0
    exchange = GradientExchange(Gradients(**SIGNS), [0, 1], {}, stage=0, seed=0, timeout_s=5.0)
    grads = {name: x.clone() for name, x in signs.items()}
    grads["a"] = signs["a"].t().contiguous().t()
    exchange.average(grads)
    exchange.close()
    state = State(**SIGNS)
    for name, x in signs.items():
        assert torch.equal(grads[name], allreduce_mean(state, x, name)), name
    state.close()
