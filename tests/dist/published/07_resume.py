"""Train with a checkpoint every few steps, and go on from the last one if there is one."""

import os

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

OUTPUT = "resumable"


def train(max_steps):
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    data = load_dataset("text", data_files="wiki.train.txt", split="train")
    data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=48), remove_columns=["text"])
    args = TrainingArguments(
        output_dir=OUTPUT,
        max_steps=max_steps,
        per_device_train_batch_size=4,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        seed=42,
    )
    trainer = PipelineTrainer(  # was: trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    last_checkpoint = get_last_checkpoint(OUTPUT) if os.path.isdir(OUTPUT) else None
    if last_checkpoint is not None:
        print("resuming from", last_checkpoint)
    trainer.train(resume_from_checkpoint=last_checkpoint)
    return trainer.state


first = train(max_steps=2)
second = train(max_steps=5)
assert (first.global_step, second.global_step) == (2, 5)
print("steps logged:", [entry["step"] for entry in second.log_history if "loss" in entry])
