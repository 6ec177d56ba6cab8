"""The X.509 certificates of a run: an authority of its own, one certificate for each machine, a list of revoked ones.

A certificate names its machine and the ranks that may run there, as URIs (`pipecomp:run/…`, `pipecomp:machine/…`,
`pipecomp:ranks/0,2-3`); host names and addresses play no part, so that machines may move.
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

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAMES = "letters, digits, '.', '_' and '-', at most 64, not beginning with '.', '_' or '-'"
MAX_RANK = 65535
_EARLIER = datetime.timedelta(days=1)  # that clocks of two machines may differ: some have their time zone wrong
_SHORTEST = datetime.timedelta(hours=1)  # that a new certificate is good for
_URI = "pipecomp:{}/{}"


class Identity(NamedTuple):
    """What a certificate says. run: unique for its authority."""

    run: str
    machine: str
    ranks: tuple[int, ...]
    serial: int
    expires: datetime.datetime


def now() -> datetime.datetime:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def check_name(key: str, name: str) -> str:
    """`name`, if it can be in a certificate. ConfigError names `key`."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(key, name, _NAMES)
    return name


def parse_ranks(key: str, text: str) -> tuple[int, ...]:
    """Ranks as in "0,2-3", sorted. ConfigError names `key`."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise ConfigError(key, text, "ranks and ranges of them with commas, as in 0,2-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= MAX_RANK:
            raise ConfigError(key, text, f"ranks from 0 to {MAX_RANK}, the lower one of a range first")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def ranks_text(ranks: Iterable[int]) -> str:
    """The shortest text that `parse_ranks` reads as `ranks`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A private key on P-256, as fast in a handshake as keys get in OpenSSL."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as a file has it, unencrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem(signed: x509.Certificate | x509.CertificateSigningRequest | x509.CertificateRevocationList) -> bytes:
    """What files and messages hold of it."""
    return signed.public_bytes(serialization.Encoding.PEM)


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER, as hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


def make_authority(key: ec.EllipticCurvePrivateKey, run: str, days: int) -> x509.Certificate:
    """The certificate of a run's authority, signed by itself; it can sign machines, and no further authorities."""
    name = _name(f"pipecomp run {run}")
    usage = _usage(signs_certificates=True)
    return (
        _builder(name, name, key.public_key(), now() + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(_uris(run=run), critical=False)
        .sign(key, hashes.SHA256())
    )


def make_machine(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    public_key: ec.EllipticCurvePublicKey,
    machine: str,
    ranks: tuple[int, ...],
    *,
    days: int,
) -> x509.Certificate:
    """A machine's certificate, for both ends of a connection; it ends with the authority's at the latest.

    KeysError if that is about to be.
    """
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    end = min(now() + datetime.timedelta(days=days), authority.not_valid_after_utc)
    if end - now() < _SHORTEST:
        raise KeysError(f"the run's keys expire at {end:%Y-%m-%d %H:%M} UTC, in less than an hour: make new keys")
    run = run_of(authority)
    return (
        _builder(_name(machine), authority.subject, public_key, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(both, critical=True)
        .add_extension(_uris(run=run, machine=machine, ranks=ranks_text(ranks)), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def make_revoked(
    authority: x509.Certificate, key: ec.EllipticCurvePrivateKey, serials: Iterable[int], number: int
) -> x509.CertificateRevocationList:
    """The signed list of revoked certificates; of two lists, the one with the higher number counts."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now() - _EARLIER)
        .next_update(authority.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now()).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256())


def read_revoked(data: bytes, authority: x509.Certificate) -> tuple[int, frozenset[int]]:
    """Number and serials of a list of revoked certificates. KeysError if `authority` did not sign it."""
    try:
        found = x509.load_pem_x509_crl(data)
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        valid = found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise KeysError(f"the list of revoked certificates cannot be read: {error}") from error
    if not valid:
        raise KeysError("the list of revoked certificates is not signed by this run's authority")
    return number, frozenset(entry.serial_number for entry in found)


def identify(certificate: x509.Certificate) -> Identity:
    """What a machine's certificate says. KeysError if it is no certificate of pipecomp's."""
    said: dict[str, str] = {}
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        said = dict(
            uri.removeprefix("pipecomp:").split("/", 1)
            for uri in names.get_values_for_type(x509.UniformResourceIdentifier)
        )
        ranks = parse_ranks("ranks", said["ranks"])
        return Identity(said["run"], said["machine"], ranks, certificate.serial_number, certificate.not_valid_after_utc)
    except (ValueError, KeyError, x509.ExtensionNotFound) as error:
        if said.keys() == {"run"}:  # an authority's
            raise KeysError(
                f"an invitation of run {said['run']} waits there for a machine to join. If that is this one, its own "
                "certificate was revoked: remove its folder of keys, and join anew"
            ) from error
        raise KeysError(
            "this certificate was not made by `pipecomp keys`: it names no run, machine and ranks"
        ) from error


def run_of(authority: x509.Certificate) -> str:
    """The run that an authority was made for. KeysError if it is none of pipecomp's."""
    try:
        names = authority.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise KeysError("this certificate is no run's authority") from error
    return str(uri).removeprefix("pipecomp:run/")


def check_signed(certificate: x509.Certificate, authority: x509.Certificate) -> None:
    """KeysError if `authority` did not sign it."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise KeysError("the certificate is not signed by this run's authority") from error


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _uris(**said: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName(
        [x509.UniformResourceIdentifier(_URI.format(kind, value)) for kind, value in said.items()]
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _EARLIER)
        .not_valid_after(end)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
