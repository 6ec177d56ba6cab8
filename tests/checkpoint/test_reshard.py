"""DeepSpeed's names in checkpoints, and learning-rate schedules of another pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from pipecomp.checkpoint import reshard
from pipecomp.checkpoint.reshard import load_schedule

NAMES = (
    "BASE_OPTIMIZER_STATE",
    "GROUP_PADDINGS",
    "OPTIMIZER_STATE_DICT",
    "PARAM_ALIGNMENT_PADDINGS",
    "PARAM_SLICE_MAPPINGS",
    "SINGLE_PARTITION_OF_FP32_GROUPS",
)


def test_they_are_deepspeeds():
    from deepspeed.checkpoint import constants

    for name in NAMES:
        assert getattr(reshard, name) == getattr(constants, name)


def nested(optimizer: Any) -> Any:
    parts = [LinearLR(optimizer, total_iters=3), CosineAnnealingLR(optimizer, 6)]
    return SequentialLR(optimizer, parts, milestones=[3])


def plain(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def optimizer(*rates: float) -> Any:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:To get the last learning rate:UserWarning")
@pytest.mark.parametrize("make", [nested, plain])
def test_a_stage_with_one_of_the_groups_keeps_its_rate(make: Any) -> None:
    whole = optimizer(1.0, 0.1)
    schedule = make(whole)
    for _ in range(2):
        schedule.step()
    part = optimizer(0.7)  # this run's, which the checkpoint's takes the place of
    own = make(part)
    for key in ("lr", "initial_lr"):
        part.param_groups[0][key] = whole.param_groups[1][key]
    load_schedule(own, part.param_groups, schedule.state_dict())
    for _ in range(6):
        schedule.step()
        own.step()
        assert part.param_groups[0]["lr"] == pytest.approx(whole.param_groups[1]["lr"])
        assert own.get_last_lr() == [part.param_groups[0]["lr"]]
