"""A script for Trainer, changed in the import and the class: argument 1 is the folder for its results."""

import json
import sys
from pathlib import Path

from transformers import TrainingArguments

from pipecomp import PipelineTrainer
from tests.models import gpt2, samples

folder = Path(sys.argv[1])
args = TrainingArguments(
    output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to="none", use_cpu=True
)
trainer = PipelineTrainer(gpt2(2, 16), args, train_dataset=samples(8))
trainer.train()
trainer.save_model(str(folder / "model"))
found = {"ranks": trainer.world, "stages": trainer.plan.num_stages}
found["losses"] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
found["compiled"] = sum(block._compiled_call_impl is not None for block in trainer.model.blocks)
(folder / f"rank-{trainer.rank}.json").write_text(json.dumps(found))
