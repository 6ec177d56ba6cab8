// Scales of channels, and quantized rows with an unbiased gain: see reference/channels.py and unbiased_scales of
// reference/rows.py. Included once per instruction set. Rows over their channels' scales are computed once, into a
// buffer that stays in the L1 cache.

constexpr uint32_t SAFE_BITS = 0x69000000u;  // 2**83

typedef double D8 __attribute__((vector_size(64)));

// Adds the squares of n values to sums, and prefetches those `next_x` and `next_m` values later.
template <class T, bool DELTA>
static void add_squares_of(const T* x, const float* m, int64_t n, int64_t next_x, int64_t next_m, double* sums) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __builtin_prefetch(x + next_x + i);
        if (DELTA) __builtin_prefetch(m + next_m + i);
        for (int64_t at = i; at < i + 16; at += 8) {
            const D8 wide = __builtin_convertvector((load_values<T, DELTA>(x + at, m + at)), D8);
            storeu(sums + at, loadu<D8>(sums + at) + wide * wide);
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
    U8 most[4] = {};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; j++) {
            const int64_t at = i + 8 * j;
            const F8 v = load_values<T, DELTA>(x + at, m + at);
            const F8 y = CHANNELS ? v * loadu<F8>(inverse + at) : v;
            storeu(z + at, y);
            const U8 size = U8(y) & magnitude;
            most[j] = size > most[j] ? size : most[j];
        }
    for (; i < n; i += 8) {
        const int64_t left = n - i < 8 ? n - i : 8;
        const F8 v = load_some_values<T, DELTA>(x + i, m + i, left);
        const F8 y = CHANNELS ? v * load_some(inverse + i, left) : v;
        store_some(z + i, y, left);
        const U8 size = U8(y) & magnitude;
        most[0] = size > most[0] ? size : most[0];
    }
    for (int j = 1; j < 4; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
    const uint32_t largest = reduce_max(most[0]);
    // Scales of channels are at most 2**16: a value above 2**100 is above 2**83 over its scale.
    if (!CHANNELS || largest <= SAFE_BITS) return largest;
    const uint32_t own = measure_values<T, DELTA>(x, m, n);
    return own > SCALE_MAX_BITS ? own : largest;
}

static void add_squares(const QuantizeArgs& a, int64_t row, int64_t stride, int64_t begin, int64_t end, double* sums) {
    const Layout::Unit u{row, row, begin, end - begin, end - begin, 0};
    const int64_t x = stride * a.x_stride, m = stride * a.m_stride;
#define CALL(T)                                                                                                \
    return a.m ? add_squares_of<T, true>(unit_values<T>(a, u), unit_message(a, u), u.n, x, m, sums) \
               : add_squares_of<T, false>(unit_values<T>(a, u), nullptr, u.n, x, 0, sums)
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

// Writes the codes of z, n values of a unit. Returns sum_along of them, if UNBIASED. The next row's values are prefetched.
template <int CLASS, bool UNBIASED>
static int64_t code_values(const float* z, int64_t n, float scale, int bits, uint8_t* out, const uint8_t* limit,
                           const char* next_x, int64_t next_bytes, const float* next_m) {
    const float half = float(1 << (bits - 1));
    const F8 inverse = splat(1.0f / scale * half), step = splat(half), top = splat(2.0f * half - 1.0f);
    const F8 middle = splat(0.5f - half), unit = splat(bits_float(uint32_t(127 + 16 - 2 * bits) << 23));
    const Packer packer = Packer::make(bits);
    int64_t total = 0, i = 0;
    I8 sums = {};  // of at most 512 values, each below 2**25
    const auto flush = [&] {
        for (int j = 0; j < 8; j++) total += sums[j];
        sums = I8{};
    };
    const auto code = [&](F8 v) {
        const F8 q = v * inverse;
        const I8 c = to_int(minimum(maximum(q + step, splat(0.0f)), top));
        if (UNBIASED) sums += round_to_int(q * ((to_float(c) + middle) * unit));
        return c;
    };
    for (; i + 32 <= n; out += 4 * bits) {
        I8 c[4];
        for (int j = 0; j < 4; j++) c[j] = code(loadu<F8>(z + i + 8 * j));
        for (int64_t line = 0; line < 4 * next_bytes; line += 64) __builtin_prefetch(next_x + i * next_bytes / 8 + line);
        if (next_m) __builtin_prefetch(next_m + i);
        if (next_m) __builtin_prefetch(next_m + i + 16);
        Packer::put<CLASS>(packer, c, out, limit);
        i += 32;
        if (UNBIASED && i % 512 == 0) flush();
    }
    if (i < n) {
        const int64_t rest = n - i;
        I8 c[4] = {};
        for (int64_t j = 0; 8 * j < rest; j++) {
            const int64_t at = i + 8 * j, left = n - at < 8 ? n - at : 8;
            c[j] = zero_from(code(load_some(z + at, left)), left);
        }
        uint8_t part[64];
        Packer::put<CLASS>(packer, c, part, part + sizeof part);
        __builtin_memcpy(out, part, size_t((rest * bits + 7) / 8));
    }
    if (UNBIASED) flush();
    return total;
}

// Writes the codes of a unit from z. Returns sum_along of them, if the gain is unbiased.
static int64_t quantize_normalized(const QuantizeArgs& a, const Layout::Unit& u, const float* z, float scale,
                                   const uint8_t* limit) {
    uint8_t* out = a.codes + u.byte;
    const int64_t size = a.dtype == FLOAT32 ? 4 : 2;
    const char* x = static_cast<const char*>(a.x) + ((u.row + 1) * a.x_stride + u.column) * size;
    const float* m = a.m ? a.m + (u.row + 1) * a.m_stride + u.column : nullptr;
#define CALL(CLASS)                                                                          \
    return a.unbiased ? code_values<CLASS, true>(z, u.n, scale, a.bits, out, limit, x, 8 * size, m) \
                      : code_values<CLASS, false>(z, u.n, scale, a.bits, out, limit, x, 8 * size, m)
    if (a.bits <= 4) CALL(CLASS_OF(4));
    if (a.bits < 8) CALL(CLASS_OF(7));
    CALL(8);
#undef CALL
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
