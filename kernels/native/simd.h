// Eight-lane vectors, and the operations with a form for each instruction set (PC_AVX2). Included once per instruction
// set, inside its namespace. Arithmetic uses the vector types of GCC and Clang.

// The CLASS (3, 4, 7 or 8) of templates that support up to that many bits. Portable code is the same for all; compiling
// it once takes a third of the time.
#if PC_AVX2
#define CLASS_OF(bits) bits
#else
#define CLASS_OF(bits) 8
#endif

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

INLINE F8 splat(float v) { return F8{v, v, v, v, v, v, v, v}; }
INLINE I8 splat(int32_t v) { return I8{v, v, v, v, v, v, v, v}; }
INLINE U8 splat(uint32_t v) { return U8{v, v, v, v, v, v, v, v}; }

template <class V>
INLINE V loadu(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
INLINE void storeu(void* p, V v) {
    __builtin_memcpy(p, &v, sizeof v);
}

INLINE F8 to_float(I8 v) { return __builtin_convertvector(v, F8); }
INLINE I8 to_int(F8 v) { return __builtin_convertvector(v, I8); }  // towards zero
INLINE I8 round_to_int(F8 v) {  // half to even, below 2**31
#if PC_AVX2
    return I8(_mm256_cvtps_epi32(__m256(v)));
#else
    I8 r;
    for (int i = 0; i < 8; i++) r[i] = int32_t(__builtin_rintf(v[i]));
    return r;
#endif
}
INLINE F8 minimum(F8 a, F8 b) { return a < b ? a : b; }
INLINE F8 maximum(F8 a, F8 b) {
#if PC_AVX2
    return F8(_mm256_max_ps(__m256(a), __m256(b)));
#else
    return a > b ? a : b;
#endif
}
INLINE I8 minimum(I8 a, I8 b) { return a < b ? a : b; }
INLINE I8 maximum(I8 a, I8 b) { return a > b ? a : b; }
INLINE I8 lanes() { return I8{0, 1, 2, 3, 4, 5, 6, 7}; }

// Loads may be at any address: values in full precision lie anywhere in a payload.
INLINE F8 load8(const float* p) { return loadu<F8>(p); }

INLINE F8 load8(const BHalf* p) {
#if PC_AVX2
    return F8(_mm256_slli_epi32(_mm256_cvtepu16_epi32(loadu<__m128i>(p)), 16));
#else
    const H8 bits = loadu<H8>(p);
    U8 v;
    for (int i = 0; i < 8; i++) v[i] = uint32_t(bits[i]) << 16;
    return F8(v);
#endif
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FF;
    if (exponent == 31) return bits_float(sign | 0x7F800000u | mantissa << 13);
    if (exponent) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
    float v = float(mantissa) * 0x1p-24f;
    return bits_float(sign | float_bits(v));
}

INLINE F8 load8(const Half* p) {
#if PC_AVX2
    return F8(_mm256_cvtph_ps(loadu<__m128i>(p)));
#else
    const H8 bits = loadu<H8>(p);
    F8 v;
    for (int i = 0; i < 8; i++) v[i] = half_to_float(bits[i]);
    return v;
#endif
}

INLINE float one_value(const float* p) { return *p; }
INLINE float one_value(const Half* p) { return half_to_float(p->bits); }
INLINE float one_value(const BHalf* p) { return bits_float(uint32_t(p->bits) << 16); }

template <class T>
INLINE F8 load_some(const T* p, int64_t n) {
    T part[8] = {};
    __builtin_memcpy(part, p, size_t(n) * sizeof(T));
    return load8(part);
}

INLINE void store_some(float* p, F8 v, int64_t n) {
    __builtin_memcpy(p, &v, size_t(n) * sizeof(float));
}

INLINE I8 zero_from(I8 v, int64_t n) { return v & (lanes() < splat(int32_t(n))); }

INLINE uint32_t reduce_max(U8 v) {
    uint32_t r = v[0];
    for (int i = 1; i < 8; i++) r = v[i] > r ? v[i] : r;
    return r;
}

template <class V>
INLINE auto reduce_add(V v) {
    typedef decltype(v[0] + v[0]) Half __attribute__((vector_size(16)));
    Half low, high;
    __builtin_memcpy(&low, &v, 16);
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + 16, 16);
    const Half sum = low + high;
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Random bits of consecutive elements: none (nearest rounding), or of one block of 2**32 elements.
struct NoRandom {
    static constexpr bool stochastic = false;
    INLINE U8 take(NoRandom&) { return U8{}; }
};

struct Random {
    static constexpr bool stochastic = true;
    U8 index, second;

    INLINE Random start(uint64_t seed, uint64_t block, uint32_t index) {
        Keys k = make_keys(seed, block);
        return {U8(lanes()) + splat(index + k.first), splat(k.second)};
    }
    INLINE Random start(uint64_t seed, uint64_t index) { return start(seed, index >> 32, uint32_t(index)); }
    INLINE U8 take(Random& r) {
        U8 h = r.index;
        r.index += splat(8u);
        h ^= h >> 16;
        h *= splat(MULTIPLIER_1);
        h ^= h >> 15;
        h ^= r.second;
        h *= splat(MULTIPLIER_2);
        return h ^ (h >> 16);
    }
};

// Whether any of `count` elements, or of the 63 after them that a loop may run over, lie in another block.
INLINE bool crosses(uint64_t index, int64_t count) { return index >> 32 != (index + uint64_t(count) + 63) >> 32; }

INLINE F8 uniform(U8 h) { return to_float(I8(h >> 8)) * splat(0x1p-24f); }

// Packs 32 codes of `bits` bits to 4 * bits bytes at out; may overwrite bytes after them, up to limit. Lanes hold codes
// below 2**bits.
struct Packer {
    int bits;
#if PC_AVX2
    __m256i weight_1, weight_2, shuffle;
    __m128i shift;
#endif

    INLINE Packer make(int bits) {
        if (bits < 1 || bits > 8) __builtin_unreachable();
        Packer p;
        p.bits = bits;
#if PC_AVX2
        p.weight_1 = _mm256_set1_epi16(constants.pack_weight_1[bits]);
        p.weight_2 = _mm256_set1_epi32(constants.pack_weight_2[bits]);
        p.shift = _mm_cvtsi32_si128(constants.pack_shift[bits]);
        p.shuffle = loadu<__m256i>(constants.pack_order[bits]);
#endif
        return p;
    }

#if PC_AVX2
    template <int CLASS>
    INLINE void put(const Packer& p, const I8* c, uint8_t* out, const uint8_t* limit) {
        __m256i low = _mm256_packus_epi32(__m256i(c[0]), __m256i(c[1]));
        __m256i high = _mm256_packus_epi32(__m256i(c[2]), __m256i(c[3]));
        __m256i v = _mm256_packus_epi16(low, high);
        v = _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        put_bytes<CLASS>(p, v, out, limit);
    }
    // The same from 32 codes in the bytes of v.
    template <int CLASS>
    INLINE void put_bytes(const Packer& p, __m256i v, uint8_t* out, const uint8_t* limit) {
        if (CLASS == 8) {
            storeu(out, v);
            return;
        }
        v = _mm256_maddubs_epi16(p.weight_1, v);
        v = _mm256_madd_epi16(v, p.weight_2);
        if (CLASS <= 4) {
            v = _mm256_or_si256(v, _mm256_srl_epi64(v, p.shift));
        } else {
            __m256i upper = _mm256_sll_epi64(_mm256_srli_epi64(v, 32), p.shift);
            v = _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi64x(0xFFFFFFFF)), upper);
        }
        v = _mm256_shuffle_epi8(v, p.shuffle);
        int half = 2 * p.bits;
        if (__builtin_expect(limit - out >= half + 16, 1)) {
            storeu(out, _mm256_castsi256_si128(v));
            storeu(out + half, _mm256_extracti128_si256(v, 1));
        } else {
            uint8_t part[64];
            storeu(part, _mm256_castsi256_si128(v));
            storeu(part + half, _mm256_extracti128_si256(v, 1));
            __builtin_memcpy(out, part, size_t(2 * half));
        }
    }
#else
    template <int CLASS>
    INLINE void put(const Packer& p, const I8* c, uint8_t* out, const uint8_t*) {
        for (int i = 0; i < 4; i++) {
            uint64_t word = 0;
            for (int j = 0; j < 8; j++) word |= uint64_t(uint32_t(c[i][j])) << (j * p.bits);
            uint8_t bytes[8];
            for (int j = 0; j < 8; j++) bytes[j] = uint8_t(word >> (8 * j));
            __builtin_memcpy(out + i * p.bits, bytes, size_t(p.bits));
        }
    }
#endif
};

// Packs 8 codes of `bits` bits, 9 to 16, to `bits` bytes at out, as Packer does. Lanes hold codes below 2**bits.
INLINE void put_wide(I8 c, int bits, uint8_t* out, const uint8_t* limit) {
    uint64_t word[2];  // four codes each
#if PC_AVX2
    __m256i v = __m256i(c), odd = _mm256_sll_epi64(_mm256_srli_epi64(v, 32), _mm_cvtsi32_si128(bits));
    v = _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi64x(0xFFFFFFFF)), odd);
    v = _mm256_or_si256(v, _mm256_sll_epi64(_mm256_unpackhi_epi64(v, v), _mm_cvtsi32_si128(2 * bits)));
    word[0] = uint64_t(_mm256_extract_epi64(v, 0));
    word[1] = uint64_t(_mm256_extract_epi64(v, 2));
#else
    for (int i = 0; i < 2; i++) {
        word[i] = 0;
        for (int j = 0; j < 4; j++) word[i] |= uint64_t(uint32_t(c[4 * i + j])) << (j * bits);
    }
#endif
    if (bits < 16) {
        word[0] |= word[1] << (4 * bits);
        word[1] >>= 64 - 4 * bits;
    }
    if (__builtin_expect(limit - out < 16, 0)) {
        __builtin_memcpy(out, word, size_t(bits));
        return;
    }
    // Separate stores: one load of both words right after their stores would wait for the store buffer.
    __builtin_memcpy(out, &word[0], 8);
    __builtin_memcpy(out + 8, &word[1], 8);
}

// Unpacks 8 codes of `bits` bits, 1 to 16, from READS bytes of which the first `bits` count.
struct Unpacker {
    static constexpr int64_t READS = 16;
    int bits;
#if PC_AVX2
    __m256i shuffle, shift, mask;
#endif

    INLINE Unpacker make(int bits) {
        Unpacker u;
        u.bits = bits;
#if PC_AVX2
        u.shuffle = loadu<__m256i>(constants.unpack_order[bits]);
        u.shift = loadu<__m256i>(constants.unpack_shift[bits]);
        u.mask = _mm256_set1_epi32((1 << bits) - 1);
#endif
        return u;
    }

    // Codes in the low bits of each lane; the bits above them are undefined.
    INLINE I8 raw(const Unpacker& u, const uint8_t* p) {
#if PC_AVX2
        __m256i both = _mm256_broadcastsi128_si256(loadu<__m128i>(p));
        return I8(_mm256_srlv_epi32(_mm256_shuffle_epi8(both, u.shuffle), u.shift));
#else
        return get(u, p);
#endif
    }

    INLINE I8 get(const Unpacker& u, const uint8_t* p) {
#if PC_AVX2
        return I8(_mm256_and_si256(__m256i(raw(u, p)), u.mask));
#else
        const uint32_t mask = (1u << u.bits) - 1;
        I8 c;
        if (u.bits > 8) {
            for (int j = 0; j < 8; j++) {
                const int at = j * u.bits;
                uint32_t word = p[at / 8] | uint32_t(p[at / 8 + 1]) << 8;
                if (at % 8 + u.bits > 16) word |= uint32_t(p[at / 8 + 2]) << 16;
                c[j] = int32_t(word >> (at % 8) & mask);
            }
            return c;
        }
        uint64_t word = 0;
        for (int j = 0; j < u.bits; j++) word |= uint64_t(p[j]) << (8 * j);
        for (int j = 0; j < 8; j++) c[j] = int32_t(word >> (j * u.bits) & mask);
        return c;
#endif
    }

    // As get, where fewer than READS bytes may be read.
    INLINE I8 get_some(const Unpacker& u, const uint8_t* p, int64_t bytes) {
        uint8_t part[READS] = {};
        __builtin_memcpy(part, p, size_t(bytes < READS ? bytes : READS));
        return get(u, part);
    }
};

// The indices of eight values, one a byte; zeros beyond n.
INLINE I8 load_index(const uint8_t* p, int64_t n) {
    uint8_t part[8] = {};
    if (n >= 8) __builtin_memcpy(part, p, 8);
    else __builtin_memcpy(part, p, size_t(n));
#if PC_AVX2
    return I8(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(part))));
#else
    I8 v;
    for (int i = 0; i < 8; i++) v[i] = part[i];
    return v;
#endif
}

INLINE F8 look_up(F8 table, I8 index) {  // by the low three bits of each lane
#if PC_AVX2
    return F8(_mm256_permutevar8x32_ps(__m256(table), __m256i(index)));
#else
    F8 v;
    for (int i = 0; i < 8; i++) v[i] = table[index[i] & 7];
    return v;
#endif
}

// table[index] for eight lanes.
INLINE F8 gather(const float* table, I8 index) {
#if PC_AVX2
    return F8(_mm256_i32gather_ps(table, __m256i(index), 4));
#else
    F8 v;
    for (int i = 0; i < 8; i++) v[i] = table[index[i]];
    return v;
#endif
}

INLINE I8 gather(const int32_t* table, I8 index) {
#if PC_AVX2
    return I8(_mm256_i32gather_epi32(table, __m256i(index), 4));
#else
    I8 v;
    for (int i = 0; i < 8; i++) v[i] = table[index[i]];
    return v;
#endif
}

// Stores the lanes where `chosen` is -1, one after the other, and returns their number. May write all eight lanes at out.
INLINE int64_t put_chosen(void* out, I8 v, I8 chosen) {
#if PC_AVX2
    const int mask = _mm256_movemask_ps(__m256(chosen));
    const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(constants.chosen_order[mask]));
    storeu(out, _mm256_permutevar8x32_epi32(__m256i(v), _mm256_cvtepu8_epi32(order)));
    return __builtin_popcount(unsigned(mask));
#else
    int64_t n = 0;
    for (int i = 0; i < 8; i++) {
        int32_t lane = v[i];
        __builtin_memcpy(static_cast<char*>(out) + 4 * n, &lane, 4);
        n -= chosen[i];
    }
    return n;
#endif
}
