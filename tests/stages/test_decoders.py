"""Models without an entry: cut by the structure that a small copy shows, equal to the unsplit model, or refused."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomp.errors import DataError, SplitError
from pipecomp.plan.profile import count
from pipecomp.stages import Stage, build_stage, default_loss, plan, save_pretrained, split
from pipecomp.stages.partition import discovery
from tests.models import disturbed

transformers = pytest.importorskip("transformers")

SIZE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 0}
DECODER = {**SIZE, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
# name: (class, config class, settings)
# Others equal the whole model bit for bit; of these a product depends on where operands begin, on some processors.
TO_ROUNDING = ("biogpt",)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, **MIXED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**DECODER, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SIZE, "ffn_dim": 48, "dropout": 0.1, "word_embed_proj_dim": 16}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**SIZE, "n_layer": 4, "n_head": 4, "hidden_dropout": 0.1}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**SIZE, "alibi": True}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**DECODER, **EXPERTS, "head_dim": 8, "num_experts": 4, "mlp_only_layers": [1]},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**DECODER, **MIXED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**DECODER, **MLA, **EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "nanochat": ("NanoChatForCausalLM", "NanoChatConfig", DECODER),
    "biogpt": ("BioGptForCausalLM", "BioGptConfig", {**DECODER, "hidden_dropout_prob": 0.2}),
    "gemma-classes": ("GemmaForSequenceClassification", "GemmaConfig", {**DECODER, "head_dim": 8, "num_labels": 3}),
    "modernbert-classes": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**SIZE, "intermediate_size": 48, "num_labels": 3, "global_attn_every_n_layers": 2, "local_attention": 6},
    ),
    "distilbert-classes": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 97, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 0},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that was found before is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(discovery, "_known", {})
        yield


def make_model(name: str, **changes: Any) -> Any:
    model_class, config_class, settings = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**settings, **changes})
    return disturbed(getattr(transformers, model_class)(config)).train()


def batch() -> dict[str, Tensor]:
    ids_BS = torch.randint(4, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids_BS}


def labels_for(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return torch.tensor([0, 1]) if "Classification" in type(model).__name__ else inputs["input_ids"]


def run(stages: list[Stage], inputs: dict[str, Tensor]) -> Tensor:
    message: Any = inputs
    for stage in stages:
        message = stage(message)
    return message


class TestEqualToUnsplit:
    """Logits, loss and gradients of the whole model, whose sizes differ from those of the small copy; with dropout."""

    @pytest.mark.parametrize("name", MODELS)
    def test_three_stages(self, name: str) -> None:
        model, inputs = make_model(name), batch()
        labels = labels_for(model, inputs)
        torch.manual_seed(1)
        expected = model(**inputs, labels=labels)
        expected.loss.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)

        stages = split(model, cuts=[0, 1, 3])
        torch.manual_seed(1)
        logits = run(stages, inputs)
        loss = default_loss(stages[-1].config)(logits, labels)
        if name in TO_ROUNDING:
            torch.testing.assert_close(logits, expected.logits, rtol=0, atol=2e-6)
            torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=0)
        else:
            assert torch.equal(logits, expected.logits)
            assert torch.equal(loss, expected.loss)
        loss.backward()
        found: dict[str, Tensor] = {}
        for stage in stages:
            groups = {id(p): group for group, p in stage.tied_parameters().items()}
            for key, parameter in stage.named_parameters():
                if parameter.grad is not None:
                    key = groups.get(id(parameter), key)
                    found[key] = found[key] + parameter.grad if key in found else parameter.grad
        assert found.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6)

    def test_each_stage_has_its_own_part(self) -> None:
        first, second, third = split(make_model("gemma2"), cuts=[0, 1, 3])
        held = [{name.split(".")[1] for name in stage.state_dict()} for stage in (first, second)]
        assert held == [{"embed_tokens", "layers"}, {"layers"}]
        assert {"model.norm.weight", "lm_head.weight"} < set(third.state_dict())
        assert first.tied_groups[0].parameters == ("model.embed_tokens.weight", "lm_head.weight")

    def test_recomputed_activations(self) -> None:
        model, inputs = make_model("gemma2"), batch()
        expected = model(**inputs, labels=inputs["input_ids"])
        expected.loss.backward()
        gradient = model.model.layers[0].mlp.up_proj.weight.grad.clone()
        model.zero_grad()
        stages = split(model, num_stages=2)
        for stage in stages:
            stage.gradient_checkpointing_enable()
        logits = run(stages, inputs)
        assert torch.equal(logits, expected.logits)
        default_loss(stages[-1].config)(logits, inputs["input_ids"]).backward()
        assert torch.equal(model.model.layers[0].mlp.up_proj.weight.grad, gradient)

    def test_bfloat16(self) -> None:
        model, inputs = make_model("opt").eval().to(torch.bfloat16), batch()
        assert torch.equal(run(split(model, num_stages=2), inputs), model(**inputs, use_cache=False).logits)


class TestRefused:
    def test_blocks_that_read_what_does_not_travel(self) -> None:
        sizes = {"n_mamba_heads": 4, "mamba_ngroups": 1, "num_mem_blocks": 1, "mamba_d_state": 8, "adapter_rank": 4}
        kinds = {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 16, "num_key_value_heads": 4}
        config = transformers.Zamba2Config(**{**DECODER, **sizes, **kinds})
        with pytest.raises(SplitError, match=r"zamba2: stages cut at .* differ from the unsplit .*they part "):
            split(transformers.Zamba2ForCausalLM(config), num_stages=2)

    @pytest.mark.parametrize(
        ("name", "config", "why"),
        [
            ("T5ForSequenceClassification", "T5Config", "no small copy of it runs on tokens alone"),
            ("AlbertForSequenceClassification", "AlbertConfig", "no list of its .* blocks is called"),
        ],
    )
    def test_models_without_one_list_of_blocks(self, name: str, config: str, why: str) -> None:
        with torch.device("meta"):
            model = getattr(transformers, name)(getattr(transformers, config)())
        with pytest.raises(SplitError, match=rf"has no entry, and {why}.*register\(Architecture"):
            plan(model, num_stages=2)

    def test_an_answer_is_kept_and_an_unreadable_one_is_not_used(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with caplog.at_level(logging.WARNING):
            split(make_model("granite", rms_norm_eps=1e-4), num_stages=2)
            split(make_model("granite", rms_norm_eps=1e-4), num_stages=4)
        assert sum("equals its stages" in line for line in caplog.messages) == 1
        (file,) = (
            path
            for path in discovery.cache_folder().glob("granite-equality-*.json")
            if json.loads(path.read_text()).get("blocks") == 4
            and path.stat().st_mtime == max(p.stat().st_mtime for p in path.parent.glob("granite-equality-*.json"))
        )
        answer = file.read_text()
        file.write_text(answer[:7])
        monkeypatch.setattr(discovery, "_known", {})
        split(make_model("granite", rms_norm_eps=1e-4), num_stages=2)
        assert file.read_text() == answer

    def test_padding_on_the_left_where_it_would_count(self) -> None:
        config = transformers.RwkvConfig(
            vocab_size=97, hidden_size=32, attention_hidden_size=32, num_hidden_layers=3, intermediate_size=48
        )
        first, _ = split(transformers.RwkvForCausalLM(config), num_stages=2)
        ids, mask = torch.full((2, 5), 7), torch.ones(2, 5, dtype=torch.int64)
        mask[1, 3:] = 0
        assert first.layout((4, 5), {"input_ids": ids, "attention_mask": mask}).counts == (5, 3)
        with pytest.raises(DataError, match=r"sample 5 is padded on the left.*padding_side='right'"):
            first.layout((4, 5), {"input_ids": ids, "attention_mask": mask.flip(1)})


class TestFolders:
    @pytest.mark.parametrize("name", ["gemma2", "bloom", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
    def test_loaded_by_stages_and_saved_again(self, name: str, tmp_path: Path) -> None:
        """Experts are joined in the model and apart on disk, as transformers has them."""
        model, inputs = make_model(name).eval(), batch()
        model.save_pretrained(tmp_path / "model")
        found = plan(tmp_path / "model", num_stages=2)
        stages = [build_stage(tmp_path / "model", found, index) for index in range(2)]
        assert not any(stage.newly_initialized for stage in stages)
        expected = model(**inputs, use_cache=False).logits
        assert torch.equal(run([stage.eval() for stage in stages], inputs), expected)
        save_pretrained(stages, tmp_path / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
        for key, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key
        names = [set(discovered(tmp_path / folder)) for folder in ("model", "again")]
        assert names[0] == names[1]

    def test_text_part_of_a_vision_language_model(self, tmp_path: Path) -> None:
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.Gemma3Config(
            text_config={**DECODER, **MIXED, "head_dim": 8},
            vision_config={**vision, "image_size": 28, "patch_size": 14},
            image_token_index=95,
        )
        model, inputs = transformers.Gemma3ForConditionalGeneration(config).eval(), batch()
        model.save_pretrained(tmp_path)
        found = plan(tmp_path, num_stages=2)
        assert found.model_class == "Gemma3ForCausalLM"
        stages = [build_stage(tmp_path, found, index).eval() for index in range(2)]
        assert not any(stage.newly_initialized for stage in stages)
        inputs = {"input_ids": inputs["input_ids"].clamp(max=90)}
        assert torch.equal(run(stages, inputs), model(**inputs, use_cache=False).logits)


def discovered(folder: Path) -> Iterator[str]:
    from safetensors import safe_open

    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            yield from file.keys()


@pytest.mark.parametrize("name", ["gemma2", "opt", "falcon", "mixtral"])
def test_a_profile_counts_every_block(name: str) -> None:
    config = make_model(name).config
    profile = count(copy.deepcopy(config), 8)
    assert len(profile.blocks) == 4
    assert profile.hidden == 32
    assert profile.blocks[1].flops > 0
    if name == "mixtral":  # another expert for each token multiplies it with three matrices more
        config.num_experts_per_tok += 1
        more = count(config, 8).blocks[1].flops - profile.blocks[1].flops
        assert more == 8 * 3 * 2 * 32 * 48
