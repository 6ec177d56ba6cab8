"""Helpers of the recipes' tests: run a command to its end, start a recipe on several processes."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from pipecomp.distributed.placement import free_port
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]

LAUNCHER_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Ended:
    status: int
    output: str


def environment() -> dict[str, str]:
    """Return the environment of a process that starts a recipe."""
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_SET}
    return env | {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}


def run(folder: Path, *command: str, timeout_s: float = HANG_S) -> Ended:
    """Run to the end in a session of its own; fails if it takes too long or leaves a process behind."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment() | {"HF_DATASETS_CACHE": str(folder / "datasets")},
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
    """Return the path of its train.py."""
    return str(ROOT / "recipes" / recipe / "train.py")


def launch(folder: Path, recipe: str, *arguments: str, processes: int = 2) -> Ended:
    """Run a recipe's train.py with one list of arguments for all processes; as `launch_each`."""
    return launch_each(folder, recipe, *[list(arguments)] * processes)


def launch_each(folder: Path, recipe: str, *arguments: list[str]) -> Ended:
    """Run it with the variables and arguments that DeepSpeed's launcher gives, on processes forked from a server that
    has imported the large packages: half a minute of imports less than with a launcher. arguments: of each process.
    """
    port, ranks = free_port(), []
    for rank, own in enumerate(arguments):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        place |= {name: str(len(arguments)) for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")}
        ranks.append((environment() | place, [path_of(recipe), f"--local_rank={rank}", *own]))
    return _run_forked(folder, ranks)


def run_script(folder: Path, script: str | Path, *arguments: str) -> Ended:
    """Run `python script …`, forked from that server."""
    return _run_forked(folder, [(environment(), [str(script), *arguments])])


def _run_forked(folder: Path, commands: list[tuple[dict[str, str], list[str]]]) -> Ended:
    output = folder / "output.txt"
    output.write_text("")
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_be_python, args=(folder, env, words, output)) for env, words in commands]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + HANG_S
        for process in ranks:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                pytest.fail(f"not done after {HANG_S:g} s:\n{output.read_text()}")
    finally:
        left_behind = [process.pid for process in ranks if process.pid and _ends_group(process.pid)]
        for process in ranks:
            if process.pid:
                process.join()
    assert not left_behind, f"processes were left behind:\n{output.read_text()}"
    return Ended(max(abs(process.exitcode or 0) for process in ranks), output.read_text())


def _be_python(folder: Path, env: dict[str, str], command: list[str], output: Path) -> None:
    """In a forked process: what `python train.py …` is, in a session of its own and with its output in a file."""
    os.setsid()
    gc.freeze()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    to = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(to, 1)
    os.dup2(to, 2)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _ends_group(leader: int) -> bool:
    """Return True if a session had processes left, and end them."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def launch_deepspeed(folder: Path, recipe: str, *arguments: str, processes: int = 2) -> Ended:
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
