"""Connections between the machines of one run: who is at the other end, and may it be there?"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import ssl
import threading
import time
from typing import Any, NamedTuple

from cryptography import x509

from pipecomp.errors import KeysError, LinkError, PipecompError, WireError
from pipecomp.tls.certificates import Identity, identify, ranks_text, read_revoked, run_of
from pipecomp.tls.frames import VERSION
from pipecomp.tls.key_folder import AUTHORITY, MACHINE, MACHINE_KEY, REVOKED, KeyFolder
from pipecomp.tls.stream import SecureStream, context, not_made


class Trust:
    """This machine's side of all connections of a run. KeysError if its keys cannot be used."""

    def __init__(self, folder: KeyFolder) -> None:
        self.folder = folder
        self.identity = folder.identity()
        self.run = run_of(folder.certificate())
        folder.key(MACHINE_KEY)  # whether it is private
        self._contexts: dict[bool, ssl.SSLContext] = {}
        for server in (False, True):
            made = context(server=server)
            made.load_verify_locations(folder.file(AUTHORITY))
            try:
                made.load_cert_chain(folder.file(MACHINE), folder.file(MACHINE_KEY))
            except ssl.SSLError as error:
                raise KeysError(f"the machine's certificate and key in {folder.path} do not belong together") from error
            self._contexts[server] = made
        self._lock = threading.Lock()
        self._newest = folder.read(REVOKED)  # list of revoked certificates
        self._number, self._revoked = folder.revoked()

    def secure(
        self, sock: socket.socket, *, server: bool, early: bytes = b"", within_s: float = math.inf
    ) -> tuple[SecureStream, Identity]:
        """Make a handshake, and say who is at the other end.

        early: what was read from the socket already. within_s: for this and what is said next, in all. Call `check`
        with the identity before anything else. KeysError if the other end does not belong to this run; NoAnswerError,
        one of those, if it hung up or says nothing.
        """
        stream = SecureStream(sock, self._contexts[server], server=server, early=early)
        stream.deadline = time.monotonic() + within_s
        try:
            stream.handshake()
        except (OSError, EOFError) as error:
            raise not_made(error) from error
        return stream, identify(x509.load_der_x509_certificate(stream.certificate()))

    def check(self, peer: Identity) -> None:
        """KeysError if it is of another run, or revoked."""
        if peer.run != self.run:
            raise KeysError(f"machine {peer.machine!r} is of run {peer.run}, not of {self.run}")
        if peer.serial in self._revoked:
            raise KeysError(f"the certificate of machine {peer.machine!r} was revoked")

    def check_rank(self, peer: Identity, rank: object) -> int:
        """`rank`, if that machine may be it. KeysError if not."""
        if type(rank) is not int or rank not in peer.ranks:
            raise KeysError(
                f"machine {peer.machine!r} says that it is rank {rank!r}; it may be {ranks_text(peer.ranks)}"
            )
        return rank

    @property
    def revoked(self) -> str:
        """The newest list of revoked certificates that is known here, for other machines."""
        self._take(self.folder.read(REVOKED))
        return self._newest.decode()

    def learn(self, revoked: Any) -> None:
        """Take over another machine's list of revoked certificates if it is newer than this one's."""
        if not isinstance(revoked, str):
            raise KeysError("the other machine sent no list of revoked certificates")
        self._take(revoked.encode())
        with contextlib.suppress(OSError):  # a folder that cannot be written: it is known until this process ends
            self.folder.learn_revoked(revoked.encode())
        self._take(self.folder.read(REVOKED))  # another process may know more

    def _take(self, data: bytes) -> None:
        number, serials = read_revoked(data, self.folder.certificate())
        with self._lock:
            if number > self._number:
                self._newest, self._number, self._revoked = data, number, serials


DIAL_S = 30.0  # for all that the other end says until it is let in
_ANSWER_S = 10.0  # for it to take the answer
JOIN, PEER, RELAY, AGAIN = "join", "peer", "relay", "again"  # what a connection can be for


class Place(NamedTuple):
    """Where a rank stands. session: of one start of all ranks, chosen by rank 0."""

    rank: int
    world: int
    session: str


class Guest(NamedTuple):
    """Who connected, and what for. to: of RELAY, the rank that it wants to talk to. received: frames that it has."""

    rank: int
    purpose: str
    to: int
    received: int
    stream: SecureStream


class Answer(NamedTuple):
    """What the listening end says. received: frames that it has."""

    session: str
    received: int


class Wish(NamedTuple):
    """What the connecting end wants, and of which rank. to, received: as of a Guest."""

    purpose: str
    rank: int
    to: int = -1
    received: int = 0


class RefusedError(LinkError):
    """The other end belongs to the run, and says why it does not want this connection."""


def new_session() -> str:
    """A name for one start of all ranks."""
    return secrets.token_hex(16)


def greet(stream: SecureStream, who: Identity, trust: Trust, mine: Place, wish: Wish) -> Answer:
    """The connecting end's part.

    Raises KeysError if the other end is not the rank that was wanted (NoAnswerError if it has hung up or says nothing),
    RefusedError if it does not want this one.
    """
    rank = wish.rank
    trust.check(who)
    trust.check_rank(who, rank)
    asked = {
        "version": VERSION,
        "rank": mine.rank,
        "world": mine.world,
        "session": mine.session,
        "purpose": wish.purpose,
        "to": wish.to,
        "received": wish.received,
        "revoked": trust.revoked,
    }
    try:
        stream.send_json(asked)
        answer = stream.receive_json()
    except (OSError, EOFError) as error:
        raise not_made(error) from error
    if "error" in answer:
        raise RefusedError(str(answer["error"])[:500])
    if answer.get("rank") != rank:
        raise KeysError(f"it says that it is rank {answer.get('rank')!r}, not {rank}")
    trust.learn(answer.get("revoked"))
    trust.check(who)
    return Answer(str(answer.get("session")), _count(answer))


def receive(sock: socket.socket, trust: Trust, mine: Place, purposes: tuple[str, ...], early: bytes = b"") -> Guest:
    """The listening end's part up to the answer, which is `welcome` or `refuse`."""
    stream, who = trust.secure(sock, server=True, early=early, within_s=DIAL_S)
    try:
        asked = stream.receive_json()
        trust.check(who)
        trust.learn(asked.get("revoked"))
        trust.check(who)
        rank = trust.check_rank(who, asked.get("rank"))
        purpose, to, received = asked.get("purpose"), asked.get("to"), _count(asked)
        if asked.get("version") != VERSION:
            raise LinkError(
                f"rank {mine.rank} speaks version {VERSION} of frames, rank {rank} {asked.get('version')!r}"
            )
        if asked.get("world") != mine.world or not 0 <= rank < mine.world or rank == mine.rank:
            raise LinkError(
                f"rank {rank} of {asked.get('world')!r} does not fit to rank {mine.rank} of {mine.world}: start all "
                "with the same WORLD_SIZE, and each with its own RANK"
            )
        if purpose not in purposes or not isinstance(to, int):
            raise LinkError(f"rank {mine.rank} does not do {purpose!r}")
        if purpose != JOIN and asked.get("session") != mine.session:
            raise LinkError(f"rank {rank} is of another start of this run")
        return Guest(rank, str(purpose), to, received, stream)
    except PipecompError as error:
        refuse(stream, str(error))
        raise


def welcome(guest: Guest, trust: Trust, mine: Place, received: int = 0) -> None:
    """Let it in; received: frames of it that have come."""
    answer = {"rank": mine.rank, "session": mine.session, "received": received, "revoked": trust.revoked}
    guest.stream.deadline = time.monotonic() + _ANSWER_S
    guest.stream.send_json(answer)


def refuse(stream: SecureStream, reason: str) -> None:
    """Say why not."""
    answer: dict[str, Any] = {"error": reason}
    stream.send_json(answer)


def _count(said: dict[str, Any]) -> int:
    found = said.get("received", 0)
    if type(found) is not int or found < 0:
        raise WireError(f"a number of frames that is none: {found!r}")
    return found
