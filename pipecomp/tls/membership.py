"""The members of a run's next start: between two starts the machines that are left agree on them over TLS.

After a loss each machine looks for the leader: the first machine, in the order of their places, that accepts
connections. A later one leads if none is found in time. The leader waits for the others, and tells all of them the
result. It needs more than half of the machines of the last start, or half of them with the first one of these; so a
network that is cut in two makes one run, not two.

A machine that was not part of the last start visits the run's addresses until it is taken in: rank 0 answers while
training goes on, the leader between two starts. It takes the place of a lost machine, or a new one if the ranks have
asked for more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipecomp.errors import KeysError, LinkError, LinkTimeoutError, PipecompError, WireError
from pipecomp.tls.certificates import MachineIdentity, format_ranks
from pipecomp.tls.frames import VERSION
from pipecomp.tls.handshake import HANDSHAKE_S, MEMBERS, Credentials, receive_message, reject
from pipecomp.tls.listener import Address, Listener
from pipecomp.tls.stream import SecureStream

_LEAD_S = 20.0  # for each machine that could lead before this one
_GATHER_S = 15.0  # the leader waits that long for machines of the last start
_CONNECT_S, _RETRY_S, _SEND_S = 3.0, 0.5, 10.0
_VISIT_S = 2.0  # between two visits of a run that goes on
_ENDED_S = 60.0  # after which a run has ended whose machines are there and do not listen
_MAX_MACHINES = 1024


@dataclass(frozen=True)
class Membership:
    """The machines of the next start.

    Attributes:
        places: Their places, in the order of their ranks; the first one leads and has rank 0.
        address: Where rank 0 is reached.
        number: Number of the start; 0 is the first one of the run.
    """

    places: tuple[int, ...]
    address: Address
    number: int


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    """The facts that a machine has before the agreement.

    Attributes:
        place: Place of this machine, from 0, in the order of the invitations.
        procs: Ranks per machine; machine P's certificate names ranks from P * procs on.
        addresses: Addresses of the machines that listen, by place.
        before: The places that took part in the last start; () if this machine did not.
        number: Number of the next start.
        listen: Where this machine listens; None if it does not, and so cannot lead.
        wanted: Machines of the next start, if there are so many; 0 for as many as in the last one.
    """

    place: int
    procs: int
    addresses: Mapping[int, Address]
    before: tuple[int, ...]
    number: int
    listen: Address | None
    wanted: int = 0


class RunningError(LinkError):
    """Training goes on without this machine.

    Attributes:
        book: Addresses of the run's machines, by place.
        left_out: True if this machine has no part in the start that goes on; otherwise the others may not have noticed
            yet that it was lost.
    """

    def __init__(self, book: dict[int, Address], *, left_out: bool) -> None:
        super().__init__("the run goes on without this machine")
        self.book, self.left_out = book, left_out


class RunEndedError(LinkTimeoutError):
    """The run that this machine waited for has ended."""


class NoRunError(LinkTimeoutError):
    """No machine of the run has answered, or its first start waits for its machines."""


def is_enough(present: Sequence[int], before: Sequence[int]) -> bool:
    """Return whether machines may go on without the others of the last start.

    Example:
        >>> is_enough([0], [0, 1]), is_enough([1], [0, 1]), is_enough([1, 2], [0, 1, 2])
        (True, False, True)
    """
    stay = set(present) & set(before)
    return 2 * len(stay) > len(before) or (2 * len(stay) == len(before) and before[0] in stay)


def agree_on_members(
    config: MembershipConfig,
    credentials: Credentials,
    *,
    wait_s: float,
    first_s: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Membership:
    """Agree with the other machines who takes part in the next start; every machine that is left calls this.

    Args:
        config: What this machine knows.
        credentials: Its keys.
        wait_s: Limit for the whole, without the time in which training goes on without this machine.
        first_s: Limit for the first answer; None for `wait_s`.
        say: Prints a line.

    Returns:
        The same on every machine that takes part.

    Raises:
        LinkTimeoutError: Too few machines are left, or none of them can be reached; NoRunError, a subclass, if none has
            answered within `first_s`, or if a first start waits for this machine; RunEndedError, another one, if
            training went on and has ended.
        KeysError: The keys of this machine cannot be used.
    """
    began = time.monotonic()
    limit_s = wait_s if first_s is None else first_s
    counts = ""
    heard = began  # when a machine last did anything else than refuse connections
    answered: float | None = None  # when training went on without this machine first
    problems: dict[int, str] = {}
    while True:
        passed_s, running = time.monotonic() - began, False
        earlier = [place for place in sorted(config.addresses) if place < config.place]
        later = [place for place in sorted(config.addresses) if place > config.place]
        for place in [*earlier, *later]:
            try:
                return _follow(config, credentials, config.addresses[place], place, max(0.0, wait_s - passed_s))
            except RunningError as error:
                began, limit_s, running = time.monotonic(), wait_s, True
                heard = began
                if answered is None:
                    answered = began
                    say("the run goes on; this machine waits until it is taken in")
                left_out = error.left_out or began - answered > _ENDED_S
                before = () if left_out else config.before
                config = replace(config, addresses={**config.addresses, **error.book}, before=before)
            except NoRunError:
                raise
            except (OSError, EOFError, PipecompError) as error:
                if not isinstance(error, ConnectionRefusedError):
                    heard = time.monotonic()
                problems[place] = getattr(error, "strerror", None) or str(error)
        if running:
            time.sleep(_VISIT_S)
            continue
        if answered is not None and not config.before and time.monotonic() - heard >= _ENDED_S:
            raise RunEndedError("the run has ended: no machine of it listens any more")
        if passed_s >= limit_s:
            break
        if config.listen is not None and config.before and passed_s >= len(earlier) * _LEAD_S:
            leader = _Leader(config, credentials)
            found = leader.gather(min(_GATHER_S, wait_s - passed_s))
            if found is not None:
                return found
            if not counts:
                say(f"waits for more machines: {leader.counts()}")
            counts = leader.counts()
        time.sleep(_RETRY_S)
    if counts:
        hint = "Start the same command again on the others; the run goes on from their newest complete state"
        if time.monotonic() - heard >= _ENDED_S:
            hint = f"The others refuse connections. If the run has not ended without this machine: {hint}"
        raise LinkTimeoutError(f"too few machines are left after {wait_s:g} s: {counts}. {hint}")
    kind = NoRunError if answered is None and first_s is not None else LinkTimeoutError
    known = ", ".join(
        f"machine {place + 1} at {address} ({problems.get(place, 'this machine')})"
        for place, address in sorted(config.addresses.items())
    )
    raise kind(f"no machine of the run was found within {limit_s:g} s: {known}")


def _follow(
    config: MembershipConfig, credentials: Credentials, address: Address, leader: int, wait_s: float
) -> Membership:
    """Ask a leader to take part. Raises various errors if it is not there, or another one."""
    with socket.create_connection(address, _CONNECT_S) as sock:
        sock.settimeout(_CONNECT_S)
        stream, peer = credentials.secure(sock, server=False, within_s=HANDSHAKE_S)
        credentials.check_peer(peer)
        _check_place(peer, leader, config.procs)
        stream.send_json(
            {
                "purpose": MEMBERS,
                "version": VERSION,
                "place": config.place,
                "number": config.number,
                "revoked": credentials.revocation_list,
            }
        )
        wait_s = max(1.0, min(wait_s, _GATHER_S + _SEND_S))  # for the leader to decide
        sock.settimeout(wait_s)
        stream.deadline = time.monotonic() + wait_s
        reply = stream.receive_json()
    if "error" in reply:
        raise LinkError(str(reply["error"])[:300])
    credentials.merge_revocations(reply.get("revoked"))
    if "running" in reply:
        if reply["running"] is not True:
            raise NoRunError("the run's first start waits for its machines")
        raise RunningError(_read_book(reply.get("book")), left_out=reply.get("member") is False)
    places, number = reply.get("places"), reply.get("number")
    if not (
        isinstance(places, list)
        and len(places) <= _MAX_MACHINES
        and all(type(place) is int and place >= 0 for place in places)
        and len(set(places)) == len(places)
        and places[:1] == [leader]
        and config.place in places
        and type(number) is int
    ):
        raise WireError("the leader sent no list of machines")
    return Membership(tuple(places), address, number)


def _read_book(book: object) -> dict[int, Address]:
    """Return the addresses of machines by place. Raises WireError for anything else."""
    if not isinstance(book, dict) or len(book) > _MAX_MACHINES:
        raise WireError("the run sent no addresses of its machines")
    try:
        return {int(place): Address.parse(str(address), "book") for place, address in book.items()}
    except (ValueError, PipecompError) as error:
        raise WireError(f"the run sent invalid addresses: {error}") from error


def _check_place(peer: MachineIdentity, place: object, procs: int) -> int:
    """Return `place` if a machine's certificate names its ranks. Raises KeysError otherwise."""
    if type(place) is not int or place < 0 or place * procs not in peer.ranks:
        ranks = format_ranks(peer.ranks)
        raise KeysError(f"machine {peer.machine!r} claims place {place!r}; its certificate is for rank {ranks}")
    return place


def _is_there(stream: SecureStream) -> bool:
    """Return whether the other end has not closed the connection."""
    try:
        stream.sock.setblocking(False)
        return bool(stream.sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:  # it waits for an answer
        return True
    except OSError:
        return False


class _Leader:
    """Collects machines at this machine's address."""

    def __init__(self, config: MembershipConfig, credentials: Credentials) -> None:
        self._config, self._credentials = config, credentials
        self._streams: dict[int, SecureStream] = {}
        self._number = config.number
        self._changed = threading.Condition()
        self._decided = False

    def gather(self, wait_s: float) -> Membership | None:
        """Wait for all machines of the last start, decide, and tell them; None if too few have come in time."""
        config = self._config
        assert config.listen is not None
        listener = Listener(config.listen, self._authenticate)
        try:
            with self._changed:
                wanted = config.wanted or len(config.before)
                self._changed.wait_for(
                    lambda: set(config.before) <= set(self._present()) and len(self._present()) >= wanted, wait_s
                )
                self._decided = True
                streams, number = dict(self._streams), self._number
        finally:
            listener.close()
        told = [place for place, stream in sorted(streams.items()) if _is_there(stream)]
        enough = is_enough((config.place, *told), config.before)
        stay = [place for place in config.before if place in told]
        others = [place for place in told if place not in stay]
        places = (config.place, *stay, *others[: max(0, wanted - len(stay) - 1)])
        for place, stream in streams.items():
            if enough and place in places:
                self._tell(stream, {"places": list(places), "number": number})
            elif enough and place in told:
                self._tell(stream, {"running": True, "book": {}, "member": False})
            stream.close()
        return Membership(places, config.addresses[config.place], number) if enough else None

    def counts(self) -> str:
        """Return how many machines have come, and how many are needed."""
        present = set(self._present()) & set(self._config.before)
        return f"{len(present)} of {len(self._config.before)}, needed: more than half, or half with the first one"

    def _present(self) -> list[int]:
        return [self._config.place, *sorted(self._streams)]

    def _tell(self, stream: SecureStream, answer: dict[str, Any]) -> None:
        """Send the result. A machine that is gone by now is missed in the next start."""
        with contextlib.suppress(OSError, EOFError):
            stream.sock.settimeout(_SEND_S)
            stream.send_json({**answer, "revoked": self._credentials.revocation_list})

    def _authenticate(self, sock: socket.socket) -> Callable[[], None]:
        stream, peer = self._credentials.secure(sock, server=True, within_s=HANDSHAKE_S)
        message = receive_message(stream, peer, self._credentials)
        if message.get("purpose") != MEMBERS or message.get("version") != VERSION:
            reject(stream, "this machine waits for the others of its run between two starts")
            raise LinkError(f"machine {peer.machine!r} sends {message.get('purpose')!r} between two starts")
        place, number = _check_place(peer, message.get("place"), self._config.procs), message.get("number")
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise WireError(f"machine {peer.machine!r} sends the number {number!r}")

        def admit() -> None:
            with self._changed:
                if self._decided or place == self._config.place:
                    stream.close()
                    return
                if (known := self._streams.get(place)) is not None:  # it has tried before
                    known.close()
                self._streams[place], self._number = stream, max(self._number, number)
                self._changed.notify_all()

        return admit
