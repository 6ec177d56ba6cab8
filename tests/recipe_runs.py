"""What the tests of recipes share: a command run to its end, and DeepSpeed's launcher with two processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from pipecomp.local import free_port

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Ended:
    status: int
    output: str


def run(folder: Path, *command: str, timeout_s: float = 240) -> Ended:
    """Run to the end in a session of its own; fails if it takes too long or leaves a process behind."""
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_SET}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done after {timeout_s:g} s:\n{output}")
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return Ended(process.returncode, output)
    pytest.fail(f"processes were left behind:\n{output}")


def launch(folder: Path, recipe: str, *arguments: str) -> Ended:
    """Run a recipe's train.py on two processes."""
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    port = f"--master_port={free_port()}"
    script = str(ROOT / "recipes" / recipe / "train.py")
    return run(folder, launcher, "--num_accelerators", "2", port, script, *arguments)


def script(recipe: str) -> ModuleType:
    """A recipe's train.py, imported and not run."""
    name = f"{recipe}_train"
    found = importlib.util.spec_from_file_location(name, ROOT / "recipes" / recipe / "train.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # where dataclasses look for it
    found.loader.exec_module(module)
    return module
