"""Data-parallel codes: the definitions value by value, unbiased sums over any number of workers, edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.reference import gradients, reproducible

BACKENDS = ["torch", "native"] if not isinstance(dispatch.load_native(), str) else ["torch"]
F = np.float32
GRADIENTS = st.lists(
    st.one_of(st.floats(-2, 2, width=32), st.sampled_from([0.0, -0.0, 2.0, -1.0, 0.5, 2.0**-149, 1e-30])),
    min_size=1,
    max_size=70,
)


def random_32(seed: int, index: int) -> int:
    return int(reproducible.random_bits(seed, index, 1))


def plain_linear(g, norm, s, seed, start):
    """Signed levels, one value at a time."""
    out = []
    for i, v in enumerate(g):
        y = min(abs(F(v)) / F(norm or 1), F(1)) * F(s)
        level = math.floor(y)
        level += F(random_32(seed, start + i) >> 8) * F(2.0**-24) < y - F(level)
        out.append(-level if v < 0 else level)
    return out


def plain_exponential(g, norm, bits, depth, seed, start):
    """(negative, exponent), one value at a time, from fractions of powers of two."""
    top, out = 2 ** (bits - 1) - 1, []
    for i, v in enumerate(g):
        y = float(min(abs(F(v)) / F(norm or 1), F(1)))
        h = random_32(seed, start + i)
        e = 0
        if y > 0:
            k = -math.floor(math.log2(y)) if y >= 2.0**-140 else 140
            e = k + 1 + depth
            if e > top:
                e = top if h >> 8 < float(F(y) * F(2.0 ** (top - 1 - depth))) * 2**24 else 0
            elif h >> 9 < (y * 2.0**k - 1) * 2**23:
                e -= 1
        out.append((v < 0 and e > 0, e))
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(
    g=GRADIENTS,
    s=st.sampled_from([1, 3, 7, 100, 127]),
    seed=st.integers(0, 2**63),
    start=st.sampled_from([0, 64, 2**32 - 3]),
)
def test_linear_dithering_follows_the_definition(backend, g, s, seed, start):
    x, norm = torch.tensor(g), max(map(abs, g))
    codes = ops.linear_encode(x, norm, s, seed=seed, start=start, backend=backend)
    want = plain_linear(g, norm, s, seed, start)
    assert (ops.unpack_bits(codes, ops.linear_bits(s), len(g)) - s).tolist() == want
    other = ops.linear_encode(x.flip(0), norm, s, seed=seed, start=start, backend=backend)
    parts, width = [codes, other, codes], ops.linear_bits(s, 3)
    sums = ops.linear_reduce(parts, len(g), s, backend=backend)
    total = [2 * a + b for a, b in zip(want, plain_linear(g[::-1], norm, s, seed, start), strict=True)]
    assert (ops.unpack_bits(sums, width, len(g)) - 3 * s).tolist() == total
    mean = ops.linear_decode(sums, len(g), norm, s, workers=3, backend=backend)
    assert mean.tolist() == [float(F(t) * F(norm / (s * 3))) for t in total]
    added = ops.linear_decode(codes, len(g), norm, s, add_to=x.clone(), backend=backend)
    assert added.tolist() == [float(F(v) + F(level) * F(norm / s)) for v, level in zip(g, want, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(g=GRADIENTS, bits=st.sampled_from([4, 8]), workers=st.integers(1, 9), seed=st.integers(0, 2**63))
def test_exponential_dithering_follows_the_definition(backend, g, bits, workers, seed):
    x, norm = torch.tensor(g), max(map(abs, g))
    depth = ops.tree_depth(workers)
    codes = ops.exponential_encode(x, norm, bits=bits, workers=workers, seed=seed, start=5, backend=backend)
    want = plain_exponential(g, norm, bits, depth, seed, 5)
    got = ops.unpack_bits(codes, bits, len(g)).tolist()
    assert got == [(negative << (bits - 1)) | e for negative, e in want]
    values = ops.exponential_decode(codes, len(g), norm, bits=bits, workers=workers, backend=backend).tolist()
    factor = float(F(norm / workers))
    exact = [0.0 if e == 0 else float(F((-1.0 if neg else 1.0) * 2.0 ** (1 + depth - e) * factor)) for neg, e in want]
    assert values == exact


def combine(a: int, b: int, bits: int) -> list[tuple[int, float]]:
    """Possible sums of two codes and their probabilities: Algorithm 2, from the exact sum of the two values."""
    sign = 1 << (bits - 1)
    value = [0.0 if not c & (sign - 1) else (-1.0) ** (c >> (bits - 1)) * 2.0 ** -(c & (sign - 1)) for c in (a, b)]
    total = sum(value)
    if total == 0:
        return [(0, 1.0)]
    low = math.floor(math.log2(abs(total)))  # |total| lies in [2**low, 2**(low + 1))
    up = abs(total) / 2.0**low - 1
    flag = sign if total < 0 else 0
    return [(flag | -low, 1 - up), (flag | (-low - 1), up)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_reduce_of_every_pair_is_a_neighbouring_power_of_two_with_the_right_probability(backend, bits):
    top, sign, draws = min(2 ** (bits - 1) - 1, 14), 1 << (bits - 1), 2000
    codes = [0, *range(2, top + 1), *(sign | e for e in range(2, top + 1))]
    pairs = [(a, b) for a in codes for b in codes]
    a = ops.pack_bits(torch.tensor([p[0] for p in pairs]).repeat(draws), bits)
    b = ops.pack_bits(torch.tensor([p[1] for p in pairs]).repeat(draws), bits)
    d = len(pairs) * draws
    before = b.clone()
    ops.exponential_reduce_(a, b, d, bits=bits, seed=3, backend=backend)
    assert torch.equal(b, before)
    got = ops.unpack_bits(a, bits, d).reshape(draws, len(pairs))
    for j, (x, y) in enumerate(pairs):
        options = dict(combine(x, y, bits))
        seen, counts = got[:, j].unique(return_counts=True)
        for code, count in zip(seen.tolist(), counts.tolist(), strict=True):
            p = options.get(code, 0.0)
            slack = 0.0 if p in (0, 1) else 5.5 * math.sqrt(p * (1 - p) / draws) + 2 / draws
            assert abs(count / draws - p) <= slack, (x, y, code, count / draws, p)


def test_rare_moves_of_far_exponents_have_their_probability():
    d = 1 << 20
    a = torch.full((d,), 10, dtype=torch.uint8)
    moved = {}
    for far in (17, 19, 21, 43, 60):
        b = torch.full((d,), far, dtype=torch.uint8)
        moved[far] = int((ops.exponential_reduce_(a.clone(), b, d, seed=far) == 9).sum())
    for far, expected in ((17, d / 128), (19, d / 512), (21, d / 2048)):
        assert abs(moved[far] - expected) < 5 * expected**0.5
    assert moved[43] <= 2
    assert moved[60] == 0


def tree(codes: list[torch.Tensor], d: int, bits: int, seed: int, backend: str) -> torch.Tensor:
    """Reduce over a binary tree of depth ceil(log2 n)."""
    level = 0
    while len(codes) > 1:
        pairs = [codes[i : i + 2] for i in range(0, len(codes), 2)]
        codes = [
            ops.exponential_reduce_(p[0], p[1], d, bits=bits, seed=ops.mix_seed(seed, level, i), backend=backend)
            if len(p) == 2
            else p[0]
            for i, p in enumerate(pairs)
        ]
        level += 1
    return codes[0]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_exponential_mean_over_workers_is_unbiased_and_within_its_variance(bits, n):
    torch.manual_seed(n)
    d, draws = 24, 3000
    g = torch.randn(n, d)
    g[:, 0], g[:, 1] = 1.0, torch.linspace(-1, 1, n)
    norm = float(g.abs().max())
    wide = g.repeat(1, draws)
    codes = [ops.exponential_encode(wide[i], norm, bits=bits, workers=n, seed=ops.mix_seed(1, i)) for i in range(n)]
    total = tree(codes, d * draws, bits, 2, "auto")
    mean = ops.exponential_decode(total, d * draws, norm, bits=bits, workers=n).reshape(draws, d).double()
    standard_error = mean.std(0) / draws**0.5
    assert bool(((mean.mean(0) - g.mean(0)).abs() <= 4.5 * standard_error + 1e-6 * norm).all())
    # Rounding of one worker: at most an eighth of the square above the smallest level, at most y * level below it.
    y = g.double().abs()
    smallest = norm * 2.0 ** (2 + ops.tree_depth(n) - 2 ** (bits - 1))
    own = torch.where(y > smallest, y**2 / 8, y * smallest)
    variances, means = list(own), list(g.double())
    while len(variances) > 1:
        both = range(0, len(means) - 1, 2)
        merged = [9 / 8 * (variances[i] + variances[i + 1]) + (means[i] + means[i + 1]) ** 2 / 8 for i in both]
        sums = [means[i] + means[i + 1] for i in both]
        odd = len(variances) % 2
        variances, means = merged + variances[-1:] * odd, sums + means[-1:] * odd
    bound = variances[0] / n**2
    assert bool((mean.var(0) <= bound * 1.15 + 1e-12).all())


@pytest.mark.parametrize("n", [1, 3, 5])
def test_linear_mean_over_workers_is_unbiased(n):
    torch.manual_seed(n)
    d, draws, s = 24, 3000, 3
    g = torch.randn(n, d)
    norm = float(g.abs().max())
    parts = [ops.linear_encode(g[i].repeat(draws), norm, s, seed=i) for i in range(n)]
    sums = ops.linear_reduce(parts, d * draws, s)
    mean = ops.linear_decode(sums, d * draws, norm, s, workers=n).reshape(draws, d).double()
    standard_error = mean.std(0) / draws**0.5
    assert bool(((mean.mean(0) - g.mean(0)).abs() <= 4.5 * standard_error + 1e-6 * norm).all())
    assert bool((mean.var(0) <= norm**2 / (4 * s**2 * n) * 1.1).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_scales_keep_small_values_finer_and_stay_unbiased(backend):
    torch.manual_seed(0)
    draws, levels = 3000, (3, 30, 100)
    g = torch.cat([torch.randn(20), torch.randn(20) * 0.02])
    norm = float(g.norm())
    index = ops.multiscale_index(g, norm, levels, backend=backend)
    y = g.abs() / norm
    assert index.tolist() == [max(j for j, s in enumerate(levels) if float(v * s) <= levels[0]) for v in y]
    wide = g.repeat(draws)
    codes = ops.linear_encode(wide, norm, levels, scale_index=index.repeat(draws), seed=1, backend=backend)
    total = ops.unpack_bits(codes, ops.linear_bits(levels[0]), wide.numel()) - levels[0]
    assert int(total.abs().max()) <= levels[0]
    out = torch.empty(wide.numel())
    picked = index.repeat(draws)
    got = ops.linear_decode(codes, wide.numel(), norm, levels, scale_index=picked, out=out, backend=backend)
    assert got is out
    mean = out.reshape(draws, -1).double()
    standard_error = mean.std(0) / draws**0.5
    assert bool(((mean.mean(0) - g).abs() <= 4.5 * standard_error + 1e-6 * norm).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_give_what_the_whole_bucket_gives(backend):
    g = torch.randn(1000)
    whole = ops.linear_encode(g, 4.0, 7, seed=5, backend=backend)
    parts = [ops.linear_encode(g[i : i + 200], 4.0, 7, seed=5, start=i, backend=backend) for i in range(0, 1000, 200)]
    assert torch.equal(torch.cat(parts), whole)
    options = dict(bits=4, seed=5, backend=backend)
    whole = ops.exponential_encode(g, 4.0, **options)
    parts = [ops.exponential_encode(g[i : i + 200], 4.0, start=i, **options) for i in range(0, 1000, 200)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_odd_buckets(backend, dtype):
    for g in (torch.zeros(7), torch.tensor([3e38]), torch.tensor([2.0**-149, -(2.0**-148)]), torch.randn(9, 5).t()):
        g = g.to(dtype)
        norm = float(g.float().abs().max())
        if not math.isfinite(norm):
            continue
        d = g.numel()
        linear = ops.linear_encode(g, norm, 7, backend=backend)
        value = ops.linear_decode(linear, d, norm, 7, backend=backend)
        assert bool((value - g.reshape(-1).float()).abs().max() <= norm / 7 * 1.0001 + 2.0**-148)
        codes = ops.exponential_encode(g, norm, workers=3, backend=backend)
        value = ops.exponential_decode(codes, d, norm, workers=3, divide=False, backend=backend)
        assert bool(((value.double() - g.reshape(-1).double()).abs() <= norm * 1.0001).all())
        if norm == 0:
            assert value.tolist() == [0.0] * d


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    x=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=50),
    centers=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=40, unique=True),
)
def test_cluster_assignment_is_nearest_and_never_across_sign(backend, x, centers):
    centers = sorted(centers)
    got = ops.kmeans_assign(torch.tensor(x), torch.tensor(centers), backend=backend).tolist()
    for v, index in zip(x, got, strict=True):
        same_side = [i for i, c in enumerate(centers) if (c < 0) == (v < 0)] or range(len(centers))
        best = min(abs(v - centers[i]) for i in same_side)
        assert index in same_side
        assert abs(v - centers[index]) <= best * (1 + 1e-5) + 1e-6


def test_many_centers_and_special_values():
    centers = torch.linspace(-1, 1, 256)
    x = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0, centers[7].item()])
    for backend in BACKENDS:
        assert ops.kmeans_assign(x, centers, backend=backend).tolist() == [255, 0, 255, 128, 128, 7]


def test_counts_of_bits_levels_and_depths():
    assert [ops.tree_depth(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    assert [ops.linear_bits(s) for s in (1, 3, 7, 127)] == [2, 3, 4, 8]
    assert ops.linear_bits(7, 4) == 6
    assert [ops.exponential_levels(8, 4), ops.exponential_levels(4, 1), ops.exponential_levels(4, 4)] == [125, 7, 5]


def test_arguments_are_checked():
    g = torch.randn(8)
    codes = ops.linear_encode(g, 4.0, 7)
    for call in (
        lambda: ops.linear_encode(g, 4.0, 0),
        lambda: ops.linear_encode(g, 4.0, 128),
        lambda: ops.linear_encode(g, 4.0, (3, 7)),
        lambda: ops.linear_encode(g, 4.0, (7, 3), scale_index=torch.zeros(8, dtype=torch.uint8)),
        lambda: ops.linear_encode(g, 4.0, 7, bits=3),
        lambda: ops.exponential_encode(g, 4.0, bits=5),
        lambda: ops.multiscale_index(g, 4.0, tuple(range(1, 258))),  # an index has 8 bits
        lambda: ops.exponential_encode(g, 4.0, bits=4, workers=65),
        lambda: ops.exponential_levels(4, 1000),
        lambda: ops.linear_decode(codes, 8, 4.0, 7, workers=0),
        lambda: ops.linear_decode(codes, 8, 4.0, 7, workers=2, bits=4),
        lambda: ops.linear_decode(codes, 8, 4.0, 7, out=g, add_to=g),
        lambda: ops.linear_reduce([], 8, 7),
        lambda: ops.linear_reduce([codes] * 70_000, 8, 127, bits=8),
        lambda: ops.kmeans_assign(g, torch.tensor([1.0, 0.0])),
        lambda: ops.kmeans_assign(g, torch.tensor([math.nan])),
    ):
        with pytest.raises(ConfigError):
            call()
    for call in (
        lambda: ops.linear_encode(g.double(), 4.0, 7),
        lambda: ops.linear_reduce([codes, codes[:-1]], 8, 7),
        lambda: ops.linear_decode(codes[:-1], 8, 4.0, 7),
        lambda: ops.linear_decode(codes, 8, 4.0, 7, add_to=g.double()),
        lambda: ops.linear_encode(g, 4.0, (3, 7), scale_index=torch.zeros(7, dtype=torch.uint8)),
        lambda: ops.exponential_reduce_(codes, codes, 9, bits=4),
        lambda: ops.exponential_decode(codes, 8, 4.0, bits=4, out=torch.zeros(7)),
        lambda: ops.kmeans_assign(g, torch.zeros(0)),
        lambda: ops.kmeans_assign(g.double(), torch.zeros(1)),
    ):
        with pytest.raises(ShapeError):
            call()
    for norm in (math.nan, math.inf, -1.0):
        for encode in (lambda n: ops.linear_encode(g, n, 7), lambda n: ops.exponential_encode(g, n)):
            with pytest.raises(NonFiniteError, match="norm"):
                encode(norm)


def test_invalid_sketches_are_rejected():
    """Kernels index by these numbers, and would access memory outside the tensors."""
    x, e, centers, counts = torch.randn(50), torch.empty(50), torch.tensor([-1.0, 1.0]), torch.tensor([3, 0])
    how = gradients.Sketch(counts, 1, 5)
    codes, means = ops.sketch_encode_(x, e, centers, how)
    assert means.shape == (2 + 3,)
    for wrong in (counts - 1, counts + (1 << 30)):
        with pytest.raises(ConfigError, match="counts"):
            ops.sketch_encode_(x, e, centers, how._replace(counts=wrong))
    for call in (
        lambda: ops.sketch_encode_(x, e[1:], centers, how),
        lambda: ops.sketch_encode_(x, e, torch.zeros(1), how),
        lambda: ops.sketch_encode_(x, e, centers, how._replace(counts=counts[1:])),
        lambda: ops.sketch_decode(codes[1:], means, how, e),
        lambda: ops.sketch_decode(codes, means[1:], how, e),
        lambda: ops.sketch_decode(codes, means, how, torch.empty(60)),
    ):
        with pytest.raises(ShapeError):
            call()


def test_hashes_of_positions_are_cached_on_the_cpu_only():
    """On a GPU another thread's stream could read them before they are computed."""
    cluster = torch.zeros(50, dtype=torch.uint8)
    how = gradients.Sketch(torch.tensor([7, 0]), 1, 12345)
    gradients._cached_uniform.cache_clear()
    want = gradients.slots(cluster, how)
    assert torch.equal(gradients.slots(cluster, how), want)
    hits, misses = gradients._cached_uniform.cache_info()[:2]
    assert (hits, misses) == (1, 1)
    for _ in range(2):
        assert gradients.slots(cluster.to("meta"), how).shape == want.shape
    assert gradients._cached_uniform.cache_info()[:2] == (hits, misses)
