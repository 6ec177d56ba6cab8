"""Batches of similar lengths, gradients added up over micro-batches, BF16 and gradient checkpointing."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")


def tokenize(row):
    encoded = tokenizer(row["text"], truncation=True, max_length=64)
    encoded["labels"] = encoded["input_ids"].copy()
    encoded["length"] = len(encoded["input_ids"])
    return encoded


data = load_dataset("text", data_files="wiki.train.txt", split="train").map(tokenize, remove_columns=["text"])
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"),
    args=TrainingArguments(
        output_dir="bf16",
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        bf16=True,
        use_cpu=True,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        learning_rate=5e-3,
        logging_steps=1,
    ),
    train_dataset=data,
    data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
)
trainer.train()
trainer.save_model()
