"""What all ranks must have alike before they train or evaluate: arguments and datasets.

Each rank makes its own from the script. Where they differ, ranks would wait for each other without end, or train on
inputs of one sample with the labels of another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pipecomp.cluster.agreement import AllRanks
from pipecomp.data import seeded
from pipecomp.trainer.feeding import Samples

SHOWN = 8  # samples of a dataset that are compared

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


def dataset_facts(samples: Samples, name: str) -> dict[str, Any]:
    """Return what is compared of a dataset: its length and a digest of some samples.

    Args:
        samples: The dataset.
        name: The dataset's, for errors.
    """
    data = samples.data
    facts: dict[str, Any] = {f"length of {name}": len(data)}
    places = sorted({round(i * (len(data) - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})
    with seeded(0):
        first = [_digest(data[i]) for i in places]
    with seeded(0):
        again = [_digest(data[i]) for i in places]
    if first == again:  # else it draws at random, from a generator of its own
        digest = hashlib.sha256("".join(first).encode()).hexdigest()[:12]
        facts[f"order or content of {name} (digest of {len(places)} samples)"] = digest
    return facts


def _digest(sample: Any) -> str:
    found = hashlib.sha256()
    _add(found, sample)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    """Values, in whatever order a mapping has them; of other objects only the type."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found.update(f"{key}:".encode())
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"[{len(value)}".encode())
        for item in value:
            _add(found, item)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        found.update(f"{flat.dtype}{tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSU":
        found.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        found.update(f"{value!r},".encode())
    else:
        found.update(type(value).__name__.encode())
