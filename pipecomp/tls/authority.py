"""What the machine that made a run's keys can do: sign certificates for machines, revoke them, list them."""

from __future__ import annotations

import os
import secrets
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from pipecomp.errors import ConfigError, KeysError
from pipecomp.tls import certificates as made
from pipecomp.tls.key_folder import AUTHORITY, AUTHORITY_KEY, ISSUED, MACHINE, MACHINE_KEY, REVOKED, KeyFolder

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
