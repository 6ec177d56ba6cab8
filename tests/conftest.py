"""Ranks of tests are forked by a server that has imported the large packages once: seconds less for each process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Before the first test; no server on a machine with a GPU, whose driver must not be touched before a fork.

    One thread, as ranks have: the number of threads changes the last bits of sums, which tests compare.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from pipecomp.cluster.local_ranks import preload_large_packages  # it imports torch, which reads what is set above

    preload_large_packages()


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is such a place: an fsync can take seconds while others write to the same disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)
