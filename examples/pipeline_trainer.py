"""Fine-tune a causal language model on text, as with transformers' Trainer, over a pipeline with compressed links.

    torchrun --nproc-per-node 2 examples/pipeline_trainer.py --model gpt2 --train_file train.txt --eval_file test.txt \
        --output_dir runs/gpt2 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eval_strategy epoch

What a pipeline cannot do of TrainingArguments is an error that names it. What differs from a script with Trainer is
marked with "was". To go on after an interruption, start it again with --resume_from_checkpoint True.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer, HfArgumentParser, TrainingArguments, default_data_collator

import pipecomp


@dataclass
class Options:
    model: str = field(metadata={"help": "a folder that from_pretrained reads, or a name on the hub"})
    train_file: str = field(metadata={"help": "a text file to train on"})
    eval_file: str | None = field(default=None, metadata={"help": "a text file to evaluate on, after training too"})
    tokenizer: str | None = field(default=None, metadata={"help": "default: the model's"})
    length: int = field(default=256, metadata={"help": "tokens of a training sequence"})
    forward_bits: int = field(default=4, metadata={"help": "bits of a value on its way to the next stage"})
    backward_bits: int = field(default=8, metadata={"help": "bits of a value of the gradients that come back"})


def sequences(file: str, tokenizer: object, length: int) -> list[dict[str, list[int]]]:
    """The file's tokens in sequences of `length`, which are their own labels."""
    stream = tokenizer(Path(file).read_text(encoding="utf-8"))["input_ids"]  # type: ignore[operator]
    rows = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model)
    training = sequences(options.train_file, tokenizer, options.length)
    held_out = sequences(options.eval_file, tokenizer, options.length) if options.eval_file else None

    trainer = pipecomp.PipelineTrainer(  # was: Trainer(
        model=options.model,  # was: AutoModelForCausalLM.from_pretrained(options.model)
        pipecomp={  # new: what crosses the links between the stages
            "activations": {
                "method": "aqsgd",
                "forward_bits": options.forward_bits,
                "backward_bits": options.backward_bits,
            }
        },
        args=args,
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "True" else resume)
    trainer.save_model()
    if held_out is not None:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.end()


if __name__ == "__main__":
    main()
