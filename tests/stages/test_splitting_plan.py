"""A model's cuts, its plan, and the losses that go with it."""

from __future__ import annotations

import dataclasses
import itertools
import resource
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.errors import DataError, SplitError
from pipecomp.stages import SplitPlan, default_loss, plan, split
from pipecomp.stages.partition.planning import balance
from tests import models

transformers = pytest.importorskip("transformers")

BERT = {**models.COMMON, **models.BERT, "num_hidden_layers": 2}


def gpt2(blocks: int = 4, vocabulary: int = models.TOKENS, **changes: Any) -> Any:
    return models.make_config("gpt2", blocks, vocab_size=vocabulary, **changes)


def every_partition(blocks: int, stages: int) -> list[list[int]]:
    return [[0, *inner, blocks] for inner in itertools.combinations(range(1, blocks), stages - 1)]


def stage_costs(costs: list[int], first: int, last: int, cuts: list[int]) -> list[int]:
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(cuts)]
    sums[0] += first
    sums[-1] += last
    return sums


class TestBalance:
    @settings(deadline=None, max_examples=150)
    @given(
        costs=st.lists(st.integers(1, 30), min_size=1, max_size=8),
        first=st.integers(0, 60),
        last=st.integers(0, 60),
        data=st.data(),
    )
    def test_against_trying_everything(self, costs: list[int], first: int, last: int, data: st.DataObject) -> None:
        stages = data.draw(st.integers(1, len(costs)))
        cuts = balance(costs, stages, first=first, last=last)
        found = stage_costs(costs, first, last, cuts)
        others = [stage_costs(costs, first, last, p) for p in every_partition(len(costs), stages)]
        smallest = min(max(o) for o in others)
        assert max(found) == smallest
        assert sum(c * c for c in found) == min(sum(c * c for c in o) for o in others if max(o) == smallest)

    def test_the_largest_stage_counts_before_evenness(self) -> None:
        assert balance([1, 5, 4, 3, 2], 4) == [0, 1, 2, 3, 5]  # [0, 2, 3, 4, 5] is more even, but has a stage of 6

    def test_equal_blocks_are_shared_evenly(self) -> None:
        assert balance([1.0] * 12, 4) == [0, 3, 6, 9, 12]
        assert balance([1.0] * 5, 5) == [0, 1, 2, 3, 4, 5]

    def test_refusals(self) -> None:
        with pytest.raises(SplitError, match="num_stages: got 3, allowed: 1 to 2"):
            balance([1.0, 1.0], 3)
        with pytest.raises(SplitError, match="num_stages: got 0"):
            balance([1.0, 1.0], 0)


class TestPlan:
    def test_head_counts_and_embedding_hardly(self) -> None:
        """GPT-2 small: the vocabulary product costs as much as 5.4 blocks, the lookup nearly nothing."""
        config = transformers.GPT2Config()
        found = plan(config, num_stages=4)
        assert found.cuts == (0, 3, 7, 11, 12)
        block, head = 7_087_872, 50257 * 768
        assert found.costs[-1] == block + head
        assert 3 * block < found.costs[0] < 3.5 * block

    def test_a_classification_head_is_free(self) -> None:
        config = transformers.GPT2Config(architectures=["GPT2ForSequenceClassification"])
        assert plan(config, num_stages=4).cuts == (0, 3, 6, 9, 12)

    def test_embeddings_that_a_head_reads_count_as_its_matrix(self) -> None:
        """DeBERTa's new head multiplies by the word embeddings themselves, the legacy one by a tied matrix."""
        config = {**BERT, "architectures": ["DebertaV2ForMaskedLM"]}
        new, old = (plan(transformers.DebertaV2Config(**config, legacy=x), num_stages=2) for x in (False, True))
        assert new.parameters == old.parameters
        assert new.costs == pytest.approx(old.costs, abs=61)  # the legacy head's bias has two names

    def test_measured_times(self) -> None:
        model = transformers.GPT2LMHeadModel(gpt2(6, vocabulary=8))
        even = plan(model, num_stages=2)
        assert even.cuts == (0, 3, 6)
        slow_start = plan(model, num_stages=2, block_seconds=[5.0, 1, 1, 1, 1, 1])
        assert slow_start.cuts == (0, 1, 6)
        assert 5.0 < slow_start.costs[0] < 5.1

    def test_model_config_and_folder_agree(self, tmp_path: Any) -> None:
        config = gpt2()
        model = transformers.GPT2LMHeadModel(config)
        model.save_pretrained(tmp_path)
        plans = [plan(s, num_stages=3) for s in (model, config, tmp_path, str(tmp_path))]
        assert all(p == plans[0] for p in plans)
        assert plans[0] == split(model, num_stages=3)[0].plan

    def test_contents(self) -> None:
        found = plan(gpt2(), cuts=[0, 1, 3])
        block, width = 12 * 32 * 32 + 13 * 32, 32
        assert isinstance(found, SplitPlan)
        assert (found.architecture, found.model_class, found.blocks) == ("gpt2", "GPT2LMHeadModel", 4)
        assert (found.cuts, found.num_stages) == ((0, 1, 3, 4), 3)
        assert found.parameters == (block + (61 + 40) * width, 2 * block, block + 2 * width + 61 * width)
        (group,) = found.tied
        assert group.stages == (0, 2)
        assert group.parameters == ("transformer.wte.weight", "lm_head.weight")
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.blocks = 5  # type: ignore[misc]

    def test_the_lowest_trained_block(self) -> None:
        def planned(*trained: str) -> tuple[int, int]:
            model = models.make_model("llama")
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith(trained))
            made = plan(model, num_stages=2)
            return made.first_trained_block, made.lowest_trained

        assert planned("") == planned("model.embed_tokens") == (0, 0)
        assert planned("model.layers.1.") == (1, 0)
        assert planned("model.layers.3.", "model.layers.2.mlp", "lm_head") == (2, 1)
        assert planned("lm_head") == planned("model.norm") == (4, 1)
        assert planned("none") == (0, 0)

    def test_untied(self) -> None:
        tied, untied = plan(gpt2(), num_stages=1), plan(gpt2(), num_stages=1, tie=False)
        assert untied.tied == ()
        assert untied.parameters[0] == tied.parameters[0] + 61 * 32

    def test_never_allocates_the_model(self) -> None:
        """GPT-2 XL has 6 GB of weights; planning it takes a few MB."""
        config = transformers.GPT2Config(n_layer=48, n_embd=1600, n_head=25)
        plan(gpt2(), num_stages=2)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert sum(plan(config, num_stages=8).parameters) > 1.5e9
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024

    def test_what_cannot_be_planned(self) -> None:
        with pytest.raises(SplitError, match="got int, allowed: a Hugging Face model, config, folder or hub name"):
            plan(3, num_stages=2)
        with pytest.raises(SplitError, match="'clip' cannot be split: transformers has no model of it"):
            plan(transformers.CLIPConfig(), num_stages=2)
        with pytest.raises(SplitError, match="GPT2DoubleHeadsModel cannot be split"):
            plan(gpt2(architectures=["GPT2DoubleHeadsModel"]), num_stages=2)
        with pytest.raises(SplitError, match=r"model_class: got 'NoSuchModel', allowed for gpt2: GPT2For"):
            plan(gpt2(architectures=["NoSuchModel"]), num_stages=2)
        with pytest.raises(SplitError, match=r"quantization_config: got 'gptq', allowed"):
            plan(gpt2(quantization_config={"quant_method": "gptq", "bits": 4}), num_stages=2)


CLASSIFIERS = ["Bert", "Roberta", "DebertaV2", "GPT2", "Llama"]


def classifier(kind: str, classes: int, problem: str | None) -> Any:
    wanted = {**BERT, "num_labels": classes, "problem_type": problem, "pooler_hidden_size": 32}
    config = getattr(transformers, f"{kind}Config")(**wanted)
    config.architectures = [f"{kind}ForSequenceClassification"]
    torch.manual_seed(0)
    return getattr(transformers, config.architectures[0])(config).eval()


class TestLosses:
    """`default_loss` against the loss that the Hugging Face model itself returns: the same bits."""

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    @pytest.mark.parametrize(
        ("classes", "problem", "labels"),
        [
            (3, None, torch.tensor([2, 0, 1, 1])),
            (3, "single_label_classification", torch.tensor([2, 0, 1, 1])),
            (1, None, torch.tensor([0.5, -1.0, 2.0, 0.25])),
            (1, "regression", torch.tensor([0.5, -1.0, 2.0, 0.25])),
            (3, "regression", torch.linspace(-1, 1, 12).view(4, 3)),
            (3, None, torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]])),
            (3, "multi_label_classification", torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]])),
        ],
    )
    def test_classification(self, kind: str, classes: int, problem: str | None, labels: torch.Tensor) -> None:
        model = classifier(kind, classes, problem)
        ids_BS = torch.randint(3, 61, (4, 6), generator=torch.Generator().manual_seed(1))
        loss_fn = default_loss(model.config)
        found = loss_fn(model(ids_BS).logits, labels)
        assert torch.equal(found, model(ids_BS, labels=labels).loss)
        assert torch.equal(loss_fn(model(ids_BS).logits, labels), found)

    def test_deberta_ignores_labels_below_zero(self) -> None:
        model = classifier("DebertaV2", 3, None)
        ids_BS = torch.randint(3, 61, (4, 6), generator=torch.Generator().manual_seed(1))
        labels = torch.tensor([2, -1, 1, -1])
        logits = model(ids_BS).logits
        loss_fn = default_loss(model.config)
        assert torch.equal(loss_fn(logits, labels), model(ids_BS, labels=labels).loss)
        nothing = loss_fn(logits, torch.full((4,), -1))
        nothing.backward()
        assert nothing.item() == 0
        assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_language_models(self, dtype: torch.dtype) -> None:
        ids_BS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
        labels = ids_BS.clone()
        labels[0, 4:] = -100
        for name, config in (
            ("GPT2LMHeadModel", gpt2(2)),
            ("BertForMaskedLM", transformers.BertConfig(**BERT)),
            ("DebertaV2ForMaskedLM", transformers.DebertaV2Config(**BERT)),
            ("DebertaV2ForMaskedLM", transformers.DebertaV2Config(**BERT, legacy=False)),
        ):
            torch.manual_seed(0)
            model = getattr(transformers, name)(config).eval().to(dtype)
            config.architectures = [name]
            found = default_loss(config)(model(ids_BS).logits, labels)
            assert torch.equal(found, model(ids_BS, labels=labels).loss), name
            assert not torch.equal(found, model(ids_BS, labels=ids_BS).loss)

    def test_default_class_of_a_config(self) -> None:
        logits, labels = torch.randn(2, 5, 61), torch.randint(0, 61, (2, 5))
        named = gpt2(architectures=["GPT2LMHeadModel"])
        assert torch.equal(default_loss(gpt2())(logits, labels), default_loss(named)(logits, labels))

    def test_bad_labels(self) -> None:
        with pytest.raises(DataError, match=r"labels: got shape \(2, 4\), the logits need \(2, 5\)"):
            default_loss(gpt2())(torch.zeros(2, 5, 61), torch.zeros(2, 4, dtype=torch.long))
        for kind in ("Bert", "DebertaV2"):
            with pytest.raises(DataError, match="floating-point labels"):
                default_loss(classifier(kind, 1, None).config)(torch.zeros(2, 1), torch.tensor([1, 0]))
            with pytest.raises(DataError, match="3 values for 2 outputs"):
                default_loss(classifier(kind, 1, None).config)(torch.zeros(2, 1), torch.zeros(3))
            several = classifier(kind, 2, "multi_label_classification").config
            with pytest.raises(DataError, match="int64, multi_label_classification needs floating-point labels"):
                default_loss(several)(torch.zeros(2, 2), torch.tensor([[1, 0], [1, 1]]))
        config = classifier("Bert", 2, None).config
        object.__setattr__(config, "problem_type", "guess")
        with pytest.raises(DataError, match="'guess'"):
            default_loss(config)(torch.zeros(2, 2), torch.tensor([1, 0]))

    def test_unknown_class(self) -> None:
        with pytest.raises(SplitError, match="GPT2DoubleHeadsModel"):
            default_loss(gpt2(architectures=["GPT2DoubleHeadsModel"]))
