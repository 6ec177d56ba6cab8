// Native CPU kernels of pipecomp: a plain C interface, called through ctypes. See native.h for the rules that make every
// backend's bytes the same. A call names an instruction set (0 portable, 1 AVX2, 2 AVX-512); pipecomp_best_isa says
// which one this CPU takes. The kernels of each set are a unit of their own (native_portable.cpp, native_avx2.cpp,
// native_avx512.cpp), so that the compiler can work on them at the same time.

#include "native.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "native_crc.h"
#include "native_fit.h"
#include "native_threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pipecomp's packed codes are little-endian; the torch backend runs on this machine"
#endif

namespace pipecomp {

Constants::Constants() {
    for (int bits = 1; bits <= 8; bits++) {
        const int count = 1 << bits, top = count - 1;
        for (int c = 0; c < 256; c++) {
            const int code = c % count;
            w[0][bits][c] = float((code + 0.5) / (count / 2) - 1.0);
            w[1][bits][c] = float(-1.0 + 2.0 * code / top);
        }
        high[bits] = bits_float((float_bits(2.0f / float(top)) + 0x2000u) & ~0x3FFFu);
        low[bits] = float(2.0 / top - double(high[bits]));
        pack_weight_1[bits] = int16_t(bits < 8 ? 1 | 1 << (bits + 8) : 1);
        pack_weight_2[bits] = bits < 8 ? 1 | 1 << (2 * bits + 16) : 1;
        pack_shift[bits] = bits <= 4 ? 32 - 4 * bits : 4 * bits;
        for (int i = 0; i < 16; i++) {
            int from = i < bits ? i : i < 2 * bits ? 8 + i - bits : -1;
            pack_order[bits][i] = pack_order[bits][i + 16] = int8_t(from);
        }
    }
    for (int bits = 1; bits <= 16; bits++)
        for (int i = 0; i < 8; i++) {
            const int at = i * bits / 8, last = (i * bits + bits - 1) / 8;
            for (int byte = 0; byte < 4; byte++)
                unpack_order[bits][4 * i + byte] = int8_t(at + byte <= last ? at + byte : -1);
            unpack_shift[bits][i] = i * bits % 8;
        }
    for (int mask = 0; mask < 256; mask++)
        for (int lane = 0, n = 0; lane < 8; lane++)
            if (mask >> lane & 1) chosen_order[mask][n++] = uint8_t(lane);
}

const Constants constants;

static const Table& table_of(int isa) {
#if defined(__x86_64__)
    if (isa == 2) return avx512::table;
    if (isa == 1) return avx2::table;
#endif
    return isa == 0 ? base::table : base::table;
}

static const double RMS_LOADING[9] = {0, 1.596, 1.991, 2.344, 2.682, 3.01, 3.33, 3.64, 3.94};

// The scale of a group from its largest magnitude; -1 if that is NaN, Inf or above 2**100.
struct Scaler {
    const QuantizeArgs& a;
    const Table& t;

    float finish(float scale) const {
        if (scale < bits_float(SCALE_MIN_BITS)) return 0.0f;
        if (a.bf16_scale) scale = bits_float((float_bits(scale) + 0xFFFFu) & 0xFFFF0000u);
        return scale;
    }
    float from_squares(float most, int64_t sum, int64_t n) const {
        double root = std::sqrt(double(sum) / (double(n) * 0x1p30));
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

// Scales of groups that are cut into pieces; notes rows where whole_group would give -1.
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

// Codes first, then m += deq(codes) once every group is known to be finite: m stays untouched otherwise. Visiting m twice
// costs less than any other way to know beforehand, which would read x twice as well.
static int64_t quantize_call(const QuantizeArgs& a, int isa, int threads) {
    const Layout l(a.H, a.group, a.bits);
    const Table& t = table_of(isa);
    const Scaler scaler{a, t};
    const int64_t units = a.rows * l.groups * l.pieces;
    std::atomic<int64_t> bad{INT64_MAX};
    std::vector<uint32_t> most(l.pieces > 1 ? size_t(units) : 0);
    std::vector<int64_t> sums(l.pieces > 1 && a.rms ? size_t(units) : 0);
    const uint8_t* const end = a.codes + a.rows * l.row_bytes;
    float* const to = a.m ? a.m : a.fresh;
    const DequantizeArgs update{a.codes, a.scales, to, a.m ? a.m_stride : a.H, a.rows, a.H, a.group,
                                a.dtype, a.bits,   a.stochastic, a.m != nullptr};
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
        if (!to) return;
        barrier.wait();
        if (bad.load() != INT64_MAX) return;
        for (int64_t u = part.begin; u < part.end; u++) {
            Layout::Unit unit = l.at(u);
            if (unit.n) t.dequantize(update, l, unit, end, false);
        }
    });
    return bad.load() == INT64_MAX ? -1 : bad.load();
}

// Values as they are, for the length of the codes; -1, or 0 if one is NaN or Inf.
static int64_t copy_call(const QuantizeArgs& a, int isa) {
    const Table& t = table_of(isa);
    const int64_t n = a.rows * a.H;
    const Layout::Unit all{0, 0, 0, n, n, 0};
    if (t.measure(a, all) >= 0x7F800000u) return 0;
    std::memcpy(a.codes, a.x, size_t(n) * (a.dtype == FLOAT32 ? 4 : 2));
    if (a.fresh) t.widen(a.fresh, a.x, a.dtype, n);
    return -1;
}

// Calls one(i, threads) for each of n samples: all threads on one sample after the other if there are few, else a
// sample to each.
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

// For each row its squared norm, then for each of `count` numbers of bits what quantizing leaves out of it; from one of
// these to the next it is `stride` doubles. NaN where a row cannot be quantized.
static void distortion_call(const QuantizeArgs& a, const int32_t* bits, int64_t count, double* out, int64_t stride, int isa,
                            int threads) {
    Layout l(a.H, a.group, 8);
    l.pieces = 1;
    const Table& t = table_of(isa);
    run_threads(useful_threads(threads, a.rows * a.H), [&](int thread, int parts, Barrier&) {
        Range part(a.rows, 1, thread, parts);
        std::vector<float> scratch(static_cast<size_t>(a.H)), scales(static_cast<size_t>(l.groups));
        std::vector<double> squares(static_cast<size_t>(l.groups));
        QuantizeArgs b = a;
        const Scaler scaler{b, t};
        for (int64_t row = part.begin; row < part.end; row++) {
            out[row] = double(t.squared_norm(a, {row, row, 0, a.H, a.H, 0}, scratch.data()));
            for (int64_t k = 0; k < count; k++) {
                b.bits = bits[k];
                const double step = 2.0 / double((1 << b.bits) - (b.stochastic ? 1 : 0));
                for (int64_t g = 0; g < l.groups; g++) {
                    const Layout::Unit unit = l.at(row * l.groups + g);
                    float& scale = scales[size_t(g)];
                    if (k == 0 || b.rms) scale = scaler.whole_group(unit);
                    const double width = double(scale) * step;
                    squares[size_t(g)] = scale < 0    ? double(NAN)
                                         : scale == 0 ? 0.0
                                                      : double(t.left_out(b, unit, scale, scratch.data())) * (width * width);
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
    // Beyond what any cache holds, writing past it saves reading the old bytes first.
    const bool stream = !a.add && a.rows * a.H * 4 >= int64_t(32) << 20;
    run_threads(useful_threads(threads, a.rows * a.H), [&](int thread, int count, Barrier&) {
        Range part(a.rows * l.groups * l.pieces, 1, thread, count);
        for (int64_t u = part.begin; u < part.end; u++) {
            Layout::Unit unit = l.at(u);
            if (unit.n) t.dequantize(a, l, unit, limit, stream);
        }
#if defined(__x86_64__)
        if (stream) _mm_sfence();
#endif
    });
}

// One unit is one group, however long: a thread takes whole ones.
static Layout whole_groups(int64_t d, int64_t group, int bits) {
    Layout l(d, group, bits);
    l.pieces = 1;
    return l;
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

// Codes and slots, the slots' means, the residual. A slot's values are added one after the other, by one thread.
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

using namespace pipecomp;

extern "C" {

#define PC_EXPORT __attribute__((visibility("default")))

// Raised with every change of this interface; native_library.py refuses another one.
PC_EXPORT int32_t pipecomp_abi() { return 9; }

PC_EXPORT int32_t pipecomp_best_isa() {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return 0;
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return wide ? 2 : 1;
#else
    return 0;
#endif
}

// Row of the first NaN, Inf or value above 2**100, or -1. With one, m is untouched; codes and scales are undefined.
PC_EXPORT int64_t pipecomp_quantize(const QuantizeArgs* a, int32_t isa, int32_t threads) {
    return quantize_call(*a, isa, threads);
}

// Samples of any lengths, into one packet; then the packet's last four bytes become the CRC-32 of those before them
// (packet may be null). Returns the first bad sample << 32 | its row, INT64_MAX if there is none.
PC_EXPORT int64_t pipecomp_encode_batch(const QuantizeArgs* a, int64_t samples, int64_t values, uint8_t* packet,
                                        int64_t packet_bytes, int32_t isa, int32_t threads) {
    std::atomic<int64_t> first{INT64_MAX};
    each_sample(samples, threads, values, [&](int64_t i, int count) {
        const int64_t row = a[i].bits ? quantize_call(a[i], isa, count) : copy_call(a[i], isa);
        if (row >= 0) lower(first, i << 32 | row);
    });
    if (!packet || first.load() != INT64_MAX) return first.load();
    const uint32_t check = crc32(0, packet, packet_bytes - 4);
    for (int i = 0; i < 4; i++) packet[packet_bytes - 4 + i] = uint8_t(check >> (8 * i));
    return INT64_MAX;
}

// What quantizing would leave out of every row of all samples, for each of `count` numbers of bits: see distortion_call.
PC_EXPORT void pipecomp_distortion(const QuantizeArgs* a, int64_t samples, int64_t values, const int32_t* bits, int64_t count,
                                   double* out, int32_t isa, int32_t threads) {
    std::vector<int64_t> first(static_cast<size_t>(samples) + 1);
    for (int64_t i = 0; i < samples; i++) first[size_t(i) + 1] = first[size_t(i)] + a[i].rows;
    each_sample(samples, threads, values, [&](int64_t i, int parts) {
        distortion_call(a[i], bits, count, out + first[size_t(i)], first.back(), isa, parts);
    });
}

// The fewest of `low` to `high` bits with which all samples together leave out at most `share` of their squared norm; then
// codes and scales of these bits are written, where there is room for them. 0 if distortion_call has to decide.
PC_EXPORT int32_t pipecomp_fewest_bits(const QuantizeArgs* a, int64_t samples, int64_t values, double share, int32_t low,
                                       int32_t high, int32_t isa, int32_t threads) {
    return Fitting{a, samples, values, share, low, high, table_of(isa), threads}.bits();
}

PC_EXPORT void pipecomp_decode_batch(const DequantizeArgs* a, int64_t samples, int64_t values, int32_t isa,
                                     int32_t threads) {
    each_sample(samples, threads, values, [&](int64_t i, int count) {
        if (a[i].bits) dequantize_call(a[i], isa, count);
        else table_of(isa).widen(a[i].out, a[i].codes, a[i].dtype, a[i].rows * a[i].H);
    });
}

PC_EXPORT void pipecomp_dequantize(const DequantizeArgs* a, int32_t isa, int32_t threads) {
    dequantize_call(*a, isa, threads);
}

PC_EXPORT void pipecomp_linear_encode(const LinearArgs* a, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    parallel_range(threads, a->d, 32, [&](int64_t begin, int64_t end) { t.linear_encode(*a, begin, end); });
}

PC_EXPORT void pipecomp_linear_reduce(const LinearReduceArgs* a, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    parallel_range(threads, a->d, 32, [&](int64_t begin, int64_t end) { t.linear_reduce(*a, begin, end); });
}

PC_EXPORT void pipecomp_linear_decode(const LinearDecodeArgs* a, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    parallel_range(threads, a->d, 32, [&](int64_t begin, int64_t end) { t.linear_decode(*a, begin, end); });
}

PC_EXPORT void pipecomp_scale_index(uint8_t* out, const void* g, int32_t dtype, int64_t d, float norm,
                                    const float* levels, int32_t count, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    parallel_range(threads, d, 32, [&](int64_t begin, int64_t end) {
        t.scale_index(out, g, dtype, norm, levels, count, begin, end);
    });
}

PC_EXPORT void pipecomp_exponential_encode(const ExponentialArgs* a, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    parallel_range(threads, a->d, 32, [&](int64_t begin, int64_t end) { t.exponential_encode(*a, begin, end); });
}

PC_EXPORT void pipecomp_exponential_decode(const ExponentialArgs* a, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    parallel_range(threads, a->d, 32, [&](int64_t begin, int64_t end) { t.exponential_decode(*a, begin, end); });
}

PC_EXPORT void pipecomp_exponential_reduce(const ReduceArgs* a, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    parallel_range(threads, a->d, 64, [&](int64_t begin, int64_t end) { t.exponential_reduce(*a, begin, end); });
}

PC_EXPORT void pipecomp_feedback_quantize(const FeedbackArgs* a, int32_t isa, int32_t threads) {
    feedback_quantize_call(*a, isa, threads);
}

PC_EXPORT void pipecomp_feedback_reduce(const FeedbackReduceArgs* a, int32_t isa, int32_t threads) {
    feedback_reduce_call(*a, isa, threads);
}

PC_EXPORT void pipecomp_kmeans_assign(uint8_t* out, const void* x, int32_t dtype, int64_t d, const float* bounds,
                                      int32_t count, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    parallel_range(threads, d, 32, [&](int64_t begin, int64_t end) {
        t.kmeans_assign(out, x, dtype, bounds, count, begin, end);
    });
}

PC_EXPORT void pipecomp_sketch_encode(const SketchArgs* a, int32_t isa, int32_t threads) {
    sketch_encode_call(*a, isa, threads);
}

PC_EXPORT void pipecomp_sketch_decode(const SketchArgs* a, int32_t isa, int32_t threads) {
    const Table& t = table_of(isa);
    const auto blocks = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += SKETCH_BLOCK) t.sketch_decode(*a, i, std::min(i + SKETCH_BLOCK, end));
    };
    parallel_range(threads, a->d, SKETCH_BLOCK, blocks);
}

// `rows` rows of n values of value_bytes (1, 2, 4, 8) bytes.
PC_EXPORT void pipecomp_pack(uint8_t* out, const void* values, int32_t value_bytes, int64_t rows, int64_t n, int32_t bits,
                             int32_t isa) {
    const int64_t bytes = (n * bits + 7) / 8;
    const char* from = static_cast<const char*>(values);
    for (int64_t r = 0; r < rows; r++)
        table_of(isa).pack(out + r * bytes, from + r * n * value_bytes, value_bytes, n, bits);
}

PC_EXPORT void pipecomp_unpack(int32_t* out, const uint8_t* codes, int64_t rows, int64_t n, int32_t bits, int32_t isa) {
    const int64_t bytes = (n * bits + 7) / 8;
    for (int64_t r = 0; r < rows; r++) table_of(isa).unpack(out + r * n, codes + r * bytes, n, bits);
}

// Rows of H values of dtype, in groups; keeps `kept` values of each whole group, `kept_last` of a short last one.
PC_EXPORT int32_t pipecomp_select(float* values, int32_t* index, const void* x, int32_t dtype, int64_t x_stride,
                                  int64_t rows, int64_t H, int64_t group, int64_t kept, int64_t kept_last, int32_t isa,
                                  int32_t threads) {
    const Table& t = table_of(isa);
    const Layout l(H, group, 8);
    const int64_t K = (l.groups - 1) * kept + kept_last, size = dtype == FLOAT32 ? 4 : 2;
    std::atomic<int32_t> failed{0};
    run_threads(useful_threads(threads, rows * H), [&](int thread, int count, Barrier&) {
        std::vector<uint32_t> scratch;
        try {
            scratch.resize(size_t(std::min(group, H)));
        } catch (const std::bad_alloc&) {
            failed.store(1);
            return;
        }
        Range part(rows * l.groups, 1, thread, count);
        for (int64_t u = part.begin; u < part.end; u++) {
            const int64_t row = u / l.groups, g = u % l.groups, start = g * group;
            const int64_t n = std::min(group, H - start), k = g == l.groups - 1 ? kept_last : kept;
            const char* from = static_cast<const char*>(x) + (row * x_stride + start) * size;
            t.select(values + row * K + g * kept, index + row * K + g * kept, from, dtype, n, k, int32_t(start),
                     scratch.data());
        }
    });
    return failed.load();
}

PC_EXPORT uint32_t pipecomp_crc32(uint32_t value, const uint8_t* data, int64_t bytes) { return crc32(value, data, bytes); }

}  // extern "C"
