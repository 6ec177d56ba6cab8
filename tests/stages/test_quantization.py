"""Base weights in 4 and 8 bits: the bits of transformers, read stage by stage, trained and saved by peft's rules."""

from __future__ import annotations

import copy
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

from pipecomp.errors import SplitError  # noqa: E402
from pipecomp.stages import Source, build_stage, plan, pretrained, save_pretrained, split  # noqa: E402
from pipecomp.stages.partition import architectures, quantization  # noqa: E402
from pipecomp.stages.partition.checkpoints import Checkpoint  # noqa: E402
from pipecomp.stages.partition.loading import check_trainable  # noqa: E402
from tests.models import gpt2, llama, make_model  # noqa: E402

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4, double": NF4 | {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"},
    "fp4, stored as bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
    "8 bits": {"load_in_8bit": True},
    "8 bits, not the MLPs": {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "mlp"]},
}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "down_proj"]}


def bits(name: str = "nf4, double") -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**KINDS[name])


def loaded(folder: Any, config: Any = None, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    more |= {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(folder, **more)


def ids(length: int = 9) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(2))}


def through(stages: list[Any]) -> Tensor:
    x: Any = ids()
    for stage in stages:
        x = stage(x)
    return x


def build(source: Any, stages: int, **more: Any) -> list[Any]:
    cut = plan(source, num_stages=stages)
    return [build_stage(source, cut, index, **more) for index in range(stages)]


def content(model: Any) -> dict[str, Tensor]:
    """The bytes of every tensor of a model or stage, scales and tables included, with peft's names taken out."""
    state = {n.replace("base_layer.", ""): t for n, t in model.state_dict().items() if "lora_" not in n}
    return {name: t.detach().contiguous().reshape(-1).view(torch.uint8).clone() for name, t in state.items()}


def assert_same_bits(stages: list[Any], whole: Any) -> None:
    expected = content(whole)
    found = [content(stage) for stage in stages]
    for part in found:
        for name, value in part.items():
            assert torch.equal(value, expected[name]), name
    missing = set(expected).difference(*found)
    assert missing <= {"lm_head.weight", "transformer.wte.weight"}, "tied ones have another name on their stage"


def adapted(model: Any, seed: int = 1, **more: Any) -> Any:
    """A PeftModel whose adapters change something."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA, **more))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=draw) * 0.1)
    return model


def gradients(*modules: Any) -> dict[str, Tensor]:
    return {n: p.grad for m in modules for n, p in m.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in float32 in several files."""
    made = tmp_path_factory.mktemp("base")
    llama(tied=False).save_pretrained(made, max_shard_size="40KB")
    return made


class TestBits:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("model", ["llama", "llama, tied", "gpt2"])
    def test_are_those_of_transformers(self, model: str, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
        """Of plain weights, of a folder of quantized ones, and of a model in memory."""
        whole = gpt2() if model == "gpt2" else llama(tied="tied" in model)
        whole.to(dtype).save_pretrained(tmp_path / "plain")
        theirs = loaded(tmp_path / "plain", bits(kind)).train()
        theirs.save_pretrained(tmp_path / "quantized")
        once, twice = (copy.deepcopy(theirs) for _ in range(2))  # bitsandbytes' first forward moves 8-bit scales
        with torch.no_grad():
            expected = theirs(**ids()).logits
        sources = [pretrained(str(tmp_path / "plain"), quantization_config=bits(kind)), once]
        sources.append(pretrained(str(tmp_path / "quantized")))
        for source in sources:
            stages = build(source, 2)
            assert_same_bits(stages, twice)
            assert all(stage.quantized for stage in stages)
            with torch.no_grad():
                assert torch.equal(through([stage.train() for stage in stages]), expected)
        cuts = [plan(source, num_stages=2) for source in sources]
        assert len({(cut.cuts, cut.parameters) for cut in cuts}) == 1

    def test_of_an_encoder_with_a_new_head(self, tmp_path: Path) -> None:
        from transformers import AutoModelForSequenceClassification as Classifier

        make_model("bert-classes").save_pretrained(tmp_path)
        theirs = Classifier.from_pretrained(tmp_path, quantization_config=bits(), num_labels=3)
        assert_same_bits(build(pretrained(str(tmp_path), quantization_config=bits(), num_labels=3), 3), theirs)

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_pieces(self, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = build(pretrained(str(folder), quantization_config=bits(kind)), 1)
        monkeypatch.setattr(quantization, "_PIECE", 256)
        assert_same_bits(build(pretrained(str(folder), quantization_config=bits(kind)), 2), whole[0])

    def test_stay_when_the_stage_is_cast(self, folder: Path) -> None:
        """Also those that are stored as floating-point numbers."""
        stage = build(pretrained(str(folder), quantization_config=bits("fp4, stored as bf16")), 1)[0]
        before = {n: t for n, t in content(stage).items() if "_proj" in n}
        stage.to(torch.float64).to("cpu").half()
        after = content(stage)
        assert len(before) > 50
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert stage.dtype == torch.float16

    def test_of_a_wanted_dtype(self, folder: Path) -> None:
        theirs = loaded(folder, bits(), dtype=torch.bfloat16)
        source = pretrained(str(folder), quantization_config=bits())
        assert_same_bits(build(source, 2, dtype=torch.bfloat16), theirs)


def test_a_stage_reads_its_own_tensors_and_each_is_quantized_before_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    read, quantize = Checkpoint.read, quantization.quantize
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: (done.append(name), read(self, name))[1])
    monkeypatch.setattr(quantization, "quantize", lambda *a: (done.append("quantized"), quantize(*a))[1])
    source = pretrained(str(folder), quantization_config=bits(), lora=peft.LoraConfig(**LORA))
    build_stage(source, plan(source, cuts=[0, 1, 4]), 0)
    projections = [i for i, name in enumerate(done) if "_proj" in name]
    assert len(projections) == 7
    assert all(done[i + 1] == "quantized" for i in projections)
    assert {name.split(".")[2] for name in done if "layers" in name} == {"0"}


class TestSizes:
    @pytest.mark.parametrize("kind", KINDS)
    def test_planned_from_the_config_alone(self, kind: str, tmp_path: Path) -> None:
        """Bytes of the plan, for a folder without weights, are those of the loaded stages."""
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 61}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
        stages = build(pretrained(str(tmp_path), quantization_config=bits(kind), lora=peft.LoraConfig(**LORA)), 2)
        (tmp_path / "model.safetensors").unlink()
        source = pretrained(str(tmp_path), quantization_config=bits(kind), lora=peft.LoraConfig(**LORA))
        cut = plan(source, num_stages=2)
        for stage, planned in zip(stages, cut.frozen_bytes, strict=True):
            frozen = [p for p in stage.parameters() if not p.requires_grad]
            held = sum(p.numel() * p.element_size() for p in frozen)
            held += sum(t.numel() * t.element_size() for t in quantization.state_tensors(stage))
            assert held == pytest.approx(planned, rel=0.05)
        plain = plan(pretrained(str(tmp_path), lora=peft.LoraConfig(**LORA)), num_stages=2)
        assert plain.parameters == cut.parameters
        assert (
            sum(cut.frozen_bytes) < 0.5 * sum(plain.frozen_bytes) == 2 * sum(plain.parameters) - 2 * sum(plain.trained)
        )


class TestAdapters:
    @pytest.mark.parametrize("stages", [1, 2, 3])
    @pytest.mark.parametrize("kind", ["nf4, double", "8 bits"])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_gradients_are_those_of_peft(self, kind: str, stages: int, recompute: bool, folder: Path) -> None:
        whole = adapted(loaded(folder, bits(kind))).train()
        whole(**ids()).logits.square().sum().backward()
        expected = {n: g.clone() for n, g in gradients(whole.get_base_model()).items()}
        whole.zero_grad()
        parts = [part.train() for part in split(whole, num_stages=stages)]
        for part in parts if recompute else ():
            part.gradient_checkpointing_enable()
        through(parts).square().sum().backward()
        found = gradients(*parts)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6 * float(value.abs().max()))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_reaches_the_first_block(self, reentrant: bool, folder: Path) -> None:
        """No input of the first stage needs a gradient: embeddings are frozen."""
        source = pretrained(str(folder), quantization_config=bits(), lora=peft.LoraConfig(**LORA))
        parts = [part.train() for part in build(source, 2)]
        for part in parts:
            part.gradient_checkpointing_enable({"use_reentrant": reentrant})
        through(parts).square().sum().backward()
        found = gradients(*parts)
        assert all(bool(g.any()) for name, g in found.items() if "lora_B" in name)
        assert "model.layers.0.self_attn.q_proj.lora_B.default.weight" in found

    def test_prepared_by_peft(self, folder: Path) -> None:
        """With hooks on the embeddings, norms in float32, and reentrant checkpointing."""
        quantized = loaded(folder, bits(), dtype=torch.bfloat16)
        whole = adapted(peft.prepare_model_for_kbit_training(quantized)).train()
        loss = whole(**ids()).logits.square().sum()
        loss.backward()
        expected = {n: g.clone() for n, g in gradients(whole.get_base_model()).items()}
        whole.zero_grad()
        parts = [part.train() for part in split(whole, num_stages=2)]
        assert [part.dtype for part in parts] == [torch.float32] * 2
        through(parts).square().sum().backward()
        for name, value in gradients(*parts).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6 * float(expected[name].abs().max()))

    def test_evaluation_leaves_gradients_alone(self, tmp_path: Path) -> None:
        """On some CPUs bitsandbytes packs weights in evaluation for a kernel without gradients, and for good."""
        from bitsandbytes.functional import has_avx512bf16
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 61}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)

        def trained(parts: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
            logits = through([part.train() for part in parts])
            logits.square().sum().backward()
            return logits.detach(), gradients(*parts)

        expected, wanted = trained(split(adapted(loaded(tmp_path, bits("nf4"))), num_stages=2))
        parts = split(adapted(loaded(tmp_path, bits("nf4"))), num_stages=2)
        with torch.no_grad():
            assert torch.equal(through([part.eval() for part in parts]), expected)
        found = trained(parts)[1]
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        if has_avx512bf16():
            whole = adapted(loaded(tmp_path, bits("nf4"))).eval()
            with torch.no_grad():
                whole(**ids())
            with pytest.raises(SplitError, match="has packed this weight for evaluation"):
                split(whole, num_stages=2)

    @pytest.mark.parametrize("quantized", [False, True])
    def test_saved_for_peft(self, quantized: bool, folder: Path, tmp_path: Path) -> None:
        whole = adapted(loaded(folder, bits())).train()
        whole.save_pretrained(tmp_path / "start")
        source = pretrained(str(folder), quantization_config=bits(), lora=tmp_path / "start")
        parts = build(source, 2)
        save_pretrained(parts, tmp_path / "adapter")
        names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
        assert names == ["adapter_config.json", "adapter_model.safetensors"]
        again = peft.PeftModel.from_pretrained(loaded(folder, bits() if quantized else None), tmp_path / "adapter")
        expected = whole if quantized else peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "start")
        with torch.no_grad():
            logits = again.train()(**ids()).logits
            assert torch.equal(logits, expected.train()(**ids()).logits)
            assert torch.equal(logits, through([part.train() for part in parts])) is quantized

    def test_modules_trained_whole(self, folder: Path) -> None:
        lora = peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"])
        parts = build(pretrained(str(folder), quantization_config=bits(), lora=lora), 2)
        assert parts[0].model.embed_tokens.modules_to_save.default.weight.requires_grad
        lora = peft.LoraConfig(**LORA, modules_to_save=["o_proj"])
        with pytest.raises(SplitError, match=r"modules_to_save: .*o_proj is quantized and cannot be trained"):
            build(pretrained(str(folder), quantization_config=bits(), lora=lora), 2)


def test_saved_as_a_quantized_folder(folder: Path, tmp_path: Path) -> None:
    """Stages without an adapter, as transformers saves the model."""
    stages = build(pretrained(str(folder), quantization_config=bits()), 2)
    save_pretrained(stages, tmp_path)
    assert_same_bits(stages, loaded(tmp_path))


class TestPlainWeights:
    """Methods whose weights transformers makes plain ones of, while they are read."""

    def test_fp8(self, folder: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        state: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            state |= load_file(file)
        for name in [n for n in state if "_proj" in n]:
            scale = state[name].abs().amax() / 448
            state[f"{name}_scale_inv"] = scale.reshape(1, 1)
            state[name] = (state[name] / scale).to(torch.float8_e4m3fn)
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs = loaded(tmp_path)
        stages = build(pretrained(str(tmp_path)), 2)
        assert_same_bits(stages, theirs)
        assert not any(stage.quantized for stage in stages)
        assert not hasattr(stages[0].config, "quantization_config"), "what is saved is plain"

    def test_mxfp4(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As gpt-oss is published: experts in blocks with scales."""
        from safetensors.torch import load_file, save_file
        from transformers import GptOssConfig, GptOssForCausalLM

        llama_like = architectures.architecture_of(llama().config)
        heads = {"GptOssForCausalLM": llama_like.heads["LlamaForCausalLM"]}
        entry = replace(llama_like, model_type="gpt_oss", heads=heads, default_head="GptOssForCausalLM")
        monkeypatch.setitem(architectures._REGISTRY, "gpt_oss", entry)
        sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "head_dim": 32}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
        GptOssForCausalLM(GptOssConfig(**sizes, pad_token_id=0, eos_token_id=1)).bfloat16().save_pretrained(tmp_path)
        state, draw = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
        for name in [n for n in state if "experts" in n and n.endswith("_proj")]:
            experts, inner, outer = state.pop(name).shape
            shape = (experts, outer, inner // 32)
            state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
            state[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=draw)
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert_same_bits(build(pretrained(str(tmp_path)), 2), loaded(tmp_path))


class TestRefused:
    @pytest.mark.parametrize("method", ["gptq", "awq", "torchao", "hqq"])
    def test_other_methods(self, method: str, folder: Path, tmp_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        with pytest.raises(SplitError, match=rf"quantization_config: got '{method}', allowed: 'bitsandbytes'"):
            pretrained(str(tmp_path))

    def test_without_bitsandbytes(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
        with pytest.raises(SplitError, match=r"needs bitsandbytes.*pip install 'pipecomp\[qlora\]"):
            pretrained(str(folder), quantization_config=bits())

    def test_options(self, folder: Path, tmp_path: Path) -> None:
        from transformers import BitsAndBytesConfig, GPTQConfig

        for given, message in (
            (GPTQConfig(bits=4), "got GPTQConfig, allowed: a transformers.BitsAndBytesConfig"),
            (BitsAndBytesConfig(), "neither load_in_4bit nor load_in_8bit"),
            (
                BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True),
                "llm_int8_has_fp16_weight: got True",
            ),
        ):
            with pytest.raises(SplitError, match=message):
                pretrained(str(folder), quantization_config=given)
        loaded(folder, bits()).save_pretrained(tmp_path)
        with pytest.raises(SplitError, match="quantized by 'bitsandbytes' already"):
            pretrained(str(tmp_path), quantization_config=bits())

    def test_random_weights(self) -> None:
        config = llama().config
        config.quantization_config = bits()
        with pytest.raises(SplitError, match="random weights are not quantized"):
            build(config, 2)

    def test_tied_weights(self, tmp_path: Path) -> None:
        llama().save_pretrained(tmp_path)
        given = {**KINDS["nf4"], "llm_int8_skip_modules": []}
        with pytest.raises(SplitError, match=r"lm_head\.weight is tied .* allowed: None, or a list with 'lm_head'"):
            build(pretrained(str(tmp_path), quantization_config=given), 2)

    def test_missing_scales(self, folder: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        loaded(folder, bits("nf4")).save_pretrained(tmp_path)
        file, lost = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
        state = load_file(file)
        for missing in ([f"{lost}.absmax"], [name for name in state if name.startswith(f"{lost}.")]):
            save_file({n: t for n, t in state.items() if n not in missing}, file, metadata={"format": "pt"})
            with pytest.raises(SplitError, match=r"up_proj\.weight.*(no whole weight|scales are missing)"):
                build(pretrained(str(tmp_path)), 2)

    def test_another_shape(self, folder: Path, tmp_path: Path) -> None:
        loaded(folder, bits("nf4")).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        for path, where in ((tmp_path, "model's"), (folder, "layer's")):
            source = pretrained(str(path), quantization_config=None if path == tmp_path else bits())
            source.config.intermediate_size = config["intermediate_size"] + 16
            message = rf"gate_proj\.weight in .*shape is \(48, 32\), the {where} is \(64, 32\)"
            with pytest.raises(SplitError, match=message):
                build(source, 2)

    def test_training_without_an_adapter(self, folder: Path) -> None:
        source = pretrained(str(folder), quantization_config=bits())
        with pytest.raises(SplitError, match="quantized and cannot be trained"):
            check_trainable(source)
        with pytest.raises(SplitError, match="quantized and cannot be trained"):
            check_trainable(Source(config=source.config, model_class=source.model_class, model=loaded(folder, bits())))
        check_trainable(pretrained(str(folder), quantization_config=bits(), lora=peft.LoraConfig(**LORA)))
        check_trainable(pretrained(str(folder)))
