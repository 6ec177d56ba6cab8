"""Connections between the machines of one run: who is at the other end, and may it be there?"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from typing import Any

from cryptography import x509

from pipecomp.errors import KeysError
from pipecomp.tls.certificates import Identity, identify, ranks_text, read_revoked, run_of
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
