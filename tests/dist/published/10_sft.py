"""Supervised fine-tuning on chats with TRL and LoRA."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig

from pipecomp import PipelineSFTTrainer  # was: from trl import SFTTrainer

dataset = load_dataset("json", data_files="chats.jsonl", split="train").train_test_split(test_size=0.1, seed=0)
peft_config = LoraConfig(
    r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM", bias="none"
)
training_args = SFTConfig(
    output_dir="Qwen3-SFT",
    max_steps=4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    max_length=128,
    packing=True,
    bf16=False,
)
trainer = PipelineSFTTrainer(  # was: trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    peft_config=peft_config,
)
trainer.train()
trainer.save_model(training_args.output_dir)
