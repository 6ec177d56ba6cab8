"""Gradients averaged in half precision: multiplied by a loss scale, which keeps small ones from becoming zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks
SCALE, SMALL = 65536.0, 1e-8  # float16 has nothing between 0 and 6e-8


def averages(rank: int, world: int, note: Any) -> dict[str, list[float]]:
    from pipecomp.allreduce import State, allreduce_mean
    from pipecomp.allreduce.methods.baselines import SingleTensorBucket
    from pipecomp.distributed.rendezvous import join_processes

    join_processes()
    found = {}
    for background in (False, True):
        state = State("fp16", group=[0, 1])
        state.loss_scale = SCALE
        state.group.give_way = (lambda: None) if background else None
        x = torch.full((3,), SMALL * SCALE * (1 + rank))
        found[f"alone, {background}"] = (allreduce_mean(state, x, "x") / SCALE).tolist()
        if not background:
            found["bucket"] = (state.run_bucket(SingleTensorBucket(x.clone(), 0)).wait() / SCALE).tolist()
        state.close()
    return found


def test_small_gradients_survive() -> None:
    for found in run_ranks(2, averages, timeout_s=HANG_S).values():
        for name, mean in found.items():
            assert mean == pytest.approx([1.5 * SMALL] * 3, rel=1e-3), name
