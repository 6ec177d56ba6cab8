"""Fine-tune a chat model on prompts or chats, as with TRL's SFTTrainer, over a pipeline.

    torchrun --nproc-per-node 2 examples/sft.py --model Qwen/Qwen3-0.6B --data chat.jsonl --lora 16 \
        --output_dir runs/sft --assistant_only_loss --packing

All of SFTConfig's fields are options; what a pipeline cannot do of them is an error that names it. What differs from a
script with SFTTrainer is marked with "was".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, HfArgumentParser
from trl import SFTConfig

from pipecomp import PipelineSFTTrainer  # was: from trl import SFTTrainer


@dataclass
class Options:
    model: str = field(metadata={"help": "a folder that from_pretrained reads, or a name on the hub"})
    data: str = field(metadata={"help": "JSON lines in one of TRL's formats"})
    lora: int | None = field(default=None, metadata={"help": "rank of a new adapter"})
    four_bits: bool = field(default=False, metadata={"help": "quantize the model's linear layers"})


def main() -> None:
    options, args = HfArgumentParser((Options, SFTConfig)).parse_args_into_dataclasses()
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    trainer = PipelineSFTTrainer(  # was: SFTTrainer(
        model=options.model,
        args=args,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        peft_config=LoraConfig(r=options.lora, target_modules="all-linear") if options.lora else None,
        quantization_config=bits if options.four_bits else None,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
