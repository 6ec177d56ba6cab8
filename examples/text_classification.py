"""Fine-tune a classifier of texts with transformers' Trainer, as such scripts are usually written.

    python examples/text_classification.py --model bert-base-uncased --train_file train.jsonl --eval_file dev.jsonl \
        --output_dir runs/classifier --eval_strategy epoch --save_strategy epoch --load_best_model_at_end True \
        --metric_for_best_model accuracy --report_to none

The files have a text and its class a line: {"text": "…", "label": 0}. Nothing in it is of pipecomp; examples/README.md
says which two lines change so that it trains over a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Options:
    model: str = field(metadata={"help": "a folder that from_pretrained reads, or a name on the hub"})
    train_file: str = field(metadata={"help": "JSON lines to train on"})
    eval_file: str = field(metadata={"help": "JSON lines to evaluate on"})
    patience: int = field(default=3, metadata={"help": "evaluations without progress before training stops"})


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(axis=-1) == found.label_ids).mean())}


def main() -> None:
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
    data = load_dataset("json", data_files={"train": options.train_file, "eval": options.eval_file})
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    classes = len(set(data["train"]["label"]))
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=classes)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(options.patience)] if args.load_best_model_at_end else None,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.save_model()
    trainer.save_state()

    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(tasks="text-classification")


if __name__ == "__main__":
    main()
