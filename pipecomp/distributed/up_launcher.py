"""The part of one machine in `pipecomp up`: obtain keys, start the machine's ranks, wait until they have ended."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from pipecomp.distributed.launch_env import LAUNCHER
from pipecomp.distributed.placement import address_towards, is_loopback, list_interfaces
from pipecomp.distributed.rendezvous import ADDRESS, KEYS, LISTEN
from pipecomp.distributed.supervisor import ProcessSpec, Supervisor
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
from pipecomp.utils.processes import python_module_command

TRAIN = "train"  # in place of a script: its argument is `TrainOptions` as JSON
_GRACE_S = 30.0  # for the remaining ranks to end after the first failure
_REMOTE = ("192.0.2.1", "2001:db8::1")  # reserved for documentation


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Checks before training. anyway: train in spite of problems that the doctor finds."""

    doctor: bool = True
    plan: bool = True
    anyway: bool = False


@dataclass(frozen=True, kw_only=True)
class UpRun:
    """A run, the same on all machines.

    Attributes:
        address: Address where the other ranks reach rank 0.
        machines: Number of machines.
        procs: Ranks per machine.
        command: A script and its arguments, or "train" and those of `pipecomp train`.
        train: The options of `pipecomp train` as JSON; None for a script.
    """

    address: Address
    machines: int
    procs: int
    command: tuple[str, ...]
    train: str | None = None

    def __post_init__(self) -> None:
        require(self.machines >= 1, "machines", self.machines, "1 or more")
        require(self.procs >= 1, "procs", self.procs, "1 or more")
        allowed = "a script file on this machine, or train"
        require(len(self.command) > 0, "command", "", "a script or train, and its arguments, after --")
        require(self.train is not None or os.path.isfile(self.command[0]), "command", self.command[0], allowed)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.machines * self.procs

    def ranks(self, machine: int) -> str:
        """Return the ranks of a machine, counted from 0, in the form that certificates use."""
        return format_ranks(range(machine * self.procs, (machine + 1) * self.procs))


def own_address(port: int) -> Address:
    """Return this machine's address towards other networks: IPv4, or IPv6 without an IPv4 route.

    Without a default route it is the first address of an interface, as two machines may have a cable of their own.
    """
    interfaces = [interface for interface in list_interfaces().values() if interface.up]
    found = [address for interface in interfaces for address in interface.addresses if not is_loopback(address)]
    found = sorted((address for address in found if not address.startswith("fe80")), key=lambda address: ":" in address)
    return Address(next(filter(None, [*map(address_towards, _REMOTE), *found]), "127.0.0.1"), port)


def invite_machines(
    run: UpRun,
    keys: str,
    listen: Address,
    options: Sequence[str],
    *,
    minutes: float,
    say: Callable[[str], None],
) -> None:
    """Create the run's keys if there are none, and let every machine join that has not; rank 0's machine calls this.

    Args:
        run: The run.
        keys: This machine's folder of keys.
        listen: Address where rank 0 will listen. With more than two machines, invitations use the next port.
        options: Options of `pipecomp up` for the other machines.
        minutes: Time limit for each machine.
        say: Prints a line.

    Raises:
        KeysError: The folder holds the keys of another machine.
        LinkTimeoutError: A machine does not join in time.
    """
    folder = KeyFolder(keys)
    if not folder.has(MACHINE):
        create_keys(keys, run="run", machine="first", ranks=run.ranks(0))
        say(f"keys: created in {keys}, for rank {run.ranks(0)} on this machine")
    elif not folder.has(AUTHORITY_KEY):
        raise KeysError(f"{keys} was made by joining another machine: give --at, or another folder with --keys")
    joined = {line["ranks"]: line["machine"] for line in list_machines(keys) if not line["revoked"]}
    port = listen.port if run.machines == 2 else listen.port + 1
    shown = Address(run.address.host, port)
    for machine in range(1, run.machines):
        name = joined.get(run.ranks(machine))
        if name is not None:
            again = shlex.join(["pipecomp", "keys", "revoke", keys, name])
            say(f"keys: {name} has joined before, for rank {run.ranks(machine)}. If it lost its keys, run {again}")
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


def join_run(keys: str, at: str, fingerprint: str, code: str, *, say: Callable[[str], None]) -> None:
    """Obtain this machine's keys unless the folder has them from an earlier start. Raises KeysError for other keys."""
    Address.parse(at, "at")
    folder = KeyFolder(keys)
    if folder.has(MACHINE):
        mine = read_identity(folder.certificate(MACHINE))
        if authority_fingerprint(folder) != normalize_fingerprint(fingerprint):
            raise KeysError(
                f"{keys} has keys of {mine.machine} in run {mine.run}, and the first machine belongs to another run: "
                "remove that folder, or name another one with --keys"
            )
    else:
        mine = accept_invitation(keys, at, fingerprint, code)
    say(f"keys: this is {mine.machine} of run {mine.run}, for rank {format_ranks(mine.ranks)}")


def start_ranks(run: UpRun, keys: str, listen: str | None, checks: Checks, *, say: Callable[[str], None]) -> int:
    """Start this machine's ranks, forward signals to them, and wait until all have ended.

    Args:
        run: The run.
        keys: This machine's folder of keys, which names its ranks.
        listen: HOST:PORT where the first of them listens, or "none"; None: on the interface towards rank 0.
        checks: Checks before training.
        say: Prints a line.

    Returns:
        The highest exit status.

    Raises:
        KeysError: The keys do not fit the run.
    """
    mine = KeyFolder(keys).identity().ranks
    if len(mine) != run.procs or mine[-1] >= run.world:
        raise KeysError(
            f"the keys in {keys} are for rank {format_ranks(mine)}, which does not fit {run.machines} machines of "
            f"{run.procs} rank(s): give the same --machines and --procs everywhere, or make new keys"
        )
    program = run.command if run.train is None else (TRAIN, run.train)
    command = python_module_command("pipecomp.up", json.dumps(asdict(checks)), *program)
    common = {
        KEYS: keys,
        ADDRESS: str(run.address),
        LAUNCHER: str(os.getpid()),
        "WORLD_SIZE": str(run.world),
        "LOCAL_WORLD_SIZE": str(run.procs),
        "MASTER_ADDR": run.address.host,
        "MASTER_PORT": str(run.address.port),
    }
    with Supervisor() as supervisor, supervisor.forward_signals():
        for local, rank in enumerate(mine):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            if listen is not None and (local == 0 or listen == "none"):
                own[LISTEN] = listen
            supervisor.start(ProcessSpec(label=f"rank {rank}", command=command, environment=os.environ | own))
        for _ in supervisor.watch(grace_s=_GRACE_S):
            pass
        if None in supervisor.statuses:
            say("a rank failed; stopping the others")
    return max((status or 0 for status in supervisor.statuses), default=0)
