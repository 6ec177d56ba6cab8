"""Operations on rows of values in plain torch: bit streams, the quantizer Q_b, top-k.

Every other backend matches these functions bit for bit. Every arithmetic step on values is one float32 operation,
rounded; nothing is contracted to a fused multiply-add.

Bit streams are dense and little-endian: bit i * bits of a row is the lowest bit of value i; stream bit k is bit k mod 8
of byte k div 8; padding bits are zero. Top-k keeps max(1, floor(fraction * n + 1/2)) values of a group of n.

R: rows, H: values in a row, G: groups in a run of equal groups, n: values in a group, K: values that top-k keeps in a
row, k: bytes.
Source: arXiv:2206.01299 (AQ-SGD), sections 3 and 4.1, appendix H.6; stochastic rounding as Theorem 3.1 assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
from pipecomp.kernels.reference import layout, reproducible
from pipecomp.kernels.reference.layout import QuantizerOptions

RMS_FIXED_POINT = 2.0**30
GAIN_FIXED_POINT = 2.0**14
MAX_GAIN = 4.0


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack values (any integer dtype, [..., n], each in [0, 2**bits); higher bits are cut off), bits 1 to 24.

    Returns uint8 [..., ceil(n * bits / 8)].
    """
    n = values.shape[-1]
    size_bytes = (n * bits + 7) // 8
    lead = values.shape[:-1]
    if n == 0 or values.numel() == 0:
        return torch.zeros((*lead, size_bytes), dtype=torch.uint8, device=values.device)
    values_Rn = values.reshape(-1, n)
    if bits > 8:
        # A stream of `bits`-bit values is the stream of their single bits.
        bits_Rk = (values_Rn.to(torch.int64).unsqueeze(-1) >> torch.arange(bits, device=values.device)) & 1
        return pack_bits(bits_Rk.flatten(1).to(torch.uint8), 1).reshape(*lead, size_bytes)
    values_Rn = pad(values_Rn, (0, -n % 8)).to(torch.int64) & ((1 << bits) - 1)
    octets = values_Rn.reshape(values_Rn.shape[0], -1, 8)
    word = octets[..., 0].clone()
    for i in range(1, 8):
        word |= octets[..., i] << (i * bits)
    packed_Rk = word.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(1)
    return packed_Rk[:, :size_bytes].reshape(*lead, size_bytes)


def unpack_bits(codes: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack_bits`: codes uint8 [..., ceil(count * bits / 8)] to int32 [..., count]."""
    lead = codes.shape[:-1]
    if count == 0 or codes.numel() == 0:
        return torch.zeros((*lead, count), dtype=torch.int32, device=codes.device)
    codes_Rk = codes.reshape(-1, codes.shape[-1])
    if bits > 8:
        bits_Rk = unpack_bits(codes_Rk, 1, count * bits).reshape(codes_Rk.shape[0], count, bits)
        shift = torch.arange(bits, dtype=torch.int32, device=codes.device)
        return (bits_Rk << shift).sum(-1, dtype=torch.int32).reshape(*lead, count)
    codes_Rk = pad(codes_Rk, (0, -codes_Rk.shape[1] % bits))
    word = pad(codes_Rk.reshape(codes_Rk.shape[0], -1, bits), (0, 8 - bits)).contiguous().view(torch.int64)
    shift = torch.arange(0, 8 * bits, bits, device=codes.device)
    values = ((word >> shift) & ((1 << bits) - 1)).to(torch.int32)
    return values.flatten(1)[:, :count].reshape(*lead, count)


@cache
def code_values(bits: int, rounding: str) -> tuple[float, ...]:
    """List the values w_c that codes c decode to in a group of scale 1, each exactly a float32 value."""
    count = 1 << bits
    if rounding == "nearest":
        w = torch.tensor([(c + 0.5) / (count / 2) - 1.0 for c in range(count)], dtype=torch.float64)
    else:
        w = torch.tensor([-1.0 + 2.0 * c / (count - 1) for c in range(count)], dtype=torch.float64)
    return tuple(w.to(torch.float32).tolist())


def non_finite(name: str, row: int) -> NonFiniteError:
    """Make the error for a row that holds NaN, Inf or a value above 2**100."""
    return NonFiniteError(f"{name}: NaN, Inf or a value above 2**100 in row {row}")


def round_up_to_bfloat16(scale: Tensor) -> Tensor:
    """Round each (non-negative, finite) float32 value up to the next bfloat16 value, still float32."""
    return ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def finish_scales(most: Tensor, squares: Tensor, count: Tensor | int, options: QuantizerOptions) -> Tensor:
    """Compute scales from each group's largest magnitude (float32) and, for rms, `squares` (int64) of `count` values.

    squares: sum of (x / most)**2 in units of 2**-30. It is an integer so that it does not depend on the order of
    summation, and every backend finds the same scale. NaN, Inf and values above 2**100 pass through; small ones become
    0. An rms scale is the largest magnitude if clipping one value of that size added more squared error than smaller
    steps save, and half a step, by which zeros err, is at most the rms.
    """
    scale = most
    if options.scale == "rms":
        usable = (most >= layout.SCALE_MIN) & (most <= layout.SCALE_MAX)
        total = squares.to(torch.float64)
        whole = count.to(total.dtype) if isinstance(count, Tensor) else reproducible.divisor(count, total)
        root = (total / (whole * RMS_FIXED_POINT)).sqrt()
        loading = layout.RMS_LOADING[options.bits]
        loaded = (most.to(torch.float64) * loading * root).to(torch.float32)
        share = loading * root  # of the largest magnitude
        clips = whole * (1 + share) > layout.finest_group(options.bits) * (1 - share)
        clips |= root * 2**options.bits < 1
        scale = torch.where(usable & clips, torch.minimum(most, loaded), most)
    return torch.where(scale < layout.SCALE_MIN, 0.0, scale)


def group_scales(x_RGn: Tensor, options: QuantizerOptions) -> tuple[Tensor, Tensor]:
    """Compute the scale of each group for its codes, and the one that is sent; float32 [R, G] each."""
    most_RG = x_RGn.abs().amax(-1)
    squares_RG = torch.zeros_like(most_RG, dtype=torch.int64)
    if options.scale == "rms":
        usable = (most_RG >= layout.SCALE_MIN) & (most_RG <= layout.SCALE_MAX)
        t_RGn = x_RGn * torch.reciprocal(torch.where(usable, most_RG, 1.0)).unsqueeze(-1)
        squares_RG = (t_RGn * t_RGn * RMS_FIXED_POINT).round().to(torch.int64).sum(-1)
    scale_RG = finish_scales(most_RG, squares_RG, x_RGn.shape[-1], options)
    if options.gain != "unbiased":
        return scale_RG, scale_RG
    zero_RG = scale_RG == 0
    t_RGn = x_RGn * torch.reciprocal(torch.where(zero_RG, 1.0, scale_RG)).unsqueeze(-1)
    table = torch.tensor(code_values(options.bits, options.rounding), device=x_RGn.device)
    w_RGn = table[group_codes(x_RGn, scale_RG, options, None).to(torch.int64)]
    along_RG = (t_RGn * (w_RGn * GAIN_FIXED_POINT)).round().to(torch.int64).sum(-1)
    return scale_RG, unbiased_scales(scale_RG, most_RG, squares_RG, along_RG)


def unbiased_scales(scale: Tensor, most: Tensor, squares: Tensor, along: Tensor) -> Tensor:
    """Compute the scales with which decoded groups are as long along their values as these are.

    scale: scales of the codes. most, squares: as for `finish_scales`. along: sum of x / scale times the codes' values,
    int64 in units of 2**-14. Scales change by a factor of at most 4; at most 2**100.
    """
    scale64, most64, along64 = scale.to(torch.float64), most.to(torch.float64), along.to(torch.float64)
    one = torch.ones_like(scale64)
    share = (squares.to(torch.float64) / RMS_FIXED_POINT) / torch.where(along64 > 0, along64 / GAIN_FIXED_POINT, one)
    sent = most64 * most64 * share / torch.where(scale64 > 0, scale64, one)
    sent = torch.minimum(torch.maximum(sent, scale64 / MAX_GAIN), scale64 * MAX_GAIN)
    return sent.clamp(max=layout.SCALE_MAX).to(torch.float32)


def group_codes(x_RGn: Tensor, scale_RG: Tensor, options: QuantizerOptions, r_RGn: Tensor | None) -> Tensor:
    """Compute codes, uint8 [R, G, n]. r_RGn: uniform [0, 1) float32 for stochastic rounding, else None."""
    top = (1 << options.bits) - 1
    zero_RG1 = (scale_RG == 0).unsqueeze(-1)
    inv_RG1 = torch.reciprocal(torch.where(scale_RG == 0, 1.0, scale_RG)).unsqueeze(-1)
    u_RGn = x_RGn * inv_RG1 + 1.0
    steps = u_RGn * float(1 << options.bits - 1) if r_RGn is None else u_RGn * (top / 2) + r_RGn
    return steps.floor().clamp(0, top).masked_fill(zero_RG1, 0).to(torch.uint8)


def segment_values(x_RH: Tensor, run: layout.GroupRun) -> Tensor:
    """Cut the values of a run of groups out of their rows: [R, G, n]."""
    return x_RH[:, run.value_start : run.value_start + run.groups * run.group].reshape(-1, run.groups, run.group)


def quantize_rows(x_RH: Tensor, options: QuantizerOptions, name: str) -> tuple[Tensor, Tensor]:
    """Quantize float32 rows: codes uint8 [R, row_bytes] and scales float32 [R, groups]."""
    rows, H = x_RH.shape
    random_RH = None
    if options.rounding == "stochastic":
        random_RH = reproducible.uniform(options.seed, 0, rows * H, x_RH.device).reshape(rows, H)
    runs = layout.segments(H, options.bits, options.group_size)
    grouped = [segment_values(x_RH, run) for run in runs]
    scales = [group_scales(x_RGn, options) for x_RGn in grouped]
    bad_R = ~(torch.cat([of_codes for of_codes, _ in scales], 1) <= layout.SCALE_MAX).all(-1)
    if bool(bad_R.any()):
        raise non_finite(name, int(bad_R.nonzero()[0]))
    codes = []
    for run, x_RGn, (s_RG, _) in zip(runs, grouped, scales, strict=True):
        r_RGn = None if random_RH is None else segment_values(random_RH, run)
        packed = pack_bits(group_codes(x_RGn, s_RG, options, r_RGn), options.bits)
        codes.append(packed.reshape(rows, run.groups * run.group_bytes))
    return torch.cat(codes, 1), torch.cat([sent for _, sent in scales], 1)


def dequantize_rows(codes_Rk: Tensor, scale_RG: Tensor, H: int, options: QuantizerOptions) -> Tensor:
    """Decode rows: scale * w_c, float32 [R, H]."""
    rows, bits = codes_Rk.shape[0], options.bits
    table = torch.tensor(code_values(bits, options.rounding), dtype=torch.float32, device=codes_Rk.device)
    parts = []
    for run in layout.segments(H, bits, options.group_size):
        packed = codes_Rk[:, run.byte_start : run.byte_start + run.groups * run.group_bytes]
        c_RGn = unpack_bits(packed.reshape(rows, run.groups, run.group_bytes), bits, run.group)
        s_RG1 = scale_RG[:, run.group_start : run.group_start + run.groups].unsqueeze(-1)
        # + 0.0 because code 0 times scale 0 is -0.0, and a group of scale 0 decodes to 0.0.
        parts.append((table[c_RGn] * s_RG1 + 0.0).reshape(rows, run.groups * run.group))
    return torch.cat(parts, 1)


def quantize(x: Tensor, options: QuantizerOptions, name: str = "x") -> tuple[Tensor, Tensor]:
    """Q_b(x) of a checked input: codes uint8 [..., row_bytes], scale float32 (see `layout.scale_shape`)."""
    shape = tuple(x.shape)
    codes, scale = quantize_rows(x.reshape(-1, shape[-1]).to(torch.float32), options, name)
    return codes.reshape(*shape[:-1], codes.shape[1]), scale.reshape(layout.scale_shape(shape, options.group_size))


def dequantize(
    codes: Tensor, scale: Tensor, options: QuantizerOptions, shape: tuple[int, ...], out: Tensor | None, add: bool
) -> Tensor:
    """Decode checked codes to float32 of `shape`: a new tensor, or into `out`, or (`add`) added to what `out` holds."""
    rows = math.prod(shape[:-1])
    codes_Rk = codes.reshape(rows, codes.shape[-1])
    scale_RG = scale.reshape(rows, layout.groups(shape[-1], options.group_size))
    deq = dequantize_rows(codes_Rk, scale_RG, shape[-1], options).reshape(shape)
    if out is None:
        return deq
    return out.add_(deq) if add else out.copy_(deq)


def delta_quantize_(a: Tensor, m: Tensor, options: QuantizerOptions, name: str = "a - m") -> tuple[Tensor, Tensor]:
    """Q_b(a - m) of checked inputs; then m += deq, in place. Nothing is changed if it raises NonFiniteError."""
    codes, scale = quantize(a.to(torch.float32) - m, options, name)
    dequantize(codes, scale, options, tuple(m.shape), m, True)
    return codes, scale


def kept(n: int, fraction: float) -> int:
    """Count the values that top-k keeps in a group of n; ConfigError unless 0 < fraction <= 1."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise ConfigError("fraction", fraction, "a number above 0, at most 1")
    return max(1, math.floor(fraction * n + 0.5))


def top_k_kept(H: int, fraction: float, group_size: int | None = None) -> int:
    """Count the values that `top_k_select` keeps in a row of H values, over all its groups: K."""
    layout.check_group_size(group_size)
    return sum(s.groups * kept(s.group, fraction) for s in layout.segments(H, 1, group_size))


def top_k_group_size(H: int, fraction: float, group_size: int | None = None) -> int | None:
    """Return the `group_size` for quantizing kept values such that each group keeps its own scale."""
    layout.check_group_size(group_size)
    return None if group_size is None else kept(min(group_size, H), fraction)


def select(x: Tensor, fraction: float, group_size: int | None) -> tuple[Tensor, Tensor]:
    """Select values, float32 [..., K], and their ascending positions in the row, int32 [..., K], of a checked input.

    Magnitudes are compared as bit patterns, so NaN counts as larger than Inf; of equal ones those with the lowest
    index are kept.
    """
    H = x.shape[-1]
    x_RH = x.reshape(-1, H).to(torch.float32).contiguous()
    order_RH = x_RH.view(torch.int32) & 0x7FFFFFFF
    parts = []
    for run in layout.segments(H, 1, group_size):
        order = segment_values(order_RH, run)
        first = order.sort(dim=-1, descending=True, stable=True).indices[..., : kept(run.group, fraction)]
        start = torch.arange(run.groups, device=x.device) * run.group + run.value_start
        parts.append((first.sort(dim=-1).values + start.unsqueeze(-1)).flatten(1))
    index_RK = torch.cat(parts, 1)
    shape = (*x.shape[:-1], index_RK.shape[1])
    return x_RH.gather(1, index_RK).reshape(shape), index_RK.to(torch.int32).reshape(shape)


@torch.no_grad()
def top_k_scatter(values: Tensor, index: Tensor, H: int) -> Tensor:
    """Make rows of H zeros with `values` (float32 [..., K]) at positions `index` (int32 [..., K]): float32 [..., H]."""
    if values.shape != index.shape or values.dim() == 0:
        raise ShapeError(f"index: {tuple(index.shape)}, allowed: {tuple(values.shape)} as values")
    K = values.shape[-1]
    dense_RH = torch.zeros((values.numel() // max(K, 1), H), dtype=torch.float32, device=values.device)
    dense_RH.scatter_(1, index.reshape(-1, K).to(torch.int64), values.reshape(-1, K))
    return dense_RH.reshape(*values.shape[:-1], H)


def index_bits(H: int) -> int:
    """Number of bits of a packed position in a row of H values."""
    return max(1, (H - 1).bit_length())


def position_bytes(H: int, K: int) -> tuple[str, int]:
    """Choose the shorter form of K positions in a row of H values: ("bitmap" or "indices", its bytes a row)."""
    bitmap = (H + 7) // 8
    indices = (K * index_bits(H) + 7) // 8
    return ("bitmap", bitmap) if bitmap <= indices else ("indices", indices)


def pack_positions(index: Tensor, H: int, pack: Callable[[Tensor, int], Tensor] = pack_bits) -> Tensor:
    """Pack positions (int32 [..., K], ascending in a row) in their shorter form: [..., position_bytes(H, K)[1]]."""
    form, _ = position_bytes(H, index.shape[-1])
    if form == "indices":
        return pack(index, index_bits(H))
    index_RK = index.reshape(-1, index.shape[-1]).to(torch.int64)
    flags_RH = torch.zeros((index_RK.shape[0], H), dtype=torch.uint8, device=index.device)
    flags_RH.scatter_(1, index_RK, 1)
    packed_RB = pack(flags_RH, 1)
    return packed_RB.reshape(*index.shape[:-1], packed_RB.shape[-1])


def unpack_positions(
    packed: Tensor, H: int, K: int, unpack: Callable[[Tensor, int, int], Tensor] = unpack_bits
) -> Tensor:
    """Undo `pack_positions`: int32 [..., K]. ShapeError if the bytes are not K positions below H a row."""
    form, size_bytes = position_bytes(H, K)
    if packed.dtype != torch.uint8 or packed.dim() == 0 or packed.shape[-1] != size_bytes:
        raise ShapeError(f"positions: {packed.dtype} {tuple(packed.shape)}, allowed: torch.uint8 [..., {size_bytes}]")
    if form == "indices":
        index = unpack(packed, index_bits(H), K)
        if index.numel() and int(index.max()) >= H:
            raise ShapeError(f"positions: index {int(index.max())}, allowed: below {H}")
        return index
    flags_RH = unpack(packed, 1, H).reshape(-1, H)
    if not bool((flags_RH.sum(-1) == K).all()):
        raise ShapeError(f"positions: a bitmap that does not hold {K} positions in each row")
    return flags_RH.nonzero()[:, 1].to(torch.int32).reshape(*packed.shape[:-1], K)
