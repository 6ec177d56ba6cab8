"""Ranks in one process: they meet, send messages, agree through the store; what does not belong is refused."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipecomp.errors import KeysError, LinkError, LinkTimeoutError, PeerLostError, WireError
from pipecomp.tls import handshake
from pipecomp.tls.enrollment import Invitation
from pipecomp.tls.frames import CONTENT_BYTES, EAGER_BYTES, STORE_BYTES, FrameHeader, FrameKind
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import create_keys, revoke_machine
from pipecomp.tls.listener import ALL_INTERFACES, MAX_PENDING, Address
from pipecomp.tls.mesh import JoinConfig, Mesh, connect_mesh, default_listen
from pipecomp.tls.process_group import Collectives, MeshProcessGroup, _Work
from pipecomp.tls.receive_queue import ReceiveQueue
from pipecomp.tls.routes import DIRECT, RELAYED, PeerListener, Routes, connect
from pipecomp.tls.send_queue import SendQueue
from pipecomp.tls.store import ENTRY_BYTES, StoreRequestError, address_key
from pipecomp.tls.stream import NoAnswerError, SecureStream
from tests.tls.meshes import WAIT_S, add_machine, close_all, free_address, keys_for, kill, meet_all, together

LONG = 3 * CONTENT_BYTES + 17


def data(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture(scope="module", params=[(), (1,), (2,), (1, 2)], ids=lambda quiet: f"quiet {quiet}")
def three(folders, request):
    meshes = meet_all(folders, request.param)
    meshes[0].expected = RELAYED if request.param == (1, 2) else DIRECT
    yield meshes
    close_all(meshes)


def test_every_rank_reaches_every_other(three):
    assert three[1].routes == {0: DIRECT, 2: three[0].expected}
    assert three[2].routes == {0: DIRECT, 1: three[0].expected}
    for size in (0, 1, EAGER_BYTES, LONG):
        messages = {(a, b): data(size, 3 * a + b) for a in range(3) for b in range(3) if a != b}
        arriving = {(a, b): bytearray(size) for a, b in messages}
        transfers = [three[b].connections[a].receive(5, 1, memoryview(arriving[a, b])) for a, b in messages]
        transfers += [three[a].connections[b].send(5, 1, memoryview(m)) for (a, b), m in messages.items()]
        for transfer in transfers:
            transfer.wait(WAIT_S)
        for pair, message in messages.items():
            assert bytes(arriving[pair]) == message.tobytes()


def group_of(meshes, name: str) -> list[MeshProcessGroup]:
    return [MeshProcessGroup(mesh, range(len(meshes)), name, timedelta(seconds=WAIT_S)) for mesh in meshes]


def options_of(kind: type, root: int):
    made = kind()
    made.rootRank = root
    return made


@pytest.mark.parametrize("values", [1, 7, EAGER_BYTES])  # float32: the last takes the way of long tensors
class TestCollectives:
    """Results of each collective by torch's documentation, for three ranks."""

    @pytest.fixture
    def groups(self, three, request):
        made = group_of(three, request.node.name)
        yield made
        for group in made:
            group.shutdown()

    @pytest.fixture
    def given(self, values):
        return [torch.randn(values, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    @pytest.fixture
    def blocks(self, given):
        return [[tensor + i for i in range(3)] for tensor in given]

    @pytest.fixture
    def out(self, values):
        return [torch.full((values,), torch.nan) for _ in range(3)]

    def test_all_reduce(self, groups, given):
        tensors = [tensor.clone() for tensor in given]
        together([lambda r=r: groups[r].allreduce([tensors[r]], dist.AllreduceOptions()).wait() for r in range(3)])
        for tensor in tensors:  # the same bits on all ranks: added in the order of ranks
            assert torch.equal(tensor, given[0] + given[1] + given[2])

    def test_reduce(self, groups, given):
        tensors, options = [tensor.clone() for tensor in given], options_of(dist.ReduceOptions, 1)
        together([lambda r=r: groups[r].reduce([tensors[r]], options).wait() for r in range(3)])
        assert torch.equal(tensors[1], given[0] + given[1] + given[2])

    def test_broadcast(self, groups, given):
        tensors, options = [tensor.clone() for tensor in given], options_of(dist.BroadcastOptions, 1)
        together([lambda r=r: groups[r].broadcast([tensors[r]], options).wait() for r in range(3)])
        assert all(torch.equal(tensor, given[1]) for tensor in tensors)

    def test_all_gather(self, groups, given, values):
        out = [[torch.empty(values) for _ in range(3)] for _ in range(3)]
        together([lambda r=r: groups[r].allgather([out[r]], [given[r]]).wait() for r in range(3)])
        assert all(torch.equal(out[r][s], given[s]) for r in range(3) for s in range(3))
        joined = [torch.empty(3 * values) for _ in range(3)]
        together([lambda r=r: groups[r].all_gather_single(joined[r], given[r]).wait() for r in range(3)])
        assert all(torch.equal(tensor, torch.cat(given)) for tensor in joined)

    def test_reduce_scatter(self, groups, blocks, out, values):
        options = dist.ReduceScatterOptions()
        together([lambda r=r: groups[r].reduce_scatter([out[r]], [blocks[r]], options).wait() for r in range(3)])
        assert all(torch.equal(out[r], blocks[0][r] + blocks[1][r] + blocks[2][r]) for r in range(3))
        joined, out = [torch.cat(b) for b in blocks], [torch.empty(values) for _ in range(3)]
        together([lambda r=r: groups[r].reduce_scatter_single(out[r], joined[r], options).wait() for r in range(3)])
        assert all(torch.equal(out[r], blocks[0][r] + blocks[1][r] + blocks[2][r]) for r in range(3))

    def test_all_to_all(self, groups, blocks, values):
        out = [[torch.empty(values) for _ in range(3)] for _ in range(3)]
        together([lambda r=r: groups[r].alltoall(out[r], blocks[r]).wait() for r in range(3)])
        assert all(torch.equal(out[r][s], blocks[s][r]) for r in range(3) for s in range(3))
        joined = [torch.empty(3 * values) for _ in range(3)]
        cats = [torch.cat(b) for b in blocks]
        together([lambda r=r: groups[r].all_to_all_single(joined[r], cats[r], [], []).wait() for r in range(3)])
        assert all(torch.equal(joined[r], torch.cat([b[r] for b in blocks])) for r in range(3))

    def test_gather(self, groups, given, out):
        options = options_of(dist.GatherOptions, 2)
        together([lambda r=r: groups[r].gather([out] * (r == 2), [given[r]], options).wait() for r in range(3)])
        assert all(torch.equal(out[r], given[r]) for r in range(3))

    def test_scatter(self, groups, blocks, out):
        options, send = options_of(dist.ScatterOptions, 0), [blocks[0]]
        together([lambda r=r: groups[r].scatter([out[r]], send * (r == 0), options).wait() for r in range(3)])
        assert all(torch.equal(out[r], blocks[0][r]) for r in range(3))

    def test_between_two(self, groups, given, out):
        sent = groups[0].send([given[0]], 2, 9)
        groups[2].recv([out[0]], 0, 9).wait()
        sent.wait()
        assert torch.equal(out[0], given[0])
        together([groups[r].barrier().wait for r in range(3)])


@pytest.mark.parametrize("early", [True, False])
def test_tensors_of_no_values(two, early):
    """Whichever comes first, the message or its receive."""
    groups = [Collectives(mesh, [0, 1], 11) for mesh in two]
    empty = [torch.empty(0, 3) for _ in two]
    if early:
        groups[0].send(empty[0], 1, 0).wait(WAIT_S)
        groups[0].send(torch.ones(1), 1, 1).wait(WAIT_S)
        groups[1].receive(torch.empty(1), 0, 1).wait(WAIT_S)  # it came after the other
        groups[1].receive(empty[1], 0, 0).wait(WAIT_S)
    else:
        coming = groups[1].receive(empty[1], 0, 0)
        groups[0].send(empty[0], 1, 0).wait(WAIT_S)
        coming.wait(WAIT_S)
    together([lambda r=r: groups[r].all_reduce_(torch.empty(0), "SUM") for r in range(2)])
    together([lambda r=r: groups[r].all_gather([torch.empty(0), torch.empty(0)], torch.empty(0)) for r in range(2)])


def test_all_reduce_in_pieces(two, monkeypatch):
    monkeypatch.setattr("pipecomp.tls.process_group._PIECE_BYTES", 4 * 50_000)
    given = [torch.randn(2 * EAGER_BYTES + 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    tensors = [tensor.clone() for tensor in given]
    together([lambda r=r: Collectives(two[r], [0, 1], 9).all_reduce_(tensors[r], "SUM") for r in range(2)])
    assert all(torch.equal(tensor, given[0] + given[1]) for tensor in tensors)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        *(("MAX", [4, 5]), ("MIN", [1, 2]), ("PRODUCT", [4, 10]), ("BOR", [5, 7]), ("BAND", [0, 0]), ("BXOR", [5, 7])),
        ("AVG", [2.5, 3.5]),
    ],
)
def test_reductions(two, operation, expected):
    kind, options = torch.tensor(expected).dtype, dist.AllreduceCoalescedOptions()
    options.reduceOp = getattr(dist.ReduceOp, operation)
    tensors = [torch.tensor(values, dtype=kind) for values in ([1, 2], [4, 5], [1, 2], [4, 5])]
    groups = group_of(two, "r")
    together([lambda r=r: groups[r].allreduce_coalesced(tensors[r::2], options).wait() for r in range(2)])
    assert [t.tolist() for t in tensors] == [expected] * 4


def test_blocks_of_different_lengths_and_several_tensors_at_once(two):
    groups = group_of(two, "d")
    given, sizes = [torch.arange(4.0), torch.arange(4.0, 7.0)], [[1, 3], [2, 1]]  # what each sends to each
    blocks = [torch.empty(3), torch.empty(4)]
    calls = [(groups[r].all_to_all_single, blocks[r], given[r], [row[r] for row in sizes], sizes[r]) for r in range(2)]
    together([lambda call=call, a=a: call(*a).wait() for call, *a in calls])
    assert [block.tolist() for block in blocks] == [[0, 4, 5], [1, 2, 3, 6]]
    every = [[[torch.empty(2), torch.empty(1)] for _ in range(2)] for _ in range(2)]
    own = [[torch.full((2,), r + 0.0), torch.full((1,), r + 5.0)] for r in range(2)]
    together([lambda r=r: groups[r].allgather_coalesced(every[r], own[r]).wait() for r in range(2)])
    assert all(torch.equal(a, b) for found in every for r in range(2) for a, b in zip(found[r], own[r], strict=True))


def test_half_precision_and_tensors_that_are_not_contiguous(two):
    groups = [MeshProcessGroup(mesh, [0, 1], "h", timedelta(seconds=WAIT_S)) for mesh in two]
    tensors = [torch.full((4, 6), r + 0.5, dtype=torch.bfloat16).t() for r in range(2)]
    options = dist.AllreduceOptions()
    works = together([lambda r=r: groups[r].allreduce([tensors[r]], options) for r in range(2)])
    for work, tensor in zip(works, tensors, strict=True):
        assert work.get_future().wait()[0] is not None
        assert torch.equal(tensor, torch.full((6, 4), 2.0, dtype=torch.bfloat16))
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(LinkError, match="does not reduce with"):
        groups[0].allreduce([tensors[0]], options)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("shape", [(2, 3), (2, EAGER_BYTES)])
@pytest.mark.parametrize("apart", [False, True], ids=["contiguous", "apart"])
def test_tensors_that_autograd_would_not_change_on_another_thread(two, shape, apart, inference):
    """Parameters, and what was made for inference: over gloo they are memory like any other."""
    groups, root = group_of(two, "a"), options_of(dist.BroadcastOptions, 0)

    def made(value: float) -> torch.Tensor:
        full = torch.full(shape[::-1] if apart else shape, value)
        return torch.nn.Parameter(full.t() if apart else full, requires_grad=not inference)

    def of_rank(rank: int) -> list[torch.Tensor]:
        group = groups[rank]
        with torch.inference_mode(inference):
            summed, same, part, came = (made(rank + 1.0) for _ in range(4))
            every = [made(0.0) for _ in two]
            group.allreduce([summed], dist.AllreduceOptions()).wait()
            group.broadcast([same], root).wait()
            group.allgather([every], [made(rank + 1.0)]).wait()
            group.reduce_scatter([part], [[made(1.0), made(2.0)]], dist.ReduceScatterOptions()).wait()
            (group.send([came], 1, 3) if rank == 0 else group.recv([came], 0, 3)).wait()
        return [summed, same, *every, part, came]

    for rank, tensors in enumerate(together([lambda: of_rank(0), lambda: of_rank(1)])):
        assert [tensor.unique().tolist() for tensor in tensors] == [[3.0], [1.0], [1.0], [2.0], [2.0 + 2 * rank], [1.0]]
        assert all(tensor.is_leaf for tensor in tensors)
    for group in groups:
        group.shutdown()


def test_a_future_is_told_of_the_gpus_of_its_tensors(monkeypatch):
    """Else torch takes no tensor of theirs as its value, and DDP, which asks for the future, ends with that."""
    told = []
    monkeypatch.setattr(torch.futures, "Future", lambda devices=None: told.append(devices))
    host, gpu = (SimpleNamespace(is_cuda=d.type == "cuda", device=d) for d in map(torch.device, ("cpu", "cuda:1")))
    for tensors in ([host], [gpu, host, gpu], []):
        _Work(tensors, timedelta(seconds=WAIT_S))
    assert told == [None, [torch.device("cuda:1")], None]


def test_a_collective_is_waited_for_as_long_as_its_caller_says():
    for default_s, asked in ((0.5, timedelta(seconds=0.01)), (0.01, None), (0.01, timedelta(0))):
        with pytest.raises(dist.DistBackendError, match=r"timed out after 0\.01 s"):
            _Work([], timedelta(seconds=default_s)).wait(asked)


def test_what_is_copied_is_copied_when_torch_calls(two):
    """Not on the group's thread, which may be busy, and knows nothing of the caller's CUDA stream."""
    groups, gate = group_of(two, "i"), threading.Event()
    held = [group._run([], lambda _: gate.wait(WAIT_S)) for group in groups]
    columns = [torch.arange(6.0).reshape(3, 2)[:, rank] for rank in (0, 1)]
    expected = torch.cat(columns)
    outputs = [torch.empty(6), torch.empty(6)]
    works = [group.all_gather_single(outputs[r], columns[r]) for r, group in enumerate(groups)]
    for column in columns:
        column.fill_(-1.0)
    gate.set()
    for work in held + works:
        work.wait()
    assert all(torch.equal(output, expected) for output in outputs)


def test_a_long_message_does_not_keep_others_waiting(two):
    a, b = (mesh.connections[1 - mesh.rank] for mesh in two)
    into = bytearray(LONG)
    waiting = b.send(1, 0, memoryview(data(LONG)))  # not asked for yet
    a.receive(1, 1, memoryview(short := bytearray(3)))
    b.send(1, 1, memoryview(b"abc")).wait(WAIT_S)
    assert not waiting.done
    a.receive(1, 0, memoryview(into)).wait(WAIT_S)
    waiting.wait(WAIT_S)
    assert (bytes(into), bytes(short)) == (data(LONG).tobytes(), b"abc")


class TestStore:
    def test_all_of_torchs_questions(self, two):
        for mesh in two:
            store = dist.PrefixStore(f"of {mesh.rank}", mesh.store)
            store.set("a", "1")
            store.set("b", b"\x00\xff")
            assert (store.get("a"), store.get("b")) == (b"1", b"\x00\xff")
            assert store.multi_get(["b", "a"]) == [b"\x00\xff", b"1"]
            assert store.check(["a", "b"])
            assert not store.check(["a", "c"])
            assert [store.add("n", 2), store.add("n", -3)] == [2, -1]
            assert store.compare_set("a", "1", "2") == b"2"
            assert store.compare_set("a", "1", "3") == b"2"
            assert store.clone().get("a") == b"2"
            assert store.delete_key("b")
            assert not store.delete_key("b")
            assert not store.check(["b"])
            with pytest.raises(dist.DistStoreError, match=rf"wait timeout after 0\.05 s, keys: .*of {mesh.rank}/c$"):
                store.wait(["c"], timedelta(seconds=0.05))
        assert two[1].store.num_keys() == two[0].store.num_keys() > 4

    def test_what_is_written_again_takes_no_more_room(self, two):
        two[0].store.set("again", "12345")
        before = two[0]._table._bytes
        for value in ("", "12", "12345"):
            two[1].store.set("again", value)
        assert two[0]._table._bytes == before
        two[1].store.delete_key("again")
        assert two[0]._table._bytes == before - len("again12345") - ENTRY_BYTES

    def test_a_wait_ends_when_the_key_comes(self, two):
        for reader, writer in (two, two[::-1]):
            key = f"late {reader.rank}"
            waiting = threading.Thread(target=lambda r=reader, k=key: r.store.wait([k], timedelta(seconds=WAIT_S)))
            waiting.start()
            writer.store.set(key, "x")
            waiting.join(WAIT_S)
            assert not waiting.is_alive()

    @pytest.mark.parametrize(
        "key",
        [
            "pipecomp/alive/0",
            "pipecomp/start/3/12/0",
            "x/pipecomp/start/3/parted/0",
            address_key(0),
        ],
    )
    def test_a_rank_cannot_speak_for_another(self, two, key):
        store = two[1].store
        for write in (store.set, lambda key, text: store.compare_set(key, "", text), lambda key, _: store.add(key, 1)):
            with pytest.raises(dist.DistStoreError, match="rank 1 may not write"):
                write(key, "stopped 0 I failed")
        store.set(key[:-1] + "1", "mine")
        assert not two[0].store.check([key])
        two[0].store.set(key, "here")
        with pytest.raises(dist.DistStoreError, match="rank 1 may not write"):
            store.delete_key(key)
        assert two[0].store.get(key) == b"here"

    def test_a_rank_that_is_gone_harms_nobody_who_writes_what_it_waits_for(self, two):
        """Whatever ended its connection, and whoever writes: another rank is answered as if nobody had waited."""
        said: list[tuple] = []
        writer = SimpleNamespace(peer=2, failure=None, send_store=lambda *what: said.append(what))
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(two[1].store.wait, ["a", "b"], timedelta(seconds=WAIT_S))
            deadline = time.monotonic() + WAIT_S
            while not two[0]._table._waits:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            two[0].connections[1].fail(WireError("rank 1 sent a frame of unknown kind 99"))
            two[0].store.set("a", "")
            two[0]._table.serve(writer, 7, ["set", "b", ""])
            with pytest.raises(dist.DistNetworkError):
                asking.result(WAIT_S)
        assert said == [(FrameKind.STORE_REPLY, 7, None)]

    def test_a_value_too_long_for_a_connection_ends_none(self, two):
        long = bytes(STORE_BYTES)
        two[0].store.set("long", long)
        assert two[0].store.get("long") == long
        said = "key-value store (has|have) [0-9]+ bytes(| together), allowed: 4194304"
        for question in (lambda: two[1].store.get("long"), lambda: two[1].store.set("own", long)):
            with pytest.raises(dist.DistStoreError, match=said):
                question()
        assert two[1].store.check(["long"])

    def test_one_value_that_is_asked_for_very_often_takes_no_memory(self, two, monkeypatch):
        two[0].store.set("k", bytes(1 << 20))
        monkeypatch.setattr("pipecomp.tls.store._encode", lambda value: pytest.fail("memory is taken"))
        with pytest.raises(dist.DistStoreError, match="5592404000 bytes together, allowed: 4194304"):
            two[1].store.multi_get(["k"] * 4000)

    def test_answers_wait_only_up_to_a_limit(self, two, monkeypatch):
        """A rank asks and does not read; it says so and is alive, so that no silence ends it."""
        two[0].store.set("k", bytes(100_000))
        monkeypatch.setattr("pipecomp.tls.connection._MAX_UNREAD_BYTES", 1_000_000)
        to_reader = two[0].connections[1]
        monkeypatch.setattr(
            to_reader._send_queue, "next_frames", lambda epoch, wait_s: time.sleep(min(wait_s, 0.1)) or []
        )
        deadline = time.monotonic() + WAIT_S
        while to_reader._send_queue.waiting_bytes < 1_000_000:
            assert time.monotonic() < deadline
            two[0]._table.serve(to_reader, 7, ["get", ["k"]])
        two[0]._table.serve(to_reader, 8, ["get", ["k"]])
        assert re.fullmatch(
            r"rank 1 sends store requests and leaves 1\d{6} bytes of replies unread", str(to_reader.failure)
        )

    def test_what_is_no_number_is_not_added_to(self, two):
        two[0].store.set("text", "three")
        for mesh in two:
            with pytest.raises(dist.DistStoreError, match="the value of 'text' is not an integer"):
                mesh.store.add("text", 1)
        assert two[1].store.get("text") == b"three"

    def test_a_rank_waits_for_no_more_than_is_allowed(self, two, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.store.MAX_WAITS", 3)
        waits = ((["x"] * 4, "rank 1 waits for more than 3 keys"), (["x" * 5000], "5000 characters, allowed: 4096"))
        for keys, said in waits:
            with pytest.raises(dist.DistStoreError, match=said):
                two[1].store.wait(keys, timedelta(seconds=WAIT_S))
        for mesh in two:
            with pytest.raises(dist.DistStoreError, match="5000 characters, allowed: 4096"):
                mesh.store.set("x" * 5000, "")
        assert two[0]._table._waits == []
        for number in range(2):  # in all of its questions together
            two[0]._table.serve(asking := two[0].connections[1], 100 + number, ["wait", ["x"]])
        with pytest.raises(StoreRequestError, match="rank 1 waits for more than 3 keys"):
            two[0]._table.wait_for(asking, 102, ["x", "y"])

    def test_the_store_takes_no_more_than_is_allowed(self, two, monkeypatch):
        two[0].store.set("k", "")
        monkeypatch.setattr("pipecomp.tls.store.MAX_BYTES", most := two[0]._table._bytes + 9)
        two[1].store.set("k", bytes(9))
        for key, value in (("k", bytes(10)), ("l", "")):
            with pytest.raises(dist.DistStoreError, match=rf"the key-value store has {most} bytes, allowed: {most}"):
                two[1].store.set(key, value)
        assert two[0].store.get("k") == bytes(9)

    def test_when_rank_0_is_gone_questions_end(self, folders, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.resumable.GONE_S", 0.2)
        meshes = meet_all(folders[:2])
        waiting = []

        def ask():
            with pytest.raises(dist.DistNetworkError):
                meshes[1].store.wait(["never"], timedelta(seconds=WAIT_S))
            waiting.append(True)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.1)
        kill(meshes[0])
        thread.join(WAIT_S)
        assert waiting == [True]
        with pytest.raises(dist.DistNetworkError):
            meshes[1].store.check(["x"])
        close_all(meshes)


class TestFailures:
    @pytest.mark.parametrize("gone", [0, 1])
    def test_a_lost_rank_is_told_to_all_that_wait(self, folders, monkeypatch, gone):
        monkeypatch.setattr("pipecomp.tls.resumable.GONE_S", 0.2)
        meshes = meet_all(folders[:2])
        there = meshes[1 - gone].connections[gone]
        transfers = [there.receive(1, 0, memoryview(bytearray(9))), there.send(1, 0, memoryview(data(LONG)))]
        kill(meshes[gone])
        meshes[0].set_timeout(1.0)  # rank 1 makes connections: rank 0 can only wait for it
        for transfer in transfers:
            with pytest.raises(PeerLostError, match=rf"lost rank {gone}: its connection was closed"):
                transfer.wait(WAIT_S)
        with pytest.raises(PeerLostError):
            there.send(1, 0, memoryview(b"x")).wait(WAIT_S)
        close_all(meshes)

    def test_silence_is_noticed(self, folders, monkeypatch):
        meshes = meet_all(folders[:2])
        for mesh in meshes:
            mesh.set_timeout(4.0)
        time.sleep(5)  # quiet connections stay
        meshes[0].connections[1].send(1, 0, memoryview(b"x")).wait(WAIT_S)
        stopped = meshes[1].connections[0]
        goes_on = threading.Event()
        monkeypatch.setattr(stopped._send_queue, "next_frames", lambda *_: goes_on.wait(WAIT_S) and [])
        monkeypatch.setattr(stopped.resumable, "_try_all", lambda *_: goes_on.wait(WAIT_S) and (False, None))
        with pytest.raises(LinkTimeoutError, match="nothing from rank 1 for 4 s"):
            meshes[0].connections[1].receive(1, 0, memoryview(bytearray(1))).wait(WAIT_S)
        goes_on.set()
        close_all(meshes)

    def test_a_lost_rank_is_told_though_another_one_is_waited_for(self, folders):
        """Rank 1 may come to the collective much later."""
        meshes = meet_all(folders)
        meshes[0].connections[2].fail(PeerLostError("lost rank 2", 2))
        long = EAGER_BYTES  # float32
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(Collectives(meshes[0], [0, 1, 2], 9).all_reduce_, torch.ones(long), "SUM")
            try:
                with pytest.raises(PeerLostError, match="lost rank 2"):
                    waiting.result(WAIT_S)
            finally:
                close_all(meshes)

    def test_who_is_silent_and_then_listens_no_more_is_lost(self, folders, monkeypatch):
        """Not silent for the whole time of silence, which has not passed."""
        monkeypatch.setattr("pipecomp.tls.resumable.GONE_S", 0.2)
        meshes = meet_all(folders[:2])
        there = meshes[1].connections[0]
        meshes[0]._listener.close()
        there.resumable.drop(there.resumable.current()[0], TimeoutError())
        there.wait_for_end(WAIT_S)
        with pytest.raises(
            PeerLostError, match=r"lost rank 0: .* \(it was silent, and nothing listens there any more\)"
        ):
            raise there.failure
        close_all(meshes)

    def test_who_has_failed_waits_for_no_connection_that_is_lost(self, two, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.connection._CLOSE_S", 0.0)
        there, looks = two[0].connections[1], iter(range(1000))
        monkeypatch.setattr(there.resumable, "is_down", True)
        two[0].hurry()
        assert not there.drain(lambda wait_s: next(looks) == 999)

    def test_an_orderly_end_is_told_as_one(self, folders):
        meshes = meet_all(folders[:2])
        waiting = meshes[0].connections[1].receive(1, 0, memoryview(bytearray(9)))
        sent = meshes[1].connections[0].send(1, 1, memoryview(b"last"))
        meshes[1].close()
        sent.wait(0)
        with pytest.raises(PeerLostError, match="rank 1 has ended its run"):
            waiting.wait(WAIT_S)
        meshes[0].close()

    def test_what_came_before_the_end_is_there_after_it(self, folders):
        meshes = meet_all(folders[:2])
        last, there = meshes[1].connections[0], meshes[0].connections[1]
        for message in (b"one", b"two"):
            last.send(1, 1, memoryview(message)).wait(WAIT_S)
        meshes[1].close()
        assert there.failure is not None
        for message in (b"one", b"two"):
            there.receive(1, 1, memoryview(into := bytearray(3))).wait(WAIT_S)
            assert into == message
        with pytest.raises(PeerLostError, match="rank 1 has ended its run"):
            there.receive(1, 1, memoryview(bytearray(3))).wait(WAIT_S)
        meshes[0].close()

    def test_an_error_in_the_receiving_thread_is_told(self, two):
        def fail(header):
            raise MemoryError("no more")

        two[0].connections[1]._receive_queue.buffer_for = fail
        waiting = two[0].connections[1].receive(1, 0, memoryview(bytearray(1)))
        two[1].connections[0].send(1, 0, memoryview(b"x"))
        there = two[1].connections[0].receive(1, 0, memoryview(bytearray(1)))
        with pytest.raises(LinkError, match="connection to rank 1 failed: MemoryError: no more"):
            waiting.wait(WAIT_S)
        with pytest.raises(PeerLostError, match=r"rank 0 gave up the connection .*MemoryError: no more") as raised:
            there.wait(WAIT_S)
        assert raised.value.rank == 0


class TestStart:
    def test_ranks_that_start_further_apart_than_a_route_takes(self, folders, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.routes._ROUTE_S", 0.5)
        address = free_address()

        def one(rank: int) -> Mesh:
            time.sleep(2.0 if rank == 2 else 0.0)
            return connect_mesh(JoinConfig(rank, 3, address), Credentials(folders[rank]), wait_s=WAIT_S)

        meshes = together([lambda rank=rank: one(rank) for rank in range(3)])
        assert meshes[1].routes[2] == DIRECT
        close_all(meshes)

    def test_a_rank_that_comes_late_to_the_relay_is_waited_for(self, folders, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.routes._REPLY_S", 3.0)
        original = Routes._connect_relayed

        def late(self, *args):
            time.sleep(6.0 if self._own.rank == 2 else 0.0)
            return original(self, *args)

        monkeypatch.setattr(Routes, "_connect_relayed", late)
        meshes = meet_all(folders, (1, 2))
        assert meshes[1].routes[2] == RELAYED
        close_all(meshes)

    def test_a_rank_that_never_comes_is_named_by_the_others(self, folders):
        address = free_address()

        def one(rank: int) -> Exception:
            with pytest.raises(LinkError) as raised:
                connect_mesh(JoinConfig(rank, 3, address), Credentials(folders[rank]), wait_s=4.0 if rank == 0 else 1.0)
            return raised.value

        first, second = together([lambda: one(0), lambda: one(1)])
        assert str(second) == "rank 2 did not join the run within 1 s"
        assert "rank 2 did not join the run within 4 s" in str(first)

    @pytest.mark.parametrize("error", [LinkError("no way leads there"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
    def test_why_a_rank_does_not_connect_is_told_to_all(self, folders, monkeypatch, error):
        monkeypatch.setattr("pipecomp.tls.mesh._READY_S", 30.0)
        address, original = free_address(), Routes.find

        def find(self, other: int):
            if self._own.rank == 2:
                raise error
            return original(self, other)

        def one(rank: int) -> BaseException:
            with pytest.raises((LinkError, type(error))) as raised:
                connect_mesh(JoinConfig(rank, 3, address), Credentials(folders[rank]), wait_s=WAIT_S)
            return raised.value

        monkeypatch.setattr(Routes, "find", find)
        found = together([lambda rank=rank: one(rank) for rank in range(3)])
        said = f"rank 2 gave up the connection to this rank: {type(error).__name__}"
        assert said in str(found[0])
        assert said in str(found[1])
        assert found[2] is error

    def test_a_rank_is_connected_as_soon_as_it_is_found(self, folders, monkeypatch):
        made = Mesh(JoinConfig(1, 4, free_address()), Credentials(folders[1]))
        connected: list[int] = []
        third = threading.Event()

        def find(rank: int) -> int:
            if rank == 2:  # whose way is found only when rank 3 is connected
                assert third.wait(10)
            return rank

        def take(rank: int, way: int) -> None:
            connected.append(way)
            third.set()

        monkeypatch.setattr("pipecomp.tls.mesh.wait_for_keys", lambda *_: None, raising=False)
        monkeypatch.setattr(made, "_add", take)
        made._routes = SimpleNamespace(find=find)
        together([lambda: made._connect_others(*[WAIT_S] * (made._connect_others.__code__.co_argcount - 1))])
        assert connected == [3, 2]

    def test_who_lost_a_connection_that_is_not_taken_yet_may_come_again(self, folders):
        made = Mesh(JoinConfig(1, 3, free_address()), Credentials(folders[1]))
        said: list[object] = []
        guest = handshake.IncomingConnection(2, handshake.RESUME, 1, 0, SimpleNamespace(send_json=said.append))
        with pytest.raises(EOFError):
            made._resume(guest)
        assert said == [], "it would give up"

    def test_rank_0_that_comes_behind_a_tunnel_is_waited_for(self, folders, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.routes._REPLY_S", 0.3)
        address, ends = free_address(), []

        def serve() -> None:
            with socket.create_server((address.host, address.port)) as server:
                server.accept()[0].close()
                ends.append(server.accept()[0])  # and says nothing
                server.accept()[0].close()

        tunnel = threading.Thread(target=serve, daemon=True)
        tunnel.start()

        def first() -> Mesh:
            tunnel.join(20)
            monkeypatch.setattr("pipecomp.tls.routes._REPLY_S", 10.0)
            return connect_mesh(JoinConfig(0, 2, address), Credentials(folders[0]), wait_s=20.0)

        def second() -> Mesh:
            return connect_mesh(JoinConfig(1, 2, address), Credentials(folders[1]), wait_s=20.0)

        close_all(together([first, second]))
        ends[0].close()

    def test_a_path_on_which_large_packets_vanish_is_named_by_both_ranks(self, folders, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.routes._REPLY_S", 2.0)
        address, front = free_address(), socket.create_server(("127.0.0.1", 0))

        def forward(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(data)
            target.close()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    end = front.accept()[0]
                    if end.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) > 600:
                        held.append(end)  # what is sent is lost
                        continue
                    other = socket.create_connection(address)
                    for pair in ((end, other), (other, end)):
                        threading.Thread(target=forward, args=pair, daemon=True).start()

        held: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()

        def joins(rank: int, at: Address) -> str:
            with pytest.raises(LinkError, match="small packets pass and large ones do not") as caught:
                connect_mesh(JoinConfig(rank, 2, at), Credentials(folders[rank]), wait_s=WAIT_S)
            return str(caught.value)

        where = Address(*front.getsockname())
        for error in together([lambda: joins(0, address), lambda: joins(1, where)]):
            assert "(rank 1) and 127.0.0.1 (rank 0)" in error
        front.close()
        assert len(held) == 2, "a second attempt confirms the first"
        for end in held:
            end.close()

    def test_what_a_rank_says_at_its_end_is_short_and_on_one_line(self, folders):
        meshes = meet_all(folders[:2])
        meshes[1].close("a bug\n\x1b[2Jpipecomp: rank 0: fine" + "." * 5000)
        with pytest.raises(PeerLostError, match="rank 1 gave up the connection to this rank: a bug; ") as caught:
            meshes[0].connections[1].receive(1, 0, memoryview(bytearray(1))).wait(WAIT_S)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1100
        meshes[0].close()

    def test_a_rank_that_missed_rank_0s_answer_comes_again(self, folders):
        address, place, before = free_address(), handshake.RankInfo(Credentials(folders[1]), 1, 3, ""), None
        made = Mesh(JoinConfig(0, 3, address), Credentials(folders[0]))
        with pytest.raises(LinkTimeoutError, match="rank 1 did not join"):
            made._admit_all(0.0)  # it listens on
        for _ in range(2):
            stream, _ = connect(address, place, handshake.ConnectRequest(handshake.JOIN, 0), wait_s=5)
            stream.close()
            deadline = time.monotonic() + WAIT_S
            while (there := made.connections.get(1)) is before or there is None or not there.resumable.is_down:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            before = there
        kill(made)

    def test_a_rank_that_has_ended_joins_rank_0s_next_start(self, folders):
        """Not the one that it has left, in whose key-value store everything is there already."""
        address = free_address()

        def one(rank: int) -> Mesh:
            return connect_mesh(JoinConfig(rank, 2, address), Credentials(folders[rank]), wait_s=30.0)

        before = together([lambda: one(0), lambda: one(1)])
        before[1].close()
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(one, 1)
            time.sleep(1.0)
            before[0].close()
            first = one(0)
            second = coming.result(WAIT_S)
        assert second._own.session == first._own.session
        close_all([first, second])

    def test_nobody_joins_a_start_that_is_given_up(self, folders, monkeypatch):
        made = Mesh(JoinConfig(0, 3, address := free_address()), Credentials(folders[0]))
        with pytest.raises(LinkTimeoutError, match="rank 1 did not join"):
            made._admit_all(0.0)
        close = made._listener.close
        monkeypatch.setattr(made._listener, "close", lambda: None)
        made.close()
        with pytest.raises(NoAnswerError):  # it comes again, for the next start
            connect(
                address,
                handshake.RankInfo(Credentials(folders[1]), 1, 3, ""),
                handshake.ConnectRequest(handshake.JOIN, 0),
                wait_s=5,
            )
        close()
        assert made.connections == {}

    def test_a_large_run_may_come_all_at_once(self, folders):
        for world, most in ((2, MAX_PENDING), (80, 160)):
            made = Mesh(JoinConfig(0, world, free_address()), Credentials(folders[0]))
            with pytest.raises(LinkTimeoutError):
                made._admit_all(0.0)
            assert made._listener._max_pending == most
            made.close()


@pytest.fixture
def names(monkeypatch):
    """Addresses by the names of hosts, in place of the system's."""
    known: dict[str, list[str]] = {}
    original = socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        return [found for at in known.get(host, [host]) for found in original(at, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


class TestWhereRank0Listens:
    def test_a_machine_that_knows_itself_by_a_loopback_address(self, folders, names):
        names["node-1"] = ["127.0.1.1"]
        port = free_address().port
        meetings = [JoinConfig(0, 2, Address("node-1", port)), JoinConfig(1, 2, Address("127.0.0.1", port))]
        calls = [lambda m=m: connect_mesh(m, Credentials(folders[m.rank]), wait_s=WAIT_S) for m in meetings]
        close_all(together(calls))

    @pytest.mark.parametrize(
        ("host", "world", "expected"),
        [
            ("node-1", 2, ALL_INTERFACES),
            ("node-1", 1, "node-1"),
            ("node-2", 2, "node-2"),
            ("localhost", 2, "localhost"),
            ("127.0.1.1", 2, "127.0.1.1"),
            ("unknown.invalid", 2, "unknown.invalid"),
        ],
    )
    def test_default(self, names, host, world, expected):
        names.update({"node-1": ["10.0.0.1", "127.0.1.1"], "node-2": ["10.0.0.2", "10.1.0.2"]})
        assert default_listen(Address(host, 1), world).host == expected


class TestWhoIsGone:
    def test_that_nothing_listens_where_a_rank_was_never_reached_says_nothing(self, two, folders):
        trust, there = Credentials(folders[0]), Address.parse(two[0].store.get(address_key(1)).decode())
        nowhere = PeerListener(trust, 1, free_address())
        nowhere.probe()
        assert not nowhere.is_gone()
        with socket.create_server(("127.0.0.1", 0)) as server:  # somebody else, with the same address as that rank's
            another = PeerListener(trust, 1, Address(*server.getsockname()))
            threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
            another.probe()
        assert not another.is_gone()
        door, wrong = PeerListener(trust, 1, there), PeerListener(trust, 2, there)
        for each in (door, wrong):
            each.probe()
            assert not each.is_gone()
        two[1]._routes.close()
        assert (door.is_gone(), wrong.is_gone()) == (True, False)

    def test_a_rank_whose_address_means_nothing_here_is_waited_for(self, folders, monkeypatch):
        """As behind NAT: it makes the connection, and only it can make it anew."""
        monkeypatch.setattr("pipecomp.tls.resumable.GONE_S", 0.2)
        meshes = meet_all(folders[:2])
        meshes[1].store.set(address_key(1), str(free_address()))
        with contextlib.suppress(AttributeError):
            meshes[0]._probe_listeners()
        line, until = meshes[1].connections[0].resumable, time.monotonic() + 3.0
        dial = line._dialer.dials[0]

        def late(*arguments):
            if time.monotonic() < until:
                raise OSError("no way yet")
            return dial(*arguments)

        line._dialer = line._dialer._replace(dials=(late,))
        line._stream.close()
        into = bytearray(1)
        waiting = meshes[0].connections[1].receive(1, 0, memoryview(into))
        meshes[1].connections[0].send(1, 0, memoryview(b"x"))
        waiting.wait(WAIT_S)
        assert into == b"x"
        close_all(meshes)

    def test_no_rank_tells_others_to_connect_to_all_interfaces(self, folders):
        address = free_address()
        meetings = [JoinConfig(0, 2, address), JoinConfig(1, 2, address, listen=Address("0.0.0.0", 0))]
        meshes = together([lambda m=m: connect_mesh(m, Credentials(folders[m.rank]), wait_s=WAIT_S) for m in meetings])
        assert meshes[0].store.get(address_key(1)).decode().startswith("127.0.0.1:")
        close_all(meshes)


class Limited:
    """A sink with a limit."""

    most_bytes = 1000

    def __init__(self):
        self.came, self.ended, self.notes = [], threading.Event(), []

    def deliver(self, packet, began):
        self.came.append(packet)

    def noted(self, note):
        self.notes.append(note)

    def failed(self, error):
        self.error = error
        self.ended.set()


def allocations(monkeypatch) -> list:
    """Record what the receive queues allocate from here on, and allocate nothing."""
    took = []
    only_here = SimpleNamespace(**vars(np) | {"empty": lambda *a, **k: took.append(a)})
    monkeypatch.setattr("pipecomp.tls.receive_queue.np", only_here)
    return took


class TestLimits:
    """A member of the run that sends what was not agreed is refused before memory is taken."""

    def refused(self, two, *frames: bytes) -> str:
        sink = Limited()
        two[0].connections[1].open_stream(77, sink)
        queue = two[1].connections[0]._send_queue
        queue._control.append((FrameKind.ACK, (b"".join(frames), b"")))  # by the thread that sends, as everything
        queue.wake()
        assert sink.ended.wait(WAIT_S)
        assert isinstance(sink.error, WireError)
        assert "rank 1 sent" in str(sink.error)
        return str(sink.error)

    def test_a_packet_longer_than_agreed(self, two, monkeypatch):
        took = allocations(monkeypatch)
        header = FrameHeader(FrameKind.DATA, 5, 77, 0, 1001)
        assert "a packet of 1001 bytes, allowed: 1000" in self.refused(two, header.pack())
        assert took == []

    def test_more_packets_than_there_is_room_for(self, two, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.receive_queue.ROOM_BYTES", 4000)
        frames = [FrameHeader(FrameKind.DATA, 0, 77, 0, 0).pack() for _ in range(20)]
        assert "a packet of 0 bytes beyond the receive window of 4000 bytes" in self.refused(two, *frames)
        assert len(two[0].connections[1]._receive_queue.sinks[77].came) == 16

    @pytest.mark.parametrize("total", [EAGER_BYTES + 1, 1 << 40, (1 << 64) - 1])
    def test_a_message_that_nobody_asked_for(self, two, monkeypatch, total):
        took = allocations(monkeypatch)
        assert "an unexpected message" in self.refused(two, FrameHeader(FrameKind.DATA, 0, 3, 0, total).pack())
        assert took == []

    def test_many_messages_that_nobody_asked_for(self, two, monkeypatch):
        monkeypatch.setattr("pipecomp.tls.receive_queue.MAX_UNEXPECTED_BYTES", 4000)
        frames = [FrameHeader(FrameKind.DATA, 0, 3, tag, 0).pack() for tag in range(20)]
        assert "an unexpected message" in self.refused(two, *frames)

    @pytest.mark.parametrize("total", [7, 9])
    def test_another_length_than_that_of_the_receive(self, two, total):
        waiting = two[0].connections[1].receive(4, 0, memoryview(bytearray(8)))
        said = self.refused(two, FrameHeader(FrameKind.DATA, 0, 4, 0, total).pack())
        assert f"{total} bytes where one of 8 is expected" in said
        with pytest.raises(WireError):
            waiting.wait(WAIT_S)

    @pytest.mark.parametrize("total", [7, 9])
    def test_another_length_than_that_of_a_receive_that_comes_later(self, two, total):
        two[1].connections[0].send(4, 0, memoryview(bytes(total)))
        two[1].connections[0].send(4, 1, memoryview(b"later"))
        two[0].connections[1].receive(4, 1, memoryview(bytearray(5))).wait(WAIT_S)
        with pytest.raises(WireError, match=f"a message of {total} bytes where one of 8 is expected"):
            two[0].connections[1].receive(4, 0, memoryview(bytearray(8))).wait(WAIT_S)

    @pytest.mark.parametrize("size", [EAGER_BYTES + 1, EAGER_BYTES + 3])
    def test_another_length_than_that_of_a_message_that_waits(self, two, size):
        two[0].connections[1].send(4, 0, memoryview(bytes(EAGER_BYTES + 2)))
        said = self.refused(two, FrameHeader(FrameKind.READY, 0, 4, 0, size).pack())
        assert f"a receive of {size} bytes is posted for a message of {EAGER_BYTES + 2}" in said

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            (FrameHeader(FrameKind.DATA, CONTENT_BYTES + 1, 77, 0, 900), "allowed"),
            (FrameHeader(FrameKind.DATA, 11, 3, 0, 10), "11 bytes of a message of 10"),
            (FrameHeader(FrameKind.STORE_REQUEST, (1 << 22) + 1), "STORE_REQUEST with 4194305 bytes, allowed: 4194304"),
            (FrameHeader(FrameKind.READY, 1, 3, 0, 5), "READY with 1 bytes, allowed: 0"),
            (FrameHeader(99, 0), "unknown kind 99"),
            (FrameHeader(FrameKind.STORE_REPLY, 2, tag=1), "does not take"),
        ],
    )
    def test_what_is_no_frame(self, two, header, said):
        assert said in self.refused(two, header.pack(), b"[]")

    @pytest.mark.parametrize("total", [9, 11])
    def test_a_frame_that_changes_its_messages_length(self, two, total):
        frames = [
            FrameHeader(FrameKind.DATA, 1, 77, 0, 10).pack(),
            b"x",
            FrameHeader(FrameKind.DATA, 1, 77, 0, total).pack(),
            b"x",
        ]
        assert "announced as 10" in self.refused(two, *frames)

    @pytest.mark.parametrize("text", [b"[", b"\xff", b'["x"]', b'["set", 1, 2]', b'["set", "k", "?"]', b"3"])
    def test_what_is_no_question(self, two, text):
        assert "rank 1 sent" in self.refused(two, FrameHeader(FrameKind.STORE_REQUEST, len(text), tag=1).pack(), text)

    @pytest.mark.parametrize(("kind", "what"), [(FrameKind.READY, "receives"), (FrameKind.CREDIT, "streams")])
    def test_endless_announcements(self, two, monkeypatch, kind, what):
        monkeypatch.setattr("pipecomp.tls.send_queue.MAX_POSTED", 10)
        assert f"more than 10 {what}" in self.refused(
            two, *[FrameHeader(kind, 0, 3 + i, i, 1).pack() for i in range(11)]
        )

    def test_messages_and_receives_that_were_met_count_no_more(self, monkeypatch):
        """A run has millions of them."""
        monkeypatch.setattr("pipecomp.tls.receive_queue.MAX_UNEXPECTED_BYTES", 1000)
        monkeypatch.setattr("pipecomp.tls.send_queue.MAX_POSTED", 2)
        receives, sends = ReceiveQueue(), SendQueue()
        for _ in range(10):
            header = FrameHeader(FrameKind.DATA, 0, 3, 0, 0)
            receives.buffer_for(header)
            receives.commit(header)
            receives.receive(3, 0, memoryview(bytearray())).wait(0)
            sends.receive_posted(3, 0, EAGER_BYTES + 1)
            sends.send(3, 0, memoryview(bytes(EAGER_BYTES + 1)))
            assert sends.next_frames(0, 0.0)


def test_connections_end_when_the_interpreter_does(tmp_path):
    """No thread can be started from a pool any more then."""
    keys_for(tmp_path, 2)
    code = """
import atexit, sys
from pathlib import Path
from pipecomp.tls.key_folder import KeyFolder
from pipecomp.tls.listener import Address
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.mesh import JoinConfig, connect_mesh
rank, address = int(sys.argv[1]), Address.parse(sys.argv[2])
made = connect_mesh(JoinConfig(rank, 2, address), Credentials(KeyFolder(Path(sys.argv[3]) / f"rank-{rank}")), wait_s=60)
atexit.register(made.close)
"""
    address = str(free_address())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), address, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.communicate(timeout=120)[1] == ""
        assert rank.returncode == 0


class TestStrangers:
    def test_a_rank_that_its_certificate_does_not_name(self, folders):
        with pytest.raises(KeysError, match=r"'machine-1' claims rank 2; it may be 1"):
            connect_mesh(JoinConfig(2, 3, free_address()), Credentials(folders[1]), wait_s=0)

    def test_nobody_joins_without_the_runs_keys(self, folders, tmp_path, capsys):
        address, stranger = free_address(), create_keys(tmp_path / "x", ranks="0-2")
        meshes = []
        first = threading.Thread(
            target=lambda: meshes.append(
                connect_mesh(JoinConfig(0, 2, address), Credentials(folders[0]), wait_s=WAIT_S)
            )
        )
        first.start()
        with pytest.raises(KeysError, match="is not rank 0 of this run: its certificate is of another run"):
            connect_mesh(JoinConfig(1, 2, address), Credentials(stranger), wait_s=WAIT_S)
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(600)):
            with socket.create_connection((address.host, address.port)) as sock, contextlib.suppress(OSError):
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
        second = connect_mesh(JoinConfig(1, 2, address), Credentials(folders[1]), wait_s=WAIT_S)
        first.join(WAIT_S)
        close_all([*meshes, second])
        assert "rejected a connection from 127.0.0.1" in capsys.readouterr().err

    def test_an_impostor_in_rank_0s_own(self, folders, tmp_path):
        """A member of the run that may not be rank 0, at rank 0's address."""
        address = free_address()
        trap = threading.Thread(target=self.listen, args=(address, Credentials(folders[2])), daemon=True)
        trap.start()
        with pytest.raises(KeysError, match=r"not rank 0 of this run: machine 'machine-2' claims rank 0"):
            connect_mesh(JoinConfig(1, 3, address), Credentials(folders[1]), wait_s=WAIT_S)
        trap.join(WAIT_S)

    @staticmethod
    def listen(address, trust):
        with socket.create_server((address.host, address.port)) as server:
            sock, _ = server.accept()
            with contextlib.suppress(Exception):
                trust.secure(sock, server=True)

    def test_what_else_serves_the_port_is_named_at_once(self, folders):
        address = free_address()

        def serve():
            with socket.create_server((address.host, address.port)) as server:
                sock, _ = server.accept()
                sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                with contextlib.suppress(OSError):
                    sock.recv(10000)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(KeysError, match="is not rank 0 of this run: it does not speak TLS"):
            connect_mesh(JoinConfig(1, 2, address), Credentials(folders[1]), wait_s=WAIT_S)

    def test_an_invitation_that_waits_there_is_named(self, folders):
        with (
            Invitation(folders[0].path, "more", ranks="7", listen="127.0.0.1:0") as invitation,
            pytest.raises(KeysError, match=r"is not rank 0 of this run: an invitation of run .* waits there"),
        ):
            connect_mesh(JoinConfig(1, 2, invitation.address), Credentials(folders[1]), wait_s=WAIT_S)

    def test_a_rank_comes_once(self, two, folders):
        place = handshake.RankInfo(Credentials(folders[1]), 1, 2, "")
        with pytest.raises(handshake.ConnectionRejectedError, match="rank 1 has joined already"):
            connect(
                two[0]._config.address,
                place,
                handshake.ConnectRequest(handshake.JOIN, 0),
                wait_s=5,
            )
        two[1].connections[0].send(1, 0, memoryview(b"x")).wait(WAIT_S)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"world": 3}, "rank 1 of 3 does not fit rank 0 of 2"),
            ({"session": "x"}, "another start of this run"),
            ({"version": 2}, "rank 0 uses frame format 4, rank 1 uses 2"),
            ({"rank": 0}, "machine 'machine-1' claims rank 0; it may be 1"),
            ({"purpose": handshake.PEER}, "rank 0 does not serve 'peer'"),
            ({"to": "1"}, "rank 0 does not serve 'relay'"),
            *(({"received": n}, f"an invalid number of received frames: {n}") for n in (-1, True, 1.5, None)),
        ],
    )
    def test_who_does_not_fit_is_told(self, two, folders, monkeypatch, change, said):
        place, real = handshake.RankInfo(Credentials(folders[1]), 1, 2, two[1]._own.session), SecureStream.send_json
        asks = lambda stream, words: real(stream, {**words, **change} if "version" in words else words)  # noqa: E731
        monkeypatch.setattr(SecureStream, "send_json", asks)
        with pytest.raises(handshake.ConnectionRejectedError, match=said):
            connect(
                two[0]._config.address,
                place,
                handshake.ConnectRequest(handshake.RELAY, 0, 1),
                wait_s=5,
            )

    @pytest.mark.parametrize("rank", [0, 2])
    def test_a_rank_that_the_run_has_not_or_that_answers_is_told(self, two, folders, rank):
        place = handshake.RankInfo(Credentials(folders[rank]), rank, 2, two[1]._own.session)
        with pytest.raises(handshake.ConnectionRejectedError, match=f"rank {rank} of 2 does not fit rank 0 of 2"):
            connect(
                two[0]._config.address,
                place,
                handshake.ConnectRequest(handshake.RELAY, 0, 1),
                wait_s=5,
            )

    def test_a_machine_that_answers_as_another_of_its_ranks(self, folders):
        """Its certificate may be for both, and its address stand where the other's should."""
        trust, answer = Credentials(folders[1]), {"rank": 2, "session": ""}
        stream = SimpleNamespace(
            send_json=lambda words: None, receive_json=lambda: answer | {"revoked": trust.revocation_list}
        )
        with pytest.raises(KeysError, match="it answers as rank 2, not as rank 0"):
            handshake.request_connection(
                stream,
                Credentials(folders[0]).identity,
                handshake.RankInfo(trust, 1, 3, ""),
                handshake.ConnectRequest(handshake.JOIN, 0),
            )

    def test_rank_0_does_not_pass_for_a_rank_that_it_relays(self, two, folders):
        """Else it could read what two others send each other."""
        ends, place = socket.socketpair(), handshake.RankInfo(Credentials(folders[0]), 0, 2, two[1]._own.session)

        def pretend() -> None:
            stream, who = place.credentials.secure(ends[1], server=False)
            with contextlib.suppress(KeysError):
                handshake.request_connection(stream, who, place, handshake.ConnectRequest(handshake.PEER, 1))

        with ThreadPoolExecutor(1) as pool:
            pretending = pool.submit(pretend)
            with pytest.raises(KeysError, match="rank 0 is at the other end"):
                two[1]._routes._handshake_inside(
                    SimpleNamespace(sock=ends[0], unwrap=bytes), 2, handshake.FIRST_SUBFLOW, 0
                )
            ends[0].close()
            pretending.result(WAIT_S)

    @pytest.mark.parametrize("to", [-1, 0, 1, 2, 1 << 70])
    def test_nobody_is_relayed_to_who_is_no_other_rank(self, two, folders, to):
        """Each would wait in rank 0's relay for ever, with a socket of its own."""
        place = handshake.RankInfo(Credentials(folders[1]), 1, 2, two[1]._own.session)
        with pytest.raises(
            handshake.ConnectionRejectedError, match=f"there is no rank {to} that rank 1 could be relayed to"
        ):
            connect(
                two[0]._config.address,
                place,
                handshake.ConnectRequest(handshake.RELAY, 0, to),
                wait_s=5,
            )
        assert two[0]._relay._waiting == {}

    def test_nobody_is_relayed_to_who_is_gone(self, three, folders, monkeypatch):
        """It would wait for a rank that does not come."""
        monkeypatch.setitem(three[0].connections, 2, SimpleNamespace(failure=LinkError("it has ended")))
        place = handshake.RankInfo(Credentials(folders[1]), 1, 3, three[1]._own.session)
        with pytest.raises(handshake.ConnectionRejectedError, match="rank 2 is gone: it has ended"):
            connect(
                three[0]._config.address,
                place,
                handshake.ConnectRequest(handshake.RELAY, 0, 2),
                wait_s=5,
            )

    def test_who_was_given_up_is_told_and_does_not_come_again(self, two, folders):
        two[0].connections[1].fail(LinkError("it is over"))
        place = handshake.RankInfo(Credentials(folders[1]), 1, 2, two[1]._own.session)
        with pytest.raises(handshake.ConnectionRejectedError, match="rank 0 has given up the connection to rank 1"):
            connect(
                two[0]._config.address,
                place,
                handshake.ConnectRequest(handshake.RESUME, 0),
                wait_s=5,
            )

    def test_who_only_hangs_up_leaves_room_for_what_is_said_of_others(self, folders, capsys):
        made = Mesh(JoinConfig(0, 2, free_address()), Credentials(folders[0]))
        for _ in range(20):
            made._log_rejected("127.0.0.1", EOFError())
        for number in range(9):
            made._log_rejected("127.0.0.1", LinkError(f"reason {number}"))
        said = capsys.readouterr().err.splitlines()
        assert [line.split(": ")[2] for line in said] == [
            *(f"reason {number}" for number in range(4)),
            "reason 4 (later ones are not logged)",
        ]

    def test_a_revoked_machine_does_not_join_and_ranks_learn_of_it(self, tmp_path):
        folders = keys_for(tmp_path, 2)
        third = add_machine(folders[0], tmp_path / "third", "third", (2,))
        revoke_machine(folders[0].path, "third")
        meshes = meet_all(folders)
        assert folders[1].revocations()[0] == 2
        place = handshake.RankInfo(Credentials(third), 2, 2, meshes[0]._own.session)
        with pytest.raises(handshake.ConnectionRejectedError, match="'third' was revoked"):
            connect(
                meshes[0]._config.address,
                place,
                handshake.ConnectRequest(handshake.JOIN, 0),
                wait_s=5,
            )
        close_all(meshes)

    def test_a_rank_that_never_comes(self, folders):
        with pytest.raises(LinkTimeoutError, match=r"rank 1 did not join the run within 0\.2 s"):
            connect_mesh(JoinConfig(0, 2, free_address()), Credentials(folders[0]), wait_s=0.2)
        with pytest.raises(LinkTimeoutError, match=r"did not find rank 0 at 127\.0\.0\.1"):
            connect_mesh(JoinConfig(1, 2, free_address()), Credentials(folders[1]), wait_s=0.2)
