"""Ranks of tests are forked by a server that has imported the large packages once: seconds less for each process.

With pytest-xdist one worker runs, one after the other, all tests that start ranks, the others what takes one core.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`: ranks together, otherwise the tests of a file."""
    for item in items:
        ranks = item.get_closest_marker("ranks") is not None or "dist" in item.path.parts
        item.add_marker(pytest.mark.xdist_group("ranks" if ranks else item.path.name))
