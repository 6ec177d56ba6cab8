"""QLoRA: a base model in 4 bits, prepare_model_for_kbit_training, and an adapter of all linear layers."""

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    TrainingArguments,
)

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", quantization_config=bnb_config)
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))

data = load_dataset("text", data_files="wiki.train.txt", split="train")
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"])
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="qlora",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_steps=1,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        optim="paged_adamw_8bit",
    ),
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
model.config.use_cache = False
trainer.train()
trainer.save_model("qlora/adapter")
