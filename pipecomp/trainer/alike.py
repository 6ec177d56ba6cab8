"""What all ranks must have alike before they train or evaluate: arguments, and what `dataset_facts` tells of datasets.

Each rank makes its own from the script. Where they differ, ranks would wait for each other without end, or train on
inputs of one sample with the labels of another.
"""

from __future__ import annotations

import json
from typing import Any

from pipecomp.distributed.consistency import AllRanks

# Arguments of a process, of its machine, of its reports, or compared elsewhere (deepspeed, with all of its content).
_OWN = (
    "local_rank",
    "output_dir",
    "logging_dir",
    "run_name",
    "project",
    "report_to",
    "disable_tqdm",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "dataloader_multiprocessing_context",
    "ddp_backend",
    "ddp_timeout",
    "deepspeed",
    "eval_accumulation_steps",
    "use_cpu",
    "tf32",
    "resume_from_checkpoint",
    "torch_empty_cache_steps",
)
_OWN_BEGINNINGS = ("hub_", "push_to_hub", "trackio_")


def check_arguments(ranks: AllRanks, args: Any, **more: Any) -> None:
    """Compare TrainingArguments of all ranks; every rank must call this.

    Args:
        ranks: The round that this belongs to.
        args: This rank's.
        more: What else must be equal, JSON values by name.

    Raises:
        LinkError: On every rank, naming argument, ranks and values, where they differ.
    """
    given = json.loads(args.to_json_string())
    facts = {name: v for name, v in given.items() if name not in _OWN and not name.startswith(_OWN_BEGINNINGS)}
    ranks.assert_same_on_all_ranks({**facts, **more})
