// Data-parallel codes: linear and exponential dithering, Algorithm 2's reduce, exact sums. Included once per
// instruction set. Values [begin, end) of a flat bucket, begin a multiple of 32; what dithering.py defines.

// Values at i ... i + 7 of a bucket that ends at `end`; zeros beyond.
template <class T>
INLINE F8 bucket8(const T* g, int64_t i, int64_t end) {
    return end - i >= 8 ? load8(g + i) : load_some(g + i, end - i);
}

INLINE F8 relative(F8 g, F8 divisor) { return minimum(F8(U8(g) & splat(0x7FFFFFFFu)) / divisor, splat(1.0f)); }

// Writes 32 codes at value i of a bucket, or what is left before `end`.
template <int CLASS>
INLINE void put_codes(const Packer& p, I8* c, uint8_t* codes, int64_t i, int64_t end, const uint8_t* limit) {
    uint8_t* out = codes + i / 8 * p.bits;
    if (end - i >= 32) return Packer::put<CLASS>(p, c, out, limit);
    for (int j = 0; j < 4; j++) c[j] = end - i > 8 * j ? zero_from(c[j], end - i - 8 * j) : I8{};
    uint8_t part[64];
    Packer::put<CLASS>(p, c, part, part + sizeof part);
    __builtin_memcpy(out, part, size_t(((end - i) * p.bits + 7) / 8));
}

template <class T, int CLASS, class R>
static void linear_encode_values(const LinearArgs& a, int64_t begin, int64_t end) {
    const T* g = static_cast<const T*>(a.g);
    const F8 divisor = splat(a.norm > 0 ? a.norm : 1.0f);
    const I8 offset = splat(a.offset);
    const Packer packer = Packer::make(a.bits);
    const uint8_t* limit = a.codes + (end * a.bits + 7) / 8;
    F8 levels = splat(a.levels[0]);
    R random = R::start(a.seed, a.start + uint64_t(begin));
    for (int64_t i = begin; i < end; i += 32) {
        I8 c[4];
        for (int j = 0; j < 4; j++) {
            int64_t at = i + 8 * j;
            F8 v = at < end ? bucket8(g, at, end) : F8{};
            if (a.index)
                for (int64_t t = 0; t < 8; t++) levels[t] = at + t < end ? a.levels[a.index[at + t]] : 1.0f;
            F8 y = relative(v, divisor) * levels;
            I8 whole = to_int(y);
            I8 up = uniform(R::take(random)) < y - to_float(whole);  // -1 where true
            I8 level = minimum(whole - up, offset);
            I8 negative = v < splat(0.0f);
            c[j] = offset + ((level ^ negative) - negative);
        }
        put_codes<CLASS>(packer, c, a.codes, i, end, limit);
    }
}

template <class T, class R>
static void linear_encode_bits(const LinearArgs& a, int64_t begin, int64_t end) {
    if (a.bits <= 4) return linear_encode_values<T, 4, R>(a, begin, end);
    if (a.bits < 8) return linear_encode_values<T, 7, R>(a, begin, end);
    linear_encode_values<T, 8, R>(a, begin, end);
}

static void linear_encode(const LinearArgs& a, int64_t begin, int64_t end) {
    const bool across = crosses(a.start + uint64_t(begin), end - begin);
#define CALL(T)                                                              \
    if (across) return linear_encode_bits<T, RandomAcross>(a, begin, end);   \
    return linear_encode_bits<T, Random>(a, begin, end)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static void linear_add(int32_t* total, const uint8_t* codes, int64_t d, int bits, int offset, int64_t begin,
                       int64_t end) {
    const Unpacker u = Unpacker::make(bits);
    const U8 away = splat(uint32_t(offset));
    const uint8_t* in = codes + begin / 8 * bits;
    const uint8_t* limit = codes + (d * bits + 7) / 8;
    int64_t i = begin;
    for (; i + 8 <= end && limit - in >= 8; i += 8, in += bits)
        storeu(total + i, loadu<U8>(total + i) + (U8(Unpacker::get(u, in)) - away));
    for (; i < end; i += 8, in += bits) {
        int64_t left = end - i < 8 ? end - i : 8;
        U8 c = U8(Unpacker::get_some(u, in, (left * bits + 7) / 8)) - away;
        for (int64_t t = 0; t < left; t++) total[i + t] = int32_t(uint32_t(total[i + t]) + c[t]);
    }
}

static void linear_decode(float* out, const int32_t* total, const uint8_t* index, const float* factors, int64_t begin,
                          int64_t end) {
    for (int64_t i = begin; i < end; i++) out[i] = float(total[i]) * factors[index ? index[i] : 0];
}

static void scale_index(uint8_t* out, const void* g, int dtype, float norm, const float* levels, int count,
                        int64_t begin, int64_t end) {
    const F8 divisor = splat(norm > 0 ? norm : 1.0f);
    for (int64_t i = begin; i < end; i += 8) {
        F8 v{};
#define CALL(T) v = bucket8(static_cast<const T*>(g), i, end)
        BY_DTYPE(dtype, CALL)
#undef CALL
        F8 y = relative(v, divisor);
        I8 best{};
        for (int j = 1; j < count; j++) best = y * splat(levels[j]) <= splat(levels[0]) ? splat(int32_t(j)) : best;
        for (int64_t t = 0; t < 8 && i + t < end; t++) out[i + t] = uint8_t(best[t]);
    }
}

template <class T, int BITS, class R>
static void exponential_encode_values(const ExponentialArgs& a, int64_t begin, int64_t end) {
    const T* g = static_cast<const T*>(a.g);
    const int top = (1 << (BITS - 1)) - 1;
    const F8 divisor = splat(a.norm > 0 ? a.norm : 1.0f), smallest = splat(bits_float(uint32_t(126 + top - a.depth) << 23));
    const Packer packer = Packer::make(BITS);
    const uint8_t* limit = a.codes + (end * BITS + 7) / 8;
    R random = R::start(a.seed, a.start + uint64_t(begin));
    for (int64_t i = begin; i < end; i += 32) {
        I8 c[4];
        for (int j = 0; j < 4; j++) {
            int64_t at = i + 8 * j;
            F8 v = at < end ? bucket8(g, at, end) : F8{};
            F8 y = relative(v, divisor);
            U8 h = R::take(random);
            I8 pattern = I8(y);
            I8 below = splat(int32_t(128 + a.depth)) - (pattern >> 23);
            I8 up = I8(h >> 9) < (pattern & splat(int32_t(0x7FFFFF)));  // -1 where true
            I8 last = (uniform(h) < y * smallest) & splat(int32_t(top));
            I8 e = below > splat(int32_t(top)) ? last : below + up;
            I8 sign = (v < splat(0.0f)) & splat(int32_t(1 << (BITS - 1)));
            c[j] = e | (sign & (e > splat(int32_t(0))));
        }
        put_codes<BITS>(packer, c, a.codes, i, end, limit);
    }
}

template <class T>
static void exponential_encode_bits(const ExponentialArgs& a, int64_t begin, int64_t end, bool across) {
    if (across && a.bits == 8) return exponential_encode_values<T, 8, RandomAcross>(a, begin, end);
    if (across) return exponential_encode_values<T, 4, RandomAcross>(a, begin, end);
    if (a.bits == 8) return exponential_encode_values<T, 8, Random>(a, begin, end);
    exponential_encode_values<T, 4, Random>(a, begin, end);
}

static void exponential_encode(const ExponentialArgs& a, int64_t begin, int64_t end) {
    const bool across = crosses(a.start + uint64_t(begin), end - begin);
#define CALL(T) exponential_encode_bits<T>(a, begin, end, across)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static void exponential_decode(const ExponentialArgs& a, int64_t begin, int64_t end) {
    const Unpacker u = Unpacker::make(a.bits);
    const I8 top = splat(int32_t((1 << (a.bits - 1)) - 1));
    const F8 factor = splat(a.norm);
    const uint8_t* in = a.codes + begin / 8 * a.bits;
    const uint8_t* limit = a.codes + (a.d * a.bits + 7) / 8;
    for (int64_t i = begin; i < end; i += 8, in += a.bits) {
        int64_t left = end - i < 8 ? end - i : 8;
        bool whole = left == 8 && limit - in >= 8;
        I8 c = whole ? Unpacker::get(u, in) : Unpacker::get_some(u, in, (left * a.bits + 7) / 8);
        I8 e = c & top;
        U8 power = U8(splat(int32_t(128 + a.depth)) - e) << 23 | U8(c & ~top) << (32 - a.bits);
        F8 v = e == splat(int32_t(0)) ? F8{} : F8(power) * factor;
        if (left == 8) storeu(a.out + i, v);
        else store_some(a.out + i, v, left);
    }
}

// One value of Algorithm 2: codes with `bits` bits, its byte of randomness and its index for the second stream.
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
// 32 values with one code in each byte, the sign in bit SIGN. `far` gets the lanes that need the second stream.
template <int SIGN>
INLINE __m256i reduce32(__m256i a, __m256i b, __m256i random, __m256i* far) {
    const __m256i one = _mm256_set1_epi8(1), mask = _mm256_set1_epi8((1 << SIGN) - 1);
    const __m256i sign = _mm256_set1_epi8(int8_t(1 << SIGN)), zero = _mm256_setzero_si256();
    // 2**(8 - k) - 1: a random byte is at most this with probability 2**-k; beyond k = 8 only a zero byte goes on.
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-1, 127, 63, 31, 15, 7, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0));
    __m256i ea = _mm256_and_si256(a, mask), eb = _mm256_and_si256(b, mask);
    __m256i least = _mm256_min_epu8(ea, eb);
    __m256i k = _mm256_sub_epi8(_mm256_max_epu8(ea, eb), least);
    __m256i differ = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_xor_si256(a, b), sign), sign);
    __m256i power = _mm256_subs_epu8(k, _mm256_and_si256(differ, one));
    __m256i bound = _mm256_shuffle_epi8(table, _mm256_min_epu8(power, _mm256_set1_epi8(15)));
    __m256i moves = _mm256_cmpeq_epi8(_mm256_min_epu8(random, bound), random);  // -1 where true
    __m256i larger = _mm256_blendv_epi8(b, a, _mm256_cmpeq_epi8(ea, least));
    // same sign: larger - 1; differing: larger + 1, that is larger + (moves ^ differ) - differ.
    __m256i step = _mm256_sub_epi8(_mm256_xor_si256(moves, differ), differ);
    __m256i sum = _mm256_add_epi8(larger, step);
    __m256i cancel = _mm256_and_si256(differ, _mm256_cmpeq_epi8(k, zero));
    sum = _mm256_andnot_si256(cancel, sum);
    // Where one is zero the other is the sum; its code is the bitwise or, as zero has no sign.
    __m256i neutral = _mm256_cmpeq_epi8(least, zero);
    *far = _mm256_andnot_si256(neutral, _mm256_and_si256(_mm256_cmpgt_epi8(power, _mm256_set1_epi8(8)),
                                                         _mm256_cmpeq_epi8(random, zero)));
    return _mm256_blendv_epi8(sum, _mm256_or_si256(a, b), neutral);
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
