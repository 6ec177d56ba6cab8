"""Labs as the system sees them: their names, namespaces and processes, what a killed lab has left, and what is missing.

A lab's name has the id and the start time of the process that entered it, so that the leftovers of a killed one are
recognized.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipecomp.distributed.supervisor import kill_processes
from pipecomp.netlab.network import NetlabError

LAB_VARIABLE = "PIPECOMP_NETLAB_NAME"  # in the environment of every process that a lab starts
CONFIGURATION = Path("/etc/netns")
SOFTWARE_HINT = "--software (software=True in Python) works without it, but throttles only pipecomp's own links"
_COMMAND_S = 20.0
_NAME = re.compile(r"pclab-([0-9]+)-([0-9]+)-[0-9]+")
_numbers = itertools.count()

RunCommand = Callable[[str], str]


def run_command(text: str) -> str:
    """Run ip, tc or nft, and return its output. Raises NetlabError if it fails or takes too long."""
    words = text.split()
    try:
        # Note: in a new session, so that Ctrl-C in a terminal does not interrupt it in the middle of a cleanup.
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, start_new_session=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetlabError(f"{text}: {error}") from error
    if done.returncode != 0:
        raise NetlabError(f"{text}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


# -- namespaces


def list_namespaces(run: RunCommand = run_command) -> set[str]:
    """List all named network namespaces of this machine."""
    return {line.split()[0] for line in run("ip netns list").splitlines() if line.strip()}


def processes_in(namespaces: Sequence[str], run: RunCommand = run_command) -> set[int]:
    """List the ids of the processes in these network namespaces; a missing namespace has none."""
    pids: set[int] = set()
    for name in namespaces:
        try:
            pids |= {int(pid) for pid in run(f"ip netns pids {name}").split()}
        except NetlabError:
            continue
    return pids


def delete_namespaces(namespaces: Sequence[str], run: RunCommand = run_command) -> None:
    """Delete all of these that exist, even if one fails. Raises NetlabError for those that remain."""
    existing = list_namespaces(run)
    failures = []
    for name in namespaces:
        shutil.rmtree(CONFIGURATION / name, ignore_errors=True)
        if name in existing:
            try:
                run(f"ip netns delete {name}")
            except NetlabError as error:
                if name in list_namespaces(run):  # otherwise another lab has removed the same leftovers
                    failures.append(str(error))
    if failures:
        raise NetlabError("; ".join(failures))


# -- names and leftovers


def new_lab_name() -> str:
    """Make a name from this process's id, its start time, and a counter."""
    return f"pclab-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"


def abandoned_lab(name: str) -> str | None:
    """Return the lab's name at the start of `name` if its process has ended, otherwise None."""
    match = _NAME.match(name)
    if match is None or _start_time(int(match[1])) == int(match[2]):
        return None
    return match[0]


def lab_folder(name: str) -> Path:
    """Return the folder for a lab's files."""
    return Path(tempfile.gettempdir()) / name


def processes_of_lab(name: str) -> set[int]:
    """List the ids of the processes that a lab has started, directly or not."""
    entry = f"{LAB_VARIABLE}={name}".encode()
    pids = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if entry in (process / "environ").read_bytes().split(b"\0"):
                    pids.add(int(process.name))
            except OSError:  # it has ended, or is another user's
                continue
    return pids


def _start_time(pid: int) -> int:
    """Clock ticks from the machine's start to the process's; -1 without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    # Field 22; the command's name, in parentheses, may contain anything.
    return int(stat.rpartition(")")[2].split()[19])


def remove_leftovers() -> list[str]:
    """Remove every lab whose process has ended, and return their names. Raises NetlabError for what remains."""
    namespaces: dict[str, list[str]] = {}
    if os.geteuid() == 0 and shutil.which("ip") is not None:
        for namespace in sorted(list_namespaces()):
            if lab := abandoned_lab(namespace):
                namespaces.setdefault(lab, []).append(namespace)
    folders = {lab for path in Path(tempfile.gettempdir()).glob("pclab-*") if (lab := abandoned_lab(path.name))}
    for lab in sorted(folders | set(namespaces)):
        own = namespaces.get(lab, [])
        kill_processes(lambda lab=lab, own=own: processes_of_lab(lab) | processes_in(own))  # type: ignore[misc]
        delete_namespaces(own)
        shutil.rmtree(lab_folder(lab), ignore_errors=True)
    return sorted(folders | set(namespaces))


# -- what this machine's kernel supports

_ADD, _DELETE = "ip netns add {0}", "ip netns delete {0}"
_VETH = "ip link add probe0 netns {0} type veth peer name probe1 netns {0}"
_FEATURES = {
    "veth pairs": _VETH,
    "bridges (module bridge)": "ip -n {0} link add probe2 type bridge",
    "the rate-limiting queue tbf (module sch_tbf)": (
        "tc -n {0} qdisc add dev probe0 root tbf rate 1mbit burst 4000 limit 100000"
    ),
}
_NETEM = "tc -n {0} qdisc add dev probe1 root netem delay 1ms"


def missing() -> str | None:
    """Return why this machine's kernel cannot provide a lab's network, None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"no {' and no '.join(lacking)} here: install iproute2"
    with _probe_namespace() as fails:
        if problem := fails(_ADD):
            return f"no network namespaces here: {problem}"
        for feature, text in _FEATURES.items():
            if problem := fails(text):
                return f"this kernel lacks {feature}: {problem}"
    return None


def has_netem() -> bool:
    """Return whether the kernel can delay packets."""
    with _probe_namespace() as fails:
        return not any(map(fails, (_ADD, _VETH, _NETEM)))


@contextmanager
def _probe_namespace() -> Iterator[Callable[[str], str | None]]:
    """Yield a function that runs a command on a new namespace ("{0}") and returns its error, None if it succeeds."""
    name = f"{new_lab_name()}-probe"

    def fails(text: str) -> str | None:
        try:
            run_command(text.format(name))
        except NetlabError as error:
            return str(error).partition(": ")[2]
        return None

    try:
        yield fails
    finally:
        fails(_DELETE)
