"""The Python blocks of pages, run on each rank with small stand-ins for what the pages leave to the reader."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tests.pages as pages
from tests.models import ds_config, gpt2, llama, samples


class Prepared(NamedTuple):
    """Conditions of a block's run: ranks, replaced text, and `prepare(folder)` before it."""

    ranks: int
    prepare: Callable[[Path], dict[str, Any]]  # the names that the block takes from the reader's own script
    instead: tuple[tuple[str, str], ...] = ()


def trainer_names(folder: Path) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=2, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    return {"Trainer": Trainer, "model": gpt2(), "training_args": arguments, "dataset": samples(8)}


def engine_names(folder: Path) -> dict[str, Any]:
    from transformers import default_data_collator

    if os.environ["RANK"] == "0":
        gpt2().save_pretrained(folder / "path" / "to" / "gpt2")
        (configuration,) = (block.text for block in pages.blocks("json") if block.page == "README.md")
        (folder / "ds_config.json").write_text(configuration)
    return {"dataset": samples(24), "collator": default_data_collator}


def ddp_names(folder: Path) -> dict[str, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import pipecomp

    torch.distributed.init_process_group("gloo")
    return {"pipecomp": pipecomp, "ddp": DistributedDataParallel(torch.nn.Linear(4, 4)), "tensor": torch.ones(1000)}


def adapter_names(folder: Path) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    model = gpt2()
    model.save_pretrained(folder / "runs" / "llama")
    get_peft_model(model, LoraConfig(target_modules=["c_attn"])).save_pretrained(folder / "runs" / "adapter")
    return {}


def chat_adapter_names(folder: Path) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    from tests.data.tokenizers_for_tests import split

    tokenizer = split("Where does Ada live? user assistant")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }}{% endfor %}"
    model = gpt2(vocab_size=len(tokenizer), n_positions=128)
    model.save_pretrained(folder / "runs" / "chat" / "model")
    adapter = folder / "runs" / "chat-adapter"
    get_peft_model(model, LoraConfig(target_modules=["c_attn"])).save_pretrained(adapter)
    tokenizer.save_pretrained(adapter)
    return {}


def chat_names(folder: Path) -> dict[str, Any]:
    from pipecomp import PipelineTrainer
    from tests.data.tokenizers_for_tests import split

    tokenizer = split("What is a pipeline? A row of stages. user assistant")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "What is a pipeline?"}, {"role": "assistant", "content": "A row of stages."}]
    if os.environ["RANK"] == "0":
        (folder / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 24)
    names = trainer_names(folder)
    model = gpt2(vocab_size=len(tokenizer), n_positions=1024)
    return {
        **names,
        "args": names["training_args"],
        "tokenizer": tokenizer,
        "model": model,
        "PipelineTrainer": PipelineTrainer,
    }


def quantized_names(folder: Path) -> dict[str, Any]:
    import peft
    import transformers

    if os.environ["RANK"] == "0":
        llama(tied=False).save_pretrained(folder / "path" / "to" / "llama")
        (folder / "ds_config.json").write_text(json.dumps(ds_config({"activations": {"method": "aqsgd"}})))
    while not (folder / "ds_config.json").is_file():  # the block reads the model before ranks join
        time.sleep(0.1)
    return {"transformers": transformers, "peft": peft, "data": samples(24), "PipelineTrainer": None}


DATASETS = (("train_dataset=...", "train_dataset=dataset"), ("eval_dataset=...", "eval_dataset=dataset"))
# page, and a line of the block -> how it is run
BLOCKS = {
    ("README.md", "engine = pipecomp.initialize("): Prepared(2, engine_names, (("range(1000)", "range(3)"),)),
    ("README.md", "trainer = pipecomp.PipelineTrainer("): Prepared(2, trainer_names, DATASETS),
    ("docs/configuration.md", "ddp.register_comm_hook(state, pipecomp.allreduce.ddp_hook)"): Prepared(2, ddp_names),
    ("docs/data.md", "data = load_data("): Prepared(2, chat_names),
    ("docs/using.md", 'model_type="gpt_neox"'): Prepared(1, lambda folder: {}),
    ("docs/using.md", "four_bits = transformers.BitsAndBytesConfig("): Prepared(2, quantized_names),
    ("examples/README.md", "trainer = Trainer(..., callbacks="): Prepared(
        2, trainer_names, (("Trainer(...", "Trainer(model, training_args, train_dataset=dataset"),)
    ),
    ("recipes/chat_lora/README.md", "answer = model.generate("): Prepared(1, chat_adapter_names),
    ("recipes/llama_lora/README.md", "model = PeftModel.from_pretrained("): Prepared(1, adapter_names),
}


def run(rank: int, world: int, note: Any, key: tuple[str, str], text: str, folder: str) -> list[str]:
    """Run a block in `folder`; the names that it leaves."""
    import torch

    import pipecomp

    os.chdir(folder)
    prepared = BLOCKS[key]
    names = {"pipecomp": pipecomp, **prepared.prepare(Path(folder))}
    for old, new in prepared.instead:
        assert old in text, f"{old!r} is not in the block any more"
        text = text.replace(old, new)
    if key[1].startswith("trainer = Trainer"):
        text += "trainer.train()\n"
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    exec(compile(text, key[0], "exec"), names)
    engine = names.get("engine")
    if engine is not None:
        engine.close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # rank 0 serves the others' store
    return sorted(names)
