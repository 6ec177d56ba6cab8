"""Loss, jitter and the largest packet between two ranks: measured on ways with made-up faults, and what they mean."""

from __future__ import annotations

import heapq
import math
import queue
import socket
import threading
from collections.abc import Callable

import pytest
import torch

from pipecomp.distributed.launch_env import Launch
from pipecomp.distributed.placement import GlooDefault, Interface
from pipecomp.doctor import machine, measure
from pipecomp.doctor.finding import OK, WARNING
from pipecomp.doctor.measure import PacketPath, check_path, follow_path, lead_path, tcp_limit_bit_s
from tests.doctor.test_doctor import expect
from tests.limits import HANG_S


class Queues:
    """A peer in another thread."""

    def __init__(self, out: queue.Queue, into: queue.Queue) -> None:
        self.out, self.into = out, into

    def send(self, tensor: torch.Tensor) -> None:
        self.out.put(tensor)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.into.get(timeout=HANG_S)


def measured() -> PacketPath | None:
    """Return the leading rank's measurement, with a follower in a thread."""
    a, b = queue.Queue(), queue.Queue()
    follower = threading.Thread(target=follow_path, args=(Queues(a, b), "127.0.0.1"))
    follower.start()
    found = lead_path(Queues(b, a), "127.0.0.1")
    follower.join(HANG_S)
    assert not follower.is_alive()
    return found


class Way:
    """A UDP socket, and the modules `select` and `time` for who uses it: to wait takes no time here."""

    family = socket.AF_INET

    def __init__(self, takes: Callable[[bytes, int], float | None]) -> None:
        self._takes, self._sent, self._now = takes, 0, 0.0
        self._back: list[tuple[float, int, bytes]] = []

    def send(self, packet: bytes) -> None:
        takes_s = self._takes(packet, self._sent)
        if takes_s is not None:
            heapq.heappush(self._back, (self._now + takes_s, self._sent, packet))
        self._sent += 1

    def select(self, readers: list, writers: list, others: list, wait_s: float) -> tuple[list, list, list]:
        due = self._back[0][0] if self._back else math.inf
        until = self._now + wait_s
        self._now = max(self._now, min(due, until))
        return readers if due <= until else [], [], []

    def recv(self, size: int) -> bytes:
        return heapq.heappop(self._back)[2]

    def perf_counter(self) -> float:
        return self._now

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def setsockopt(self, *what: int) -> None:
        """No packet is cut up but as `takes` says."""


def over(monkeypatch, takes, mtu: int = 1500) -> PacketPath:
    """Measure a way where `takes(packet, number)` seconds pass until a packet is back, None if it is lost."""
    lo = Interface("lo", ("127.0.0.1",), True, mtu, 0)
    monkeypatch.setattr(measure, "list_interfaces", lambda: {"lo": lo})
    monkeypatch.setattr(measure, "select", way := Way(takes))
    monkeypatch.setattr(measure, "time", way)
    return measure._measure_path(way)


def size(packet: bytes) -> int:
    return len(packet) + 28


def whole(packet: bytes) -> bool:
    return packet.endswith(b"w")


def test_a_way_without_faults(monkeypatch):
    """Over real sockets, where nothing is late."""
    lo = Interface("lo", ("127.0.0.1",), True, 1500, 0)
    monkeypatch.setattr(measure, "list_interfaces", lambda: {"lo": lo})
    monkeypatch.setattr(measure, "_LATE_S", HANG_S)
    monkeypatch.setattr(measure, "_MOST_LATE_S", HANG_S)
    found = measured()
    assert found is not None
    assert (found.mtu, found.interface_mtu, found.cut) == (1500, 1500, None)
    assert (found.came, found.sent) == (100, 100)


def test_every_fifth_packet_is_lost(monkeypatch):
    found = over(monkeypatch, lambda packet, number: 0.01 if number % 5 else None)
    assert (found.came, found.sent) == (80, 100)
    assert found.mtu == 1500, "a lost packet must not look like one that is too large"


def test_packets_that_come_unevenly(monkeypatch):
    found = over(monkeypatch, lambda packet, number: 0.03 * (number % 2))
    assert found.jitter_s == pytest.approx(0.03)


@pytest.mark.parametrize(("limit", "mtu"), [(1420, 1420), (1430, 1420), (576, 576), (60, 0)])
def test_larger_packets_vanish(monkeypatch, limit, mtu):
    found = over(monkeypatch, lambda packet, number: 0.01 if size(packet) <= limit or len(packet) == 128 else None)
    assert (found.mtu, found.cut) == (mtu, False)


def test_larger_packets_are_cut_up(monkeypatch):
    found = over(
        monkeypatch, lambda packet, number: 0.01 if size(packet) <= 1400 or not whole(packet) else None, mtu=9000
    )
    assert (found.mtu, found.interface_mtu, found.cut) == (1400, 9000, True)


def test_nothing_comes_back(monkeypatch):
    found = over(monkeypatch, lambda packet, number: None)
    assert (found.came, found.mtu) == (0, 0)
    (finding,) = check_path((0, 1), found)
    expect(finding, OK, "UDP does not get through", "firewall")


def test_without_a_socket_nothing_is_known(monkeypatch):
    def refuse(address):
        raise OSError("no socket")

    monkeypatch.setattr(measure, "_open_udp", refuse)
    assert measured() is None


def test_what_it_costs():
    fine = PacketPath(100, 100, 0.02, 0.001, 1500, 1500, None)
    assert [f.verdict for f in check_path((0, 1), fine)] == [OK, OK]
    (loss, _) = check_path((0, 1), fine._replace(came=96))
    expect(loss, WARNING, "4 of 100 lost", "about 3.56 Mbit/s", "bbr")
    (jitter, _) = check_path((0, 1), fine._replace(jitter_s=0.05))
    expect(jitter, WARNING, "jitter 50 ms", "waits some 50 ms longer", "gradient_accumulation_steps")
    (_, cut) = check_path((0, 1), fine._replace(mtu=1400, cut=True))
    expect(cut, WARNING, "1400 bytes come through whole", "2 packets for one", "mtu 1400")
    (_, gone) = check_path((0, 1), fine._replace(mtu=1400, cut=False))
    expect(gone, WARNING, "larger ones vanish", "stand still", "mtu 1400")
    (_, none) = check_path((0, 1), fine._replace(mtu=0, cut=False))
    expect(none, WARNING, "no size that was tried", "mtu 576")
    (unknown,) = check_path((0, 1), None)
    expect(unknown, OK, "not known")


def test_tcp_over_lost_packets():
    assert tcp_limit_bit_s(1500, 0.1, 0.0) == float("inf")
    assert tcp_limit_bit_s(1500, 0.1, 0.01) == pytest.approx(8 * 1460 * 12.2 / 0.1)


TUNNELS = {
    "eth0": Interface("eth0", ("10.0.0.7",), True, 1500, 1000),
    "wg0": Interface("wg0", ("10.8.0.2",), True, 1420, 0),
}


def test_a_tunnel_that_fits_and_one_that_fragments():
    (fits,) = machine.check_tunnels(TUNNELS, ["wg0"], "eth0")
    expect(fits, OK, "MTU 1420 inside, 1500 on eth0")
    tight = {**TUNNELS, "wg0": TUNNELS["wg0"]._replace(mtu=1500)}
    (large,) = machine.check_tunnels(tight, ["wg0"], "eth0")
    expect(large, WARNING, "leaves in two pieces", "wg0 mtu 1420")
    dsl = {**TUNNELS, "eth0": TUNNELS["eth0"]._replace(mtu=1452)}
    expect(machine.check_tunnels(dsl, ["wg0"], "eth0")[0], WARNING, "wg0 mtu 1372")
    assert machine.check_tunnels(TUNNELS, ["wg0"], None) == []
    assert machine.check_tunnels(TUNNELS, ["wg0"], "wg0") == [], "what is around it is not known"


def test_tunnels_are_interfaces_without_a_cable(monkeypatch, tmp_path):
    for name, kind in (("eth0", "1"), ("wg0", "65534")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
    monkeypatch.setattr(machine, "Path", lambda first, *more: tmp_path.joinpath(*more))
    assert machine.list_tunnels(TUNNELS) == ["wg0"]


def test_a_host_name_that_is_127_0_1_1():
    two = Launch(rank=0, world=2, local_rank=0, local_world=1, master="10.0.0.1")
    found = machine.check_gloo(TUNNELS, None, None, GlooDefault("box", "127.0.1.1"), two)
    expect(found, WARNING, "box is 127.0.1.1", "a run with several fails at the start", "GLOO_SOCKET_IFNAME=eth0")
    expect(found, WARNING, "give box its own address in /etc/hosts, where it is 127.0.1.1")
    assert machine.check_gloo(TUNNELS, "eth0", None, GlooDefault("box", "127.0.1.1"), two).verdict == OK
    assert machine.check_gloo(TUNNELS, None, "eth0", GlooDefault("box", "127.0.1.1"), two).verdict == OK
