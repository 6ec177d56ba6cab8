"""LoRA: a model with peft's adapters, cut at any place, computes, trains and saves what the whole one does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")

from pipecomp.errors import SplitError  # noqa: E402
from pipecomp.stages import Source, build_stage, plan, pretrained, save_pretrained, split  # noqa: E402
from tests import models  # noqa: E402

VOCABULARY, LENGTH = models.TOKENS, 9
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_hidden_layers": 3}
LLAMA = {**models.LLAMA, **SMALL}
BERT = {**models.BERT, **SMALL, "num_labels": 3}
GPT2 = {**models.GPT2, **SMALL}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA, {"task_type": "CAUSAL_LM"}),
    "llama, all layers": ("LlamaConfig", "LlamaForCausalLM", LLAMA, {"target_modules": "all-linear", "r": 2}),
    "llama, classes": ("LlamaConfig", "LlamaForSequenceClassification", LLAMA, {"task_type": "SEQ_CLS"}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
    "bert": ("BertConfig", "BertForSequenceClassification", BERT, {"task_type": "SEQ_CLS", "bias": "lora_only"}),
}


def base(name: str, **more: Any) -> Any:
    import transformers

    config, model, settings, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings, **more))


def lora(name: str, **more: Any) -> Any:
    return peft.LoraConfig(**MODELS[name][3], **more)


def shaken(model: Any) -> Any:
    """The model with adapters that change something: peft starts with none of it."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=draw) * 0.1)
    return model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1, 5:], mask[1, 5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def through(stages: list[Any]) -> torch.Tensor:
    x: Any = batch()
    for stage in stages:
        x = stage(x)
    return x


def build(source: Any, stages: int) -> list[Any]:
    cut = plan(source, num_stages=stages)
    return [build_stage(source, cut, index) for index in range(stages)]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A saved base model, by name."""
    base(request.param).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
class TestInMemory:
    def test_logits_and_gradients(self, name: str, stages: int) -> None:
        whole = shaken(peft.get_peft_model(base(name), lora(name)))
        parts = split(whole, num_stages=stages)
        whole.eval()
        with torch.no_grad():
            assert torch.equal(through([part.eval() for part in parts]), whole(**batch()).logits)
        whole.train()
        whole(**batch()).logits.square().sum().backward()
        expected = {n: p.grad.clone() for n, p in whole.get_base_model().named_parameters() if p.requires_grad}
        whole.zero_grad()
        through([part.train() for part in parts]).square().sum().backward()
        found = {n: p.grad for part in parts for n, p in part.named_parameters() if p.requires_grad}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7 * float(value.abs().max() + 1))
        assert all(p.grad is None for part in parts for p in part.parameters() if not p.requires_grad)

    def test_counts(self, name: str, stages: int) -> None:
        whole = peft.get_peft_model(base(name), lora(name))
        cut = plan(whole, num_stages=stages)
        assert sum(cut.trained) == whole.get_nb_trainable_parameters()[0]
        assert all(not group.trained for group in cut.tied)
        assert all(0 < t < p for t, p in zip(cut.trained, cut.parameters, strict=True))

    def test_saved_as_peft_saves_it(self, name: str, stages: int, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        whole = shaken(peft.get_peft_model(base(name), lora(name)))
        parts = split(whole, num_stages=stages)
        save_pretrained(parts, tmp_path / "ours")
        assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        whole.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
        ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        again = peft.PeftModel.from_pretrained(base(name), tmp_path / "ours").eval()
        with torch.no_grad():
            assert torch.equal(again(**batch()).logits, whole.eval()(**batch()).logits)


def test_a_trained_module_of_which_every_stage_has_a_copy(tmp_path: Path) -> None:
    """DeBERTa's relative positions, trained whole beside LoRA: one stage saves them."""
    import transformers

    positions = {"relative_attention": True, "position_buckets": 4, "share_att_key": True, "pos_att_type": "p2c|c2p"}
    config = transformers.DebertaV2Config(**BERT, **positions, pooler_hidden_size=32)
    torch.manual_seed(0)
    transformers.DebertaV2ForSequenceClassification(config).save_pretrained(tmp_path / "base")
    adapter = peft.LoraConfig(target_modules=["query_proj"], modules_to_save=["rel_embeddings", "classifier"])
    parts = build(pretrained(str(tmp_path / "base"), lora=adapter), 3)
    assert all(len(part.tied_parameters()) == 2 for part in parts), "the one in training, and peft's frozen original"
    for part in parts:
        shaken(part)
    for name, first in parts[0].tied_parameters().items():  # as training keeps them
        for part in parts[1:]:
            with torch.no_grad():
                part.tied_parameters()[name].copy_(first)
    save_pretrained(parts, tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        transformers.DebertaV2ForSequenceClassification.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    with torch.no_grad():
        expected = again.eval()(**batch()).logits
        assert torch.equal(through([part.eval() for part in parts]), expected)
        resumed = build(pretrained(str(tmp_path / "base"), lora=tmp_path / "adapter"), 2)
        assert torch.equal(through([part.eval() for part in resumed]), expected)


def test_a_whole_model_in_the_place_of_an_adapter_is_loaded_without_it(tmp_path: Path) -> None:
    import transformers

    base("llama").save_pretrained(tmp_path / "base")
    start = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    save_pretrained(split(shaken(peft.get_peft_model(start, lora("llama"))), num_stages=2), tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    whole = shaken(base("llama")).eval()
    save_pretrained(split(whole, num_stages=2), tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(found(**batch()).logits, whole(**batch()).logits)


class TestTiedEmbeddings:
    """Input embedding and output layer in one, which some train whole beside LoRA, for new tokens."""

    @pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft, of merging the adapter
    def test_an_output_layer_of_its_own_begins_as_the_embedding(self, tmp_path: Path) -> None:
        """No folder has it under its own name."""
        model = base("llama", tie_word_embeddings=True).eval()
        model.save_pretrained(tmp_path)
        parts = build(pretrained(str(tmp_path), lora=lora("llama", modules_to_save=["embed_tokens", "lm_head"])), 2)
        with torch.no_grad():
            assert torch.equal(through([part.eval() for part in parts]), model(**batch()).logits)

    def test_that_stays_tied_is_saved_under_both_names(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        config = lora("llama", modules_to_save=["embed_tokens"], ensure_weight_tying=True)
        whole = shaken(peft.get_peft_model(base("llama", tie_word_embeddings=True), config)).eval()
        save_pretrained(split(whole, num_stages=2), tmp_path / "ours")
        whole.save_pretrained(tmp_path / "theirs")
        ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        again = peft.PeftModel.from_pretrained(base("llama", tie_word_embeddings=True), tmp_path / "ours").eval()
        with torch.no_grad():
            assert torch.equal(again(**batch()).logits, whole(**batch()).logits)


@pytest.mark.parametrize(("folder", "name"), [(n, n) for n in MODELS], indirect=["folder"])
class TestFromDisk:
    def test_starts_as_the_base_model(self, folder: Path, name: str) -> None:
        one, two = (build(pretrained(str(folder), lora=lora(name)), stages) for stages in (1, 2))
        model = base(name).eval()
        with torch.no_grad():
            assert torch.equal(through([s.eval() for s in one]), model(**batch()).logits)
            assert torch.equal(through([s.eval() for s in two]), model(**batch()).logits)
        whole = peft.get_peft_model(model, lora(name)).get_base_model()
        names = {n for n, p in whole.named_parameters() if p.requires_grad}
        for stages in (one, two):
            found = {n: p for s in stages for n, p in s.named_parameters() if p.requires_grad}
            assert set(found) == names
            for key, p in found.items():
                assert bool(p.isfinite().all())
                if "lora_A" in key or "embedding_B" in key:
                    assert float(p.detach().std()) > 0
                elif "lora_B" in key or "embedding_A" in key:
                    assert not bool(p.any())
        first = dict(one[0].named_parameters())
        for stage in two:
            for key, p in stage.named_parameters():
                assert torch.equal(p, first.get(key, p)), "depends on the number of stages"

    def test_magnitudes_begin_as_the_norms_of_the_weights(self, folder: Path, name: str) -> None:
        targets = MODELS[name][3].get("target_modules")
        more = {"target_modules": [t for t in targets if t != "wte"]} if isinstance(targets, list) else {}
        config = peft.LoraConfig(**MODELS[name][3] | more | {"use_dora": True, "use_rslora": True})
        whole = peft.get_peft_model(base(name), config).get_base_model()
        magnitudes = {n: p for n, p in whole.named_parameters() if "magnitude" in n}
        assert magnitudes
        for stages in (1, 3):
            parts = build(pretrained(str(folder), lora=config), stages)
            found = {n: p for part in parts for n, p in part.named_parameters() if "magnitude" in n}
            assert found.keys() == magnitudes.keys()
            assert all(torch.equal(found[n], magnitudes[n]) for n in found)

    def test_goes_on_with_a_saved_adapter(self, folder: Path, name: str, tmp_path: Path) -> None:
        parts = build(pretrained(str(folder), lora=lora(name)), 2)
        for part in parts:
            shaken(part)
        save_pretrained(parts, tmp_path / "adapter")
        expected = through([part.eval() for part in parts])
        assert not torch.equal(expected, base(name).eval()(**batch()).logits)
        for source in (pretrained(str(tmp_path / "adapter")), pretrained(str(folder), lora=tmp_path / "adapter")):
            again = build(source, 3)
            assert torch.equal(through([stage.eval() for stage in again]), expected)
            trained = sum(p.numel() for stage in again for p in stage.parameters() if p.requires_grad)
            assert trained == sum(plan(source, num_stages=2).trained) > 0
        save_pretrained(again, tmp_path / "again")
        first, second = ((tmp_path / f / "adapter_model.safetensors").read_bytes() for f in ("adapter", "again"))
        assert first == second


class TestFolders:
    """Files that peft may have written into an adapter's folder beside LoRA's weights."""

    @pytest.mark.parametrize("tied", [False, True])
    def test_embeddings_of_the_base(self, tied: bool, tmp_path: Path) -> None:
        whole = shaken(peft.get_peft_model(base("llama", tie_word_embeddings=tied), lora("llama"))).eval()
        base("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
        whole.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
        source = pretrained(str(tmp_path / "base"), lora=tmp_path / "adapter")
        with torch.no_grad():
            expected = whole(**batch()).logits
            assert torch.equal(through([part.eval() for part in build(source, 2)]), expected)
            whole.get_base_model().model.embed_tokens.weight[3] += 1
        whole.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
        with pytest.raises(
            SplitError, match=r"(embed_tokens|lm_head)\.weight in .*adapter: allowed: the values of .*base"
        ):
            build(source, 2)

    def test_what_peft_writes_twice(self, tmp_path: Path) -> None:
        """Biases of a module that is trained whole."""
        whole = shaken(peft.get_peft_model(base("bert"), peft.LoraConfig(**MODELS["bert"][3] | {"bias": "all"}))).eval()
        base("bert").save_pretrained(tmp_path / "base")
        whole.save_pretrained(tmp_path / "adapter")
        parts = build(pretrained(str(tmp_path / "base"), lora=tmp_path / "adapter"), 2)
        with torch.no_grad():
            assert torch.equal(through([part.eval() for part in parts]), whole(**batch()).logits)

    def test_tensors_that_do_not_fit(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        base("llama").save_pretrained(tmp_path / "base")
        peft.get_peft_model(base("llama"), lora("llama")).save_pretrained(tmp_path / "adapter")
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        held, source = load_file(file), pretrained(str(tmp_path / "base"), lora=tmp_path / "adapter")
        save_file(held | {name: held[name][:4].clone()}, file)
        with pytest.raises(
            SplitError, match=rf"{name} in .*{file.name}: its shape is \(4, 32\), the model's is \(8, 32\)"
        ):
            build(source, 2)
        save_file(held | {name.replace("layers.0", "layers.3"): held[name].clone()}, file)
        with pytest.raises(SplitError, match=r"layers\.3.* in .*: the model has no such tensor"):
            build(source, 2)


class TestRefused:
    def test_several_adapters(self) -> None:
        model = peft.get_peft_model(base("llama"), lora("llama"))
        model.add_adapter("second", lora("llama"))
        with pytest.raises(SplitError, match="default, second: a model that is split may have one"):
            split(model, num_stages=2)

    def test_another_method(self) -> None:
        model = peft.get_peft_model(base("llama"), peft.IA3Config(task_type="CAUSAL_LM"))
        with pytest.raises(SplitError, match="IA3"):
            split(model, num_stages=2)

    def test_prompts(self) -> None:
        """peft keeps them in the PeftModel, and the model in it as it was."""
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        with pytest.raises(SplitError, match=r"got PromptTuningConfig of type PROMPT_TUNING, allowed"):
            split(peft.get_peft_model(base("llama"), config), num_stages=2)

    @pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.2.input_layernorm.weight"])
    def test_weights_trained_beside_the_adapter(self, name: str) -> None:
        """As LongLoRA trains them: the adapter's folder would lack them."""
        model = peft.get_peft_model(base("llama"), lora("llama"))
        model.get_base_model().get_parameter(name).requires_grad_()
        with pytest.raises(SplitError, match=rf"{name}: .* LoraConfig\.modules_to_save"):
            split(model, num_stages=2)

    def test_what_goes_by_the_tokens_of_a_sample(self) -> None:
        """Activated LoRA looks for its tokens in input_ids, which only the whole model is called with."""
        model = peft.get_peft_model(base("llama"), lora("llama", alora_invocation_tokens=[5, 6]))
        with pytest.raises(SplitError, match=r"alora_invocation_tokens: got \[5, 6\], allowed: None"):
            split(model, num_stages=2)

    def test_weights_that_peft_lets_share_their_memory(self, tmp_path: Path) -> None:
        """On two stages they would come apart."""
        config = lora("llama", target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
        tied = base("llama", tie_word_embeddings=True)
        tied.save_pretrained(tmp_path)
        told = r"ensure_weight_tying: ties .*lm_head"
        with pytest.raises(SplitError, match=told):
            build_stage(source := pretrained(str(tmp_path), lora=config), plan(source, num_stages=2), index=0)
        with pytest.raises(SplitError, match=told):
            split(peft.get_peft_model(tied, config), num_stages=2)

    def test_a_vocabulary_that_was_resized_in_memory(self, tmp_path: Path) -> None:
        """The adapter's folder has no embeddings, and its base has not these."""
        base("llama").save_pretrained(tmp_path)
        model = type(base("llama")).from_pretrained(tmp_path)
        model.resize_token_embeddings(model.config.vocab_size + 2)
        with pytest.raises(SplitError, match=r"got a vocabulary of .*: the new embeddings are not saved"):
            split(peft.get_peft_model(model, lora("llama")), num_stages=2)
        model.save_pretrained(tmp_path / "resized")
        whole = type(model).from_pretrained(tmp_path / "resized")
        assert len(split(peft.get_peft_model(whole, lora("llama")), num_stages=2)) == 2
        whole.resize_token_embeddings(VOCABULARY - 2)  # which the adapter's base has all of
        assert len(split(peft.get_peft_model(whole, lora("llama")), num_stages=2)) == 2

    @pytest.mark.parametrize(
        ("name", "more"),
        [
            ("llama, classes", {}),  # for which peft itself puts the head into modules_to_save
            ("llama", {"modules_to_save": ["embed_tokens"]}),
            ("llama", {"trainable_token_indices": [VOCABULARY, VOCABULARY + 1]}),
        ],
    )
    def test_a_resized_vocabulary_of_which_the_adapter_has_a_part(
        self, name: str, more: dict[str, Any], tmp_path: Path
    ) -> None:
        """Embeddings, or the output layer, which is not tied to them, would be saved nowhere."""
        base(name).save_pretrained(tmp_path)
        model = type(base(name)).from_pretrained(tmp_path)
        model.resize_token_embeddings(VOCABULARY + 2)
        with pytest.raises(SplitError, match="the new embeddings are not saved"):
            split(peft.get_peft_model(model, lora(name, **more)), num_stages=2)

    def test_a_resized_vocabulary_that_the_adapter_has_whole(self, tmp_path: Path) -> None:
        base("llama").save_pretrained(tmp_path)
        model = type(base("llama")).from_pretrained(tmp_path)
        model.resize_token_embeddings(VOCABULARY + 2)
        whole = peft.get_peft_model(model, lora("llama", modules_to_save=["embed_tokens", "lm_head"]))
        assert len(split(whole, num_stages=2)) == 2

    def test_a_resized_vocabulary_of_a_base_on_the_hub(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Its config is in the hub's cache. A name that leads nowhere is no error."""
        base("llama").save_pretrained(tmp_path)
        model = base("llama")
        model.resize_token_embeddings(VOCABULARY + 2)
        whole = peft.get_peft_model(model, lora("llama"))
        config = whole.peft_config["default"]
        config.base_model_name_or_path = "some/llama"
        with monkeypatch.context() as patch:
            patch.setattr("transformers.utils.cached_file", lambda *_, **__: str(tmp_path / "config.json"))
            with pytest.raises(SplitError, match="some/llama, the adapter's base, has 61"):
                split(whole, num_stages=2)
        for nowhere in ("some/llama", str(tmp_path / "gone")):
            config.base_model_name_or_path = nowhere
            assert len(split(whole, num_stages=2)) == 2

    def test_what_starts_from_the_weights(self) -> None:
        with pytest.raises(SplitError, match="give a PeftModel in memory"):
            pretrained("anything", lora=lora("llama", init_lora_weights="pissa"))

    def test_samplers_that_peft_makes_in_the_first_forward(self) -> None:
        """On a stage that was read from a folder: after its optimizer."""
        config = lora("llama", monteclora_config=peft.MontecloraConfig(num_samples=2))
        with pytest.raises(SplitError, match=r"LoraConfig\.monteclora_config: got .* PeftModel in memory"):
            pretrained("anything", lora=config)

    def test_trained_rows_of_embeddings(self, tmp_path: Path) -> None:
        """They begin as the base model's rows, which a model in memory has."""
        config = lora("llama", trainable_token_indices=[3, 4])
        with pytest.raises(SplitError, match=r"trainable_token_indices: got \[3, 4\].* PeftModel in memory"):
            pretrained("anything", lora=config)
        whole = shaken(peft.get_peft_model(base("llama"), config)).eval()
        parts = split(whole, num_stages=2)
        save_pretrained(parts, tmp_path)
        with torch.no_grad():
            expected = whole(**batch()).logits
            assert torch.equal(through([part.eval() for part in parts]), expected)
            assert torch.equal(peft.PeftModel.from_pretrained(base("llama"), tmp_path)(**batch()).logits, expected)
        with pytest.raises(SplitError, match=r"trainable_token_indices: got \[3, 4\].* PeftModel in memory"):
            pretrained("anything", lora=tmp_path)

    @pytest.mark.parametrize("init", ["pissa", "olora"])
    def test_a_folder_whose_base_weights_peft_changes(self, init: str, tmp_path: Path) -> None:
        """peft changes the base weights again when it loads the adapter, so what is saved here is right there."""
        whole = shaken(peft.get_peft_model(base("llama"), lora("llama", init_lora_weights=init))).eval()
        parts = split(whole, num_stages=2)
        save_pretrained(parts, tmp_path / "adapter")
        with torch.no_grad():
            expected = whole(**batch()).logits
            assert torch.equal(through([part.eval() for part in parts]), expected)
            again = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "adapter").eval()
            assert torch.allclose(again(**batch()).logits, expected, atol=1e-5)
        base("llama").save_pretrained(tmp_path / "base")
        with pytest.raises(SplitError, match=f"init_lora_weights: got '{init}'.* give a PeftModel in memory"):
            pretrained(str(tmp_path / "base"), lora=tmp_path / "adapter")

    def test_loftq_is_saved_without_the_gpu_that_it_starts_on(self, tmp_path: Path) -> None:
        model = shaken(peft.get_peft_model(base("llama"), lora("llama")))
        model.peft_config["default"].init_lora_weights = "loftq"
        model.peft_config["default"].loftq_config = {"loftq_bits": 4, "loftq_iter": 1}
        save_pretrained(split(model, num_stages=2), tmp_path)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["init_lora_weights"] == "loftq"

    @pytest.mark.parametrize("init", ["pissa_niter_4", "corda", "lora_ga"])
    def test_a_start_that_no_folder_can_hold(self, init: str) -> None:
        model = peft.get_peft_model(base("llama"), lora("llama"))
        model.peft_config["default"].init_lora_weights = init
        with pytest.raises(SplitError, match=f"init_lora_weights: got '{init}'.* convert it"):
            split(model, num_stages=2)

    def test_random_weights(self) -> None:
        adapter = pretrained_adapter()
        model = base("llama")
        source = Source(config=model.config, model_class=type(model), adapter=adapter)
        with pytest.raises(SplitError, match="random weights"):
            build(source, 2)

    def test_no_adapter_there(self, tmp_path: Path) -> None:
        with pytest.raises(SplitError, match="no adapter there"):
            pretrained("anything", lora=tmp_path)

    def test_no_peft(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        base("llama").save_pretrained(tmp_path)
        source = pretrained(str(tmp_path), lora=lora("llama"))
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(SplitError, match=r"pipecomp\[lora\]"):
            plan(source, num_stages=2)
        assert plan(str(tmp_path), num_stages=2).num_stages == 2


def pretrained_adapter() -> Any:
    from pipecomp.stages.partition.adapters import as_adapter

    return as_adapter(lora("llama"))
