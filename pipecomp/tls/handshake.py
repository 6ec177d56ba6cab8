"""Authentication and the handshake of two ranks: mutual TLS, then one JSON request and its reply.

The connecting end sends a `ConnectRequest`; the listening end accepts or rejects it. Each end learns the other's
revocation list, so a revocation spreads wherever ranks connect. The first request and reply of two ranks are longer
than a packet, so that a path on which large packets vanish is noticed before training.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cryptography import x509

from pipecomp.errors import KeysError, LinkError, PipecompError, WireError, foreign_text
from pipecomp.tls import certificates as certs
from pipecomp.tls.frames import MAX_SUBFLOWS, VERSION
from pipecomp.tls.key_folder import AUTHORITY, MACHINE, MACHINE_KEY, REVOKED, KeyFolder
from pipecomp.tls.stream import SecureStream, handshake_error, tls_context

HANDSHAKE_S = 30.0  # for everything that the other end sends until it is admitted
_REPLY_S = 10.0  # for the other end to take the reply
JOIN, PEER, RELAY, RESUME = "join", "peer", "relay", "again"  # purposes of a connection
REPORT = "report"  # of the reason why the connecting rank gives up
MEMBERS = "members"  # of a machine that asks for the members of the next start
_PADDING = "." * 10_000  # more than a packet of 9000 bytes
_REASON_CHARACTERS = 1000


class Credentials:
    """This machine's keys, and the checks of its peers; KeysError if the keys cannot be used.

    Args:
        folder: This machine's keys.
        certified: For each rank of this start the number that its machine's certificate has; () if they are the same.
            They differ after a start without a lost machine.
    """

    def __init__(self, folder: KeyFolder, certified: Sequence[int] = ()) -> None:
        self.folder = folder
        self.certified = tuple(certified)
        self.identity = folder.identity()
        self.run = certs.authority_run(folder.certificate())
        folder.private_key(MACHINE_KEY)  # raises if other users may read it
        self._contexts: dict[bool, ssl.SSLContext] = {}
        for server in (False, True):
            context = tls_context(server=server)
            context.load_verify_locations(folder.path / AUTHORITY)
            try:
                context.load_cert_chain(folder.path / MACHINE, folder.path / MACHINE_KEY)
            except ssl.SSLError as error:
                raise KeysError(f"certificate and private key in {folder.path} do not belong together") from error
            self._contexts[server] = context
        self._lock = threading.Lock()
        self._newest_list = folder.read(REVOKED)
        self._number, self._revoked = folder.revocations()

    def secure(
        self, sock: socket.socket, *, server: bool, buffered: bytes = b"", within_s: float = math.inf
    ) -> tuple[SecureStream, certs.MachineIdentity]:
        """Perform the TLS handshake; call `check_peer` with the identity before anything else.

        Args:
            sock: A connected socket.
            server: Whether this end accepted the connection.
            buffered: Bytes that were read from the socket already.
            within_s: Limit for the TLS handshake and the messages after it, together.

        Returns:
            The stream, and the identity of its other end.

        Raises:
            KeysError: The other end is not of this run; NoAnswerError, a subclass, if it hung up or stays silent.
        """
        stream = SecureStream(sock, self._contexts[server], server=server, buffered=buffered)
        stream.deadline = time.monotonic() + within_s
        try:
            stream.handshake()
        except (OSError, EOFError) as error:
            raise handshake_error(error) from error
        return stream, certs.read_identity(x509.load_der_x509_certificate(stream.peer_certificate()))

    def check_peer(self, peer: certs.MachineIdentity) -> None:
        """Raise KeysError if a machine is of another run, or revoked."""
        if peer.run != self.run:
            raise KeysError(f"machine {peer.machine!r} is of run {peer.run}, not of {self.run}")
        if peer.serial in self._revoked:
            raise KeysError(f"the certificate of machine {peer.machine!r} was revoked")

    def check_rank(self, peer: certs.MachineIdentity, rank: object) -> int:
        """Return `rank` if the machine's certificate allows it; KeysError otherwise."""
        numbers = dict(enumerate(self.certified)) if self.certified else None
        if type(rank) is int and (rank if numbers is None else numbers.get(rank)) in peer.ranks:
            return rank
        allowed = certs.format_ranks(peer.ranks)
        raise KeysError(f"machine {peer.machine!r} claims rank {rank!r}; it may be {allowed}")

    @property
    def revocation_list(self) -> str:
        """The newest revocation list known here, as PEM."""
        self._update(self.folder.read(REVOKED))
        return self._newest_list.decode()

    def merge_revocations(self, revoked: Any) -> None:
        """Adopt another machine's revocation list if it is newer; KeysError if the authority did not sign it."""
        if not isinstance(revoked, str):
            raise KeysError("the other machine sent no list of revoked certificates")
        self._update(revoked.encode())
        with contextlib.suppress(OSError):  # a read-only folder: the list lasts as long as this process
            self.folder.update_revocations(revoked.encode())
        self._update(self.folder.read(REVOKED))  # another process may know a newer one

    def _update(self, data: bytes) -> None:
        number, serials = certs.read_revocation_list(data, self.folder.certificate())
        with self._lock:
            if number > self._number:
                self._newest_list, self._number, self._revoked = data, number, serials


class RankInfo(NamedTuple):
    """This rank, as it identifies itself to others. session: id of a start of the run, empty until rank 0 sends it."""

    credentials: Credentials
    rank: int
    world: int
    session: str


class SubflowId(NamedTuple):
    """One of the TCP connections between two ranks. secret: known to these two only; empty for the first, number 0."""

    number: int = 0
    secret: str = ""


FIRST_SUBFLOW = SubflowId()


class IncomingConnection(NamedTuple):
    """An authenticated connection that waits for `accept` or `reject`.

    rank: the connecting rank; for MEMBERS the lowest one in the machine's certificate. purpose: JOIN, PEER, RELAY,
    RESUME, REPORT or MEMBERS. to: for RELAY, the rank to be connected to. received: frames that the connecting rank
    has. reason: for REPORT. subflow: for RELAY, PEER and RESUME.
    """

    rank: int
    purpose: str
    to: int
    received: int
    stream: SecureStream
    reason: str = ""
    subflow: SubflowId = FIRST_SUBFLOW


class ConnectRequest(NamedTuple):
    """A request to connect to `rank`; the rest as in IncomingConnection."""

    purpose: str
    rank: int
    to: int = -1
    received: int = 0
    reason: str = ""
    subflow: SubflowId = FIRST_SUBFLOW


class ConnectReply(NamedTuple):
    """The listening end's reply. received: frames that it has."""

    session: str
    received: int


class ConnectionRejectedError(LinkError):
    """The other end belongs to the run and rejects this connection; the message holds its reason."""


class LargePacketsError(LinkError):
    """Small packets pass to the other end, and large ones do not. report: tells the other end, in small packets."""

    def __init__(self, message: str, report: Callable[[], None]) -> None:
        super().__init__(message)
        self.report = report


def request_connection(
    stream: SecureStream, peer: certs.MachineIdentity, own: RankInfo, request: ConnectRequest
) -> ConnectReply:
    """Send a request over a TLS stream and return the reply.

    Raises:
        KeysError: The other end is not the requested rank; NoAnswerError if it hung up or stays silent.
        ConnectionRejectedError: The other end rejects the request.
    """
    credentials = own.credentials
    credentials.check_peer(peer)
    credentials.check_rank(peer, request.rank)
    message: dict[str, Any] = {"version": VERSION, "rank": own.rank, "world": own.world, "session": own.session}
    message |= {"purpose": request.purpose, "to": request.to, "received": request.received}
    message["revoked"] = credentials.revocation_list
    if request.purpose in (JOIN, PEER):
        message["padding"] = _PADDING
    if request.subflow.number:
        message |= {"subflow": request.subflow.number, "secret": request.subflow.secret}
    if request.reason:
        message["reason"] = request.reason[:_REASON_CHARACTERS]
    try:
        stream.send_json(message)
        reply = stream.receive_json()
    except (OSError, EOFError) as error:
        raise handshake_error(error) from error
    if "error" in reply:
        raise ConnectionRejectedError(foreign_text(reply["error"]))
    if reply.get("rank") != request.rank:
        raise KeysError(f"it answers as rank {reply.get('rank')!r}, not as rank {request.rank}")
    credentials.merge_revocations(reply.get("revoked"))
    credentials.check_peer(peer)
    return ConnectReply(str(reply.get("session")), _frame_count(reply))


def receive_message(stream: SecureStream, peer: certs.MachineIdentity, credentials: Credentials) -> dict[str, Any]:
    """Receive the first message of a connection. Raises KeysError if the peer is of another run, or revoked."""
    message = stream.receive_json()
    credentials.check_peer(peer)
    credentials.merge_revocations(message.get("revoked"))
    credentials.check_peer(peer)  # once more: the peer's own list may revoke it
    return message


def receive_request(
    sock: socket.socket, own: RankInfo, purposes: tuple[str, ...], buffered: bytes = b""
) -> IncomingConnection:
    """Authenticate a connection and read its request; the caller then calls `accept` or `reject`.

    Args:
        sock: The accepted socket.
        own: This rank.
        purposes: The purposes that are served here.
        buffered: Bytes that were read from the socket already.

    Raises:
        PipecompError: The peer or its request is not allowed; the peer was sent the reason.
    """
    credentials = own.credentials
    stream, peer = credentials.secure(sock, server=True, buffered=buffered, within_s=HANDSHAKE_S)
    try:
        message = receive_message(stream, peer, credentials)
        if message.get("purpose") == MEMBERS and MEMBERS in purposes and message.get("version") == VERSION:
            return IncomingConnection(min(peer.ranks), MEMBERS, -1, 0, stream)
        rank = credentials.check_rank(peer, message.get("rank"))
        purpose, to, received = message.get("purpose"), message.get("to"), _frame_count(message)
        subflow = _subflow(message)
        version, world = message.get("version"), message.get("world")
        if version != VERSION:
            raise LinkError(
                f"rank {own.rank} uses frame format {VERSION}, rank {rank} uses {version!r}. Use one version"
            )
        if world != own.world or not 0 <= rank < own.world or rank == own.rank:
            remedy = "Start all with the same WORLD_SIZE, and each with its own RANK"
            raise LinkError(f"rank {rank} of {world!r} does not fit rank {own.rank} of {own.world}. {remedy}")
        if purpose not in purposes or not isinstance(to, int):
            raise LinkError(f"rank {own.rank} does not serve {purpose!r}")
        before_joining = purpose == JOIN or (purpose == REPORT and message.get("session") == "")
        if not before_joining and message.get("session") != own.session:
            raise LinkError(f"rank {rank} is of another start of this run")
        reason = foreign_text(message.get("reason", ""), _REASON_CHARACTERS)
        return IncomingConnection(rank, str(purpose), to, received, stream, reason, subflow)
    except PipecompError as error:
        reject(stream, str(error))
        raise


def accept(incoming: IncomingConnection, own: RankInfo, received: int = 0) -> None:
    """Accept a connection. received: number of its frames that have arrived here."""
    incoming.stream.deadline = time.monotonic() + _REPLY_S
    revoked = own.credentials.revocation_list
    reply = {"rank": own.rank, "session": own.session, "received": received, "revoked": revoked}
    if incoming.purpose in (JOIN, PEER):
        reply["padding"] = _PADDING
    incoming.stream.send_json(reply)


def reject(stream: SecureStream, reason: str) -> None:
    """Reject a connection with a reason."""
    stream.send_json({"error": reason})


def _frame_count(message: dict[str, Any]) -> int:
    count = message.get("received", 0)
    if type(count) is not int or count < 0:
        raise WireError(f"an invalid number of received frames: {count!r}")
    return count


def _subflow(message: dict[str, Any]) -> SubflowId:
    number, secret = message.get("subflow", 0), message.get("secret", "")
    if type(number) is not int or not 0 <= number < MAX_SUBFLOWS or not isinstance(secret, str):
        raise WireError(f"an invalid number of a stream: {foreign_text(number)}, allowed: 0 to {MAX_SUBFLOWS - 1}")
    return SubflowId(number, secret)
