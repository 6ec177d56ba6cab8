"""Changes from cluster centers: the codebook against a reference in plain Python, and both ends of a link."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipecomp.codecs import wire
from pipecomp.codecs.selection import LinkCodecs
from pipecomp.config import Config
from pipecomp.config.activations import ConstantError
from pipecomp.errors import (
    BaseMismatchError,
    ConfigError,
    LinkError,
    NonFiniteError,
    PipecompError,
    StoreError,
    WireError,
)
from pipecomp.kernels.reference.reproducible import random_bits
from pipecomp.plan.packet_sizes import activation_bytes
from pipecomp.stages.link.clusters import BLOCK, IDLE, MEMORY, OPENED, Codebook
from pipecomp.stages.link.crop_canvas import CropCanvas
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.handshake import check_drift, reconcile_stores
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.links import Links
from pipecomp.stages.link.packet import PacketLimits
from tests import link_fixtures
from tests.lazy_staging import on_both
from tests.link_fixtures import Ends, S, at_both, change_packets, layout, send_activation, stored

staging = pytest.fixture(autouse=True, params=["host", "double"])(on_both)
on_host = pytest.mark.parametrize("staging", ["host"], indirect=True)

B, H, C = 3, 16, 64


def link(activations: dict[str, Any] | None = None, *, clusters: int = C, **ends: Any) -> Ends:
    section = {"backend": "memory", "clusters": clusters}
    return link_fixtures.link({"method": "aqsgd", **(activations or {})}, store=section, **ends)


def texts(steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Micro-batches of rows that lie close to a few points."""
    draw = torch.Generator().manual_seed(steps)
    points = 3 * torch.randn(20, H, generator=draw)
    return [
        (points[torch.randint(20, (B, S), generator=draw)] + 0.1 * torch.randn(B, S, H, generator=draw)).to(dtype)
        for _ in range(steps)
    ]


def step(up: LinkSender, down: LinkReceiver, x_BSH: Tensor, where: Layout, number: int) -> Tensor:
    y_BSH = send_activation(up, down, x_BSH, where, number)
    up.end_step()
    down.end_step()
    return y_BSH


# -- the codebook


class Reference:
    """The centers of docs/algorithms.md, 1.8, one row and one value after the other."""

    def __init__(self, clusters: int, hidden: int) -> None:
        self.centers = np.zeros((clusters, hidden), np.float32)
        self.counts, self.used, self.rows = [0] * clusters, [0] * clusters, 0

    def learn(self, numbers: list[int], y: np.ndarray, drawn: list[int]) -> None:
        """drawn: the packet's rows in the order in which they may open centers."""
        clusters = len(self.centers)
        self.rows += len(numbers)
        now = self.rows // clusters
        order = sorted(range(1, clusters), key=lambda c: self.used[c] if self.counts[c] else -IDLE)
        free = [c for c in order if c not in numbers and (not self.counts[c] or self.used[c] <= now - IDLE)]
        opening = dict(zip(drawn[: -(-len(numbers) // OPENED)], free, strict=False))
        before, counts = self.centers.copy(), list(self.counts)
        moving = [row for row, number in enumerate(numbers) if number and row not in opening]
        changes = {row: y[row] - before[numbers[row]] for row in moving}  # float32
        largest = max((float(np.abs(change).max()) for change in changes.values()), default=1.0)
        unit = 2.0 ** (math.frexp(largest)[1] - 38)
        for center in set(numbers) - {0}:
            mine = [row for row in moving if numbers[row] == center]
            whole = sum((np.rint(changes[row].astype(np.float64) / unit) for row in mine), np.zeros(y.shape[1]))
            if mine:
                moved = before[center].astype(np.float64) + whole * unit / (counts[center] + len(mine))
                self.centers[center] = moved.astype(np.float32)
            self.counts[center] = min(MEMORY, counts[center] + len(mine))
            self.used[center] = now
        for row, center in opening.items():
            self.centers[center], self.counts[center], self.used[center] = y[row], 1, now


def rows_of(packet: int, hidden: int = H, rows: int = 24) -> Tensor:
    """Rows of a packet; those of later ones lie elsewhere."""
    draw = torch.Generator().manual_seed(packet)
    return torch.randn(rows, hidden, generator=draw) + 2 * (packet // 40)


@on_host
@pytest.mark.parametrize("clusters", [2, 8, 64, 256])
def test_centers_are_those_of_the_reference(clusters: int) -> None:
    """First while they are opened, then while they follow; from packet 40 on rows lie elsewhere."""
    book, reference = Codebook(clusters, H, torch.device("cpu")), Reference(clusters, H)
    reopened = 0
    for packet in range(1, 81):
        y_TH = rows_of(packet)
        number_T = book.nearest(y_TH, 1)[:, 0]
        number_T[packet % 24] = 0
        drawn = torch.sort(random_bits(reference.rows + 24, 0, 24), stable=True).indices.tolist()
        was_open = int((book._counts_C > 0).sum())
        before = reference.centers.copy()
        book.learn(number_T, y_TH, packet)
        reference.learn(number_T.tolist(), y_TH.numpy(), drawn)
        assert torch.equal(book.centers_CH, torch.from_numpy(reference.centers)), packet
        assert book._counts_C[1:].tolist() == reference.counts[1:]
        reopened += was_open == clusters - 1 and bool((np.abs(reference.centers - before).max(1) > 2).any())
    assert not book.centers_CH[0].any()
    assert int((book._counts_C > 0).sum()) == clusters - 1
    assert reopened or clusters == 256


@on_host
def test_a_center_is_the_mean_of_its_rows_and_then_of_the_last_of_them() -> None:
    book = Codebook(2, 1, torch.device("cpu"))
    first = torch.tensor([[3.0]])
    book.learn(torch.tensor([0]), first, 1)
    assert book.centers_CH.tolist() == [[0.0], [3.0]]
    for packet in range(2, 2 + 2 * MEMORY):
        book.learn(torch.tensor([1, 1]), torch.tensor([[4.0], [6.0]]), packet)
        if packet == 2:
            assert book.centers_CH[1].item() == pytest.approx((3 + 4 + 6) / 3)
    far = book.centers_CH[1].item()
    assert far == pytest.approx(5.0, abs=0.01)
    book.learn(torch.tensor([1]), torch.tensor([[5.0 + MEMORY]]), 1000)
    assert book.centers_CH[1].item() - far == pytest.approx(MEMORY / (MEMORY + 1), rel=0.01)


@on_host
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_sums_depend_neither_on_the_order_of_rows_nor_on_threads(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    y_TH = torch.randn(4096, 96, generator=draw) * scale
    number_T = torch.randint(0, 8, (4096,), generator=draw)
    found = []
    threads = torch.get_num_threads()
    for order, used in ((torch.arange(4096), 1), (torch.randperm(4096, generator=draw), 1), (torch.arange(4096), 2)):
        torch.set_num_threads(used)
        book = Codebook(8, 96, torch.device("cpu"))
        book._counts_C[1:] = 1  # all are open
        book.learn(number_T[order], y_TH[order], 1)
        found.append(book.centers_CH.clone())
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    mean_H = y_TH[number_T == 3].double().sum(0) / (1 + int((number_T == 3).sum()))
    assert torch.allclose(found[0][3].double(), mean_H, rtol=1e-5, atol=1e-8 * scale)


@on_host
@pytest.mark.parametrize("clusters", [2, 64])
def test_a_loaded_codebook_goes_on_as_the_one_that_was_stored(clusters: int) -> None:
    book, stored = Codebook(clusters, H, torch.device("cpu")), {}
    book._rows = 3 * clusters * (1 << 20)  # numbers that float32 does not have
    for packet in range(1, 40):
        y_TH = rows_of(packet)
        book.learn(book.nearest(y_TH, 1)[:, 0], y_TH, packet)
        stored.update({block: (packet, state) for block, state in book.take_changed()})
        again = Codebook(clusters, H, torch.device("cpu"))
        for block, (version, state) in sorted(stored.items()):
            again.load(block, version, state)
        assert again.version == packet
        next_TH = rows_of(packet + 1)
        for one in (book, again):  # of `book`, a copy would do as well
            one.take_changed()
        assert torch.equal(again.centers_CH, book.centers_CH)
        assert torch.equal(again._counts_C[1:], book._counts_C[1:])
        assert torch.equal(again._used_C[1:], book._used_C[1:])
        assert again._rows == book._rows
        assert torch.equal(again.nearest(next_TH, 3), book.nearest(next_TH, 3))
    assert len(stored) == -(-clusters // BLOCK)


@on_host
def test_a_block_that_is_none_of_its_own_is_refused() -> None:
    book = Codebook(32, H, torch.device("cpu"))
    for block, shape in ((2, (BLOCK, H + 3)), (0, (BLOCK, H)), (1, (BLOCK - 1, H + 3))):
        with pytest.raises(ValueError, match="block"):
            book.load(block, 1, torch.zeros(shape))


# -- both ends of a link

OPTIONS: list[dict[str, Any]] = [
    {},
    {"forward_bits": 2},
    {"rounding": "stochastic"},
    {"scale": "rms"},
    {"scale": "channels"},
    {"scale": {"forward": "cached_channels"}},
    {"group_size": 5},
    {"group_size": 3, "rounding": "stochastic"},
    {"forward_bits": {"error": 0.1}},
    {"backward_top_k": 0.2},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_ends_hold_the_same_and_lose_less_than_direct(options: dict[str, Any], dtype: torch.dtype) -> None:
    up, down = link(options)
    cached = isinstance(options.get("scale"), dict)
    ends = link_fixtures.link({"method": "direct", **options} | ({"scale": "channels"} if cached else {}))
    errors = []
    for number, x_BSH in enumerate(texts(12, dtype)):
        y_BSH, z_BSH = step(up, down, x_BSH, layout(), number), step(*ends, x_BSH, layout(), number)
        assert y_BSH.dtype == dtype
        assert stored(up) == stored(down) != {}
        assert up.store.inventory() == down.store.inventory()
        errors.append([float((x_BSH - v_BSH).float().norm() / x_BSH.float().norm()) for v_BSH in (y_BSH, z_BSH)])
    constant = isinstance(options.get("forward_bits"), dict)
    mine, direct = errors[-1]
    assert mine <= 0.101 if constant else mine < 0.3 * direct
    assert not constant or up.stats.forward.code_bits < ends[0].stats.forward.code_bits
    assert (up.stats.delta_samples, down.stats.delta_samples) == (12 * B, 12 * B)
    assert up.stats.error_count == (12 if up.staging.immediate else 11) * B  # on a device read a step later


def test_rounding_draws_anew_in_every_packet() -> None:
    x_BSH, found = texts(1)[0], []
    for number in range(2):
        up, down = link({"rounding": "stochastic"})
        up.send_activation(x_BSH, layout(), Position(0, number))
        found.append(down.recv_activation(Position(0, number))[0])
    assert not torch.equal(*found)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_no_row_loses_more_than_its_own_scale_allows(bits: int) -> None:
    """Rows that nothing before resembles build on zero, and lose what "direct" loses."""
    up, down = link({"forward_bits": bits})
    for number in range(10):
        x_BSH = torch.randn(B, S, H) * 10.0 ** torch.randint(-3, 3, (B, S, 1))
        y_BSH = step(up, down, x_BSH, layout(), number)
        most = x_BSH.abs().amax(-1) / 2**bits * 1.001
        assert ((x_BSH - y_BSH).abs().amax(-1) <= most).all()


def test_packets_are_as_long_as_planned_and_bounded() -> None:
    exact = {"error": 1e-4, "max": 4}  # takes the most
    for options in (
        {"forward_bits": 3},
        {"group_size": 5},
        {"backward_top_k": 0.2},
        {"forward_bits": exact},
        {"scale": "channels"},
    ):
        up, down = link(options)
        where = layout((1, 2, 3), (8, 3, 5))
        before = up.stats.forward.bytes_sent
        step(up, down, torch.randn(B, S, H), where, 0)
        size = up.stats.forward.bytes_sent - before
        config = up._config
        assert size == activation_bytes(config, 0, where.counts, H, torch.float32)
        assert size == activation_bytes(config, 0, where.counts, H, torch.float32, first_visit=True)
        sizes = [activation_bytes(config, 0, where.counts, H, torch.float32, mean_bits=bits) for bits in (2.0, 2.5)]
        assert not isinstance(config.activations.forward_bits, ConstantError) or sizes[0] < sizes[1] < size
        plain = Config.from_dict({"activations": {"method": "direct", **options}})
        assert size == activation_bytes(plain, 0, where.counts, H, torch.float32) + 16 * 6 // 8
        codecs = LinkCodecs(config.activations, 0, C)
        assert PacketLimits(B, S, H).max_bytes(codecs, torch.bfloat16) >= size
        narrow = activation_bytes(config, 0, (S,) * 64, 1, torch.bfloat16)  # more than uncompressed
        assert PacketLimits(1, S, 1).max_bytes(codecs, torch.bfloat16) >= narrow


def test_padding_costs_nothing_and_stays_zero() -> None:
    up, down = link()
    short = Layout((1, 2), (0, S - 3), (5, 3), S)
    for number in range(3):
        y_BSH = step(up, down, torch.randn(2, S, H), short, number)
    assert y_BSH[0, 5:].abs().max() == 0
    assert y_BSH[1, : S - 3].abs().max() == 0
    assert up._clusters is not None
    assert up._clusters._book is not None
    assert up._clusters._book._rows == 3 * 8


@pytest.mark.parametrize("options", [{}, {"group_size": 5}, {"scale": "rms"}, {"scale": "channels"}])
def test_empty_samples_and_whole_micro_batches_of_them(options: dict[str, Any]) -> None:
    up, down = link(options)
    for number, counts in enumerate(((0, 0), (0, 1), (0, 0), (8, 0))):
        y_BSH = step(up, down, torch.ones(2, S, H), layout((1, 2), counts), number)
        assert torch.equal(y_BSH.any(2).sum(1), torch.tensor(counts))
        assert stored(up) == stored(down)


@pytest.mark.parametrize("eval_as", ["full", "direct"])
def test_evaluation_moves_no_center(eval_as: str) -> None:
    up, down = link({"eval": eval_as})
    x_BSH = texts(1)[0]
    step(up, down, x_BSH, layout(), 0)
    before = stored(up)
    for number in range(3):
        up.send_activation(x_BSH, layout(), Position(number, 0), training=False)
        y_BSH, _ = down.recv_activation(Position(number, 0), training=False)
        assert torch.equal(x_BSH, y_BSH) == (eval_as == "full")
        up.end_step()
        down.end_step()
    assert stored(up) == stored(down) == before


def test_going_on_from_the_store_changes_no_bit() -> None:
    """One pair is made anew from its stores after every step, as by a resume; the other is not."""
    pairs = [link({"forward_bits": 2, "rounding": "stochastic"}) for _ in "ab"]
    for number, x_BSH in enumerate(texts(10)):
        found = [step(up, down, x_BSH, layout(), number) for up, down in pairs]
        assert torch.equal(found[0], found[1])
        assert at_both(*pairs[1], lambda end: reconcile_stores(end, {})) == [0, 0]
    assert stored(pairs[0][0]) == stored(pairs[1][1])


def test_other_bits_go_on_with_the_same_centers() -> None:
    up, down = link({"forward_bits": 2})
    batches = texts(5)
    for number in range(3):
        step(up, down, batches[number], layout(), number)
    before, size = stored(up), up.stats.forward.bytes_sent
    for end in (up, down):
        activations = end._config.activations.replace(forward_bits=4)
        end.set_bits(end._config.replace(activations=activations))
    step(up, down, batches[3], layout(), 3)
    assert up.stats.forward.bytes_sent - size == activation_bytes(up._config, 0, (S,) * B, H, torch.float32)
    assert stored(up) == stored(down)
    assert stored(up).keys() >= before.keys()
    fresh, its_peer = link({"forward_bits": 4})
    y_BSH, z_BSH = step(up, down, batches[4], layout(), 4), step(fresh, its_peer, batches[4], layout(), 4)
    assert float((y_BSH - batches[4]).norm()) < 0.5 * float((z_BSH - batches[4]).norm())


def test_what_one_end_lacks_the_other_forgets() -> None:
    """As after a crash between two commits, or a damaged entry that was pruned: both go on with what they share."""
    up, down = link()
    for number, x_BSH in enumerate(texts(6)):
        step(up, down, x_BSH, layout(), number)
    blocks = sorted(stored(up))
    assert len(blocks) > 2
    down.store.drop(blocks[:1])  # where the number of rows is kept
    down.store.put(blocks[2], 99, torch.zeros(BLOCK, H + 3))
    assert at_both(up, down, lambda end: reconcile_stores(end, {})) == [2, 1]
    assert sorted(stored(up)) == sorted(set(blocks) - {blocks[0], blocks[2]})
    for number, x_BSH in enumerate(texts(4)):
        step(up, down, x_BSH, layout(), 6 + number)
        assert stored(up) == stored(down)
    assert min(version for version, _ in stored(up).values()) > 0
    assert max(version for version, _ in stored(up).values()) > 99


def test_drift_is_found_and_repaired() -> None:
    up, down = link()
    for number, x_BSH in enumerate(texts(6)):
        step(up, down, x_BSH, layout(), number)
    assert at_both(up, down, lambda end: check_drift(end, 5)) == [[], []]
    assert down._clusters is not None
    assert down._clusters._book is not None
    down._clusters._book.centers_CH[BLOCK + 1, 3] += 1e-3  # a bit flips
    step(up, down, texts(7)[6], layout(), 6)
    mine, theirs = at_both(up, down, lambda end: check_drift(end, 6))
    assert mine == theirs
    assert 1 in mine
    for number, x_BSH in enumerate(texts(4)):
        step(up, down, x_BSH, layout(), 7 + number)
        assert stored(up) == stored(down)
    assert at_both(up, down, lambda end: check_drift(end, 11)) == [[], []]


@on_host
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e35])
def test_values_that_cannot_be_sent_leave_everything_as_it_was(bad: float) -> None:
    up, down = link()
    batches = texts(6)
    for number in range(3):
        step(up, down, batches[number], layout(), number)
    before = stored(up)
    wrong_BSH = batches[3].clone()
    wrong_BSH[1, 2, 3] = bad
    with pytest.raises(NonFiniteError):
        up.send_activation(wrong_BSH, layout(), Position(3, 0))
    up.end_step()
    assert stored(up) == before
    step(up, down, batches[3], layout(), 3)
    assert stored(up) == stored(down)


@pytest.mark.parametrize("staging", ["double"], indirect=True)
def test_on_a_device_nothing_of_a_bad_step_is_kept() -> None:
    up, down = link()
    batches = texts(3)
    step(up, down, batches[0], layout(), 0)
    batches[1][0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError):  # the loopback waits for the packet, after the centers have followed it
        up.send_activation(batches[1], layout(), Position(1, 0))

    def keep() -> None:
        up.end_step()
        up.store.flush()

    with pytest.raises(NonFiniteError):
        keep()


# -- what is refused


def of_samples(**values: Any) -> Any:
    return lambda h, d: (dataclasses.replace(h, samples=tuple(s._replace(**values) for s in h.samples)), d)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (of_samples(base=7), BaseMismatchError, "version 7 of the cluster centers, this end holds version 2"),
        (of_samples(form=wire.Form.FULL), BaseMismatchError, "version 2"),
        (of_samples(form=wire.Form.PLAIN), BaseMismatchError, "version 2"),
        (of_samples(version=2), WireError, "made of version 2"),
        (
            lambda h, d: (dataclasses.replace(h, samples=(h.samples[0]._replace(version=9), *h.samples[1:])), d),
            WireError,
            r"versions \[3, 9\] made of version 2",
        ),
        (lambda h, d: (dataclasses.replace(h, bits=3), d), LinkError, "3 bits.*configurations differ"),
        (lambda h, d: (dataclasses.replace(h, first_bits=3), d), LinkError, "configurations differ"),
        (lambda h, d: (dataclasses.replace(h, method=wire.PayloadMethod.QUANTIZED), d), LinkError, "quantized values"),
        (lambda h, d: (dataclasses.replace(h, hidden=H // 2), d), WireError, "bytes where"),
        (lambda h, d: (h, d[:-1]), WireError, "bytes where"),
        (lambda h, d: (h, np.append(d, d[:1])), WireError, "bytes where"),
    ],
)
def test_packets_that_build_on_something_else(change: Any, error: type[Exception], match: str) -> None:
    up, down = link()
    batches = texts(3)
    for number in range(2):
        step(up, down, batches[number], layout(), number)
    before = stored(down)
    change_packets(up, change)
    up.send_activation(batches[2], layout(), Position(2, 0))
    with pytest.raises(error, match=match):
        down.recv_activation(Position(2, 0))
    down.end_step()
    assert stored(down) == before


@on_host
def test_scales_that_are_not_finite_are_refused() -> None:
    up, down = link()
    head = LinkCodecs(up._config.activations, 0, C).clustered
    assert head is not None
    at = head.head_bytes(B * S)

    def change(header: Any, data: np.ndarray) -> Any:
        data[at : at + 4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
        return header, data

    change_packets(up, change)
    up.send_activation(texts(1)[0], layout(), Position(0, 0))
    with pytest.raises(WireError, match="NaN or Inf"):
        down.recv_activation(Position(0, 0))
    down.end_step()
    assert stored(down) == {}


@on_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_payload_decodes_or_is_refused(staging: str, data: st.DataObject) -> None:
    """Every number names a center, whatever the bytes: there is none to be refused."""
    clusters = data.draw(st.sampled_from([2, 8, 1024, 1 << 16]))
    counts = tuple(data.draw(st.lists(st.integers(0, S), min_size=1, max_size=3)))
    hidden = data.draw(st.sampled_from([1, 5, H]))
    _, down = link({"forward_bits": 2}, clusters=clusters)
    samples = tuple(wire.Sample(i, wire.Form.DELTA, 0, count, 0, 1) for i, count in enumerate(counts))
    header = wire.PacketHeader(
        kind=wire.PacketKind.ACTIVATION,
        method=wire.PayloadMethod.CLUSTERED,
        link=0,
        step=0,
        micro_batch=0,
        bits=2,
        tokens=S,
        hidden=hidden,
        samples=samples,
    )
    codec = down.codecs.clustered
    assert codec is not None
    size = codec.payload_bytes(sum(counts), hidden) + data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    payload = np.random.default_rng(data.draw(st.integers(0, 1 << 30))).integers(0, 256, max(0, size), np.uint8)
    down.transport.recv = lambda: wire.encode(header, payload)  # type: ignore[method-assign]
    try:
        y_BSH, _ = down.recv_activation(Position(0, 0))
    except PipecompError:
        return
    assert torch.isfinite(y_BSH).all()
    down.end_step()


@on_host
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bits=st.integers(1, 16), tokens=st.integers(1, 70), seed=st.integers(0, 1 << 30))
def test_numbers_are_packed_and_read_back(staging: str, bits: int, tokens: int, seed: int) -> None:
    codec = LinkCodecs(Config.from_dict({"activations": {"method": "aqsgd"}}).activations, 0, 1 << bits).clustered
    assert codec is not None
    draw = torch.Generator().manual_seed(seed)
    number_T = torch.randint(0, 1 << bits, (tokens,), generator=draw)
    payload = torch.empty(codec.payload_bytes(tokens, 3), dtype=torch.uint8)
    x_TH = torch.randn(tokens, 3, generator=draw)
    codec.encode(x_TH, number_T, torch.zeros(tokens, 3), payload, None, 0).check()
    assert torch.equal(codec.numbers(payload, tokens), number_T)
    assert codec.head_bytes(tokens) == (bits * tokens + 7) // 8


def test_more_memory_than_a_link_may_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipecomp.stages.link.clusters.MAX_TENSOR_BYTES", 4 * C * H - 1)
    up, _ = link()
    with pytest.raises(WireError, match="64 cluster centers of 16 values"):
        up.send_activation(texts(1)[0], layout(), Position(0, 0))


def test_rows_of_another_width_are_refused() -> None:
    up, down = link()
    step(up, down, texts(1)[0], layout(), 0)
    with pytest.raises(LinkError, match="rows of 8 values, cluster centers of 16"):
        up.send_activation(torch.randn(B, S, 8), layout(), Position(1, 0))


def test_entries_of_another_shape_are_refused() -> None:
    up, _ = link()
    up.store.put(0, 1, torch.zeros(BLOCK, H))
    with pytest.raises(StoreError, match="block 0 of cluster centers"):
        up.send_activation(texts(1)[0], layout(), Position(0, 0))


def test_images_that_crops_move_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"store\.clusters"):
        link(canvas=CropCanvas(4, 6, 8, 12, 3))


def test_the_gradient_packet_makes_neither_end_forget_centers() -> None:
    """It may say of samples that they were not kept; centers' entries have numbers of blocks, not of samples."""
    up, down = link()
    where = layout((0, 1, 2))
    step(up, down, texts(1)[0], where, 0)
    before = stored(up)
    change_packets(down, of_samples(form=wire.Form.NOT_KEPT))
    down.send_gradient(torch.randn(B, S, H), where, Position(0, 0))
    up.recv_gradient(where, Position(0, 0))
    assert stored(up) == before


@on_host
def test_a_training_that_begins_anew_drops_all_centers() -> None:
    """A `PipelineTrainer` whose engine stays open; both of its ranks do so."""
    from pipecomp.trainer.checkpoints import drop_cached_activations

    up, down = link()
    batches = texts(4)
    for number in range(3):
        step(up, down, batches[number], layout(), number)
    environment: Any = SimpleNamespace(commit=lambda: None)
    drop_cached_activations(SimpleNamespace(links=Links(to_next=up, to_previous=down, environment=environment)))
    assert stored(up) == stored(down) == {}
    x_BSH = batches[3]
    fresh, its_peer = link()
    assert torch.equal(step(up, down, x_BSH, layout(), 3), step(fresh, its_peer, x_BSH, layout(), 3))
    assert [values for _, values in stored(up).values()] == [values for _, values in stored(fresh).values()]


@pytest.mark.parametrize(("clusters", "said"), [(64, "from 64 cluster centers"), (None, "first visit")])
def test_reports_say_what_changes_are_from(clusters: int | None, said: str) -> None:
    from pipecomp.recipes.report import _describe_links
    from pipecomp.report.page import describe_activations

    config = Config.from_dict({"activations": {"method": "aqsgd"}, "store": {"clusters": clusters}})
    assert said in _describe_links(config)
    assert said in describe_activations({"settings": json.loads(json.dumps(config.model_dump()))})
