"""Which kinds of mixed precision an engine refuses."""

from __future__ import annotations

import pytest

from pipecomp.engine.agreed import check_precision
from pipecomp.errors import ConfigError


@pytest.mark.parametrize("dtype", ["fp16", "float16", "torch.float16", "half"])
def test_a_loss_scale_of_each_rank_is_refused(dtype):
    with pytest.raises(ConfigError, match=rf"torch_autocast\.dtype: got '{dtype}', allowed: bfloat16"):
        check_precision({"torch_autocast": {"enabled": True, "dtype": dtype}})


def test_precision_without_one_is_not():
    check_precision({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    check_precision({"torch_autocast": {"enabled": False, "dtype": "fp16"}})
    check_precision({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})
