"""A stream: a data set that is read while training, without a length."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

tokenizer = AutoTokenizer.from_pretrained("gpt2")
tokenizer.pad_token = tokenizer.eos_token
stream = load_dataset("text", data_files="wiki.train.txt", split="train", streaming=True)
stream = stream.shuffle(seed=1, buffer_size=64).map(
    lambda row: tokenizer(row["text"], truncation=True, max_length=48), remove_columns=["text"]
)
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained("gpt2"),
    args=TrainingArguments("streamed", max_steps=4, per_device_train_batch_size=4, logging_steps=1),
    train_dataset=stream,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
