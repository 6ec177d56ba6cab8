"""Network namespaces: ip and tc run in them, what lives in them, and how they go."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from pipecomp.netlab.network import NetlabError

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
