"""A folder of keys: private files that only their owner can read, in a folder that only their owner can open."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pipecomp.errors import ConfigError, KeysError
from pipecomp.tls import certificates as made
from pipecomp.tls.certificates import Identity, identify, now, read_revoked
from pipecomp.utils.files import UNFINISHED, atomic_write

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
        with atomic_write(self.path / name, part=Path(part)), open(handle, "wb") as file:
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


DAYS, MAX_DAYS = 90, 3650


def new(
    path: str | os.PathLike[str], *, run: str = "run", machine: str = "first", ranks: str = "0", days: int = DAYS
) -> KeyFolder:
    """Make a run's keys and this machine's certificate.

    Args:
        path: A folder that is missing or empty.
        run: A name for people; a random part is added, so that no two runs have the same.
        machine: A name for this machine.
        ranks: That may run here, as in "0,2-3".
        days: Until everything expires.

    Returns:
        The folder, with the authority's private key: whoever has that can let machines in.

    Raises:
        ConfigError: For names, ranks or days that are not allowed.
        KeysError: If the folder has something in it already.
    """
    check_days(days)
    name = f"{made.check_name('run', run)[:50]}-{secrets.token_hex(6)}"
    made.check_name("machine", machine)
    allowed = made.parse_ranks("ranks", ranks)
    folder = KeyFolder(path)
    folder.make()
    key = made.new_key()
    authority = made.make_authority(key, name, days)
    folder.write(AUTHORITY_KEY, made.key_pem(key))
    folder.write(AUTHORITY, made.pem(authority))
    folder.write(REVOKED, made.pem(made.make_revoked(authority, key, (), 1)))
    folder.write_issued([])
    own = made.new_key()
    folder.write(MACHINE_KEY, made.key_pem(own))
    folder.write(MACHINE, issue(folder, own.public_key(), machine, allowed, days=days))
    return folder


def issue(
    folder: KeyFolder, public_key: ec.EllipticCurvePublicKey, machine: str, ranks: tuple[int, ...], *, days: int = DAYS
) -> bytes:
    """Sign a machine's certificate and note it; returns it as PEM. KeysError if the name or a rank is taken."""
    authority, key = folder.certificate(), folder.key(AUTHORITY_KEY)
    with folder.alone():  # another invitation may be open
        lines = folder.issued()
        check_free(lines, machine, ranks)
        signed = made.make_machine(authority, key, public_key, machine, ranks, days=days)
        lines.append(
            {
                "machine": machine,
                "ranks": made.ranks_text(ranks),
                "serial": f"{signed.serial_number:x}",
                "expires": f"{signed.not_valid_after_utc:%Y-%m-%d %H:%M}",
                "revoked": False,
            }
        )
        folder.write_issued(lines)
    return made.pem(signed)


def check_free(lines: list[dict[str, Any]], machine: str, ranks: tuple[int, ...]) -> None:
    """KeysError if another machine that is not revoked has the name or one of the ranks. lines: of `issued`."""
    for line in lines:
        if line["revoked"]:
            continue
        if line["machine"] == machine:
            raise KeysError(f"there is a machine {machine!r} already: take another name, or revoke it first")
        both = set(made.parse_ranks("ranks", line["ranks"])) & set(ranks)
        if both:
            raise KeysError(
                f"machine {line['machine']!r} may run rank {made.ranks_text(both)} already: take others, or revoke it"
            )


def next_rank(folder: KeyFolder) -> int:
    """The lowest rank above all that machines may run."""
    taken = [r for line in folder.issued() if not line["revoked"] for r in made.parse_ranks("ranks", line["ranks"])]
    return max(taken, default=-1) + 1


def revoke(path: str | os.PathLike[str], machine: str) -> None:
    """Take a machine's certificate back: ranks that know of it let it in no more.

    Ranks tell each other when a run starts, so the machine with this folder should be one of them, or `revoked.pem`
    be copied to one.

    Args:
        path: The folder in which the keys were made.
        machine: Its name, as `pipecomp keys list` shows it.

    Raises:
        KeysError: If there is no such machine, or the folder has no authority's key.
    """
    folder = KeyFolder(path)
    key = folder.key(AUTHORITY_KEY)
    with folder.alone():
        lines = folder.issued()
        found = [line for line in lines if line["machine"] == machine and not line["revoked"]]
        if not found:
            known = ", ".join(line["machine"] for line in lines if not line["revoked"])
            raise KeysError(f"no machine {machine!r} to revoke; there are: {known or 'none'}")
        found[0]["revoked"] = True
        serials = [int(line["serial"], 16) for line in lines if line["revoked"]]
        number = folder.revoked()[0] + 1
        folder.write(REVOKED, made.pem(made.make_revoked(folder.certificate(), key, serials, number)))
        folder.write_issued(lines)


def public_key_of(request: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a certificate signing request, PEM, which proves that its sender has the private one."""
    try:
        found = x509.load_pem_x509_csr(request)
        key = found.public_key()
    except ValueError as error:
        raise KeysError(f"the request for a certificate cannot be read: {error}") from error
    if not found.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise KeysError("the request for a certificate is not signed by its key, or of another kind than pipecomp's")
    if key.curve.name != "secp256r1":
        raise KeysError(f"the request for a certificate has a key on {key.curve.name}, not on secp256r1")
    return key


def check_days(days: int) -> None:
    """ConfigError for days that a certificate cannot be valid."""
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError("days", days, f"a number from 1 to {MAX_DAYS}")


def listed(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The machines of a run.

    Args:
        path: A folder of keys.

    Returns:
        machine, ranks, serial, expires, revoked of each; of this machine alone where the keys were not made.
    """
    folder = KeyFolder(path)
    if folder.has(ISSUED):
        return folder.issued()
    mine = made.identify(folder.certificate(MACHINE))
    return [
        {
            "machine": mine.machine,
            "ranks": made.ranks_text(mine.ranks),
            "serial": f"{mine.serial:x}",
            "expires": f"{mine.expires:%Y-%m-%d %H:%M}",
            "revoked": mine.serial in folder.revoked()[1],
        }
    ]
