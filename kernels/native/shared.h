// Shared declarations of the native kernels: argument blocks, constants, counter-based random numbers, a table of
// functions for each instruction set. Every value passes through single, rounded float32 operations (-ffp-contract=off),
// in the order of the Python modules in kernels/reference; kernels.h is compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

namespace pipecomp {

enum Dtype : int32_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

struct Half {
    uint16_t bits;
};
struct BHalf {
    uint16_t bits;
};

constexpr uint32_t SCALE_MIN_BITS = 0x0D800000u;  // 2**-100
constexpr uint32_t SCALE_MAX_BITS = 0x71800000u;  // 2**100
constexpr uint32_t MULTIPLIER_1 = 0x7FEB352Du;
constexpr uint32_t MULTIPLIER_2 = 0x846CA68Bu;

// Longer groups are cut into pieces of this many values, so that threads share them; whole bytes at every bit width.
constexpr int64_t PIECE = 1 << 15;

struct Keys {
    uint64_t block;
    uint32_t first, second;
};

inline Keys make_keys(uint64_t seed, uint64_t block) {
    uint64_t z = seed + 0x9E3779B97F4A7C15ull * (block + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return {block, uint32_t(z), uint32_t(z >> 32)};
}

inline uint32_t random_bits(const Keys& k, uint32_t index) {
    uint32_t h = index + k.first;
    h ^= h >> 16;
    h *= MULTIPLIER_1;
    h ^= h >> 15;
    h ^= k.second;
    h *= MULTIPLIER_2;
    return h ^ (h >> 16);
}

inline uint32_t float_bits(float v) {
    uint32_t b;
    std::memcpy(&b, &v, 4);
    return b;
}

inline float bits_float(uint32_t b) {
    float v;
    std::memcpy(&v, &b, 4);
    return v;
}

// Constants that depend on the number of bits alone, computed once.
struct Constants {
    // w_c for [stochastic][bits][code]: the decoded value in a group of scale 1; repeats beyond the last code.
    float w[2][9][256];
    // 2 / (2**bits - 1) as a part of 10 significant bits and a remainder: k * high is exact for every code k, and
    // k * high + k * low rounds to w_c (tests check every code).
    float high[9], low[9];
    int16_t pack_weight_1[9];
    int32_t pack_weight_2[9], pack_shift[9];
    int8_t pack_order[9][32], unpack_order[17][32];
    int32_t unpack_shift[17][8];
    // A channel's scale by its code, 2**((code + 1) / 16); squares of scales that divide an octave between codes.
    float channel[256], channel_inverse[256];
    double between[8];
    uint8_t chosen_order[256][8];  // the lanes of a mask's set bits; the rest is undefined
    Constants();
};
extern const Constants constants;

struct QuantizeArgs {
    const void* x;
    float* m;      // null: quantize x itself; else quantize x - m and move m
    float* fresh;  // null, or dense rows that become the decoded values
    uint8_t* codes;
    float* scales;
    const float* channels;  // null, or the scale of each channel: values are divided by it, decoded ones multiplied
    const float* inverse;   // of channels
    int64_t x_stride, m_stride;  // values from one row to the next
    int64_t rows, H, group;
    uint64_t seed;
    int32_t dtype, bits, rms, stochastic, unbiased;  // bits 0: codes are the values themselves
};

struct DequantizeArgs {
    const uint8_t* codes;
    const float* scales;
    const float* channels;  // as in QuantizeArgs
    float* out;
    int64_t out_stride, rows, H, group;
    int32_t dtype, bits, stochastic, add;  // bits 0: codes are values of dtype
};

// Scales of channels that samples share: those whose `channels` are these. cached: of what both ends hold, not of the
// values. block: their codes, to be written or read, or null.
struct ChannelsArgs {
    uint8_t* block;
    float* channels;  // [H], then [H] inverses
    int64_t H;
    double floor;  // least mean square, over the mean of all channels
    int32_t cached;
};

// Fractional bits with which `fit` counts errors: a code with them fits into 16 bits, and a lane's sum of squares of
// FIT_VALUES values into 32.
constexpr int64_t FIT_VALUES = 1 << 14;
inline int fine_bits(int bits) { return bits < 6 ? 10 : 16 - bits; }

// Scales lie anywhere in a payload, not always at a multiple of four bytes.
inline float get_scale(const float* scales, int64_t i) {
    float v;
    std::memcpy(&v, reinterpret_cast<const char*>(scales) + 4 * i, 4);
    return v;
}

inline void put_scale(float* scales, int64_t i, float v) { std::memcpy(reinterpret_cast<char*>(scales) + 4 * i, &v, 4); }

// Positions of the units of a quantizer call. A unit is a piece of a group, usually the whole group.
struct Layout {
    int64_t H, group, groups, group_bytes, row_bytes, pieces;
    int bits;

    Layout(int64_t H_, int64_t group_, int bits_) : H(H_), group(group_), bits(bits_) {
        groups = (H + group - 1) / group;
        group_bytes = (group * bits + 7) / 8;
        int64_t tail = H - (groups - 1) * group;
        row_bytes = (groups - 1) * group_bytes + (tail * bits + 7) / 8;
        pieces = (group + PIECE - 1) / PIECE;
    }
    struct Unit {
        int64_t id, row, column, n, whole;  // id: group index over all rows; n: values (may be 0); whole: of the group
        int64_t byte;                       // first code byte in the whole buffer
    };
    Unit at(int64_t u) const {
        Unit r;
        r.id = pieces == 1 ? u : u / pieces;
        int64_t piece = pieces == 1 ? 0 : u % pieces;
        r.row = groups == 1 ? r.id : r.id / groups;
        int64_t g = groups == 1 ? 0 : r.id % groups;
        int64_t start = g * group;
        r.whole = H - start < group ? H - start : group;
        // A short last group has empty pieces at its end, so that the pieces before them may write up to their position.
        int64_t skip = piece * PIECE < r.whole ? piece * PIECE : r.whole;
        r.n = pieces > 1 && r.whole - skip > PIECE ? PIECE : r.whole - skip;
        r.column = start + skip;
        r.byte = r.row * row_bytes + g * group_bytes + code_bytes(skip);
        return r;
    }
    int64_t code_bytes(int64_t n) const { return (n * bits + 7) / 8; }
};

// Flat buckets: every function works on values [begin, end), begin a multiple of 32.
struct LinearArgs {
    const void* g;
    const uint8_t* index;  // null: one level count for all
    const float* levels;
    uint8_t* codes;
    int64_t d;
    uint64_t seed, start;
    float norm;
    int32_t dtype, offset, bits, count;  // count: of levels
};

// Sums of `parts` workers' codes, each of `bits` bits, in `sum_bits` bits.
struct LinearReduceArgs {
    const uint8_t* const* codes;
    uint8_t* out;
    int64_t d;
    int32_t parts, bits, sum_bits;
};

struct LinearDecodeArgs {
    const uint8_t* codes;
    const uint8_t* index;  // null: one factor for all
    const float* factors;
    float* out;
    int64_t d;
    int32_t bits, offset, add, count;  // count: of factors
};

struct ExponentialArgs {
    const void* g;
    uint8_t* codes;
    float* out;
    int64_t d;
    uint64_t seed, start;
    float norm;  // encode: the norm; decode: the factor
    int32_t dtype, bits, depth, add;
};

struct ReduceArgs {
    uint8_t* a;
    const uint8_t* b;
    int64_t d;
    uint64_t seed, extension_seed;
    int32_t bits;
};

// Quantizing x + e with a residual e, in groups.
struct FeedbackArgs {
    const void* x;
    float* e;
    uint8_t* codes;
    float* scales;
    int64_t d, group;
    int32_t dtype, bits, mean;
};

// Quantizing the mean of several workers' values plus a residual: `to` without x and dtype. scratch: a group per thread.
struct FeedbackReduceArgs {
    FeedbackArgs to;
    float* scratch;
    const uint8_t* const* in_codes;
    const float* const* in_scales;
    int32_t parts;
};

// Sketches. The slots of cluster c are first[c] ... first[c] + last[c]; a hash times size[c] selects one for a value.
struct SketchArgs {
    const float* x;       // encoding: the values
    const float* bounds;  // encoding: boundaries between clusters
    const float* size;
    const int32_t* first;
    const int32_t* last;
    uint8_t* codes;
    float* means;  // of slots; encoding: those of clusters are given, the others are computed
    float* out;    // encoding: x minus the means, decoding: (out + means) / divisor
    double* sums;  // encoding: of slots, initially zero
    int64_t* numbers;
    int64_t d, slots;
    uint64_t seed;
    float divisor;
    int32_t bits, clusters, add;
    int32_t rounds;  // whether a product may round up to the size, so that `last` matters
};
constexpr int64_t SKETCH_BLOCK = 1 << 12;  // values that stay in the L1 cache; divides 2**32

// The kernels of one instruction set.
struct Table {
    uint32_t (*measure)(const QuantizeArgs&, const Layout::Unit&);
    int64_t (*sum_squares)(const QuantizeArgs&, const Layout::Unit&, float inverse);
    void (*quantize)(const QuantizeArgs&, const Layout&, const Layout::Unit&, float scale, const uint8_t* limit);
    void (*dequantize)(const DequantizeArgs&, const Layout::Unit&, const uint8_t* limit, bool stream);
    void (*widen)(float* out, const void* x, int dtype, int64_t n);
    void (*linear_encode)(const LinearArgs&, int64_t begin, int64_t end);
    void (*linear_reduce)(const LinearReduceArgs&, int64_t begin, int64_t end);
    void (*linear_decode)(const LinearDecodeArgs&, int64_t begin, int64_t end);
    void (*scale_index)(uint8_t* out, const void* g, int dtype, float norm, const float* levels, int count, int64_t begin,
                        int64_t end);
    void (*exponential_encode)(const ExponentialArgs&, int64_t begin, int64_t end);
    void (*exponential_decode)(const ExponentialArgs&, int64_t begin, int64_t end);
    void (*exponential_reduce)(const ReduceArgs&, int64_t begin, int64_t end);
    void (*feedback_quantize)(const FeedbackArgs&, const Layout&, const Layout::Unit&, const uint8_t* limit);
    void (*feedback_reduce)(const FeedbackReduceArgs&, const Layout&, const Layout::Unit&, const uint8_t* limit,
                            float* mean);
    void (*kmeans_assign)(uint8_t* out, const void* x, int dtype, const float* bounds, int count, int64_t begin,
                          int64_t end);
    void (*sketch_slots)(const SketchArgs&, int64_t begin, int64_t end);
    void (*sketch_residual)(const SketchArgs&, int64_t begin, int64_t end);
    void (*sketch_decode)(const SketchArgs&, int64_t begin, int64_t end);
    void (*pack)(uint8_t* out, const void* values, int value_bytes, int64_t n, int bits);
    void (*unpack)(int32_t* out, const uint8_t* codes, int64_t n, int bits);
    void (*select)(float* values, int32_t* index, const void* x, int dtype, int64_t n, int64_t k, int32_t first,
                   uint32_t* scratch);
    float (*squared_norm)(const QuantizeArgs&, const Layout::Unit&, float* scratch);
    float (*squared_error)(const QuantizeArgs&, const Layout::Unit&, float scale, float* scratch);
    double (*sum_of_groups)(double* squares, int64_t n);
    uint32_t (*measure_norm)(const QuantizeArgs&, const Layout::Unit&, double* norm);
    void (*fit)(const QuantizeArgs&, const Layout::Unit&, float scale, const uint8_t* limit, uint64_t* squares);
    void (*add_squares)(const QuantizeArgs&, int64_t row, int64_t stride, int64_t begin, int64_t end, double* sums);
    uint32_t (*normalize)(const QuantizeArgs&, const Layout::Unit&, float* z);
    int64_t (*sum_along)(const float* z, int64_t n, float scale, int bits);
    void (*squared_off)(const QuantizeArgs&, const Layout::Unit&, const float* z, float scale, float sent, float* y);
    float (*sum_of_squares)(float* y, int64_t n);
    int64_t (*quantize_normalized)(const QuantizeArgs&, const Layout::Unit&, const float* z, float scale,
                                   const uint8_t* limit);
};

namespace base {
extern const Table table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Table table;
}
namespace avx512 {
extern const Table table;
}
#endif

}  // namespace pipecomp
