"""The randomized rotation before quantizing: orthonormal, its own undoing, the same bits whatever the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.codecs.codecs import Quantized, Rotated, encoded, rotate, rotate_back, tiles
from pipecomp.config import Config
from pipecomp.errors import ConfigError, NonFiniteError


@pytest.mark.parametrize(("hidden", "expected"), [(768, [256] * 3), (1600, [1024, 256, 256, 64]), (7, [4, 1, 1, 1])])
def test_tiles_cover_a_row(hidden, expected):
    assert tiles(hidden) == expected


def hadamard(n: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


@settings(max_examples=30, deadline=None)
@given(T=st.integers(1, 5), H=st.integers(1, 700), seed=st.integers(0, 99))
def test_it_is_an_orthonormal_transform_of_each_tile(T, H, seed):
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(seed))
    y = rotate(x)
    signs = rotate_back(torch.block_diag(*[hadamard(n) for n in tiles(H)]).float()).diagonal()
    assert bool((signs.abs() - 1 < 1e-5).all())
    wanted = (x.double() * signs.double().round()) @ torch.block_diag(*[hadamard(n) for n in tiles(H)])
    assert torch.allclose(y.double(), wanted, atol=1e-4)
    assert torch.allclose(rotate_back(y), x, atol=1e-5)
    assert torch.equal(rotate(x[:1]), y[:1])


def test_outliers_no_longer_set_the_scale():
    x = torch.randn(64, 768, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 100
    plain, rotated = Quantized(4), Rotated(4)

    def error(codec):
        data = encoded(codec, x)
        assert data.numel() == plain.payload_bytes(64, 768)
        decoded = codec.decode(data, 64, 768)
        return float((decoded - x).norm() / x.norm())

    assert error(rotated) < 0.7 * error(plain)


def test_equal_values_are_spread_too():
    """Without the signs all of a tile would go into its first value."""
    assert float(rotate(torch.ones(1, 1024)).abs().max()) < 0.2 * 1024**0.5


def test_what_cannot_be_quantized_is_an_error():
    x = torch.zeros(2, 64)
    x[1, 3] = float("nan")
    with pytest.raises(NonFiniteError):
        encoded(Rotated(8), x)


def test_the_setting_needs_something_to_rotate():
    quantized = {"method": "aqsgd", "first_visit": 8, "rotation": True}
    assert Config.from_dict({"activations": quantized}).activations.rotation
    assert Config.from_dict({"activations": {"method": "direct", "rotation": True}}).activations.rotation
    for wrong in ({"method": "aqsgd", "rotation": True}, {"method": "none", "rotation": True}, {"rotation": 1}):
        with pytest.raises(ConfigError, match="rotation"):
            Config.from_dict({"activations": wrong})
