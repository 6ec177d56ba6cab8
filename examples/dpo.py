"""Optimize preferences, as with TRL's DPOTrainer, over a pipeline with compressed links.

    torchrun --nproc-per-node 2 examples/dpo.py --model Qwen/Qwen3-0.6B --data preferences.jsonl --lora 16 \
        --output_dir runs/dpo

Each line of the data has prompt, chosen and rejected, as texts or messages. All of DPOConfig's fields are options. What
differs from a script with DPOTrainer is marked with "was" or "new".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import DPOConfig

from pipecomp import PipelineDPOTrainer  # was: from trl import DPOTrainer


@dataclass
class Options:
    model: str = field(metadata={"help": "a folder that from_pretrained reads, or a name on the hub"})
    data: str = field(metadata={"help": "JSON lines with prompt, chosen and rejected"})
    lora: int | None = field(default=None, metadata={"help": "rank of a new adapter"})


def main() -> None:
    options, args = HfArgumentParser((Options, DPOConfig)).parse_args_into_dataclasses()
    trainer = PipelineDPOTrainer(  # was: DPOTrainer(
        model=options.model,
        args=args,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        peft_config=LoraConfig(r=options.lora, target_modules="all-linear") if options.lora else None,
        pipecomp={"activations": {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8}},  # new
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
