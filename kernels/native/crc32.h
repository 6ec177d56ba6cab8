// zlib's CRC-32 (polynomial 0x04C11DB7, bits reflected): by carry-less multiplication if the CPU supports it, else by
// tables, eight bytes at a time.
// Source of the folding constants: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pipecomp {

struct CrcTables {
    uint32_t t[8][256];
    CrcTables() {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
            t[0][i] = c;
        }
        for (uint32_t i = 0; i < 256; i++)
            for (int k = 1; k < 8; k++) t[k][i] = t[0][t[k - 1][i] & 255] ^ (t[k - 1][i] >> 8);
    }
};

// `crc` without the inversion at either end.
inline uint32_t crc_by_tables(uint32_t crc, const uint8_t* p, int64_t n) {
    static const CrcTables tables;
    const auto& t = tables.t;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low = crc ^ (uint32_t(p[0]) | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24);
        crc = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^ t[3][p[4]] ^ t[2][p[5]] ^
              t[1][p[6]] ^ t[0][p[7]];
    }
    for (; n > 0; n--, p++) crc = t[0][(crc ^ *p) & 255] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__)
#define CRC_INLINE static inline __attribute__((always_inline, target("pclmul,sse4.1")))

CRC_INLINE __m128i crc_load(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

CRC_INLINE __m128i crc_fold(__m128i x, __m128i k, __m128i next) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

// n: a multiple of 16, at least 64.
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_folding(uint32_t crc, const uint8_t* p, int64_t n) {
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i x0 = _mm_xor_si128(crc_load(p), _mm_cvtsi32_si128(int32_t(crc)));
    __m128i x1 = crc_load(p + 16), x2 = crc_load(p + 32), x3 = crc_load(p + 48);
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
        x0 = crc_fold(x0, by_64, crc_load(p));
        x1 = crc_fold(x1, by_64, crc_load(p + 16));
        x2 = crc_fold(x2, by_64, crc_load(p + 32));
        x3 = crc_fold(x3, by_64, crc_load(p + 48));
    }
    x0 = crc_fold(crc_fold(crc_fold(x0, by_16, x1), by_16, x2), by_16, x3);
    for (; n >= 16; p += 16, n -= 16) x0 = crc_fold(x0, by_16, crc_load(p));
    // 128 bits to 64, to 32; then Barrett's reduction.
    const __m128i low_32 = _mm_setr_epi32(-1, 0, -1, 0);
    x0 = _mm_xor_si128(_mm_srli_si128(x0, 8), _mm_clmulepi64_si128(x0, by_16, 0x10));
    x0 = _mm_xor_si128(_mm_srli_si128(x0, 4),
                       _mm_clmulepi64_si128(_mm_and_si128(x0, low_32), _mm_set_epi64x(0, 0x163cd6124), 0x00));
    const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    __m128i q = _mm_clmulepi64_si128(_mm_and_si128(x0, low_32), barrett, 0x10);
    q = _mm_clmulepi64_si128(_mm_and_si128(q, low_32), barrett, 0x00);
    return uint32_t(_mm_extract_epi32(_mm_xor_si128(x0, q), 1));
}
#endif

inline uint32_t crc32(uint32_t value, const uint8_t* p, int64_t n) {
    uint32_t crc = ~value;
#if defined(__x86_64__)
    if (n >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        int64_t folded = n & ~int64_t(15);
        crc = crc_by_folding(crc, p, folded);
        p += folded;
        n -= folded;
    }
#endif
    return ~crc_by_tables(crc, p, n);
}

}  // namespace pipecomp
