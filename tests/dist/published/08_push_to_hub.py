"""Fine-tune and upload: push_to_hub at the end, with a model card."""

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
data = load_dataset("imdb", split="train").map(lambda row: tokenizer(row["text"], truncation=True))

training_args = TrainingArguments(
    output_dir="bert-finetuned-imdb",
    learning_rate=1e-3,
    max_steps=3,
    per_device_train_batch_size=8,
    logging_steps=1,
    push_to_hub=True,
    hub_model_id="someone/bert-finetuned-imdb",
    hub_strategy="end",
)
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=model, args=training_args, train_dataset=data, processing_class=tokenizer
)
trainer.train()
trainer.push_to_hub(
    commit_message="Training complete", tags="text-classification", dataset="imdb", finetuned_from="bert-base-uncased"
)
