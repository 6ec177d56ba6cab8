"""What two ends say to each other right after TLS: which rank this is, what it wants, and whether that may be.

All of it is JSON. The connecting end speaks first; each learns the other's list of revoked certificates.
"""

from __future__ import annotations

import secrets
import socket
import time
from typing import Any, NamedTuple

from pipecomp.errors import KeysError, LinkError, PipecompError, WireError
from pipecomp.tls.certificates import Identity
from pipecomp.tls.frames import VERSION
from pipecomp.tls.stream import SecureStream, not_made
from pipecomp.tls.verification import Trust

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
