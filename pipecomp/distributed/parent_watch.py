"""Ending with the launcher: a rank that torchrun, deepspeed, srun or the like has started does not outlive it.

Launchers end their ranks when they are asked to end; one that is killed cannot. So each rank looks for launchers among
the processes that it descends from, and watches them. A run that nobody launched, as one under nohup, has none there,
and stays whatever becomes of the shell that started it. `PIPECOMP_LAUNCHER` names the id of one more process to watch.

A rank that was started over ssh has its launcher on another machine, and sshd leaves it alone when the connection ends:
it has the launcher at the other end of its standard input, which ends with the launcher, and hands on its signals.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence

import psutil
import torch.distributed as dist

from pipecomp.distributed.heartbeat import LOST_STATUS, process_heartbeat
from pipecomp.distributed.launch_env import LAUNCHER, STDIN
from pipecomp.distributed.preemption import LAUNCHER_GONE, current_interruption, say_here
from pipecomp.errors import ConfigError

_LAUNCHERS = frozenset(
    {
        *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"),
        *("deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "ds"),
        *("srun", "slurmstepd", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orterun", "orted"),
        *("prterun", "prted", "pipecomp", "pipecomp.cli"),
    }
)
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")  # by torchrun, and by deepspeed
_LOOK_S = 0.5
_SAVE_S = 6.0  # to save a checkpoint once it is gone
_CLOSE_S = 2.0
_watching = threading.Lock()


def watch_launcher() -> None:
    """End this process within 10 s of its launcher's end; again is harmless. ConfigError for PIPECOMP_LAUNCHER."""
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
    """Pick the ancestors up to the last launcher among them: what stands between belongs to it."""
    last = max((place for place, process in enumerate(ancestors) if _is_launcher(process)), default=-1)
    return list(ancestors[: last + 1])


def program(command: Sequence[str]) -> str:
    """Name what a command line runs: a program, the script of an interpreter, or the module after -m."""
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
        raise ConfigError(LAUNCHER, text, "the id of a process that runs, with which this rank is to end") from error


def _orphaned(environ: Mapping[str, str]) -> bool:
    """Whether the launcher has ended before this process could look for it: its parent is the system's first one."""
    return os.getppid() == 1 and any(name in environ for name in _SET_BY_LAUNCHERS)


def _watch(found: Sequence[psutil.Process]) -> None:
    while found and all(map(_runs, found)):
        time.sleep(_LOOK_S)
    _end()


def _follow() -> None:
    """Take signals, each a byte with its number, until the launcher is gone."""
    while number := os.read(0, 1):
        os.kill(os.getpid(), signal.Signals(number[0]))
    _end()


def _end() -> None:
    interruption = current_interruption()
    if interruption is not None:
        interruption.ask(LAUNCHER_GONE, why="the launcher ended")
        time.sleep(_SAVE_S)
    say_here("its launcher ended, and so does it")
    if dist.is_initialized():
        closing = threading.Thread(target=_close, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
    os._exit(LOST_STATUS)


def _close() -> None:
    process_heartbeat().on_exit()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # it is there, and hides
