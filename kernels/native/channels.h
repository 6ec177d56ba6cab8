// Scales of channels, and quantized rows with an unbiased gain: see reference/channels.py and unbiased_scales of
// reference/rows.py. Included once per instruction set. Rows over their channels' scales are computed once, into a
// buffer that stays in the L1 cache.

typedef double D4 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));

// Adds the squares of n values to sums.
template <class T, bool DELTA>
static void add_squares_of(const T* x, const float* m, int64_t n, double* sums) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const F8 v = load_values<T, DELTA>(x + i, m + i);
        F4 half[2];
        __builtin_memcpy(half, &v, sizeof v);
        for (int j = 0; j < 2; j++) {
            const D4 wide = __builtin_convertvector(half[j], D4);
            storeu(sums + i + 4 * j, loadu<D4>(sums + i + 4 * j) + wide * wide);
        }
    }
    for (; i < n; i++) {
        const float v = DELTA ? one_value(x + i) - m[i] : one_value(x + i);
        sums[i] += double(v) * double(v);
    }
}

// Sets z to a unit's values over their channels' scales, or to the values if there are none. Returns the largest |z| as a
// bit pattern; the largest |value| if that is above 2**100, NaN or Inf.
template <class T, bool DELTA, bool CHANNELS>
static uint32_t normalize_values(const T* x, const float* m, const float* inverse, int64_t n, float* z) {
    const U8 magnitude = splat(0x7FFFFFFFu);
    U8 most[2] = {}, top[2] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 2; j++) {
            const int64_t at = i + 8 * j;
            const F8 v = load_values<T, DELTA>(x + at, m + at);
            const F8 y = CHANNELS ? v * loadu<F8>(inverse + at) : v;
            storeu(z + at, y);
            const U8 size = U8(y) & magnitude;
            most[j] = size > most[j] ? size : most[j];
            if (CHANNELS) {
                const U8 own = U8(v) & magnitude;
                top[j] = own > top[j] ? own : top[j];
            }
        }
    for (; i < n; i += 8) {
        const int64_t left = n - i < 8 ? n - i : 8;
        const F8 v = load_some_values<T, DELTA>(x + i, m + i, left);
        const F8 y = CHANNELS ? v * load_some(inverse + i, left) : v;
        store_some(z + i, y, left);
        const U8 size = U8(y) & magnitude, own = U8(v) & magnitude;
        most[0] = size > most[0] ? size : most[0];
        if (CHANNELS) top[0] = own > top[0] ? own : top[0];
    }
    most[0] = most[1] > most[0] ? most[1] : most[0];
    if (CHANNELS) {
        const uint32_t largest = reduce_max(top[1] > top[0] ? top[1] : top[0]);
        if (largest > SCALE_MAX_BITS) return largest;
    }
    return reduce_max(most[0]);
}

static void add_squares(const QuantizeArgs& a, int64_t row, int64_t begin, int64_t end, double* sums) {
    const Layout::Unit u{row, row, begin, end - begin, end - begin, 0};
#define CALL(T)                                                                                          \
    return a.m ? add_squares_of<T, true>(unit_values<T>(a, u), unit_message(a, u), u.n, sums) \
               : add_squares_of<T, false>(unit_values<T>(a, u), nullptr, u.n, sums)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static uint32_t normalize(const QuantizeArgs& a, const Layout::Unit& u, float* z) {
#define CALL(T)                                                                                                         \
    {                                                                                                                   \
        const T* x = unit_values<T>(a, u);                                                                              \
        const float* m = unit_message(a, u);                                                                            \
        if (!a.inverse) return m ? normalize_values<T, true, false>(x, m, nullptr, u.n, z)                              \
                                 : normalize_values<T, false, false>(x, m, nullptr, u.n, z);                            \
        return m ? normalize_values<T, true, true>(x, m, a.inverse + u.column, u.n, z)                                  \
                 : normalize_values<T, false, true>(x, m, a.inverse + u.column, u.n, z);                                \
    }
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

// Sum of z / scale times the values that its codes decode to at scale 1, in units of 2**-14.
static int64_t sum_along(const float* z, int64_t n, float scale, int bits) {
    const float half = float(1 << (bits - 1));
    const F8 inverse = splat(1.0f / scale * half), step = splat(half), top = splat(2.0f * half - 1.0f);
    const F8 middle = splat(0.5f - half), unit = splat(bits_float(uint32_t(127 + 16 - 2 * bits) << 23));
    int64_t total = 0;
    for (int64_t i = 0; i < n;) {
        I8 sums = {};  // of at most 512 values, each below 2**25
        for (const int64_t end = n - i < 512 ? n : i + 512; i < end; i += 8) {
            const F8 v = n - i >= 8 ? loadu<F8>(z + i) : load_some(z + i, n - i);
            const F8 q = v * inverse;
            const F8 code = to_float(to_int(minimum(maximum(q + step, splat(0.0f)), top)));
            sums += round_to_int(q * ((code + middle) * unit));
        }
        for (int j = 0; j < 8; j++) total += sums[j];
    }
    return total;
}

// Sets y to the squares of what a unit's values differ from those that z decodes to. scale: of the codes; sent: of the
// decoded values.
template <class T, bool DELTA>
static void squared_off_values(const T* x, const float* m, const float* channels, const float* z, int64_t n, float scale,
                               float sent, int bits, float* y) {
    const float half = float(1 << (bits - 1)), most = 2.0f * half - 1.0f;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale * half;
    for (int64_t i = 0; i < n; i += 8) {
        const int64_t left = n - i < 8 ? n - i : 8;
        const F8 v = load_some_values<T, DELTA>(x + i, m + i, left);
        const F8 steps = load_some(z + i, left) * splat(inverse) + splat(half);
        const F8 code = to_float(to_int(minimum(maximum(steps, splat(0.0f)), splat(most))));
        F8 decoded = (code + splat(0.5f - half)) * splat(sent / half);
        if (channels) decoded = decoded * load_some(channels + i, left);
        const F8 off = scale == 0.0f ? v : v - decoded;
        store_some(y + i, off * off, left);
    }
}

static void squared_off(const QuantizeArgs& a, const Layout::Unit& u, const float* z, float scale, float sent, float* y) {
    const float* channels = a.channels ? a.channels + u.column : nullptr;
#define CALL(T)                                                                                                        \
    return a.m ? squared_off_values<T, true>(unit_values<T>(a, u), unit_message(a, u), channels, z, u.n, scale, sent, \
                                             a.bits, y)                                                               \
               : squared_off_values<T, false>(unit_values<T>(a, u), nullptr, channels, z, u.n, scale, sent, a.bits, y)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static float sum_of_squares(float* y, int64_t n) { return halved_sum(y, n); }
