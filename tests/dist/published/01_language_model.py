"""Causal language modelling with the options of TrainingArguments on the command line, as run_clm scripts do it."""

import logging
import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "The checkpoint to start from."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "A text file."})
    validation_file: str = field(metadata={"help": "A text file."})
    block_size: int = field(default=32, metadata={"help": "Tokens of a training sequence."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.WARNING)
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw_datasets = load_dataset("text", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)

    def group_texts(examples):
        ids = list(chain(*tokenizer([text + "\n" for text in examples["text"]])["input_ids"]))
        total = len(ids) // data_args.block_size * data_args.block_size
        blocks = [ids[i : i + data_args.block_size] for i in range(0, total, data_args.block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    with training_args.main_process_first(desc="grouping texts"):
        lm_datasets = raw_datasets.map(group_texts, batched=True, remove_columns=["text"])

    trainer = PipelineTrainer(  # was: trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=lm_datasets["train"],
        eval_dataset=lm_datasets["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(lm_datasets["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
