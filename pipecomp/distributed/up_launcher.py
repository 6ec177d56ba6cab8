"""One machine's part in `pipecomp up`: it gets keys, then starts its ranks and stays until they have ended."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

from pipecomp.distributed.launch_env import LAUNCHER
from pipecomp.distributed.placement import address_towards
from pipecomp.distributed.rendezvous import ADDRESS, KEYS, LISTEN
from pipecomp.errors import KeysError, LinkTimeoutError, require
from pipecomp.tls.certificates import format_ranks, read_identity
from pipecomp.tls.enrollment import (
    Invitation,
    accept_invitation,
    authority_fingerprint,
    normalize_fingerprint,
)
from pipecomp.tls.key_folder import AUTHORITY_KEY, MACHINE, KeyFolder, create_keys, list_machines
from pipecomp.tls.listener import Address
from pipecomp.utils.processes import exit_status, handle_signals, python_module_command

_END_S = 30.0  # for the other ranks to end once one has
_POLL_S = 0.2
_FAR = ("192.0.2.1", "2001:db8::1")  # of nobody: reserved for documentation
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is done before training. anyway: train in spite of problems that the doctor has found."""

    doctor: bool = True
    plan: bool = True
    anyway: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """What all machines of a run have in common.

    address: where rank 0 is reached. machines: their number. procs: ranks on each. command: a script and its arguments.
    """

    address: Address
    machines: int
    procs: int
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        require(self.machines >= 1, "machines", self.machines, "a number from 1 on")
        require(self.procs >= 1, "procs", self.procs, "a number from 1 on")
        require(len(self.command) > 0, "command", "", "a script and its arguments, after --")
        require(os.path.isfile(self.command[0]), "command", self.command[0], "a script that is a file on this machine")

    @property
    def world(self) -> int:
        """All ranks."""
        return self.machines * self.procs

    def ranks(self, machine: int) -> str:
        """Name those of a machine, as certificates do. machine: from 0."""
        return format_ranks(range(machine * self.procs, (machine + 1) * self.procs))


def own_address(port: int) -> Address:
    """Find the address of this machine that leads to other networks, over IPv6 if none does over IPv4."""
    return Address(next(filter(None, map(address_towards, _FAR)), "127.0.0.1"), port)


def invite_all(run: Run, keys: str, listen: Address, options: Sequence[str], *, minutes: float, say: Say) -> None:
    """Make the run's keys if there are none, and let every machine join that has not; rank 0's machine calls this.

    Args:
        run: What is started.
        keys: This machine's folder of keys.
        listen: Where rank 0 will listen. With more than two machines, invitations use the next port.
        options: Of `pipecomp up`, which the other machines need too.
        minutes: To wait for each.
        say: Prints a line.

    Raises:
        KeysError: If keys that are there are of other ranks, or cannot invite.
        LinkTimeoutError: If a machine does not join in time.
    """
    folder = KeyFolder(keys)
    if not folder.has(MACHINE):
        create_keys(keys, run="run", machine="first", ranks=run.ranks(0))
        say(f"keys: made in {keys}, for rank {run.ranks(0)} on this machine")
    elif not folder.has(AUTHORITY_KEY):
        raise KeysError(f"{keys} was made by joining another machine: give --at, or another folder as --keys")
    there = {line["ranks"]: line["machine"] for line in list_machines(keys) if not line["revoked"]}
    port = listen.port if run.machines == 2 else listen.port + 1
    shown = Address(run.address.host, port)
    for machine in range(1, run.machines):
        name = there.get(run.ranks(machine))
        if name is not None:
            again = shlex.join(["pipecomp", "keys", "revoke", keys, name])
            say(f"keys: {name} has joined before, for rank {run.ranks(machine)}. If it has lost its keys: {again}")
            continue
        name = f"machine-{machine + 1}"
        at = str(Address(listen.host, port))
        with Invitation(keys, name, ranks=run.ranks(machine), listen=at) as invitation:
            say(f"Run this on {name} within {minutes:g} minutes, in a folder with the same script, model and data:\n")
            secret = ["--at", str(shown), "--fingerprint", invitation.fingerprint, "--code", invitation.code]
            run_at = [] if run.machines == 2 else ["--address", str(run.address)]
            say(shlex.join(["pipecomp", "up", *secret, *run_at, *options, "--", *run.command]) + "\n")
            if not invitation.wait(minutes):
                raise LinkTimeoutError(f"{name} did not join within {minutes:g} minutes; the code is void")
        say(f"keys: {name} has joined, for rank {run.ranks(machine)}")


def join_run(run: Run, keys: str, at: str, fingerprint: str, code: str, *, say: Say) -> None:
    """Get this machine's keys, unless the folder has them from an earlier start. KeysError if it has other ones."""
    Address.parse(at, "at")
    folder = KeyFolder(keys)
    if folder.has(MACHINE):
        mine = read_identity(folder.certificate(MACHINE))
        if authority_fingerprint(folder) != normalize_fingerprint(fingerprint):
            raise KeysError(
                f"{keys} has keys already, of {mine.machine} of run {mine.run}; the first machine is of another run: "
                "remove that folder, or name another one with --keys"
            )
    else:
        mine = accept_invitation(keys, at, fingerprint, code)
    say(f"keys: this is {mine.machine} of run {mine.run}, for rank {format_ranks(mine.ranks)}")


def start_ranks(run: Run, keys: str, listen: str | None, checks: Checks, *, say: Say) -> int:
    """Start this machine's ranks, pass signals on to them, and return the worst status once all have ended.

    Args:
        run: What is started.
        keys: This machine's folder of keys, which says which ranks run here.
        listen: HOST:PORT where the first of them listens, or "none"; None: where it leads to rank 0.
        checks: Before training.
        say: Prints a line.

    Raises:
        KeysError: If the keys do not fit to the run.
    """
    mine = KeyFolder(keys).identity().ranks
    if len(mine) != run.procs or mine[-1] >= run.world:
        raise KeysError(
            f"the keys in {keys} are for rank {format_ranks(mine)}, which does not fit to {run.machines} machines of "
            f"{run.procs} rank(s): give the same --machines and --procs everywhere, or make new keys"
        )
    words = python_module_command("pipecomp.up", json.dumps(asdict(checks)), *run.command)
    common = {
        KEYS: keys,
        ADDRESS: str(run.address),
        LAUNCHER: str(os.getpid()),
        "WORLD_SIZE": str(run.world),
        "LOCAL_WORLD_SIZE": str(run.procs),
        "MASTER_ADDR": run.address.host,
        "MASTER_PORT": str(run.address.port),
    }
    ranks: list[subprocess.Popen] = []
    with _forwarding(ranks):
        for local, rank in enumerate(mine):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            if listen is not None and (local == 0 or listen == "none"):
                own[LISTEN] = listen
            ranks.append(subprocess.Popen(words, env=os.environ | own, start_new_session=True))
        return _wait(ranks, say)


def _wait(ranks: Sequence[subprocess.Popen], say: Say) -> int:
    """Wait for all; when one has failed the others end by themselves, or are ended."""
    failed: float | None = None
    while any(rank.poll() is None for rank in ranks):
        if failed is None and any(rank.returncode for rank in ranks):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > _END_S:
            say("a rank has failed, and others did not end: they are ended")
            for rank in ranks:
                rank.kill()
        time.sleep(_POLL_S)
    return max((exit_status(rank.returncode) for rank in ranks), default=0)


@contextmanager
def _forwarding(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Pass SIGTERM and SIGINT on to processes, and kill at the end what is left of them."""

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    with handle_signals(pass_on, signal.SIGTERM, signal.SIGINT):
        try:
            yield
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
