"""The shootout's rivals: what they pack, what the other end makes of it, and that both ends remember the same."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import amaq, shootout, shootout_page
from benchmarks.boundaries import Coded, Coders
from benchmarks.inprocess import InProcessPipeline
from benchmarks.rival_rows import ChannelRows, LowRank, Product, Published, TahQuant, gaussian_levels, hadamard
from benchmarks.rivals import Changes, Unchanged, Whole
from pipecomp.codecs.codecs import Quantized, TopK
from pipecomp.codecs.wire import packet_bytes
from pipecomp.config import Config
from pipecomp.demo.task import Sequences, gpt2
from pipecomp.errors import ConfigError
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.layout import Layout

AT = Position(0, 0)
EQUAL = "training loss above FP32 with no more than these bytes"


def rows(count: int, hidden: int, seed: int = 0) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


def tile_by_hand(tile: list[float], bits: int) -> list[float]:
    """One tile of TAH-Quant there and back, value by value."""
    G, sizes = len(tile), sorted((abs(x) for x in tile), reverse=True)
    turn, pivot = sizes[0] >= 2 * sizes[1] and sizes[0] > 0, max(range(G), key=lambda i: abs(tile[i]))

    def turned(values: list[float]) -> list[float]:
        return [sum(x * (-1) ** (i & j).bit_count() for j, x in enumerate(values)) / math.sqrt(G) for i in range(G)]

    values = list(tile)
    if turn:
        values[0], values[pivot] = values[pivot], values[0]
        values = turned(values)
    zero = float(torch.tensor(min(values)).half())
    step = float(torch.tensor((max(values) - zero) / (2**bits - 1)).half())
    values = [zero + step * min(max(round((x - zero) / step) if step else 0, 0), 2**bits - 1) for x in values]
    if turn:
        values = turned(values)
        values[0], values[pivot] = values[pivot], values[0]
    return values


def test_tah_quant_is_that_of_single_tiles():
    x_TH = rows(5, 64)
    x_TH[1, 20], x_TH[3, 33], x_TH[4] = 40.0, -25.0, 0.0  # two outliers, and tiles without values
    method, tiles = TahQuant((2, 4), 0.5, tile=16), x_TH.reshape(-1, 16)
    parts = tiles.double().abs() / tiles.double().abs().sum(1, keepdim=True)
    entropy = [-sum(p * math.log(p) for p in row if p > 0) for row in parts.tolist()]
    more = sorted(range(20), key=lambda i: entropy[i], reverse=True)[:10]
    expected = torch.tensor([tile_by_hand(row, 4 if i in more else 2) for i, row in enumerate(tiles.tolist())])
    payload = method.encode(x_TH)
    torch.testing.assert_close(method.decode(payload, 5, 64).reshape(-1, 16), expected, rtol=1e-3, atol=1e-3)
    # Flags, zero points and steps, two pivots of 4 bits, codes.
    assert payload.numel() == 3 + 3 + 20 * 4 + 1 + 10 * 16 * 2 // 8 + 10 * 16 * 4 // 8
    with pytest.raises(ConfigError, match="tile"):
        TahQuant((2, 4), 0.5).encode(rows(2, 96))


def test_gaussian_levels_are_those_of_the_tables():
    """Max, Quantizing for minimum distortion, 1960."""
    for count, levels in {2: [0.7980], 3: [0.0, 1.224], 4: [0.4528, 1.510], 8: [0.2451, 0.7560, 1.344, 2.152]}.items():
        own = gaussian_levels(count)[0]
        torch.testing.assert_close(own[count // 2 :], torch.tensor(levels), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "bits", "least", "most"),
    [
        (ChannelRows(2), 1, 0.35, 0.37),
        (ChannelRows(3), 1.6, 0.18, 0.2),
        (ChannelRows(8), 3, 0.03, 0.036),
        (ChannelRows(None, 2.0), 2, 0.0, 0.11),
    ],
)
def test_rows_over_their_channels_scales(method, bits, least, most):
    """Errors of Gaussian values by least error are the tables'; shared bits lose less where channels differ."""
    x_TH = rows(500, 160) * torch.logspace(-1, 1, 160)
    exact = ChannelRows(method.levels, method.bits, unbiased=False)
    y_TH = exact.decode(exact.encode(x_TH), 500, 160)
    dims = 0 if method.levels else (0, 1)
    share = ((y_TH - x_TH).square().sum(dims) / x_TH.square().sum(dims)).mean()
    assert least <= float(share) <= most
    payload = method.encode(x_TH)
    assert payload.numel() <= 160 + 500 * 4 + 500 * 160 * bits / 8 + 8
    long = method.decode(payload, 500, 160)
    c_H = x_TH.square().mean(0).sqrt()
    along = ((long / c_H) * (x_TH / c_H)).sum() / (x_TH / c_H).square().sum()
    assert method.levels is None or abs(float(along) - 1) < 0.01
    assert method.decode(method.encode(x_TH[:0]), 0, 160).shape == (0, 160)


def test_half_a_change_moves_m_and_all_of_it_arrives():
    layout, first = Layout((7,), (0,), (3,), 3), Product(Quantized(8))
    ends = [Changes(Product(Quantized(8)), first, 0.5) for _ in range(2)]
    x_TH, later = rows(3, 16), rows(3, 16, 1)
    for values in (x_TH, later):
        arrived = ends[1].decode(ends[0].encode(values, layout), layout, 16)
        torch.testing.assert_close(arrived, values, rtol=0, atol=0.05)
    assert torch.equal(ends[0].held[7], ends[1].held[7])
    torch.testing.assert_close(ends[0].held[7], (x_TH + later) / 2, rtol=0, atol=0.05)


def test_the_turn_takes_an_outlier_out_of_a_tile():
    assert torch.allclose(hadamard(64) @ hadamard(64), torch.eye(64), atol=1e-6)
    x_TH = rows(8, 64)
    x_TH[:, 7] = 50.0
    method = TahQuant((3, 4), 0.5)
    error = (method.decode(method.encode(x_TH), 8, 64) - x_TH)[:, :7].norm()
    plain = Product(Quantized(4))
    assert error < 0.6 * (plain.decode(plain.encode(x_TH), 8, 64) - x_TH)[:, :7].norm()


def test_low_rank_keeps_the_energy_with_the_fewest_directions():
    x_TH = rows(24, 3) @ rows(3, 40, seed=1) + 0.01 * rows(24, 40, seed=2)
    left, sizes, right = torch.linalg.svd(x_TH, full_matrices=False)
    for energy in (0.5, 0.9, 0.999):
        squares = (sizes.double() ** 2).tolist()
        rank = next(r for r in range(25) if sum(squares[:r]) >= energy * sum(squares))
        payload = LowRank(energy).encode(x_TH)
        found = LowRank(energy).decode(payload, 24, 40)
        expected = (left[:, :rank] * sizes[:rank]) @ right[:rank]
        assert payload.numel() == 2 + rank * (4 + 24) + rank * (4 + 40)  # 8 bits a value, and a scale for each row
        assert (found - expected).norm() < 0.02 * expected.norm()
    assert rank == 3
    zeros = LowRank(0.9).encode(torch.zeros(4, 8))
    assert zeros.numel() == 2
    assert torch.equal(LowRank(0.9).decode(zeros, 4, 8), torch.zeros(4, 8))


def visits(make: Any, *x: Tensor, layout: Layout) -> tuple[Coded, list[Tensor], list[int]]:
    """Visits of the same samples over a link: the link, what arrived, and bytes of each packet."""
    link, arrived, sizes = Coded(make), [], [0]
    for x_TH in x:
        out, same = link.forward(x_TH.reshape(len(layout.ids), layout.tokens, -1), layout, AT, training=True)
        assert same is layout
        arrived.append(out.reshape(x_TH.shape).clone())
        sizes.append(link.stats.forward.bytes_sent)
        link.backward(rows(*x_TH.shape, seed=9).reshape(out.shape), layout, AT)
    assert link.same_messages()
    return link, arrived, [b - a for a, b in itertools.pairwise(sizes)]


def ends(forward: Any) -> Any:
    return lambda: Coders(forward(), Whole(Product(Quantized(4))))


TWO = Layout((7, 3), (0, 0), (4, 4), 4)


def test_top_k_of_changes_moves_the_largest_changes_alone():
    first, second = rows(8, 32), rows(8, 32) + rows(8, 32, seed=1)
    make = ends(lambda: Changes(Product(TopK(4, 0.25)), Product(Quantized(8))))
    link, (m_TH, out_TH), sizes = visits(make, first, second, layout=TWO)
    assert (m_TH - first).abs().max() <= first.abs().max() / 256 * 1.001
    change_TH = second - m_TH
    kept_TH = torch.zeros(8, 32, dtype=torch.bool)
    kept_TH.scatter_(1, change_TH.abs().topk(8, 1).indices, True)
    assert torch.equal(out_TH[~kept_TH], m_TH[~kept_TH])
    limit_TH = change_TH.abs().amax(1, keepdim=True).expand(8, 32) / 16
    assert ((out_TH - second).abs() <= limit_TH * 1.001)[kept_TH].all()
    # A scale and codes of each row; a bit for each place.
    assert sizes == [packet_bytes(2, 8 * (4 + 32)), packet_bytes(2, 8 * (4 + 8 * 4 // 8 + 32 // 8))]
    assert link.held_bytes() == 2 * 8 * 32 * 4
    assert link.stats.backward.bytes_sent == 2 * packet_bytes(2, 8 * (4 + 32 * 4 // 8))


def test_tokens_that_hardly_changed_are_not_sent():
    first = rows(8, 32)
    second = first + 1e-3 * rows(8, 32, seed=1)
    second[[1, 6]] = rows(2, 32, seed=2)
    link, (m_TH, out_TH), sizes = visits(
        ends(lambda: Unchanged(0.95, Product(Quantized(8)))), first, second, layout=TWO
    )
    stayed = [0, 2, 3, 4, 5, 7]
    assert torch.equal(out_TH[stayed], m_TH[stayed])
    assert not torch.equal(out_TH[stayed], second[stayed])
    assert ((out_TH - second)[[1, 6]].abs() <= second[[1, 6]].abs().amax(1, keepdim=True) / 256 * 1.001).all()
    assert sizes == [packet_bytes(2, 1 + 8 * (4 + 32)), packet_bytes(2, 1 + 2 * (4 + 32))]
    assert link.held_bytes() == 2 * 8 * 32 * 4


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_published_quantizer_has_a_scale_for_each_channel_and_a_zero(bits):
    """Levels k / 2^(b−1) of the channel's largest magnitude in float16; the largest itself only if it is negative."""
    x_TH = rows(40, 16, seed=3) * torch.logspace(-3, 2, 16)
    x_TH[5] = 0
    out_TH = decoded(Published(bits), x_TH)
    scale_H, half = x_TH.abs().amax(0).half().float(), 2 ** (bits - 1)
    levels_TH = out_TH / scale_H * half
    assert torch.equal(levels_TH, levels_TH.round())
    assert (levels_TH.min() >= -half, levels_TH.max() <= half - 1) == (True, True)
    assert torch.equal(out_TH[5], torch.zeros(16))
    inside = x_TH < scale_H * (half - 0.5) / half
    assert bool(((x_TH - out_TH).abs() <= 0.55 * scale_H / half)[inside].all())
    assert Published(bits).encode(x_TH).numel() == 2 * 16 + 40 * 16 * bits // 8
    assert Published(bits).encode(x_TH[:0]).numel() == 0


def decoded(code: Any, x_TH: torch.Tensor) -> torch.Tensor:
    return code.decode(code.encode(x_TH), *x_TH.shape)


@pytest.mark.parametrize(
    "forward",
    [
        lambda: Changes(LowRank(0.97), Product(Quantized(8))),
        lambda: Changes(Product(TopK(4, 0.5)), Product(Quantized(8))),
        lambda: Unchanged(0.9, Product(Quantized(8))),
    ],
    ids=["low rank", "top-k", "unchanged"],
)
def test_padding_new_samples_and_other_lengths(forward):
    """Micro-batches of old and new samples, one of which changes its length."""
    link = Coded(ends(forward))
    layouts = [
        Layout((1, 2), (0, 0), (3, 5), 5), Layout((2, 4), (1, 0), (4, 2), 5), Layout((4, 1), (0, 2), (2, 3), 5),
    ]  # fmt: skip
    for number, layout in enumerate(layouts):
        x_BSH = rows(10, 16, seed=number).reshape(2, 5, 16)
        out_BSH, _ = link.forward(x_BSH, layout, AT, training=True)
        for i, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
            inside = slice(start, start + count)
            assert torch.equal(out_BSH[i, :start], torch.zeros(start, 16))
            assert torch.cosine_similarity(out_BSH[i, inside].flatten(), x_BSH[i, inside].flatten(), dim=0) > 0.8
        assert link.same_messages()
    held = link.held_bytes()
    assert held == 2 * (3 + 4 + 2) * 16 * 4
    evaluated, _ = link.forward(x_BSH, layouts[0], AT, training=False)
    assert torch.equal(evaluated, x_BSH)
    assert link.held_bytes() == held
    link._far.activations.held[4][0, 0] += 1e-6
    assert not link.same_messages()


# -- all methods in a pipeline


def tiny() -> tuple[Any, Sequences]:
    samples = torch.randint(0, 50, (12, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return gpt2(50, 8, layers=2, width=64, heads=2, seed=0), Sequences(samples)


def configuration(activations: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {"activations": activations}
    if activations["method"] == "aqsgd":
        section["store"] = {"backend": "memory"}
    return {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipecomp": section,
    }


def trained(setting: shootout.Setting) -> InProcessPipeline:
    rival = setting if callable(setting) else None
    model, data = tiny()
    activations = {"method": "none"} if callable(setting) else setting
    return InProcessPipeline(model, 2, configuration(activations), data, rival=rival)


METHODS = shootout.methods()
EXACT: list[list[float]] = []


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name):
    """Two visits of every sample, with the setting of the most bytes."""
    if not EXACT:
        exact = trained({"method": "none"})
        EXACT.append([float(exact.train_batch()) for _ in range(4)])
    for setting in METHODS[name].values():
        if not callable(setting):
            Config.from_dict(configuration(setting)["pipecomp"])  # all settings are valid
    pipeline = trained(list(METHODS[name].values())[-1])
    losses = [float(pipeline.train_batch()) for _ in range(4)]
    assert pipeline.same_messages()
    [link] = pipeline.comm_stats().values()
    for way in ("forward", "backward"):
        assert link[way]["messages"] == 8
        assert (link[way]["bytes_sent"] < link[way]["bytes_raw"]) == (name != "FP32")
    assert max(abs(a - b) for a, b in zip(losses, EXACT[0], strict=True)) < 0.1
    assert (losses == EXACT[0]) == (name == "FP32")
    remembers = "AQ-SGD" in name or "changes" in name or "Unchanged" in name
    assert (pipeline.store_bytes() > 0) == remembers
    pipeline.close()


def test_a_rival_is_not_mixed_with_a_method_of_the_product():
    model, data = tiny()
    with pytest.raises(ConfigError, match=r"activations\.method"):
        InProcessPipeline(model, 2, configuration({"method": "direct"}), data, rival=METHODS["Top-k"]["50 %, bw6"])


def test_of_a_model_with_adapters_only_they_are_trained():
    pytest.importorskip("peft")
    from benchmarks.wikitext import VOCABULARY, new_llama

    samples = torch.randint(0, VOCABULARY, (6, 8), generator=torch.Generator().manual_seed(1)).tolist()
    model = shootout.with_adapters(new_llama(0, 8), 0, 0.0)
    pipeline = InProcessPipeline(model, 2, configuration({"method": "none"}), Sequences(samples))
    before = {(s.index, n): p.detach().clone() for s in pipeline.stages for n, p in s.named_parameters()}
    losses = [float(pipeline.train_batch()) for _ in range(3)]
    after = {(s.index, n): p for s in pipeline.stages for n, p in s.named_parameters()}
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in after if "lora" in name[1]}
    assert losses[2] < losses[0]


# -- the page


def run(method: str, setting: str, share: float, loss: float, **more: Any) -> dict[str, Any]:
    """A run of two epochs with two steps each; FP32 sends 1,000,000 bytes a micro-batch and way."""
    sent = int(4_000_000 * share)
    return {
        "task": "GPT-2", "dropout": "without", "stages": 2, "method": method, "setting": setting, "seed": 0,
        "weights": "one", "train_loss": loss, "eval_loss": loss, "losses": [3.0, 2.5, loss, loss],
        "bytes": [[sent, sent], [2 * sent] * 2], "raw_bytes": [8_000_000, 8_000_000],
        "store_bytes": 0, "micro_batches": 2, "cpu_seconds": 16.0, **more,
    }  # fmt: skip


def test_seconds_are_those_of_the_link():
    exact, small = run("FP32", "", 1.0, 2.0), run("DirectQ", "fw2 bw4", 0.1, 2.0)
    compute_s = shootout_page.compute_seconds([exact])
    assert compute_s == 16 / (4 * 2 * 2)
    slow, fast = (shootout_page.seconds_to(row, 2.0, 18, compute_s) for row in (exact, small))
    # Of FP32 the link is the limit: at least both micro-batches one way, 9 computes each, and the last one back.
    assert 4 * (2 * 9 + 9) * compute_s <= slow < 4 * (2 * 9 + 9 + 6) * compute_s
    assert 4 * 2 * compute_s < fast < slow / 4
    assert shootout_page.seconds_to(exact, 2.75, 18, compute_s) == pytest.approx(slow / 2), "after the first epoch"
    assert shootout_page.seconds_to(small, 1.9, 18, compute_s) is None


def test_the_page_compares_at_equal_bytes(tmp_path):
    pytest.importorskip("matplotlib", reason="the page has a picture")
    assert shootout_page.at_most([(0.1, 4.0), (0.4, 2.0)], 0.2) == pytest.approx(3.0)
    assert shootout_page.at_most([(0.1, 4.0), (0.4, 2.0)], 0.5) == 2.0
    assert shootout_page.at_most([(0.1, 4.0)], 0.09) is None
    more = {"stages": 4, "dropout": "with"}
    made = [
        run("Top-k", "25 %, bw4", 0.1, 2.2), run("FP32", "", 1.0, 2.0), run("AQ-SGD", "fw4 bw8", 0.16, 2.0),
        run("AQ-SGD", "fw2 bw4", 0.13, 2.1), run("TAH-Quant", "fw1/2, bw4", 0.1, 2.1, **more),
    ]  # fmt: skip
    made.append(run("AQ-SGD", "a setting of another time", 0.1, 2.0))
    lines = [json.dumps({**row, "setup": shootout.SETUP}) for row in made]
    (tmp_path / "shootout.jsonl").write_text("\n".join(lines) + "\n")
    shootout.main(["--redraw", "--out", str(tmp_path)])
    lines = (tmp_path / "shootout.md").read_text().splitlines()
    first = [line.split(" | ")[2] for line in lines[: lines.index("### GPT-2: " + EQUAL)] if line.startswith("| with")]
    assert first == ["FP32", "AQ-SGD", "AQ-SGD", "Top-k", "TAH-Quant"]
    assert "| without | 2 | AQ-SGD | – | – | +5.00 % | +0.00 % | +0.00 % |" in lines
    assert "| without | 2 | Top-k | – | +10.00 % | +10.00 % | +10.00 % | +10.00 % |" in lines
    assert "| with | 4 | TAH-Quant | – | – | – | – | – |" in lines, "without FP32's run"
    [line] = [line for line in lines if line.startswith("| without | 2 | AQ-SGD | fw2 bw4 |")]
    assert "| +5.00 % | 2.1000 | 1.04 | 1.04 | 13.0 % | – | – | 0.0 |" in line
    assert (tmp_path / "shootout.png").stat().st_size > 5000


def test_runs_are_known_by_task_dropout_stages_method_setting_and_seed():
    given = type(
        "Given", (), {"seeds": 2, "dropout": ["without"], "tasks": ["GPT-2", "CoLA"], "stages": [2], "only": []}
    )
    every = shootout.cases(given)
    assert len(set(every)) == len(every) == 2 * 2 * sum(map(len, METHODS.values()))
    assert every[0] == ("GPT-2", "without", 2, "FP32", "", 0)
    assert {case[-1] for case in every[: len(every) // 2]} == {0}


class TestAmaq:
    def test_values_are_within_half_a_step(self):
        x_TH, bits_H = rows(9, 24), torch.arange(24) % 8 + 1.0
        payload = amaq.encode(x_TH, bits_H)
        assert payload.numel() == 2 * 2 * 24 + sum((9 * 3 * b + 7) // 8 for b in range(1, 9))
        step_H = (x_TH.amax(0) - x_TH.amin(0)) / (2**bits_H - 1)
        error_TH = (amaq.decode(amaq.Reader(payload), bits_H, 9) - x_TH).abs()
        assert torch.all(error_TH <= 0.51 * step_H + 0.01)

    def test_slopes_are_those_of_the_error(self):
        """With a little more bits, at the same codes, values move as the slope says."""
        x_TH = rows(7, 16).half().float()
        gates = amaq._Gates(3.0)
        layout = Layout((0,), (0,), (7,), 7)
        amaq.Activations(gates).encode(x_TH, layout)
        bits_H, slope_TH = gates.in_flight[0,]
        low_H, width_H = x_TH.amin(0), x_TH.amax(0) - x_TH.amin(0)
        codes_TH = ((x_TH - low_H) / width_H * (2**bits_H - 1)).round()

        def straight_through(bits_H: Tensor) -> Tensor:
            """The derivative of round is 1: what is rounded moves with the step."""
            step_H = width_H / (2**bits_H - 1)
            exact_TH = (x_TH - low_H) / step_H
            return low_H + step_H * (exact_TH + (codes_TH - exact_TH).detach())

        free_H = bits_H.clone().requires_grad_(True)
        straight_through(free_H).sum().backward()
        assert torch.allclose(free_H.grad, slope_TH.sum(0), rtol=0.1, atol=2e-2)

    @pytest.mark.parametrize("target", [3.0, 6.0])
    def test_bits_reach_their_target_and_go_where_the_loss_needs_them(self, target):
        near, far, layout = amaq.ends(target), amaq.ends(target), Layout((0,), (0,), (32,), 32)
        matters_H = torch.where(torch.arange(16) < 4, 1.0, 1e-3)
        for seed in range(300):
            x_TH = rows(32, 16, seed)
            decoded_TH = far.activations.decode(near.activations.encode(x_TH, layout), layout, 16)
            g_TH = (decoded_TH - x_TH) * matters_H  # of a loss that is the error of the channels that matter
            near.gradients.decode(far.gradients.encode(g_TH, layout), layout, 16)
        bits_H = near.activations._gates.bits(16)
        assert abs(float(bits_H.mean()) - target) < 0.7
        assert bits_H[:4].mean() > bits_H[4:].mean() + 0.5
