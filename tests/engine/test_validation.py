"""Refusals of an engine: kinds of mixed precision, "auto", and sections without effect."""

from __future__ import annotations

import pytest
import torch

from pipecomp.engine.build import check_arguments
from pipecomp.engine.checkpointing import check_tag
from pipecomp.engine.validation import check_auto, check_precision, check_section, check_timers
from pipecomp.errors import ConfigError, WireError
from pipecomp.stages import split
from tests.models import gpt2


@pytest.mark.parametrize("dtype", ["fp16", "float16", "torch.float16", "half"])
def test_a_loss_scale_of_each_rank_is_refused(dtype):
    with pytest.raises(ConfigError, match=rf"torch_autocast\.dtype: got '{dtype}', allowed: bfloat16"):
        check_precision({"torch_autocast": {"enabled": True, "dtype": dtype}})


def test_precision_without_one_is_not():
    check_precision({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    check_precision({"torch_autocast": {"enabled": False, "dtype": "fp16"}})
    check_precision({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": "auto"}),
        ("gradient_clipping", {"gradient_clipping": "auto"}),
        ("bf16.enabled", {"bf16": {"enabled": "auto"}}),
        ("optimizer.params.lr", {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
        ("scheduler.params.total_num_steps", {"scheduler": {"params": {"total_num_steps": "auto"}}}),
    ],
)
def test_an_auto_that_nobody_settles_is_refused(key, section):
    with pytest.raises(ConfigError, match=f"{key}: got 'auto', allowed: a value. Only recipes"):
        check_auto(section)


@pytest.mark.parametrize("key", ["pipecomps", "PipeComp", "pipe_comp", "pipcomp"])
def test_the_section_under_another_name_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key}: got .*, allowed: the section's name 'pipecomp'"):
        check_section({"train_batch_size": 8, key: {"activations": {"method": "aqsgd"}}})


@pytest.mark.parametrize("key", ["activations", "store", "gradients", "transport"])
def test_parts_of_the_section_outside_are_refused(key):
    with pytest.raises(ConfigError, match=rf"{key}: got .*\. Move '{key}' into the section"):
        check_section({"pipecomp": {}, key: {}})


def test_deepspeeds_sections_are_not():
    known = ("pipeline", "pipecomp", "optimizer", "compile", "gradient_clipping", "activation_checkpointing", "bf16")
    check_section({key: {} for key in known})


def test_deepspeeds_own_auto_is_not():
    check_auto({"pipeline": {"stages": "auto"}, "pipecomp": {"in_flight": "auto"}, "scheduler": {"params": {"a": 1}}})


@pytest.mark.parametrize("key", ["wall_clock_breakdown", "flops_profiler.enabled"])
def test_timers_that_deepspeed_starts_twice_are_refused_with_several_stages(key):
    config = {"wall_clock_breakdown": True} if "." not in key else {"flops_profiler": {"enabled": True}}
    with pytest.raises(ConfigError, match=rf"^{key}: got True, allowed: false with several stages"):
        check_timers(config, 2)
    check_timers(config, 1)
    check_timers({"wall_clock_breakdown": False, "flops_profiler": None}, 2)


@pytest.mark.parametrize(
    ("key", "value"), [("bf16", True), ("fp16", None), ("zero_optimization", 1), ("optimizer", "AdamW")]
)
def test_a_section_that_is_no_object_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"^{key}: got {value!r}, allowed: an object with keys and values"):
        check_section({"pipecomp": {}, key: value})
    check_section({key: {}})


def test_an_optimizer_of_the_unsplit_model_is_refused_and_a_schedule_of_another_optimizer():
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for stage in split(model, num_stages=2):  # the last one trains a copy of the tied embedding
        with pytest.raises(
            ConfigError, match=r"^optimizer: got 'SGD', allowed: a callable that makes an optimizer from a stage's"
        ):
            check_arguments(stage, optimizer, None)
    (whole,) = split(model, num_stages=1)
    for given in (None, lambda parameters: optimizer):
        with pytest.raises(ConfigError, match=r"^lr_scheduler: got 'LambdaLR', allowed: a callable"):
            check_arguments(whole, given, schedule)
        check_arguments(whole, given, lambda optimizer: schedule)
    check_arguments(whole, optimizer, schedule)


@pytest.mark.parametrize("tag", ["../model/x", "/tmp/x", "a/../../x", 7])
def test_rank_0_names_no_checkpoint_elsewhere(tag):
    """Loading unpickles: a rank looks only into the folder that it was told of itself."""
    with pytest.raises(WireError, match=r"rank 0 names a checkpoint .*, allowed: a folder in that of the checkpoints"):
        check_tag(tag)
    assert [check_tag(here) for here in ("global_step3", "best/7", None)] == ["global_step3", "best/7", None]
