"""LoRA by peft's get_peft_model; afterwards the adapter is read and merged."""

from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
model.config.use_cache = False
model = get_peft_model(
    model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
)
model.print_trainable_parameters()

data = load_dataset("text", data_files="wiki.train.txt", split="train")
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"])
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="lora",
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        label_names=["labels"],
    ),
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
trainer.save_model("lora/adapter")

trainer.accelerator.wait_for_everyone()
merged = AutoPeftModelForCausalLM.from_pretrained("lora/adapter").merge_and_unload()
print("merged:", type(merged).__name__)
