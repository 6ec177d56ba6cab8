"""The engine's gradients, exactly: means over replicas, sums over the stages that share a weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.allreduce import State, allreduce_mean
from pipecomp.config import Config
from pipecomp.engine.build import quantized_adam
from pipecomp.engine.reduction import GradientExchange, TiedRanks
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
    for _, state in exchange.states():
        state.close()
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
    for _, averaging in exchange.states():
        averaging.close()
    state = State(**SIGNS)
    for name, x in signs.items():
        assert torch.equal(grads[name], allreduce_mean(state, x, name)), name
    state.close()


def _of_one_rank(p: torch.nn.Parameter, ds_config: dict[str, Any]) -> Any:
    topology = SimpleNamespace(get_rank=lambda pipe, data: 0)
    grid = SimpleNamespace(_topo=topology, pipe_parallel_size=1, data_parallel_size=1, get_stage_id=lambda: 0)
    stage = SimpleNamespace(tied_parameters=dict)
    module: Any = SimpleNamespace(mpu=lambda: grid, forward_funcs=[stage])
    settings = Config.from_dict({"gradients": {"method": "quantized_adam", "freeze_step": 1}})
    optimizer = quantized_adam(settings, ds_config, module, [p])
    optimizer.norm = lambda parameters, gradients: float(torch.cat(gradients).norm()) if gradients else 0.0
    return optimizer


@pytest.mark.parametrize(
    ("kind", "given", "left"),
    [
        ("AdamW", {}, 0.95),
        ("Adam", {}, 0.95),
        ("Adam", {"adam_w_mode": False}, 0.9),
        ("AdamW", {"adam_w_mode": False}, 0.95),
    ],
)
def test_weight_decay_is_what_deepspeed_would_make_of_the_section(
    kind: str, given: dict[str, Any], left: float
) -> None:
    """Adam is AdamW there, unless `adam_w_mode` says otherwise: then decay alone is a gradient, and a step the rate."""
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    section = {"type": kind, "params": {"lr": 0.1, "weight_decay": 0.5, **given}}
    optimizer = _of_one_rank(p, {"optimizer": section})
    optimizer.step()
    optimizer.close()
    torch.testing.assert_close(p.detach(), torch.full((3,), left))


@pytest.mark.parametrize(
    ("given", "norm"), [({}, 1.0), ({"gradient_clipping": 2.5}, 2.5), ({"gradient_clipping": 0}, 5)]
)
def test_its_gradients_are_clipped_as_deepspeed_clips_those_of_others(given: dict[str, Any], norm: float) -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    optimizer = _of_one_rank(p, {"optimizer": {"type": "Adam"}, **given})
    optimizer.step()
    optimizer.close()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.1 * norm * torch.tensor([0.6, 0.8]))
