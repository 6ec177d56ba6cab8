"""Enrollment: a machine gets its certificate with a one-time code and the fingerprint of the run's authority.

The inviting machine listens and presents the authority's own certificate. The joining machine knows its SHA-256 from
the line that a person has pasted, so it detects a machine in the middle before it sends anything. It generates its
private key, which never leaves it, and sends a certificate request with an HMAC of it under the one-time code. Name and
ranks are the invitation's, whatever the request contains.

# Note: when a code is used up
The code is void after the invitation's time, or once the joining machine confirms that it has stored its certificate.
Until then a machine whose connection broke may ask again: the same request gets the same certificate, another request
revokes the one before. A certificate that nobody has confirmed is revoked when the invitation closes, so that name and
ranks are free again.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from pipecomp.errors import ConfigError, KeysError, PipecompError
from pipecomp.tls import certificates as certs
from pipecomp.tls import key_folder as keys
from pipecomp.tls.key_folder import AUTHORITY, AUTHORITY_KEY, DAYS, MACHINE, MACHINE_KEY, REVOKED, KeyFolder
from pipecomp.tls.listener import Address, Listener
from pipecomp.tls.stream import SecureStream, close_socket, explain_error, tls_context

MINUTES = 15.0
_CODE_BYTES = 10
_MAC_CONTEXT = b"pipecomp keys join 1\0"
_CONNECT_S, _JOIN_S = 10.0, 30.0  # for one wait, and for the whole exchange
_INVALID_CODE = "the code is wrong, or was used already"


class Invitation:
    """Admits one machine while open. A context manager.

    Args:
        path: The folder in which the run's keys were created.
        machine: The new machine's name.
        ranks: The ranks that may run there, such as "0,2-3"; None: the next one.
        listen: Address to listen at, HOST:PORT.
        days: Validity of the certificate.

    Raises:
        ConfigError: A name, the ranks, the days or the address are not allowed.
        KeysError: The name or a rank is taken, or the folder has no authority's key.
        LinkError: The address is not this machine's, or its port is in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        machine: str,
        *,
        ranks: str | None = None,
        listen: str = "0.0.0.0:29401",
        days: int = DAYS,
    ) -> None:
        keys.check_days(days)
        self._folder = folder = KeyFolder(path)
        folder.private_key(AUTHORITY_KEY)
        self._machine, self._days = certs.check_name("machine", machine), days
        self.ranks = (keys.next_rank(folder),) if ranks is None else certs.parse_ranks("ranks", ranks)
        keys.check_available(folder.issued(), machine, self.ranks)
        self.code = base64.b32encode(secrets.token_bytes(_CODE_BYTES)).decode()
        self.fingerprint = authority_fingerprint(folder)
        self._context = tls_context(server=True)
        self._context.verify_mode = ssl.CERT_NONE
        self._context.load_cert_chain(folder.path / AUTHORITY, folder.path / AUTHORITY_KEY)
        self._lock, self._joined = threading.Lock(), threading.Event()
        self._closed = False
        self._issued: tuple[bytes, str] | None = None  # the last request and its certificate
        self._listener = Listener(Address.parse(listen, "listen"), self._serve)
        self.address = self._listener.address

    def wait(self, minutes: float = MINUTES) -> bool:
        """Wait for the machine to join; return True if it has within `minutes`."""
        return self._joined.wait(60 * minutes)

    def close(self) -> None:
        """Void the code."""
        self._listener.close()
        with self._lock:
            self._closed = True  # connections that wait for the lock are rejected
            if not self._joined.is_set():
                self._revoke_issued()

    def __enter__(self) -> Invitation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, sock: socket.socket) -> None:
        stream = SecureStream(sock, self._context, server=True)
        stream.handshake()
        message = stream.receive_json()
        request = str(message.get("request", "")).encode()
        if not hmac.compare_digest(_mac(self.code, request, self.fingerprint), str(message.get("mac", ""))):
            stream.send_json({"error": _INVALID_CODE})  # without the lock, which the invited machine may hold
            return
        with self._lock:
            if self._joined.is_set() or self._closed:
                stream.send_json({"error": _INVALID_CODE})
                return
            try:
                if self._issued is None or self._issued[0] != request:
                    key = keys.request_public_key(request)
                    self._revoke_issued()
                    pem = keys.issue_certificate(self._folder, key, self._machine, self.ranks, days=self._days)
                    self._issued = request, pem.decode()
            except PipecompError as error:
                stream.send_json({"error": str(error)})
                return
            stream.send_json({"certificate": self._issued[1], "revoked": self._folder.read(REVOKED).decode()})
            if stream.receive_json().get("kept") is True:  # otherwise the machine may ask again
                self._joined.set()

    def _revoke_issued(self) -> None:
        if self._issued is not None:
            self._issued = None
            with contextlib.suppress(KeysError):  # revoked by hand meanwhile
                keys.revoke_machine(self._folder.path, self._machine)


def accept_invitation(path: str | os.PathLike[str], at: str, fingerprint: str, code: str) -> certs.MachineIdentity:
    """Get this machine's certificate from the machine that invites it.

    Args:
        path: A folder for the keys that is missing or empty.
        at: Address of the inviting machine, HOST:PORT.
        fingerprint: The authority's, as `pipecomp keys invite` prints it.
        code: The one-time code that `pipecomp keys invite` prints.

    Returns:
        The contents of the certificate.

    Raises:
        ConfigError: The address or the fingerprint is malformed.
        KeysError: Another machine listens there, the request is rejected, or the folder cannot hold keys. The code
            remains valid then, as long as the invitation is open.
    """
    address = Address.parse(at, "at")
    expected = normalize_fingerprint(fingerprint)
    folder, key = KeyFolder(path), certs.generate_key()
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    is_new, installed = not folder.path.exists(), []

    def install(authority: x509.Certificate, reply: dict[str, Any]) -> None:
        certificate = x509.load_pem_x509_certificate(str(reply.get("certificate")).encode())
        certs.check_signature(certificate, authority)
        if certificate.public_key() != key.public_key():
            raise KeysError(f"{address} sent a certificate for another key")
        installed.append(certs.read_identity(certificate))
        revoked = str(reply.get("revoked")).encode()
        certs.read_revocation_list(revoked, authority)
        folder.write(AUTHORITY, certs.to_pem(authority))
        folder.write(REVOKED, revoked)
        folder.write(MACHINE, certs.to_pem(certificate))  # last: completes the folder

    folder.create()
    try:
        folder.write(MACHINE_KEY, certs.key_to_pem(key))  # before the code is used: a full disk fails here
        _exchange(address, expected, code.strip().upper(), certs.to_pem(request), install)
    except BaseException as error:
        if not folder.has(MACHINE):
            with contextlib.suppress(OSError):  # leave the folder as it was
                for file in folder.path.iterdir():
                    file.unlink()
                if is_new:
                    folder.path.rmdir()
        if isinstance(error, OSError):
            raise KeysError(f"{path} cannot hold keys: {error.strerror or error}") from error
        raise
    return installed[0]


def authority_fingerprint(folder: KeyFolder) -> str:
    """Return the fingerprint of a folder's authority."""
    return certs.fingerprint(folder.certificate().public_bytes(serialization.Encoding.DER))


def normalize_fingerprint(text: str) -> str:
    """Return a fingerprint in the form of `authority_fingerprint`; ConfigError if it is malformed."""
    digits = text.replace(":", "").lower()
    if len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise ConfigError("fingerprint", text, "64 hexadecimal digits, as `pipecomp keys invite` prints them")
    return digits


def _exchange(
    address: Address,
    fingerprint: str,
    code: str,
    request: bytes,
    install: Callable[[x509.Certificate, dict[str, Any]], None],
) -> None:
    """Send the request, call `install` with the authority's certificate and the reply, and confirm."""
    context = tls_context(server=False)
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is compared instead, before anything is sent
    try:
        sock = socket.create_connection(address, _CONNECT_S)
    except OSError as error:
        cause = error.strerror or error
        raise KeysError(
            f"nothing answers at {address} ({cause}). Look whether `pipecomp up` or `pipecomp keys invite` still waits "
            f"on that machine, whether its address is {address.host} from here, and whether its firewall lets port "
            f"{address.port} in"
        ) from error
    try:
        stream = SecureStream(sock, context, server=False)
        stream.deadline = time.monotonic() + _JOIN_S
        try:
            stream.handshake()
            shown = stream.peer_certificate()
            if not hmac.compare_digest(certs.fingerprint(shown), fingerprint):
                raise KeysError(
                    f"another machine than the inviting one listens at {address}: its fingerprint is "
                    f"{certs.fingerprint(shown)}. Nothing was sent to it"
                )
            stream.send_json({"request": request.decode(), "mac": _mac(code, request, fingerprint)})
            reply = stream.receive_json()
        except (OSError, EOFError) as error:
            raise KeysError(f"{address}: {explain_error(error)}") from error
        if "error" in reply:
            raise KeysError(f"{address} rejects the request: {str(reply['error'])[:300]}")
        install(x509.load_der_x509_certificate(shown), reply)
        with contextlib.suppress(OSError, EOFError, PipecompError):  # the certificate is stored in any case
            stream.send_json({"kept": True})
            stream.receive_json()  # the inviting machine closes the connection once it has noted that
    finally:
        close_socket(sock)


def _mac(code: str, request: bytes, fingerprint: str) -> str:
    context = _MAC_CONTEXT + fingerprint.encode() + b"\0"
    return hmac.new(code.encode(), context + request, hashlib.sha256).hexdigest()
