"""Predict a test set without labels and write a file for a competition."""

import csv

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
data = load_dataset("imdb").map(lambda row: tokenizer(row["text"], truncation=True))
test = data["test"].remove_columns("label")

trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "competition",
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        per_device_eval_batch_size=8,
    ),
    train_dataset=data["train"],
    processing_class=tokenizer,
)
trainer.train()
output = trainer.predict(test)
probabilities = torch.softmax(torch.tensor(output.predictions), dim=-1)[:, 1].tolist()
if trainer.is_world_process_zero():
    with open("submission.csv", "w", newline="") as file:
        rows = [[i, f"{p:.6f}"] for i, p in enumerate(probabilities)]
        csv.writer(file).writerows([["id", "target"], *rows])
assert len(probabilities) == len(test)
