"""Stages built one at a time from folders, hub names and configs, and saved as one Hugging Face folder."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import SplitError
from pipecomp.stages import (
    Stage,
    build_stage,
    default_loss,
    plan,
    pretrained,
    save_pretrained,
    split,
    write_index,
    write_shard,
)
from pipecomp.stages.partition.checkpoints import Checkpoint
from tests.limits import HANG_S
from tests.models import COMMON, MODELS, make_config, make_model

transformers = pytest.importorskip("transformers")

NAMES = (
    *(
        "gpt2",
        "gpt2-classes",
        "llama",
        "llama-tied",
        "qwen2",
        "qwen3-classes",
        "mistral",
        "bert-classes",
        "bert-masked",
    ),
    *("bert-masked", "roberta-masked", "deberta-v2", "deberta-masked", "deberta-masked-new"),
)


def inputs() -> dict[str, Tensor]:
    ids_BS = torch.randint(3, 61, (3, 8), generator=torch.Generator().manual_seed(2))
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[1, 5:] = 0
    return {"input_ids": ids_BS.masked_fill(mask_BS == 0, 0), "attention_mask": mask_BS}


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(**inputs(), use_cache=False).logits


def run(stages: list[Stage]) -> Tensor:
    message: Any = inputs()
    with torch.no_grad():
        for stage in stages:
            message = stage.eval()(message)
    assert isinstance(message, Tensor)
    return message


def build(source: Any, count: int, **options: Any) -> list[Stage]:
    found = plan(source, num_stages=count, tie=options.get("tie", True))
    return [build_stage(source, found, index, **options) for index in range(count)]


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    make_model("gpt2").save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def rewrite(folder: Path, change: Any) -> None:
    """Replace the tensors of a single-file checkpoint by `change(tensors)`."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


class TestFromFolder:
    @pytest.mark.parametrize("form", ["one file", "many files"])
    @pytest.mark.parametrize("name", NAMES)
    def test_equal_to_from_pretrained(self, name: str, form: str, tmp_path: Path) -> None:
        model = make_model(name)
        model.save_pretrained(tmp_path, max_shard_size="20KB" if form == "many files" else "1GB")
        assert len(list(tmp_path.glob("*.safetensors"))) == 1 or form == "many files"
        stages = build(tmp_path, 3)
        assert torch.equal(run(stages), logits_of(model))
        assert all(stage.newly_initialized == () for stage in stages)
        assert not any(t.is_meta for s in stages for t in [*s.parameters(), *s.buffers()])
        whole = dict(model.named_parameters(remove_duplicate=False))
        for stage in stages:
            assert all(torch.equal(p, whole[n]) for n, p in stage.named_parameters(remove_duplicate=False))

    @pytest.mark.parametrize("name", NAMES)
    def test_buffers_are_those_of_the_whole_model(self, name: str, tmp_path: Path) -> None:
        """Buffers that no checkpoint holds: rotary frequencies, position ids."""
        model = make_model(name, **({"rope_parameters": YARN} if name == "llama" else {}))
        model.save_pretrained(tmp_path)
        whole = dict(model.named_buffers())
        found = {n: b for stage in build(tmp_path, 2) for n, b in stage.named_buffers()}
        assert set(found) == set(whole)
        assert all(torch.equal(b, whole[n]) and b.dtype == whole[n].dtype for n, b in found.items())

    def test_stages_are_trained_apart(self, gpt2_folder: Path) -> None:
        first, last = build(gpt2_folder, 2)
        assert first.training
        with torch.no_grad():
            first.get_parameter("transformer.wte.weight").zero_()
        assert last.get_parameter("lm_head.weight").abs().sum() > 0

    def test_weights_are_not_views_of_the_file(self, gpt2_folder: Path) -> None:
        stages = build(gpt2_folder, 2)
        with (gpt2_folder / "model.safetensors").open("r+b") as file:
            file.write(bytes((gpt2_folder / "model.safetensors").stat().st_size))
        assert torch.equal(run(stages), logits_of(make_model("gpt2")))

    def test_one_stage_keeps_one_tied_parameter(self, gpt2_folder: Path) -> None:
        (stage,) = build(gpt2_folder, 1)
        assert stage.get_parameter("lm_head.weight") is stage.get_parameter("transformer.wte.weight")

    def test_dtype(self, tmp_path: Path) -> None:
        make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
        assert {p.dtype for s in build(tmp_path, 2) for p in s.parameters()} == {torch.bfloat16}
        for wanted in (torch.float32, "float32"):
            stages = build(tmp_path, 2, dtype=wanted)
            assert {p.dtype for s in stages for p in s.parameters()} == {torch.float32}
        assert {b.dtype for s in stages for b in s.buffers()} == {torch.float32}
        config = json.loads((tmp_path / "config.json").read_text())
        del config["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert {p.dtype for s in build(tmp_path, 2) for p in s.parameters()} == {torch.bfloat16}

    def test_cast_afterwards_spares_the_rotary_frequencies(self, tmp_path: Path) -> None:
        """An engine that casts its module gets what `from_pretrained` gives in that dtype."""
        make_model("llama").save_pretrained(tmp_path)
        expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        stages = [stage.bfloat16() for stage in build(tmp_path, 2)]
        assert {b.dtype for s in stages for b in s.buffers()} == {torch.float32}
        assert torch.equal(run(stages), logits_of(expected))

    def test_pytorch_file(self, tmp_path: Path) -> None:
        model = make_model("bert-masked")
        model.config.architectures = ["BertForMaskedLM"]
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        assert torch.equal(run(build(tmp_path, 2)), logits_of(model))

    def test_a_single_file_is_taken_before_an_index(self, gpt2_folder: Path) -> None:
        """As transformers does: the shards of an older save may still be there."""
        (gpt2_folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        assert torch.equal(run(build(gpt2_folder, 2)), logits_of(make_model("gpt2")))

    def test_names_of_a_base_model(self, gpt2_folder: Path) -> None:
        """The published gpt2 has no prefix in its names, and old buffers among them."""
        expected = logits_of(make_model("gpt2"))
        old = {"h.0.attn.bias": torch.ones(1), "h.0.attn.masked_bias": torch.ones(1)}
        rewrite(gpt2_folder, lambda t: {n.removeprefix("transformer."): v for n, v in t.items()} | old)
        assert torch.equal(run(build(gpt2_folder, 3)), expected)

    def test_old_names_of_norms(self, tmp_path: Path) -> None:
        model = make_model("bert-classes")
        model.save_pretrained(tmp_path)
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

        def age(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            for new, before in old.items():
                tensors = {n.replace(new, before): t for n, t in tensors.items()}
            return {**tensors, "bert.embeddings.position_ids": torch.arange(40)[None]}

        rewrite(tmp_path, age)
        assert torch.equal(run(build(tmp_path, 2)), logits_of(model))

    @pytest.mark.soak
    def test_hub_name_from_the_cache(self, gpt2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        snapshot = tmp_path / "hub/models--someone--tiny/snapshots/abc"
        snapshot.parent.mkdir(parents=True)
        gpt2_folder.rename(snapshot)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs/main").write_text("abc")
        code = """
            import sys, torch
            from pipecomp.stages import build_stage, plan
            found = plan("someone/tiny", num_stages=2)
            stage = build_stage("someone/tiny", found, 1)
            print(stage.get_parameter("transformer.ln_f.weight").sum().item())
        """
        environment = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 0, done.stderr
        expected = make_model("gpt2").transformer.ln_f.weight.sum().item()
        assert float(done.stdout.split()[-1]) == pytest.approx(expected, abs=1e-6)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def peaks(rank: int, world: int, note: object, small: str, large: str) -> list[tuple[float, float]]:
    """Return the memory peak over the stage's share, and that in KiB, for a stage from a folder and from a config."""

    def peak_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def measure(source: object) -> tuple[float, float]:
        found = plan(source, num_stages=8)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is in use
        before = peak_kib()
        stage = build_stage(source, found, 3)
        share = sum(p.numel() for p in stage.parameters()) * 4 / 1024
        return (peak_kib() - before) / share, share

    build_stage(small, plan(small, num_stages=2), 0)
    return [measure(large), measure(transformers.AutoConfig.from_pretrained(large))]


class TestOnlyItsOwn:
    @pytest.mark.parametrize("name", NAMES)
    def test_bytes_read(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_model(name).save_pretrained(tmp_path)
        seen: list[int] = []
        read = Checkpoint.read

        def counted(self: Checkpoint, name: str) -> torch.Tensor:
            tensor = read(self, name)
            seen.append(tensor.nbytes)
            return tensor

        monkeypatch.setattr(Checkpoint, "read", counted)
        found = plan(tmp_path, cuts=[0, 1, 2])
        for index in range(3):
            seen.clear()
            stage = build_stage(tmp_path, found, index)
            assert sum(seen) == 4 * sum(p.numel() for p in stage.parameters())

    def test_peak_memory_is_near_the_stages_share(self, tmp_path: Path) -> None:
        """A model of 75 MB in 8 stages: building one takes its 9.5 MB and little more, from a folder or a config."""
        config = transformers.LlamaConfig(
            **COMMON,
            num_hidden_layers=32,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=4,
            architectures=["LlamaForCausalLM"],
        )
        make_model("llama").save_pretrained(tmp_path / "small")
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "large")
        found = run_ranks(1, peaks, str(tmp_path / "small"), str(tmp_path / "large"), timeout_s=HANG_S)[0]
        (from_folder, share), (from_config, _) = found
        assert share > 9000
        assert from_folder < 2.5
        assert from_config < 2.5


class TestNewHead:
    def test_initialized_as_the_model_does(self, gpt2_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        source = pretrained(str(gpt2_folder), model_class="AutoModelForSequenceClassification", num_labels=400)
        torch.manual_seed(11)
        state = torch.get_rng_state()
        with caplog.at_level(logging.WARNING, logger="pipecomp"):
            stages = build(source, 2)
        assert torch.equal(torch.get_rng_state(), state)
        assert [stage.newly_initialized for stage in stages] == [(), ("score.weight",)]
        assert "lacks score.weight" in caplog.text
        weight = stages[1].get_parameter("score.weight")
        assert weight.shape == (400, 32)
        assert 0.018 < weight.std() < 0.022  # config.initializer_range is 0.02
        assert abs(weight.mean()) < 0.001
        again, other = build(source, 1)[0], build(source, 1, seed=1)[0]
        assert torch.equal(again.get_parameter("score.weight"), weight)
        assert not torch.equal(other.get_parameter("score.weight"), weight)
        assert torch.equal(stages[0].get_parameter("transformer.wpe.weight"), make_model("gpt2").transformer.wpe.weight)

    def test_another_number_of_classes(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model("bert-classes")
        model.save_pretrained(tmp_path)
        with caplog.at_level(logging.WARNING, logger="pipecomp"):
            last = build(pretrained(str(tmp_path), num_labels=2), 2)[1]
        assert last.newly_initialized == ("classifier.bias", "classifier.weight")
        assert "lacks classifier.bias for these classes" in caplog.text
        assert last.get_parameter("classifier.weight").shape == (2, 32)
        assert torch.equal(last.get_parameter("bert.pooler.dense.weight"), model.bert.pooler.dense.weight)
        make_model("gpt2").save_pretrained(tmp_path / "words")
        words = pretrained(str(tmp_path / "words"), vocab_size=60, tie_word_embeddings=False)
        with pytest.raises(SplitError, match="its shape is"):
            build(words, 2)

    def test_encoder_with_and_without_pooler(self, tmp_path: Path) -> None:
        make_model("bert-masked").save_pretrained(tmp_path / "masked")
        source = pretrained(str(tmp_path / "masked"), model_class="BertForSequenceClassification")
        last = build(source, 2)[1]
        assert set(last.newly_initialized) == {
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
            "classifier.weight",
            "classifier.bias",
        }
        assert bool((last.get_parameter("classifier.bias") == 0).all())
        make_model("bert-classes").save_pretrained(tmp_path / "classes")
        other = pretrained(str(tmp_path / "classes"), model_class=transformers.BertForMaskedLM)
        fresh = build(other, 2)[1].newly_initialized
        assert "cls.predictions.bias" in fresh
        assert "cls.predictions.decoder.weight" not in fresh  # tied to the word embeddings, which are there

    @pytest.mark.parametrize("legacy", [True, False])
    def test_masked_lm_heads_of_deberta(self, legacy: bool, tmp_path: Path) -> None:
        """The published ones have the new head, and one for masks; their config says nothing of it."""
        make_model("deberta-masked-new").save_pretrained(tmp_path)
        rewrite(tmp_path, lambda t: {**t, "mask_predictions.dense.weight": torch.zeros(32, 32)})
        source = pretrained(str(tmp_path), model_class="AutoModelForMaskedLM", legacy=legacy)
        last = build(source, 2)[1]
        fresh = [
            f"cls.predictions.{n}"
            for n in ("bias", *(f"transform.{m}.{p}" for m in ("LayerNorm", "dense") for p in ("bias", "weight")))
        ]
        assert list(last.newly_initialized) == (fresh if legacy else [])
        name = "cls.predictions.decoder.weight" if legacy else "deberta.embeddings.word_embeddings.weight"
        saved = load_file(tmp_path / "model.safetensors")["deberta.embeddings.word_embeddings.weight"]
        assert torch.equal(last.get_parameter(name), saved)

    def test_settings(self, gpt2_folder: Path) -> None:
        source = pretrained(str(gpt2_folder), attn_implementation="eager", resid_pdrop=0.3)
        stage = build(source, 2)[0]
        assert stage.config._attn_implementation == "eager"
        assert stage.get_submodule("transformer.h.0.mlp.dropout").p == 0.3  # type: ignore[comparison-overlap]
        for place in ({"revision": "step1000"}, {"subfolder": "text"}, {"token": "hf_mine"}):
            with pytest.raises(SplitError, match=r"\w+: allowed: none; give the folder of a download") as caught:
                pretrained(str(gpt2_folder), **place)  # weights would be those of another place
            assert "hf_mine" not in str(caught.value)
        assert pretrained(str(gpt2_folder), revision="main", token=False, subfolder="").weights == str(gpt2_folder)
        with pytest.raises(SplitError, match="GPT2Config has no setting resid_dropp"):
            pretrained(str(gpt2_folder), resid_dropp=0.3)

    def test_half_a_head_is_an_error(self, tmp_path: Path) -> None:
        make_model("bert-classes").save_pretrained(tmp_path)
        rewrite(tmp_path, lambda t: {n: v for n, v in t.items() if n != "classifier.bias"})
        with pytest.raises(SplitError, match=r"classifier\.bias is missing"):
            build(tmp_path, 2)


class TestDamagedFolders:
    def test_missing_tensor(self, gpt2_folder: Path) -> None:
        rewrite(gpt2_folder, lambda t: {n: v for n, v in t.items() if n != "transformer.h.3.ln_1.bias"})
        found = plan(gpt2_folder, num_stages=2)
        build_stage(gpt2_folder, found, 0)
        with pytest.raises(SplitError, match=r"transformer\.h\.3\.ln_1\.bias is missing in .*gpt2"):
            build_stage(gpt2_folder, found, 1)

    def test_wrong_shape(self, gpt2_folder: Path) -> None:
        rewrite(gpt2_folder, lambda t: {**t, "transformer.h.1.mlp.c_fc.weight": torch.zeros(32, 64)})
        with pytest.raises(SplitError, match=r"c_fc\.weight in .*model\.safetensors: .* \(32, 64\), .* \(32, 128\)"):
            build(gpt2_folder, 2)

    def test_tensor_that_does_not_belong(self, gpt2_folder: Path) -> None:
        rewrite(gpt2_folder, lambda t: {**t, "transformer.h.4.ln_1.bias": torch.zeros(32)})
        with pytest.raises(SplitError, match=r"h\.4\.ln_1\.bias in .*model\.safetensors: .*no such tensor"):
            build(gpt2_folder, 2)

    def test_no_model(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nowhere", tmp_path):
            with pytest.raises(SplitError, match="no Hugging Face model there"):
                plan(str(path), num_stages=2)

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hub's library is asked for what is cached: else it tries six times, with pauses."""
        import huggingface_hub.constants

        def nowhere(*_: Any) -> None:
            raise OSError("no name service")

        def found(path: str, *, local_files_only: bool = False, **_: Any) -> None:
            raise OSError("not cached" if local_files_only else "it asks the hub")

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("socket.getaddrinfo", nowhere)
        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", found)
        with pytest.raises(SplitError, match="no/model: no Hugging Face model there: not cached"):
            plan("no/model", num_stages=2)

    def test_other_files(self, gpt2_folder: Path) -> None:
        weights = gpt2_folder / "model.safetensors"
        found = plan(gpt2_folder, num_stages=2)
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SplitError, match=r"model\.safetensors cannot be read"):
            build_stage(gpt2_folder, found, 0)
        weights.unlink()
        with pytest.raises(SplitError, match="no weights found"):
            build_stage(gpt2_folder, found, 0)

    def test_index_that_lies(self, tmp_path: Path) -> None:
        make_model("gpt2").save_pretrained(tmp_path, max_shard_size="20KB")
        found = plan(tmp_path, num_stages=2)
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        name = "transformer.h.0.ln_1.bias"
        held, others = index["weight_map"][name], sorted(set(index["weight_map"].values()))
        index["weight_map"][name] = next(f for f in others if f != held)
        path.write_text(json.dumps(index))
        with pytest.raises(SplitError, match=r"h\.0\.ln_1\.bias: the index of .* does not hold it"):
            build_stage(tmp_path, found, 0)
        (tmp_path / held).unlink()
        with pytest.raises(SplitError, match="is missing"):
            build(tmp_path, 2)

    def test_tied_weights_that_differ(self, gpt2_folder: Path) -> None:
        expected = logits_of(make_model("gpt2"))
        wte = load_file(gpt2_folder / "model.safetensors")["transformer.wte.weight"]
        rewrite(gpt2_folder, lambda t: {**t, "lm_head.weight": wte.clone()})
        assert torch.equal(run(build(gpt2_folder, 2)), expected)
        rewrite(gpt2_folder, lambda t: {**t, "lm_head.weight": wte + 1})
        with pytest.raises(SplitError, match=r"transformer\.wte\.weight and lm_head\.weight .* differ; tie=False"):
            build(gpt2_folder, 2)
        first, last = build(gpt2_folder, 2, tie=False)
        assert torch.equal(last.get_parameter("lm_head.weight"), wte + 1)
        assert torch.equal(first.get_parameter("transformer.wte.weight"), wte)


class TestFromConfig:
    @pytest.mark.parametrize("name", NAMES)
    def test_same_weights_for_every_number_of_stages(self, name: str) -> None:
        config = make_model(name).config
        config.architectures = [MODELS[name][0]]
        (whole,) = build(config, 1, seed=3)
        parts = build(config, 3, seed=3)
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for stage in parts:
            assert all(torch.equal(p, expected[n]) for n, p in stage.named_parameters(remove_duplicate=False))
        assert torch.equal(run(parts), run([whole]))

    def test_distribution_is_hugging_faces(self) -> None:
        torch.manual_seed(0)
        theirs = transformers.GPT2LMHeadModel(make_model("gpt2").config)
        (ours,) = build(make_model("gpt2").config, 1)
        for name, parameter in theirs.state_dict().items():
            own = ours.state_dict()[name]
            if parameter.std() == 0:
                assert torch.equal(own, parameter), name
            else:
                assert float(own.std()) == pytest.approx(float(parameter.std()), rel=0.12), name
                assert not torch.equal(own, parameter)

    def test_padding_row_of_the_embedding_is_zero_in_both_copies(self) -> None:
        config = make_config("qwen2", tie_word_embeddings=True)
        first, last = build(config, 2)
        copies = [first.get_parameter("model.embed_tokens.weight"), last.get_parameter("lm_head.weight")]
        assert torch.equal(copies[0], copies[1])
        assert bool((copies[1][0] == 0).all())
        assert not bool((copies[1][1] == 0).any())

    def test_seed_and_global_generator(self) -> None:
        config = make_model("gpt2").config
        torch.manual_seed(1)
        state = torch.get_rng_state()
        one, same, other = (build(config, 1, seed=seed)[0] for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), state)
        name = "transformer.h.2.attn.c_attn.weight"
        assert torch.equal(one.get_parameter(name), same.get_parameter(name))
        assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
        assert not torch.equal(one.get_parameter(name), one.get_parameter(name.replace("h.2", "h.3")))

    def test_untied(self) -> None:
        first, last = build(make_model("gpt2").config, 2, tie=False)
        assert not torch.equal(first.get_parameter("transformer.wte.weight"), last.get_parameter("lm_head.weight"))


class TestFromModel:
    def test_takes_its_modules(self) -> None:
        model = make_model("gpt2")
        found = plan(model, num_stages=2)
        stages = [build_stage(model, found, index) for index in range(2)]
        assert stages[0].get_parameter("transformer.wpe.weight") is model.transformer.wpe.weight
        assert torch.equal(run(stages), logits_of(model))

    def test_another_dtype_leaves_the_model_alone(self) -> None:
        model = make_model("gpt2")
        before = logits_of(model)
        for count in (1, 2):
            stages = [build_stage(model, plan(model, num_stages=count), i, dtype="bfloat16") for i in range(count)]
            assert {p.dtype for s in stages for p in s.parameters()} == {torch.bfloat16}
            assert len(list(stages[0].parameters())) == len(list(split(model, num_stages=count)[0].parameters()))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert torch.equal(logits_of(model), before)

    def test_plan_of_another_model(self) -> None:
        found = plan(make_model("gpt2"), num_stages=2)
        with pytest.raises(SplitError, match="GPT2LMHeadModel with 4 blocks, the model is LlamaForCausalLM"):
            build_stage(make_model("llama"), found, 0)
        with pytest.raises(SplitError, match="index: got 2, allowed: 0 to 1"):
            build_stage(make_model("gpt2"), found, 2)

    def test_stage_can_be_copied_and_pickled(self) -> None:
        stage = split(make_model("deberta-v2"), num_stages=2)[1]
        message = {"hidden_states": torch.randn(2, 5, 32), "attention_mask": torch.ones(2, 5)}
        for other in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
            assert torch.equal(other(message), stage(message))
            other.to(torch.float64)
            double = {k: v.double() for k, v in message.items()}
            assert other(double).dtype == torch.float64
        assert {p.dtype for p in stage.parameters()} == {torch.float32}


class TestSaving:
    @pytest.mark.parametrize("name", NAMES)
    def test_read_by_from_pretrained_and_cut_again(self, name: str, tmp_path: Path) -> None:
        model = make_model(name)
        save_pretrained(split(model, cuts=[0, 1, 3]), tmp_path)
        assert sorted(p.name for p in tmp_path.glob("model*")) == [
            *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
            "model.safetensors.index.json",
        ]
        again, report = getattr(transformers, MODELS[name][0]).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(logits_of(again), logits_of(model))
        for count in (1, 4):
            assert torch.equal(run(build(tmp_path, count)), logits_of(model))

    def test_tied_weights_are_written_once(self, tmp_path: Path) -> None:
        save_pretrained(split(make_model("gpt2"), num_stages=2), tmp_path)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert "lm_head.weight" not in index["weight_map"]
        files = sorted(tmp_path.glob("*.safetensors"))
        assert index["metadata"]["total_size"] == sum(t.numel() * 4 for f in files for t in load_file(f).values())
        assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}

    def test_untied_model(self, tmp_path: Path) -> None:
        model = make_model("gpt2")
        stages = split(model, num_stages=2, tie=False)
        with torch.no_grad():
            stages[1].get_parameter("lm_head.weight").add_(1)
        expected = run(stages)
        save_pretrained(stages, tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert again.config.tie_word_embeddings is False
        assert torch.equal(logits_of(again), expected)
        assert torch.equal(run(build(tmp_path, 3)), expected)

    def test_after_a_training_step_with_another_number_of_stages(self, gpt2_folder: Path, tmp_path: Path) -> None:
        stages = build(gpt2_folder, 2)
        optimizer = torch.optim.SGD([p for s in stages for p in s.parameters()], lr=0.1)
        logits = stages[1](stages[0](inputs()))
        default_loss(stages[0].config)(logits, inputs()["input_ids"]).backward()
        copies = [next(iter(stage.tied_parameters().values())) for stage in stages]
        total = copies[0].grad + copies[1].grad
        copies[0].grad = copies[1].grad = total
        optimizer.step()
        save_pretrained(stages, tmp_path / "out")
        assert not torch.equal(run(stages), logits_of(make_model("gpt2")))
        assert torch.equal(run(build(tmp_path / "out", 4)), run(stages))

    def test_over_an_older_save(self, gpt2_folder: Path) -> None:
        """First over one file, then over four shards: nothing of them stays, and other files do."""
        (gpt2_folder / "tokenizer.json").write_text("{}")
        (gpt2_folder / "pytorch_model.bin").write_bytes(b"old")
        model = make_model("gpt2")
        for count in (4, 2):
            with torch.no_grad():
                model.transformer.ln_f.bias.add_(1)
            save_pretrained(split(model, num_stages=count), gpt2_folder)
            names = {p.name for p in gpt2_folder.iterdir()}
            assert names == {
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "model.safetensors.index.json",
                *(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)),
            }
            again = transformers.AutoModelForCausalLM.from_pretrained(gpt2_folder)
            assert torch.equal(logits_of(again), logits_of(model))

    def test_old_model_stays_until_the_index_is_written(self, gpt2_folder: Path) -> None:
        before = logits_of(make_model("gpt2"))
        model = make_model("gpt2")
        with torch.no_grad():
            model.transformer.ln_f.bias.add_(1)
        stages = split(model, num_stages=2)
        write_shard(stages[0], gpt2_folder)
        with pytest.raises(SplitError, match=r"model-00002-of-00002\.safetensors\.part is missing"):
            write_index(stages[0], gpt2_folder)
        assert torch.equal(logits_of(transformers.AutoModelForCausalLM.from_pretrained(gpt2_folder)), before)
        assert write_shard(stages[1], gpt2_folder).name == "model-00002-of-00002.safetensors.part"
        write_index(stages[1], gpt2_folder)
        assert torch.equal(logits_of(transformers.AutoModelForCausalLM.from_pretrained(gpt2_folder)), logits_of(model))

    def test_a_save_that_is_cut_short_leaves_nothing_to_load(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Shards of two times would be a model that nobody has trained."""
        stages = split(make_model("gpt2"), num_stages=2)
        save_pretrained(stages, tmp_path)

        def full(*_: Any) -> None:
            raise OSError("no space left")

        monkeypatch.setattr("os.replace", full)
        with pytest.raises(OSError, match="no space left"):
            save_pretrained(stages, tmp_path)
        with pytest.raises(SplitError, match="no weights found"):
            Checkpoint(str(tmp_path))

    def test_state_in_place_of_the_stages_own(self, tmp_path: Path) -> None:
        model = make_model("gpt2")
        full = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
        stages = [build_stage(model, plan(model, num_stages=2), i, dtype=torch.bfloat16) for i in range(2)]
        for stage in stages:
            write_shard(stage, tmp_path, state={name: full[name] for name in stage.state_dict()})
        write_index(stages[0], tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
        assert torch.equal(logits_of(transformers.GPT2LMHeadModel.from_pretrained(tmp_path)), logits_of(model))
        state = stages[1].state_dict()
        with pytest.raises(SplitError, match="state for stage 1: the stage has no extra"):
            write_shard(stages[1], tmp_path, state={**state, "extra": torch.zeros(1)})
        state.pop("transformer.ln_f.bias")
        with pytest.raises(SplitError, match=r"stage 1: it lacks transformer\.ln_f\.bias"):
            write_shard(stages[1], tmp_path, state=state)

    def test_incomplete_and_doubled_shards(self, tmp_path: Path) -> None:
        model = make_model("gpt2")
        stages = split(model, num_stages=2)
        for stage in stages:
            path = write_shard(stage, tmp_path)
        tensors = load_file(path)
        held = tensors.pop("transformer.ln_f.bias")
        save_file(tensors, path)
        with pytest.raises(SplitError, match=r"no shard has transformer\.ln_f\.bias"):
            write_index(stages[0], tmp_path)
        save_file({**tensors, "transformer.ln_f.bias": held, "transformer.wpe.weight": held.clone()}, path)
        with pytest.raises(SplitError, match=r"transformer\.wpe\.weight is in both"):
            write_index(stages[0], tmp_path)
        assert not (tmp_path / "config.json").exists()

    def test_a_head_of_the_scripts_own_is_saved_as_it_is(self, tmp_path: Path) -> None:
        """As save_pretrained of the unsplit model does it; the script puts it there again to load it."""
        model = make_model("bert-classes")
        model.classifier = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3))
        save_pretrained(split(model, num_stages=2), tmp_path)
        saved = {name: value for path in tmp_path.glob("*.safetensors") for name, value in load_file(path).items()}
        assert saved.keys() == model.state_dict().keys()
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())

    def test_a_generation_config_that_transformers_refuses_is_saved_as_it_is(self, tmp_path: Path) -> None:
        model = make_model("gpt2")
        model.generation_config.temperature = 0.5
        assert not model.generation_config.do_sample
        save_pretrained(split(model, 2), tmp_path)
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        assert again.generation_config.temperature == 0.5

    def test_generation_config_travels(self, gpt2_folder: Path, tmp_path: Path) -> None:
        config = transformers.GenerationConfig.from_pretrained(gpt2_folder)
        config.max_new_tokens = 17
        config.save_pretrained(gpt2_folder)
        save_pretrained(build(gpt2_folder, 2), tmp_path / "out")
        assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 17

    def test_metadata_says_pytorch(self, tmp_path: Path) -> None:
        save_pretrained(split(make_model("llama"), num_stages=1), tmp_path)
        with safe_open(tmp_path / "model-00001-of-00001.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_a_weight_nobody_initializes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_model("llama").config
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_init_weights", lambda self, module: None)
    with pytest.raises(SplitError, match="has no initialization for it"):
        build(config, 1)


def test_modules_are_not_registered_twice() -> None:
    stage = split(make_model("llama"), num_stages=2)[0]
    assert isinstance(stage.get_submodule("model.layers.0"), nn.Module)
    assert not any(name.startswith("_model") for name, _ in stage.named_modules())
