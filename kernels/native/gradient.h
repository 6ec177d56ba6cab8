// Linear and exponential dithering and the reduction of Algorithm 2, as in reference/gradients.py. Included once per
// instruction set. Functions work on values [begin, end) of a flat bucket, begin a multiple of 32.

// Values at i ... i + 7 of a bucket that ends at `end`; zeros beyond.
template <class T>
INLINE F8 bucket8(const T* g, int64_t i, int64_t end) {
    return end - i >= 8 ? load8(g + i) : load_some(g + i, end - i);
}

// Stores decoded values, or adds them to out.
template <bool ADD>
INLINE void put_values(float* out, F8 v) {
    storeu(out, ADD ? load8(out) + v : v);
}

template <bool ADD>
INLINE void put_some_values(float* out, F8 v, int64_t n) {
    store_some(out, ADD ? load_some(out, n) + v : v, n);
}

INLINE F8 relative(F8 g, F8 divisor) { return minimum(F8(U8(g) & splat(0x7FFFFFFFu)) / divisor, splat(1.0f)); }

// Packs the codes that `code(values, position, random)` gives for [begin, end): 32 values at a time, then the rest.
template <class T, int CLASS, class R, class Code>
INLINE void encode(const Code& code, const T* g, uint8_t* codes, int bits, int64_t begin, int64_t end, R random) {
    const Packer packer = Packer::make(bits);
    uint8_t* out = codes + begin / 8 * bits;
    const uint8_t* limit = codes + (end * bits + 7) / 8;
    int64_t i = begin;
    for (; i + 32 <= end; i += 32, out += 4 * bits) {
        I8 c[4];
        for (int j = 0; j < 4; j++) c[j] = code(load8(g + i + 8 * j), i + 8 * j, R::take(random));
        Packer::put<CLASS>(packer, c, out, limit);
    }
    if (i == end) return;
    I8 c[4] = {};
    for (int64_t j = 0; i + 8 * j < end; j++) {
        int64_t at = i + 8 * j;
        c[j] = code(bucket8(g, at, end), at, R::take(random));
        if (end - at < 8) c[j] = zero_from(c[j], end - at);
    }
    uint8_t part[64];
    Packer::put<CLASS>(packer, c, part, part + sizeof part);
    __builtin_memcpy(out, part, size_t(limit - out));
}

// Calls encode(from, to, block) for [begin, end), where `block` is the block of 2**32 elements that selects the keys of
// the random numbers; element 0 has the index `start`. 32 values across a border of blocks are encoded for both blocks, and
// each call contributes the codes on its side.
template <class Encode>
static void by_blocks(uint8_t* codes, int bits, uint64_t start, int64_t begin, int64_t end, const Encode& encode) {
    uint8_t before[32] = {};  // codes of 32 values from `begin` on, valid up to `border`
    int64_t border = begin;
    for (uint32_t block = uint32_t((start + uint64_t(begin)) >> 32);; block++) {
        const uint64_t last = (uint64_t(block) << 32 | 0xFFFFFFFFu) - start;
        const int64_t next = last < uint64_t(end) ? int64_t(last) + 1 : end, from = next & ~int64_t(31);
        encode(begin, next < end && next > from ? (from + 32 < end ? from + 32 : end) : next, uint64_t(block));
        uint8_t* const first = codes + begin / 8 * bits;
        const int64_t kept = (border - begin) * bits;
        __builtin_memcpy(first, before, size_t(kept / 8));
        if (kept % 8) {
            const int low = (1 << kept % 8) - 1;
            first[kept / 8] = uint8_t((before[kept / 8] & low) | (first[kept / 8] & ~low));
        }
        if (next == end) return;
        begin = from;
        border = next;
        __builtin_memcpy(before, codes + begin / 8 * bits, size_t(((border - begin) * bits + 7) / 8));
    }
}

// One number for all values (INDEXED false), or one of `count` for each.
template <bool INDEXED>
struct Choice {
    const float* numbers;
    const uint8_t* index;
    int count;
    F8 table;

    Choice(const float* numbers_, int count_, const uint8_t* index_)
        : numbers(numbers_), index(index_), count(count_), table(splat(numbers_[0])) {
        if (INDEXED) {
            float first[8] = {};
            for (int i = 0; i < 8 && i < count; i++) first[i] = numbers[i];
            table = load8(first);
        }
    }

    // The numbers of n values from `at` on.
    __attribute__((always_inline)) F8 at(int64_t at, int64_t n) const {
        if (!INDEXED) return table;
        I8 which = load_index(index + at, n);
        if (count <= 8) return look_up(table, which);
        F8 v;
        for (int t = 0; t < 8; t++) v[t] = numbers[which[t]];
        return v;
    }
};

template <bool INDEXED>
struct LinearCode {
    const LinearArgs& a;
    int64_t end;
    F8 divisor;
    Choice<INDEXED> levels;
    I8 offset;

    LinearCode(const LinearArgs& a_, int64_t end_)
        : a(a_), end(end_), divisor(splat(a.norm > 0 ? a.norm : 1.0f)), levels(a.levels, a.count, a.index),
          offset(splat(a.offset)) {}

    __attribute__((always_inline)) I8 operator()(F8 v, int64_t at, U8 random) const {
        F8 y = relative(v, divisor) * levels.at(at, end - at);
        I8 whole = to_int(y);
        I8 up = uniform(random) < y - to_float(whole);  // -1 where true
        I8 level = minimum(whole - up, offset);
        I8 negative = v < splat(0.0f);
        return offset + ((level ^ negative) - negative);
    }
};

template <class T, bool INDEXED>
static void linear_encode_bits(const LinearArgs& a, int64_t begin, int64_t end, uint64_t block) {
    const T* g = static_cast<const T*>(a.g);
    const LinearCode<INDEXED> code(a, end);
    const Random random = Random::start(a.seed, block, uint32_t(a.start + uint64_t(begin)));
    if (a.bits <= 4) return encode<T, CLASS_OF(4)>(code, g, a.codes, a.bits, begin, end, random);
    if (a.bits < 8) return encode<T, CLASS_OF(7)>(code, g, a.codes, a.bits, begin, end, random);
    encode<T, 8>(code, g, a.codes, a.bits, begin, end, random);
}

static void linear_encode(const LinearArgs& a, int64_t begin, int64_t end) {
    by_blocks(a.codes, a.bits, a.start, begin, end, [&a](int64_t from, int64_t to, uint64_t block) {
#define CALL(T)                                                           \
    if (a.index) return linear_encode_bits<T, true>(a, from, to, block);  \
    return linear_encode_bits<T, false>(a, from, to, block)
        BY_DTYPE(a.dtype, CALL)
#undef CALL
    });
}

static void scale_index(uint8_t* out, const void* g, int dtype, float norm, const float* levels, int count,
                        int64_t begin, int64_t end) {
    const F8 divisor = splat(norm > 0 ? norm : 1.0f);
    auto finest = [divisor, levels, count](F8 v, int64_t, U8) __attribute__((always_inline)) {
        F8 y = relative(v, divisor);
        I8 best{};
        for (int j = 1; j < count; j++) best = y * splat(levels[j]) <= splat(levels[0]) ? splat(int32_t(j)) : best;
        return best;
    };
#define CALL(T) encode<T, 8>(finest, static_cast<const T*>(g), out, 8, begin, end, NoRandom{})
    BY_DTYPE(dtype, CALL)
#undef CALL
}

template <int BITS>
struct ExponentialCode {
    static constexpr int TOP = (1 << (BITS - 1)) - 1;
    F8 divisor, smallest;
    I8 first;

    explicit ExponentialCode(const ExponentialArgs& a)
        : divisor(splat(a.norm > 0 ? a.norm : 1.0f)), smallest(splat(bits_float(uint32_t(126 + TOP - a.depth) << 23))),
          first(splat(int32_t(128 + a.depth))) {}

    __attribute__((always_inline)) I8 operator()(F8 v, int64_t, U8 random) const {
        F8 y = relative(v, divisor);
        I8 pattern = I8(y);
        I8 below = first - (pattern >> 23);
        I8 up = I8(random >> 9) < (pattern & splat(int32_t(0x7FFFFF)));  // -1 where true
        I8 last = (uniform(random) < y * smallest) & splat(int32_t(TOP));
        I8 e = below > splat(int32_t(TOP)) ? last : below + up;
        I8 sign = (v < splat(0.0f)) & splat(int32_t(1 << (BITS - 1)));
        return e | (sign & (e > splat(int32_t(0))));
    }
};

template <class T>
static void exponential_encode_bits(const ExponentialArgs& a, int64_t begin, int64_t end, uint64_t block) {
    const T* g = static_cast<const T*>(a.g);
    const Random random = Random::start(a.seed, block, uint32_t(a.start + uint64_t(begin)));
    if (a.bits == 8) return encode<T, 8>(ExponentialCode<8>(a), g, a.codes, 8, begin, end, random);
    encode<T, CLASS_OF(4)>(ExponentialCode<4>(a), g, a.codes, 4, begin, end, random);
}

static void exponential_encode(const ExponentialArgs& a, int64_t begin, int64_t end) {
    by_blocks(a.codes, a.bits, a.start, begin, end, [&a](int64_t from, int64_t to, uint64_t block) {
#define CALL(T) exponential_encode_bits<T>(a, from, to, block)
        BY_DTYPE(a.dtype, CALL)
#undef CALL
    });
}

template <bool ADD>
static void exponential_decode_values(const ExponentialArgs& a, int64_t begin, int64_t end) {
    const Unpacker u = Unpacker::make(a.bits);
    const I8 top = splat(int32_t((1 << (a.bits - 1)) - 1)), first = splat(int32_t(128 + a.depth));
    const F8 factor = splat(a.norm);
    const int bits = a.bits, to_sign = 32 - a.bits;
    const uint8_t* in = a.codes + begin / 8 * bits;
    const uint8_t* limit = a.codes + (a.d * bits + 7) / 8;
    float* const out = a.out;
    int64_t i = begin;
    auto value = [&](I8 c) __attribute__((always_inline)) {
        I8 e = c & top;
        U8 power = U8(first - e) << 23 | U8(c & ~top) << to_sign;
        return e == splat(int32_t(0)) ? F8{} : F8(power) * factor;
    };
    for (; i + 8 <= end && limit - in >= Unpacker::READS; i += 8, in += bits)
        put_values<ADD>(out + i, value(Unpacker::get(u, in)));
    for (; i < end; i += 8, in += bits) {
        int64_t left = end - i < 8 ? end - i : 8;
        put_some_values<ADD>(out + i, value(Unpacker::get_some(u, in, (left * bits + 7) / 8)), left);
    }
}

static void exponential_decode(const ExponentialArgs& a, int64_t begin, int64_t end) {
    if (a.add) return exponential_decode_values<true>(a, begin, end);
    exponential_decode_values<false>(a, begin, end);
}

// Reduces one value by Algorithm 2. byte: its random byte. index: its index in the second stream.
INLINE uint32_t reduce_one(uint32_t a, uint32_t b, int bits, uint32_t byte, const ReduceArgs& args, uint64_t index) {
    const uint32_t sign = 1u << (bits - 1), mask = sign - 1;
    uint32_t ea = a & mask, eb = b & mask;
    if (ea == 0) return eb ? b : 0;
    if (eb == 0) return a;
    uint32_t k = ea > eb ? ea - eb : eb - ea, larger = ea <= eb ? a : b;
    bool same = ((a ^ b) & sign) == 0;
    if (!same && k == 0) return 0;
    uint32_t power = same ? k : k - 1;
    bool moves = power <= 8 && byte >> (8 - power) == 0;
    if (power > 8 && power <= 32 && byte == 0)
        moves = random_bits(make_keys(args.extension_seed, index >> 32), uint32_t(index)) >> 8 >> (32 - power) == 0;
    return same ? larger - moves : larger + moves;
}

static void reduce_some(const ReduceArgs& a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        uint64_t word = uint64_t(i) / 4;
        uint32_t byte = random_bits(make_keys(a.seed, word >> 32), uint32_t(word)) >> (8 * (i & 3)) & 255;
        if (a.bits == 8) {
            a.a[i] = uint8_t(reduce_one(a.a[i], a.b[i], 8, byte, a, uint64_t(i)));
            continue;
        }
        int shift = int(i & 1) * 4;
        uint32_t code = reduce_one(a.a[i / 2] >> shift & 15, a.b[i / 2] >> shift & 15, 4, byte, a, uint64_t(i));
        a.a[i / 2] = uint8_t((a.a[i / 2] & ~(15 << shift)) | code << shift);
    }
}

#if PC_AVX2
// Reduces 32 values, one code in each byte, the sign in bit SIGN. `far`: the lanes that may need the second stream.
template <int SIGN>
INLINE __m256i reduce32(__m256i a, __m256i b, __m256i random, __m256i* far) {
    const __m256i mask = _mm256_set1_epi8((1 << SIGN) - 1), zero = _mm256_setzero_si256();
    // 2**(8 - k) - 1: a random byte is at most this with probability 2**-k; beyond k = 8 only a zero byte goes on.
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-1, 127, 63, 31, 15, 7, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0));
    __m256i ea = _mm256_and_si256(a, mask), eb = _mm256_and_si256(b, mask);
    __m256i least = _mm256_min_epu8(ea, eb);
    __m256i k = _mm256_sub_epi8(_mm256_max_epu8(ea, eb), least);
    __m256i differ = _mm256_xor_si256(a, b);
    differ = SIGN == 7 ? _mm256_cmpgt_epi8(zero, differ) : _mm256_cmpgt_epi8(differ, mask);  // -1 where signs differ
    __m256i power = _mm256_add_epi8(k, differ);  // -1 where the values cancel
    __m256i bound = _mm256_shuffle_epi8(table, SIGN == 7 ? _mm256_min_epu8(power, _mm256_set1_epi8(15)) : power);
    __m256i moves = _mm256_cmpeq_epi8(_mm256_min_epu8(random, bound), random);  // -1 where true
    __m256i larger = _mm256_blendv_epi8(b, a, _mm256_cmpeq_epi8(ea, least));
    // Same sign: larger - 1. Differing: larger + 1.
    __m256i sum = _mm256_add_epi8(larger, _mm256_sub_epi8(_mm256_xor_si256(moves, differ), differ));
    sum = _mm256_andnot_si256(_mm256_cmpeq_epi8(power, _mm256_set1_epi8(-1)), sum);
    *far = _mm256_cmpeq_epi8(_mm256_or_si256(bound, random), zero);
    // Where one is zero the other is the sum; its code is the bitwise or, as zero has no sign.
    return _mm256_blendv_epi8(sum, _mm256_or_si256(a, b), _mm256_cmpeq_epi8(least, zero));
}

static void exponential_reduce_8(const ReduceArgs& a, int64_t begin, int64_t end) {
    Random random = Random::start(a.seed, uint64_t(begin) / 4);
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) {
        __m256i far, r = __m256i(Random::take(random)), va = loadu<__m256i>(a.a + i), vb = loadu<__m256i>(a.b + i);
        __m256i sum = reduce32<7>(va, vb, r, &far);
        if (__builtin_expect(!_mm256_testz_si256(far, far), 0)) {
            uint32_t which = uint32_t(_mm256_movemask_epi8(far));
            uint8_t bytes[32];
            storeu(bytes, sum);
            for (; which; which &= which - 1) {
                int j = __builtin_ctz(which);
                bytes[j] = uint8_t(reduce_one(a.a[i + j], a.b[i + j], 8, 0, a, uint64_t(i + j)));
            }
            sum = loadu<__m256i>(bytes);
        }
        storeu(a.a + i, sum);
    }
    reduce_some(a, i, end);
}

static void exponential_reduce_4(const ReduceArgs& a, int64_t begin, int64_t end) {
    const __m256i nibble = _mm256_set1_epi8(15), low = _mm256_set1_epi16(255);
    Random random = Random::start(a.seed, uint64_t(begin) / 4);
    int64_t i = begin;
    for (; i + 64 <= end; i += 64) {
        __m256i far, r0 = __m256i(Random::take(random)), r1 = __m256i(Random::take(random));
        __m256i even = _mm256_packus_epi16(_mm256_and_si256(r0, low), _mm256_and_si256(r1, low));
        __m256i odd = _mm256_packus_epi16(_mm256_srli_epi16(r0, 8), _mm256_srli_epi16(r1, 8));
        even = _mm256_permute4x64_epi64(even, 0xD8);
        odd = _mm256_permute4x64_epi64(odd, 0xD8);
        __m256i va = loadu<__m256i>(a.a + i / 2), vb = loadu<__m256i>(a.b + i / 2);
        __m256i first = reduce32<3>(_mm256_and_si256(va, nibble), _mm256_and_si256(vb, nibble), even, &far);
        va = _mm256_and_si256(_mm256_srli_epi16(va, 4), nibble);
        vb = _mm256_and_si256(_mm256_srli_epi16(vb, 4), nibble);
        __m256i second = reduce32<3>(va, vb, odd, &far);
        storeu(a.a + i / 2, _mm256_or_si256(first, _mm256_slli_epi16(second, 4)));
    }
    reduce_some(a, i, end);
}
#endif

static void exponential_reduce(const ReduceArgs& a, int64_t begin, int64_t end) {
#if PC_AVX2
    if (crosses(uint64_t(begin) / 4, (end - begin) / 4)) return reduce_some(a, begin, end);
    if (a.bits == 8) return exponential_reduce_8(a, begin, end);
    return exponential_reduce_4(a, begin, end);
#else
    reduce_some(a, begin, end);
#endif
}
