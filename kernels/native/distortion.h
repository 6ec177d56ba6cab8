// Quantization errors: exact sums in the order of additions of reference/batches.py, and faster estimates within bounds
// in the same pass as the codes. Included once per instruction set.

// Sum by halves: the second half is added to the first, an odd last value to the first of all; y is overwritten.
template <class V>
static V halved_sum(V* y, int64_t n) {
    if (n == 0) return 0;
    while (n > 1) {
        const int64_t half = n / 2;
        const V* const second = y + half;
        for (int64_t i = 0; i < half; i++) y[i] += second[i];
        if (n & 1) y[0] += y[n - 1];
        n = half;
    }
    return y[0];
}

template <class T>
static float squared_norm_values(const T* x, int64_t n, float* y) {
    for (int64_t i = 0; i < n; i += 8) {
        const int64_t left = n - i < 8 ? n - i : 8;
        const F8 v = left == 8 ? load8(x + i) : load_some(x + i, left);
        if (left == 8) storeu(y + i, v * v);
        else store_some(y + i, v * v, left);
    }
    return halved_sum(y, n);
}

// Squared error of a value over its scale, plus 1, in steps.
template <bool STOCHASTIC>
INLINE F8 squared_steps(F8 u, F8 step, F8 top) {
    const F8 steps = u * step;
    if (STOCHASTIC) {
        const F8 above = steps - to_float(to_int(steps));
        return above * (splat(1.0f) - above);
    }
    const F8 code = to_float(to_int(minimum(maximum(steps, splat(0.0f)), top)));
    const F8 off = steps - code - splat(0.5f);
    return off * off;
}

template <class T, bool DELTA, bool STOCHASTIC>
static float squared_error_values(const T* x, const float* m, int64_t n, float scale, int bits, float* y) {
    const float most = float((1 << bits) - 1);
    const F8 inverse = splat(1.0f / scale), one = splat(1.0f), top = splat(most);
    const F8 step = splat(STOCHASTIC ? most * 0.5f : float(1 << (bits - 1)));
    for (int64_t i = 0; i < n; i += 8) {
        const int64_t left = n - i < 8 ? n - i : 8;
        const F8 v = left == 8 ? load_values<T, DELTA>(x + i, m + i) : load_some_values<T, DELTA>(x + i, m + i, left);
        const F8 square = squared_steps<STOCHASTIC>(v * inverse + one, step, top);
        if (left == 8) storeu(y + i, square);
        else store_some(y + i, square, left);
    }
    return halved_sum(y, n);
}

template <class T, bool DELTA>
static float squared_error_rounded(const QuantizeArgs& a, const Layout::Unit& u, float scale, float* y) {
    const T* x = unit_values<T>(a, u);
    const float* m = unit_message(a, u);
    return a.stochastic ? squared_error_values<T, DELTA, true>(x, m, u.n, scale, a.bits, y)
                        : squared_error_values<T, DELTA, false>(x, m, u.n, scale, a.bits, y);
}

// Squared norm of a unit's values; y: room for as many floats.
static float squared_norm(const QuantizeArgs& a, const Layout::Unit& u, float* y) {
#define CALL(T) return squared_norm_values<T>(unit_values<T>(a, u), u.n, y)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

// Squared norm of the quantization error of a unit, in steps.
static float squared_error(const QuantizeArgs& a, const Layout::Unit& u, float scale, float* y) {
#define CALL(T)                                                   \
    return a.m ? squared_error_rounded<T, true>(a, u, scale, y) \
               : squared_error_rounded<T, false>(a, u, scale, y)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static double sum_of_groups(double* y, int64_t n) { return halved_sum(y, n); }

// As measure_values; adds the squared norm of x to `norm`, in any order.
template <class T, bool DELTA>
static uint32_t measure_norm_values(const T* x, const float* m, int64_t n, double* norm) {
    const U8 magnitude = splat(0x7FFFFFFFu);
    U8 most[4] = {};
    F8 squares[4] = {};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; j++) {
            const F8 v = load8(x + i + 8 * j), y = DELTA ? v - load8(m + i + 8 * j) : v;
            const U8 size = U8(y) & magnitude;
            most[j] = size > most[j] ? size : most[j];
            squares[j] += v * v;
        }
    for (; i < n; i += 8) {
        const int64_t left = n - i < 8 ? n - i : 8;
        const F8 v = load_some(x + i, left), y = DELTA ? v - load_some(m + i, left) : v;
        const U8 size = U8(y) & magnitude;
        most[0] = size > most[0] ? size : most[0];
        squares[0] += v * v;
    }
    for (int j = 1; j < 4; j++) {
        most[0] = most[j] > most[0] ? most[j] : most[0];
        squares[0] += squares[j];
    }
    *norm += double(reduce_add(squares[0]));
    return reduce_max(most[0]);
}

INLINE uint64_t sum_of_lanes(U8 v) {
    typedef uint64_t L4 __attribute__((vector_size(32)));
    const L4 sum = (L4(v) & 0xFFFFFFFFull) + (L4(v) >> 32);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Computes the codes of quantize_values with nearest rounding and a max scale. Adds the squared errors of these bits and of
// one bit less to `squares`, in units of 2**-fine_bits of a code's step; each value counts rounded down to such a unit.
template <class T, int CLASS, bool DELTA>
static void fit_values(const T* x, const float* m, int64_t n, float scale, int bits, uint8_t* out, const uint8_t* limit,
                       uint64_t* squares) {
    const int fine = fine_bits(bits);
    const int32_t half = 1 << fine, top = (1 << (bits + fine)) - 1, last = 2 * half - 1;  // of two codes that become one
    const float middle = float(1 << (bits + fine - 1)), inverse = 1.0f / scale * middle;
    uint64_t far = 0, square = 0;  // from the middle of two codes
    int64_t i = 0;
#if PC_AVX2
    const Packer packer = Packer::make(bits);
    const __m256i most = _mm256_set1_epi16(int16_t(top)), inside = _mm256_set1_epi16(int16_t(last));
    const __m256i center = _mm256_set1_epi16(int16_t(half)), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m128i shift = _mm_cvtsi32_si128(fine);
    U8 far_sum = {}, square_sum = {};
    while (i + 32 <= n) {
        __m256i far_part = _mm256_setzero_si256();  // 16 bits hold the sums of 512 values
        for (const int64_t end = n - i < 512 ? n : i + 512; i + 32 <= end; i += 32, out += 4 * bits) {
            __m256i code[2];
            for (int j = 0; j < 2; j++) {
                I8 y[2];
                for (int k = 0; k < 2; k++) {
                    const int64_t at = i + 16 * j + 8 * k;
                    y[k] = to_int(load_values<T, DELTA>(x + at, m + at) * splat(inverse) + splat(middle));
                }
                const __m256i v = _mm256_min_epu16(_mm256_packus_epi32(__m256i(y[0]), __m256i(y[1])), most);
                const __m256i off = _mm256_sub_epi16(_mm256_and_si256(v, inside), center);
                far_part = _mm256_add_epi16(far_part, _mm256_abs_epi16(off));
                square_sum += U8(_mm256_madd_epi16(off, off));
                code[j] = _mm256_srl_epi16(v, shift);
            }
            for (int64_t line = 0; line < 32 * int64_t(sizeof(T)); line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(x + n + i) + line);
            const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(code[0], code[1]), order);
            Packer::put_bytes<CLASS>(packer, codes, out, limit);
        }
        far_sum += U8(_mm256_and_si256(far_part, _mm256_set1_epi32(0xFFFF))) + (U8(far_part) >> 16);
    }
    far = sum_of_lanes(far_sum);
    square = sum_of_lanes(square_sum);
#endif
    if (i < n) quantize_values<T, CLASS, DELTA, NoRandom>(x + i, m + i, n - i, scale, bits, out, limit, {});
    for (; i < n; i++) {
        const float v = DELTA ? one_value(x + i) - m[i] : one_value(x + i);
        const int32_t y = int32_t(v * inverse + middle), off = ((y < 0 ? 0 : y > top ? top : y) & last) - half;
        far += uint64_t(off < 0 ? -off : off);
        square += uint64_t(off * off);
    }
    // A code's own middle is half / 2 from that of the two.
    squares[0] += square - uint64_t(half) * far + uint64_t(n) * uint64_t(half / 2) * uint64_t(half / 2);
    squares[1] += square;
}

template <class T, bool DELTA>
static void fit_bits(const QuantizeArgs& a, const Layout::Unit& u, float scale, const uint8_t* limit, uint64_t* squares) {
    const T* x = unit_values<T>(a, u);
    const float* m = unit_message(a, u);
    uint8_t* out = a.codes + u.byte;
    if (a.bits <= 4) return fit_values<T, CLASS_OF(4), DELTA>(x, m, u.n, scale, a.bits, out, limit, squares);
    if (a.bits < 8) return fit_values<T, CLASS_OF(7), DELTA>(x, m, u.n, scale, a.bits, out, limit, squares);
    fit_values<T, 8, DELTA>(x, m, u.n, scale, a.bits, out, limit, squares);
}

static uint32_t measure_norm(const QuantizeArgs& a, const Layout::Unit& u, double* norm) {
#define CALL(T)                                                                                     \
    return a.m ? measure_norm_values<T, true>(unit_values<T>(a, u), unit_message(a, u), u.n, norm) \
               : measure_norm_values<T, false>(unit_values<T>(a, u), nullptr, u.n, norm)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static void fit(const QuantizeArgs& a, const Layout::Unit& u, float scale, const uint8_t* limit, uint64_t* squares) {
#define CALL(T)                                                            \
    if (a.m) return fit_bits<T, true>(a, u, scale, limit, squares); \
    return fit_bits<T, false>(a, u, scale, limit, squares)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}
