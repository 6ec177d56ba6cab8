"""How another machine gets its certificate: a one-time code, and the fingerprint of the run's authority.

The inviting machine listens, and shows the authority's own certificate under TLS; the joining one knows its SHA-256
from the line that a person has pasted, so nobody can stand between them. It makes its private key itself, which never
leaves it, and sends a request for a certificate with an HMAC of it under the one-time code. Name and ranks are those of
the invitation, whatever the request says. The code is used up when the joining machine has said that it keeps its
certificate, and after `minutes`; one that nobody has kept is revoked.
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
from pipecomp.tls import certificates as made
from pipecomp.tls.key_folder import (
    AUTHORITY,
    AUTHORITY_KEY,
    DAYS,
    MACHINE,
    MACHINE_KEY,
    REVOKED,
    KeyFolder,
    check_days,
    check_free,
    issue,
    next_rank,
    public_key_of,
    revoke,
)
from pipecomp.tls.listener import Address, Listener
from pipecomp.tls.stream import SecureStream, close, context, explain

MINUTES = 15.0
_CODE_BYTES = 10
_CONTEXT = b"pipecomp keys join 1\0"
_CONNECT_S, _JOIN_S = 10.0, 30.0  # for each word of the inviting machine, and for all
_REFUSED = "the code is wrong, or was used already"


class Invitation:
    """One machine may join while this is open; use it as a context manager.

    Args:
        path: The folder in which the run's keys were made.
        machine: The new machine's name.
        ranks: That may run there, as in "0,2-3"; None: the next one.
        listen: Where to wait for it.
        days: Until its certificate expires.

    Raises:
        ConfigError: For names, ranks, days or an address that are not allowed.
        KeysError: If name or rank are taken, or the folder is not the authority's.
        LinkError: If the address is not this machine's, or its port in use.
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
        check_days(days)
        self._folder = folder = KeyFolder(path)
        folder.key(AUTHORITY_KEY)
        self._machine, self._days = made.check_name("machine", machine), days
        self.ranks = (next_rank(folder),) if ranks is None else made.parse_ranks("ranks", ranks)
        check_free(folder.issued(), machine, self.ranks)
        self.code = base64.b32encode(secrets.token_bytes(_CODE_BYTES)).decode()
        self.fingerprint = authority_print(folder)
        self._context = context(server=True)
        self._context.verify_mode = ssl.CERT_NONE
        self._context.load_cert_chain(folder.file(AUTHORITY), folder.file(AUTHORITY_KEY))
        self._lock, self._joined = threading.Lock(), threading.Event()
        self._over = False
        self._given: tuple[bytes, str] | None = None  # a request, and the certificate that was made for it
        self._listener = Listener(parse_address("listen", listen), self._admit)
        self.address = self._listener.address

    def wait(self, minutes: float = MINUTES) -> bool:
        """Whether the machine has joined, at once or before `minutes` are over."""
        return self._joined.wait(60 * minutes)

    def close(self) -> None:
        """The code is worth nothing from now on."""
        self._listener.close()
        with self._lock:
            self._over = True  # who waits for the lock gets nothing
            if not self._joined.is_set():
                self._take_back()

    def __enter__(self) -> Invitation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit(self, sock: socket.socket) -> None:
        stream = SecureStream(sock, self._context, server=True)
        stream.handshake()
        asked = stream.receive_json()
        request = str(asked.get("request", "")).encode()
        if not hmac.compare_digest(_mac(self.code, request, self.fingerprint), str(asked.get("mac", ""))):
            stream.send_json({"error": _REFUSED})
            return
        with self._lock:
            if self._joined.is_set() or self._over:
                stream.send_json({"error": _REFUSED})
                return
            try:
                certificate = self._certificate(request)
            except PipecompError as error:
                stream.send_json({"error": str(error)})
                return
            stream.send_json({"certificate": certificate, "revoked": self._folder.read(REVOKED).decode()})
            if stream.receive_json().get("kept") is True:  # else it may come again
                self._joined.set()

    def _certificate(self, request: bytes) -> str:
        """The certificate for a request, the same for the same one; one for another, which nobody kept, is revoked."""
        if self._given is None or self._given[0] != request:
            key = public_key_of(request)
            self._take_back()
            self._given = request, issue(self._folder, key, self._machine, self.ranks, days=self._days).decode()
        return self._given[1]

    def _take_back(self) -> None:
        """Revoke what was signed, so that name and ranks are free again."""
        if self._given is not None:
            self._given = None
            with contextlib.suppress(KeysError):  # somebody has revoked it
                revoke(self._folder.path, self._machine)


def join(path: str | os.PathLike[str], at: str, fingerprint: str, code: str) -> made.Identity:
    """Get this machine's certificate from the machine that invites it.

    Args:
        path: A folder for the keys that is missing or empty.
        at: Where the inviting machine waits, HOST:PORT.
        fingerprint: Of the run's authority, as `invite` printed it.
        code: As `invite` printed it.

    Returns:
        What the certificate says.

    Raises:
        ConfigError: For an address or a fingerprint that is none.
        KeysError: If what listens there is not the inviting machine, or refuses, or the folder cannot hold keys. While
            the invitation waits, its code is still good then.
    """
    address = parse_address("at", at)
    wanted = plain_fingerprint(fingerprint)
    folder, key = KeyFolder(path), made.new_key()
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    new, kept = not folder.path.exists(), []

    def keep(authority: x509.Certificate, answer: dict[str, Any]) -> None:
        certificate = x509.load_pem_x509_certificate(str(answer.get("certificate")).encode())
        made.check_signed(certificate, authority)
        if certificate.public_key() != key.public_key():
            raise KeysError(f"{address} sent a certificate for another key")
        kept.append(made.identify(certificate))
        revoked = str(answer.get("revoked")).encode()
        made.read_revoked(revoked, authority)
        folder.write(AUTHORITY, made.pem(authority))
        folder.write(REVOKED, revoked)
        folder.write(MACHINE, made.pem(certificate))  # with which the folder is complete

    folder.make()
    try:
        folder.write(MACHINE_KEY, made.key_pem(key))  # before the code is used: a disk that is full says so now
        _ask(address, wanted, code.strip().upper(), made.pem(request), keep)
    except BaseException as error:
        if not folder.has(MACHINE):
            _clear(folder, new)
        if isinstance(error, OSError):
            raise KeysError(f"{path} cannot hold keys: {error.strerror or error}") from error
        raise
    return kept[0]


def authority_print(folder: KeyFolder) -> str:
    """The fingerprint of a folder's authority."""
    return made.fingerprint(folder.certificate().public_bytes(serialization.Encoding.DER))


def plain_fingerprint(text: str) -> str:
    """A fingerprint as `authority_print` gives it. ConfigError if it is none."""
    found = text.replace(":", "").lower()
    if len(found) != 64 or set(found) - set("0123456789abcdef"):
        raise ConfigError("fingerprint", text, "64 hexadecimal digits, as `pipecomp keys invite` prints them")
    return found


def _clear(folder: KeyFolder, new: bool) -> None:
    """Leave a folder as it was before keys were put into it."""
    with contextlib.suppress(OSError):
        for file in folder.path.iterdir():
            file.unlink()
        if new:
            folder.path.rmdir()


def parse_address(key: str, text: str) -> Address:
    """HOST:PORT. ConfigError names `key`."""
    try:
        return Address.parse(text)
    except ValueError:
        raise ConfigError(key, text, "HOST:PORT, as in 192.0.2.1:29401 or [2001:db8::1]:29401") from None


def _ask(
    address: Address,
    fingerprint: str,
    code: str,
    request: bytes,
    keep: Callable[[x509.Certificate, dict[str, Any]], None],
) -> None:
    """Have `keep` called with the authority's certificate and the inviting machine's answer, which then hears of it."""
    pinned = context(server=False)
    pinned.verify_mode = ssl.CERT_NONE  # its fingerprint is compared, before anything is sent
    try:
        sock = socket.create_connection((address.host, address.port), _CONNECT_S)
    except OSError as error:
        raise KeysError(
            f"nothing answers at {address} ({error.strerror or error}): is `invite` still waiting?"
        ) from error
    try:
        stream = SecureStream(sock, pinned, server=False)
        stream.deadline = time.monotonic() + _JOIN_S
        stream.handshake()
        shown = stream.certificate()
        if not hmac.compare_digest(made.fingerprint(shown), fingerprint):
            raise KeysError(
                f"what listens at {address} is not the machine that invites: its fingerprint is "
                f"{made.fingerprint(shown)}. Nothing was sent to it"
            )
        stream.send_json({"request": request.decode(), "mac": _mac(code, request, fingerprint)})
        answer = stream.receive_json()
    except (OSError, EOFError) as error:
        close(sock)
        raise KeysError(f"{address}: {explain(error)}") from error
    except BaseException:
        close(sock)
        raise
    try:
        if "error" in answer:
            raise KeysError(f"{address} refuses: {str(answer['error'])[:300]}")
        keep(x509.load_der_x509_certificate(shown), answer)
        with contextlib.suppress(OSError, EOFError, PipecompError):  # whatever comes now, the certificate is kept
            stream.send_json({"kept": True})
            stream.receive_json()  # the other side closes the connection when it has noted that
    finally:
        close(sock)


def _mac(code: str, request: bytes, fingerprint: str) -> str:
    return hmac.new(code.encode(), _CONTEXT + fingerprint.encode() + b"\0" + request, hashlib.sha256).hexdigest()
