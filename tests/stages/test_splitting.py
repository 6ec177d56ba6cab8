"""Splitting: the stages together compute what the unsplit Hugging Face model computes, bit for bit."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomp.errors import DataError, SplitError
from pipecomp.stages import Architecture, Head, Stage, default_loss, register, split
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.partition import architectures
from pipecomp.stages.partition.losses import causal_lm
from tests.limits import HANG_S
from tests.models import COMMON, LLAMA, MODELS, PAD, TOKENS, attention_of, batch, make_config, make_model

transformers = pytest.importorskip("transformers")

CUTS = [[0, 4], [0, 1, 4], [0, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]


def labels_for(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    if "Classification" in type(model).__name__:
        return torch.arange(len(inputs["input_ids"])) % model.config.num_labels
    return inputs["input_ids"].masked_fill(inputs["input_ids"] == PAD, -100)


def run(stages: Sequence[Stage], inputs: dict[str, Tensor]) -> Tensor:
    message: Any = inputs
    for stage in stages:
        message = stage(message)
    assert isinstance(message, Tensor)
    return message


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def added_up(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Gradients by the whole model's names, those of tied copies summed, in the stages' order."""
    total: dict[str, Tensor] = {}
    for stage in stages:
        names = {id(p): group for group, p in stage.tied_parameters().items()}
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                key = names.get(id(parameter), name)
                total[key] = total[key] + parameter.grad if key in total else parameter.grad.clone()
    return total


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A model, inputs and labels, and what the unsplit model makes of them: in training, and evaluated."""

    model: Any
    inputs: dict[str, Tensor]
    labels: Tensor
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    evaluated: tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def shared_model(name: str, attention: str) -> Any:
    return make_model(name, attention=attention)


@lru_cache(maxsize=1)
def reference(name: str, padding: str, attention: str) -> Reference:
    """Computed once for all cuts, which take the same model apart again and again."""
    model, inputs = shared_model(name, attention).train(), batch(name, padding)
    model.zero_grad(set_to_none=True)
    labels = labels_for(model, inputs)
    call = {**inputs, "labels": labels, "use_cache": False}  # keys that pass through a cache round differently
    trained = model(**call)
    trained.loss.backward()
    with torch.no_grad():
        evaluated = model.eval()(**call)
    return Reference(
        model=model,
        inputs=inputs,
        labels=labels,
        logits=trained.logits.detach(),
        loss=trained.loss.detach(),
        gradients=gradients(model),
        evaluated=(evaluated.logits, evaluated.loss),
    )


def check_training(whole: Reference, cuts: Sequence[int]) -> None:
    """Logits, loss and every gradient of the split model against the unsplit one."""
    whole.model.train().zero_grad(set_to_none=True)
    stages = split(whole.model, cuts=cuts)
    assert len(stages) == len(cuts) - 1
    logits = run(stages, whole.inputs)
    assert torch.equal(logits, whole.logits)
    loss = default_loss(stages[-1].config)(logits, whole.labels)
    assert torch.equal(loss, whole.loss)
    loss.backward()
    found = added_up(stages)
    assert found.keys() == whole.gradients.keys()
    for key, gradient in found.items():
        expected = whole.gradients[key]
        if "rel_embeddings" in key or "encoder.LayerNorm" in key:
            # A sum over the blocks, in another order. Relative to the largest value: a value near 0 is a difference
            # of large ones, and where they cancel its own last digits say nothing.
            assert (gradient - expected).abs().max() <= 1e-6 * expected.abs().max(), key
        else:
            assert torch.equal(gradient, expected), key


def check_evaluation(whole: Reference, cuts: Sequence[int]) -> None:
    """Logits and loss of the split model in evaluation mode, the same bits as the unsplit one's."""
    stages = split(whole.model.eval(), cuts=cuts)
    assert not any(stage.training for stage in stages)
    with torch.no_grad():
        logits = run(stages, whole.inputs)
        loss = default_loss(stages[-1].config)(logits, whole.labels)
    assert torch.equal(logits, whole.evaluated[0])
    assert torch.equal(loss, whole.evaluated[1])


class TestEqualToUnsplit:
    # The first one changes fastest, so that cuts come one after another and share the reference.
    @pytest.mark.parametrize("cuts", CUTS, ids=str)
    @pytest.mark.parametrize("padding", ["none", "right", "left"])
    @pytest.mark.parametrize("name", MODELS)
    def test_training(self, name: str, padding: str, cuts: list[int]) -> None:
        check_training(reference(name, padding, attention_of(name)), cuts)

    @pytest.mark.parametrize("cuts", CUTS, ids=str)
    @pytest.mark.parametrize("padding", ["none", "right", "left"])
    @pytest.mark.parametrize("name", MODELS)
    def test_evaluation(self, name: str, padding: str, cuts: list[int]) -> None:
        check_evaluation(reference(name, padding, attention_of(name)), cuts)

    @pytest.mark.parametrize("padding", ["none", "right", "left"])
    @pytest.mark.parametrize("name", [name for name in MODELS if attention_of(name) != "eager"])
    def test_eager_attention(self, name: str, padding: str) -> None:
        """Masks are made differently for it."""
        check_training(reference(name, padding, "eager"), [0, 1, 4])

    def test_dropout_is_applied_once(self) -> None:
        """With dropout the random numbers of stage after stage are those of the whole model's one pass."""
        for name, changes in {
            "gpt2": {"embd_pdrop": 0.3, "resid_pdrop": 0.2},
            "bert-classes": {"hidden_dropout_prob": 0.3},
            "deberta-v2": {"hidden_dropout_prob": 0.3},
        }.items():
            model, inputs = make_model(name, 3, **changes), batch(name, "right")
            torch.manual_seed(1)
            expected = model(**inputs, use_cache=False).logits
            torch.manual_seed(1)
            assert torch.equal(run(split(model, cuts=[0, 1, 2]), inputs), expected), name

    @pytest.mark.parametrize("name", ["gpt2", "llama", "deberta-v2"])
    def test_bfloat16(self, name: str) -> None:
        model = make_model(name, 2).to(torch.bfloat16)
        inputs = batch(name, "right")
        stages = split(model, num_stages=2)
        message = stages[0](inputs)
        assert isinstance(message, dict)
        assert message["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(stages[1](message), model(**inputs, use_cache=False).logits)

    def test_token_types_of_gpt2(self) -> None:
        model = make_model("gpt2", 2)
        inputs = {**batch("gpt2", "none"), "token_type_ids": torch.full((3, 9), 5)}
        assert torch.equal(run(split(model, num_stages=2), inputs), model(**inputs, use_cache=False).logits)

    def test_config_that_asks_for_tuples_and_hidden_states(self) -> None:
        model = make_model("deberta-v2", 2, return_dict=False, output_hidden_states=True, output_attentions=True)
        inputs = batch("deberta-v2", "right")
        assert torch.equal(run(split(model, num_stages=2), inputs), model(**inputs)[0])


class TestStage:
    def test_message_between_stages(self) -> None:
        inputs = batch("gpt2", "right")
        first, second = split(make_model("gpt2"), num_stages=2)
        message = first(inputs)
        assert isinstance(message, dict)
        assert set(message) == {"hidden_states", "attention_mask"}
        assert message["attention_mask"] is inputs["attention_mask"]
        assert message["hidden_states"].shape == (3, 9, 32)
        bare = first({"input_ids": inputs["input_ids"]})
        assert isinstance(bare, dict)
        assert bare["attention_mask"] is None
        assert isinstance(second(bare), Tensor)

    def test_attributes(self) -> None:
        stages = split(make_model("gpt2", 5), cuts=[0, 2, 3])
        assert [(s.index, s.num_stages, s.lo, s.hi) for s in stages] == [(0, 3, 0, 2), (1, 3, 2, 3), (2, 3, 3, 5)]
        assert [s.is_first for s in stages] == [True, False, False]
        assert [s.is_last for s in stages] == [False, False, True]
        assert all(s.hidden_size == 32 and s.config.architectures == ["GPT2LMHeadModel"] for s in stages)

    @pytest.mark.parametrize("name", MODELS)
    def test_names_and_counts_are_the_models(self, name: str) -> None:
        model = make_model(name)
        stages = split(model, cuts=[0, 1, 3])
        whole = {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}
        seen: set[str] = set()
        for stage in stages:
            names = dict(stage.named_parameters(remove_duplicate=False))
            assert all(whole[n] == p.shape for n, p in names.items())
            assert set(stage.state_dict()) == set(names)
            assert sum(p.numel() for p in stage.parameters()) == stage.plan.parameters[stage.index]
            path = block_path(name)
            assert {int(n.split(path)[1].split(".")[0]) for n in names if path in n} == set(range(stage.lo, stage.hi))
            seen |= set(names)
        assert seen == set(whole)

    def test_known_names(self) -> None:
        first, second = split(make_model("gpt2"), cuts=[0, 3, 4])
        assert "transformer.h.2.attn.c_attn.weight" in first.state_dict()
        assert "transformer.wpe.weight" in first.state_dict()
        assert "transformer.h.3.attn.c_attn.weight" in second.state_dict()
        assert "transformer.ln_f.bias" in second.state_dict()
        assert "transformer.wte.weight" not in second.state_dict()

    def test_state_dict_round_trip(self) -> None:
        _, second = split(make_model("gpt2"), num_stages=2)
        state = {name: tensor + 1 for name, tensor in second.state_dict().items()}
        second.load_state_dict(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in second.state_dict().items())

    def test_moves_as_one_module(self) -> None:
        """An engine's changes to its module reach everything that forward uses."""
        stage = split(make_model("gpt2", 2), num_stages=2)[1]
        stage.to(torch.float64)
        message = {"hidden_states": torch.randn(2, 4, 32, dtype=torch.float64), "attention_mask": None}
        assert stage(message).dtype == torch.float64
        stage.eval()
        assert not any(module.training for module in stage.modules())
        assert not stage._model.training

    @pytest.mark.parametrize("name", ["gpt2", "llama", "bert-classes", "deberta-v2", "deberta-masked-new"])
    def test_gradient_checkpointing(self, name: str) -> None:
        model, inputs = make_model(name, 4), batch(name, "right")
        labels = labels_for(model, inputs)
        plain = split(model, cuts=[0, 1, 3])
        loss_fn = default_loss(plain[-1].config)
        loss_fn(run(plain, inputs), labels).backward()
        expected = [gradients(stage) for stage in plain]
        for stage in plain:
            stage.zero_grad(set_to_none=True)
        calls = count_block_calls(plain[1])
        for stage in plain:
            stage.gradient_checkpointing_enable()
        loss = loss_fn(run(plain, inputs), labels)
        assert calls() == 2
        loss.backward()
        assert calls() == 4  # each of the two blocks ran again
        for stage, grads in zip(plain, expected, strict=True):
            found = gradients(stage)
            assert found.keys() == grads.keys()
            assert all(torch.equal(found[n], grads[n]) for n in grads)

    @pytest.mark.parametrize("token", [-1, TOKENS])
    def test_a_token_without_an_embedding_is_named(self, token: int) -> None:
        first, _ = split(make_model("gpt2"), num_stages=2)
        ids = torch.tensor([[1, 2, 0], [4, TOKENS - 1, 0]])
        assert first.layout((5, 6), {"input_ids": ids}).full
        ids[1, 2] = token
        known = f"sample 6 has the token {token} at place 2; .* from 0 to {TOKENS - 1}"
        with pytest.raises(DataError, match=known):
            first.layout((5, 6), {"input_ids": ids})

    def test_a_token_type_without_an_embedding_is_named(self) -> None:
        """RoBERTa has one; tokenizers of other models tell two texts apart."""
        first, _ = split(make_model("roberta-classes", type_vocab_size=1), num_stages=2)
        inputs = batch("roberta-classes", "right")
        types = torch.zeros_like(inputs["input_ids"])
        assert first.layout((5, 6, 7), {**inputs, "token_type_ids": types}).counts == (9, 5, 7)
        types[1, 3] = 1
        with pytest.raises(DataError, match=r"sample 6 has the token type 1 at place 3; .* of 1 token types"):
            first.layout((5, 6, 7), {**inputs, "token_type_ids": types})

    @pytest.mark.parametrize("name", ["gpt2-classes", "llama-classes", "bert-classes", "deberta-v2"])
    def test_a_sample_without_tokens_has_no_class(self, name: str) -> None:
        """The unsplit model computes one from padding, as of an empty text."""
        model, inputs = make_model(name), batch(name, "right", sizes=(9, 5, 0))
        with pytest.raises(DataError, match="sample 7 has no tokens"):
            split(model, num_stages=2)[0].layout((5, 6, 7), inputs)
        assert split(model, num_stages=1)[0].layout((5, 6, 7), inputs).counts == (9, 5, 0)
        assert split(make_model("gpt2"), num_stages=2)[0].layout((5, 6, 7), inputs).counts == (9, 5, 0)

    @pytest.mark.parametrize(
        ("name", "labels", "told"),
        [
            ("bert-classes", [0, 3, -100], r"sample 6 has 3; .* 3 classes \(num_labels .*\): from 0 to 2"),
            ("llama-classes", [0, 1, -1], "sample 7 has -1"),
            ("deberta-v2", [-1, 0, 4], "sample 7 has 4"),  # which ignores those below 0
            ("gpt2", [[61, 4, 5], [-100, 60, 61], [0, 0, 0]], r"sample 6 has 61 at place 2; .* \(vocab_size"),
            ("bert-masked", [[-100, 4, 5], [-1, 60, 1], [0, 0, 0]], "sample 6 has -1 at place 0"),
        ],
    )
    def test_a_class_that_there_is_not_is_named(self, name: str, labels: list[Any], told: str) -> None:
        """torch says that a target is out of bounds, and on a GPU less than that."""
        last = split(make_model(name), num_stages=2)[-1]
        layout = Layout.of_mask((5, 6, 7), None, 3)
        with pytest.raises(DataError, match=told):
            last.check_labels(layout, torch.tensor(labels))
        last.check_labels(layout, torch.tensor(labels).clamp(0, 2))

    def test_bad_inputs_name_the_key(self) -> None:
        first, second = split(make_model("llama"), num_stages=2)
        inputs = batch("llama", "right")
        with pytest.raises(DataError, match="token_type_ids"):
            first({**inputs, "token_type_ids": torch.zeros(3, 9, dtype=torch.long)})
        with pytest.raises(DataError, match="position_ids"):
            first({**inputs, "position_ids": torch.zeros(3, 9, dtype=torch.long)})
        with pytest.raises(DataError, match="input_ids"):
            first({"attention_mask": inputs["attention_mask"]})
        with pytest.raises(DataError, match="input_ids"):
            second(inputs)
        with pytest.raises(DataError, match="hidden_states"):
            second({"attention_mask": inputs["attention_mask"]})
        with pytest.raises(DataError, match="attention_mask has shape"):
            first({**inputs, "attention_mask": inputs["attention_mask"][:, :-1]})
        with pytest.raises(DataError, match="dict"):
            first(inputs["input_ids"])

    @pytest.mark.parametrize(
        ("name", "most"),
        [("gpt2", 40), ("bert-masked", 40), ("roberta-masked", 39), ("deberta-v2", 40), ("llama", None)],
    )
    def test_samples_are_no_longer_than_what_has_learned_positions(self, name: str, most: int | None) -> None:
        """torch says "index out of range in self", and on a GPU less than that."""
        first, _ = split(make_model(name), num_stages=2)
        ids = torch.full((1, most or 60), 5)
        first({"input_ids": ids})
        if most is not None:
            with pytest.raises(DataError, match=f"a sample of {most + 1} tokens: .* has {most} positions"):
                first({"input_ids": torch.full((1, most + 1), 5)})


def block_path(name: str) -> str:
    return ".h." if "gpt2" in name else ".layer." if "bert" in name else ".layers."


def count_block_calls(stage: Stage) -> Any:
    """Count how often a stage's own blocks run, recomputation included: hooks on a linear layer inside each block."""
    count = [0]

    def seen(*_: Any) -> None:
        count[0] += 1

    ending = (".mlp.c_fc", ".mlp.up_proj", ".intermediate.dense")
    for name, module in stage.named_modules():
        if name.endswith(ending):
            module.register_forward_hook(seen)
    return lambda: count[0]


class TestLastTokenPooling:
    """GPT-2's and Llama's classification heads look for pad tokens in input_ids, which a last stage does not have."""

    def test_mask_that_disagrees_with_the_pad_token(self) -> None:
        for name in ("gpt2-classes", "llama-classes"):
            stages = split(make_model(name), num_stages=2)
            inputs = batch(name, "right")
            with pytest.raises(DataError, match="sample 1: its last token is 8 by attention_mask"):
                run(stages, {"input_ids": inputs["input_ids"]})

    def test_a_batch_is_compared_where_it_was_loaded(self) -> None:
        """And not on a GPU, which the computing thread would have to wait for."""
        first = split(make_model("gpt2-classes"), num_stages=2)[0]
        ids = batch("gpt2-classes", "right")["input_ids"]
        with pytest.raises(DataError, match="sample 6: its last token is 8 by attention_mask"):
            first.layout((5, 6, 7), {"input_ids": ids})
        first._check_last_tokens({"input_ids": ids.to("meta")})  # which cannot be read

    def test_pad_token_unset(self) -> None:
        model = make_model("gpt2-classes", pad_token_id=None)
        stages = split(model, num_stages=2)
        with pytest.raises(DataError, match="pad_token_id"):
            run(stages, batch("gpt2-classes", "right"))
        one = batch("gpt2-classes", "none", sizes=(6,))
        assert torch.equal(run(stages, one), model(**one, use_cache=False).logits)

    def test_one_stage_looks_at_input_ids_itself(self) -> None:
        model = make_model("gpt2-classes")
        ids = batch("gpt2-classes", "right")["input_ids"]
        assert torch.equal(run(split(model, num_stages=1), {"input_ids": ids}), model(ids, use_cache=False).logits)


class TestTiedWeights:
    def test_copies_with_equal_values(self) -> None:
        model = make_model("gpt2")
        stages = split(model, num_stages=3)
        first, last = stages[0].tied_parameters(), stages[2].tied_parameters()
        name = "transformer.wte.weight"
        assert set(first) == set(last) == {name}
        assert stages[1].tied_parameters() == {}
        assert first[name] is model.transformer.wte.weight
        assert last[name] is dict(stages[2].named_parameters())["lm_head.weight"]
        assert last[name] is not first[name]
        assert torch.equal(last[name], first[name])
        (group,) = stages[0].plan.tied
        assert (group.name, group.stages, group.parameters) == (name, (0, 2), (name, "lm_head.weight"))

    def test_one_stage_has_one_parameter(self) -> None:
        (stage,) = split(make_model("gpt2"), num_stages=1)
        assert stage.tied_parameters() == {}
        assert stage.get_parameter("lm_head.weight") is stage.get_parameter("transformer.wte.weight")

    def test_deberta_shares_relative_embeddings_over_all_stages(self) -> None:
        stages = split(make_model("deberta-v3"), num_stages=3)
        names = {f"deberta.encoder.{n}" for n in ("rel_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias")}
        copies = [stage.tied_parameters() for stage in stages]
        assert all(set(c) == names for c in copies)
        assert all(torch.equal(copies[0][n], c[n]) for n in names for c in copies)
        assert len({id(c[n]) for n in names for c in copies}) == 9
        assert all(group.stages == (0, 1, 2) for group in stages[0].plan.tied)

    @pytest.mark.parametrize("name", ["bert-masked", "deberta-masked"])
    def test_masked_lm_keeps_the_bias_tied_inside_the_last_stage(self, name: str) -> None:
        stages = split(make_model(name), num_stages=2)
        last, base = stages[-1], name.split("-")[0]
        assert last.get_parameter("cls.predictions.bias") is last.get_parameter("cls.predictions.decoder.bias")
        tied = {n: p for n, p in last.tied_parameters().items() if "encoder" not in n}
        assert set(tied) == {f"{base}.embeddings.word_embeddings.weight"}
        assert tied.popitem()[1] is last.get_parameter("cls.predictions.decoder.weight")

    def test_a_head_that_reads_the_embeddings_has_a_copy_under_their_name(self) -> None:
        name = "deberta.embeddings.word_embeddings.weight"
        first, middle, last = split(make_model("deberta-masked-new"), num_stages=3)
        assert name not in middle.state_dict()
        assert [n for n in last.state_dict() if ".embeddings." in n] == [name]
        assert last.tied_parameters()[name] is last.get_parameter(name)
        assert last.get_parameter(name) is not first.get_parameter(name)
        assert torch.equal(last.get_parameter(name), first.get_parameter(name))
        (group,) = [group for group in first.plan.tied if "word" in group.name]
        assert (group.stages, group.parameters) == ((0, 2), (name, name))
        assert last.config.tie_word_embeddings is True

    def test_a_copy_under_the_same_name_cannot_be_untied(self) -> None:
        changes = {"relative_attention": False, "norm_rel_ebd": "none", "pos_att_type": None}
        with pytest.raises(SplitError, match=r"DebertaV2ForMaskedLM use deberta\.embeddings\.word_embeddings\.weight"):
            split(make_model("deberta-masked-new", **changes), num_stages=2, tie=False)
        model = make_model("deberta-masked", **changes)
        stages = split(model, num_stages=2, tie=False)
        assert stages[1].get_parameter("cls.predictions.decoder.weight") is not model.cls.predictions.decoder.weight

    def test_untied(self) -> None:
        for count in (1, 2):
            model = make_model("gpt2")
            stages = split(model, num_stages=count, tie=False)
            assert all(stage.tied_parameters() == {} and stage.plan.tied == () for stage in stages)
            assert all(stage.config.tie_word_embeddings is False for stage in stages)
            head = stages[-1].get_parameter("lm_head.weight")
            assert head is not model.lm_head.weight
            assert torch.equal(head, model.lm_head.weight)
            assert sum(stages[-1].plan.parameters) == sum(p.numel() for p in model.parameters()) + head.numel()
            assert model.config.tie_word_embeddings is True

    def test_deberta_cannot_be_untied(self) -> None:
        with pytest.raises(SplitError, match="rel_embeddings"):
            split(make_model("deberta-v3"), num_stages=2, tie=False)
        assert len(split(make_model("deberta-v3"), num_stages=1, tie=False)) == 1

    def test_a_model_whose_head_is_its_own_is_saved_untied(self) -> None:
        model = make_model("gpt2")
        model.lm_head.weight = nn.Parameter(torch.randn(TOKENS, 32))
        stages = split(model, num_stages=2)
        assert stages[0].plan.tied == ()
        assert stages[1].config.tie_word_embeddings is False
        assert stages[1].get_parameter("lm_head.weight") is model.lm_head.weight

    def test_frozen_stays_frozen(self) -> None:
        model = make_model("gpt2").requires_grad_(False)
        assert not any(p.requires_grad for stage in split(model, num_stages=2) for p in stage.parameters())


class TestTheCallersModel:
    @pytest.mark.parametrize("name", ["gpt2", "llama-classes", "bert-classes", "deberta-v2", "deberta-masked-new"])
    def test_is_not_damaged(self, name: str) -> None:
        model, inputs = make_model(name), batch(name, "right")
        before = model(**inputs, use_cache=False).logits
        modules = {n: id(m) for n, m in model.named_modules()}
        parameters = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
        config = model.config.to_dict()
        stages = split(model, cuts=[0, 1, 2])
        run(stages, inputs)
        assert {n: id(m) for n, m in model.named_modules()} == modules
        assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == parameters
        assert model.config.to_dict() == config
        assert torch.equal(model(**inputs, use_cache=False).logits, before)

    @pytest.mark.parametrize("inner", [False, True], ids=["whole", "base"])
    @pytest.mark.parametrize("how", ["compiled", "method"])
    def test_forward_that_was_replaced_runs_only_the_stage(self, how: str, inner: bool) -> None:
        inputs = batch("llama", "none")
        expected = run(split(make_model("llama"), num_stages=2), inputs)
        model = make_model("llama")
        changed = model.base_model if inner else model
        if how == "compiled":
            changed.compile(backend="eager")
        else:
            changed.forward = MethodType(type(changed).forward, changed)
        stages = split(model, num_stages=2)
        calls = [count_block_calls(stage) for stage in stages]
        assert torch.equal(run(stages, inputs), expected)
        assert [count() for count in calls] == [2, 2]
        assert changed._compiled_call_impl is not None if how == "compiled" else changed.forward.__self__ is changed

    def test_weights_are_shared_not_copied(self) -> None:
        model = make_model("llama")
        own = {id(p) for p in model.parameters()}
        assert all(id(p) in own for stage in split(model, num_stages=4) for p in stage.parameters())

    def test_other_stages_weights_are_freed(self) -> None:
        model = make_model("gpt2")
        first_block, last_block = weakref.ref(model.transformer.h[0]), weakref.ref(model.transformer.h[3])
        stage = split(model, num_stages=2)[1]
        del model
        gc.collect()
        assert first_block() is None
        assert last_block() is not None
        assert stage.is_last


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "num_stages"),
            ({"num_stages": 0}, "num_stages: got 0"),
            ({"num_stages": 5}, "num_stages: got 5"),
            ({"num_stages": True}, "num_stages: got True"),
            ({"num_stages": 2.0}, "num_stages: got 2.0"),
            ({"cuts": []}, "cuts"),
            ({"cuts": [1, 4]}, "cuts"),
            ({"cuts": [0, 2, 2, 4]}, "cuts"),
            ({"cuts": [0, 3, 2, 4]}, "cuts"),
            ({"cuts": [0, 5]}, "cuts"),
            ({"cuts": [0, 2.0, 4]}, "cuts"),
            ({"cuts": [0, 2, 4], "num_stages": 3}, "num_stages is 3"),
            ({"num_stages": 2, "block_seconds": [1.0, 2.0]}, "block_seconds"),
            ({"num_stages": 2, "block_seconds": [1.0, 2.0, 0.0, 1.0]}, "block_seconds"),
        ],
    )
    def test_impossible_cuts(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(SplitError, match=message):
            split(make_model("gpt2"), **arguments)

    @pytest.mark.parametrize("inner", [False, True], ids=["whole", "base"])
    def test_forward_that_holds_the_whole_model(self, inner: bool) -> None:
        model = make_model("gpt2")
        changed = model.base_model if inner else model
        changed.forward = partial(type(changed).forward, changed)
        with pytest.raises(SplitError, match=rf"{type(changed).__name__}\.forward was replaced by functools\.partial"):
            split(model, num_stages=2)

    def test_cuts_with_and_without_the_end(self) -> None:
        model = make_model("gpt2")
        assert [s.plan.cuts for s in split(model, cuts=[0, 1])] == [(0, 1, 4)] * 2
        assert [s.plan.cuts for s in split(model, cuts=(0, 1, 4))] == [(0, 1, 4)] * 2

    def test_unknown_architecture(self) -> None:
        config = transformers.T5Config(d_model=16, d_ff=16, num_layers=2, num_heads=2, vocab_size=20)
        with pytest.raises(SplitError, match=r"T5ForConditionalGeneration cannot be split.*register\(Architecture"):
            split(transformers.T5ForConditionalGeneration(config), num_stages=2)

    def test_head_that_cannot_be_split(self) -> None:
        with pytest.raises(SplitError, match=r"GPT2Model cannot be split.*GPT2LMHeadModel"):
            split(transformers.GPT2Model(make_config("gpt2")), num_stages=2)

    def test_plain_modules(self) -> None:
        with pytest.raises(SplitError, match=r"model: got Sequential, allowed: .* pipecomp\.stages\.modules"):
            split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_stages=2)


class TestRegister:
    @pytest.fixture(autouse=True)
    def registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Entries of these tests are not for others in the same process."""
        monkeypatch.setattr(architectures, "_REGISTRY", dict(architectures._REGISTRY))

    def test_another_architecture(self) -> None:
        entry = Architecture(
            model_type="olmo",
            heads={"OlmoForCausalLM": Head(loss=causal_lm, per_token=True)},
            default_head="OlmoForCausalLM",
            blocks="layers",
            before={"embed_tokens": nn.Identity},
            after=("norm",),
        )
        register(entry)
        torch.manual_seed(0)
        model = transformers.OlmoForCausalLM(
            transformers.OlmoConfig(**COMMON, **{**LLAMA, "num_key_value_heads": 4}, num_hidden_layers=3)
        )
        inputs = batch("olmo", "right")
        assert torch.equal(run(split(model, num_stages=3), inputs), model(**inputs, use_cache=False).logits)

    def test_incomplete_entry(self) -> None:
        register(
            Architecture(
                model_type="olmo2",
                heads={"Olmo2ForCausalLM": Head(loss=causal_lm)},
                default_head="Olmo2ForCausalLM",
                blocks="layers",
                before={},
                after=("norm",),
            )
        )
        model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**COMMON, **LLAMA, num_hidden_layers=2))
        with pytest.raises(SplitError, match=r"assigns model\.embed_tokens\.weight to no stage"):
            split(model, num_stages=2)

    def test_wrong_path_and_wrong_default(self) -> None:
        with pytest.raises(SplitError, match="default_head"):
            register(Architecture(model_type="x", heads={}, default_head="X", blocks="h", before={}))


def test_import_is_light() -> None:
    """Importing the package must not import torch, nor stages transformers: the command line starts with it."""
    code = "import sys, pipecomp; torch = 'torch' in sys.modules; import pipecomp.stages; "
    code += "sys.exit(torch or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False).returncode == 0


class TestPaddingOnTheLeft:
    """Links carry none, so the last stage has nothing where the unsplit model computes with padding."""

    MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    LABELS = torch.arange(12).view(3, 4)

    def labels(self, name: str, stages: int) -> Tensor:
        last = split(make_model(name), num_stages=stages)[-1]
        return last.mask_labels(Layout.of_mask((5, 6, 7), self.MASK, 4), self.LABELS)

    def test_nothing_is_predicted_from_padding(self) -> None:
        left_out = self.LABELS.clone()
        left_out[0, 2] = left_out[2, 1] = -100
        for name in ("gpt2", "llama"):
            assert torch.equal(self.labels(name, 2), left_out)
            assert torch.equal(self.labels(name, 1), self.LABELS), "one stage has the padding too"
        assert torch.equal(self.labels("bert-masked", 2), self.LABELS), "a token's own label"
        assert self.LABELS[0, 2] == 2, "the batch's own labels stay"

    @pytest.mark.parametrize(("name", "taken", "refused"), [("gpt2", 2, 3), ("bert-masked", 1, 2)])
    def test_labels_that_padding_would_predict_are_refused(self, name: str, taken: int, refused: int) -> None:
        """On the right, too: of a causal model the last real token predicts the first place behind it."""
        last, layout = split(make_model(name), num_stages=2)[-1], Layout.of_mask((5, 6, 7), self.MASK.flip(1), 4)
        labels = torch.full((3, 4), -100)
        labels[0, taken] = 8
        last.check_labels(layout, labels)
        labels[0, refused] = 9
        with pytest.raises(DataError, match=f"sample 5 has 9 at place {refused}, to be predicted from padding"):
            last.check_labels(layout, labels)

    @pytest.mark.parametrize("name", ["bert-classes", "roberta-classes", "deberta-v2"])
    def test_a_head_that_reads_the_first_place_refuses_it(self, name: str) -> None:
        inputs = {"input_ids": self.LABELS, "attention_mask": self.MASK}
        with pytest.raises(DataError, match="sample 5 is padded on the left"):
            split(make_model(name), num_stages=2)[0].layout((5, 6, 7), inputs)
        assert split(make_model(name), num_stages=1)[0].layout((5, 6, 7), inputs).starts == (2, 0, 1)
        right = {**inputs, "attention_mask": self.MASK.flip(1)}
        assert split(make_model(name), num_stages=2)[0].layout((5, 6, 7), right).starts == (0, 0, 0)


@pytest.mark.parametrize(
    ("wrap", "way"),
    [
        (partial(torch.compile, backend="eager"), "before torch.compile; PipelineTrainer .* torch_compile=True"),
        (nn.DataParallel, r"model\.module"),
    ],
)
def test_a_wrapped_model_names_the_way(wrap: Any, way: str) -> None:
    with pytest.raises(SplitError, match=rf"model: got \w+, allowed: .*{way}"):
        split(wrap(make_model("gpt2")), num_stages=2)


def test_a_stage_called_as_the_whole_model_names_the_way() -> None:
    first, last = split(make_model("gpt2"), num_stages=2)
    inputs = batch("gpt2", "none")
    for call in (first, last):
        with pytest.raises(DataError, match=r"input_ids: a stage is a part of GPT2LMHeadModel.*trainer\.predict"):
            call(**inputs)
        with pytest.raises(DataError, match=r"no inputs: a stage is a part of"):
            call()


def test_peft_s_methods_of_a_stage_name_the_way() -> None:
    pytest.importorskip("peft")
    for stage in split(make_model("gpt2"), num_stages=2):
        with pytest.raises(AttributeError, match=r"merge_and_unload: a stage is a part of .*trainer\.save_model"):
            stage.merge_and_unload()
        with pytest.raises(AttributeError, match=r"no attribute 'no_such_thing'"):
            stage.no_such_thing  # noqa: B018
