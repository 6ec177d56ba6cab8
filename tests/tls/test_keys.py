"""Keys of a run: what is in a certificate, who can read the files, who gets in, and what errors say."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from typer.testing import CliRunner

from pipecomp.cli import app
from pipecomp.errors import ConfigError, KeysError, LinkError
from pipecomp.tls import certificates, enrollment
from pipecomp.tls.certificates import format_ranks, parse_ranks
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import (
    DAYS,
    KeyFolder,
    create_keys,
    issue_certificate,
    list_machines,
    request_public_key,
    revoke_machine,
)
from pipecomp.tls.listener import ALL_INTERFACES, Address, Listener
from pipecomp.tls.stream import SecureStream
from tests.limits import HANG_S

LOCAL = "127.0.0.1:0"


def machine(authority: KeyFolder, path: Path, name: str, ranks: tuple[int, ...], days: int = 9) -> KeyFolder:
    """Another machine's folder, as `join` makes it."""
    folder, key = KeyFolder(path), certificates.generate_key()
    folder.create()
    folder.write("machine.key", certificates.key_to_pem(key))
    folder.write("machine.pem", issue_certificate(authority, key.public_key(), name, ranks, days=days))
    for file in ("authority.pem", "revoked.pem"):
        folder.write(file, authority.read(file))
    return folder


@pytest.fixture
def first(tmp_path):
    return create_keys(tmp_path / "first")


@pytest.fixture
def second(first, tmp_path):
    return machine(first, tmp_path / "second", "second", (1, 2))


def authenticate(server: Credentials, client: Credentials) -> list[object]:
    """Return each end's name of the other, or the error of that end; the server's first."""
    ends = socket.socketpair()
    found: list[object] = [None, None]

    def work(at: int, trust: Credentials) -> None:
        ends[at].settimeout(10)
        try:
            stream, found[at] = trust.secure(ends[at], server=at == 0)
            trust.check_peer(found[at])
            stream.send(b"x")  # a client learns only here that the server refused its certificate
            stream.receive_into(memoryview(bytearray(1)))
        except (KeysError, OSError, EOFError) as error:
            found[at] = error
            ends[at].close()

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((server, client))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()
    return found


@pytest.mark.parametrize(("text", "ranks"), [("0", (0,)), ("2,0-1", (0, 1, 2)), (" 7 , 3-4", (3, 4, 7))])
def test_ranks_as_text(text, ranks):
    assert parse_ranks("ranks", text) == ranks
    assert parse_ranks("ranks", format_ranks(ranks)) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "-1", "70000", "1;2"])
def test_what_is_no_ranks(text):
    with pytest.raises(ConfigError, match="ranks"):
        parse_ranks("ranks", text)


def test_private_files_are_the_owners_alone(first, second):
    for folder in (first, second):
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        for file in folder.path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    (second.path / "machine.key").chmod(0o640)
    with pytest.raises(KeysError, match=r"other users may read. Run: chmod 600"):
        Credentials(second)


def test_a_folder_that_was_there_is_its_owners_alone_from_then_on(tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o755)
    assert stat.S_IMODE(create_keys(tmp_path / "keys").path.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["", ".a", "a b", "a/ranks/0", "a\n", 65 * "a"])
def test_what_is_no_name_of_a_machine(tmp_path, name):
    """It stands in the certificate beside what that allows."""
    with pytest.raises(ConfigError, match="machine: got"):
        create_keys(tmp_path / "keys", machine=name)


def test_both_ends_know_machine_and_ranks_of_the_other(first, second):
    found = authenticate(Credentials(first), Credentials(second))
    assert (found[0].machine, found[0].ranks) == ("second", (1, 2))
    assert (found[1].machine, found[1].ranks) == ("first", (0,))
    assert found[0].run == found[1].run != "run"


def test_only_tls_1_3(first, second):
    for made in Credentials(first)._contexts.values():
        assert made.minimum_version.name == "TLSv1_3"


def test_a_machine_of_another_run_is_refused_at_both_ends(first, tmp_path):
    other = create_keys(tmp_path / "other")
    refused = authenticate(Credentials(first), Credentials(other))
    assert "of another run" in str(refused[1])
    assert isinstance(refused[0], Exception)
    assert "another run" in str(authenticate(Credentials(other), Credentials(first))[1])


def test_who_shows_no_certificate_is_refused(first):
    ends = socket.socketpair()
    anonymous = enrollment.tls_context(server=False)
    anonymous.load_verify_locations(first.path / "authority.pem")
    stream = SecureStream(ends[1], anonymous, server=False)
    thread = threading.Thread(target=lambda: contextlib.suppress(Exception) and stream.handshake())
    thread.start()
    with pytest.raises(KeysError, match=r"certificate|TLS"):
        Credentials(first).secure(ends[0], server=True)
    thread.join()


def test_a_revoked_machine_is_refused_once_its_peer_knows(first, second, tmp_path):
    third = machine(first, tmp_path / "third", "third", (3,))
    revoke_machine(first.path, "second")
    assert "was revoked" in str(authenticate(Credentials(first), Credentials(second))[0])
    at_third = Credentials(third)
    assert authenticate(at_third, Credentials(second))[0].machine == "second"  # the third does not know yet
    at_third.merge_revocations(Credentials(first).revocation_list)
    assert "machine 'second' was revoked" in str(authenticate(at_third, Credentials(second))[0])
    assert "was revoked" in str(authenticate(Credentials(third), Credentials(second))[0])  # it is kept
    second.update_revocations(first.read("revoked.pem"))
    with pytest.raises(KeysError, match="of machine 'second', was revoked"):
        Credentials(second)
    assert [line["revoked"] for line in list_machines(first.path)] == [False, True, False]
    with pytest.raises(KeysError, match="no machine 'second' to revoke; there are: first, third"):
        revoke_machine(first.path, "second")
    revoke_machine(first.path, "third")
    assert first.revocations()[1] == {
        Credentials(third).identity.serial,
        int(list_machines(first.path)[1]["serial"], 16),
    }, "both still"


def test_a_list_of_revoked_certificates_must_be_the_authoritys_and_newer(first, second, tmp_path):
    other = create_keys(tmp_path / "other", machine="second")
    revoke_machine(other.path, "second")
    with pytest.raises(KeysError, match="not signed by this run's authority"):
        second.update_revocations(other.read("revoked.pem"))
    old = first.read("revoked.pem")
    revoke_machine(first.path, "second")
    first.update_revocations(old)
    assert first.revocations()[0] == 2


def test_two_who_write_the_same_file_at_once(first, monkeypatch):
    both, sync = threading.Barrier(2, timeout=HANG_S), os.fsync

    def together(handle):
        sync(handle)
        both.wait()  # both have written their part, and none has moved it

    monkeypatch.setattr(os, "fsync", together)
    errors = []

    def write(data):
        try:
            first.write("revoked.pem", data)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in (b"one" * 9, b"two" * 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert first.read("revoked.pem") in (b"one" * 9, b"two" * 9)
    assert [file.name for file in first.path.iterdir() if file.name.endswith(".part")] == []


def test_a_newer_list_of_another_process_is_not_written_over(first, second, monkeypatch):
    lists = []
    for name in ("a", "b"):
        issue_certificate(first, certificates.generate_key().public_key(), name, (len(lists) + 5,))
        revoke_machine(first.path, name)
        lists.append(first.read("revoked.pem"))
    real, newer_is_done = KeyFolder.write, threading.Event()

    def write(folder, name, data):
        if data == lists[0]:
            newer_is_done.wait(0.5)  # between comparing and writing
        real(folder, name, data)

    monkeypatch.setattr(KeyFolder, "write", write)
    older = threading.Thread(target=lambda: second.update_revocations(lists[0]))
    older.start()
    time.sleep(0.1)
    KeyFolder(second.path).update_revocations(lists[1])
    newer_is_done.set()
    older.join()
    assert second.revocations()[0] == 3


def test_a_folder_that_cannot_be_written_does_not_keep_a_machine_from_learning(first, second, tmp_path, monkeypatch):
    third = Credentials(machine(first, tmp_path / "third", "third", (3,)))
    revoke_machine(first.path, "second")

    def refuse(folder, name, data):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(KeyFolder, "write", refuse)
    third.merge_revocations(Credentials(first).revocation_list)
    assert third.revocation_list == Credentials(first).revocation_list
    assert "machine 'second' was revoked" in str(authenticate(third, Credentials(second))[0])


def test_a_certificate_is_good_until_its_authoritys_end(tmp_path, monkeypatch):
    for days in (100, 1, 9):
        folder = create_keys(tmp_path / f"keys-{days}", days=days)
        Credentials(folder)
        assert folder.identity().expires == folder.certificate().not_valid_after_utc
    later = folder.certificate().not_valid_after_utc - datetime.timedelta(minutes=59)
    monkeypatch.setattr(certificates, "utc_now", lambda: later)
    with pytest.raises(KeysError, match=r"the run's keys expire at .* UTC, in less than an hour. Make new keys"):
        issue_certificate(folder, certificates.generate_key().public_key(), "second", (1,))
    monkeypatch.setattr(certificates, "utc_now", lambda: later - datetime.timedelta(minutes=2))
    issue_certificate(folder, certificates.generate_key().public_key(), "second", (1,))


@pytest.mark.parametrize(("days", "said"), [(100, "expired at"), (-100, "not valid before .*; set it")])
def test_this_machines_certificate_out_of_time(second, monkeypatch, days, said):
    later = certificates.utc_now() + datetime.timedelta(days=days)
    monkeypatch.setattr(certificates, "utc_now", lambda: later)
    with pytest.raises(KeysError, match=said):
        Credentials(second)


@pytest.mark.parametrize(("shift", "said"), [(-50, "expired"), (50, "not valid yet: the clock")])
def test_the_peers_certificate_out_of_time(first, tmp_path, monkeypatch, shift, said):
    then = certificates.utc_now() + datetime.timedelta(days=shift)
    monkeypatch.setattr(certificates, "utc_now", lambda: then)
    wrong = machine(first, tmp_path / "wrong", "wrong", (1,))
    monkeypatch.undo()
    monkeypatch.setattr(certificates, "utc_now", lambda: then)
    trust = Credentials(wrong)
    monkeypatch.undo()
    assert said in str(authenticate(Credentials(first), trust)[0])


@pytest.mark.parametrize("hours", [-14, 14])
def test_clocks_that_differ_by_hours_keep_nobody_out(tmp_path, monkeypatch, hours):
    """As where one machine has the time of its zone for that of Greenwich; the authority's is another one here."""
    then = certificates.utc_now() + datetime.timedelta(hours=hours)
    monkeypatch.setattr(certificates, "utc_now", lambda: then)
    first = create_keys(tmp_path / "first")
    second = machine(first, tmp_path / "second", "second", (1,))
    monkeypatch.undo()
    assert [who.machine for who in authenticate(Credentials(first), Credentials(second))] == ["second", "first"]


def test_a_rank_that_the_certificate_does_not_name(first, second):
    trust = Credentials(first)
    peer = authenticate(trust, Credentials(second))[0]
    assert trust.check_rank(peer, 2) == 2
    for rank in (0, 3, "1", True):
        with pytest.raises(KeysError, match=r"'second' claims rank .*; it may be 1-2"):
            trust.check_rank(peer, rank)


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)])
def test_a_request_with_a_key_of_another_kind(key):
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    with pytest.raises(KeysError, match=r"not on secp256r1|elliptic-curve"):
        request_public_key(certificates.to_pem(request.sign(key, certificates.hashes.SHA256())))


def test_a_request_for_somebody_elses_key():
    """Whoever has not got the private key cannot have signed it."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed = request.sign(certificates.generate_key(), certificates.hashes.SHA256())
    request_public_key(certificates.to_pem(signed))
    der, form = signed.public_bytes(serialization.Encoding.DER), serialization.PublicFormat.UncompressedPoint
    own, other = (
        key.public_key().public_bytes(serialization.Encoding.X962, form)
        for key in (signed, certificates.generate_key())
    )
    forged = x509.load_der_x509_csr(der.replace(own, other))
    with pytest.raises(KeysError, match="not signed by its key"):
        request_public_key(certificates.to_pem(forged))


def test_names_and_ranks_are_given_once(first, second):
    key = certificates.generate_key().public_key()
    with pytest.raises(KeysError, match="'second' already"):
        issue_certificate(first, key, "second", (5,))
    with pytest.raises(KeysError, match="'second' may run rank 2 already"):
        issue_certificate(first, key, "third", (2, 3))
    revoke_machine(first.path, "second")
    issue_certificate(first, key, "second", (1, 2))
    with pytest.raises(KeysError, match="not empty"):
        create_keys(first.path)


def test_two_machines_that_get_their_certificates_at_once_are_both_noted(first, monkeypatch):
    """As two invitations in two windows do: what the other has noted is not written over."""
    real, both = KeyFolder.issued, threading.Barrier(2)

    def read(folder):
        found = real(folder)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # the other, if it can, has read the same
        return found

    monkeypatch.setattr(KeyFolder, "issued", read)
    keys = [certificates.generate_key().public_key() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(issue_certificate, first, key, f"machine-{i}", (1 + i,)) for i, key in enumerate(keys)
        ]:
            done.result(HANG_S)
    monkeypatch.undo()
    assert sorted(line["machine"] for line in list_machines(first.path)) == ["first", "machine-0", "machine-1"]


class TestInvitation:
    def test_join(self, first, tmp_path):
        with enrollment.Invitation(first.path, "second", listen=LOCAL) as invited:
            where = str(invited.address)
            got = enrollment.accept_invitation(tmp_path / "second", where, invited.fingerprint, invited.code.lower())
            assert (got.machine, got.ranks) == ("second", (1,))
            assert invited.wait(0)
            with pytest.raises(KeysError, match="wrong, or was used"):
                enrollment.accept_invitation(tmp_path / "third", where, invited.fingerprint, invited.code)
        assert authenticate(Credentials(first), Credentials(KeyFolder(tmp_path / "second")))[0] == got
        assert not KeyFolder(tmp_path / "second").has("authority.key")
        with pytest.raises(KeysError, match="nothing answers"):
            enrollment.accept_invitation(tmp_path / "third", where, invited.fingerprint, invited.code)
        assert not (tmp_path / "third").exists()

    def test_a_wrong_code_gets_nothing_and_leaves_the_invitation_open(self, first, tmp_path):
        with enrollment.Invitation(first.path, "second", listen=LOCAL) as invited:
            with pytest.raises(KeysError, match="the code is wrong"):
                enrollment.accept_invitation(tmp_path / "a", str(invited.address), invited.fingerprint, "A" * 16)
            assert not invited.wait(0)
            enrollment.accept_invitation(tmp_path / "a", str(invited.address), invited.fingerprint, invited.code)

    def test_an_impostor_is_told_nothing(self, first, tmp_path):
        impostor = create_keys(tmp_path / "impostor")
        with (
            enrollment.Invitation(first.path, "second", listen=LOCAL) as invited,
            enrollment.Invitation(impostor.path, "second", listen=LOCAL) as trap,
        ):
            heard = []
            original = SecureStream.receive_json
            SecureStream.receive_json = lambda self: heard.append(original(self)) or heard[-1]
            try:
                with pytest.raises(KeysError, match="another machine than the inviting one listens"):
                    enrollment.accept_invitation(tmp_path / "a", str(trap.address), invited.fingerprint, invited.code)
            finally:
                SecureStream.receive_json = original
        assert heard == []

    def test_the_request_cannot_choose_name_or_ranks(self, first):
        key, got = certificates.generate_key(), []
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "first")])
        uri = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("pipecomp:ranks/0")])
        builder = x509.CertificateSigningRequestBuilder().subject_name(name).add_extension(uri, critical=False)
        request = certificates.to_pem(builder.sign(key, certificates.hashes.SHA256()))
        with enrollment.Invitation(first.path, "second", ranks="4", listen=LOCAL) as invited:
            ask = (invited.address, invited.fingerprint, invited.code, request)
            enrollment._exchange(*ask, lambda authority, answer: got.append(answer["certificate"].encode()))
        found = certificates.read_identity(x509.load_pem_x509_certificate(got[0]))
        assert (found.machine, found.ranks) == ("second", (4,))

    def test_a_folder_that_cannot_hold_keys_leaves_the_code_good(self, first, tmp_path, monkeypatch):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "notes.txt").write_text("mine")
        with enrollment.Invitation(first.path, "second", listen=LOCAL) as invited:
            ask = (str(invited.address), invited.fingerprint, invited.code)
            with pytest.raises(KeysError, match="not empty"):
                enrollment.accept_invitation(tmp_path / "full", *ask)
            real = KeyFolder.write

            def refuse(folder, name, data):
                if name == "machine.pem":
                    raise OSError(28, "No space left on device")
                real(folder, name, data)

            monkeypatch.setattr(KeyFolder, "write", lambda f, n, d: (real if f.path == first.path else refuse)(f, n, d))
            with pytest.raises(KeysError, match=r"second cannot hold keys: No space left on device"):
                enrollment.accept_invitation(tmp_path / "second", *ask)
            monkeypatch.undo()
            assert not (tmp_path / "second").exists()
            assert not invited.wait(0)
            got = enrollment.accept_invitation(tmp_path / "second", *ask)
            assert invited.wait(10)
        assert [line["revoked"] for line in list_machines(first.path)] == [False, True, False], (
            "what nobody kept is revoked"
        )
        assert authenticate(Credentials(first), Credentials(KeyFolder(tmp_path / "second")))[0] == got

    def test_what_nobody_has_kept_when_the_invitation_ends_is_taken_back(self, first, tmp_path):
        def lose(authority, answer):
            raise EOFError("the machine has crashed")

        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        request = certificates.to_pem(request.sign(certificates.generate_key(), certificates.hashes.SHA256()))
        with enrollment.Invitation(first.path, "second", listen=LOCAL) as invited:
            for _ in range(2):  # the same again gets the same
                with contextlib.suppress(EOFError):
                    enrollment._exchange(invited.address, invited.fingerprint, invited.code, request, lose)
            assert [line["revoked"] for line in list_machines(first.path)] == [False, False]
        assert [line["revoked"] for line in list_machines(first.path)] == [False, True]
        with enrollment.Invitation(first.path, "second", listen=LOCAL) as invited:
            got = enrollment.accept_invitation(tmp_path / "a", str(invited.address), invited.fingerprint, invited.code)
        assert got.ranks == (1,), "which nobody has"

    @pytest.mark.parametrize("days", [0, 3651])
    def test_days_that_no_certificate_is_good_for(self, first, days):
        with pytest.raises(ConfigError, match=f"days: got {days}, allowed: a number from 1 to 3650"):
            enrollment.Invitation(first.path, "second", listen=LOCAL, days=days)

    def test_its_certificate_is_good_for_the_days_of_the_invitation(self, first, tmp_path):
        with enrollment.Invitation(first.path, "second", listen=LOCAL, days=2) as invited:
            got = enrollment.accept_invitation(tmp_path / "a", str(invited.address), invited.fingerprint, invited.code)
        assert first.identity().expires - got.expires > datetime.timedelta(days=DAYS - 3)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [("key", "a certificate for another key"), ("authority", "not signed by this run"), ("list", "not signed by")],
    )
    def test_what_the_inviting_machine_sends_is_checked(self, first, tmp_path, monkeypatch, wrong, said):
        """Before any of it is kept: it may be a machine of an older pipecomp, or what was taken over."""
        other = create_keys(tmp_path / "other")

        def answer(address, fingerprint, code, request, keep):
            key = certificates.generate_key().public_key() if wrong == "key" else request_public_key(request)
            signed = issue_certificate(other if wrong == "authority" else first, key, "second", (1,)).decode()
            revoked = (other if wrong == "list" else first).read("revoked.pem").decode()
            keep(first.certificate(), {"certificate": signed, "revoked": revoked})

        monkeypatch.setattr(enrollment, "_exchange", answer)
        with pytest.raises(KeysError, match=said):
            enrollment.accept_invitation(tmp_path / "second", "127.0.0.1:1", "0" * 64, "A")
        assert not (tmp_path / "second").exists()

    def test_who_still_waits_when_an_invitation_ends_gets_nothing(self, first):
        """Its connection was taken before; behind another one, it is looked at after the end."""
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        request = certificates.to_pem(request.sign(certificates.generate_key(), certificates.hashes.SHA256()))
        invited = enrollment.Invitation(first.path, "second", listen=LOCAL)
        invited.close()
        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
            at = Address(*server.getsockname())
            asking = pool.submit(enrollment._exchange, at, invited.fingerprint, invited.code, request, lambda *_: None)
            sock, _ = server.accept()
            with sock:
                invited._serve(sock)
            with pytest.raises(KeysError, match="the code is wrong, or was used already"):
                asking.result(HANG_S)
        assert [line["machine"] for line in list_machines(first.path)] == ["first"]

    def test_only_the_machine_with_the_authoritys_key_invites(self, second):
        with pytest.raises(KeysError, match=r"authority.key cannot be read"):
            enrollment.Invitation(second.path, "third", listen=LOCAL)

    @pytest.mark.parametrize("text", ["here", "1.2.3.4", "1.2.3.4:x", ":1", "1.2.3.4:65536"])
    def test_what_is_no_address(self, text, tmp_path):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            enrollment.accept_invitation(tmp_path, text, "0" * 64, "A")


class TestListener:
    def test_idle_and_garbage_connections_keep_nobody_out(self, first, second):
        trust, inside = Credentials(first), threading.Event()

        def admit(sock):
            trust.secure(sock, server=True)
            return inside.set

        listener = Listener(Address.parse(LOCAL), admit)
        where = (listener.address.host, listener.address.port)
        strangers = [socket.create_connection(where) for _ in range(200)]
        try:
            for sock in strangers[::2]:
                with contextlib.suppress(OSError):
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
            sock = socket.create_connection(where)
            sock.settimeout(10)
            Credentials(second).secure(sock, server=False)
            assert inside.wait(10)
            sock.close()
            assert len(listener._pending) <= 65
        finally:
            for sock in strangers:
                sock.close()
            listener.close()

    def test_a_slow_handshake_is_ended(self, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.listener.PENDING_TIMEOUT_S", 0.3)
        ended = threading.Event()

        def admit(sock):
            with contextlib.suppress(OSError):
                while sock.recv(1):  # a byte now and then: no single wait is long
                    pass
            ended.set()

        listener = Listener(Address.parse(LOCAL), admit)
        with socket.create_connection((listener.address.host, listener.address.port)) as sock:
            for _ in range(1200):
                with contextlib.suppress(OSError):
                    sock.send(b"\x16")  # as TLS begins
                if ended.wait(0.05):
                    break
        assert ended.is_set()
        listener.close()

    def test_a_listener_goes_on_when_no_thread_can_be_had(self, monkeypatch):
        """As at the interpreter's end, or where the system gives no more of them."""
        inside, said = threading.Event(), []
        listener = Listener(
            Address.parse(LOCAL), lambda sock: inside.set, on_rejected=lambda who, error: said.append(str(error))
        )
        real = threading.Thread.start

        def start(thread):
            if thread.name == "pipecomp-admit" and not said:
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        for closed in (True, False):
            with socket.create_connection((listener.address.host, listener.address.port), HANG_S) as sock:
                sock.sendall(b"\x16")  # as TLS begins
                assert not closed or not sock.recv(1)
                assert closed or inside.wait(HANG_S)
        listener.close()
        assert said == ["can't start new thread"]

    def test_ipv6(self):
        try:
            listener = Listener(Address.parse("[::1]:0"), lambda sock: None)
        except LinkError:
            pytest.skip("no IPv6 on this machine")
        assert str(listener.address).startswith("[::1]:")
        socket.create_connection((listener.address.host, listener.address.port)).close()
        listener.close()

    @pytest.mark.parametrize("last", ["127.0.0.3", "192.0.2.1"])  # the other is not this machine's
    def test_a_name_is_listened_for_at_all_of_its_addresses(self, monkeypatch, last):
        real = socket.getaddrinfo
        found = lambda host, *args, **kwargs: [w for at in ("127.0.0.2", last) for w in real(at, *args, **kwargs)]  # noqa: E731
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *a, **k: (found if host == "node" else real)(host, *a, **k)
        )
        listener = Listener(Address("node", 0), lambda sock: None)
        for host in {"127.0.0.2", last} - {"192.0.2.1"}:
            socket.create_connection((host, listener.address.port)).close()
        listener.close()

    def test_everywhere(self):
        listener = Listener(Address(ALL_INTERFACES, 0), lambda sock: None)
        assert listener.address.is_wildcard
        for host in ("127.0.0.1", "127.0.1.1", *(["::1"] if len(listener._sockets) == 2 else [])):
            socket.create_connection((host, listener.address.port)).close()
        listener.close()

    def test_an_address_of_another_machine_is_named(self):
        with pytest.raises(LinkError, match=r"cannot listen at 192\.0\.2\.1:1"):
            Listener(Address.parse("192.0.2.1:1"), lambda sock: None)


def test_the_command_line(tmp_path):
    run = CliRunner()
    folder = str(tmp_path / "keys")
    done = run.invoke(app, ["keys", "new", folder, "--machine", "alpha", "--ranks", "0-1"])
    assert done.exit_code == 0, done.output
    found = tmp_path / "list.json"
    assert run.invoke(app, ["keys", "list", folder, "--json", str(found)]).exit_code == 0
    assert [(line["machine"], line["ranks"]) for line in json.loads(found.read_text())] == [("alpha", "0-1")]
    done = run.invoke(app, ["keys", "invite", folder, "beta", "--listen", LOCAL, "--minutes", "0.001"])
    assert done.exit_code == 1
    assert "pipecomp keys join FOLDER --at 127.0.0.1:" in done.output
    assert run.invoke(app, ["keys", "revoke", folder, "alpha"]).exit_code == 0
    done = run.invoke(app, ["keys", "revoke", folder, "alpha"])
    assert done.exit_code == 1
    assert "no machine 'alpha' to revoke" in done.output
