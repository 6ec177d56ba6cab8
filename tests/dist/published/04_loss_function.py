"""A language model's loss with a penalty on large logits (z-loss): compute_loss_func."""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer


def z_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].float()
    targets = labels[:, 1:]
    mask = targets != -100
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="sum")
    penalty = (torch.logsumexp(logits, dim=-1)[mask] ** 2).sum()
    count = num_items_in_batch if num_items_in_batch is not None else mask.sum()
    return (losses + 1e-3 * penalty) / count


tokenizer = AutoTokenizer.from_pretrained("gpt2")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("gpt2")
data = load_dataset("text", data_files={"train": "wiki.train.txt"})["train"]
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=48), remove_columns=["text"])

trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="z-loss",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        max_steps=4,
        logging_steps=1,
    ),
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    compute_loss_func=z_loss,
)
trainer.train()
