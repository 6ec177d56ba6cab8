"""Rare classes weigh more: compute_loss of a Trainer subclass."""

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer


class WeightedTrainer(PipelineTrainer):  # was: class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = torch.tensor(class_weights)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss_fct = torch.nn.CrossEntropyLoss(weight=self.class_weights.to(outputs.logits.device))
        loss = loss_fct(outputs.logits.view(-1, model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


dataset = load_dataset("imdb")
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
tokenized = dataset.map(lambda rows: tokenizer(rows["text"], truncation=True, padding="max_length", max_length=32))

trainer = WeightedTrainer(
    model=model,
    args=TrainingArguments("weighted", per_device_train_batch_size=8, max_steps=4, learning_rate=1e-3, logging_steps=1),
    train_dataset=tokenized["train"],
    eval_dataset=tokenized["test"],
    class_weights=[1.0, 3.0],
)
trainer.train()
print(trainer.evaluate())
