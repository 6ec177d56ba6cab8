"""Triton kernels on a GPU: the same bytes as the torch reference on the CPU."""

from __future__ import annotations

import pytest
import torch

from pipecomp.errors import NonFiniteError
from pipecomp.kernels import dispatch, ops
from pipecomp.kernels.reference import gradients
from pipecomp.kernels.reference import rows as reference
from pipecomp.kernels.reference.layout import QuantizerOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: python -m pytest tests/gpu"),
]


def same(got, want) -> bool:
    return got.dtype == want.dtype and got.cpu().numpy().tobytes() == want.numpy().tobytes()


def test_auto_takes_triton():
    assert dispatch.pick("auto", torch.zeros(1, device="cuda")) is dispatch.load_triton("cuda")
    assert [s.backend for s in dispatch.status() if s.device == "cuda"] == ["triton"]


# Few widths, and halves in one shape: each combination is a kernel that Triton compiles, and no cache has it at first.
SHAPES = [(7, 257, 64), (64, 1600, None), (1, 100_003, None), (3, 33, 5), (512, 768, 128)]
HALVES = [(*SHAPES[0], torch.float16), (*SHAPES[0], torch.bfloat16)]


@pytest.mark.parametrize("mode", [("max", "nearest"), ("rms", "nearest"), ("max", "stochastic")])
@pytest.mark.parametrize(("rows", "H", "group", "dtype"), [*[(*shape, torch.float32) for shape in SHAPES], *HALVES])
def test_quantizer(rows, H, group, dtype, mode):
    torch.manual_seed(rows)
    x, m = (torch.randn(rows, H) * 3).to(dtype), torch.randn(rows, H)
    x[0, :] = 0
    m[0, :] = -0.0
    for bits in (1, 3, 4, 8):
        o = QuantizerOptions(bits, group, *mode, 2**40 + bits)
        m_want, m_got = m.clone(), m.cuda()
        want = reference.delta_quantize_(x, m_want, o)
        got = ops.delta_quantize_(x.cuda(), m_got, bits, group_size=group, scale=mode[0], rounding=mode[1], seed=o.seed)
        assert same(got[0], want[0])
        assert same(got[1], want[1])
        assert same(m_got, m_want)
        back = ops.dequantize(*got, bits, x.shape, group_size=group, rounding=mode[1])
        assert same(back, reference.dequantize(*want, o, (rows, H), None, False))


@pytest.mark.parametrize("scale", ["rms", "channels", "cached_channels"])
@pytest.mark.parametrize("gain", ["least_error", "unbiased"])
@pytest.mark.parametrize(("H", "group", "dtype"), [(768, None, torch.float32), (33, 5, torch.bfloat16)])
def test_batches_with_scales_of_channels(scale, gain, H, group, dtype):
    """Samples that are changes and others, with more rows than scales of channels come from."""
    g = torch.Generator().manual_seed(H)
    spread = torch.logspace(-2, 2, H)
    for bits in (1, 2, 4, 8):
        o = QuantizerOptions(bits, group, scale, gain=gain)
        x = [(spread * torch.randn(n, H, generator=g)).to(dtype) for n in (600, 1, 300, 40)]
        x[1][:] = 0
        m = [spread * torch.randn(each.shape, generator=g) for each in x]
        items = [ops.EncodeItem(a, b.clone(), o, i < 3) for i, (a, b) in enumerate(zip(x, m, strict=True))]
        on_gpu = [v._replace(x=v.x.cuda(), m=b.cuda()) for v, b in zip(items, m, strict=True)]
        wanted, payload = (
            torch.zeros(ops.batch_bytes(items), dtype=torch.uint8, device=device) for device in ("cpu", "cuda")
        )
        ops.encode_batch(items, wanted, backend="torch").check()
        ops.encode_batch(on_gpu, payload).check()
        assert same(payload, wanted)
        arriving = [ops.DecodeItem(b.cuda(), o, v.delta) for v, b in zip(items, m, strict=True)]
        ops.decode_batch(payload, arriving)
        for v, w, a in zip(on_gpu, items, arriving, strict=True):
            assert same(v.m, w.m)
            assert same(a.m, w.m)
        on_gpu[2].x[17, 3] = torch.inf
        with pytest.raises(NonFiniteError, match="row 17"):
            ops.encode_batch(on_gpu, payload).check()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("H", "group"), [(768, None), (1600, None), (252, 64), (33, 5), (4096, 128)])
def test_the_gpu_chooses_the_fewest_bits_without_waiting(H, group, rounding):
    """And encodes with them."""
    g = torch.Generator().manual_seed(H)
    for error, low, high in ((0.05, 2, 3), (0.05, 2, 8), (0.3, 1, 5)):
        x = [torch.randn(n, H, generator=g).bfloat16() for n in (40, 1, 300)]
        m = [each.float() + 0.2 * torch.randn(each.shape, generator=g) for each in x]
        for delta in (False, True):
            items = [
                ops.EncodeItem(a, b.clone(), QuantizerOptions(high, group, rounding=rounding, seed=i), delta)
                for i, (a, b) in enumerate(zip(x, m, strict=True))
            ]
            on_gpu = [v._replace(x=v.x.cuda(), m=v.m.cuda()) for v in items]
            size = sum(ops.payload_bytes(*v.x.shape, v.options, v.x.dtype) for v in items)
            payload, wanted = torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.zeros(size, dtype=torch.uint8)
            ops.encode_fewest(on_gpu, payload, error, low, high)  # compiles
            for v, b in zip(on_gpu, m, strict=True):
                v.m.copy_(b)
            torch.cuda.set_sync_debug_mode("error")
            try:
                bits, flag = ops.encode_fewest(on_gpu, payload, error, low, high)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            flag.check()
            chosen, on_cpu = ops.encode_fewest(items, wanted, error, low, high, backend="torch")
            on_cpu.check()
            assert int(bits) == int(chosen)
            its = sum(ops.payload_bytes(*v.x.shape, v.options._replace(bits=int(bits)), v.x.dtype) for v in items)
            assert same(payload[:its], wanted[:its])
            assert all(same(v.m, w.m) for v, w in zip(on_gpu, items, strict=True))


def test_non_finite_values_leave_m_unchanged():
    a, m = torch.randn(300, 500, device="cuda"), torch.randn(300, 500, device="cuda")
    a[271, 3] = float("nan")
    before = m.clone()
    with pytest.raises(NonFiniteError, match="row 271"):
        ops.delta_quantize_(a, m, 4)
    assert torch.equal(m, before)


def test_positions_beyond_31_bits():
    width, tail = 4096, 4
    rows = (1 << 31) // width + tail
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("2**31 values need 20 GiB of the GPU's memory")
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    last = x[-tail:].normal_().cpu()
    got = ops.quantize(x, 4)
    want = ops.quantize(last, 4, backend="torch")
    assert same(got[0][-tail:], want[0])
    assert same(got[1][-tail:], want[1])
    back = ops.dequantize(*got, 4, x.shape)
    assert same(back[-tail:], ops.dequantize(*want, 4, last.shape, backend="torch"))
    del back
    start = (rows - tail) * width
    codes = ops.exponential_encode(x, 8.0, seed=3)
    assert same(codes[start:], ops.exponential_encode(last, 8.0, seed=3, start=start, backend="torch"))


@pytest.mark.parametrize("d", [1, 1000, 70_001])
def test_gradient_codes(d):
    torch.manual_seed(d)
    g, h = torch.randn(d), torch.randn(d)
    norm = float(torch.maximum(g.abs(), h.abs()).max())
    for levels in (1, 7, 127):
        want = gradients.linear_encode(g, norm, gradients.LinearCodes((levels,), None, ops.linear_bits(levels)), 5, 0)
        got = ops.linear_encode(g.cuda(), norm, levels, seed=5)
        assert same(got, want)
        total = ops.linear_reduce([got, got, got], d, levels)
        want_total = ops.linear_reduce([want, want, want], d, levels, backend="torch")
        assert same(total, want_total)
        mean = ops.linear_decode(want_total, d, norm, levels, workers=3, backend="torch")
        assert same(ops.linear_decode(total, d, norm, levels, workers=3), mean)
        ops.linear_decode(got, d, norm, levels, add_to=(sum_g := mean.cuda()))
        assert same(sum_g, ops.linear_decode(want, d, norm, levels, add_to=mean, backend="torch"))
    for bits in (4, 8):
        a = ops.exponential_encode(g, norm, bits=bits, workers=2, seed=0, backend="torch")
        b = ops.exponential_encode(h, norm, bits=bits, workers=2, seed=1, backend="torch")
        for seed, (v, codes) in enumerate(((g, a), (h, b))):
            assert same(ops.exponential_encode(v.cuda(), norm, bits=bits, workers=2, seed=seed), codes)
        got = ops.exponential_reduce_(a.cuda(), b.cuda(), d, bits=bits, seed=9)
        want = ops.exponential_reduce_(a, b, d, bits=bits, seed=9, backend="torch")
        assert same(got, want)
        mean = ops.exponential_decode(want, d, norm, bits=bits, workers=2)
        assert same(ops.exponential_decode(got, d, norm, bits=bits, workers=2), mean)
    centers = torch.randn(16).sort().values
    assert same(ops.kmeans_assign(g.cuda(), centers.cuda()), ops.kmeans_assign(g, centers, backend="torch"))
    index = ops.multiscale_index(g, norm, (3, 30), backend="torch")
    assert same(ops.multiscale_index(g.cuda(), norm, (3, 30)), index)


@pytest.mark.parametrize("scale", ["max", "mean"])
def test_means_of_three_workers(scale):
    """The reciprocal of three is rounded: a GPU must divide, not multiply."""
    torch.manual_seed(3)
    x, e, how = torch.randn(70_001), torch.randn(70_001), {"group_size": 1000, "scale": scale}
    e_want, e_got = e.clone(), e.cuda()
    want = ops.feedback_quantize_(x, e_want, 4, **how, backend="torch")
    got = ops.feedback_quantize_(x.cuda(), e_got, 4, **how)
    assert all(map(same, (*got, e_got), (*want, e_want)))
    want = ops.feedback_reduce_(*[[each] * 3 for each in want], 4, e_want, **how, backend="torch")
    got = ops.feedback_reduce_(*[[each] * 3 for each in got], 4, e_got, **how)
    assert all(map(same, (*got, e_got), (*want, e_want)))
    centers, sketch = torch.tensor([-1.0, 0.5]), ops.Sketch(torch.tensor([20, 30]), 1, 5)
    codes, means = ops.sketch_encode_(x, e, centers, sketch, backend="torch")
    want = ops.sketch_decode(codes, means, sketch, x.clone(), add=True, divisor=3, backend="torch")
    assert same(ops.sketch_decode(codes.cuda(), means.cuda(), sketch, x.cuda(), add=True, divisor=3), want)


def test_top_k_positions_and_bit_streams():
    x = (torch.randn(20, 1600) * 4).round() / 4
    values, index = ops.top_k_select(x, 0.2, group_size=200, backend="torch")
    got_values, got_index = ops.top_k_select(x.cuda(), 0.2, group_size=200)
    assert same(got_values, values)
    assert same(got_index, index)
    packed = ops.pack_positions(index, 1600, backend="torch")
    assert same(ops.pack_positions(got_index, 1600), packed)
    assert same(ops.unpack_positions(packed.cuda(), 1600, index.shape[1]), index)
    for bits in (1, 3, 8, 11, 24):
        v = torch.randint(0, 1 << bits, (3, 77), dtype=torch.int32)
        packed = ops.pack_bits(v, bits, backend="torch")
        assert same(ops.pack_bits(v.cuda(), bits), packed)
        assert same(ops.unpack_bits(packed.cuda(), bits, 77), v)


def test_payload_copies_to_pinned_memory_without_waiting():
    x = torch.randn(512, 1600, device="cuda")
    codes, scale = ops.quantize(x, 4)
    hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (codes, scale)]
    for host, device in zip(hosts, (codes, scale), strict=True):
        assert device.is_contiguous()
        host.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    want = ops.quantize(x.cpu(), 4, backend="torch")
    assert torch.equal(hosts[0], want[0])
    assert torch.equal(hosts[1], want[1])
