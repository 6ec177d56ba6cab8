"""Training over TLS on networks as people have them: routers, lost packets, outages, new addresses, WireGuard."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from pathlib import Path

import pytest

from pipecomp.codecs.wire import MAGIC
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.netlab import Lab, kernel
from pipecomp.netlab.namespaces import run_command
from pipecomp.tls.routes import DIRECT, RELAYED
from tests.dist.closed_work import TEXT, says_things, trains_closed
from tests.dist.lab_ranks import CLONE_NEWNET, WITH_FILTERS, run_in_lab
from tests.limits import HANG_S
from tests.tls.meshes import keys_for

STEPS, TIMEOUT_S = 4, 15.0  # of silence: a third of it, and a connection is made anew
OUTAGE_S = 8.0
_ALL = 3  # ETH_P_ALL
pytestmark = WITH_FILTERS


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys")
    keys_for(path, 3)
    return str(path)


@pytest.fixture(scope="module")
def expected():
    """Losses over gloo on this machine, by the number of stages."""
    return {
        world: run_ranks(world, trains_closed, None, STEPS, TIMEOUT_S, timeout_s=HANG_S)[world - 1]["losses"]
        for world in (2, 3)
    }


def run(lab: Lab, keys: str | None, once=None) -> dict:
    """once: for runs that it disturbs."""
    disturbed = None if once is None else str(once.done)
    return run_in_lab(lab, trains_closed, keys, STEPS, TIMEOUT_S, disturbed, timeout_s=HANG_S, on_note=once)


def test_all_ranks_but_the_first_are_behind_routers(keys, expected):
    with Lab(nodes=3, nat=True) as lab:
        found = run(lab, keys)
    assert found[2]["losses"] == expected[3]
    assert found[1]["routes"] == {0: DIRECT, 2: RELAYED}
    assert found[2]["routes"] == {0: DIRECT, 1: RELAYED}


def test_one_of_two_ranks_is_behind_a_router(keys, expected):
    with Lab(nodes=2, nat=True) as lab:
        found = run(lab, keys)
    assert found[1]["losses"] == expected[2]
    assert found[1]["routes"] == {0: DIRECT}


class Once:
    """Does something in the middle of a run, once; then something else some time later.

    done: the file that is there when it is done.
    """

    def __init__(self, folder: Path, first, then=lambda: None, later_s: float = 0.0) -> None:
        self._first, self._then, self._later_s = first, then, later_s
        self.done = folder / "done"

    def __call__(self, rank: int, step: int) -> None:
        if step == 1 and not self.done.exists():
            self._first()
            self.done.touch()
            if self._later_s:
                threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        time.sleep(self._later_s)
        self._then()


@pytest.mark.parametrize("nat", [False, True])
def test_an_outage(keys, expected, nat, tmp_path):
    """Rank 1's connections to rank 0 and, relayed behind routers, to rank 2 are lost."""
    with Lab(nodes=3, nat=nat) as lab:
        found = run(lab, keys, Once(tmp_path, lambda: lab.cut(1), lambda: lab.join(1), OUTAGE_S))
    assert found[2]["losses"] == expected[3]
    assert found[1]["healed"] > 0
    assert found[1]["lost_s"] > TIMEOUT_S / 3


@pytest.mark.parametrize("which", [1, 2])
def test_a_change_of_address(keys, expected, which, tmp_path):
    """Rank 1, which listens to rank 2's connection, or rank 2, which makes it, gets another address."""
    with Lab(nodes=3) as lab:

        def change() -> None:
            space = f"{lab.name}-n{which}"
            run_command(f"ip -n {space} addr del {lab.network.address(which)}/16 dev eth0")
            run_command(f"ip -n {space} addr add 198.18.1.9/16 dev eth0")

        found = run(lab, keys, Once(tmp_path, change))
    assert found[2]["losses"] == expected[3]
    assert found[which]["healed"] == 2
    assert found[which]["lost_s"] > TIMEOUT_S / 3


def test_lost_packets(keys, expected):
    with Lab(nodes=2, loss="2%") as lab:
        found = run(lab, keys)
    assert found[1]["losses"] == expected[2]


@pytest.mark.skipif((problem := kernel.missing_wireguard()) is not None, reason=f"no WireGuard here: {problem}")
@pytest.mark.parametrize("closed", [False, True], ids=["gloo", "tls"])
def test_wireguard(keys, expected, closed):
    with Lab(nodes=2, wireguard=True) as lab:
        found = run(lab, keys if closed else None)
    assert found[1]["losses"] == expected[2]
    assert found[1]["backend"] == ("tls" if closed else "gloo")


class Tap:
    """Records every packet of every interface of some namespaces."""

    def __init__(self, spaces: list[str]) -> None:
        self._over = threading.Event()
        self.packets: list[bytes] = []
        self._threads = [threading.Thread(target=self._record, args=(space,), daemon=True) for space in spaces]

    def _record(self, space: str) -> None:
        with Path("/run/netns", space).open() as file:  # of this thread alone
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as tap:
            tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
            tap.settimeout(0.1)
            while True:
                try:
                    self.packets.append(tap.recv(1 << 17))
                except TimeoutError:  # all that came is taken
                    if self._over.is_set():
                        return

    def __enter__(self) -> Tap:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("closed", [False, True], ids=["gloo", "tls"])
def test_a_capture_of_all_interfaces(keys, closed):
    """Over gloo it has what is looked for: packets' beginnings, activations, a text. Over TLS it has nothing."""
    with Lab(nodes=3) as lab:
        spaces = [f"{lab.name}-n{node}" for node in range(3)]
        with Tap(spaces) as tap:
            work = (says_things, keys if closed else None, 2, TIMEOUT_S)
            known = run_in_lab(lab, *work, timeout_s=HANG_S)
    known_bytes = {MAGIC, TEXT.encode()[:24]}.union(*map(set, known.values()))
    assert len(known_bytes) > 8
    assert sum(map(len, tap.packets)) > 100_000
    found = {what for what in known_bytes for packet in tap.packets if what in packet}
    if closed:
        assert not {what for what in found if len(what) > len(MAGIC)}
        assert sum(MAGIC in packet for packet in tap.packets) <= 1  # four bytes of ciphertext can be any
    else:
        assert len(found) > len(known_bytes) / 2  # a packet of the network may end anywhere
        assert {MAGIC, TEXT.encode()[:24]} <= found
