"""The launcher of this process: the variables that it has set, and the end of a rank with its launcher.

Launchers end their ranks when they are asked to end; a killed one cannot. So each rank finds the launchers among its
ancestors and watches them. A run without a launcher, as under nohup, survives the shell that started it.
`PIPECOMP_LAUNCHER` names the process id of one more launcher. A rank that was started over ssh has its launcher at the
other end of its standard input, where signals arrive too: sshd does not end it with the connection.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import psutil

from pipecomp.distributed.preemption import LAUNCHER_GONE, LOST_STATUS, current_interruption, say_here
from pipecomp.errors import ConfigError, require

# Task launchers do not set RANK: their variable with the number of tasks, and the variables to derive from theirs.
_TASKS = {
    "SLURM_STEP_NUM_TASKS": "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID",
    "OMPI_COMM_WORLD_SIZE": (
        "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK "
        "LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "MV2_COMM_WORLD_SIZE": (
        "RANK=$MV2_COMM_WORLD_RANK WORLD_SIZE=$MV2_COMM_WORLD_SIZE LOCAL_RANK=$MV2_COMM_WORLD_LOCAL_RANK "
        "LOCAL_WORLD_SIZE=$MV2_COMM_WORLD_LOCAL_SIZE"
    ),
    "PMI_SIZE": "RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE LOCAL_RANK=$MPI_LOCALRANKID LOCAL_WORLD_SIZE=$MPI_LOCALNRANKS",
}
_TERMINAL = "SLURM_PTY_PORT"  # set by srun --pty, an interactive shell, whatever the number of tasks
# The launcher: a process id, or "stdin" for one at the other end of standard input.
LAUNCHER, STDIN = "PIPECOMP_LAUNCHER", "stdin"
RESTARTS = "PIPECOMP_RESTARTS"  # how often an elastic launcher has started the ranks of this run again
MACHINES = "PIPECOMP_MACHINES"  # of an elastic launcher's start, in the order of their ranks, with commas between them
# A name that all starts of an elastic launcher's command have in common. With `pipecomp up` each machine has another.
COMMAND = "PIPECOMP_COMMAND"
STARTS = "restarts.json"  # in the run's folder of each machine: the step that its latest start began at
MOST_STARTS = 4  # in a row that reach no newer step
BEGIN_AFTER = "PIPECOMP_BEGIN_AFTER"  # the step that MOST_STARTS starts in a row have not passed
CANDIDATES = "candidates.json"  # in the run's folder of rank 0: machines that wait to take part

# Variables that change a rank's numbers, its speed or what it reads: those that suit all machines, and those that
# describe one machine or its network.
COMMON_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "PYTHONHASHSEED"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "TRANSFORMERS_OFFLINE"),
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
MACHINE_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", *_PROXIES, *(name.upper() for name in _PROXIES))
_COMPARED = (*COMMON_VARIABLES, *MACHINE_VARIABLES, "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DS_ACCELERATOR")
_EARLIER_S = 20.0
_T = TypeVar("_T")
_SHOWN = 120  # characters of a value


class Launch(NamedTuple):
    """The variables of a launcher.

    Attributes:
        rank, world: None without a launcher.
        local_rank: Number of this rank on its machine.
        local_world: Number of ranks on this machine, None if unknown.
        master: Address of rank 0's machine.
    """

    rank: int | None = None
    world: int | None = None
    local_rank: int = 0
    local_world: int | None = None
    master: str | None = None

    @property
    def started(self) -> bool:
        """True if this process is one of several ranks."""
        return self.world is not None and self.world > 1

    @property
    def place(self) -> tuple[int, int]:
        """Rank and world size of a process that a launcher has started."""
        assert self.rank is not None, "started by a launcher"
        assert self.world is not None, "started by a launcher"
        return self.rank, self.world

    @property
    def several_machines(self) -> bool | None:
        """True if ranks run on more than one machine, None if unknown."""
        if self.world is None:
            return None
        if self.local_world is not None:
            return self.world > self.local_world
        return False if self.world == 1 else None


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read RANK, WORLD_SIZE and related variables. Raises ConfigError for invalid ones, or in a task without RANK."""
    # torchrun and deepspeed name differently how many ranks share this machine
    local_world = _number(environ, "LOCAL_WORLD_SIZE", 1) or _number(environ, "LOCAL_SIZE", 1)
    rank, world = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    if rank is None and world is None:
        _check_alone(environ)
    if (rank is None) != (world is None):
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise ConfigError(missing, None, "a number: a launcher sets both RANK and WORLD_SIZE")
    if rank is not None and world is not None and rank >= world:
        raise ConfigError("RANK", rank, f"0 to {world - 1}, as WORLD_SIZE is {world}")
    return Launch(rank, world, _number(environ, "LOCAL_RANK", 0) or 0, local_world, master_address(environ))


def restarts() -> int:
    """Return how often an elastic launcher has started this run's ranks again."""
    text = os.environ.get(RESTARTS, "")
    return int(text) if text.isdecimal() else 0


def note_start(step: int, commands: Sequence[str]) -> dict[str, Any]:
    """Return the content of the file STARTS in a start that begins at a step. commands: COMMAND of all ranks."""
    return {"commands": list(dict.fromkeys(commands)), "start": restarts(), "step": step}


def read_start(text: str | None, command: str, start: int) -> int | None:
    """Return the step that a start of a command has noted; None if it has noted none. text: Content of STARTS."""
    try:
        found = json.loads(text or "{}")
        return int(found["step"]) if command in found["commands"] and found["start"] == start else None
    except (ValueError, TypeError, KeyError):
        return None


def check_progress(step: int) -> None:
    """Raise ConfigError if this start begins at a step that MOST_STARTS starts before it have not passed."""
    passed = os.environ.get(BEGIN_AFTER, "")
    allowed = f"progress between restarts: {MOST_STARTS} starts in a row have reached no newer step than {passed}"
    require(not passed.isdecimal() or step > int(passed), "--elastic", True, allowed, "The log says why each ended")


def retry_after_restart(act: Callable[[], _T], is_busy: Callable[[Exception], bool]) -> _T:
    """Call `act`; after a restart again, for 20 s, while it raises an error for which `is_busy` returns True.

    A rank of the start before whose connection to the launcher was cut may still live, with its port and its files.
    """
    deadline = time.monotonic() + (_EARLIER_S if restarts() else 0.0)
    while True:
        try:
            return act()
        except Exception as error:
            if time.monotonic() >= deadline or not is_busy(error):
                raise
        time.sleep(_LOOK_S)


# For the slowest rank to come to the start of the run: it may prepare data. After a restart all have done so.
JOIN_TIMEOUT_S = 180.0 if restarts() else 1800.0


def machine_names(world: int) -> list[str]:
    """Return the name of each rank's machine, as an elastic launcher names it; empty without one."""
    names = [name for name in os.environ.get(MACHINES, "").split(",") if name]
    return [name for name in names for _ in range(world // len(names))] if names and world % len(names) == 0 else []


def machine_name(place: int) -> str:
    """Return the name of a machine of `pipecomp up`. place: from 0, in the order of the invitations."""
    return f"machine-{place + 1}"


def master_address(environ: Mapping[str, str]) -> str | None:
    """Return MASTER_ADDR, an IPv6 address without its brackets."""
    host = environ.get("MASTER_ADDR")
    return host if host is None else without_brackets(host)


def without_brackets(host: str) -> str:
    """Return a host as the resolver takes it: "[2001:db8::1]", as in URLs, becomes "2001:db8::1"."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that should be the same on all ranks: long values cut, proxies without their passwords."""
    found = {}
    for name in _COMPARED:
        value = environ.get(name)
        if value is None:
            continue
        if name.lower() in _PROXIES:
            value = re.sub(r"(^|//)[^/@,]*@", r"\1", value)
        if len(value) > _SHOWN:
            value = f"{value[:_SHOWN]}… (digest {hashlib.sha256(value.encode(errors='replace')).hexdigest()[:8]})"
        found[name] = value
    return found


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if this is one of several tasks, each of which would train alone."""
    for name, variables in _TASKS.items():
        if environ.get(name, "1") != "1" and _TERMINAL not in environ:
            launcher = "srun" if name.startswith("SLURM") else "mpirun"
            allowed = (
                f"a number: {launcher} has started this {environ[name]} times, and each would train alone. Let it "
                f"start bash -c 'export {variables}; exec \"$@\"' rank COMMAND, with MASTER_ADDR and MASTER_PORT "
                "in the environment, as examples/slurm/train.sbatch does"
            )
            raise ConfigError("RANK", None, allowed)


def _number(environ: Mapping[str, str], name: str, smallest: int) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    require(text.isdecimal() and int(text) >= smallest, name, text, f"a whole number from {smallest} on")
    return int(text)


_LAUNCHERS = frozenset(
    {
        *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"),
        *("deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "ds"),
        *("srun", "slurmstepd", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orterun", "orted"),
        *("prterun", "prted", "pipecomp", "pipecomp.cli"),
    }
)
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")  # of torchrun and of deepspeed
_LOOK_S = 0.5
_SAVE_S = 6.0  # to save a checkpoint after the launcher's end
_CLOSE_S = 2.0
_watching = threading.Lock()


def is_first_of_machine(environ: Mapping[str, str]) -> bool:
    """Return whether this rank is the first of its machine, and its output is not shown together with rank 0's.

    ssh brings the output of ranks that this package starts there to rank 0's machine, and srun that of all.
    """
    together = environ.get(LAUNCHER) == STDIN or "SLURM_PROCID" in environ
    return environ.get("RANK") == "0" or (environ.get("LOCAL_RANK") == "0" and not together)


def watch_launcher() -> None:
    """End this process within 10 s of its launcher's end; may be called again.

    Raises ConfigError for an invalid PIPECOMP_LAUNCHER.
    """
    if "RANK" not in os.environ or not _watching.acquire(blocking=False):
        return
    if os.environ.get(LAUNCHER) == STDIN:
        threading.Thread(target=_follow, name="pipecomp-launcher", daemon=True).start()
        return
    found = launchers(psutil.Process().parents())
    own = _own()
    if own is not None:
        found.append(own)
    gone = not found and _orphaned(os.environ)
    if found or gone:
        threading.Thread(target=_watch, args=(found,), name="pipecomp-launcher", daemon=True).start()


def launchers(ancestors: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the ancestors up to the last launcher; processes in between belong to it."""
    last = max((place for place, process in enumerate(ancestors) if _is_launcher(process)), default=-1)
    return list(ancestors[: last + 1])


def program(command: Sequence[str]) -> str:
    """Return what a command line runs: a program, the script of an interpreter, or the module after -m."""
    words = list(command)
    if not words:
        return ""
    name = os.path.basename(words.pop(0)).split(":")[0]  # slurmstepd calls itself "slurmstepd: [123.0]"
    if not name.startswith("python"):
        return name
    while words:
        word = words.pop(0)
        if word == "-m":
            return words[0] if words else name
        if word in ("-X", "-W"):
            del words[:1]
        elif not word.startswith("-"):
            return os.path.basename(word)
    return name


def _is_launcher(process: psutil.Process) -> bool:
    try:
        return program(process.cmdline()) in _LAUNCHERS
    except psutil.Error:
        return False


def _own() -> psutil.Process | None:
    text = os.environ.get(LAUNCHER)
    if not text:
        return None
    try:
        return psutil.Process(int(text))
    except (ValueError, psutil.Error) as error:
        raise ConfigError(LAUNCHER, text, "the id of a running process") from error


def _orphaned(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher ended before this process could find it: the parent is init."""
    return os.getppid() == 1 and any(name in environ for name in _SET_BY_LAUNCHERS)


def _watch(found: Sequence[psutil.Process]) -> None:
    while found and all(map(_runs, found)):
        time.sleep(_LOOK_S)
    _end()


def _follow() -> None:
    """Receive signals, one byte each, until the launcher closes the pipe."""
    while number := os.read(0, 1):
        os.kill(os.getpid(), signal.Signals(number[0]))
    _end()


def _end() -> None:
    import torch.distributed as dist  # here: launchers start without it

    from pipecomp.distributed.heartbeat import process_heartbeat

    interruption = current_interruption()
    if interruption is not None:
        interruption.ask(LAUNCHER_GONE, why="the launcher ended")
        time.sleep(_SAVE_S)
    say_here("its launcher ended: this rank ends too")
    if dist.is_initialized():
        told = dist.get_rank(), f"rank {dist.get_rank()} stopped: its launcher ended"
        closing = threading.Thread(target=process_heartbeat().give_up, args=told, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
    os._exit(LOST_STATUS)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # it exists, but cannot be examined
