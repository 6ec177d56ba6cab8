"""Train, then let the model continue a few prompts."""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

tokenizer = AutoTokenizer.from_pretrained("gpt2", padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
data = load_dataset("text", data_files="wiki.train.txt", split="train")
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=48), remove_columns=["text"])
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained("gpt2"),
    args=TrainingArguments(
        "generates",
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
    ),
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()

prompts = ["the river", "a small model sends"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(trainer.model.device)
trainer.model.eval()
with torch.no_grad():
    outputs = trainer.model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)
for text in tokenizer.batch_decode(outputs, skip_special_tokens=True):
    print(repr(text))
assert outputs.shape == (2, inputs["input_ids"].shape[1] + 8)
