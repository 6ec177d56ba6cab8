"""Network namespaces: ip and tc run in them, what lives in them, and how they go."""

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

from pipecomp.netlab.network import NetlabError
from pipecomp.netlab.processes import kill

CONFIGURATION = Path("/etc/netns")
_COMMAND_S = 20.0

Run = Callable[[str], str]


def command(text: str) -> str:
    """Run ip, tc or nft, which must not hang or be stopped half way; return what it prints. NetlabError if it fails."""
    words = text.split()
    try:
        # A session of its own: Ctrl-C in a terminal would reach it too, in the middle of cleaning up.
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, start_new_session=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetlabError(f"{text}: {error}") from error
    if done.returncode != 0:
        raise NetlabError(f"{text}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def processes_in(namespaces: Sequence[str], run: Run = command) -> set[int]:
    """List the ids of the processes in network namespaces that exist."""
    found: set[int] = set()
    for name in namespaces:
        try:
            found |= {int(pid) for pid in run(f"ip netns pids {name}").split()}
        except NetlabError:  # no such namespace
            continue
    return found


def delete_namespaces(namespaces: Sequence[str], run: Run = command) -> None:
    """Delete those that exist, all of them even if one fails. NetlabError for what is left."""
    existing = namespace_names(run)
    failures = []
    for name in namespaces:
        shutil.rmtree(CONFIGURATION / name, ignore_errors=True)
        if name in existing:
            try:
                run(f"ip netns delete {name}")
            except NetlabError as error:
                if name in namespace_names(run):  # else another lab that found the same leftovers was faster
                    failures.append(str(error))
    if failures:
        raise NetlabError("; ".join(failures))


def namespace_names(run: Run = command) -> set[str]:
    """List all named network namespaces of this machine."""
    return {line.split()[0] for line in run("ip netns list").splitlines() if line.strip()}


MARK = "PIPECOMP_NETLAB_NAME"  # in the environment of every process that a lab starts
_NAME = re.compile(r"pclab-([0-9]+)-([0-9]+)-[0-9]+")
_numbers = itertools.count()


def new_name() -> str:
    """Make a lab's name: this process's id and start, and a number."""
    return f"pclab-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"


def abandoned(name: str) -> str | None:
    """Give the lab's name if `name` begins with one whose process is gone, else None."""
    found = _NAME.match(name)
    if found is None or _started(int(found[1])) == int(found[2]):
        return None
    return found[0]


def folder_of(name: str) -> Path:
    """Where a lab keeps its files."""
    return Path(tempfile.gettempdir()) / name


def marked(name: str) -> set[int]:
    """Ids of the processes that the lab `name` started, and of what those started."""
    entry = f"{MARK}={name}".encode()
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if entry in (process / "environ").read_bytes().split(b"\0"):
                    found.add(int(process.name))
            except OSError:  # gone, or another user's
                continue
    return found


def _started(pid: int) -> int:
    """When a process began, in clock ticks since the machine's start; -1 if there is none. A later one differs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    # The command's name stands in brackets and may hold anything; the start is field 22.
    return int(stat.rpartition(")")[2].split()[19])


def remove_leftovers() -> list[str]:
    """Take down every lab whose process is gone; the names of those labs. NetlabError for what resists."""
    found: dict[str, list[str]] = {}
    if os.geteuid() == 0 and shutil.which("ip") is not None:
        for namespace in sorted(namespace_names()):
            if lab := abandoned(namespace):
                found.setdefault(lab, []).append(namespace)
    folders = {lab for path in Path(tempfile.gettempdir()).glob("pclab-*") if (lab := abandoned(path.name))}
    for lab in sorted(folders | set(found)):
        own = found.get(lab, [])
        kill(lambda lab=lab, own=own: marked(lab) | processes_in(own))  # type: ignore[misc]
        delete_namespaces(own)
        shutil.rmtree(folder_of(lab), ignore_errors=True)
    return sorted(folders | set(found))


WITHOUT = "--software (software=True in Python) needs none of this, but slows down only pipecomp's own links"
_ADD, _DELETE = "ip netns add {0}", "ip netns delete {0}"
_KINDS = {
    "veth pairs": "ip link add probe0 netns {0} type veth peer name probe1 netns {0}",
    "bridges (module bridge)": "ip -n {0} link add probe2 type bridge",
    "the queue that limits rates, tbf (module sch_tbf)": (
        "tc -n {0} qdisc add dev probe0 root tbf rate 1mbit burst 4000 limit 100000"
    ),
}
_NETEM = "tc -n {0} qdisc add dev probe1 root netem delay 1ms"


def missing() -> str | None:
    """Say why the kernel cannot make a network here, None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"no {' and no '.join(lacking)} here: install iproute2"
    with _probe() as fails:
        if problem := fails(_ADD):
            return f"no network namespaces here: {problem}"
        for what, text in _KINDS.items():
            if problem := fails(text):
                return f"this kernel lacks {what}: {problem}"
    return None


def has_netem() -> bool:
    """Say whether the kernel can delay packets."""
    with _probe() as fails:
        return not any(map(fails, (_ADD, _KINDS["veth pairs"], _NETEM)))


@contextmanager
def _probe() -> Iterator[Callable[[str], str | None]]:
    """Yield what tries a command on a namespace ("{0}") and says why it failed; the namespace is deleted in the end."""
    name = f"{new_name()}-probe"

    def fails(text: str) -> str | None:
        try:
            command(text.format(name))
        except NetlabError as error:
            return str(error).partition(": ")[2]
        return None

    try:
        yield fails
    finally:
        fails(_DELETE)
