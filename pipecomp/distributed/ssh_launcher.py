"""A program started as the ranks of a run: on this machine, and on others over ssh.

Rank r runs on host r // (ranks of a host), in the order in which the hosts are named, with what a launcher would set.
Other machines need the same Python and the same working directory, and let this one log in without a password.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from pipecomp.distributed.launch_env import LAUNCHER, STDIN
from pipecomp.distributed.placement import address_towards, free_port, is_loopback, list_interfaces
from pipecomp.errors import ConfigError, require
from pipecomp.utils.processes import exit_status, handle_signals

PORT = 29500  # where ranks of several machines meet, as with other launchers, unless MASTER_PORT says another
# Routers forget connections on which nothing is said, and ranks but the first say nothing for hours. For how long a
# link may be down is not for ssh to judge: it gives up after an hour.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=30", "-o", "ServerAliveCountMax=120")
_SSH_FAILED = 255
_ASK_S, _TELL_S, _GRACE_S, _POLL_S = 10.0, 5.0, 60.0, 0.05
# Variables that other machines get, too; what names this machine's own network or devices is not among them.
_CARRIED = ("PIPECOMP_", "HF_", "TRACKIO_", "MLFLOW_", "WANDB_", "DS_ACCELERATOR", "PYTHONPATH")
_STAYS = ("PIPECOMP_LISTEN", LAUNCHER)
_FOLLOWS = {LAUNCHER: STDIN}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank to be started. host: None on this machine."""

    number: int
    host: str | None
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def line(self, folder: str, environment: Mapping[str, str], *, reads: bool = False) -> str:
        """Write the shell's line that starts it on its host, in `folder`.

        reads: what is carried of `environment` comes on its standard input (`exports`), not in the line, which every
        user of both machines can see; then come signals, and the end of it is the launcher's end.
        """
        # Not a byte more, as `head` would read: behind them may be a signal already, which came during the login.
        count = len(os.fsencode(exports(environment)))
        read = ["sh", "-c", f'eval "$(dd bs=1 count={count} 2>/dev/null)" && exec "$@"', "sh"] if reads else []
        shown = {**(_FOLLOWS if reads else carried(environment)), **self.variables}
        words = [*read, "env", *(f"{name}={value}" for name, value in shown.items()), *self.command]
        return f"cd {shlex.quote(folder)} && {shlex.join(words)}"


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that other machines get, too."""
    return {name: value for name, value in environment.items() if name.startswith(_CARRIED) and name not in _STAYS}


def exports(environment: Mapping[str, str]) -> str:
    """Write them for a shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in carried(environment).items())


def ranks_of(command: Sequence[str], world: int, hosts: Sequence[str] = ()) -> list[Rank]:
    """Divide the ranks of a run among hosts.

    Args:
        command: What every rank runs.
        world: How many ranks there are.
        hosts: As ssh takes them, USER@HOST too; empty for this machine alone.

    Returns:
        The ranks, with the variables that a launcher sets.

    Raises:
        ConfigError: For hosts that cannot share so many ranks, or a first one that has no address.

    Example:
        >>> [rank.host for rank in ranks_of(["python", "train.py"], 2)]
        [None, None]
    """
    places = list(hosts) or [""]
    names = all(places) and not any(place.startswith("-") for place in places)  # ssh takes those for options
    require(names or not hosts, "--peers", ",".join(hosts), "host names with commas between them")
    require(len(set(places)) == len(places), "--peers", ",".join(hosts), "each host once; --stages says how many ranks")
    allowed = f"a multiple of {len(places)}, the hosts of --peers"
    require(world >= 1 and world % len(places) == 0, "--stages", world, allowed)
    each = world // len(places)
    master, port = ("127.0.0.1", free_port()) if not hosts else (meeting_address(places), _port(os.environ))
    found = []
    for number in range(world):
        host = places[number // each]
        variables = {
            "RANK": number,
            "WORLD_SIZE": world,
            "LOCAL_RANK": number % each,
            "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": master,
            "MASTER_PORT": port,
        }
        found.append(
            Rank(
                number=number,
                host=None if not host or is_here(host) else host,
                command=tuple(command),
                variables={name: str(value) for name, value in variables.items()},
            )
        )
    return found


def _port(environment: Mapping[str, str]) -> int:
    text = environment.get("MASTER_PORT", str(PORT))
    require(text.isdecimal() and 0 < int(text) < 65536, "MASTER_PORT", text, "a number from 1 to 65535")
    return int(text)


def working_directory() -> str:
    """Name it as people do, by links where they went by some: what these lead to need not be so on other machines."""
    named = os.environ.get("PWD", "")
    try:
        return named if os.path.isabs(named) and os.path.samefile(named, os.curdir) else os.getcwd()
    except OSError:
        return os.getcwd()


def meeting_address(hosts: Sequence[str]) -> str:
    """Find the address of the first host for all of them. Raises ConfigError.

    Its name may well be 127.0.1.1 on the machine itself: then it is the address that leads to the next host.
    """
    first = _name(hosts[0])
    address = next(iter(_addresses(first)), None)
    if address is None:
        raise ConfigError(
            "--peers", hosts[0], "hosts whose names can be looked up here or that ssh knows, or addresses"
        )
    if not is_loopback(address) or len(hosts) == 1:
        return address
    way = address_towards(_name(hosts[1]))
    allowed = f"an address where {hosts[1]} finds this machine: its name stands for {address} here"
    require(way is not None, "--peers", hosts[0], allowed)
    return str(way)


def is_here(host: str) -> bool:
    """Whether a host is this machine."""
    own = {address for interface in list_interfaces().values() for address in interface.addresses}
    return any(address in own or is_loopback(address) for address in _addresses(_name(host)))


def _name(host: str) -> str:
    """Give the name or address to look up, which for a host of ssh's configuration is its HostName there."""
    name = host.rpartition("@")[2]
    return name if _addresses(name) else _name_for_ssh(host) or name


def _name_for_ssh(host: str) -> str | None:
    try:
        done = subprocess.run([*_SSH, "-G", host], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = (line.split() for line in done.stdout.splitlines())
    return next((words[1] for words in found if len(words) == 2 and words[0] == "hostname"), None)


def _addresses(name: str) -> list[str]:
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    return [address for address in found if "%" not in address]  # fe80::1%eth0 names an interface of this machine


def run_ranks_of(ranks: Sequence[Rank]) -> int:
    """Start the ranks and wait for all of them, as one would for a single program.

    SIGINT and SIGTERM reach every rank; the same one again also ends the connections to other machines, and with them
    their ranks. When a rank ends with an error, the rest have a minute to end.

    Returns:
        0, or the status of the first rank that ended with another.
    """
    running: list[subprocess.Popen[bytes]] = []
    passed: set[int] = set()
    told: dict[tuple[int, int], object] = {}

    def tell(rank: Rank, process: subprocess.Popen[bytes], number: int) -> None:
        """Once, though a signal may come while a rank is started."""
        if told.setdefault((process.pid, number), mark := object()) is not mark:
            return
        if rank.host is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        else:
            _say(process, bytes([number]))

    def forward(number: int, frame: FrameType | None) -> None:
        for rank, process in zip(ranks, running, strict=False):
            if number not in passed:
                tell(rank, process, number)
                continue
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        passed.add(number)

    with handle_signals(forward, signal.SIGINT, signal.SIGTERM):
        try:
            for rank in ranks:
                running.append(_started(rank))
                for number in list(passed):
                    tell(rank, running[-1], number)
            return _status_of(ranks, running)
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
                with contextlib.suppress(OSError):
                    _input(process).close()


def _started(rank: Rank) -> subprocess.Popen[bytes]:
    if rank.host is None:
        command, environment, given = list(rank.command), {**os.environ, **rank.variables}, ""
    else:
        command = [*_SSH, rank.host, rank.line(working_directory(), os.environ, reads=True)]
        environment, given = dict(os.environ), exports(os.environ)
    try:
        # A session of its own: Ctrl-C in a terminal reaches it once, from here.
        started = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
    except OSError as error:
        allowed = f"a program that can be started ({error.strerror}); --dry-run says what to run on each host"
        raise ConfigError("command", command[0], allowed) from error
    if rank.host is None:
        _input(started).close()
    else:
        _say(started, os.fsencode(given))
    return started


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None, "it was started with a pipe"
    return process.stdin


def _say(process: subprocess.Popen[bytes], text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):  # one that has ended says why by its status
        _input(process).write(text)


def _status_of(ranks: Sequence[Rank], running: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all, or for a minute after the first that has failed; 128 + n for one that signal n has ended."""
    failed: tuple[Rank, int] | None = None
    began, told = 0.0, False
    while any(process.poll() is None for process in running):
        time.sleep(_POLL_S)
        if failed is None:
            failed, began = _failed(ranks, running), time.monotonic()
            continue
        waited_s = time.monotonic() - began
        if waited_s > _TELL_S and not told:
            told = True
            _tell(*failed)
        if waited_s > _GRACE_S:
            break
    _, status = failed or _failed(ranks, running) or (None, 0)
    return status


def _failed(ranks: Sequence[Rank], running: Sequence[subprocess.Popen[bytes]]) -> tuple[Rank, int] | None:
    """The first rank that has ended with an error, and its status."""
    for rank, process in zip(ranks, running, strict=True):
        code = process.poll()
        if code:
            return rank, exit_status(code)
    return None


def _tell(rank: Rank, status: int) -> None:
    """Say for whom the others wait in vain, which may not have found each other yet."""
    where = "" if rank.host is None else f" on {rank.host}"
    why = f", which is ssh's own: try `ssh {rank.host} true`" if rank.host and status == _SSH_FAILED else ""
    print(
        f"pipecomp: rank {rank.number}{where} has ended with status {status}{why}. "
        f"The others are ended in {_GRACE_S - _TELL_S:g} s if they do not end before",
        file=sys.stderr,
        flush=True,
    )
