"""A torch Dataset of the script's own over a CSV, with a fixed validation split."""

import csv

import torch
from torch.utils.data import Dataset, random_split
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer


class ReviewDataset(Dataset):
    def __init__(self, path, tokenizer, max_length=32):
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        texts = [row["text"] for row in rows]
        self.encodings = tokenizer(texts, truncation=True, padding="max_length", max_length=max_length)
        self.labels = [int(row["label"]) for row in rows]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        item = {key: torch.tensor(values[idx]) for key, values in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[idx])
        return item


tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
dataset = ReviewDataset("reviews.csv", tokenizer)
held_out = len(dataset) // 5
train_set, val_set = random_split(
    dataset, [len(dataset) - held_out, held_out], generator=torch.Generator().manual_seed(0)
)
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2),
    args=TrainingArguments(
        output_dir="reviews",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=2,
    ),
    train_dataset=train_set,
    eval_dataset=val_set,
)
trainer.train()
