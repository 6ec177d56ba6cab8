"""A family of models that pipecomp does not know becomes splittable by one `register` call: GPT-NeoX (Pythia).

Its blocks add attention and MLP to the same input, its positions are rotary, and its embeddings, final norm and output
matrix have names of their own. Nothing but the entry below is needed, here or in a user's script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomp.errors import SplitError
from pipecomp.stages import (
    Architecture,
    Head,
    Stage,
    build_stage,
    default_loss,
    losses,
    plan,
    register,
    save_pretrained,
    split,
)
from pipecomp.stages.partition import architectures
from tests.models import disturbed

transformers = pytest.importorskip("transformers")

GPT_NEOX = Architecture(
    model_type="gpt_neox",
    heads={"GPTNeoXForCausalLM": Head(loss=losses.causal_lm, per_token=True)},
    default_head="GPTNeoXForCausalLM",
    blocks="layers",
    before={"embed_in": nn.Identity, "emb_dropout": nn.Identity},
    after=("final_layer_norm",),
    renamed={"embed_out": "lm_head"},  # transformers itself renames it while it loads and saves
)
BLOCKS = 4


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registry after a test."""
    monkeypatch.setattr(architectures, "_REGISTRY", dict(architectures._REGISTRY))
    register(GPT_NEOX)


def make_model(**settings: Any) -> Any:
    config = transformers.GPTNeoXConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        **settings,
    )
    torch.manual_seed(7)
    return disturbed(transformers.GPTNeoXForCausalLM(config)).train()


def batch() -> dict[str, Tensor]:
    ids_BS = torch.randint(0, 61, (3, 9), generator=torch.Generator().manual_seed(3))
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[1, 5:] = 0
    return {"input_ids": ids_BS, "attention_mask": mask_BS}


def run(stages: list[Stage], inputs: dict[str, Tensor]) -> Tensor:
    out: Any = inputs
    for stage in stages:
        out = stage(out)
    return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", range(1, BLOCKS + 1))
def test_logits_and_gradients_are_the_unsplit_models(num_stages: int, tied: bool) -> None:
    model, inputs = make_model(tie_word_embeddings=tied), batch()
    labels_BS = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    expected = model(**inputs, labels=labels_BS)
    expected.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    stages = split(model, num_stages=num_stages)
    logits_BSV = run(stages, inputs)
    assert torch.equal(logits_BSV, expected.logits)
    loss = default_loss(model.config)(logits_BSV, labels_BS)
    assert torch.equal(loss, expected.loss)
    loss.backward()

    found: dict[str, Tensor] = {}
    copies = {group.parameters[1]: group.name for group in stages[0].plan.tied}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            original = copies.get(name, name) if stage.index else name
            found[original] = found[original] + parameter.grad if original in found else parameter.grad
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        if name in copies.values():  # two sums of three terms each, added in another order
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found[name], gradient), name


def test_each_stage_holds_its_own_part() -> None:
    stages = split(make_model(), cuts=[0, 1, 3])
    assert [stage.hi - stage.lo for stage in stages] == [1, 2, 1]
    names = [set(stage.state_dict()) for stage in stages]
    assert "gpt_neox.embed_in.weight" in names[0]
    assert {"gpt_neox.final_layer_norm.bias", "lm_head.weight"} <= names[2]
    assert all(name.startswith("gpt_neox.layers.") for name in names[1])


def test_a_saved_model_is_loaded_stage_by_stage_and_saved_again(tmp_path: Path) -> None:
    model, inputs = make_model(), batch()
    model.save_pretrained(tmp_path / "model")
    found = plan(tmp_path / "model", num_stages=3)
    stages = [build_stage(tmp_path / "model", found, index) for index in range(3)]
    assert not any(stage.newly_initialized for stage in stages)
    assert torch.equal(run(stages, inputs), model(**inputs).logits)
    save_pretrained(stages, tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


def test_what_an_entry_leaves_out_is_named() -> None:
    register(Architecture(**{**vars(GPT_NEOX), "after": ()}))
    with pytest.raises(SplitError, match=r"assigns gpt_neox\.final_layer_norm\.weight to no stage"):
        split(make_model(), num_stages=2)


def test_an_entry_that_the_model_s_own_code_cannot_follow_is_an_error() -> None:
    register(Architecture(**{**vars(GPT_NEOX), "block_returns_tuple": True}))
    with pytest.raises(SplitError, match=r"gpt_neox: stages cut at \[1, 2, 3\] .* past the first stage .* TypeError: "):
        split(make_model(), num_stages=2)


def test_a_loss_that_logits_do_not_tell_is_an_error() -> None:
    with pytest.raises(SplitError, match=r"config\.output_router_logits: got True, allowed: False\."):
        split(make_model(output_router_logits=True), num_stages=2)


def test_a_dropout_that_an_entry_leaves_out_is_applied_once() -> None:
    """Its random numbers are drawn on every stage, and given back on later ones."""
    register(Architecture(**{**vars(GPT_NEOX), "before": {"embed_in": nn.Identity}}))
    model, inputs = make_model(hidden_dropout=0.1), batch()
    torch.manual_seed(1)
    expected = model(**inputs, use_cache=False).logits
    torch.manual_seed(1)
    assert torch.equal(run(split(model, num_stages=3), inputs), expected)


def test_code_between_embeddings_and_blocks_is_the_first_stage_s_alone(tmp_path: Path) -> None:
    """Granite multiplies its embeddings by a factor, in the forward that every stage calls."""
    register(
        Architecture(
            model_type="granite",
            heads={"GraniteForCausalLM": Head(loss=losses.causal_lm, per_token=True)},
            default_head="GraniteForCausalLM",
            blocks="layers",
            before={"embed_tokens": nn.Identity},
            after=("norm",),
        )
    )
    size = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.GraniteConfig(vocab_size=61, num_hidden_layers=2, embedding_multiplier=3.0, **size)
    model = transformers.GraniteForCausalLM(config)
    expected = model(**batch(), use_cache=False).logits
    assert torch.equal(run(split(model, num_stages=2), batch()), expected)
    model.save_pretrained(tmp_path)
    found = plan(tmp_path, num_stages=2)
    assert torch.equal(run([build_stage(tmp_path, found, index) for index in range(2)], batch()), expected)
