"""Key folders: one machine's keys on disk, and the authority's operations on the folder that holds its key.

All files are readable by their owner only (0600, the folder 0700). Only the folder in which the run's keys were created
holds the authority's private key; whoever has that key can admit machines.
"""

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
from pipecomp.tls import certificates as certs
from pipecomp.utils.files import UNFINISHED, atomic_write

AUTHORITY, AUTHORITY_KEY = "authority.pem", "authority.key"
MACHINE, MACHINE_KEY = "machine.pem", "machine.key"
REVOKED, ISSUED = "revoked.pem", "issued.json"
DAYS, MAX_DAYS = 90, 3650
_MINUTE = "%Y-%m-%d %H:%M"


class KeyFolder:
    """One machine's keys of a run.

    Args:
        path: The folder. It need not exist until a method reads or writes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def create(self) -> None:
        """Create the folder, accessible by its owner only; KeysError if it is not empty or cannot be created."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise KeysError(f"{self.path} is not empty. Keys need a folder of their own")
            self.path.chmod(0o700)
        except OSError as error:
            raise KeysError(f"{self.path} cannot hold keys: {error.strerror}") from error

    def has(self, name: str) -> bool:
        """Return whether the folder holds the file."""
        return (self.path / name).exists()

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically, readable by its owner only; safe beside other writers of the same file."""
        handle, part = tempfile.mkstemp(prefix=f"{name}.", suffix=UNFINISHED, dir=self.path)  # mode 0600
        with atomic_write(self.path / name, part=Path(part)), open(handle, "wb") as file:
            file.write(data)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other processes and threads of this machine that read, compare and write."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def read(self, name: str) -> bytes:
        """Read a file; KeysError if it is missing, or a private key that other users may read."""
        path = self.path / name
        try:
            mode = path.stat().st_mode
            data = path.read_bytes()
        except OSError as error:
            remedy = "`pipecomp keys new` creates keys, `pipecomp keys join` gets them from a machine that has them"
            raise KeysError(f"{path} cannot be read ({error.strerror}). {remedy}") from error
        if name.endswith(".key") and stat.S_IMODE(mode) & 0o077:
            raise KeysError(f"{path} is a private key that other users may read. Run: chmod 600 {path}")
        return data

    def certificate(self, name: str = AUTHORITY) -> x509.Certificate:
        """Load one of the folder's certificates; KeysError if it cannot be read."""
        try:
            return x509.load_pem_x509_certificate(self.read(name))
        except ValueError as error:
            raise KeysError(f"{self.path / name} is not a certificate") from error

    def private_key(self, name: str) -> ec.EllipticCurvePrivateKey:
        """Load one of the folder's private keys; KeysError if it cannot be read."""
        try:
            key = serialization.load_pem_private_key(self.read(name), password=None)
        except (ValueError, TypeError) as error:
            raise KeysError(f"{self.path / name} is not a private key") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise KeysError(f"{self.path / name} is not an elliptic-curve private key")
        return key

    def identity(self) -> certs.MachineIdentity:
        """Return this machine's identity; KeysError if its certificate is expired, not yet valid, or revoked."""
        certificate = self.certificate(MACHINE)
        identity, now = certs.read_identity(certificate), certs.utc_now()
        begin, clock = f"{certificate.not_valid_before_utc:{_MINUTE}} UTC", f"{now:{_MINUTE}} UTC"
        if certificate.not_valid_before_utc > now:
            remedy = f"This machine's clock shows {clock}; set it (timedatectl set-ntp true)"
            raise KeysError(f"the certificate in {self.path} is not valid before {begin}. {remedy}")
        if identity.expires < now:
            remedy = f"It is {clock} now; invite this machine again, or make new keys"
            raise KeysError(f"the certificate in {self.path} expired at {identity.expires:{_MINUTE}} UTC. {remedy}")
        if identity.serial in self.revocations()[1]:
            raise KeysError(f"the certificate in {self.path}, of machine {identity.machine!r}, was revoked")
        return identity

    def revocations(self) -> tuple[int, frozenset[int]]:
        """Return number and serials of the newest revocation list that this machine knows."""
        return certs.read_revocation_list(self.read(REVOKED), self.certificate())

    def update_revocations(self, data: bytes) -> None:
        """Store a revocation list if it is newer than the folder's; KeysError if the authority did not sign it."""
        number = certs.read_revocation_list(data, self.certificate())[0]
        if number > self.revocations()[0]:
            with self.lock():
                if number > self.revocations()[0]:
                    self.write(REVOKED, data)

    def issued(self) -> list[dict[str, Any]]:
        """Read the log of issued certificates, oldest first: machine, ranks, serial, expires (text), revoked."""
        try:
            return list(json.loads(self.read(ISSUED)))
        except ValueError as error:
            raise KeysError(f"{self.path / ISSUED} is damaged: {error}") from error

    def write_issued(self, entries: list[dict[str, Any]]) -> None:
        """Write the log that `issued` reads."""
        self.write(ISSUED, (json.dumps(entries, indent=2) + "\n").encode())


# -- the authority's operations


def create_keys(
    path: str | os.PathLike[str], *, run: str = "run", machine: str = "first", ranks: str = "0", days: int = DAYS
) -> KeyFolder:
    """Create a run's authority and this machine's certificate.

    Args:
        path: A folder that is missing or empty.
        run: A readable name; a random part is appended, so that the name is unique.
        machine: A name for this machine.
        ranks: The ranks that may run here, such as "0,2-3".
        days: Validity of all certificates.

    Returns:
        The folder, which holds the authority's private key.

    Raises:
        ConfigError: A name, the ranks or the days are not allowed.
        KeysError: The folder is not empty.
    """
    check_days(days)
    name = f"{certs.check_name('run', run)[:50]}-{secrets.token_hex(6)}"
    certs.check_name("machine", machine)
    allowed = certs.parse_ranks("ranks", ranks)
    folder = KeyFolder(path)
    folder.create()
    authority_key, machine_key = certs.generate_key(), certs.generate_key()
    authority = certs.create_authority(authority_key, name, days)
    folder.write(AUTHORITY_KEY, certs.key_to_pem(authority_key))
    folder.write(AUTHORITY, certs.to_pem(authority))
    folder.write(REVOKED, certs.to_pem(certs.sign_revocation_list(authority, authority_key, (), 1)))
    folder.write_issued([])
    folder.write(MACHINE_KEY, certs.key_to_pem(machine_key))
    folder.write(MACHINE, issue_certificate(folder, machine_key.public_key(), machine, allowed, days=days))
    return folder


def issue_certificate(
    folder: KeyFolder, public_key: ec.EllipticCurvePublicKey, machine: str, ranks: tuple[int, ...], *, days: int = DAYS
) -> bytes:
    """Sign and log a machine's certificate, returned as PEM; KeysError if its name or one of its ranks is taken."""
    authority, key = folder.certificate(), folder.private_key(AUTHORITY_KEY)
    with folder.lock():  # another invitation may be open
        entries = folder.issued()
        check_available(entries, machine, ranks)
        signed = certs.sign_machine(authority, key, public_key, machine, ranks, days=days)
        folder.write_issued([*entries, _log_entry(certs.read_identity(signed), revoked=False)])
    return certs.to_pem(signed)


def check_available(entries: list[dict[str, Any]], machine: str, ranks: tuple[int, ...]) -> None:
    """Raise KeysError if a machine in the log that is not revoked has the name or one of the ranks."""
    for entry in entries:
        if entry["revoked"]:
            continue
        if entry["machine"] == machine:
            raise KeysError(f"there is a machine {machine!r} already. Use another name, or revoke it first")
        conflicts = set(certs.parse_ranks("ranks", entry["ranks"])) & set(ranks)
        if conflicts:
            ranks_text = certs.format_ranks(conflicts)
            raise KeysError(f"machine {entry['machine']!r} may run rank {ranks_text} already. Use others, or revoke it")


def next_rank(folder: KeyFolder) -> int:
    """Return the lowest rank above all ranks in use."""
    active = [entry for entry in folder.issued() if not entry["revoked"]]
    return max((rank for entry in active for rank in certs.parse_ranks("ranks", entry["ranks"])), default=-1) + 1


def revoke_machine(path: str | os.PathLike[str], machine: str) -> None:
    """Revoke a machine's certificate: ranks that know the new revocation list reject it.

    Ranks exchange their lists at the start of a run. The machine with this folder should therefore take part, or
    `revoked.pem` be copied to one that does.

    Args:
        path: The folder in which the keys were created.
        machine: The name that `pipecomp keys list` shows.

    Raises:
        KeysError: No such machine, or the folder has no authority's key.
    """
    folder = KeyFolder(path)
    key = folder.private_key(AUTHORITY_KEY)
    with folder.lock():
        entries = folder.issued()
        active = {entry["machine"]: entry for entry in entries if not entry["revoked"]}
        if machine not in active:
            raise KeysError(f"no machine {machine!r} to revoke; there are: {', '.join(active) or 'none'}")
        active[machine]["revoked"] = True
        serials = [int(entry["serial"], 16) for entry in entries if entry["revoked"]]
        number = folder.revocations()[0] + 1
        folder.write(REVOKED, certs.to_pem(certs.sign_revocation_list(folder.certificate(), key, serials, number)))
        folder.write_issued(entries)


def list_machines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """List the machines of a run.

    Args:
        path: A folder of keys.

    Returns:
        machine, ranks, serial, expires and revoked of each machine; without the authority's log, of this one only.
    """
    folder = KeyFolder(path)
    if folder.has(ISSUED):
        return folder.issued()
    identity = certs.read_identity(folder.certificate(MACHINE))
    return [_log_entry(identity, revoked=identity.serial in folder.revocations()[1])]


def request_public_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a signing request in PEM; its signature proves possession of the private key."""
    try:
        csr = x509.load_pem_x509_csr(request)
        key = csr.public_key()
    except ValueError as error:
        raise KeysError(f"the certificate request cannot be read: {error}") from error
    if not csr.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise KeysError("the certificate request is not signed by its key, or the key is not an elliptic-curve key")
    if key.curve.name != "secp256r1":
        raise KeysError(f"the certificate request has a key on {key.curve.name}, not on secp256r1")
    return key


def check_days(days: int) -> None:
    """Raise ConfigError unless a certificate can be valid for so many days."""
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError("days", days, f"a number from 1 to {MAX_DAYS}")


def _log_entry(identity: certs.MachineIdentity, *, revoked: bool) -> dict[str, Any]:
    return {
        "machine": identity.machine,
        "ranks": certs.format_ranks(identity.ranks),
        "serial": f"{identity.serial:x}",
        "expires": f"{identity.expires:{_MINUTE}}",
        "revoked": revoked,
    }
