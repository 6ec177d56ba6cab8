"""Codecs against plain references written here, and byte counts that follow from shapes alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.codecs.codecs import Cast, Quantized, TopK, encoded
from pipecomp.errors import NonFiniteError, WireError


def quantize_reference(x_TH: torch.Tensor, bits: int) -> torch.Tensor:
    """deq(Q_b(x)) per row, nearest, docs/algorithms.md 1.2, one float32 operation at a time."""
    out = np.zeros(x_TH.shape, dtype=np.float32)
    for row, x in enumerate(x_TH.numpy()):
        scale = np.float32(np.abs(x).max(initial=0))
        if scale < 2.0**-100:
            continue
        u = x * (np.float32(1) / scale) + np.float32(1)
        c = np.clip(np.floor(u * np.float32(2 ** (bits - 1))), 0, 2**bits - 1)
        out[row] = scale * ((c.astype(np.float32) + np.float32(0.5)) / np.float32(2 ** (bits - 1)) - np.float32(1))
    return torch.from_numpy(out)


shapes = st.tuples(st.integers(0, 5), st.integers(1, 40))
codecs = st.one_of(
    st.sampled_from([Cast(torch.float32), Cast(torch.float16), Cast(torch.bfloat16)]),
    st.builds(
        Quantized,
        st.integers(1, 8),
        st.sampled_from(["nearest", "stochastic"]),
        st.just("max"),
        st.none() | st.integers(1, 50),
    ),
    st.builds(
        TopK,
        st.integers(1, 8),
        st.floats(0.01, 1),
        st.sampled_from(["nearest", "stochastic"]),
        st.just("max"),
        st.none() | st.integers(1, 50),
    ),
)


@settings(max_examples=150, deadline=None)
@given(codecs, shapes, st.integers(0, 2**31))
def test_length_follows_from_the_shape_and_decoding_repeats(codec, shape, seed):
    x_TH = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    data = encoded(codec, x_TH, seed)
    assert data.numel() == codec.payload_bytes(*shape)
    once, again = (codec.decode(data, *shape) for _ in range(2))
    assert once.shape == shape
    assert torch.equal(once, again)
    for wrong in (data[:-1], torch.cat([data, torch.zeros(1, dtype=torch.uint8)])):
        if wrong.numel() != data.numel():
            with pytest.raises(WireError, match="expected"):
                codec.decode(wrong, *shape)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), shapes, st.integers(0, 2**31))
def test_quantized_matches_the_definition(bits, shape, seed):
    x_TH = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    codec = Quantized(bits)
    assert torch.equal(codec.decode(encoded(codec, x_TH), *shape), quantize_reference(x_TH, bits))


def test_top_k_keeps_the_largest_and_zeroes_the_rest():
    x_TH = torch.tensor([[0.1, -5.0, 0.2, 3.0, -0.3, 0.0, 0.0, 4.0, 0.1, 0.1]])
    codec = TopK(8, 0.3)
    y_TH = codec.decode(encoded(codec, x_TH), 1, 10)
    assert y_TH.nonzero()[:, 1].tolist() == [1, 3, 7]
    assert torch.equal(y_TH[:, [1, 3, 7]], quantize_reference(x_TH[:, [1, 3, 7]], 8))


def test_top_k_bytes_at_a_fifth_of_the_values():
    # 20 % of 256 values at 8 bits: 51 codes, a bitmap of 32 bytes, one scale
    assert TopK(8, 0.2).payload_bytes(1, 256) == 51 + 32 + 4


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("codec", [Cast(torch.float32), Quantized(4), TopK(4, 0.2)], ids=lambda c: type(c).__name__)
def test_a_payload_of_another_length_is_refused(codec, more):
    payload = encoded(codec, torch.randn(3, 20))
    other = torch.from_numpy(np.resize(payload.numpy(), payload.numel() + more))
    with pytest.raises(WireError, match=rf"payload of {payload.numel() + more} bytes where {payload.numel()} were"):
        codec.decode(other, 3, 20)


def test_a_damaged_bitmap_is_refused():
    codec = TopK(8, 0.3)
    data = encoded(codec, torch.randn(1, 10))
    data[0] ^= 1
    with pytest.raises(WireError):
        codec.decode(data, 1, 10)


def test_fp16_refuses_what_does_not_fit():
    with pytest.raises(NonFiniteError, match="7e\\+04 do not fit float16"):
        encoded(Cast(torch.float16), torch.tensor([[1.0, 7e4]]))
    (verdict,) = Cast(torch.float16).encode(torch.tensor([[-65519.0, 1.0]]), torch.empty(4, dtype=torch.uint8))
    verdict.check()  # is rounded to the largest


@pytest.mark.parametrize(("bad", "said"), [(-7e4, "7e\\+04"), (float("nan"), "nan"), (float("-inf"), "inf")])
def test_what_does_not_fit_fp16_is_told_later_as_it_was(bad, said):
    """From a GPU the verdict comes when the values' memory is used for something else."""
    x = torch.tensor([[1.0, bad]])
    (verdict,) = Cast(torch.float16).encode(x, torch.empty(4, dtype=torch.uint8))
    x.fill_(7.0)
    with pytest.raises(NonFiniteError, match=f"values up to {said} do not fit float16"):
        verdict.check()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**101])
def test_nothing_that_cannot_be_quantized_becomes_a_code(bad):
    x_TH = torch.randn(2, 8)
    x_TH[1, 3] = bad
    with pytest.raises(NonFiniteError):
        encoded(Quantized(4), x_TH)


def test_real_bits_on_the_wire():
    for bits in range(1, 9):
        assert Quantized(bits).payload_bytes(10, 256) == 10 * (256 * bits // 8 + 4)
