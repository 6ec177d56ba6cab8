"""A TLS 1.3 stream over a socket; one thread may send while another receives.

# Note: why TLS works on memory
OpenSSL's connection must not be read and written at the same moment, and `ssl.SSLSocket` would hold its lock while it
waits for the network. Here OpenSSL encrypts and decrypts in memory (`ssl.MemoryBIO`) under a lock that is held for
microseconds. The socket is read and written outside the lock, so a thread that waits for data does not block sending.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from pipecomp.errors import KeysError, WireError

_CHUNK = 1 << 18
_MAX_LOWAT = 1 << 15  # bytes: upper bound of SO_RCVLOWAT
_RECORD = (1 << 14) + 256  # bytes of an incomplete TLS record that OpenSSL may hold back
_JSON_BYTES = 1 << 16  # upper bound of a handshake message
_LENGTH = struct.Struct("<I")
# OpenSSL's reason for a failed handshake, as a substring -> explanation
_REASONS = {
    "CERTIFICATE_EXPIRED": "this machine's certificate has expired, or the other machine's clock is wrong",
    "ALERT_UNKNOWN_CA": "this machine's keys are of another run than the other machine's",
    "ALERT_BAD_CERTIFICATE": "the other machine rejects this machine's certificate. Is its clock right?",
    "CERTIFICATE_REQUIRED": "the other machine requires a certificate, and this one presented none",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "HTTP_REQUEST": "it speaks HTTP",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "NO_SHARED_CIPHER": "it does not speak TLS 1.3",
}
_OTHER_RUN = "its certificate is of another run"
_VERIFY_ERRORS = {
    7: _OTHER_RUN,
    9: "its certificate is not valid yet: the clock of that machine or of this one is wrong",
    10: "its certificate has expired, or this machine's clock is wrong",
    18: "its certificate is self-signed and belongs to no run",
    19: _OTHER_RUN,
    20: _OTHER_RUN,
}


def tls_context(*, server: bool) -> ssl.SSLContext:
    """Create a context for TLS 1.3 with certificates at both ends; host names are not checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # certificates name machines and ranks
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    if server:
        context.num_tickets = 0  # no session resumption: every connection presents its certificate
    return context


class NoAnswerError(KeysError):
    """The other end closed the connection or stays silent; its identity is unknown, and a later attempt may succeed."""


def handshake_error(error: Exception) -> KeysError:
    """Return the error for a failed handshake: NoAnswerError if the cause is not a certificate."""
    no_answer = isinstance(error, (EOFError, ConnectionError, TimeoutError))
    return (NoAnswerError if no_answer else KeysError)(explain_error(error))


def explain_error(error: Exception) -> str:
    """Explain why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _VERIFY_ERRORS.get(error.verify_code, f"its certificate is rejected: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        return next((text for key, text in _REASONS.items() if key in reason), f"TLS failed ({reason or error})")
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, (EOFError, ConnectionError)):
        return "it closed the connection"
    return str(error)


class SecureStream:
    """One end of a TLS stream; call `handshake` first.

    OSError (TimeoutError, ssl.SSLError) and EOFError propagate.

    Args:
        sock: A connected socket. Its timeout bounds each wait.
        context: From `tls_context`.
        server: Whether this end accepted the connection.
        buffered: Bytes that were read from the socket already.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, buffered: bytes = b"") -> None:
        self.sock, self.server = sock, server
        self.on_timeout: Callable[[], None] | None = None  # called after each socket timeout; returns to keep waiting
        self.on_idle: Callable[[], None] | None = None  # called before waiting for more data
        self.last_received = time.monotonic()
        self.deadline = math.inf  # monotonic; bounds a handshake whose peer sends a byte now and then
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._lock = threading.Lock()
        self._buffer = memoryview(bytearray(_CHUNK))
        self._lowat = 1  # the socket's SO_RCVLOWAT
        self._incoming.write(buffered)

    def handshake(self) -> None:
        """Agree on keys and verify certificates as the context requires."""
        try:
            self._run(self._tls.do_handshake)
        except ssl.SSLError:
            self._write(self._outgoing.read())  # the alert carries the reason to the other end
            raise

    def peer_certificate(self) -> bytes:
        """Return the peer's certificate in DER; KeysError if it presented none."""
        certificate = self._tls.getpeercert(binary_form=True)
        if certificate is None:
            raise KeysError("the other machine presents no certificate")
        return certificate

    def send(self, *parts: Any) -> None:
        """Encrypt and send buffers; return when the kernel has accepted them."""
        with self._lock:
            for part in parts:
                if len(part):
                    self._tls.write(part)
            encrypted = self._outgoing.read()
        self._write(encrypted)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`; EOFError if the connection ends first."""
        at = 0
        while at < len(view):
            try:
                with self._lock:
                    while at < len(view):
                        count = self._tls.read(len(view) - at, view[at:])  # at most one record
                        if not count:
                            raise EOFError
                        at += int(count)
            except ssl.SSLWantReadError:
                self._read(len(view) - at)
            except ssl.SSLZeroReturnError as error:
                raise EOFError from error

    def send_json(self, value: Any) -> None:
        """Send a handshake message: a JSON value of at most 64 KiB."""
        text = json.dumps(value).encode()
        assert len(text) <= _JSON_BYTES, "handshake messages are short"
        self.send(_LENGTH.pack(len(text)) + text)

    def receive_json(self) -> dict[str, Any]:
        """Receive a handshake message; WireError if it is no JSON object, or too long, before memory is allocated."""
        length = bytearray(_LENGTH.size)
        self.receive_into(memoryview(length))
        (size,) = _LENGTH.unpack(length)
        if size > _JSON_BYTES:
            raise WireError(f"a handshake message has {size} bytes, allowed: {_JSON_BYTES}")
        text = bytearray(size)
        self.receive_into(memoryview(text))
        try:
            value = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise WireError("a handshake message is not JSON") from error
        if not isinstance(value, dict):
            raise WireError("a handshake message is not a JSON object")
        return value

    def unwrap(self) -> bytes:
        """End TLS at both ends and keep the socket; return the bytes that arrived after TLS's end."""
        self._run(self._tls.unwrap)
        self._set_lowat(1)
        return self._incoming.read()

    def close(self) -> None:
        """Close the socket, which ends the waits of both threads."""
        close_socket(self.sock)

    def _run(self, step: Callable[[], Any]) -> None:
        """Exchange bytes with the peer until an operation of OpenSSL completes."""
        while True:
            try:
                step()
            except ssl.SSLWantReadError:
                self._write(self._outgoing.read())
                self._read()
            else:
                self._write(self._outgoing.read())
                return

    def _write(self, encrypted: bytes) -> None:
        rest = memoryview(encrypted)
        while rest:
            if time.monotonic() > self.deadline:
                raise TimeoutError
            try:
                rest = rest[self.sock.send(rest) :]
            except TimeoutError:
                self._keep_waiting()

    def _read(self, expected: int = 1) -> None:
        """Receive what is available, or wait for it. expected: decrypted bytes that the peer is certain to send."""
        self._set_lowat(max(1, min(expected - _RECORD, _MAX_LOWAT)))
        if self.on_idle is not None:
            self.on_idle()
        while True:
            try:
                count = self.sock.recv_into(self._buffer)
                break
            except TimeoutError:
                self._keep_waiting()
        if not count:
            raise EOFError
        self.last_received = time.monotonic()
        if self.last_received > self.deadline:
            raise TimeoutError
        with self._lock:
            self._incoming.write(self._buffer[:count])

    def _set_lowat(self, least: int) -> None:
        """Have the kernel wake this thread once `least` bytes are available.

        # Note: SO_RCVLOWAT
        On a slow link every packet would wake the receiving thread, which then competes for the interpreter. The bound
        is one TLS record below the expected bytes, since OpenSSL holds an incomplete record back. A socket without a
        timeout is woken for every packet: its `recv` takes the few bytes that are there, then sleeps until `least`
        more have come, which may be more than is on its way.
        """
        if self.sock.gettimeout() is None:
            least = 1
        if least != self._lowat:
            self._lowat = least
            with contextlib.suppress(OSError):  # not supported by this system
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _keep_waiting(self) -> None:
        if self.on_timeout is None:
            raise TimeoutError
        self.on_timeout()


def close_socket(sock: socket.socket) -> None:
    """Close a socket that another thread may be waiting on."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes the other thread; close alone does not
    sock.close()
