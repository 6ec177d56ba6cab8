"""Random draws of rounding on a link, limits of a packet, and detection of drift: one difference at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipecomp.buffers.base import entry_id, entry_name
from pipecomp.errors import DriftError, WireError
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.handshake import check_drift, send_part
from tests.lazy_staging import on_both
from tests.link_fixtures import S, at_both, change_headers, layout, link

staging = pytest.fixture(autouse=True, params=["host", "double"])(on_both)

H = 16
HERE: dict[str, Any] = {"seed": 0, "replica": 0, "index": 0, "step": 3, "micro_batch": 2}


def values(samples: int) -> Tensor:
    """Every sample the same."""
    return torch.randn(1, S, H, generator=torch.Generator().manual_seed(1)).repeat(samples, 1, 1)


STOCHASTIC = {"method": "direct", "rounding": "stochastic", "forward_bits": 4, "backward_bits": 4}


def sent(place: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """An activation and a gradient of the same values, as they arrive."""
    place = dict(place)
    at = Position(place.pop("step"), place.pop("micro_batch"))
    up, down = link({**STOCHASTIC, **options}, **place)
    up.send_activation(values(1), layout(range(1)), at)
    forward, _ = down.recv_activation(at)
    down.send_gradient(values(1), layout(range(1)), at)
    return forward, up.recv_gradient(layout(range(1)), at)


@pytest.mark.parametrize("what", HERE)
@pytest.mark.parametrize("top_k", [None, 0.5])
def test_rounding_draws_anew_for_another(what: str, top_k: float | None) -> None:
    here, there, again = (sent(place, backward_top_k=top_k) for place in (HERE, {**HERE, what: HERE[what] + 1}, HERE))
    for direction in (0, 1):
        assert torch.equal(here[direction], again[direction])
        assert not torch.equal(here[direction], there[direction])


def test_rounding_draws_anew_for_the_other_direction() -> None:
    forward, backward = sent(HERE)
    assert not torch.equal(forward, backward)


@pytest.mark.parametrize("first_visit", ["full", 4])
def test_rounding_draws_anew_for_every_sample(first_visit: Any) -> None:
    up, down = link({"method": "aqsgd", "rounding": "stochastic", "first_visit": first_visit})
    for step in range(2):
        x_BSH = values(3) * (1 + step)
        up.send_activation(x_BSH, layout(range(3)), Position(step, 0))
        y_BSH, _ = down.recv_activation(Position(step, 0))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(y_BSH[a], y_BSH[b])


# -- what a packet may say


def test_a_packet_that_asks_for_too_much_memory_is_refused() -> None:
    """Whose samples have a token each, in a batch that would be padded to 2^32 − 1."""
    up, down = link({"method": "none"})
    change_headers(up, tokens=2**32 - 1)
    up.send_activation(values(1), layout(range(1)), Position(0, 0))
    with pytest.raises(WireError, match=r"above the limit of 17179869184 bytes"):
        down.recv_activation(Position(0, 0))


# -- both ends the same


@pytest.mark.parametrize("gradient", [False, True])
def test_a_difference_between_both_ends_is_found_and_an_error_where_it_comes_again(gradient: bool) -> None:
    up, down = link({"method": "aqsgd", "backward_method": "delta"})
    entries = {entry_id(sample, gradient=way) for sample in (0, 1) for way in (False, True)}
    disturbed = entry_id(1, gradient=gradient)

    def step(number: int, off: float = 1e-3) -> list[Any]:
        up.send_activation(values(2), layout(range(2)), Position(number, 0))
        down.recv_activation(Position(number, 0))
        down.send_gradient(values(2), layout(range(2)), Position(number, 0))
        up.recv_gradient(layout(range(2)), Position(number, 0))
        (held,) = down.store.get([disturbed])
        down.store.put(disturbed, held.version, held.m_nH + off)
        found = at_both(up, down, lambda end: check_drift(end, number))
        assert up.changed == down.changed == set(), "what was compared is not compared again"
        return found

    assert step(0) == [[disturbed]] * 2
    for end in (up, down):
        assert {h.sample for h in end.store.inventory()} == entries - {disturbed}
    assert step(1, off=0.0) == [[], []]
    assert step(2) == [[disturbed]] * 2, "the last check found nothing"
    for error in step(3):
        assert isinstance(error, DriftError)
        assert f"different cached activations of {entry_name(disturbed)} (samples)" in str(error)


def test_a_digest_of_another_length_is_refused() -> None:
    up, down = link({"method": "aqsgd"})
    send_part(up, 0, 2, b"x")
    with pytest.raises(WireError, match="rank 0 sent a digest of 1 bytes"):
        check_drift(down, 0)
