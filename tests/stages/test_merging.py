"""A merged adapter is the model that peft merges, from files of the base that are read one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.errors import SplitError
from pipecomp.stages.partition.merging import merge_adapter
from tests.models import gpt2

peft = pytest.importorskip("peft")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, **size))


def adapted(model: Any, folder: Path, **options: Any) -> Any:
    """The model with a trained adapter, both of which are saved."""
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    made = peft.get_peft_model(model.eval(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options))
    draw = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    made.peft_config["default"].base_model_name_or_path = str(folder / "base")
    made.save_pretrained(folder / "adapter", save_embedding_layers=False)
    (folder / "adapter" / "tokenizer.json").write_text("{}")
    return made


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": "all-linear", "use_rslora": True},
    ],
)
def test_logits_are_those_of_the_adapted_model(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = adapted(make(), tmp_path, **options)
    merge_adapter(str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1, "as many files as the base has"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(11)[None]
    with torch.no_grad():
        expected = made(ids).logits
        assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
        assert not torch.allclose(make().eval()(ids).logits, expected, atol=1e-2), "the adapter changes something"
    assert not any(path.name.startswith("adapter") for path in (tmp_path / "merged").iterdir())
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_layers_that_are_trained_whole_take_the_place_of_the_bases(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = adapted(llama(), tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])
    merge_adapter(str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "merged")
    merged, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), torch.arange(11)[None]
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, made(ids).logits, atol=1e-5)


def test_what_is_no_matrix_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    adapted(llama(), tmp_path, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(SplitError, match=r"--merge: .*lora_embedding_A.* is no LoRA weight of a linear layer"):
        merge_adapter(str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
