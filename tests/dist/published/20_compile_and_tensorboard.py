"""A compiled model whose curves go to TensorBoard."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

tokenizer = AutoTokenizer.from_pretrained("gpt2")
tokenizer.pad_token = tokenizer.eos_token
data = load_dataset("text", data_files="wiki.train.txt", split="train")
data = data.map(
    lambda row: tokenizer(row["text"], truncation=True, padding="max_length", max_length=32), remove_columns=["text"]
)
args = TrainingArguments(
    output_dir="compiled",
    max_steps=4,
    per_device_train_batch_size=4,
    learning_rate=5e-3,
    logging_steps=1,
    torch_compile=True,
    torch_compile_backend="aot_eager",
    report_to="tensorboard",
    run_name="compiled",
)
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained("gpt2"),
    args=args,
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
