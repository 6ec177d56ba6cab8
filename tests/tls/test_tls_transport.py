"""A link over a mesh: what every transport promises, its limit, and both ends of AQ-SGD on top."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from pipecomp.buffers import MemoryStore
from pipecomp.codecs import wire
from pipecomp.codecs.codecs import encoded
from pipecomp.config import Config
from pipecomp.errors import LinkError, PeerLostError, WireError
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.handshake import reconcile_stores
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.packet import EVALUATED, PacketLimits
from pipecomp.stages.link.tls import TlsTransport, bytes_on_wire
from tests.tls.meshes import close_all, keys_for, meet_all, together

B, S, H = 3, 8, 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return keys_for(tmp_path_factory.mktemp("keys"), 2)


@pytest.fixture
def meshes(folders):
    made = meet_all(folders)
    yield made
    close_all(made)


@pytest.fixture
def ends(meshes):
    return [TlsTransport(mesh, 1 - mesh.rank, timeout_s=30.0) for mesh in meshes]


def packet(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_packets_come_in_order_both_ways(ends):
    sent = [packet(size, i) for i, size in enumerate((1, 0, 5000, 700_000, 3))]
    moved: list = []
    arrived: list = []
    ends[0].on_transfer = lambda *what: moved.append(what)
    ends[1].on_arrival = arrived.append
    for p in sent:
        ends[0].send(p)
        ends[1].send(p)
    for end in ends:
        for p in sent:
            assert np.array_equal(end.recv(), p)
        end.close()
    assert [p.size for p in arrived] == [p.size for p in sent]
    assert {what[0] for what in moved} == {"send", "receive"}


def test_several_links_of_two_ranks_are_apart(meshes):
    links = [[TlsTransport(mesh, 1 - mesh.rank, timeout_s=30.0) for _ in range(2)] for mesh in meshes]
    links[0][1].send(packet(9, 1))
    links[0][0].send(packet(9, 0))
    assert np.array_equal(links[1][0].recv(), packet(9, 0))
    assert np.array_equal(links[1][1].recv(), packet(9, 1))


@pytest.mark.parametrize("size", [10, 500_000])
def test_what_is_sent_before_the_other_end_is_made_waits(meshes, size):
    first = TlsTransport(meshes[0], 1, timeout_s=30.0)
    first.send(packet(size))
    meshes[0].connections[1].send(1, 0, memoryview(b"later")).wait(30)
    meshes[1].connections[0].receive(1, 0, memoryview(bytearray(5))).wait(30)
    second = TlsTransport(meshes[1], 0, timeout_s=30.0)
    assert np.array_equal(second.recv(), packet(size))


def test_a_packet_above_the_limit(ends):
    ends[1].limit(1000)
    ends[0].send(packet(1000))
    assert ends[1].recv().size == 1000
    ends[0].send(packet(1001))
    with pytest.raises(WireError, match="rank 0 sent a packet of 1001 bytes, allowed: 1000"):
        ends[1].recv()


def test_packets_that_nobody_takes_wait_where_they_are_sent(meshes, monkeypatch):
    """A stage that runs far ahead, as in evaluation, fills no memory but its own."""
    monkeypatch.setattr("pipecomp.tls.receive_queue.ROOM_BYTES", 10_000)
    first, second = (TlsTransport(mesh, 1 - mesh.rank, timeout_s=30.0) for mesh in meshes)
    sent = [packet(size, i) for i, size in enumerate([2_000] * 10 + [0] * 100 + [300_000] + [2_000] * 10)]
    for p in sent:
        first.send(p)
    meshes[0].connections[1].send(1, 0, memoryview(b"later")).wait(30)  # packets do not keep others waiting
    meshes[1].connections[0].receive(1, 0, memoryview(bytearray(5))).wait(30)
    assert second._inbox.qsize() <= 5
    assert first.sending()
    monkeypatch.setattr("pipecomp.stages.link.transport.ROOM_BYTES", 10_000)
    room = threading.Thread(target=first.wait_for_room)
    room.start()
    room.join(0.05)
    assert room.is_alive()
    waiting = []
    for p in sent:
        assert np.array_equal(second.recv(), p)
        waiting.append(second._inbox.qsize())
    assert max(waiting) <= 10_000 // 256 + 1
    room.join(30)
    assert not room.is_alive()
    first.close()
    assert not first.sending()


@pytest.mark.parametrize("letter", ["ü", "😀"])  # up to 12 bytes each
def test_a_failure_is_told_with_its_rank_and_all_of_its_characters(ends, letter):
    ends[0].abort(7, letter * 5000)
    with pytest.raises(PeerLostError, match=rf"^{letter}{{1000}} \(told by rank 0\)$") as raised:
        ends[1].recv()
    assert raised.value.rank == 7
    assert ends[1].failure(1.0) is raised.value
    with pytest.raises(PeerLostError):
        ends[1].send(packet(1))


def test_an_orderly_end(ends):
    ends[0].send(packet(5))
    ends[0].close()
    ends[0].close()
    assert ends[1].recv().size == 5
    with pytest.raises(PeerLostError, match="rank 0 has ended its run"):
        ends[1].recv()
    with pytest.raises(LinkError, match="is closed"):
        ends[0].send(packet(1))


def test_an_error_of_who_looks_at_arrivals_is_told(ends):
    def look(_):
        raise ValueError("cannot")

    ends[1].on_arrival = look
    ends[0].send(packet(5))
    with pytest.raises(ValueError, match="cannot"):
        ends[1].recv()


def test_a_pacer_holds_all_bytes_back(meshes):
    held: list[int] = []

    class Pacer:
        def hold(self, size: int, ready: float) -> None:
            held.append(size)

    first = TlsTransport(meshes[0], 1, timeout_s=30.0, pacer=Pacer())
    second = TlsTransport(meshes[1], 0, timeout_s=30.0)
    for i in range(3):
        first.send(packet(600_000, i))
    for i in range(3):
        assert np.array_equal(second.recv(), packet(600_000, i))
    assert sum(held) == pytest.approx(3 * bytes_on_wire(600_000), rel=1e-3)
    assert len(held) == 6


class Slow:
    """A pacer with which packets take longer than an end without movement may."""

    def __init__(self, hold_s: float) -> None:
        self.held, self._hold_s = threading.Semaphore(0), hold_s

    def hold(self, size: int, ready: float) -> None:
        self.held.release()
        time.sleep(self._hold_s)


def test_packets_that_wait_when_a_link_is_closed_arrive(meshes, monkeypatch):
    monkeypatch.setattr("pipecomp.tls.connection._CLOSE_S", 0.3)
    first = TlsTransport(meshes[0], 1, timeout_s=30.0, pacer=Slow(0.2))
    second = TlsTransport(meshes[1], 0, timeout_s=30.0)
    monkeypatch.setattr(type(meshes[0].connections[1]), "timeout_s", 1.5)  # less than all take, and far more than one
    for i in range(10):
        first.send(packet(1000, i))
    first.close()
    for i in range(10):
        assert np.array_equal(second.recv(), packet(1000, i))


@pytest.mark.parametrize("aborted", [False, True])
def test_a_link_where_nothing_moves_is_closed(meshes, monkeypatch, aborted):
    monkeypatch.setattr("pipecomp.tls.connection._CLOSE_S", 0.1)
    first = TlsTransport(meshes[0], 1, timeout_s=3600.0 if aborted else 30.0, pacer=(pacer := Slow(60.0)))
    if not aborted:
        monkeypatch.setattr(type(meshes[0].connections[1]), "timeout_s", 0.2)
    first.send(packet(10))
    assert pacer.held.acquire(timeout=30)
    if aborted:
        first.abort(1, "it is over")
    first.close()
    assert first._waiting == 1


def test_both_ends_of_a_link(ends):
    config = Config.from_dict({"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}})
    stores = [MemoryStore("link-0", bits=32, group_size=None) for _ in ends]
    up, down = LinkSender(0, config, ends[0], stores[0]), LinkReceiver(0, config, ends[1], stores[1])
    together([lambda: reconcile_stores(up, {"a": 1}), lambda: reconcile_stores(down, {"a": 1})])
    where = Layout((1, 2, 3), (0,) * B, (S,) * B, S)
    for end in (up, down):
        end.set_limits(PacketLimits(B, S, H, 30), torch.float32)
    for step in range(3):
        up.send_activation(torch.randn(B, S, H), where, Position(step, 0))
        y_BSH, seen = down.recv_activation(Position(step, 0))
        assert seen == where
        down.send_gradient(y_BSH, where, Position(step, 0))
        assert up.recv_gradient(where, Position(step, 0)).shape == (B, S, H)


@pytest.mark.parametrize("late", [None, 0, 1])
def test_ends_compare_tables_that_are_longer_than_their_packets(ends, late):
    """As when a checkpoint is loaded: whichever end is late, its limit is not in the way, and holds afterwards."""
    config = Config.from_dict({"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}})
    stores = [MemoryStore("link-0", bits=32, group_size=None) for _ in ends]
    for number, store in enumerate(stores):
        store.put_many([(i, 1, torch.ones(1, 1)) for i in range(number, 500)])
    up, down = LinkSender(0, config, ends[0], stores[0]), LinkReceiver(0, config, ends[1], stores[1])
    for end in (up, down):
        end.set_limits(PacketLimits(1, 1, 1), torch.float32)
        end.changed.update(range(600))
    limits = [end.most_bytes for end in ends]
    assert max(limits) < 500 * 20
    if late is not None:
        take = ends[late].limit
        ends[late].limit = lambda most: (time.sleep(0.3), take(most))
    assert together([lambda: reconcile_stores(up, {}), lambda: reconcile_stores(down, {})]) == [1, 0]
    assert stores[0].inventory() == stores[1].inventory() != []
    assert [end.most_bytes for end in ends] == limits
    assert up.changed == down.changed == set(), "they are the same now"


def test_a_table_that_no_packet_can_hold_is_refused(ends):
    config = Config.from_dict({"activations": {"method": "direct"}})
    down = LinkReceiver(0, config, ends[1], None)
    said = "rank 0 announces a packet of 17179869185 bytes, allowed: 17179869184"
    with pytest.raises(WireError, match=said), down.accepting((1 << 34) + 1):
        pytest.fail("it is taken")


class TestBounds:
    bounds = PacketLimits(samples=B, rows=S, width=H)

    def header(
        self, samples: int = B, hidden: int = H, kind: wire.PacketKind = wire.PacketKind.ACTIVATION
    ) -> wire.PacketHeader:
        every = tuple(wire.Sample(i, wire.Form.PLAIN, 0, 1) for i in range(samples))
        return wire.PacketHeader(
            kind=kind,
            method=wire.PayloadMethod.CAST,
            link=0,
            step=0,
            micro_batch=0,
            tokens=S,
            hidden=hidden,
            samples=every,
        )

    def test_what_was_agreed_passes(self):
        self.bounds.check(self.header(), S)
        self.bounds.check(self.header(EVALUATED, kind=wire.PacketKind.EVAL_ACTIVATION), S)

    @pytest.mark.parametrize(
        ("header", "rows", "said"),
        [
            ({"samples": B + 1}, S, "4 samples; the agreed model and batch: at most 3"),
            ({"samples": EVALUATED + 1, "kind": wire.PacketKind.EVAL_ACTIVATION}, S, "65 samples"),
            ({}, S + 1, "9 rows of a sample; .* at most 8"),
            ({"hidden": H + 1}, S, "17 values of a row; .* 16"),
            ({"hidden": H - 1}, S, "15 values of a row"),
        ],
    )
    def test_what_is_more_is_refused(self, header, rows, said):
        with pytest.raises(WireError, match=said):
            self.bounds.check(self.header(**header), rows)

    def test_a_few_bytes_that_announce_gigabytes(self, ends, monkeypatch):
        config = Config.from_dict({"activations": {"method": "direct", "forward_bits": 1}})
        down = LinkReceiver(0, config, ends[1], None)
        down.set_limits(self.bounds, torch.float32)
        monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("memory was taken"))
        monkeypatch.setattr(torch, "zeros", lambda *a, **k: pytest.fail("memory was taken"))
        huge = wire.PacketHeader(
            kind=wire.PacketKind.ACTIVATION, method=wire.PayloadMethod.QUANTIZED, bits=1, link=0, step=0, micro_batch=0,
            tokens=1 << 20, hidden=768, samples=(wire.Sample(0, wire.Form.PLAIN, 0, 1),),
        )  # fmt: skip
        ends[0].send(wire.encode(huge, np.zeros(100, dtype=np.uint8)))
        with pytest.raises(WireError, match="rank 0 sent a packet that is too large"):
            down.recv_activation(Position(0, 0))

    @pytest.mark.parametrize("activations", [{}, {"method": "aqsgd"}, {"method": "direct", "backward_top_k": 1.0}])
    def test_the_longest_packet_fits(self, activations):
        from pipecomp.codecs.selection import LinkCodecs

        codecs = LinkCodecs(Config.from_dict({"activations": activations}).activations, 0)
        most = self.bounds.max_bytes(codecs, torch.float32)
        x_TH = torch.randn(B * S, H)
        for codec in (codecs.activation(x_TH.dtype), codecs.gradient(x_TH.dtype), codecs.evaluation(x_TH.dtype)):
            assert wire.encode(self.header(), encoded(codec, x_TH).numpy()).size <= most
        assert most <= 2 * EVALUATED * S * H * 8

    def test_first_visits_and_tables_fit(self):
        """Small groups and many bits make a first visit longer than a change, and than the plain values."""
        from pipecomp.codecs.selection import LinkCodecs

        first = {"first_visit": 8, "backward_method": "delta", "backward_first_visit": 8}
        section = {"method": "aqsgd", "forward_bits": 1, "backward_bits": 1, "group_size": 2, **first}
        codecs = LinkCodecs(Config.from_dict({"activations": section}).activations, 0)
        most = PacketLimits(EVALUATED, S, H).max_bytes(codecs, torch.bfloat16)
        for visits in (codecs.activations, codecs.gradients):
            size = visits.head_bytes(EVALUATED * S) + visits.first_visit(torch.bfloat16).payload_bytes(EVALUATED * S, H)
            assert wire.packet_bytes(EVALUATED, size) <= most
        assert PacketLimits(1, 1, 1, changed=10_000).max_bytes(codecs, torch.bfloat16) >= wire.packet_bytes(
            0, 10_000 * 20
        )
