"""DeepSpeed's names in checkpoints, and learning-rate schedules of another pipeline."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from pipecomp.checkpoint import reshard
from pipecomp.checkpoint.reshard import load_schedule
from pipecomp.data import DataPosition, EpochPart

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


def test_a_checkpoint_without_a_position_tells_it_by_micro_batches() -> None:
    own = {"pipeline": {"replicas": 2, "micro_batch": 4}, "per_epoch": 6, "batches_taken": 15}
    position = reshard.saved_position(own, 3)
    assert position == DataPosition(2, (EpochPart(replicas=2, micro_batch=4, accumulation=3, taken=3),))
    assert reshard.saved_position({**own, "position": asdict(replace(position, epoch=7))}, 1).epoch == 7
    assert reshard.saved_position({**own, "per_epoch": None}, 3) is None, "without training data"
    assert reshard.saved_position(None, 3) is None
