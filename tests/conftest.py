"""Ranks of tests are forked by a server that has imported the large packages once: seconds less for each process."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Beside what every rank needs.
LARGE_PACKAGES = (
    "deepspeed.runtime.zero.muon.muon_optimizer",  # of every optimizer with ZeRO; it imports torch's compiler
    "pipecomp.trainer",
    "pipecomp.recipes.run",
    "tests.preloaded",
)


GPU_TESTS = Path(__file__).resolve().parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Before the first test. GPUs are for tests/gpu alone, where nothing else is asked for.

    What other tests compare was computed by CPUs, in ranks of which a GPU has place for one.
    One thread, as ranks have: the number of threads changes the last bits of sums, which tests compare.
    """
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    if not all(path.resolve().is_relative_to(GPU_TESTS) for path in asked):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    hypothesis.settings.register_profile("pipecomp", deadline=None)  # no test fails because a machine is slow
    hypothesis.settings.load_profile("pipecomp")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in a shell's background: programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from pipecomp.distributed.local_launcher import may_use_gpu, preload_large_packages

    if not may_use_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    preload_large_packages(*LARGE_PACKAGES)


# The files that take longest, in that order: begun first, several workers end together.
LONGEST = (
    "dist/test_netlab.py",
    "dist/test_gradients.py",
    "recipes/test_gpt2_wikitext2.py",
    "golden/test_golden.py",
    "dist/test_published_scripts.py",
    "dist/test_doctor.py",
    "dist/test_trainer.py",
    "dist/test_engine.py",
    "recipes/test_resnet_split.py",
    "recipes/test_llama_lora.py",
    "recipes/test_deberta.py",
    "dist/test_lora.py",
    "dist/test_callback.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, all others in their order."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is such a place: an fsync can take seconds while others write to the same disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)
