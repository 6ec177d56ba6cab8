"""Two stages with two replicas: every gradient is exactly the mean over replicas, a tied one its stages' sum."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

TIED = {"transformer.wte.weight", "lm_head.weight"}
# Methods with which −1, 0 and 1 are sent as they are, through each of the ways in which gradients are exchanged.
EXACT: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "reduce-scatter": {"method": "global_qsgd", "levels": "linear", "bits": 2},
    "all-gather": {"method": "terngrad"},
    "layers": {"method": "global_qsgd", "levels": "linear", "bits": 2, "adaptive": {"every": 10, "bits": [2, 3]}},
}


def signs(rank: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A rank's gradient in place of the true one; its first value is the largest everywhere."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{rank} {name}".encode()))
    x = torch.randint(-1, 2, shape, generator=draw).float()
    x.view(-1)[0] = 1.0
    return x


def reduced(rank: int, world: int, note: Any) -> dict[str, dict[str, np.ndarray]]:
    """By method: this rank's gradients after they were reduced, before the optimizer used them."""
    import pipecomp

    out = {}
    for method, section in EXACT.items():
        config = ds_config({"gradients": section}, gradient_clipping=0.0)
        engine = pipecomp.initialize(gpt2(), num_stages=2, config=config, training_data=samples())
        stock = {"sum_tied": engine.gradients.sum_tied, "average_replicas": engine.gradients.average_replicas}
        found: dict[str, np.ndarray] = {}

        def sum_tied(engine: Any = engine, stock: Any = stock) -> None:
            for name, p in engine.stage.named_parameters():
                p.grad.copy_(signs(rank, name, p.shape))
            stock["sum_tied"]()

        def average_replicas(reduce: Any, engine: Any = engine, stock: Any = stock, found: Any = found) -> None:
            stock["average_replicas"](reduce)
            found.update({name: p.grad.numpy().copy() for name, p in engine.stage.named_parameters()})

        engine.gradients.sum_tied, engine.gradients.average_replicas = sum_tied, average_replicas
        engine.train_batch()
        engine.close()
        out[method] = found
    return out


@pytest.fixture(scope="module")
def ranks() -> dict[int, dict]:
    return run_ranks(4, reduced, timeout_s=HANG_S)  # 0 and 1 are the first stage's replicas, 2 and 3 the last one's


@pytest.mark.parametrize("method", EXACT)
def test_gradients_are_exact_means_and_sums(ranks: dict[int, dict], method: str) -> None:
    replicas = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    for rank, found in ranks.items():
        for name, grad in found[method].items():
            shape = grad.shape
            if name in TIED:
                first = [signs(r, "transformer.wte.weight", shape) for r in (0, 1)]
                wanted = sum([*first, *(signs(r, "lm_head.weight", shape) for r in (2, 3))]) / 2
            else:
                wanted = sum(signs(r, name, shape) for r in replicas[rank]) / 2
            assert np.array_equal(grad, wanted.numpy()), f"rank {rank}, {name}"
    assert TIED & ranks[0][method].keys()
    assert TIED & ranks[2][method].keys()
