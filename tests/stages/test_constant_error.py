"""Bits that follow an error: what every packet has, against a plain reference, and what a packet may not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomp.buffers.base import entry_id
from pipecomp.codecs import wire
from pipecomp.config import Config
from pipecomp.config.activations import ConstantError, bits_text
from pipecomp.errors import ConfigError, LinkError, NonFiniteError, WireError
from pipecomp.stages.link.crop_canvas import CropCanvas
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.layout import Layout
from tests.lazy_staging import on_both
from tests.link_fixtures import S, change_headers, change_packets, layout, link, quantized, train_step

staging = pytest.fixture(autouse=True, params=["host", "double"])(on_both)

H = 64
FORWARD: dict[str, Any] = {"error": 0.07, "min": 1, "max": 7}
BACKWARD: dict[str, Any] = {"error": 0.1}
DIRECT: dict[str, Any] = {"method": "direct", "forward_bits": FORWARD, "backward_bits": BACKWARD}
CHANGES: dict[str, Any] = {
    "method": "aqsgd",
    "forward_bits": FORWARD,
    "first_visit": {"error": 0.05, "min": 3},
    "backward_method": "delta",
    "backward_bits": BACKWARD,
    "backward_first_visit": {"error": 0.02, "max": 7},
}


def headers(end: Any) -> list[wire.PacketHeader]:
    """Note the header of every packet that this end sends from here on."""
    seen: list[wire.PacketHeader] = []

    def note(header: wire.PacketHeader, payload: Any) -> Any:
        seen.append(header)
        return header, payload

    change_packets(end, note)
    return seen


def moving(step: int, samples: int, size: float) -> Tensor:
    """Samples that change by so much of themselves from step to step."""
    base, change = (torch.randn(samples, S, H, generator=torch.Generator().manual_seed(n)) for n in (0, 1 + step))
    return base + size * change


def fewest(sent: list[Tensor], x: list[Tensor], error: float, low: int, high: int) -> int:
    """By quantizing all that is sent with every number of bits. x: what the error is relative to."""
    norm = sum(float(x_nH.double().square().sum()) for x_nH in x)

    def kept(bits: int) -> bool:
        left = sum(float((v_nH - quantized(bits, v_nH)).double().square().sum()) for v_nH in sent)
        return (left / norm) ** 0.5 <= error

    return next((bits for bits in range(low, high) if kept(bits)), high) if sent else low


class Plain:
    """One direction with changes, in plain torch. head: whether tokens whose change is larger go as they are."""

    def __init__(self, change: dict[str, Any], first: dict[str, Any], *, head: bool) -> None:
        self.change, self.first, self.head, self.m = change, first, head, dict[int, Tensor]()

    def base(self, sample: int, x_nH: Tensor) -> Tensor:
        m_nH = self.m[sample]
        if self.head:
            smaller_n = (x_nH - m_nH).abs().amax(1) < x_nH.abs().amax(1)
            m_nH = torch.where(smaller_n[:, None], m_nH, torch.zeros(()))
        return m_nH

    def packet(self, ids: tuple[int, ...], x: Tensor) -> tuple[int, int, list[Tensor]]:
        """Bits of changes, bits of first visits, and what arrives."""
        known = {i: x_nH for i, x_nH in zip(ids, x, strict=True) if i in self.m}
        new = [x_nH for i, x_nH in zip(ids, x, strict=True) if i not in self.m]
        changes = [x_nH - self.base(i, x_nH) for i, x_nH in known.items()]
        limits = [(how["error"], how.get("min", 2), how.get("max", 8)) for how in (self.change, self.first)]
        bits = fewest(changes, list(known.values()), *limits[0])
        first_bits = fewest(new, new, *limits[1])
        for i, x_nH in zip(ids, x, strict=True):
            start_nH = self.base(i, x_nH) if i in known else None
            self.m[i] = quantized(first_bits, x_nH) if start_nH is None else start_nH + quantized(bits, x_nH - start_nH)
        return bits, first_bits, [self.m[i] for i in ids]


def test_changes_have_the_fewest_bits_that_keep_the_error_of_the_values() -> None:
    ends = link(CHANGES)
    seen = [headers(end) for end in ends]
    plain = [
        Plain(CHANGES["forward_bits"], CHANGES["first_visit"], head=False),
        Plain(CHANGES["backward_bits"], CHANGES["backward_first_visit"], head=True),
    ]
    for step, (ids, size) in enumerate((((1, 2), 0.3), ((2, 3), 0.3), ((1, 2, 3), 1.0), ((3, 1), 0.1), ((1, 2), 0.1))):
        sent = moving(step, len(ids), size), moving(step + 9, len(ids), size)
        for way, arrived in enumerate(train_step(ends, *sent, layout(ids), step)):
            bits, first_bits, wanted = plain[way].packet(ids, sent[way])
            assert (seen[way][-1].bits, seen[way][-1].first_bits) == (bits, first_bits)
            assert torch.equal(arrived, torch.stack(wanted))
    for packets in seen:
        assert len({header.bits for header in packets}) > 2, "the test's values ask for different bits"


@pytest.mark.parametrize("rotation", [False, True])
def test_values_themselves_have_the_fewest_bits_too(rotation: bool) -> None:
    ends = link({**DIRECT, "rotation": rotation})
    seen = [headers(end) for end in ends]
    for step in range(4):
        sent = moving(step, 2, 0.1), moving(step + 9, 2, 1.0)
        sent[step % 2][:, :, ::13] *= 10.0 * step + 1  # large columns, which rotation spreads
        arrived = train_step(ends, *sent, layout((1, 2)), step)
        for way, error in enumerate((FORWARD["error"], BACKWARD["error"])):
            got = float((arrived[way] - sent[way]).norm() / sent[way].norm())
            assert got <= error or seen[way][-1].bits == (7, 8)[way]
            if way == 1 or not rotation:
                wanted = fewest([sent[way].flatten(0, 1)], [sent[way]], error, (1, 2)[way], (7, 8)[way])
                assert seen[way][-1].bits == wanted
    assert rotation or len({header.bits for header in seen[0]}) > 1


def test_stats_know_the_bits() -> None:
    up, down = ends = link(CHANGES)
    seen = [headers(end) for end in ends]
    for step in range(3):
        train_step(ends, moving(step, 2, 0.2), moving(step + 9, 2, 0.2), layout((1, 2), (8, 5)), step)
    for way, packets in zip(("forward", "backward"), seen, strict=True):
        every = [h.bits if step else h.first_bits for step, h in enumerate(packets)]
        for end in (up, down):
            counted = end.stats.as_dict()[way]
            assert counted["values_quantized"] == 3 * 13 * H
            assert counted["mean_bits"] == pytest.approx(sum(every) / 3)
    assert up.stats.as_dict()["evaluation"]["mean_bits"] is None


def test_first_visits_in_full_are_no_quantized_values() -> None:
    up, _ = ends = link({"method": "aqsgd", "forward_bits": FORWARD, "backward_bits": 4})
    seen = headers(up)
    for step in range(2):
        train_step(ends, moving(step, 2, 0.2), moving(step, 2, 0.2), layout((1, 2)), step)
    assert [h.first_bits for h in seen] == [0, 0]
    counted = up.stats.as_dict()
    assert counted["forward"]["values_quantized"] == 2 * S * H
    assert counted["forward"]["mean_bits"] == seen[1].bits
    assert counted["backward"]["mean_bits"] == 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 24},
        {"scale": "rms"},
        {"rounding": "stochastic"},
        {"rotation": True},
        {"first_visit": "full"},
        {"scale": "channels"},
        {"scale": "channels", "group_size": 24, "gain": "least_error"},
        {"scale": "cached_channels"},
    ],
    ids=str,
)
def test_both_ends_hold_the_same_whatever_comes(options: dict[str, Any]) -> None:
    ends = link({**CHANGES, **options})
    batches = (((1, 2), (8, 5)), ((2, 1, 2), (5, 8, 5)), ((1, 3, 1), (7, 0, 7)), ((3, 2), (4, 5)))
    for step, batch in enumerate(batches):
        where = layout(*batch)
        train_step(ends, moving(step, len(where.ids), 0.3), moving(step, len(where.ids), 0.5), where, step)
        ours, theirs = ([(h.sample, h.version, h.digest) for h in end.store.inventory()] for end in ends)
        assert ours == theirs != []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_that_comes_again_keeps_the_error_too(dtype: torch.dtype) -> None:
    ends = link({**CHANGES, "forward_bits": {"error": 0.03}, "first_visit": 8})
    for step in range(3):
        x_BSH = moving(0, 3, 0.0)[[0, 1, 0]] + 0.2 * moving(step, 3, 1.0)
        y_BSH, _ = train_step(ends, x_BSH.to(dtype), x_BSH.to(dtype), layout((1, 2, 1)), step)
        assert float((y_BSH - x_BSH).norm() / x_BSH.norm()) <= 0.03 + (0.004 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("back", [{"backward_bits": 8}, {"backward_method": "delta", "backward_bits": BACKWARD}])
def test_images_that_crops_move(back: dict[str, Any]) -> None:
    """The change is that of the window which the crop shows."""
    canvas = CropCanvas(4, 6, 8, 12, 3)
    ends = link({"method": "aqsgd", "forward_bits": FORWARD, "first_visit": 8, **back}, canvas=canvas)
    images = torch.randn(2, canvas.canvas_lines, canvas.canvas_columns * 3, generator=torch.Generator().manual_seed(0))
    ways = ((FORWARD, 1, 7), (BACKWARD, 2, 8))[: 1 + ("backward_method" in back)]
    seen, chosen = [headers(end) for end in ends], []
    for step in range(4):
        where = Layout.of_shifts((1, 2), torch.tensor([[-2, 3], [2, -1]]) * (step % 2), canvas)
        shown = [canvas.take(image, start) for image, start in zip(images, where.starts, strict=True)]
        x_BSH = torch.stack(shown) * (1 + 0.2**step)
        held = [ends[0].store.get([entry_id(i, gradient=bool(way)) for i in (1, 2)]) for way in range(len(ways))]
        arrived = train_step(ends, x_BSH, x_BSH, where, step)
        for way, (error, low, high) in enumerate(ways):
            plain = Plain({}, {}, head=bool(way))
            pairs = zip(where.ids, held[way], where.starts, strict=True)
            plain.m = {i: canvas.take(cached.m_nH, start) for i, cached, start in pairs if cached}
            changes = [x_nH - plain.base(i, x_nH) for i, x_nH in zip(where.ids, x_BSH, strict=True) if i in plain.m]
            assert seen[way][-1].bits == fewest(changes, list(x_BSH), error["error"], low, high)
            assert float((arrived[way] - x_BSH).norm() / x_BSH.norm()) <= error["error"]
        chosen.append([packets[-1].bits for packets in seen])
    for bits in list(zip(*chosen, strict=True))[: len(ways)]:
        assert len(set(bits)) > 1


@pytest.mark.parametrize("passes", [True, False])
def test_what_is_not_finite_leaves_everything_as_it_was(passes: bool) -> None:
    up, down = ends = link(CHANGES, pass_nonfinite=passes)
    where, g_BSH = layout((1, 2)), moving(0, 2, 0.1)
    train_step(ends, moving(0, 2, 0.1), g_BSH, where, 0)

    def held() -> list[Any]:
        return [[(h.sample, h.version, h.digest) for h in end.store.inventory()] for end in ends]

    g_BSH[1, 2, 3] = float("nan")
    before = held()
    if passes:
        y_BSH = train_step(ends, moving(1, 2, 0.1), g_BSH, where, 1)[1]
        assert y_BSH.isnan().sum() == 1
        kept = [[h for h in end if h[0] in (1, 2)] for end in before]
        assert [[h for h in end if h[0] not in (1, 2)] for end in held()] == [
            [h for h in end if h not in some] for end, some in zip(before, kept, strict=True)
        ]
    elif up.staging.immediate:
        with pytest.raises(NonFiniteError, match="activations"):
            up.send_activation(g_BSH, where, Position(1, 0))
        assert held() == before
        assert down.stats.forward.messages == 1


def test_a_run_that_goes_on_takes_the_same_bits() -> None:
    """The choice follows from the stores and the values alone, not from packets before."""
    whole, first = link(CHANGES), link(CHANGES)
    again: list[list[wire.PacketHeader]] = []
    seen = [headers(end) for end in whole]
    for step in range(4):
        if step == 2:
            first = link(CHANGES, [end.store for end in first])
            first[0].next_version = whole[0].next_version
            again = [headers(end) for end in first]
        sent = moving(step, 2, 0.3), moving(step + 9, 2, 0.3)
        for a, b in zip(*(train_step(ends, *sent, layout((1, 2)), step) for ends in (whole, first)), strict=True):
            assert torch.equal(a, b)
    assert again == [packets[2:] for packets in seen]


@pytest.mark.parametrize(
    "before", [DIRECT, {**CHANGES, "forward_bits": {"error": 0.07, "max": 8}}], ids=["direct", "changes"]
)
def test_both_ends_take_other_bits_between_two_packets(before: dict[str, Any]) -> None:
    """As a run does that goes on from a checkpoint: from there on all is as if the link had been made with them."""
    other = {"forward_bits": {"error": 0.01, "max": 4}, "backward_bits": [2]}
    changed, made = link(before), link({**before, **other})
    for end in changed:
        end.set_bits(Config.from_dict({"activations": {**before, **other}}))
    seen = [headers(end) for end in (*changed, *made)]
    for step in range(3):
        sent = moving(step, 2, 0.3), moving(step + 9, 2, 0.3)
        both = [train_step(ends, *sent, layout((1, 2)), step) for ends in (changed, made)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    assert seen[:2] == seen[2:]
    assert [packets[-1].bits for packets in seen[:2]] == [4, 2]


def test_evaluation_keeps_the_error_too() -> None:
    up, down = link({"method": "none", "forward_bits": FORWARD, "eval": "direct"})
    x_BSH, seen = moving(0, 2, 0.1), headers(up)
    up.send_activation(x_BSH, layout((1, 2)), Position(0, 0), training=False)
    y_BSH, _ = down.recv_activation(Position(0, 0), training=False)
    assert float((y_BSH - x_BSH).norm() / x_BSH.norm()) <= 0.07
    assert seen[0].bits == fewest([x_BSH.flatten(0, 1)], [x_BSH], 0.07, 1, 7)
    assert down.stats.as_dict()["evaluation"]["mean_bits"] == seen[0].bits


# -- what a packet may not say


@pytest.mark.parametrize("activations", [DIRECT, CHANGES], ids=["direct", "changes"])
@pytest.mark.parametrize("bits", [0, 1, 8, 9, 255])
@pytest.mark.parametrize("way", [0, 1])
def test_bits_out_of_range_are_refused(activations: dict[str, Any], bits: int, way: int) -> None:
    up, down = link(activations)
    low, high = (1, 7) if way == 0 else (2, 8)
    change_headers((up, down)[way], bits=bits)
    # The payload is as long as the bits that were taken say: others within the range do not fit it.
    match = rf"of {bits} bits .* this rank expects quantized of {low} to {high} \(error"
    expected: tuple[Any, str] = (WireError, "bytes where") if low <= bits <= high else (LinkError, match)

    def twice() -> None:
        """The second time there are changes."""
        for step in (0, 1):
            train_step((up, down), moving(step, 2, 0.1), moving(step + 1, 2, 0.1), layout((1, 2)), step)

    with pytest.raises(expected[0], match=expected[1]):
        twice()
    assert (up, down)[1 - way].stats.as_dict()[("forward", "backward")[way]]["messages"] <= 1


@pytest.mark.parametrize("bits", [0, 1, 2, 9, 255])
@pytest.mark.parametrize("way", [0, 1])
def test_first_visits_out_of_range_are_refused(bits: int, way: int) -> None:
    ends = link({**CHANGES, "backward_first_visit": {"error": 0.02, "min": 3}})
    change_headers(ends[way], first_bits=bits)
    with pytest.raises(LinkError, match=f"first visits at {bits or 'full'} bits"):
        train_step(ends, moving(0, 2, 0.1), moving(1, 2, 0.1), layout((1, 2)), 0)
    assert not [h for h in ends[1 - way].store.inventory() if (h.sample > 9) == (way == 1)]


# -- the configuration


@pytest.mark.parametrize(
    ("activations", "key"),
    [
        ({**DIRECT, "forward_bits": {}}, "forward_bits"),
        ({**DIRECT, "forward_bits": {"min": 2}}, "forward_bits"),
        ({**DIRECT, "forward_bits": {"error": 0.1, "most": 2}}, "forward_bits.most"),
        ({**DIRECT, "forward_bits": {"error": 0}}, "forward_bits.error"),
        ({**DIRECT, "forward_bits": {"error": 1}}, "forward_bits.error"),
        ({**DIRECT, "forward_bits": {"error": True}}, "forward_bits.error"),
        ({**DIRECT, "forward_bits": {"error": "0.1"}}, "forward_bits.error"),
        ({**DIRECT, "backward_bits": {"error": 0.1, "min": 0}}, "backward_bits.min"),
        ({**DIRECT, "backward_bits": {"error": 0.1, "max": 9}}, "backward_bits.max"),
        ({**DIRECT, "backward_bits": {"error": 0.1, "min": 4, "max": 4}}, "backward_bits.max"),
        ({**DIRECT, "backward_bits": {"error": 0.1, "min": 5, "max": 4}}, "backward_bits.max"),
        ({**DIRECT, "backward_bits": [{"error": 0.1}, {"error": 1}]}, "backward_bits[1].error"),
        ({**DIRECT, "backward_top_k": 0.2}, "backward_bits"),
        ({**DIRECT, "backward_bits": [8, {"error": 0.1}], "backward_top_k": 0.2}, "backward_bits"),
        ({"method": "fp16", "forward_bits": FORWARD}, "forward_bits"),
        ({**DIRECT, "first_visit": {"error": 0.1}}, "first_visit"),
        ({**CHANGES, "first_visit": {"error": 2}}, "first_visit.error"),
        ({**CHANGES, "backward_first_visit": {"error": 2}}, "backward_first_visit.error"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(activations: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_dict({"activations": activations})
    assert error.value.key == f"activations.{key}"


def test_a_configuration_says_it_as_it_is_written() -> None:
    config = Config.from_dict({"activations": CHANGES})
    a = config.activations
    assert a.forward_bits == ConstantError(error=0.07, min=1, max=7)
    assert Config.from_dict({"activations": config.shared()["activations"]}).activations == a
    assert a.replace(forward_bits=a.backward_bits).bits(3) == (a.backward_bits, a.backward_bits)
    assert config.link_settings(0)["first_visit"] == {"error": 0.05, "min": 3, "max": 8}
    assert config.shared()["activations"]["forward_bits"] == FORWARD, "as checkpoints and stores know it"
    assert bits_text(a.forward_bits) == "1 to 7 (error 0.07)"
    with pytest.raises(ConfigError, match=r"activations\.forward_bits\.error"):
        a.replace(forward_bits={"error": 3.0})
