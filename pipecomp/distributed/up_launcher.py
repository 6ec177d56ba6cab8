"""The part of one machine in `pipecomp up`: obtain keys, start the machine's ranks, wait until they have ended.

After a loss, or once the ranks ask for a new cut, the machines agree who takes part in the next start
(`pipecomp.tls.membership`). A machine that comes later waits for that.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from pipecomp.distributed.launch_env import (
    COMMAND,
    LAUNCHER,
    MACHINES,
    RESTARTS,
    STARTS,
    machine_name,
    read_start,
)
from pipecomp.distributed.placement import address_towards, is_loopback, list_interfaces
from pipecomp.distributed.preemption import LEAVING, LEFT_STATUS
from pipecomp.distributed.rendezvous import ADDRESS, CERTIFIED, KEYS, LISTEN
from pipecomp.distributed.supervisor import Ended, ProcessSpec, StartCount, Supervisor, final_status
from pipecomp.errors import KeysError, LinkTimeoutError, PipecompError, require
from pipecomp.tls.certificates import format_ranks, read_identity
from pipecomp.tls.enrollment import (
    Invitation,
    accept_invitation,
    authority_fingerprint,
    normalize_fingerprint,
)
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import AUTHORITY_KEY, MACHINE, KeyFolder, create_keys, list_machines, next_rank
from pipecomp.tls.listener import Address
from pipecomp.tls.membership import Membership, MembershipConfig, NoRunError, RunEndedError, agree_on_members
from pipecomp.utils.processes import python_module_command

# In the folder of keys: where each machine is reached, by place. It is removed when the run ends; a lost machine keeps
# it, and looks for the run when its command is started again.
BOOK = "machines.json"
_LEAVING_FILE = "leaving.json"  # beside it: names of the machines that have left at the end of the last start
REACHED = "PIPECOMP_REACHED"  # where the others reach this machine
TRAIN = "train"  # in place of a script: its argument is `TrainOptions` as JSON
_MEMBERS_S = 600.0  # for the machines that are left to find each other
_FIRST_S = 15.0  # for a run to answer a machine that joins
# For a run to answer a machine that was part of it. Nobody listens while the others notice the loss, agree, and load.
_AGAIN_S = 120.0
_GRACE_S = 30.0  # for the remaining ranks to end after the first failure
_REMOTE = ("192.0.2.1", "2001:db8::1")  # reserved for documentation


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Checks before training.

    Attributes:
        anyway: Train in spite of problems that the doctor finds.
        take: Copy files that this machine lacks from the others.
    """

    doctor: bool = True
    plan: bool = True
    anyway: bool = False
    take: bool = False


@dataclass(frozen=True, kw_only=True)
class UpRun:
    """A run, the same on all machines.

    Attributes:
        address: Address where the other ranks reach rank 0.
        machines: Number of machines.
        procs: Ranks per machine.
        command: A script and its arguments, or "train" and those of `pipecomp train`.
        train: The options of `pipecomp train` as JSON; None for a script.
        elastic: Start again without lost machines.
        name: Random name of this machine's command.
    """

    address: Address
    machines: int
    procs: int
    command: tuple[str, ...]
    train: str | None = None
    elastic: bool = False
    name: str = field(default_factory=partial(secrets.token_hex, 8))

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

    def begun_at(self, start: int) -> int | None:
        """Return the step that a start of this machine's ranks has noted; None if it has noted none."""
        try:
            text = (Path(json.loads(self.train or "{}")["out"]) / STARTS).read_text(errors="replace")
        except (OSError, KeyError, TypeError):
            return None
        return read_start(text, self.name, start)

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
        name = machine_name(machine)
        at = str(Address(listen.host, port))
        with Invitation(keys, name, ranks=run.ranks(machine), listen=at) as invitation:
            say(f"Run this on {name} within {minutes:g} minutes, in a folder with the same script, model and data:\n")
            secret = ["--at", str(shown), "--fingerprint", invitation.fingerprint, "--code", invitation.code]
            run_at = [] if run.machines == 2 else ["--address", str(run.address)]
            say(shlex.join(["pipecomp", "up", *secret, *run_at, *options, "--", *run.command]) + "\n")
            if not invitation.wait(minutes):
                raise LinkTimeoutError(f"{name} did not join within {minutes:g} minutes; the code is void")
        say(f"keys: {name} has joined, for rank {run.ranks(machine)}")


class OpenInvitation:
    """Lets further machines join a run that goes on, one after another; a context manager, on the authority's machine.

    Each code is valid for some minutes, and the next one is printed once a machine has joined.

    Args:
        run: The run.
        keys: This machine's folder of keys. Without the authority's key, or for a run that does not start again, no
            machine is invited.
        listen: Address where rank 0 listens; invitations use the next port.
        minutes: Validity of a code.
        say: Prints a line.
    """

    def __init__(self, run: UpRun, keys: str, listen: Address, *, minutes: float, say: Callable[[str], None]) -> None:
        self._run, self._keys, self._minutes, self._say = run, keys, minutes, say
        self._listen = Address(listen.host, listen.port + 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._invite, name="pipecomp-invite", daemon=True)

    def __enter__(self) -> OpenInvitation:
        if self._run.elastic and KeyFolder(self._keys).has(AUTHORITY_KEY):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _invite(self) -> None:
        again = ["pipecomp", "keys", "invite", self._keys, "NAME", "--listen", str(self._listen)]
        join = ["pipecomp", "up", "--join", str(self._run.address)]
        command = ["--procs", str(self._run.procs), "--", *self._run.command]
        while not self._ended.is_set():
            place = -(-next_rank(KeyFolder(self._keys)) // self._run.procs)
            name = machine_name(place)
            try:
                with Invitation(self._keys, name, ranks=self._run.ranks(place), listen=str(self._listen)) as invitation:
                    secret = ["--fingerprint", invitation.fingerprint, "--code", invitation.code]
                    line = shlex.join([*join, *secret, *command])
                    self._say(f"{name} joins this run within {self._minutes:g} minutes with:\n\n{line}\n")
                    for _ in range(max(1, round(60 * self._minutes))):
                        if self._ended.is_set() or invitation.wait(1 / 60):
                            break
                    else:
                        here = shlex.join([*again, "--ranks", self._run.ranks(place)])
                        there = shlex.join([*join, *command])
                        self._say(f"the code for {name} is void. For a machine that joins later run {here} here,")
                        self._say(f"what it prints there, and then {there}")
                        return
            except PipecompError as error:
                self._say(f"no machine can join: {error}")
                return


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


def start_ranks(
    run: UpRun, keys: str, listen: str | None, checks: Checks, *, joins: bool = False, say: Callable[[str], None]
) -> int:
    """Start this machine's ranks, forward signals to them, and wait until all have ended.

    An elastic run starts again without a lost machine, and with machines that come, see `pipecomp.tls.membership`.

    Args:
        run: The run.
        keys: This machine's folder of keys, which names its ranks.
        listen: HOST:PORT where the first of them listens, or "none"; None: on the interface towards rank 0.
        checks: Checks before training.
        joins: This machine joins a run that goes on.
        say: Prints a line.

    Returns:
        The highest exit status.

    Raises:
        KeysError: The keys do not fit the run.
        LinkTimeoutError: Too few machines are left, or no run answers a machine that joins.
    """
    mine = KeyFolder(keys).identity().ranks
    if len(mine) != run.procs or (mine[-1] >= run.world and not joins) or mine[0] % run.procs:
        raise KeysError(
            f"the keys in {keys} are for rank {format_ranks(mine)}, which does not fit {run.machines} machines of "
            f"{run.procs} rank(s): give the same --machines and --procs everywhere, or make new keys"
        )
    place = mine[0] // run.procs
    first = start = Membership(tuple(range(run.machines)), run.address, 0)
    book = Path(keys) / BOOK
    if run.elastic:
        try:
            start = find_run(run, keys, place, joins=joins, say=say) or first
        except RunEndedError as error:  # it was not needed
            say(str(error))
            book.unlink(missing_ok=True)
            return 0
    earlier, starts = start.places, StartCount()  # earlier: of the start before
    while True:
        if start.number:
            say(f"restart {start.number}: {', '.join(map(machine_name, start.places))}")
        else:
            book.unlink(missing_ok=True)
        leaving = Path(keys) / _LEAVING_FILE
        leaving.unlink(missing_ok=True)
        ended, status = _run_ranks(run, start, place, keys, listen, checks, starts.variables(), say=say)
        if run.elastic and book.is_file() and _goes_on_without_this(ended):
            say("this machine leaves the run. If others go on, the same command takes part in it again")
            return status
        if not run.elastic or not book.is_file() or not status or ended.stopped or ended.is_whole:
            book.unlink(missing_ok=True)
            return status
        left = _read_names(leaving)
        before = tuple(number for number in start.places if machine_name(number) not in left)
        wanted = len(before)
        if ended.more is not None:
            wanted += ended.more
            starts = StartCount()  # this one has trained
        elif ended.is_loss:
            if (fruitless := starts.add(run.begun_at(start.number))) is not None:
                say(fruitless)
                book.unlink(missing_ok=True)
                return status
            say("a machine or rank was lost; looking for those that are left")
        else:  # with machines that cannot take part, such as one with other data
            before = tuple(number for number in start.places if number in earlier)
            ends = before == start.places or starts.ends_at(run.begun_at(start.number))
            if ends:
                book.unlink(missing_ok=True)
            if ends or place not in before:
                return status
            wanted = len(before)
            say("the run did not go on with the machines that came; it goes on without them")
        addresses = {number: at for number, at in read_book(keys).items() if machine_name(number) not in left}
        config = MembershipConfig(
            place=place,
            procs=run.procs,
            addresses=addresses,
            before=before,
            number=start.number + 1,
            listen=listen_address(run, listen),
            wanted=wanted,
        )
        earlier = before
        try:
            start = agree_on_members(config, Credentials(KeyFolder(keys)), wait_s=_MEMBERS_S, say=say)
        except NoRunError:  # the first machine has not found the run, and starts it again
            start, earlier = first, first.places
        except RunEndedError as error:  # without this machine
            say(str(error))
            book.unlink(missing_ok=True)
            return 0


def _goes_on_without_this(ended: Ended) -> bool:
    """Return whether this machine was told to end, and others may go on."""
    return LEFT_STATUS in ended.statuses or (ended.stopped and not ended.interrupted and not ended.is_whole)


def _read_names(path: Path) -> list[str]:
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def read_book(keys: str) -> dict[int, Address]:
    """Return where the machines of the last start are reached, by place; empty if that is unknown."""
    try:
        content = json.loads((Path(keys) / BOOK).read_text())
        return {int(place): Address.parse(text, BOOK) for place, text in content.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def find_run(run: UpRun, keys: str, place: int, *, joins: bool, say: Callable[[str], None]) -> Membership | None:
    """Wait until a run that goes on takes this machine in.

    Args:
        run: The run.
        keys: This machine's folder of keys.
        place: Place of this machine.
        joins: The run must go on. Otherwise it may not have begun.
        say: Prints a line.

    Returns:
        The start in which this machine takes part; None if the run has not begun.

    Raises:
        LinkTimeoutError: No run answers, or it has ended.
        KeysError: The keys of this machine cannot be used.
    """
    known = read_book(keys)
    addresses = ({} if place == 0 else {0: run.address}) | known
    addresses.pop(place, None)
    config = MembershipConfig(place=place, procs=run.procs, addresses=addresses, before=(), number=0, listen=None)
    if not addresses:
        return None
    first_s = _AGAIN_S if known else _FIRST_S if joins else 0.0
    if known:
        say(f"looks for the run that this machine was part of, for up to {first_s:g} s")
    try:
        return agree_on_members(config, Credentials(KeyFolder(keys)), wait_s=_MEMBERS_S, first_s=first_s, say=say)
    except NoRunError:
        if joins:
            raise
        return None


def listen_address(run: UpRun, listen: str | None) -> Address | None:
    """Return where a machine listens between two starts, and as rank 0; None if it does not."""
    if listen is not None:
        return None if listen == "none" else Address.parse(listen, "listen")
    own = address_towards(run.address.host)
    return None if own is None else Address(own, run.address.port)


def _reached_address(run: UpRun, place: int, listen: str | None) -> Address | None:
    """Return where the other machines reach this one between two starts; None if they do not."""
    own = listen_address(run, listen)
    if place == 0 or own is None:
        return run.address if place == 0 else None
    towards = address_towards(run.address.host) if own.is_wildcard else own.host
    return None if towards is None else Address(towards, own.port)


def _run_ranks(
    run: UpRun,
    start: Membership,
    place: int,
    keys: str,
    listen: str | None,
    checks: Checks,
    variables: Mapping[str, str],
    *,
    say: Callable[[str], None],
) -> tuple[Ended, int]:
    """Start this machine's ranks of one start, and wait for them; returns also the highest status of all.

    variables: Further ones for the ranks.
    """
    checks = checks if start.number == 0 else Checks(doctor=False, plan=False, take=checks.take)
    program = run.command if run.train is None else (TRAIN, run.train)
    command = python_module_command("pipecomp.up", json.dumps(asdict(checks)), *program)
    certified = [number * run.procs + local for number in start.places for local in range(run.procs)]
    first = start.places.index(place) * run.procs
    common = {
        KEYS: keys,
        ADDRESS: str(start.address),
        LAUNCHER: str(os.getpid()),
        "WORLD_SIZE": str(len(certified)),
        "LOCAL_WORLD_SIZE": str(run.procs),
        "MASTER_ADDR": start.address.host,
        "MASTER_PORT": str(start.address.port),
    }
    if (reached := _reached_address(run, place, listen)) is not None:
        common[REACHED] = str(reached)
    if start.number:
        common |= {RESTARTS: str(start.number), CERTIFIED: ",".join(map(str, certified))}
    if run.elastic:
        common |= {MACHINES: ",".join(map(machine_name, start.places)), COMMAND: run.name}
        common[LEAVING] = str(Path(keys) / _LEAVING_FILE)
    if start.number and first == 0:  # this machine leads now
        listen = str(listen_address(run, listen))
    common |= variables
    with Supervisor() as supervisor, supervisor.forward_signals():
        for local in range(run.procs):
            own = common | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            if listen is not None and (local == 0 or listen == "none"):
                own[LISTEN] = listen
            label = f"rank {first + local}"
            supervisor.start(ProcessSpec(label=label, command=command, environment=os.environ | own))
        for _ in supervisor.watch(grace_s=_GRACE_S):
            pass
        if None in supervisor.statuses:
            say("a rank failed; stopping the others")
        ended = supervisor.ended()
    return ended, max((final_status(status or 0) for status in supervisor.statuses), default=0)
