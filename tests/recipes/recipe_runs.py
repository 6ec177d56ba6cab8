"""What the tests of recipes share: a command run to its end, and every way to start a recipe on several processes."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from pipecomp.cluster.local_ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
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
        command,
        cwd=folder,
        env=env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
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


LAUNCHER = str(Path(sys.executable).with_name("deepspeed"))


def path_of(recipe: str) -> str:
    """Of its train.py."""
    return str(ROOT / "recipes" / recipe / "train.py")


def launch(folder: Path, recipe: str, *arguments: str, processes: int = 2) -> Ended:
    """Run a recipe's train.py with DeepSpeed's launcher."""
    port = f"--master_port={free_port()}"
    return run(folder, LAUNCHER, "--num_accelerators", str(processes), port, path_of(recipe), *arguments)


def launch_nodes(folder: Path, recipe: str, *arguments: list[str]) -> Ended:
    """Run it with a launcher for each node of a hostfile, as on machines without ssh. arguments: of each node."""
    (folder / "hosts").write_text("".join(f"node-{node} slots=1\n" for node in range(len(arguments))))
    where = ["--hostfile", "hosts", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    starts, waits = "", ""
    for node, own in enumerate(arguments):
        command = shlex.join([LAUNCHER, *where, "--node_rank", str(node), path_of(recipe), *own])
        starts += f"{command} & p{node}=$!\n"
        waits += f"wait $p{node} || s=1\n"
    return run(folder, "sh", "-c", f"{starts}s=0\n{waits}exit $s")


def torchrun(folder: Path, recipe: str, *arguments: str) -> Ended:
    """Run it on two processes with torchrun."""
    where = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return run(folder, sys.executable, "-m", "torch.distributed.run", *where, path_of(recipe), *arguments)


def script(recipe: str) -> ModuleType:
    """A recipe's train.py, imported and not run."""
    name = f"{recipe}_train"
    found = importlib.util.spec_from_file_location(name, path_of(recipe))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # where dataclasses look for it
    found.loader.exec_module(module)
    return module
