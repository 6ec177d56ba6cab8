"""Names in DeepSpeed's checkpoints that this project writes down for itself."""

from __future__ import annotations

from pipecomp.checkpoint import deepspeed_names


def test_they_are_deepspeeds():
    from deepspeed.checkpoint import constants

    names = [name for name in vars(deepspeed_names) if name.isupper()]
    assert len(names) == 6
    for name in names:
        assert getattr(deepspeed_names, name) == getattr(constants, name)
