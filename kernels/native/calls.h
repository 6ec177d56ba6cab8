// Calls of the C interface: work is cut into units, distributed to threads, and run by the kernels of an instruction set.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "shared.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pipecomp {

static const Table& table_of([[maybe_unused]] int isa) {
#if defined(__x86_64__)
    if (isa == 2) return avx512::table;
    if (isa == 1) return avx2::table;
#endif
    return base::table;
}

static const double RMS_LOADING[9] = {0, 1.596, 1.991, 2.344, 2.682, 3.01, 3.33, 3.64, 3.94};

// The scale of a group from its largest magnitude; -1 if that is NaN, Inf or above 2**100.
struct Scaler {
    const QuantizeArgs& a;
    const Table& t;

    float finish(float scale) const {
        return scale < bits_float(SCALE_MIN_BITS) ? 0.0f : scale;
    }
    float from_squares(float most, int64_t sum, int64_t n) const {
        const double root = std::sqrt(double(sum) / (double(n) * 0x1p30)), share = RMS_LOADING[a.bits] * root;
        const double finest = double(3 << 2 * a.bits);  // layout.finest_group
        if (double(n) * (1 + share) <= finest * (1 - share) && root * double(1 << a.bits) >= 1) return finish(most);
        return finish(std::min(most, float(double(most) * RMS_LOADING[a.bits] * root)));
    }
    float whole_group(const Layout::Unit& u) const {
        uint32_t most = t.measure(a, u);
        if (most > SCALE_MAX_BITS) return -1.0f;
        float scale = bits_float(most);
        if (!a.rms || most < SCALE_MIN_BITS) return finish(scale);
        return from_squares(scale, t.sum_squares(a, u, 1.0f / scale), u.whole);
    }
};

static void lower(std::atomic<int64_t>& least, int64_t value) {
    int64_t seen = least.load();
    while (value < seen && !least.compare_exchange_weak(seen, value)) {}
}

// Scales of groups that are cut into pieces; `bad` becomes the first row where whole_group would return -1.
static void scales_of_pieces(const Scaler& s, const Layout& l, int64_t units, std::vector<uint32_t>& most,
                             std::vector<int64_t>& sums, std::atomic<int64_t>& bad, int thread, int threads,
                             Barrier& barrier) {
    Range part(units, 1, thread, threads);
    for (int64_t u = part.begin; u < part.end; u++) most[size_t(u)] = s.t.measure(s.a, l.at(u));
    barrier.wait();
    const int64_t groups = units / l.pieces;
    if (thread == 0)
        for (int64_t g = 0; g < groups; g++) {
            uint32_t& top = most[size_t(g * l.pieces)];
            for (int64_t p = 1; p < l.pieces; p++) top = std::max(top, most[size_t(g * l.pieces + p)]);
            if (top > SCALE_MAX_BITS) lower(bad, g / l.groups);
            else put_scale(s.a.scales, g, s.finish(bits_float(top)));
        }
    barrier.wait();
    if (!s.a.rms || bad.load() != INT64_MAX) return;
    for (int64_t u = part.begin; u < part.end; u++) {
        uint32_t top = most[size_t(u / l.pieces * l.pieces)];
        sums[size_t(u)] = top < SCALE_MIN_BITS ? 0 : s.t.sum_squares(s.a, l.at(u), 1.0f / bits_float(top));
    }
    barrier.wait();
    if (thread == 0)
        for (int64_t g = 0; g < groups; g++) {
            int64_t sum = 0;
            for (int64_t p = 0; p < l.pieces; p++) sum += sums[size_t(g * l.pieces + p)];
            uint32_t top = most[size_t(g * l.pieces)];
            if (top < SCALE_MIN_BITS) continue;
            put_scale(s.a.scales, g, s.from_squares(bits_float(top), sum, l.at(g * l.pieces).whole));
        }
    barrier.wait();
}

// The call that moves m by the decoded values, or sets `fresh` to them; out is null if there is neither.
static DequantizeArgs update_of(const QuantizeArgs& a) {
    return {a.codes, a.scales, a.channels, a.m ? a.m : a.fresh, a.m ? a.m_stride : a.H, a.rows, a.H, a.group,
            a.dtype, a.bits,   a.stochastic,        a.m != nullptr};
}

// A layout with whole groups as units, however long.
static Layout whole_groups(int64_t d, int64_t group, int bits) {
    Layout l(d, group, bits);
    l.pieces = 1;
    return l;
}

// A group that is normalized: its largest |z|, the sum of squares over it, in units of 2**-30, and the scale of its codes,
// -1 if a value is NaN, Inf or above 2**100.
struct NormalizedGroup {
    float largest, scale;
    int64_t squares;

    // The scale that is sent with an unbiased gain. along: of the group's codes, see sum_along.
    float unbiased(int64_t along) const {
        const double share = (double(squares) / 0x1p30) / (along > 0 ? double(along) / 0x1p14 : 1.0);
        const double sent = double(largest) * double(largest) * share / double(scale);
        const double limited = std::min(std::max(sent, double(scale) / 4), double(scale) * 4);
        return float(std::min(limited, 0x1p100));
    }
};

// z: set to the group's values over their channels' scales.
static NormalizedGroup normalized(const QuantizeArgs& a, const Layout::Unit& u, const Table& t, float* z) {
    const uint32_t most = t.normalize(a, u, z);
    if (most > SCALE_MAX_BITS) return {0.0f, -1.0f, 0};
    if (most < SCALE_MIN_BITS) return {0.0f, 0.0f, 0};
    QuantizeArgs b = a;
    b.x = z, b.m = nullptr, b.dtype = FLOAT32;
    const float largest = bits_float(most);
    const int64_t squares = t.sum_squares(b, {0, 0, 0, u.n, u.n, 0}, 1.0f / largest);
    return {largest, Scaler{b, t}.from_squares(largest, squares, u.n), squares};
}

// As quantize_call, for rms scales with scales of channels or an unbiased gain; but if it returns a row, any m may have
// moved. A row stays in the L1 cache from its values to its decoded values.
static int64_t quantize_scaled_call(const QuantizeArgs& a, int isa, int threads) {
    const Layout l = whole_groups(a.H, a.group, a.bits);
    const Table& t = table_of(isa);
    const int64_t units = a.rows * l.groups;
    std::atomic<int64_t> bad{INT64_MAX};
    const uint8_t* const end = a.codes + a.rows * l.row_bytes;
    const DequantizeArgs update = update_of(a);
    run_threads(useful_threads(threads, a.rows * a.H), [&](int thread, int count, Barrier&) {
        Range part(units, 1, thread, count);
        const uint8_t* limit = part.end < units ? a.codes + l.at(part.end).byte : end;
        std::vector<float> z(static_cast<size_t>(l.group));
        for (int64_t u = part.begin; u < part.end; u++) {
            const Layout::Unit unit = l.at(u);
            const NormalizedGroup found = normalized(a, unit, t, z.data());
            float sent = found.scale;
            if (found.scale < 0) lower(bad, unit.row);
            else if (found.scale == 0) std::memset(a.codes + unit.byte, 0, size_t(l.code_bytes(unit.n)));
            else {
                const int64_t along = t.quantize_normalized(a, unit, z.data(), found.scale, limit);
                if (a.unbiased) sent = found.unbiased(along);
            }
            put_scale(a.scales, u, sent);
            if (update.out && sent >= 0) t.dequantize(update, unit, limit, false);
        }
    });
    return bad.load() == INT64_MAX ? -1 : bad.load();
}

// The code of a channel with this square of its scale, over the largest: the nearest in logarithms.
static uint8_t channel_code(double ratio) {
    uint64_t bits;
    std::memcpy(&bits, &ratio, 8);
    int code = 255 + 8 * (int(bits >> 52 & 0x7FF) - 1023);
    bits = (bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
    double mantissa;
    std::memcpy(&mantissa, &bits, 8);
    for (const double limit : constants.between) code += mantissa >= limit;
    return uint8_t(std::min(std::max(code, 0), 255));
}

// Rows of one sample that scales of channels come from.
static QuantizeArgs channel_rows(const void* x, const float* m, int64_t x_stride, int64_t rows, int64_t H, int32_t dtype) {
    QuantizeArgs a{};
    a.x = x, a.m = const_cast<float*>(m), a.x_stride = x_stride, a.m_stride = H, a.rows = rows, a.H = H, a.dtype = dtype;
    return a;
}

// The scales of channels of all rows of these samples: see scales_of in reference/channels.py.
static void channel_scales(const ChannelsArgs& c, const std::vector<QuantizeArgs>& a, int isa, int threads) {
    constexpr int64_t ROWS = 512, PARTS = 8, COLUMNS = 512;  // sums of PARTS * COLUMNS stay in the L1 cache
    const Table& t = table_of(isa);
    int64_t rows = 0;
    for (const QuantizeArgs& sample : a) rows += sample.rows;
    const int64_t stride = rows <= ROWS ? 1 : (rows + ROWS - 1) / ROWS | 1;
    const int64_t sampled = (rows + stride - 1) / stride, part_rows = (sampled + PARTS - 1) / PARTS;
    std::vector<double> sums(static_cast<size_t>(c.H));
    run_threads(useful_threads(threads, sampled * c.H), [&](int thread, int count, Barrier&) {
        const Range range(c.H, COLUMNS, thread, count);
        std::vector<double> parts(static_cast<size_t>(PARTS * std::min(COLUMNS, c.H)));
        for (int64_t begin = range.begin; begin < range.end; begin += COLUMNS) {
            const int64_t n = std::min(COLUMNS, range.end - begin);
            std::fill(parts.begin(), parts.end(), 0.0);
            int64_t sample = 0, first = 0;
            for (int64_t k = 0, part = 0, left = part_rows; k < sampled; k++) {
                const int64_t row = k * stride;
                while (row >= first + a[size_t(sample)].rows) first += a[size_t(sample++)].rows;
                if (!left) part++, left = part_rows;
                left--;
                t.add_squares(a[size_t(sample)], row - first, stride, begin, begin + n, parts.data() + part * n);
            }
            for (int64_t half = PARTS / 2; half; half /= 2)
                for (int64_t i = 0; i < half * n; i++) parts[size_t(i)] += parts[size_t(half * n + i)];
            std::memcpy(sums.data() + begin, parts.data(), size_t(n) * sizeof(double));
        }
    });
    std::vector<double> copy = sums;
    const double least = t.sum_of_groups(copy.data(), c.H) / double(c.H) * c.floor;
    double most = 0;
    if (std::isfinite(least))
        for (double& sum : sums) most = std::max(most, sum = std::max(sum, least));
    for (int64_t h = 0; h < c.H; h++) {
        const uint8_t code = channel_code(most > 0 ? sums[size_t(h)] / most : 1.0);
        if (c.block) c.block[h] = code;
        c.channels[h] = constants.channel[code];
        c.channels[c.H + h] = constants.channel_inverse[code];
    }
}

static void measure_channels(const ChannelsArgs& c, const QuantizeArgs* a, int64_t samples, int isa, int threads) {
    std::vector<QuantizeArgs> rows;
    for (int64_t i = 0; i < samples; i++) {
        if (a[i].channels != c.channels) continue;
        rows.push_back(c.cached ? channel_rows(a[i].m, nullptr, a[i].m_stride, a[i].rows, c.H, FLOAT32)
                                : channel_rows(a[i].x, a[i].m, a[i].x_stride, a[i].rows, c.H, a[i].dtype));
    }
    channel_scales(c, rows, isa, threads);
}

// Reads the scales from their block, or computes them from what is to be moved.
static void read_channels(const ChannelsArgs& c, const DequantizeArgs* a, int64_t samples, int isa, int threads) {
    if (!c.cached) {
        for (int64_t h = 0; h < c.H; h++) c.channels[h] = constants.channel[c.block[h]];
        return;
    }
    std::vector<QuantizeArgs> rows;
    for (int64_t i = 0; i < samples; i++)
        if (a[i].channels == c.channels)
            rows.push_back(channel_rows(a[i].out, nullptr, a[i].out_stride, a[i].rows, c.H, FLOAT32));
    channel_scales(c, rows, isa, threads);
}

// Codes first, then m += deq(codes) once every group is known to be finite; otherwise m is unchanged. A second pass over m
// costs less than checking beforehand, which would read x twice as well.
static int64_t quantize_call(const QuantizeArgs& a, int isa, int threads) {
    if (a.inverse || a.unbiased) return quantize_scaled_call(a, isa, threads);
    const Layout l(a.H, a.group, a.bits);
    const Table& t = table_of(isa);
    const Scaler scaler{a, t};
    const int64_t units = a.rows * l.groups * l.pieces;
    std::atomic<int64_t> bad{INT64_MAX};
    std::vector<uint32_t> most(l.pieces > 1 ? size_t(units) : 0);
    std::vector<int64_t> sums(l.pieces > 1 && a.rms ? size_t(units) : 0);
    const uint8_t* const end = a.codes + a.rows * l.row_bytes;
    const DequantizeArgs update = update_of(a);
    run_threads(useful_threads(threads, a.rows * a.H), [&](int thread, int count, Barrier& barrier) {
        Range part(units, 1, thread, count);
        // Codes of this thread end where the next thread's first unit begins.
        const uint8_t* limit = part.end < units ? a.codes + l.at(part.end).byte : end;
        if (l.pieces > 1) {
            scales_of_pieces(scaler, l, units, most, sums, bad, thread, count, barrier);
            if (bad.load() != INT64_MAX) return;
        }
        for (int64_t u = part.begin; u < part.end; u++) {
            Layout::Unit unit = l.at(u);
            const float scale = l.pieces == 1 ? scaler.whole_group(unit) : get_scale(a.scales, unit.id);
            if (l.pieces == 1) put_scale(a.scales, u, scale);
            if (scale < 0) lower(bad, unit.row);
            else if (unit.n) t.quantize(a, l, unit, scale, limit);
        }
        if (!update.out) return;
        barrier.wait();
        if (bad.load() != INT64_MAX) return;
        for (int64_t u = part.begin; u < part.end; u++) {
            Layout::Unit unit = l.at(u);
            if (unit.n) t.dequantize(update, unit, end, false);
        }
    });
    return bad.load() == INT64_MAX ? -1 : bad.load();
}

// Copies values in full precision; returns -1, or 0 if one is NaN or Inf.
static int64_t copy_call(const QuantizeArgs& a, int isa) {
    const Table& t = table_of(isa);
    const int64_t n = a.rows * a.H;
    const Layout::Unit all{0, 0, 0, n, n, 0};
    if (t.measure(a, all) >= 0x7F800000u) return 0;
    if (n) std::memcpy(a.codes, a.x, size_t(n) * (a.dtype == FLOAT32 ? 4 : 2));
    if (a.fresh) t.widen(a.fresh, a.x, a.dtype, n);
    return -1;
}

// Calls one(i, threads) for each of n samples: one sample after the other with all threads if there are few samples, else
// one thread for each sample.
template <class One>
static void each_sample(int64_t n, int threads, int64_t values, const One& one) {
    if (n < 2 * threads) {
        for (int64_t i = 0; i < n; i++) one(i, threads);
        return;
    }
    std::atomic<int64_t> next{0};
    run_threads(useful_threads(threads, values), [&](int, int, Barrier&) {
        for (int64_t i; (i = next.fetch_add(1)) < n;) one(i, 1);
    });
}

// The squared norm of a row's error with scales of channels or an unbiased gain; NaN if it cannot be quantized.
static double scaled_error(const QuantizeArgs& a, const Layout& l, int64_t row, const Table& t, float* z, float* off) {
    for (int64_t g = 0; g < l.groups; g++) {
        const Layout::Unit unit = l.at(row * l.groups + g);
        const NormalizedGroup found = normalized(a, unit, t, z);
        if (found.scale < 0) return double(NAN);
        float sent = found.scale;
        if (a.unbiased && sent > 0) sent = found.unbiased(t.sum_along(z, unit.n, found.scale, a.bits));
        t.squared_off(a, unit, z, found.scale, sent, off + unit.column);
    }
    return double(t.sum_of_squares(off, a.H));
}

// Computes the squared norm of each row, then for each of `count` numbers of bits the row's squared quantization error;
// the results for successive numbers of bits are `stride` doubles apart. NaN where a row cannot be quantized.
static void distortion_call(const QuantizeArgs& a, const int32_t* bits, int64_t count, double* out, int64_t stride, int isa,
                            int threads) {
    Layout l(a.H, a.group, 8);
    l.pieces = 1;
    const Table& t = table_of(isa);
    run_threads(useful_threads(threads, a.rows * a.H), [&](int thread, int parts, Barrier&) {
        Range part(a.rows, 1, thread, parts);
        std::vector<float> scratch(static_cast<size_t>(a.H)), scales(static_cast<size_t>(l.groups));
        std::vector<float> off(a.inverse || a.unbiased ? static_cast<size_t>(a.H) : 0);
        std::vector<double> squares(static_cast<size_t>(l.groups));
        QuantizeArgs b = a;
        const Scaler scaler{b, t};
        for (int64_t row = part.begin; row < part.end; row++) {
            out[row] = double(t.squared_norm(a, {row, row, 0, a.H, a.H, 0}, scratch.data()));
            for (int64_t k = 0; k < count; k++) {
                b.bits = bits[k];
                if (b.inverse || b.unbiased) {
                    out[(1 + k) * stride + row] = scaled_error(b, l, row, t, scratch.data(), off.data());
                    continue;
                }
                const double step = 2.0 / double((1 << b.bits) - (b.stochastic ? 1 : 0));
                for (int64_t g = 0; g < l.groups; g++) {
                    const Layout::Unit unit = l.at(row * l.groups + g);
                    float& scale = scales[size_t(g)];
                    if (k == 0 || b.rms) scale = scaler.whole_group(unit);
                    const double width = double(scale) * step;
                    squares[size_t(g)] = scale < 0    ? double(NAN)
                                         : scale == 0 ? 0.0
                                                      : double(t.squared_error(b, unit, scale, scratch.data())) * (width * width);
                }
                out[(1 + k) * stride + row] = t.sum_of_groups(squares.data(), l.groups);
            }
        }
    });
}

static void dequantize_call(const DequantizeArgs& a, int isa, int threads) {
    const Layout l(a.H, a.group, a.bits);
    const Table& t = table_of(isa);
    const uint8_t* const limit = a.codes + a.rows * l.row_bytes;
    // Output larger than most caches: non-temporal stores save reading the old bytes first.
    const bool stream = !a.add && a.rows * a.H * 4 >= int64_t(32) << 20;
    run_threads(useful_threads(threads, a.rows * a.H), [&](int thread, int count, Barrier&) {
        Range part(a.rows * l.groups * l.pieces, 1, thread, count);
        for (int64_t u = part.begin; u < part.end; u++) {
            Layout::Unit unit = l.at(u);
            if (unit.n) t.dequantize(a, unit, limit, stream);
        }
#if defined(__x86_64__)
        if (stream) _mm_sfence();
#endif
    });
}

static void feedback_quantize_call(const FeedbackArgs& a, int isa, int threads) {
    const Layout l = whole_groups(a.d, a.group, a.bits);
    const Table& t = table_of(isa);
    run_threads(useful_threads(threads, a.d), [&](int thread, int count, Barrier&) {
        Range part(l.groups, 1, thread, count);
        const uint8_t* limit = a.codes + (part.end < l.groups ? l.at(part.end).byte : l.row_bytes);
        for (int64_t g = part.begin; g < part.end; g++) t.feedback_quantize(a, l, l.at(g), limit);
    });
}

static void feedback_reduce_call(const FeedbackReduceArgs& a, int isa, int threads) {
    const Layout l = whole_groups(a.to.d, a.to.group, a.to.bits);
    const Table& t = table_of(isa);
    run_threads(useful_threads(threads, a.to.d), [&](int thread, int count, Barrier&) {
        Range part(l.groups, 1, thread, count);
        const uint8_t* limit = a.to.codes + (part.end < l.groups ? l.at(part.end).byte : l.row_bytes);
        float* const mean = a.scratch + thread * a.to.group;
        for (int64_t g = part.begin; g < part.end; g++) t.feedback_reduce(a, l, l.at(g), limit, mean);
    });
}

// Computes codes and slots, the slots' means, the residual. One thread adds a slot's values, one after the other.
static void sketch_encode_call(const SketchArgs& a, int isa, int threads) {
    const Table& t = table_of(isa);
    const int32_t* const slots = reinterpret_cast<const int32_t*>(a.out);
    auto add = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            int32_t slot;
            std::memcpy(&slot, slots + i, 4);
            a.sums[slot] += double(a.x[i]);
            a.numbers[slot]++;
        }
    };
    run_threads(useful_threads(threads, a.d), [&](int thread, int count, Barrier& barrier) {
        const Range part(a.d, SKETCH_BLOCK, thread, count);
        for (int64_t i = part.begin; i < part.end; i += SKETCH_BLOCK) {
            const int64_t end = std::min(i + SKETCH_BLOCK, part.end);
            t.sketch_slots(a, i, end);
            if (count == 1) add(i, end);
        }
        barrier.wait();
        if (thread == 0) {
            if (count > 1) add(0, a.d);
            for (int64_t s = a.clusters; s < a.slots; s++)
                a.means[s] = float(a.sums[s] / double(std::max<int64_t>(a.numbers[s], 1)));
        }
        barrier.wait();
        if (part.begin < part.end) t.sketch_residual(a, part.begin, part.end);
    });
}

}  // namespace pipecomp
