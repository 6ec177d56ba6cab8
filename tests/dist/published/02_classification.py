"""A text classifier with its own metrics, evaluated every epoch; the best epoch's model is kept."""

import numpy as np
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

dataset = load_dataset("imdb")
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
id2label = {0: "NEGATIVE", 1: "POSITIVE"}
model = AutoModelForSequenceClassification.from_pretrained(
    "bert-base-uncased", num_labels=2, id2label=id2label, label2id={name: i for i, name in id2label.items()}
)


def preprocess(examples):
    return tokenizer(examples["text"], truncation=True)


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)
    hits = ((predictions == 1) & (labels == 1)).sum()
    f1 = 2 * hits / max(1, (predictions == 1).sum() + (labels == 1).sum())
    return {"accuracy": float((predictions == labels).mean()), "f1": float(f1)}


tokenized = dataset.map(preprocess, batched=True)
args = TrainingArguments(
    output_dir="classifier",
    learning_rate=2e-3,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    num_train_epochs=2,
    weight_decay=0.01,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=2,
    load_best_model_at_end=True,
    metric_for_best_model="f1",
    save_total_limit=1,
)
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=model,
    args=args,
    train_dataset=tokenized["train"],
    eval_dataset=tokenized["test"],
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
)
trainer.train()
print(trainer.evaluate())
trainer.save_model("classifier/best")
