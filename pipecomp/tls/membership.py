"""The members of a run's next start: between two starts the machines that are left agree on them over TLS.

After a loss each machine looks for the leader: the first machine, in the order of their places, that accepts
connections. A later one leads if none is found in time. The leader waits for the others, and tells all of them the
result. It needs more than half of the machines of the last start, or half of them with the first one of these; so a
network that is cut in two makes one run, not two.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipecomp.errors import KeysError, LinkError, LinkTimeoutError, PipecompError, WireError
from pipecomp.tls.certificates import MachineIdentity, format_ranks
from pipecomp.tls.frames import VERSION
from pipecomp.tls.handshake import HANDSHAKE_S, Credentials, reject
from pipecomp.tls.listener import Address, Listener
from pipecomp.tls.stream import SecureStream

_PURPOSE = "members"
_LEAD_S = 20.0  # for each machine that could lead before this one
_GATHER_S = 15.0  # the leader waits that long for machines of the last start
_CONNECT_S, _RETRY_S, _SEND_S = 3.0, 0.5, 10.0
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
        place: Of this machine, from 0, in the order of the invitations.
        procs: Ranks per machine; machine P's certificate names ranks from P * procs on.
        addresses: Of the machines that listen, by place.
        before: The places that took part in the last start.
        number: Of the next start.
        listen: Where this machine listens; None if it does not, and so cannot lead.
    """

    place: int
    procs: int
    addresses: Mapping[int, Address]
    before: tuple[int, ...]
    number: int
    listen: Address | None


def is_enough(present: Sequence[int], before: Sequence[int]) -> bool:
    """Return whether machines may go on without the others of the last start.

    Example:
        >>> is_enough([0], [0, 1]), is_enough([1], [0, 1]), is_enough([1, 2], [0, 1, 2])
        (True, False, True)
    """
    stay = set(present) & set(before)
    return 2 * len(stay) > len(before) or (2 * len(stay) == len(before) and before[0] in stay)


def agree_on_members(
    config: MembershipConfig, credentials: Credentials, *, wait_s: float, say: Callable[[str], None] = lambda text: None
) -> Membership:
    """Agree with the other machines who takes part in the next start; every machine that is left calls this.

    Args:
        config: What this machine knows.
        credentials: Its keys.
        wait_s: Limit for the whole.
        say: Prints a line.

    Returns:
        The same on every machine that takes part.

    Raises:
        LinkTimeoutError: Too few machines are left, or none of them can be reached.
        KeysError: The keys of this machine cannot be used.
    """
    began = time.monotonic()
    earlier = [place for place in sorted(config.addresses) if place < config.place]
    later = [place for place in sorted(config.addresses) if place > config.place]
    counts = ""
    while (passed_s := time.monotonic() - began) < wait_s:
        for place in [*earlier, *later]:
            with contextlib.suppress(OSError, EOFError, PipecompError):
                return _follow(config, credentials, config.addresses[place], place, wait_s - passed_s)
        if config.listen is not None and passed_s >= len(earlier) * _LEAD_S:
            leader = _Leader(config, credentials)
            found = leader.gather(min(_GATHER_S, wait_s - passed_s))
            if found is not None:
                return found
            if not counts:
                say(f"waits for more machines: {leader.counts()}")
            counts = leader.counts()
        time.sleep(_RETRY_S)
    if counts:
        raise LinkTimeoutError(f"too few machines are left after {wait_s:g} s: {counts}")
    raise LinkTimeoutError(f"no machine of the run was found within {wait_s:g} s: {_known(config)}")


def _known(config: MembershipConfig) -> str:
    return ", ".join(f"machine {place + 1} at {address}" for place, address in sorted(config.addresses.items()))


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
                "purpose": _PURPOSE,
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
                self._changed.wait_for(lambda: set(config.before) <= set(self._present()), wait_s)
                self._decided = True
                streams, number = dict(self._streams), self._number
        finally:
            listener.close()
        told = [place for place, stream in sorted(streams.items()) if _is_there(stream)]
        places = (config.place, *told)
        enough = is_enough(places, config.before)
        for place, stream in streams.items():
            if enough and place in told:
                self._tell(stream, places, number)
            stream.close()
        return Membership(places, config.addresses[config.place], number) if enough else None

    def counts(self) -> str:
        """Return how many machines have come, and how many are needed."""
        present = set(self._present()) & set(self._config.before)
        return f"{len(present)} of {len(self._config.before)}, needed: more than half, or half with the first one"

    def _present(self) -> list[int]:
        return [self._config.place, *sorted(self._streams)]

    def _tell(self, stream: SecureStream, places: tuple[int, ...], number: int) -> None:
        """Send the result. A machine that is gone by now is missed in the next start."""
        with contextlib.suppress(OSError, EOFError):
            stream.sock.settimeout(_SEND_S)
            revoked = self._credentials.revocation_list
            stream.send_json({"places": list(places), "number": number, "revoked": revoked})

    def _authenticate(self, sock: socket.socket) -> Callable[[], None]:
        stream, peer = self._credentials.secure(sock, server=True, within_s=HANDSHAKE_S)
        message = stream.receive_json()
        self._credentials.check_peer(peer)
        self._credentials.merge_revocations(message.get("revoked"))
        self._credentials.check_peer(peer)
        if message.get("purpose") != _PURPOSE or message.get("version") != VERSION:
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
