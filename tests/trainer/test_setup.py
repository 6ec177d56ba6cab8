"""The model of a script does not pass for the trained one, which is nowhere whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.errors import PipecompError, SplitError
from pipecomp.stages import plan, split
from pipecomp.trainer import setup
from tests.models import gpt2

WORDS = {"input_ids": torch.tensor([[3, 5, 7]])}
USES = {
    "called": lambda model, folder: model(**WORDS),
    "saved": lambda model, folder: model.save_pretrained(folder),
    "generates": lambda model, folder: model.generate(**WORDS, max_new_tokens=1),
    "state": lambda model, folder: model.state_dict(),
}


@pytest.mark.parametrize("use", USES)
def test_a_hidden_model_is_not_used(use: str, tmp_path: Path) -> None:
    model = gpt2(2, 16)
    before = model(**WORDS).logits
    setup.disable_model(model, [0, 1, 2], setup.parameter_dtypes(model))
    setup.disable_model(model, [0, 1, 2], setup.parameter_dtypes(model))  # of a second training
    with pytest.raises(PipecompError, match=r"GPT2LMHeadModel: .* trainer\.save_model"):
        USES[use](model, tmp_path)
    setup.enable_model(model)
    USES[use](model, tmp_path)
    assert torch.equal(model(**WORDS).logits, before)


def test_stages_of_a_model_that_was_hidden_and_shown_are_as_before() -> None:
    model = gpt2(2, 16)
    before = model(**WORDS).logits
    setup.disable_model(model, [0, 1, 2], setup.parameter_dtypes(model))
    setup.enable_model(model)
    first, last = split(model, num_stages=2)
    setup.disable_model(model, [0, 1, 2], setup.parameter_dtypes(model))
    assert torch.equal(last(first(WORDS)), before), "stages that were made of it go on"
    assert first.state_dict()


def test_an_adapter_is_not_merged_into_a_model_that_is_trained_in_part() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        gpt2(2, 16), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    )
    setup.disable_model(model, [0, 1, 2], setup.parameter_dtypes(model))
    with pytest.raises(PipecompError, match="PeftModelForCausalLM"):
        model.merge_and_unload()
    setup.enable_model(model)
    model.merge_and_unload()


def test_a_model_that_was_trained_in_stages_keeps_its_cuts() -> None:
    model = gpt2(3, 16)
    setup.check_not_trained(model, [0, 2, 3])
    setup.disable_model(model, [0, 1, 3], setup.parameter_dtypes(model))
    setup.check_not_trained(model, (0, 1, 3))
    with pytest.raises(SplitError, match=r"cuts \[0, 1, 3\].*cannot be cut at \[0, 2, 3\]"):
        setup.check_not_trained(model, [0, 2, 3])


def test_a_model_of_which_a_stage_was_trained_in_another_precision_is_refused() -> None:
    model = gpt2(2, 16)
    model.lm_head.bfloat16()
    before = setup.parameter_dtypes(model)
    setup.disable_model(model, [0, 1, 2], before)
    setup.check_not_trained(model, [0, 1, 2])
    model.transformer.h[0].bfloat16()
    with pytest.raises(SplitError, match=r"in torch.bfloat16 \(transformer\.h\.0.* was torch.float32\)"):
        setup.check_not_trained(model, [0, 1, 2])


def test_a_hook_on_the_gradient_of_a_shared_weight_is_an_error() -> None:
    model = gpt2(2, 16)
    model.transformer.h[0].mlp.c_fc.weight.register_hook(lambda gradient: gradient * 0.5)
    setup.check_gradient_hooks(model, plan(model, 2))
    model.transformer.wte.weight.register_hook(lambda gradient: gradient * 0.5)
    setup.check_gradient_hooks(model, plan(model, 1))
    with pytest.raises(SplitError, match=r"transformer\.wte\.weight: a gradient hook"):
        setup.check_gradient_hooks(model, plan(model, 2))


@pytest.mark.parametrize("given", ["gpt2", None])
def test_a_name_has_nothing_to_hide(given: Any) -> None:
    setup.disable_model(given, [0, 1], setup.parameter_dtypes(given))
    setup.enable_model(given)
    setup.check_not_trained(given, [0, 1])
    setup.check_gradient_hooks(given, plan(gpt2(2, 16), 2))
