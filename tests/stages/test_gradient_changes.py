"""Gradients sent as changes: against the same in plain torch, and what leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomp.buffers.base import GRADIENT
from pipecomp.config import Config
from pipecomp.errors import ConfigError, NonFiniteError
from pipecomp.plan.packet_sizes import activation_bytes, gradient_bytes
from pipecomp.stages.link.layout import Layout, gradient_unit
from tests.lazy_staging import on_both
from tests.link_fixtures import S, layout, link, quantized, stored, train_step

staging = pytest.fixture(autouse=True, params=["host", "double"])(on_both)

H = 16
DELTA: dict[str, Any] = {"method": "aqsgd", "backward_method": "delta", "backward_bits": 3}


def visit(up: Any, down: Any, g_BSH: Tensor, where: Layout, step: int, unit: float = 1.0) -> Tensor:
    return train_step((up, down), torch.randn(g_BSH.shape).to(g_BSH.dtype), g_BSH, where, step, unit)[1]


def test_changes_are_sent_where_they_are_smaller_and_gradients_elsewhere() -> None:
    up, down = link(DELTA)
    where, m = layout((1, 2, 3)), {}
    base = torch.randn(3, S, H)
    mixed = 0
    for step, unit in enumerate((1.0, 0.5, 4.0, 1.0)):
        g_BSH = base + 0.1 * torch.randn(3, S, H)
        g_BSH[0, :3] = torch.randn(3, H) * 0.01  # these tokens have nothing to do with their last visit
        y_BSH = visit(up, down, g_BSH / unit, where, step, unit)
        for i, sample in enumerate(where.ids):
            u_nH = (g_BSH[i] / unit) * unit
            if sample not in m:
                m[sample] = quantized(8, u_nH)
            else:
                smaller_n = (u_nH - m[sample]).abs().amax(1) < u_nH.abs().amax(1)
                mixed += 0 < int(smaller_n.sum()) < S
                start_nH = torch.where(smaller_n[:, None], m[sample], torch.zeros(()))
                m[sample] = start_nH + quantized(3, u_nH - start_nH)
            assert torch.equal(y_BSH[i], m[sample] / unit)
        assert (
            stored(up, GRADIENT)
            == stored(down, GRADIENT)
            == {i: (step * 3 + i, v.flatten().tolist()) for i, v in m.items()}
        )
    assert mixed
    assert (up.stats.full_gradients, up.stats.delta_gradients) == (3, 9)
    assert (down.stats.full_gradients, down.stats.delta_gradients) == (3, 9)
    assert (up.stats.full_samples, up.stats.delta_samples) == (3, 9)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 5},
        {"scale": "rms"},
        {"scale": "channels"},
        {"scale": "cached_channels"},
        {"rounding": "stochastic"},
        {"backward_first_visit": 2},
        {"first_visit": 8, "rotation": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", [32, 16, 4])
def test_both_ends_hold_the_same(options: dict[str, Any], bits: int) -> None:
    up, down = link({**DELTA, **options}, store={"bits": bits})
    for step, where in enumerate((layout((1, 2), (8, 5)), layout((2, 1, 2), (5, 8, 5)), layout((1, 2), (7, 5)))):
        visit(up, down, torch.randn(len(where.ids), S, H), where, step, 4096.0)
        assert stored(up, GRADIENT) == stored(down, GRADIENT) != {}
        assert [h.digest for h in up.store.inventory()] == [h.digest for h in down.store.inventory()]


@pytest.mark.parametrize("scale", ["max", "channels", "cached_channels"])
def test_sizes_are_predicted_exactly(scale: str) -> None:
    up, down = link({**DELTA, "first_visit": 4, "scale": scale})
    where = layout((1, 2), (8, 5))
    for step in range(2):
        before = [getattr(up.stats, way).bytes_sent for way in ("forward", "backward")]
        visit(up, down, torch.randn(2, S, H), where, step, 4096.0)
        sent = [getattr(up.stats, way).bytes_sent for way in ("forward", "backward")]
        sizes = [
            f(up._config, 0, where.counts, H, torch.float32, first_visit=not step)
            for f in (activation_bytes, gradient_bytes)
        ]
        assert [b - a for a, b in zip(before, sent, strict=True)] == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_change_never_loses_more_than_the_gradient_itself(dtype: torch.dtype) -> None:
    up, down = link(DELTA)
    plain = link({"method": "aqsgd", "backward_bits": 3})
    for step in range(6):
        g_BSH = (torch.randn(2, S, H) * 10.0 ** torch.randint(-3, 1, (2, S, 1))).to(dtype)
        where = layout((1, 2))
        y_BSH, z_BSH = visit(up, down, g_BSH, where, step), visit(*plain, g_BSH, where, step)
        assert y_BSH.dtype == dtype
        most = g_BSH.float().abs().amax(-1) / 8 * 1.04  # half a step of 3 bits, and what dtypes round
        for decoded_BSH in (y_BSH, z_BSH):
            assert ((decoded_BSH.float() - g_BSH.float()).abs().amax(-1) <= most).all()


@pytest.mark.parametrize("passes", [True, False])
def test_what_is_not_finite_leaves_everything_as_it_was(passes: bool) -> None:
    up, down = link(DELTA, pass_nonfinite=passes)
    where, g_BSH = layout((1, 2)), torch.randn(2, S, H)
    visit(up, down, g_BSH, where, 0)
    before = stored(up, GRADIENT)
    g_BSH[1, 2, 3] = float("nan")
    if passes:
        assert visit(up, down, g_BSH, where, 1).isnan().sum() == 1
        assert stored(up, GRADIENT) == stored(down, GRADIENT) == before
        visit(up, down, torch.randn(2, S, H), where, 2)
        assert stored(up, GRADIENT) == stored(down, GRADIENT) != before
    elif down.staging.immediate:
        with pytest.raises(NonFiniteError, match="gradients"):
            visit(up, down, g_BSH, where, 1)
        assert stored(down, GRADIENT) == before


def test_a_unit_is_that_of_a_samples_own_loss() -> None:
    """A gradient's factor undoes the mean over samples and micro-batches, and the loss scale."""
    few, many = layout((1, 2)), layout((1, 2, 3, 4))
    gradient = 1.7
    units = [
        gradient_unit(len(where.ids) * micro_batches, scale) * (gradient * scale / micro_batches / len(where.ids))
        for where in (few, many)
        for micro_batches in (1, 3)
        for scale in (1.0, 65536.0)
    ]
    assert units == pytest.approx([4096 * gradient] * len(units))


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"activations": {"method": "direct", "backward_method": "delta"}}, "activations.backward_method"),
        ({"activations": {"method": "none", "backward_method": "delta"}}, "activations.backward_method"),
        ({"activations": {"method": "aqsgd", "backward_method": "twice"}}, "activations.backward_method"),
        ({"activations": {**DELTA, "backward_top_k": 0.2}}, "activations.backward_top_k"),
        ({"activations": {**DELTA, "backward_first_visit": "full"}}, "activations.backward_first_visit"),
        ({"activations": {**DELTA, "backward_first_visit": 9}}, "activations.backward_first_visit"),
        ({"activations": {"method": "aqsgd", "backward_first_visit": 8}}, "activations.backward_first_visit"),
        ({"activations": DELTA, "store": {"on_write_error": "continue"}}, "store.on_write_error"),
    ],
)
def test_what_makes_no_sense_is_refused(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_dict(section)
    assert error.value.key == key


def test_settings_of_existing_stores_stay() -> None:
    plain = Config.from_dict({"activations": {"method": "aqsgd"}})
    assert not any(key.startswith("backward") for key in plain.link_settings(0))
    changes = plain.replace(activations=plain.activations.replace(backward_method="delta"))
    assert changes.link_settings(0)["backward_first_visit"] == 8
