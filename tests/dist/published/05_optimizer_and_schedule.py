"""Lower layers learn more slowly: an optimizer and a schedule of the script's own, passed to the Trainer."""

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
    get_cosine_with_hard_restarts_schedule_with_warmup,
)

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

BASE_LR, DECAY, STEPS = 2e-3, 0.8, 6

tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
dataset = load_dataset("imdb", split="train")
dataset = dataset.map(lambda row: tokenizer(row["text"], truncation=True), remove_columns=["text"])

groups = []
layers = [model.bert.embeddings, *model.bert.encoder.layer]
for depth, layer in enumerate(reversed(layers)):
    groups.append({"params": list(layer.parameters()), "lr": BASE_LR * DECAY ** (depth + 1)})
groups.append({"params": [*model.bert.pooler.parameters(), *model.classifier.parameters()], "lr": BASE_LR})
optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))
scheduler = get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 2, STEPS, num_cycles=2)

trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=model,
    args=TrainingArguments("layerwise", max_steps=STEPS, per_device_train_batch_size=8, logging_steps=1),
    train_dataset=dataset,
    processing_class=tokenizer,
    optimizers=(optimizer, scheduler),
)
trainer.train()
rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
print("learning rates:", rates)
