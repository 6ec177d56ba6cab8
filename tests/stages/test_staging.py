"""Links and stores over a GPU's double: every wait is needed, and errors come late but in time."""

from __future__ import annotations

import queue
import threading
import weakref
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from pipecomp.buffers import MemoryStore, open_environment
from pipecomp.codecs import wire
from pipecomp.config import Config
from pipecomp.errors import NonFiniteError, WireError
from pipecomp.kernels import ops
from pipecomp.kernels.pool import BufferPool
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.transport import LoopbackTransport, OutgoingPacket, finish_packet, loopback_pair
from tests.lazy_staging import LazyStaging
from tests.pretend_gpu import PretendStaging, pretend_gpu

S, H = 5, 8
METHODS: list[dict[str, Any]] = [
    {"forward_bits": 3},
    {"first_visit": 8, "rotation": True},
    {"rounding": "stochastic", "group_size": 3},
    {"backward_top_k": 0.3},
    {
        **{"forward_bits": {"error": 0.1, "min": 1, "max": 6}, "first_visit": {"error": 0.02}},
        **{"backward_method": "delta", "backward_bits": {"error": 0.2}, "backward_first_visit": {"error": 0.05}},
    },
]
LAYOUTS = [
    Layout((1, 2, 3), (0, 1, 0), (5, 3, 1), S),
    Layout((3, 1, 3), (0, 0, 0), (1, 5, 1), S),  # 3 comes twice
]


class SendingThread:
    """A loopback transport that sends on a thread, as those over networks do."""

    def __init__(self, inner: LoopbackTransport) -> None:
        self._inner, self._packets = inner, queue.Queue[OutgoingPacket | None]()
        self._failure: Exception | None = None
        self.sent: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes that links set are the inner one's."""
        if name == "on_arrival":
            self._inner.on_arrival = value
        else:
            super().__setattr__(name, value)

    def send(self, packet: OutgoingPacket) -> None:
        if self._failure is not None:
            raise self._failure
        self._packets.put(packet)

    def drain(self) -> None:
        self._packets.join()

    def _run(self) -> None:
        while (packet := self._packets.get()) is not None:
            try:
                if self._failure is None:
                    whole = finish_packet(packet)
                    self.sent.append(whole.tobytes())
                    self._inner.send(whole)
            except Exception as error:
                self._failure = error
            self._packets.task_done()


def ends(options: dict[str, Any], folder: Any, staging: Any, backend: str = "lmdb") -> tuple[Any, ...]:
    config = Config.from_dict({"activations": {"method": "aqsgd", **options}, "store": {"drift_check": None}})
    wires = [SendingThread(end) for end in loopback_pair(timeout_s=30)]
    stores = [open_environment(backend, folder, i, bits=16, prefetch=2, staging=staging) for i in (0, 1)]
    links = [one.link("link-0", {}) for one in stores]
    up = LinkSender(0, config, wires[0], links[0], staging=staging)
    down = LinkReceiver(0, config, wires[1], links[1], staging=staging)
    return up, down, wires, stores


def train(folder: Any, staging: Any, backend: str = "lmdb", **options: Any) -> dict[str, Any]:
    """Everything that two ends of a link compute, send and store in a few steps."""
    up, down, wires, stores = ends(options, folder, staging, backend)
    device = up.staging.device
    draw = torch.Generator().manual_seed(1)
    computed: list[torch.Tensor] = []
    for step in range(3):
        for number, layout in enumerate(LAYOUTS):
            at = Position(step, number)
            x_BSH = torch.randn(3, S, H, generator=draw).to(device)
            if number:  # what comes twice is the same sample
                x_BSH[2] = x_BSH[0]
            up.store.prefetch(layout.ids)
            up.send_activation(x_BSH, layout, at)
            x_BSH.fill_(7.0)  # its memory is used for something else
            y_BSH, seen = down.recv_activation(at)
            assert seen == layout
            down.send_gradient(y_BSH * 0.1, layout, at)
            computed += [y_BSH.clone(), up.recv_gradient(layout, at)]
        for one in stores:
            one.commit()
    for one in stores:
        one.flush()
    for transport in wires:
        transport.drain()
    held = [(h.sample, h.version, h.digest) for end in (up, down) for h in end.store.inventory()]
    m = [cached.m_nH.tolist() for end in (up, down) for cached in end.store.get([1, 2, 3])]
    errors = up.stats.error_sum if staging is None else _errors(up)
    found = {"computed": [y.tolist() for y in computed], "held": held, "m": m, "errors": errors}
    for one in stores:
        one.close()
    return found | {"sent": [transport.sent for transport in wires]}


def but_for_norms(found: dict[str, Any]) -> dict[str, Any]:
    """Compare with another device: the same, but for norms, of which a GPU adds the squares in another order."""
    return {**found, "errors": pytest.approx(found["errors"], rel=1e-5)}


def _errors(up: LinkSender) -> float:
    """Return the squared errors of all steps: on a device the last one's are still under way."""
    left = sum(b / a for copy in up._norms for a, b in copy.wait().tolist())
    return up.stats.error_sum + left


@pytest.mark.parametrize("backend", ["lmdb", "memory"])
@pytest.mark.parametrize("options", METHODS, ids=str)
def test_a_device_computes_sends_and_stores_what_the_host_does(tmp_path, options, backend):
    on_host = train(tmp_path / "host", None, backend, **options)
    assert train(tmp_path / "double", LazyStaging(), backend, **options) == but_for_norms(on_host)


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_a_gpu_computes_with_its_own_tensors_alone(tmp_path, options):
    on_host = train(tmp_path / "host", None, "memory", **options)
    with pretend_gpu():
        assert train(tmp_path / "double", PretendStaging(), "memory", **options) == but_for_norms(on_host)


@pytest.mark.parametrize("backend", ["lmdb", "memory"])
@pytest.mark.parametrize("first", [True, False], ids=["first visit", "delta"])
def test_what_cannot_be_encoded_is_neither_sent_nor_stored(tmp_path, backend, first):
    up, down, wires, stores = ends({}, tmp_path, LazyStaging(), backend)
    layout = Layout((1, 2), (0, 0), (S, S), S)
    if not first:
        up.send_activation(torch.randn(2, S, H), layout, Position(0, 0))
        down.recv_activation(Position(0, 0))
    for one in stores:
        one.commit()
        one.flush()
    bad = torch.randn(2, S, H)
    bad[1, 3, 2] = float("nan")

    def send_twice() -> None:
        up.send_activation(bad, layout, Position(1, 0))  # waits for no value; the store's thread may find it here
        wires[0].drain()
        up.send_activation(torch.randn(2, S, H), layout, Position(1, 1))

    with pytest.raises(NonFiniteError, match=r"link 0, step 1, micro-batch 0, activations: .*NaN"):
        send_twice()
    assert len(wires[0].sent) == (0 if first else 1)
    with pytest.raises(NonFiniteError):
        stores[0].flush()
    for one in stores:
        one.close()
    if backend == "lmdb":
        with closing(open_environment(backend, tmp_path, 0, bits=16)) as again:
            assert [h.version for h in again.link("link-0", {}).inventory()] == ([] if first else [1, 2])


@pytest.mark.parametrize("backend", ["lmdb", "memory"])
def test_what_decodes_to_no_number_is_not_stored(tmp_path, backend):
    """The stage may have computed with it by then: a device is not waited for."""
    up, down, wires, stores = ends({}, tmp_path, LazyStaging(), backend)
    layout = Layout((1, 2), (0, 0), (S, S), S)
    for step in range(2):
        up.send_activation(torch.randn(2, S, H), layout, Position(step, 0))
        wires[0].drain()
        if step == 0:
            down.recv_activation(Position(0, 0))
            stores[1].commit()
    header, data = wire.decode(wires[1]._inner._inbox.get())
    data = data.copy()
    data[:4] = np.frombuffer(np.float32("nan").tobytes(), dtype=np.uint8)  # the first scale
    wires[0]._inner.send(wire.encode(header, data))

    def received() -> None:
        down.recv_activation(Position(1, 0))
        stores[1].commit()
        stores[1].flush()

    with pytest.raises(WireError, match=r"link 0, step 1, micro-batch 0, activations of samples \[1, 2\] that decode"):
        received()
    for one in stores:
        one.close()
    if backend == "lmdb":
        with closing(open_environment(backend, tmp_path, 1, bits=16)) as again:
            assert [h.version for h in again.link("link-0", {}).inventory()] == [1, 2]


def test_an_overflow_of_fp16_is_known_before_its_gradient_is_sent(tmp_path):
    up, down, _, stores = ends({}, tmp_path, LazyStaging(), "memory")
    up._pass_nonfinite = down._pass_nonfinite = True
    layout = Layout((1,), (0,), (S,), S)
    up.send_activation(torch.randn(1, S, H, dtype=torch.float16), layout, Position(0, 0))
    down.recv_activation(Position(0, 0))
    gradient = torch.full((1, S, H), float("inf"), dtype=torch.float16)
    down.send_gradient(gradient, layout, Position(0, 0))
    assert torch.equal(up.recv_gradient(layout, Position(0, 0)), gradient)
    for one in stores:
        one.close()


def test_a_buffer_is_used_again_once_nobody_refers_to_it():
    pool = BufferPool()
    first = pool.take(5000)
    first[:] = 3
    part, address = torch.from_numpy(first[100:200]), first.ctypes.data
    del first
    other = pool.take(5000)
    assert other.ctypes.data != address
    other[:] = 4
    assert part.tolist() == [3] * 100
    del part
    assert pool.take(8000).ctypes.data == address
    small = BufferPool(idle_bytes=4096)
    kept = [small.take(4096) for _ in range(2)]
    del kept
    assert sum(len(free) for free in small._idle.values()) == 1


def test_memory_that_is_let_go_may_be_taken_again():
    """Pinned memory of a stated amount: what is given back after a burst is there for the next."""
    made, left = [], [2 * 4096]

    def make(size: int) -> np.ndarray:
        left[0] -= size
        made.append(size)
        return np.empty(size, dtype=np.uint8)

    def let_go(buffer: np.ndarray) -> None:
        left[0] += buffer.size

    pool = BufferPool(make, 4096, let_go)
    lent = [pool.take(4096) for _ in range(2)]
    assert left == [0]
    del lent
    assert left == [4096]
    again = [pool.take(4096) for _ in range(2)]
    assert (left, len(made), len(again)) == ([0], 3, 2)
    del again
    for _ in range(3):
        pool.take(4096)  # the one that was kept
    assert len(made) == 3


def test_what_is_unused_makes_way_for_other_sizes():
    most, made, gone = 8 * 4096, [], []

    def make(size: int) -> np.ndarray:
        made.append(size)
        assert sum(made) - sum(gone) <= most
        return np.empty(size, dtype=np.uint8)

    pool = BufferPool(make, most, lambda buffer: gone.append(buffer.size), most)
    large = [pool.take(4 * 4096), pool.take(2 * 4096), pool.take(2 * 4096)]
    with pytest.raises(MemoryError, match="4096 bytes beside 32768 in use"):
        pool.take(1)
    del large
    small = [pool.take(1) for _ in range(3)]
    assert gone == [4 * 4096]
    with pytest.raises(MemoryError):
        pool.take(8 * 4096)  # in vain: nothing is given up for it
    del small
    whole = pool.take(8 * 4096)
    assert (whole.size, sum(made) - sum(gone)) == (most, most)


def test_only_buffers_that_are_there_count():
    sizes = iter([-1, 4096, 4096])
    pool = BufferPool(lambda size: np.empty(next(sizes), dtype=np.uint8), idle_bytes=0, max_bytes=4096)
    with pytest.raises(ValueError, match="negative"):
        pool.take(1)
    for _ in range(2):
        assert pool.take(1).size == 1


def test_a_packet_is_sealed_by_the_call_that_encodes():
    x, packet = torch.randn(3, H), np.zeros(20 + 3 * (4 + H // 2) + 4, dtype=np.uint8)
    whole = torch.from_numpy(packet)
    verdict = ops.encode_batch([ops.EncodeItem(x, None, ops.QuantizerOptions(4, None))], whole[20:-4], packet=whole)
    verdict.check()
    assert verdict.has_checksum
    assert int.from_bytes(packet[-4:].tobytes(), "little") == ops.crc32(packet[:-4])


@pytest.mark.parametrize("how", [{}, {"rotation": True}, {"backward_top_k": 0.3}])
def test_quantized_packets_come_sealed_from_the_call_that_encodes(monkeypatch, how):
    monkeypatch.setattr("pipecomp.stages.link.packet.write_checksum", None)
    config = Config.from_dict({"activations": {"method": "direct", **how}})
    a, b = loopback_pair()
    up, down = LinkSender(0, config, a, None), LinkReceiver(0, config, b, None)
    layout, at = LAYOUTS[0], Position(0, 0)
    up.send_activation(torch.randn(3, S, H), layout, at)
    down.recv_activation(at)  # WireError for a wrong check
    down.send_gradient(torch.randn(3, S, H), layout, at)
    up.recv_gradient(layout, at)


def test_a_verdict_keeps_no_tensor():
    """It waits with its packet, maybe for a slow link, and would keep the memory of a GPU."""
    x, m, o = torch.randn(3, H), torch.randn(3, H), ops.QuantizerOptions(4, None)
    payload = torch.empty(ops.payload_bytes(*x.shape, o, x.dtype), dtype=torch.uint8)
    verdict = ops.encode_batch([ops.EncodeItem(x, m, o, True)], payload)
    kept = [weakref.ref(x), weakref.ref(m)]
    del x, m
    assert [one() for one in kept] == [None, None]
    verdict.check()


@pytest.mark.parametrize("method", ["aqsgd", "direct"])
def test_bits_that_follow_an_error_are_first_known_to_the_thread_that_sends(method):
    """The computing one goes on; then the packet is cut to its length, and counted with it."""
    activations = {"method": method, "forward_bits": {"error": 0.1}, "backward_bits": 8}
    if method == "aqsgd":
        activations["first_visit"] = {"error": 0.05}
    config = Config.from_dict({"activations": activations})
    x_BSH, layout, at = torch.randn(3, S, H), LAYOUTS[0], Position(0, 0)
    queued: list[Any] = []
    whole: dict[str, np.ndarray] = {}
    for staging in (None, LazyStaging()):
        a, _ = loopback_pair()
        with closing(MemoryStore(staging=staging)) as store:
            up = LinkSender(0, config, a, store if method == "aqsgd" else None, staging=staging)
            send, a.send = a.send, queued.append
            up.send_activation(x_BSH, layout, at)
            (packet,) = queued
            queued.clear()
            if staging is None:
                send(packet)
                whole["host"] = packet
                continue
            assert not packet.deferred.known
            assert up.stats.forward.bytes_sent == 0
            assert packet.size > whole["host"].size, "room for 8 bits"
            kept = weakref.ref(packet.deferred)
            assert packet.finish().tobytes() == whole["host"].tobytes()
            assert packet.size == whole["host"].size
            up.count_sent()
            assert up.stats.forward.bytes_sent == packet.size
            del packet
            assert kept() is None


def test_all_that_was_sent_is_counted_for_who_asks():
    config = Config.from_dict({"activations": {"method": "direct", "forward_bits": {"error": 0.1}}})
    a, _ = loopback_pair()
    up, queued = LinkSender(0, config, a, None, staging=LazyStaging()), []
    a.send = queued.append
    for i in range(3):
        up.send_activation(torch.randn(3, S, H), LAYOUTS[0], Position(0, i))
    assert len(up._uncounted) == 3
    up.count_sent(wait=True)
    assert up.stats.forward.bytes_sent == sum(packet.finish().size for packet in queued)


def test_a_packet_that_turns_out_shorter_leaves_no_bytes_waiting():
    class Shorter:
        size = 100

        def finish(self) -> np.ndarray:
            return np.zeros(60, dtype=np.uint8)

    a, _ = loopback_pair()
    a.count_queued(100)
    packet, _ = a.finish_queued(Shorter(), 0.0)
    assert a.waiting_bytes == packet.size == 60
    a.count_left(packet.size)
    assert a.waiting_bytes == 0


def test_packets_that_have_left_are_not_kept_until_their_step_ends():
    """Cluster centers ask at the end of a step whether all could be encoded."""
    packets: list[weakref.ref[np.ndarray]] = []

    class Noticed(LazyStaging):
        def buffer(self, size):
            made = super().buffer(size)
            packets.append(weakref.ref(made))
            return made

    config = Config.from_dict({"activations": {"method": "aqsgd"}, "store": {"backend": "memory", "clusters": 16}})
    a, _ = loopback_pair()
    staging = Noticed()
    with closing(MemoryStore(staging=staging)) as store:
        up, layout = LinkSender(0, config, a, store, staging=staging), Layout((1, 2), (0, 0), (S, S), S)
        for i in range(3):
            up.send_activation(torch.randn(2, S, H), layout, Position(0, i))
        assert [packet() for packet in packets] == [None] * 3
        up.end_step()
        assert up._clusters is not None
        assert up._clusters._unsettled == []


def test_what_arrives_is_being_copied_before_its_turn():
    copies: list[int] = []

    class Noticed(LazyStaging):
        def to_device(self, x):
            copies.append(x.numel())
            return super().to_device(x)

    config = Config.from_dict({"activations": {"method": "direct"}})
    a, b = loopback_pair()
    up, down = LinkSender(0, config, a, None), LinkReceiver(0, config, b, None, staging=Noticed())
    arrived: list[tuple[tuple[int, ...], list[int]]] = []
    down.receive_staging.on_header = lambda header: arrived.append((tuple(s.id for s in header.samples), list(copies)))
    layout = Layout((1, 2), (0, 0), (S, 2), S)
    x_BSH = torch.randn(2, S, H)
    up.send_activation(x_BSH, layout, Position(0, 0))
    y_BSH, _ = down.recv_activation(Position(0, 0))
    assert arrived == [(layout.ids, copies)]
    assert copies == [up.stats.forward.bytes_sent]  # the whole packet, when it came, and nothing after that
    down.send_gradient(y_BSH, layout, Position(0, 0))
    assert torch.equal(up.recv_gradient(layout, Position(0, 0)) == 0, y_BSH == 0)
