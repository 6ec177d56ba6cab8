"""Names in DeepSpeed's checkpoints that this project writes down for itself."""

from __future__ import annotations

from pipecomp.checkpoint import reshard

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
