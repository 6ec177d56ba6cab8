"""A connection under TLS 1.3 whose two directions two threads may use at once.

OpenSSL's connection must not be read and written at the same moment, so it works on memory, under a lock that is held
for the microseconds of encrypting or decrypting; the socket is read and written outside of it.
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
_AT_ONCE = 1 << 15  # bytes, of those that are known to come, for which the thread that receives is woken
_RECORD = (1 << 14) + 256  # bytes of TLS that OpenSSL may hold back, because the rest of them is not there
_JSON_BYTES = 1 << 16  # of a message in a handshake
_LENGTH = struct.Struct("<I")
# What OpenSSL says about the peer's certificate, or the peer about ours. -> what that means to people.
_REASONS = {
    "CERTIFICATE_EXPIRED": "this machine's certificate has expired, or the other one's clock is wrong",
    "ALERT_UNKNOWN_CA": "this machine's keys are of another run than the other's",
    "ALERT_BAD_CERTIFICATE": "the other machine refuses this machine's certificate: is its clock right?",
    "CERTIFICATE_REQUIRED": "the other machine asks for a certificate, and this one showed none",
    "WRONG_VERSION_NUMBER": "what is there does not speak TLS",
    "HTTP_REQUEST": "what connected speaks HTTP",
    "UNSUPPORTED_PROTOCOL": "what is there does not speak TLS 1.3",
    "NO_SHARED_CIPHER": "what is there does not speak TLS 1.3",
}
_VERIFY = {
    9: "its certificate is not valid yet: the clock of that machine or of this one is wrong",
    10: "its certificate has expired, or this machine's clock is wrong",
    18: "it shows a certificate of no run",
    19: "its certificate is of another run",
    20: "its certificate is of another run",
    7: "its certificate is of another run",
}


def context(*, server: bool) -> ssl.SSLContext:
    """TLS 1.3 and nothing older. Host names are not looked at: certificates name machines and ranks."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.options |= ssl.OP_NO_TICKET
    if server:
        made.num_tickets = 0  # every connection shows certificates anew
    return made


class NoAnswerError(KeysError):
    """The other end hung up, or says nothing: who it is is not known, and it may be there later."""


def not_made(error: Exception) -> KeysError:
    """Why there is no connection: NoAnswerError where that says nothing about certificates."""
    hung_up = isinstance(error, (EOFError, ConnectionError, TimeoutError))
    return (NoAnswerError if hung_up else KeysError)(explain(error))


def explain(error: Exception) -> str:
    """Why a handshake failed, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _VERIFY.get(error.verify_code, f"its certificate is refused: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        return next((text for key, text in _REASONS.items() if key in reason), f"TLS failed ({reason or error})")
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, (EOFError, ConnectionError)):
        return "it closed the connection"
    return str(error)


class SecureStream:
    """One end of a connection; `handshake` first. One thread may send while another receives.

    sock: connected; its timeout is for every single wait. OSError (TimeoutError, ssl.SSLError) and EOFError are raised
    as they come.
    """

    def __init__(self, sock: socket.socket, made: ssl.SSLContext, *, server: bool, early: bytes = b"") -> None:
        """early: what was read from the socket already."""
        self.sock = sock
        self.on_wait: Callable[[], None] | None = None  # called when the socket's timeout is over, to go on waiting
        self.before_wait: Callable[[], None] | None = None  # called when nothing more is there to be received
        self.heard = time.monotonic()  # when something came last
        self.deadline = math.inf  # of monotonic, for a handshake: a byte now and then begins the socket's timeout anew
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = made.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._lock = threading.Lock()
        self._buffer = memoryview(bytearray(_CHUNK))
        self._least = 1  # the socket's SO_RCVLOWAT
        self._incoming.write(early)

    def handshake(self) -> None:
        """Agree on keys, and check certificates as the context says."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._push()
                self._pull()
            except ssl.SSLError:
                self._push()  # the alert that says why
                raise
            else:
                self._push()
                return

    def certificate(self) -> bytes:
        """The peer's, in DER. KeysError if it showed none."""
        found = self._tls.getpeercert(binary_form=True)
        if found is None:
            raise KeysError("the other machine shows no certificate")
        return found

    def send(self, *parts: Any) -> None:
        """Encrypt and send buffers; returns when the system has them."""
        with self._lock:
            for part in parts:
                if len(part):
                    self._tls.write(part)
            sealed = self._outgoing.read()
        self._write(sealed)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. EOFError if the connection ends before."""
        at = 0
        while at < len(view):
            try:
                with self._lock:
                    while at < len(view):
                        count = self._tls.read(len(view) - at, view[at:])  # one record at most
                        if not count:
                            raise EOFError
                        at += int(count)
            except ssl.SSLWantReadError:
                self._pull(len(view) - at)
            except ssl.SSLZeroReturnError as error:
                raise EOFError from error

    def send_json(self, value: Any) -> None:
        """Send a JSON value of at most 64 KiB, of a handshake."""
        text = json.dumps(value).encode()
        assert len(text) <= _JSON_BYTES, "a handshake's messages are short"
        self.send(_LENGTH.pack(len(text)) + text)

    def receive_json(self) -> dict[str, Any]:
        """The JSON object that `send_json` sent. WireError if it is none; nothing is allocated for one that is long."""
        length = bytearray(_LENGTH.size)
        self.receive_into(memoryview(length))
        (size,) = _LENGTH.unpack(length)
        if size > _JSON_BYTES:
            raise WireError(f"a message of a handshake has {size} bytes, allowed: {_JSON_BYTES}")
        text = bytearray(size)
        self.receive_into(memoryview(text))
        try:
            found = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise WireError("a message of a handshake is no JSON") from error
        if not isinstance(found, dict):
            raise WireError("a message of a handshake is no JSON object")
        return found

    def strip(self) -> bytes:
        """End TLS at both ends and keep the socket; returns what came on it behind TLS's end."""
        while True:
            try:
                self._tls.unwrap()
            except ssl.SSLWantReadError:
                self._push()
                self._pull()
            else:
                self._push()
                self._wake_for(1)
                return self._incoming.read()

    def close(self) -> None:
        """Close the socket, which ends the waits of both threads."""
        close(self.sock)

    def _push(self) -> None:
        self._write(self._outgoing.read())

    def _write(self, sealed: bytes) -> None:
        rest = memoryview(sealed)
        while rest:
            if time.monotonic() > self.deadline:
                raise TimeoutError
            try:
                rest = rest[self.sock.send(rest) :]
            except TimeoutError:
                self._keep_waiting()

    def _pull(self, coming: int = 1) -> None:
        """Receive what is there, or wait for it. coming: bytes, unsealed, that the other side sends in any case."""
        self._wake_for(max(1, min(coming - _RECORD, _AT_ONCE)))
        if self.before_wait is not None:
            self.before_wait()
        while True:
            try:
                count = self.sock.recv_into(self._buffer)
                break
            except TimeoutError:
                self._keep_waiting()
        if not count:
            raise EOFError
        self.heard = time.monotonic()
        if self.heard > self.deadline:
            raise TimeoutError
        with self._lock:
            self._incoming.write(self._buffer[:count])

    def _wake_for(self, least: int) -> None:
        """Let the system wake this thread when so many bytes are there: on a slow link not for every packet."""
        if self.sock.gettimeout() is None:
            least = 1  # a recv that blocks takes the few bytes that are there, and then sleeps until as many come again
        if least != self._least:
            self._least = least
            with contextlib.suppress(OSError):  # another system
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _keep_waiting(self) -> None:
        if self.on_wait is None:
            raise TimeoutError
        self.on_wait()


def close(sock: socket.socket) -> None:
    """Close a socket that another thread may be waiting on."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes it; closing alone does not
    sock.close()
