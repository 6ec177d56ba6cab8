"""A collator of the script's own: instructions with answers, the prompt masked, padded to the longest."""

from dataclasses import dataclass

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments

from pipecomp import PipelineTrainer  # was: from transformers import Trainer

PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"


@dataclass
class DataCollatorForInstructions:
    tokenizer: PreTrainedTokenizerBase
    max_length: int = 64

    def __call__(self, instances):
        input_ids, labels = [], []
        for instance in instances:
            prompt = self.tokenizer(PROMPT.format(**instance))["input_ids"]
            answer = self.tokenizer(instance["output"])["input_ids"] + [self.tokenizer.eos_token_id]
            input_ids.append(torch.tensor((prompt + answer)[: self.max_length]))
            labels.append(torch.tensor(([-100] * len(prompt) + answer)[: self.max_length]))
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(input_ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        mask = pad([torch.ones_like(row) for row in input_ids], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": pad(labels, batch_first=True, padding_value=-100)}


tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
trainer = PipelineTrainer(  # was: trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"),
    args=TrainingArguments(
        output_dir="instructions",
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=5e-3,
        logging_steps=1,
        remove_unused_columns=False,
        dataloader_num_workers=0,
    ),
    train_dataset=load_dataset("json", data_files="instructions.json", split="train"),
    data_collator=DataCollatorForInstructions(tokenizer),
)
trainer.train()
trainer.save_model()
