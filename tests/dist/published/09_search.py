"""A search over learning rates and weight decays by a plain loop; the best setting trains again and is saved."""

import itertools

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

tokenizer = AutoTokenizer.from_pretrained("gpt2")
tokenizer.pad_token = tokenizer.eos_token
data = load_dataset("text", data_files={"train": "wiki.train.txt", "test": "wiki.test.txt"})
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=48), remove_columns=["text"])


def run(output_dir, **settings):
    trainer = PipelineTrainer(  # was: trainer = Trainer(
        model_init=lambda: AutoModelForCausalLM.from_pretrained("gpt2"),
        args=TrainingArguments(output_dir, max_steps=2, per_device_train_batch_size=4, logging_steps=1, **settings),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    return trainer.evaluate()["eval_loss"], trainer


results = {}
for lr, wd in itertools.product([1e-4, 1e-2], [0.0, 0.1]):
    loss, trainer = run(f"search/{lr}-{wd}", learning_rate=lr, weight_decay=wd)
    results[lr, wd] = loss
best = min(results, key=results.get)
print("best:", best, results)
loss, trainer = run("search/best", learning_rate=best[0], weight_decay=best[1])
assert loss == results[best]
trainer.save_model("search/best/model")
