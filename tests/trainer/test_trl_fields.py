"""Every field of TRL's configurations works as in TRL, or is refused by its name."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, TrainingArguments

import pipecomp
import tests.dist.trl_work as work
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks


class Setting(dict):
    """Values of fields that together change the samples, or `same`, nothing but how they are made."""

    def __init__(self, data: str = "text", *, same: bool = False, **values: Any) -> None:
        super().__init__(values)
        self.data, self.same = data, same


SKIPPED = {"skip_prepare_dataset": True}
SFT_WORKS: dict[str, Setting] = {
    "assistant_only_loss": Setting("messages", assistant_only_loss=True, max_length=None),
    "chat_template_path": Setting("messages", chat_template_path="FOLDER/other.jinja"),
    "completion_only_loss": Setting("prompt", completion_only_loss=False),
    "dataset_kwargs": Setting("tokens", dataset_kwargs=SKIPPED),
    "dataset_num_proc": Setting(same=True, dataset_num_proc=2),
    "dataset_text_field": Setting("body", same=True, dataset_text_field="body"),
    "eos_token": Setting(eos_token="the"),
    "eval_packing": Setting(packing=True, eval_packing=False),
    "learning_rate": Setting(same=True, learning_rate=1e-4),
    "loss_type": Setting(same=True, loss_type="dft"),
    "max_length": Setting(max_length=9),
    "model_init_kwargs": Setting(same=True, model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"}),
    "packing": Setting(packing=True),
    "packing_strategy": Setting(packing=True, packing_strategy="wrapped"),
    "pad_to_multiple_of": Setting(pad_to_multiple_of=7),
    "pad_token": Setting(pad_token="the"),
    "padding_free": Setting(padding_free=True, max_length=None),
    "shuffle_dataset": Setting(shuffle_dataset=True),
    "truncation_mode": Setting(truncation_mode="keep_end", max_length=9),
    "trust_remote_code": Setting(same=True, trust_remote_code=True),
}
DPO_WORKS: dict[str, Setting] = {
    "dataset_num_proc": Setting("prompt", same=True, dataset_num_proc=2),
    "max_length": Setting("prompt", max_length=20),
    "model_init_kwargs": Setting("prompt", same=True, model_init_kwargs={"attn_implementation": "eager"}),
    "pad_to_multiple_of": Setting("prompt", pad_to_multiple_of=7),
    "pad_token": Setting("prompt", pad_token="the"),
    "truncation_mode": Setting("prompt", truncation_mode="keep_end", max_length=20),
    "trust_remote_code": Setting("prompt", same=True, trust_remote_code=True),
}
# Fields of which tests/dist/test_trl.py and `test_losses_of_dpo` compare the loss.
DPO_LOSS: dict[str, dict[str, Any]] = {
    "beta": {"beta": 0.5},
    "discopop_tau": {"loss_type": "discopop", "discopop_tau": 0.5},
    "f_alpha_divergence_coef": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    "f_divergence_type": {"f_divergence_type": "forward_kl"},
    "label_smoothing": {"loss_type": "robust", "label_smoothing": 0.2},
    "ld_alpha": {"ld_alpha": 0.3},
    "learning_rate": {"learning_rate": 5e-3},
    "loss_type": {"loss_type": ["apo_zero", "nca_pair"]},
    "loss_weights": {"loss_type": ["exo_pair", "sigmoid_norm"], "loss_weights": [1.0, 2.0], "label_smoothing": 1e-3},
    "use_weighting": {"use_weighting": True},
}
# Without effect on numbers: the reference is always computed beforehand, in batches of any size.
DPO_SAME = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 4, "disable_dropout": False}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "SFT": [
        ({"activation_offloading": True}, "activation_offloading: got True, allowed: False"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef: got 0.1, allowed: 0"),
        ({"loss_type": "other"}, "loss_type: got 'other'"),
        ({"packing_strategy": "best"}, "packing_strategy: got 'best'"),
        ({"truncation_mode": "middle"}, "truncation_mode: got 'middle'"),
        ({"packing": True, "max_length": None}, "max_length: got None, allowed: a number of tokens with packing"),
        ({"padding_free": True}, "max_length: got 64, allowed: None with padding_free"),
        ({"assistant_only_loss": True}, "assistant_only_loss: got True, allowed: True only with messages"),
        ({"eos_token": "no such"}, "eos_token: got 'no such', allowed: a token of"),
        ({"pad_token": "no such"}, "pad_token: got 'no such', allowed: a token of"),
        ({"chat_template_path": "no such"}, "chat_template_path: got 'no such', allowed: a .jinja file"),
        ({"dataset_kwargs": {"add_special_tokens": True}}, "dataset_kwargs: got .'add_special_tokens'."),
        ({"loss_type": "dft", "label_smoothing_factor": 0.1}, "label_smoothing_factor: got 0.1, allowed: 0 with"),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, r"model_init_kwargs\['dtype'\]: got torch.bfloat16"),
        ({"model_init_kwargs": {"no_such": 1}}, "LlamaConfig has no setting no_such"),
        ({"dataset_text_field": "body"}, "train_dataset: TRL cannot prepare it: KeyError: 'body'"),
    ],
    "DPO": [
        ({"activation_offloading": True}, "activation_offloading: got True, allowed: False"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef: got 0.1, allowed: 0"),
        ({"padding_free": True}, "padding_free: got True, allowed: False"),
        ({"sync_ref_model": True}, "sync_ref_model: got True, allowed: False"),
        ({"ref_model_mixup_alpha": 0.1}, "ref_model_mixup_alpha: got 0.1, allowed: 0.6"),
        ({"ref_model_sync_steps": 2}, "ref_model_sync_steps: got 2, allowed: 512"),
        ({"loss_type": "other"}, "loss_type: got .'other'., allowed: sigmoid, hinge"),
        ({"f_divergence_type": "other"}, "f_divergence_type: got 'other', allowed: reverse_kl"),
        ({"f_divergence_type": "forward_kl", "loss_type": "aot"}, "loss_type: got .'aot'., allowed: sigmoid"),
        ({"use_weighting": True, "loss_type": "aot"}, "use_weighting: got True, allowed: False with 'aot'"),
        ({"loss_type": "exo_pair"}, "label_smoothing: got 0.0, allowed: above 0 with 'exo_pair'"),
        ({"ld_alpha": 2.0}, "ld_alpha: got 2.0"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: got 0.1, allowed: 0"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: got 'group_by_length'"),
    ],
}


def digest(trainer: Any, *, pairs: bool) -> str:
    """A hash of the samples for training and evaluation, and of a batch."""
    found = hashlib.sha256()
    names = ("prompt_ids", "chosen_ids", "rejected_ids") if pairs else ("input_ids", "labels", "seq_lengths")
    for data in (trainer.train_dataset, trainer.eval_dataset):
        for name in [name for name in names if name in data.column_names]:
            found.update(f"{name}{data[name][:]}".encode())
    rows = [trainer.train_dataset[i] for i in range(2)]
    batch = batch_of(trainer, rows, pairs=pairs)
    for name in sorted(name for name, value in batch.items() if isinstance(value, torch.Tensor)):
        found.update(f"{name}{batch[name].tolist()}".encode())
    return found.hexdigest()


def batch_of(trainer: Any, rows: list[Any], *, pairs: bool) -> dict[str, Any]:
    """A collated batch; of pairs, the chosen sequences first, then the rejected ones."""
    if not pairs:
        return trainer.data_collator(rows)
    made = trainer.data_collator
    if type(made).__name__ == "DataCollatorForPreference":
        batch = made(rows)
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
    data = trainer._samples(trainer.train_dataset, "").data
    return made([data[2 * i + which] for which in (0, 1) for i in range(len(rows))])


def data_of(kind: str, count: int, *, pairs: bool) -> Any:
    if kind == "body":
        return work.data_of("text", count).rename_column("text", "body")
    return work.data_of(kind, count, preferences=pairs)


def made(kind: type, config: type, folder: Path, setting: dict[str, Any], data: str, **own: Any) -> Any:
    values = {k: v.replace("FOLDER", str(folder)) if isinstance(v, str) else v for k, v in setting.items()}
    args = work.arguments(config, folder / "out", {"max_steps": 3, "report_to": "none", **values})
    pairs = config.__name__ == "DPOConfig"
    train, held_out = (data_of(data, count, pairs=pairs) for count in (20, 6))
    return kind(str(folder / "model"), args=args, train_dataset=train, eval_dataset=held_out, **own)


def refuse(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """The errors of wrong settings, and what comes of other arguments."""
    import trl

    import pipecomp
    from pipecomp.errors import PipecompError

    path = Path(folder)
    work.use_cache(path)
    errors = {}
    kinds = {"SFT": (pipecomp.PipelineSFTTrainer, trl.SFTConfig), "DPO": (pipecomp.PipelineDPOTrainer, trl.DPOConfig)}
    for name, (kind, config) in kinds.items():
        for setting, _ in REFUSED[name]:
            try:
                made(kind, config, path, setting, "text" if name == "SFT" else "prompt")
            except PipecompError as error:
                errors[name, str(setting)] = str(error)
    return {"errors": errors, "others": others(path)}


def compare(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """Digests of samples and batches, and losses of DPO, of both trainers."""
    import trl

    import pipecomp

    warnings.simplefilter("ignore")
    path = Path(folder)
    work.use_cache(path)
    out: dict[str, Any] = {"digests": {}, "losses": {}}
    kinds: list[tuple[str, Any, Any, Any, dict[str, Setting]]] = [
        ("SFT", pipecomp.PipelineSFTTrainer, trl.SFTTrainer, trl.SFTConfig, SFT_WORKS),
        ("DPO", pipecomp.PipelineDPOTrainer, trl.DPOTrainer, trl.DPOConfig, DPO_WORKS),
    ]
    digests: dict[Any, str] = {}
    for name, ours, theirs, config, works in kinds:
        for field, setting in works.items():
            usual = {"dataset_text_field": "body"} if setting.data == "body" else {}
            usual |= {"max_length": None} if setting.get("padding_free") else {}
            for kind, values in ((ours, setting), (theirs, setting), (ours, usual)):
                key = name, kind.__name__, setting.data, str(values)
                if key not in digests:
                    digests[key] = digest(made(kind, config, path, values, setting.data), pairs=name == "DPO")
                out["digests"].setdefault((name, field), []).append(digests[key])
    for field, values in {"": {}, **DPO_LOSS, **{key: {key: value} for key, value in DPO_SAME.items()}}.items():
        out["losses"][field] = []
        for kind in (pipecomp.PipelineDPOTrainer, trl.DPOTrainer):
            trainer = made(kind, trl.DPOConfig, path, values, "prompt", peft_config=work.lora())
            trainer.train()
            out["losses"][field].append([line["loss"] for line in trainer.state.log_history if "loss" in line])
            if kind is pipecomp.PipelineDPOTrainer:
                trainer.end()
    return out


def others(path: Path) -> dict[str, Any]:
    """Arguments that are no fields of a configuration."""
    import trl

    import pipecomp
    from pipecomp.errors import PipecompError

    def error(make: Any) -> str:
        try:
            make()
        except PipecompError as found:
            return str(found)
        return ""

    def sft(**more: Any) -> Any:
        return made(pipecomp.PipelineSFTTrainer, trl.SFTConfig, path, more.pop("settings", {}), "text", **more)

    def dpo(**more: Any) -> Any:
        return made(pipecomp.PipelineDPOTrainer, trl.DPOConfig, path, {}, "prompt", **more)

    def plain(kind: type, **more: Any) -> Any:
        args = work.arguments(kind, path / "out", {})
        return pipecomp.PipelineTrainer(str(path / "model"), args, train_dataset=work.data_of("tokens"), **more)

    flattens = sft(data_collator=DataCollatorWithFlattening())
    usual = TrainingArguments(output_dir=str(path / "out"), use_cpu=True, report_to="none", max_steps=1)
    given = pipecomp.PipelineSFTTrainer(str(path / "model"), usual, train_dataset=work.data_of("text"))
    four = {"model_init_kwargs": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "device_map": "auto"}}
    two = {"model_init_kwargs": {"quantization_config": work.four_bits()}}
    return {
        "formatted": [x for x in sft(formatting_func=lambda row: row["text"][:9]).train_dataset["input_ids"][0]],
        "flattens": set(flattens.data_collator([flattens.train_dataset[0]])),
        "training arguments": type(given.args).__name__,
        "four bits": sft(settings=four, peft_config=work.lora())._holder.model.quantizer is not None,
        "SFTConfig": error(lambda: plain(trl.SFTConfig)),
        "DPOConfig": error(lambda: plain(trl.DPOConfig)),
        "RewardConfig": error(lambda: plain(trl.RewardConfig)),
        "wrong config": error(lambda: made(pipecomp.PipelineSFTTrainer, trl.DPOConfig, path, {}, "prompt")),
        "list": error(lambda: made_with(pipecomp.PipelineSFTTrainer, path, [{"text": "a"}])),
        "twice": error(lambda: sft(settings=two, quantization_config=work.four_bits())),
        "collator": error(lambda: sft(settings={"packing": True}, data_collator=DataCollatorWithFlattening())),
        "dpo collator": error(lambda: dpo(data_collator=DataCollatorWithFlattening())),
        "reference": error(lambda: dpo(ref_model=object())),
        "adapters": error(lambda: adapted_twice(path)),
        "no adapter": error(lambda: sft(peft_config={"r": 4})),
        "images": error(lambda: made_with(pipecomp.PipelineSFTTrainer, path, images())),
    }


def images() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"text": "a", "image": "b"}])


def made_with(kind: type, path: Path, data: Any) -> Any:
    import trl

    return kind(str(path / "model"), work.arguments(trl.SFTConfig, path / "out", {}), train_dataset=data)


def adapted_twice(path: Path) -> Any:
    import trl

    import pipecomp

    args = work.arguments(trl.SFTConfig, path / "out", {})
    data, tokenizer = work.data_of("text"), work.tokenizer()
    model = work.adapted(path / "model")
    return pipecomp.PipelineSFTTrainer(
        model, args, train_dataset=data, processing_class=tokenizer, peft_config=work.lora()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fields")
    work.write_model(made / "model")
    (made / "other.jinja").write_text("{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}")
    return made


@pytest.fixture(scope="module")
def refused(folder: Path) -> dict[str, Any]:
    return run_ranks(1, refuse, str(folder), timeout_s=2 * HANG_S)[0]


@pytest.fixture(scope="module")
def compared(folder: Path) -> dict[str, Any]:
    return run_ranks(1, compare, str(folder), timeout_s=2 * HANG_S)[0]


def own_fields(config: type) -> set[str]:
    """The fields that a configuration has beside those of TrainingArguments, or with another meaning."""
    usual = {field.name for field in dataclasses.fields(TrainingArguments)}
    return {field.name for field in dataclasses.fields(config)} - usual | {"learning_rate"}


def test_no_field_is_ignored() -> None:
    import trl

    refused = {name: {field for values, _ in rows for field in values} for name, rows in REFUSED.items()}
    assert own_fields(trl.SFTConfig) - refused["SFT"] <= set(SFT_WORKS)
    assert own_fields(trl.DPOConfig) - refused["DPO"] <= {*DPO_WORKS, *DPO_LOSS, *DPO_SAME}


def test_what_to_install_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import pipecomp

    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(pipecomp.__dict__, "PipelineSFTTrainer", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'pipecomp\[chat\]'"):
        _ = pipecomp.PipelineSFTTrainer


@pytest.mark.soak
@pytest.mark.parametrize(("name", "field"), [("SFT", f) for f in SFT_WORKS] + [("DPO", f) for f in DPO_WORKS])
def test_samples_and_batches_are_trls(name: str, field: str, compared: dict[str, Any]) -> None:
    ours, theirs, plain = compared["digests"][name, field]
    assert ours == theirs
    assert (ours == plain) == {"SFT": SFT_WORKS, "DPO": DPO_WORKS}[name][field].same


@pytest.mark.soak
@pytest.mark.parametrize("field", [*DPO_LOSS, *DPO_SAME])
def test_losses_of_dpo(field: str, compared: dict[str, Any]) -> None:
    ours, theirs = compared["losses"][field]
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert (ours == pytest.approx(compared["losses"][""][0], rel=1e-5)) == (field in DPO_SAME)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, refused: dict[str, Any]) -> None:
    for setting, message in REFUSED[name]:
        assert re.search(message, refused["errors"].get((name, str(setting)), "no error")), setting


def test_other_arguments(refused: dict[str, Any]) -> None:
    others = refused["others"]
    assert 1 < len(others["formatted"]) < 12
    assert others["flattens"] >= {"input_ids", "labels", "position_ids"}
    assert others["training arguments"] == "SFTConfig"
    assert others["four bits"]
    for name, message in {
        "SFTConfig": "args: got 'a SFTConfig', allowed: TrainingArguments. Use pipecomp.PipelineSFTTrainer",
        "DPOConfig": "Use pipecomp.PipelineDPOTrainer",
        "RewardConfig": "No trainer here uses it",
        "wrong config": "args: got 'DPOConfig', allowed: a SFTConfig",
        "list": "train_dataset: got 'list', allowed: a datasets.Dataset",
        "twice": "quantization_config: got",
        "collator": "data_collator: got",
        "dpo collator": "data_collator: got 'DataCollatorWithFlattening'",
        "reference": "ref_model: got 'object', allowed: None",
        "adapters": "peft_config: got",
        "no adapter": "peft_config: got 'dict', allowed: a peft.LoraConfig",
        "images": "the column \\['image'\\]\"?, allowed: text",
    }.items():
        assert re.search(message, others[name]) or message in others[name], (name, others[name])


@pytest.mark.parametrize("kind", [pipecomp.PipelineSFTTrainer, pipecomp.PipelineDPOTrainer])
def test_what_a_pipeline_trainer_takes_by_name_a_trl_trainer_takes(kind: type) -> None:
    def named(kind: type) -> set[str]:
        parameters = inspect.signature(kind).parameters.values()
        return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    of_configuration = {"max_length", "packing"}
    taken = named(kind) | {"peft_config"}  # at its place in TRL
    assert named(pipecomp.PipelineTrainer) - taken == of_configuration
