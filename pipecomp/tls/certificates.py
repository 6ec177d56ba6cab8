"""X.509 certificates of a run: its authority, one certificate per machine, and the revocation list.

A certificate names its run, its machine and the ranks that may run there as URIs (`pipecomp:run/…`,
`pipecomp:machine/…`, `pipecomp:ranks/0,2-3`). Host names and addresses are not part of it, so machines may move.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pipecomp.errors import ConfigError, KeysError

MAX_RANK = 65535
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CLOCK_SKEW = datetime.timedelta(days=1)  # tolerated between machines: a wrong time zone is off by up to 14 hours
_MIN_VALIDITY = datetime.timedelta(hours=1)


class MachineIdentity(NamedTuple):
    """The contents of a machine's certificate. run: unique for its authority."""

    run: str
    machine: str
    ranks: tuple[int, ...]
    serial: int
    expires: datetime.datetime


def utc_now() -> datetime.datetime:
    """Return the current time in UTC."""
    return datetime.datetime.now(datetime.UTC)


def check_name(key: str, name: str) -> str:
    """Return `name` if a certificate can hold it; raise ConfigError for `key` otherwise."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(key, name, "letters, digits, '.', '_' and '-', at most 64, the first one a letter or a digit")
    return name


def parse_ranks(key: str, text: str) -> tuple[int, ...]:
    """Parse ranks such as "0,2-3" into a sorted tuple; raise ConfigError for `key`."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise ConfigError(key, text, "ranks and ranges of ranks, separated by commas, such as 0,2-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= MAX_RANK:
            raise ConfigError(key, text, f"ranks from 0 to {MAX_RANK}, the lower one of a range first")
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as the shortest text that `parse_ranks` reads back."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def generate_key() -> ec.EllipticCurvePrivateKey:
    """Generate a private key on P-256, the fastest curve in OpenSSL's handshakes."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Serialize a private key as unencrypted PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def to_pem(signed: x509.Certificate | x509.CertificateSigningRequest | x509.CertificateRevocationList) -> bytes:
    """Serialize a certificate, a request or a revocation list as PEM."""
    return signed.public_bytes(serialization.Encoding.PEM)


def fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a certificate in DER as hexadecimal digits."""
    return hashlib.sha256(der).hexdigest()


def create_authority(key: ec.EllipticCurvePrivateKey, run: str, days: int) -> x509.Certificate:
    """Create the self-signed certificate of a run's authority; it can sign machines but no further authorities."""
    name = _common_name(f"pipecomp run {run}")
    end = utc_now() + datetime.timedelta(days=days)
    return _sign(key, name, name, key.public_key(), end, {"run": run}, authority=True)


def sign_machine(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    public_key: ec.EllipticCurvePublicKey,
    machine: str,
    ranks: tuple[int, ...],
    *,
    days: int,
) -> x509.Certificate:
    """Sign a machine's certificate, valid for both ends of a connection and no longer than the authority's.

    Raises:
        KeysError: The authority's certificate expires within an hour.
    """
    end = min(utc_now() + datetime.timedelta(days=days), authority.not_valid_after_utc)
    if end - utc_now() < _MIN_VALIDITY:
        raise KeysError(f"the run's keys expire at {end:%Y-%m-%d %H:%M} UTC, in less than an hour. Make new keys")
    uris = {"run": authority_run(authority), "machine": machine, "ranks": format_ranks(ranks)}
    return _sign(authority_key, _common_name(machine), authority.subject, public_key, end, uris, authority=False)


def sign_revocation_list(
    authority: x509.Certificate, key: ec.EllipticCurvePrivateKey, serials: Iterable[int], number: int
) -> x509.CertificateRevocationList:
    """Sign the list of revoked certificates; of two lists, the one with the higher number is valid."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(utc_now() - _CLOCK_SKEW)
        .next_update(authority.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(utc_now()).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256())


def read_revocation_list(data: bytes, authority: x509.Certificate) -> tuple[int, frozenset[int]]:
    """Return the number and the serials of a revocation list in PEM; KeysError if `authority` did not sign it."""
    try:
        crl = x509.load_pem_x509_crl(data)
        number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        valid = crl.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise KeysError(f"the list of revoked certificates cannot be read: {error}") from error
    if not valid:
        raise KeysError("the list of revoked certificates is not signed by this run's authority")
    return number, frozenset(entry.serial_number for entry in crl)


def read_identity(certificate: x509.Certificate) -> MachineIdentity:
    """Read a machine's certificate; KeysError if `pipecomp keys` did not make it."""
    uris = _read_uris(certificate)
    if uris.keys() == {"run"}:  # an authority's own, which an invitation presents
        raise KeysError(
            f"an invitation of run {uris['run']} waits there for a machine to join. If it is meant for this machine, "
            "this machine's certificate was revoked. Remove its folder of keys, and join again"
        )
    try:
        run, machine, ranks = uris["run"], uris["machine"], parse_ranks("ranks", uris["ranks"])
    except (ConfigError, KeyError) as error:
        raise KeysError("the certificate names no run, machine and ranks: `pipecomp keys` did not make it") from error
    return MachineIdentity(run, machine, ranks, certificate.serial_number, certificate.not_valid_after_utc)


def authority_run(authority: x509.Certificate) -> str:
    """Return the name of the run that an authority belongs to; KeysError if it is no authority of pipecomp."""
    uris = _read_uris(authority)
    if uris.keys() != {"run"}:
        raise KeysError("the certificate is not the authority of a run")
    return uris["run"]


def check_signature(certificate: x509.Certificate, authority: x509.Certificate) -> None:
    """Raise KeysError unless `authority` signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise KeysError("the certificate is not signed by this run's authority") from error


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _read_uris(certificate: x509.Certificate) -> dict[str, str]:
    """The parts of pipecomp's URIs; empty if there are none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        return dict(uri.removeprefix("pipecomp:").split("/", 1) for uri in uris)
    except (ValueError, x509.ExtensionNotFound):
        return {}


def _sign(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    end: datetime.datetime,
    uris: dict[str, str],
    *,
    authority: bool,
) -> x509.Certificate:
    other_usages = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
    )
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=authority, crl_sign=authority, **dict.fromkeys(other_usages, False)
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc_now() - _CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
    )
    if not authority:
        both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both_ends), critical=True)
    names = [x509.UniformResourceIdentifier(f"pipecomp:{kind}/{value}") for kind, value in uris.items()]
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(key, hashes.SHA256())
