"""A folder of keys: private files that only their owner can read, in a folder that only their owner can open."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pipecomp.errors import KeysError
from pipecomp.tls.certificates import Identity, identify, now, read_revoked
from pipecomp.utils.files import UNFINISHED, replacing

AUTHORITY, AUTHORITY_KEY = "authority.pem", "authority.key"
MACHINE, MACHINE_KEY = "machine.pem", "machine.key"
REVOKED, ISSUED = "revoked.pem", "issued.json"
_WHERE = "`pipecomp keys new` makes one, `pipecomp keys join` gets one from a machine that has it"


class KeyFolder:
    """What one machine has of a run's keys. The machine that made them has the authority's private key, too."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def make(self) -> None:
        """Make the folder, which only its owner can open. KeysError if it has keys already, or cannot be made."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise KeysError(f"{self.path} is not empty: keys go into a folder of their own")
            self.path.chmod(0o700)
        except OSError as error:
            raise KeysError(f"{self.path} cannot hold keys: {error.strerror}") from error

    def file(self, name: str) -> str:
        """The path of one of the folder's files."""
        return str(self.path / name)

    def has(self, name: str) -> bool:
        """Whether the folder has that file."""
        return (self.path / name).exists()

    def write(self, name: str, data: bytes) -> None:
        """Write a file that only its owner can read, all of it or nothing, whoever else writes it at the same time."""
        handle, part = tempfile.mkstemp(prefix=f"{name}.", suffix=UNFINISHED, dir=self.path)  # 0600
        with replacing(self.path / name, part=Path(part)), open(handle, "wb") as file:
            file.write(data)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes and threads of this machine out that write what they have read and compared."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def read(self, name: str) -> bytes:
        """A file's content. KeysError if it is missing, or private and open to others."""
        path = self.path / name
        try:
            mode = path.stat().st_mode
            data = path.read_bytes()
        except OSError as error:
            raise KeysError(f"{path} cannot be read ({error.strerror}): {_WHERE}") from error
        if name.endswith(".key") and stat.S_IMODE(mode) & 0o077:
            raise KeysError(f"{path} is a private key that others may read: chmod 600 {path}")
        return data

    def certificate(self, name: str = AUTHORITY) -> x509.Certificate:
        """One of the folder's certificates. KeysError if it cannot be read."""
        try:
            return x509.load_pem_x509_certificate(self.read(name))
        except ValueError as error:
            raise KeysError(f"{self.path / name} is no certificate") from error

    def key(self, name: str) -> ec.EllipticCurvePrivateKey:
        """One of the folder's private keys. KeysError if it cannot be read."""
        try:
            found = serialization.load_pem_private_key(self.read(name), password=None)
        except (ValueError, TypeError) as error:
            raise KeysError(f"{self.path / name} is no private key") from error
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise KeysError(f"{self.path / name} is a private key of another kind than pipecomp makes")
        return found

    def identity(self) -> Identity:
        """Who this machine is. KeysError if its certificate has expired, is not valid yet, or is revoked."""
        certificate = self.certificate(MACHINE)
        mine = identify(certificate)
        if certificate.not_valid_before_utc > now():
            raise KeysError(
                f"the certificate in {self.path} is not valid before {_minute(certificate.not_valid_before_utc)} UTC, "
                f"and this machine's clock says {_minute(now())}: set the clock (timedatectl set-ntp true)"
            )
        if mine.expires < now():
            raise KeysError(
                f"the certificate in {self.path} expired at {_minute(mine.expires)} UTC (it is {_minute(now())}): "
                "invite this machine anew, or make new keys"
            )
        if mine.serial in self.revoked()[1]:
            raise KeysError(f"the certificate in {self.path}, of machine {mine.machine!r}, was revoked")
        return mine

    def revoked(self) -> tuple[int, frozenset[int]]:
        """The number of the newest list of revoked certificates that this machine knows, and their serials."""
        return read_revoked(self.read(REVOKED), self.certificate())

    def learn_revoked(self, data: bytes) -> None:
        """Take over a list of revoked certificates if it is newer. KeysError if the authority did not sign it."""
        number = read_revoked(data, self.certificate())[0]
        if number > self.revoked()[0]:
            with self.alone():
                if number > self.revoked()[0]:
                    self.write(REVOKED, data)

    def issued(self) -> list[dict[str, Any]]:
        """What the authority has signed, oldest first: machine, ranks (text), serial (text), expires, revoked."""
        try:
            found = json.loads(self.read(ISSUED))
        except ValueError as error:
            raise KeysError(f"{self.path / ISSUED} is damaged: {error}") from error
        return list(found)

    def write_issued(self, lines: list[dict[str, Any]]) -> None:
        """Keep what `issued` returns."""
        self.write(ISSUED, (json.dumps(lines, indent=2) + "\n").encode())


def _minute(time: Any) -> str:
    return f"{time:%Y-%m-%d %H:%M}"
