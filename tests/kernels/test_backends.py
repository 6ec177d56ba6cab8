"""Backends, instruction sets and numbers of threads against the bytes of the reference.

Triton needs its interpreter switched on before it is first imported, so its cases run in a process of their own, which
runs this same file with TRITON_INTERPRET=1. `python tests/kernels/sanitize.py` runs it on a build with sanitizers.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipecomp.errors import ShapeError
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.native import library
from pipecomp.kernels.native.backend import NativeBackend
from pipecomp.kernels.reference import batches, channels, gradients
from pipecomp.kernels.reference import rows as reference
from pipecomp.kernels.reference.layout import QuantizerOptions
from tests.limits import HANG_S

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    pytest.importorskip("triton", reason="triton is not installed")
    from pipecomp.kernels.triton import BACKEND
    from pipecomp.kernels.triton import rows as triton_rows

    BACKENDS = {"triton": BACKEND}
    EXAMPLES, HEIGHT, WIDTHS = 8, 2, [1, 5, 8, 31, 64, 100]
else:
    named = os.environ.get("KERNELS_UNDER_TEST")  # set by sanitize.py
    path = Path(named) if named else library.library_path()
    BACKENDS = {}
    if path is not None and (named or not isinstance(dispatch.load_native(), str)):
        best = NativeBackend(path)
        for isa in library.ISAS[: best.isa_index + 1]:
            for threads in (1, 2):
                BACKENDS[f"{isa}-{threads}"] = NativeBackend(path, isa, threads)
    EXAMPLES, HEIGHT, WIDTHS = 60, 5, [1, 5, 8, 31, 32, 33, 64, 100, 257, 1600]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SPECIAL = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-127), 2.0**-101, 2.0**-100, 1.0, -1.0, 0.5, -0.25, 2.0**99])
config = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
seeds = st.integers(0, 2**64 - 1)


def same(got: Tensor, want: Tensor) -> bool:
    """Equal as bytes: -0.0 differs from 0.0."""
    return got.dtype == want.dtype and got.shape == want.shape and got.numpy().tobytes() == want.numpy().tobytes()


def values(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Values of different kinds, one a row: Gaussian, equal, ties on interval borders, huge, tiny, special."""
    g = torch.Generator().manual_seed(seed % 2**63)
    x = torch.randn(shape, generator=g)
    for row in x:
        kind = int(torch.randint(0, 7, (1,), generator=g))
        if kind == 1:
            row.fill_(float(row[0]))
        elif kind == 2:
            row.copy_((row * 8).round() / 8)
        elif kind == 3:
            row.mul_(2.0**98)
        elif kind == 4:
            row.mul_(2.0**-110)
        elif kind == 5:
            row.copy_(SPECIAL[torch.randint(0, len(SPECIAL), row.shape, generator=g)])
        elif kind == 6:
            row[int(torch.randint(0, row.numel(), (1,), generator=g))] *= 1000
    return x


@st.composite
def quantizer_cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, QuantizerOptions]:
    H = draw(st.sampled_from(WIDTHS))
    rows = draw(st.integers(1, HEIGHT))
    scale, rounding = draw(st.sampled_from([("max", "nearest"), ("rms", "nearest"), ("max", "stochastic")]))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(seeds)
    group_size = draw(st.sampled_from([None, 7, 8, 24, 64, 1000]))
    options = QuantizerOptions(draw(st.integers(1, 8)), group_size, scale, rounding, seed)
    limit = 6e4 if dtype == torch.float16 else 2.0**99
    x = values(seed, (rows, H)).clamp(-limit, limit).to(dtype)
    m = x.float() + values(seed + 1, (rows, H)) if draw(st.booleans()) else values(seed + 1, (rows, H))
    return x, m.clamp(-(2.0**99), 2.0**99), options


not_built = pytest.mark.skip(reason="native kernels are not built")


# One thread each: only large inputs are shared among threads, and have tests of their own below.
@pytest.fixture(params=[name for name in BACKENDS if not name.endswith("-2")] or [pytest.param(None, marks=not_built)])
def backend(request):
    return BACKENDS[request.param]


anywhere = settings(config, suppress_health_check=[*config.suppress_health_check, HealthCheck.function_scoped_fixture])


@anywhere
@given(case=quantizer_cases(), small=st.booleans())
def test_quantizer(backend, case, small):
    x, m, o = case
    with pytest.MonkeyPatch.context() as patched:
        if INTERPRETED and small:  # groups that no single program holds take other kernels; here from 17 values on
            patched.setattr(triton_rows, "MAX_VALUES", 16)
        _check_quantizer(backend, x, m, o)


def _check_quantizer(backend, x: Tensor, m: Tensor, o: QuantizerOptions) -> None:
    want = reference.quantize(x, o)
    got = backend.quantize(x, o)
    assert all(map(same, got, want))
    m_want, m_got, m_end = m.clone(), m.clone(), m.clone()
    want, got = reference.delta_quantize_(x, m_want, o), backend.delta_quantize_(x, m_got, o)
    assert all(map(same, (*got, m_got), (*want, m_want)))
    backend.dequantize(*got, o, tuple(x.shape), m_end, True)
    assert same(m_end, m_want)
    decoded = backend.dequantize(*got, o, tuple(x.shape), None, False)
    assert same(decoded, reference.dequantize(*got, o, tuple(x.shape), None, False))


@st.composite
def ragged_cases(draw: st.DrawFn) -> tuple[list[batches.EncodeItem], int]:
    x, m, o = draw(quantizer_cases())
    if draw(st.booleans()):
        scale, gain = (
            draw(st.sampled_from(["rms", *channels.KINDS])),
            draw(st.sampled_from(["least_error", "unbiased"])),
        )
        o = o._replace(scale=scale, gain=gain, rounding="nearest")
    items = []
    for i in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, x.shape[0]))
        rows, held, delta = x[:n].contiguous(), m[:n].contiguous(), draw(st.booleans())
        options = draw(st.sampled_from([o._replace(seed=o.seed + i), o._replace(bits=8, seed=i), None]))
        if options is None:
            items.append(batches.EncodeItem(rows, held, None))
        else:
            keeps = delta or draw(st.booleans())
            items.append(batches.EncodeItem(rows, held if keeps else None, options, delta))
    return items, draw(st.integers(0, 5))


@anywhere
@given(case=ragged_cases(), bad=st.sampled_from([None, math.nan, math.inf, 2.0**101]))
def test_samples_of_different_lengths(backend, case, bad):
    items, shift = case
    if bad is not None and items[-1].x.numel():
        x = items[-1].x.clone()
        x[-1, -1] = bad
        items[-1] = items[-1]._replace(x=x)
    size = batches.batch_bytes(items)
    results = []
    for encode in (batches.encode_batch, backend.encode_batch):
        again = [v._replace(m=None if v.m is None else v.m.clone()) for v in items]
        packet = torch.full((shift + size + 4,), 7, dtype=torch.uint8)
        flag = encode(again, packet[shift : shift + size], packet)
        results.append((packet, again, flag))
    (packet, wanted, flag), (found, got, found_flag) = results
    assert same(found_flag, flag)
    if int(flag) != batches.ALL_FINITE:
        return
    assert same(found, packet)
    assert zlib.crc32(packet[:-4].numpy()).to_bytes(4, "little") == packet[-4:].numpy().tobytes()
    start = shift + batches.head_bytes(items)
    for v, w, g in zip(items, wanted, got, strict=True):  # as sample by sample
        part = packet[start : start + batches.payload_bytes(*v.x.shape, v.options, v.x.dtype)]
        start += part.numel()
        if v.options is None:
            assert same(part, v.x.reshape(-1).view(torch.uint8))
        elif v.x.numel() and v.options.scale not in channels.KINDS:
            m = None if v.m is None else v.m.clone()
            one = reference.delta_quantize_(v.x, m, v.options) if v.delta else reference.quantize(v.x, v.options)
            assert same(part, torch.cat([one[1].reshape(-1).view(torch.uint8), one[0].reshape(-1)]))
            assert m is None or not v.delta or same(w.m, m)
        assert w.m is None or same(g.m, w.m)
    for decode in (batches.decode_batch, backend.decode_batch):
        arriving = [
            batches.DecodeItem(torch.zeros(v.x.shape) if v.m is None else v.m.clone(), v.options, v.delta, v.x.dtype)
            for v in items
        ]
        decode(packet[shift : shift + size], arriving)
        assert all(w.m is None or same(a.m, w.m) for a, w in zip(arriving, wanted, strict=True))


@anywhere
@given(
    case=ragged_cases(),
    bits=st.lists(st.integers(1, 8), max_size=3),
    bad=st.sampled_from([None, math.nan, 2.0**101]),
)
def test_distortion(backend, case, bits, bad):
    items = [v if v.m is not None else v._replace(delta=False) for v in case[0] if v.options is not None]
    if bad is not None and items and items[-1].x.numel():
        x = items[-1].x.clone()
        x[0, -1] = bad
        items[-1] = items[-1]._replace(x=x)
    if items:
        measure = getattr(backend, "distortion", batches.distortion)  # the reference runs in place of a missing one
        want, got = batches.distortion(items, bits), measure(items, bits)
        assert torch.equal(got.isnan(), want.isnan())  # of which there is more than one
        assert same(got.nan_to_num(1.0), want.nan_to_num(1.0))


@st.composite
def fitted_cases(draw):
    """Samples for `fit`, an error limit, often close to the error of some number of bits, and limits of bits."""
    H, rows, seed = draw(st.sampled_from(WIDTHS)), draw(st.integers(1, 4 if INTERPRETED else 40)), draw(seeds)
    group, dtype = draw(st.sampled_from([None, 24])), draw(st.sampled_from(DTYPES))
    items = []
    for i in range(draw(st.integers(1, 3))):
        g = torch.Generator().manual_seed((seed + i) % 2**63)
        x, kind = torch.randn(rows, H, generator=g), draw(st.sampled_from(["plain", "halves", "outlier", "mixed"]))
        if kind == "halves":  # 1 bit leaves out less of them than 2
            x = x.sign() / 2 ** draw(st.integers(0, 4))
        if kind in ("halves", "outlier"):
            x[:, 0] = 1.0 if kind == "halves" else 1000.0
            x[:: draw(st.integers(1, 5)), 1:] *= draw(st.sampled_from([0.0, 1.0]))
        if kind == "mixed":
            x = values(seed + i, (rows, H))
        m = x + 0.3 * torch.randn(rows, H, generator=g) if draw(st.booleans()) else None
        items.append(batches.EncodeItem(x.to(dtype), m, QuantizerOptions(8, group), m is not None))
    bits, (low, high) = draw(st.integers(1, 8)), sorted(draw(st.permutations(range(1, 9)))[:2])
    norm, left = batches.halved_sum(batches.distortion(items, [bits])).tolist()
    error = draw(st.floats(0.01, 0.6))
    if 0 < left < norm < math.inf and draw(st.booleans()):
        error = min((left / norm) ** 0.5 * (1 + draw(st.sampled_from([0.0, 1e-7, -1e-7, 1e-3, -1e-3, 0.02]))), 0.99)
    return items, error, low, high


@anywhere
@given(case=fitted_cases(), shift=st.integers(0, 3))
def test_fewest_bits(backend, case, shift):
    """One pass finds the same bits as measuring, and encodes with them."""
    items, error, low, high = case
    wanted = ops.fewest_bits(items, error, low, high, backend="torch")
    assert backend.fit(items, error, low, high, None) in (0, wanted)
    items = [v if v.delta else v._replace(m=torch.full(v.x.shape, 7.0)) for v in items]
    before = [v.m.clone() for v in items]
    payload = torch.full((shift + sum(_part_bytes(v) for v in items) + 64,), 7, dtype=torch.uint8)
    bits = backend.fit(items, error, low, high, payload[shift:-64])
    assert bool((torch.cat([payload[:shift], payload[-64:]]) == 7).all())
    if not bits:
        assert all(same(v.m, m) for v, m in zip(items, before, strict=True))
        return
    assert bits == wanted
    alike = [v._replace(m=m, options=v.options._replace(bits=bits)) for v, m in zip(items, before, strict=True)]
    parts = torch.empty(sum(_part_bytes(v) for v in alike), dtype=torch.uint8)
    assert int(batches.encode_batch(alike, parts, None)) == batches.ALL_FINITE
    assert same(payload[shift : shift + parts.numel()], parts)
    assert all(same(v.m, w.m) for v, w in zip(items, alike, strict=True))


def _part_bytes(item):
    return batches.payload_bytes(*item.x.shape, item.options, item.x.dtype)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_decodes_to_its_table_value(backend, bits, rounding):
    codes = torch.arange(256, dtype=torch.int32) % (1 << bits)
    packed = reference.pack_bits(codes.repeat(3, 1), bits)
    scale = torch.tensor([1.0, 0.7, 2.0**-99])
    got = backend.dequantize(packed, scale, QuantizerOptions(bits, None, "max", rounding), (3, 256), None, False)
    want = torch.tensor(reference.code_values(bits, rounding))[codes.long()] * scale.unsqueeze(1)
    assert same(got, want)


@anywhere
@given(case=quantizer_cases(), fraction=st.sampled_from([0.01, 0.2, 0.5, 1.0]))
def test_top_k(backend, case, fraction):
    x, _, o = case
    assert all(map(same, backend.select(x, fraction, o.group_size), reference.select(x, fraction, o.group_size)))


@anywhere
@given(
    case=quantizer_cases(),
    levels=st.sampled_from([1, 3, 7, 100, 127]),
    start=st.sampled_from([0, 96, 2**32 - 50]),
    workers=st.sampled_from([1, 2, 3, 70, 300]),
    add=st.booleans(),
)
def test_linear_dithering(backend, case, levels, start, workers, add):
    x, m, o = case
    g, norm = x.reshape(-1), float(x.float().abs().max())
    bits = (2 * levels).bit_length()
    form = gradients.LinearCodes((levels,), None, bits)
    codes = gradients.linear_encode(g, norm, form, o.seed, start)
    assert same(backend.linear_encode(g, norm, form, o.seed, start), codes)
    other = gradients.linear_encode(m.reshape(-1), norm, form, o.seed + 1, start)
    parts = ([codes, other] * workers)[:workers]
    d, sum_bits = g.numel(), (2 * levels * workers).bit_length()
    sums = gradients.linear_reduce(parts, d, bits, sum_bits)
    assert same(backend.linear_reduce(parts, d, bits, sum_bits), sums)
    before = m.reshape(-1).clone()
    of_sums = form._replace(bits=sum_bits)
    decoded = gradients.linear_decode(sums, norm, of_sums, workers, before.clone(), add)
    assert same(backend.linear_decode(sums, norm, of_sums, workers, before.clone(), add), decoded)
    for several in ((levels, levels + 5, 1000), tuple(range(levels, levels + 12))):
        index = gradients.scale_index(g, norm, several)
        assert same(backend.scale_index(g, norm, several), index)
        form = gradients.LinearCodes(several, index, bits)
        codes = gradients.linear_encode(g, norm, form, o.seed, start)
        assert same(backend.linear_encode(g, norm, form, o.seed, start), codes)
        decoded = gradients.linear_decode(codes, norm, form, 1, before.clone(), add)
        assert same(backend.linear_decode(codes, norm, form, 1, before.clone(), add), decoded)


@anywhere
@given(
    case=quantizer_cases(),
    bits=st.sampled_from([4, 8]),
    depth=st.integers(1, 5),  # one reduction takes one exponent of headroom
    start=st.sampled_from([0, 2**32 - 50]),
)
def test_exponential_dithering(backend, case, bits, depth, start):
    x, m, o = case
    if bits == 4:
        depth = min(depth, 3)
    g, norm = x.reshape(-1), float(x.float().abs().max())
    d = g.numel()
    codes = gradients.exponential_encode(g, norm, bits, depth, o.seed, start)
    assert same(backend.exponential_encode(g, norm, bits, depth, o.seed, start), codes)
    other = gradients.exponential_encode(m.reshape(-1), float(m.abs().max()), bits, depth, o.seed + 1, start)
    want = gradients.exponential_reduce_(codes.clone(), other, d, bits, o.seed)
    assert same(backend.exponential_reduce_(codes.clone(), other, d, bits, o.seed), want)
    for add in (False, True):
        before = m.reshape(-1).clone()
        decoded = gradients.exponential_decode(want, norm, bits, depth, 3, before.clone(), add)
        assert same(backend.exponential_decode(want, norm, bits, depth, 3, before.clone(), add), decoded)


@anywhere
@given(case=quantizer_cases(), mean=st.booleans(), workers=st.integers(1, 5), odd=st.sampled_from([None, -120, 101]))
def test_error_feedback(backend, case, mean, workers, odd):
    x, m, o = case
    x, e = x.reshape(-1), m.reshape(-1)
    d, bits = x.numel(), o.bits
    group = o.group_size or d
    if odd == 101:
        x = x.clone()
        x[d // 2] = float("inf")
    e_want, e_got = e.clone(), e.clone()
    codes, scale = gradients.feedback_quantize_(x, e_want, bits, group, mean)
    assert all(map(same, backend.feedback_quantize_(x, e_got, bits, group, mean), (codes, scale)))
    assert same(e_got, e_want)
    other, other_scale = gradients.feedback_quantize_(x.flip(0), e.clone(), bits, group, mean)
    if odd is not None:  # scales that no quantizer makes decode as the table says
        other_scale[-1] = 2.0**odd
    parts, scales = ([codes, other] * 3)[:workers], ([scale, other_scale] * 3)[:workers]
    want = gradients.feedback_reduce_(parts, scales, bits, e_want, group, mean)
    assert all(map(same, backend.feedback_reduce_(parts, scales, bits, e_got, group, mean), want))
    assert same(e_got, e_want)


@anywhere
@given(case=quantizer_cases(), count=st.sampled_from([1, 2, 16, 17, 18, 256]))
def test_cluster_assignment(backend, case, count):
    x, m, _ = case
    bounds = gradients.boundaries(m.reshape(-1).repeat(256)[:count].sort().values)
    assert same(backend.kmeans_assign(x.reshape(-1), bounds), gradients.kmeans_assign(x.reshape(-1), bounds))


@anywhere
@given(
    bits=st.sampled_from([1, 3, 4, 5, 8]),
    d=st.sampled_from([1, 7, 32, 100, 4097, 140_001]),
    buckets=st.sampled_from([0, 1, 500]),
    seed=seeds,
)
def test_sketches(backend, bits, d, buckets, seed):
    d = min(d, 4097) if INTERPRETED else d
    g = torch.Generator().manual_seed(seed % 2**63)
    x, K = torch.randn(d, generator=g), 1 << bits
    centers = torch.randn(K, generator=g).sort().values
    how = gradients.Sketch(torch.randint(0, buckets + 1, (K,), generator=g), bits, seed)
    bounds, want_e, e = gradients.boundaries(centers), torch.full((d,), 7.0), torch.full((d,), 7.0)
    codes, means = gradients.sketch_encode(x, want_e, centers, bounds, how)
    assert all(map(same, backend.sketch_encode(x, e, centers, bounds, how), (codes, means)))
    assert same(e, want_e)
    for add, divisor in ((False, 1), (True, 3)):
        want, out = x.clone(), x.clone()
        gradients.sketch_decode(codes, means, how, want, add, divisor)
        assert same(backend.sketch_decode(codes, means, how, out, add, divisor), want)
        assert same(out, want)


def test_finite_flag_is_on_the_payloads_device():
    """On a GPU, staging copies it to the host from there."""
    payload = torch.empty(0, dtype=torch.uint8, device="meta")
    assert batches.encode_batch([], payload, None).device == payload.device


def test_a_change_requires_m():
    """Without m a GPU would read arbitrary memory."""
    item = ops.EncodeItem(torch.ones(2, 8), None, QuantizerOptions(4, None), delta=True)
    with pytest.raises(ShapeError, match="m: None, allowed: contiguous"):
        ops.encode_batch([item], torch.empty(16, dtype=torch.uint8))


def test_tensors_on_other_devices_or_with_gaps_are_rejected():
    item, payload = (
        ops.EncodeItem(torch.ones(2, 8), torch.ones(2, 8), QuantizerOptions(4, None), delta=True),
        torch.empty(32).byte(),
    )
    ops.encode_batch([item], payload[:16]).check()
    for wrong in (item._replace(m=item.m.to("meta")), item._replace(x=item.x.to("meta"))):
        with pytest.raises(ShapeError, match="one device"):
            ops.encode_batch([wrong], payload[:16])
    with pytest.raises(ShapeError, match=r"payload: torch.uint8 \(16,\), allowed: torch.uint8 \[16\]"):
        ops.encode_batch([item], payload[::2])


@anywhere
@given(
    bits=st.integers(1, 24),
    n=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([torch.uint8, torch.int32, torch.int64]),
    seed=seeds,
)
def test_bit_streams(backend, bits, n, dtype, seed):
    g = torch.Generator().manual_seed(seed % 2**63)
    x = torch.randint(0, 1 << bits, (3, n), generator=g).to(dtype)
    packed = reference.pack_bits(x, bits)
    assert same(backend.pack_bits(x, bits), packed)
    assert same(backend.unpack_bits(packed, bits, n), reference.unpack_bits(packed, bits, n))


if INTERPRETED:

    @config
    @given(case=fitted_cases(), shift=st.integers(0, 3), seed=seeds, stochastic=st.booleans(), bad=st.booleans())
    @pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
    def test_encode_fewest(case, shift, seed, stochastic, bad):
        """The device chooses the same bits as measuring does, and encodes with them."""
        items, error, low, high = case
        how = {"rounding": "stochastic" if stochastic else "nearest"}
        items = [v._replace(options=v.options._replace(seed=seed + i, **how)) for i, v in enumerate(items)]
        if bad:
            x = items[-1].x.clone()
            x[0, -1] = math.nan
            items[-1] = items[-1]._replace(x=x)
        bits = ops.fewest_bits(items, error, low, high, backend="torch")
        assert BACKEND.fit(items, error, low, high, None) == bits, "changes and others in one packet"
        for alike in ([v for v in items if v.delta], [v for v in items if not v.delta]):
            if not alike:
                continue
            bits = ops.fewest_bits(alike, error, low, high, backend="torch")
            mine = [v._replace(m=None if v.m is None else v.m.clone()) for v in alike]
            room = sum(_part_bytes(v._replace(options=v.options._replace(bits=high))) for v in alike)
            payload = torch.full((shift + room + 64,), 7, dtype=torch.uint8)
            found, flag = BACKEND.encode_fewest(mine, error, low, high, payload[shift:-64])
            assert (int(found), found.dtype, found.shape) == (bits, torch.int64, (1,))
            assert bool((torch.cat([payload[:shift], payload[-64:]]) == 7).all())
            alike = [v._replace(options=v.options._replace(bits=bits)) for v in alike]
            parts = torch.empty(sum(_part_bytes(v) for v in alike), dtype=torch.uint8)
            assert same(flag, batches.encode_batch(alike, parts, None))
            if int(flag) == batches.ALL_FINITE:
                assert same(payload[shift : shift + parts.numel()], parts)
                assert all(v.m is None or same(v.m, w.m) for v, w in zip(mine, alike, strict=True))

    @pytest.mark.parametrize("what", ["rms", "an odd number of values", "changes and others", "other options"])
    def test_unsupported_batches_fall_back_to_measuring(what):
        """The kernels return None and change nothing."""
        H = 2 * 67 if what == "an odd number of values" else 8
        o = QuantizerOptions(8, None, "rms" if what == "rms" else "max")
        item = batches.EncodeItem(torch.randn(3, H), torch.randn(3, H), o, True)
        others = {
            "changes and others": item._replace(delta=False),
            "other options": item._replace(options=QuantizerOptions(8, 4)),
        }
        items = [item, others.get(what, item)]
        payload = torch.empty(2 * sum(_part_bytes(v) for v in items), dtype=torch.uint8)
        assert BACKEND.encode_fewest(items, 0.1, 2, 8, payload) is None
        wanted = ops.fewest_bits([item], 0.1, 2, 8, backend="torch")
        bits, flag = ops.encode_fewest([item], payload[: _part_bytes(item)], 0.1, 2, 8, backend="triton")
        assert int(bits) == wanted
        flag.check()

    @pytest.mark.parametrize("rows", [[1], [3, 1], [1, 2, 5, 1, 3, 1, 4]], ids=str)
    def test_rows_find_their_samples(rows):
        """The table has entries for samples, not for rows."""
        x, o = values(1, (sum(rows), 24)), QuantizerOptions(4, 8, "max", "stochastic")
        items = [batches.EncodeItem(each, None, o._replace(seed=i)) for i, each in enumerate(x.split(rows))]
        want, got = torch.zeros(2, batches.payload_bytes(*x.shape, o, x.dtype), dtype=torch.uint8)
        for encode, payload in ((batches.encode_batch, want), (BACKEND.encode_batch, got)):
            encode(items, payload, None)
        assert same(got, want)
        m_want, m_got = torch.zeros(2, *x.shape)
        for decode, m in ((batches.decode_batch, m_want), (BACKEND.decode_batch, m_got)):
            decode(got, [batches.DecodeItem(each, o) for each in m.split(rows)])
        assert same(m_got, m_want)

    @pytest.mark.parametrize("group", [None, 1100, 1024])
    def test_rows_split_over_several_programs(group, monkeypatch):
        """Each program derives its row, group and chunk from its index."""
        x, m = values(1, (3, 2500)), values(2, (3, 2500))
        for small, scale in ((16384, "max"), (16, "max"), (16, "rms")):
            monkeypatch.setattr(triton_rows, "MAX_VALUES", small)
            o = QuantizerOptions(3, group, scale)
            m_want, m_got = m.clone(), m.clone()
            want, got = reference.delta_quantize_(x, m_want, o), BACKEND.delta_quantize_(x, m_got, o)
            assert all(map(same, (*got, m_got), (*want, m_want)))
        o = QuantizerOptions(3, group)
        payload = torch.empty(batches.payload_bytes(3, 2500, o, x.dtype), dtype=torch.uint8)
        batches.encode_batch([batches.EncodeItem(x, None, o)], payload, None)
        want, got = torch.empty_like(x), torch.empty_like(x)
        batches.decode_batch(payload, [batches.DecodeItem(want, o)])
        BACKEND.decode_batch(payload, [batches.DecodeItem(got, o)])
        assert same(got, want)
        n = torch.arange(7500, dtype=torch.int32).view(3, 2500)
        packed = reference.pack_bits(n, 13)
        assert same(BACKEND.pack_bits(n, 13), packed)
        assert same(BACKEND.unpack_bits(packed, 13, 2500), n)

    def test_non_finite_values_leave_m_unchanged(monkeypatch):
        for small in (16, 16384):
            monkeypatch.setattr(triton_rows, "MAX_VALUES", small)
            a, m = torch.randn(3, 40), torch.randn(3, 40)
            a[2, 39] = float("nan")
            before = m.clone()
            with pytest.raises(ArithmeticError, match="row 2"):
                BACKEND.delta_quantize_(a, m, QuantizerOptions(4, 30), "a - m")
            assert same(m, before)

else:

    def test_triton_in_its_interpreter():
        pytest.importorskip("triton", reason="triton is not installed")
        root = Path(__file__).parents[2]
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert "passed" in done.stdout
        assert "skipped" not in done.stdout

    @pytest.mark.skipif(not BACKENDS, reason="native kernels are not built")
    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    @pytest.mark.parametrize(
        ("rows", "H", "group"), [(1, 200_003, None), (2, 100_000, 40_000), (900, 200, 64), (3, 70_000, 3)]
    )
    def test_large_inputs_are_independent_of_threads(rows, H, group, rounding):
        x, m = torch.randn(rows, H), torch.randn(rows, H)
        for scale in ("max", "rms") if rounding == "nearest" else ("max",):
            o = QuantizerOptions(3, group, scale, rounding, 2**32 * 5 + 1)
            m_want = m.clone()
            want = reference.delta_quantize_(x, m_want, o)
            for backend in BACKENDS.values():
                m_got = m.clone()
                got = backend.delta_quantize_(x, m_got, o)
                assert all(map(same, (*got, m_got), (*want, m_want)))

    @pytest.mark.skipif(not BACKENDS, reason="native kernels are not built")
    @pytest.mark.parametrize("scale", channels.KINDS)
    def test_scales_of_channels_are_independent_of_threads(scale):
        x, m = (values(seed, (1300, 1601)).clamp(-(2.0**98), 2.0**98) for seed in (1, 2))
        o = QuantizerOptions(3, None, scale, gain="unbiased")
        results = []
        for isa in library.ISAS[: best.isa_index + 1]:
            for threads in (1, 3):
                moved = m.clone()
                items = [batches.EncodeItem(x[:1000], moved[:1000], o, True), batches.EncodeItem(x[1000:], None, o)]
                payload = torch.empty(batches.batch_bytes(items), dtype=torch.uint8)
                backend = NativeBackend(path, isa, threads)
                backend.encode_batch(items, payload, None)
                errors = backend.distortion(items, (2, 4))
                results.append((payload, moved, errors))
        moved = m.clone()
        items = [batches.EncodeItem(x[:1000], moved[:1000], o, True), batches.EncodeItem(x[1000:], None, o)]
        payload = torch.empty(batches.batch_bytes(items), dtype=torch.uint8)
        batches.encode_batch(items, payload, None)
        results.append((payload, moved, batches.distortion(items, (2, 4))))
        assert all(same(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))

    @pytest.mark.skipif(not BACKENDS, reason="native kernels are not built")
    @pytest.mark.parametrize(
        ("rows", "H", "group"), [(3, 90_000, 70_000), (1, 270_000, 250_000), (2, 165_000, 130_000)]
    )
    @pytest.mark.parametrize("threads", range(1, 9))
    def test_a_short_last_group_with_empty_pieces(rows, H, group, threads):
        """No thread writes beyond its own pieces."""
        x, m, o = torch.randn(rows, H), torch.randn(rows, H), QuantizerOptions(4, group)
        want, m_want = reference.quantize(x, o), m.clone()
        wanted = reference.delta_quantize_(x, m_want, o)
        for isa in {name.rsplit("-", 1)[0] for name in BACKENDS}:
            backend = NativeBackend(path, isa, threads)
            assert all(map(same, backend.quantize(x, o), want))
            m_got = m.clone()
            assert all(map(same, (*backend.delta_quantize_(x, m_got, o), m_got), (*wanted, m_want)))

    @pytest.mark.skipif(not BACKENDS, reason="native kernels are not built")
    @pytest.mark.parametrize("group", [200_003, 70_000, 512, 3])
    def test_large_sums_are_independent_of_threads(group):
        x, e = torch.randn(200_003), torch.randn(200_003)
        for bits, mean in ((1, True), (4, False), (5, False), (8, False)):
            e_want = e.clone()
            codes, scale = gradients.feedback_quantize_(x, e_want, bits, group, mean)
            for backend in BACKENDS.values():
                e_got = e.clone()
                assert all(map(same, backend.feedback_quantize_(x, e_got, bits, group, mean), (codes, scale)))
                assert same(e_got, e_want)
                parts, e_mean, e_got = ([codes] * 3, [scale] * 3, bits), e.clone(), e.clone()
                want = gradients.feedback_reduce_(*parts, e_mean, group, mean)
                assert all(map(same, backend.feedback_reduce_(*parts, e_got, group, mean), want))
                assert same(e_got, e_mean)
                if group >= x.numel():  # the codes are one stream
                    sums = gradients.linear_reduce([codes] * 3, x.numel(), bits, bits + 2)
                    assert same(backend.linear_reduce([codes] * 3, x.numel(), bits, bits + 2), sums)

    @pytest.mark.skipif(not BACKENDS, reason="native kernels are not built")
    def test_reduce_across_a_block_of_the_random_stream():
        # 2**32 words serve 2**34 values: too many to hold, so the loop over one is checked at its seam alone.
        near, far = torch.full((64,), 5, dtype=torch.uint8), torch.full((64,), 6, dtype=torch.uint8)
        for backend in BACKENDS.values():
            got = backend.exponential_reduce_(near.clone(), far, 64, 8, 2**64 - 1)
            assert same(got, gradients.exponential_reduce_(near.clone(), far, 64, 8, 2**64 - 1))

    @pytest.mark.skipif(not BACKENDS, reason="native kernels are not built")
    @pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 79, 80, 128, 1000, 4099, 100_000])
    def test_crc_equals_zlib(size):
        data = bytes(torch.randint(0, 256, (size,), dtype=torch.uint8).tolist())
        for backend in BACKENDS.values():
            for value in (0, 1, 0xFFFFFFFF):
                assert backend.crc32(memoryview(data), value) == zlib.crc32(data, value)
