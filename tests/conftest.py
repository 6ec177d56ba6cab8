"""Ranks of tests are forked by a server that has imported the large packages once: seconds less for each process."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

PACKAGES = [
    "torch.distributed", "transformers.models.gpt2.modeling_gpt2", "deepspeed.pipe", "pipecomp.engine",
]  # fmt: skip


def pytest_configure() -> None:
    """Before the first test; no server on a machine with a GPU, whose driver must not be touched before a fork.

    One thread, as ranks have: the number of threads changes the last bits of sums, which tests compare.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        multiprocessing.set_forkserver_preload(PACKAGES)
