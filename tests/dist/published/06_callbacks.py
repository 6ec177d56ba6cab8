"""Callbacks: early stopping, a CSV of the losses, and an evaluation before the first step."""

import csv

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
)

from pipecomp import PipelineTrainer  # was: from transformers import Trainer


class CsvLogger(TrainerCallback):
    def __init__(self, path):
        self.path, self.rows = path, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            self.rows.append([state.global_step, round(state.epoch, 2), logs["loss"]])

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with open(self.path, "w", newline="") as file:
                csv.writer(file).writerows([["step", "epoch", "loss"], *self.rows])


class EvaluateFirstStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            control.should_evaluate = True
        return control


def accuracy(pred):
    return {"accuracy": float(np.mean(pred.predictions.argmax(-1) == pred.label_ids))}


tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
data = load_dataset("imdb").map(lambda row: tokenizer(row["text"], truncation=True))

args = TrainingArguments(
    output_dir="callbacks",
    num_train_epochs=10,
    learning_rate=1e-3,
    per_device_train_batch_size=16,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_strategy="epoch",
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    greater_is_better=False,
)
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    compute_metrics=accuracy,
    callbacks=[
        EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1.0),
        EvaluateFirstStep(),
        CsvLogger("losses.csv"),
    ],
)
trainer.train()
print("stopped in epoch", trainer.state.epoch)
