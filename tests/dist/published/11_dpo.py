"""Preferences with TRL's DPO: a model in memory, its reference by the same trainer."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig

from pipecomp import PipelineDPOTrainer  # was: from trl import DPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
dataset = load_dataset("json", data_files="preferences.jsonl", split="train")

training_args = DPOConfig(
    output_dir="Qwen3-DPO",
    beta=0.1,
    learning_rate=1e-3,
    per_device_train_batch_size=2,
    max_steps=3,
    logging_steps=1,
    max_length=128,
    bf16=False,
)
trainer = PipelineDPOTrainer(  # was: trainer = DPOTrainer(
    model=model, args=training_args, processing_class=tokenizer, train_dataset=dataset
)
trainer.train()
trainer.save_model()
