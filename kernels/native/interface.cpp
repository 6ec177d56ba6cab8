// C interface of the native CPU kernels, called through ctypes. See shared.h for the rules that make the bytes of all
// backends equal. A call names an instruction set (0 portable, 1 AVX2, 2 AVX-512); pipecomp_best_isa returns the best one
// of this CPU. Each set is a translation unit of its own (portable.cpp, avx2.cpp, avx512.cpp): they compile in parallel.

#include "shared.h"

#include <algorithm>
#include <cmath>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "calls.h"
#include "crc32.h"
#include "fit.h"
#include "parallel.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pipecomp's packed codes are little-endian; use the torch backend on this machine"
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
    static const double roots[16] = {  // 2**(-i / 16), rounded
        0x1.0000000000000p+0, 0x1.ea4afa2a490dap-1, 0x1.d5818dcfba487p-1, 0x1.c199bdd85529cp-1,
        0x1.ae89f995ad3adp-1, 0x1.9c49182a3f090p-1, 0x1.8ace5422aa0dbp-1, 0x1.7a11473eb0187p-1,
        0x1.6a09e667f3bcdp-1, 0x1.5ab07dd485429p-1, 0x1.4bfdad5362a27p-1, 0x1.3dea64c123422p-1,
        0x1.306fe0a31b715p-1, 0x1.2387a6e756238p-1, 0x1.172b83c7d517bp-1, 0x1.0b5586cf9890fp-1,
    };
    for (int code = 0; code < 256; code++)
        channel[code] = float(std::ldexp(roots[(255 - code) % 16], 16 - (255 - code) / 16));
    for (int code = 0; code < 256; code++) channel_inverse[code] = 1.0f / channel[code];
    for (int i = 0; i < 8; i++) between[i] = 2 * roots[15 - 2 * i];
    for (int mask = 0; mask < 256; mask++)
        for (int lane = 0, n = 0; lane < 8; lane++)
            if (mask >> lane & 1) chosen_order[mask][n++] = uint8_t(lane);
}

const Constants constants;

}  // namespace pipecomp

using namespace pipecomp;

extern "C" {

#define PC_EXPORT __attribute__((visibility("default")))

// Increased with every change of this interface; library.py refuses other versions.
PC_EXPORT int32_t pipecomp_abi() { return 13; }

PC_EXPORT int32_t pipecomp_best_isa() {
#if defined(__x86_64__)
    unsigned eax, ebx, ecx, edx;  // older compilers do not know "f16c" by name
    bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    if (!f16c || !__builtin_cpu_supports("avx2")) return 0;
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return wide ? 2 : 1;
#else
    return 0;
#endif
}

// Returns the row of the first NaN, Inf or value above 2**100, or -1. If there is one, m is unchanged, and codes and
// scales are undefined.
PC_EXPORT int64_t pipecomp_quantize(const QuantizeArgs* a, int32_t isa, int32_t threads) {
    return quantize_call(*a, isa, threads);
}

// Encodes samples of any lengths into one packet; then the packet's last four bytes become the CRC-32 of those before
// them (packet may be null). Returns the first bad sample << 32 | its row, INT64_MAX if there is none. c: scales of
// channels, `groups` of them.
PC_EXPORT int64_t pipecomp_encode_batch(const QuantizeArgs* a, int64_t samples, int64_t values, const ChannelsArgs* c,
                                        int32_t groups, uint8_t* packet, int64_t packet_bytes, int32_t isa,
                                        int32_t threads) {
    for (int32_t g = 0; g < groups; g++) measure_channels(c[g], a, samples, isa, threads);
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

// The quantization error of every row of all samples, for each of `count` numbers of bits: see distortion_call.
PC_EXPORT void pipecomp_distortion(const QuantizeArgs* a, int64_t samples, int64_t values, const ChannelsArgs* c,
                                   int32_t groups, const int32_t* bits, int64_t count, double* out, int32_t isa,
                                   int32_t threads) {
    for (int32_t g = 0; g < groups; g++) measure_channels(c[g], a, samples, isa, threads);
    std::vector<int64_t> first(static_cast<size_t>(samples) + 1);
    for (int64_t i = 0; i < samples; i++) first[size_t(i) + 1] = first[size_t(i)] + a[i].rows;
    each_sample(samples, threads, values, [&](int64_t i, int parts) {
        distortion_call(a[i], bits, count, out + first[size_t(i)], first.back(), isa, parts);
    });
}

// Returns the fewest of `low` to `high` bits with which the squared error of all samples together is at most `share` of
// their squared norm. If the payload is not null, encodes them into it with these bits, and moves every m. Returns 0, with
// no m changed, if only distortion_call can decide.
PC_EXPORT int32_t pipecomp_fewest_bits(const QuantizeArgs* a, int64_t samples, int64_t values, double share, int32_t low,
                                       int32_t high, uint8_t* payload, int32_t isa, int32_t threads) {
    BitSearch search{a, samples, values, share, low, high, payload, isa, threads};
    const int bits = search.bits();
    if (bits && payload) search.update(bits);
    return bits;
}

PC_EXPORT void pipecomp_decode_batch(const DequantizeArgs* a, int64_t samples, int64_t values, const ChannelsArgs* c,
                                     int32_t groups, int32_t isa, int32_t threads) {
    for (int32_t g = 0; g < groups; g++) read_channels(c[g], a, samples, isa, threads);
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
