"""Ports where something else than rank 0 listens."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pipecomp.distributed import launch_env, rendezvous
from pipecomp.distributed.launch_env import Launch
from pipecomp.distributed.placement import free_port, loopback
from pipecomp.distributed.rendezvous import check_master_port
from pipecomp.doctor.ranks import RankSession, RendezvousError
from pipecomp.errors import ConfigError, LinkError, LinkTimeoutError, PeerLostError
from pipecomp.tls.key_folder import create_keys
from tests.limits import HANG_S


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the interface that is chosen here would be the next test's."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())


@contextmanager
def served(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """A port where every connection is handed to `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                held.append(connection)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


def http(connection: socket.socket) -> None:
    with suppress(OSError):  # the test has ended
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        connection.close()


@pytest.mark.parametrize("answer", [http, lambda connection: connection.close(), lambda connection: None])
def test_something_else_is_told(
    answer: Callable[[socket.socket], object], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 1.0)
    monkeypatch.setattr(rendezvous, "_END_S", 6.0)
    with served(answer) as port:
        with pytest.raises(LinkError, match=f"at 127.0.0.1 port {port} is not rank 0 of this run"):
            check_master_port("127.0.0.1", port, 1)
        assert capfd.readouterr().err == ""
    for thread in threading.enumerate():  # torch's client, which nobody has answered, says so when the server closes
        if thread.name == "pipecomp-store":
            thread.join(60)


def test_the_doctor_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 1.0)
    monkeypatch.delenv("PIPECOMP_KEYS", raising=False)
    with served(lambda connection: connection.close()) as port:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(RendezvousError, match=f"at 127.0.0.1 port {port} is not rank 0 of this run"):
            RankSession(Launch(rank=1, world=2), {}, limit_s=1.0)


def test_nothing_that_listens_yet_is_no_error() -> None:
    check_master_port("127.0.0.1", free_port(), 1)


def test_the_store_of_rank_0_is_none() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    check_master_port("127.0.0.1", store.port, 1)


def test_a_port_that_something_else_has_is_told_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(http) as port:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LinkError, match=f"^rank 0 cannot listen at port {port}: another program uses it"):
            rendezvous._meet(0, 2)


def free_later(sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a socket listen until the second attempt of a start after a loss: an earlier rank has it until then."""
    sock.listen()
    monkeypatch.setenv("PIPECOMP_RESTARTS", "1")
    monkeypatch.setattr(launch_env, "_LOOK_S", 0.01)
    monkeypatch.setattr(launch_env, "_EARLIER_S", HANG_S)
    passed = time.sleep

    def sleep(seconds: float) -> None:
        if seconds == launch_env._LOOK_S:
            sock.close()
        passed(seconds)

    monkeypatch.setattr(launch_env.time, "sleep", sleep)


def test_after_a_restart_the_port_of_an_earlier_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sock = socket.socket()
    sock.bind(("", 0))
    free_later(sock, monkeypatch)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(sock.getsockname()[1]))
    assert rendezvous.find_store(0, 1, wait_s=60.0).check(["a key"]) is False


def test_after_a_restart_the_port_of_an_earlier_rank_is_waited_for_over_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    create_keys(tmp_path, machine="first", ranks="0")
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    free_later(sock, monkeypatch)
    monkeypatch.setattr(rendezvous, "use_mesh", lambda mesh: None)
    monkeypatch.setenv("PIPECOMP_ADDRESS", f"127.0.0.1:{sock.getsockname()[1]}")
    rendezvous.join_mesh(str(tmp_path), 0, 1, wait_s=60.0).close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_ADDR", "", "MASTER_ADDR: got '', allowed: the name or address of rank 0's machine"),
        ("MASTER_PORT", "", "MASTER_PORT: got '', allowed: a port of rank 0's machine, from 1 to 65535"),
        ("MASTER_PORT", "first", "MASTER_PORT: got 'first'"),
        ("MASTER_PORT", "65536", "MASTER_PORT: got '65536'"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_meeting_point_is_told(
    monkeypatch: pytest.MonkeyPatch, rank: int, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        rendezvous.find_store(rank, 2, wait_s=1.0)


def test_whom_a_rank_waits_for_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with rendezvous.warn_if_slow("waits, but not for long"):
        pass
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(rendezvous, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT_S", 2.0)
    with pytest.raises(LinkTimeoutError, match="rank 1 did not find rank 0"):
        rendezvous._meet(1, 2)
    told = f"pipecomp: rank 1: waits for rank 0 at 127.0.0.1 port {port}, for up to 30 minutes. All need the same"
    assert told in capfd.readouterr().err


def test_a_rank_that_counts_other_ranks_than_rank_0_is_told() -> None:
    store = dist.HashStore()
    first = threading.Thread(target=rendezvous._fresh, args=(store, 0, 2), daemon=True)
    first.start()
    with pytest.raises(ConfigError, match="WORLD_SIZE: got 3, allowed: 2, as on rank 0"):
        rendezvous._fresh(store, 1, 3)
    first.join(60)


def test_a_store_that_is_gone_is_rank_0_lost() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, 2, timeout=timedelta(seconds=60))
    ended = threading.Timer(1.0, lambda: gone.clear())
    gone = [server]
    del server
    ended.start()
    with pytest.raises(PeerLostError, match=r"lost rank 0 at the start: .* key-value store, which it serves, is gone"):
        rendezvous._fresh(store, 1, 2)
    ended.join()


def test_a_store_that_is_silent_is_rank_0_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            answer.wait()

    answer = threading.Event()
    monkeypatch.setattr(rendezvous, "DEFAULT_TIMEOUT_S", 0.1)
    with pytest.raises(PeerLostError, match="does not answer"):
        rendezvous._fresh(Silent(), 1, 2)
    answer.set()
