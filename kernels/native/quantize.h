// The quantizer Q_b for one unit (a group, or a piece of one). Included once per instruction set. Powers of two are
// folded into constants. That changes no rounding, because scales are normal numbers from 2**-100 to 2**100.

template <class T>
INLINE const T* unit_values(const QuantizeArgs& a, const Layout::Unit& u) {
    return static_cast<const T*>(a.x) + u.row * a.x_stride + u.column;
}

INLINE const float* unit_message(const QuantizeArgs& a, const Layout::Unit& u) {
    return a.m ? a.m + u.row * a.m_stride + u.column : nullptr;
}

template <class T, bool DELTA>
INLINE F8 load_values(const T* x, const float* m) {
    return DELTA ? load8(x) - load8(m) : load8(x);
}

template <class T, bool DELTA>
INLINE F8 load_some_values(const T* x, const float* m, int64_t n) {
    return DELTA ? load_some(x, n) - load_some(m, n) : load_some(x, n);
}

// The largest |value| as a bit pattern; Inf and NaN compare above every finite number.
template <class T, bool DELTA>
static uint32_t measure_values(const T* x, const float* m, int64_t n) {
    const U8 magnitude = splat(0x7FFFFFFFu);
    U8 most[4] = {};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; j++) {
            U8 v = U8(load_values<T, DELTA>(x + i + 8 * j, m + i + 8 * j)) & magnitude;
            most[j] = v > most[j] ? v : most[j];
        }
    for (; i < n; i += 8) {
        int64_t left = n - i < 8 ? n - i : 8;
        U8 v = U8(load_some_values<T, DELTA>(x + i, m + i, left)) & magnitude;
        most[0] = v > most[0] ? v : most[0];
    }
    for (int j = 1; j < 4; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
    return reduce_max(most[0]);
}

// Sum of squares relative to the largest value, in units of 2**-30: integers, so that the order does not matter.
template <class T, bool DELTA>
static int64_t sum_values(const T* x, const float* m, int64_t n, float inverse) {
    typedef int64_t L4 __attribute__((vector_size(32)));
    const F8 inv = splat(inverse), unit = splat(0x1p30f);
    L4 total = {};
    const auto square = [&](F8 v) {
        const F8 t = v * inv;
        return U8(round_to_int(t * t * unit));
    };
    const auto add = [&](U8 whole) {
        total += (L4(whole) & 0xFFFFFFFFll) + (L4(whole) >> 32 & 0xFFFFFFFFll);
    };
    int64_t i = 0;
    // A square is at most 2**30, and rounding of 1 / largest adds little: a lane takes three of them.
    for (; i + 24 <= n; i += 24)
        add(square(load_values<T, DELTA>(x + i, m + i)) + square(load_values<T, DELTA>(x + i + 8, m + i + 8)) +
            square(load_values<T, DELTA>(x + i + 16, m + i + 16)));
    for (; i < n; i += 8) add(square(load_some_values<T, DELTA>(x + i, m + i, n - i < 8 ? n - i : 8)));
    return total[0] + total[1] + total[2] + total[3];
}

// Constants of one group. CLASS: the largest number of bits that the code supports (3, 4, 7 or 8; packing has no 3).
template <bool STOCHASTIC>
struct Coder {
    F8 inverse, step, top, offset, low, high, scale, table;

    INLINE Coder make(float scale, int bits) {
        const float top = float((1 << bits) - 1), half = float(1 << (bits - 1));
        const float inverse = 1.0f / scale;
        Coder c;
        c.top = splat(top);
        if (STOCHASTIC) {
            c.inverse = splat(inverse);
            c.step = splat(top * 0.5f);
            c.offset = splat(top * -0.5f);
            c.high = splat(constants.high[bits]);
            c.low = splat(constants.low[bits]);
            c.scale = splat(scale);
        } else {
            c.inverse = splat(inverse * half);
            c.step = splat(half);
            c.offset = splat(0.5f - half);
            c.scale = splat(scale / half);
        }
        c.table = loadu<F8>(constants.w[STOCHASTIC][bits]) * splat(scale);
        return c;
    }

    INLINE I8 code(const Coder& c, F8 v, U8 random) {
        F8 steps;
        if (STOCHASTIC) {
            steps = (v * c.inverse + splat(1.0f)) * c.step + uniform(random);
        } else {
            steps = v * c.inverse + c.step;
        }
        return to_int(minimum(maximum(steps, splat(0.0f)), c.top));
    }

    template <int CLASS>
    INLINE F8 decode(const Coder& c, I8 code) {
        if (CLASS == 3) return look_up(c.table, code);
        F8 k = to_float(code) + c.offset;
        if (STOCHASTIC) return (k * c.high + k * c.low) * c.scale;
        return k * c.scale;
    }
};

template <class T, int CLASS, bool DELTA, class R>
static void quantize_values(const T* x, const float* m, int64_t n, float scale, int bits, uint8_t* out,
                            const uint8_t* limit, R random) {
    typedef Coder<R::stochastic> C;
    const C coder = C::make(scale, bits);
    const Packer packer = Packer::make(bits);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32, out += 4 * bits) {
        I8 c[4];
        for (int j = 0; j < 4; j++) {
            F8 v = load_values<T, DELTA>(x + i + 8 * j, m + i + 8 * j);
            c[j] = C::code(coder, v, R::take(random));
        }
        // This group is in the L1 cache; prefetch the next one meanwhile.
        for (int64_t line = 0; line < 32 * int64_t(sizeof(T)); line += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(x + n + i) + line);
        if (DELTA) __builtin_prefetch(m + n + i);
        if (DELTA) __builtin_prefetch(m + n + i + 16);
        Packer::put<CLASS>(packer, c, out, limit);
    }
    if (i == n) return;
    const int64_t rest = n - i;
    I8 c[4] = {};
    for (int64_t j = 0; 8 * j < rest; j++) {
        int64_t at = i + 8 * j, left = n - at < 8 ? n - at : 8;
        F8 v = load_some_values<T, DELTA>(x + at, m + at, left);
        c[j] = zero_from(C::code(coder, v, R::take(random)), left);
    }
    uint8_t part[64];
    Packer::put<CLASS>(packer, c, part, part + sizeof part);
    __builtin_memcpy(out, part, size_t((rest * bits + 7) / 8));
}

// Stochastic rounding across an element index that is a multiple of 2**32: rare, so one value at a time.
template <class T>
static void quantize_across(const T* x, const float* m, int64_t n, float scale, int bits, uint8_t* out, uint64_t seed,
                            uint64_t index) {
    const float inverse = 1.0f / scale, step = float((1 << bits) - 1) * 0.5f;
    uint32_t word = 0;
    int have = 0;
    for (int64_t i = 0; i < n; i++, index++) {
        float v = one_value(x + i);
        if (m) v = v - m[i];
        float r = float(random_bits(make_keys(seed, index >> 32), uint32_t(index)) >> 8) * 0x1p-24f;
        float steps = (v * inverse + 1.0f) * step + r;
        uint32_t c = steps >= 2.0f * step ? uint32_t((1 << bits) - 1) : uint32_t(int32_t(steps));
        word |= c << have;
        for (have += bits; have >= 8; have -= 8, word >>= 8) *out++ = uint8_t(word);
    }
    if (have) *out = uint8_t(word);
}

template <class T, int CLASS, bool DELTA>
static void quantize_class(const QuantizeArgs& a, const Layout& l, const Layout::Unit& u, float scale,
                           const uint8_t* limit) {
    const T* x = unit_values<T>(a, u);
    const float* m = unit_message(a, u);
    uint8_t* out = a.codes + u.byte;
    if (scale == 0.0f) {
        __builtin_memset(out, 0, size_t(l.code_bytes(u.n)));
        return;
    }
    if (a.stochastic) {
        const uint64_t at = uint64_t(u.row * a.H + u.column);
        if (crosses(at, u.n)) return quantize_across<T>(x, m, u.n, scale, a.bits, out, a.seed, at);
        Random r = Random::start(a.seed, at);
        return quantize_values<T, CLASS, DELTA, Random>(x, m, u.n, scale, a.bits, out, limit, r);
    }
    quantize_values<T, CLASS, DELTA, NoRandom>(x, m, u.n, scale, a.bits, out, limit, {});
}

template <class T, bool DELTA>
static void quantize_bits(const QuantizeArgs& a, const Layout& l, const Layout::Unit& u, float scale,
                          const uint8_t* limit) {
    if (a.bits <= 4) return quantize_class<T, CLASS_OF(4), DELTA>(a, l, u, scale, limit);
    if (a.bits < 8) return quantize_class<T, CLASS_OF(7), DELTA>(a, l, u, scale, limit);
    quantize_class<T, 8, DELTA>(a, l, u, scale, limit);
}

#define BY_DTYPE(dtype, CALL)                \
    switch (dtype) {                         \
        case FLOAT16: CALL(Half); break;     \
        case BFLOAT16: CALL(BHalf); break;   \
        default: CALL(float);                \
    }

static uint32_t measure(const QuantizeArgs& a, const Layout::Unit& u) {
#define CALL(T)                                                                          \
    return a.m ? measure_values<T, true>(unit_values<T>(a, u), unit_message(a, u), u.n) \
               : measure_values<T, false>(unit_values<T>(a, u), nullptr, u.n)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static int64_t sum_squares(const QuantizeArgs& a, const Layout::Unit& u, float inverse) {
#define CALL(T)                                                                               \
    return a.m ? sum_values<T, true>(unit_values<T>(a, u), unit_message(a, u), u.n, inverse) \
               : sum_values<T, false>(unit_values<T>(a, u), nullptr, u.n, inverse)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static void quantize(const QuantizeArgs& a, const Layout& l, const Layout::Unit& u, float scale,
                     const uint8_t* limit) {
#define CALL(T)                                                  \
    if (a.m) return quantize_bits<T, true>(a, l, u, scale, limit); \
    return quantize_bits<T, false>(a, l, u, scale, limit)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

// Decodes n codes at `in`; reads no byte at or after limit.
template <int CLASS, bool STOCHASTIC, bool ADD, bool STREAM, bool CHANNELS = false>
static void dequantize_values(const uint8_t* in, const uint8_t* limit, float* out, int64_t n, float scale, int bits,
                              const float* channels = nullptr) {
    typedef Coder<STOCHASTIC> C;
    const C coder = C::make(scale, bits);
    const Unpacker unpacker = Unpacker::make(bits);
    int64_t i = 0;
    for (; i + 8 <= n && limit - in >= Unpacker::READS; i += 8, in += bits) {
        I8 c = CLASS == 3 ? Unpacker::raw(unpacker, in) : Unpacker::get(unpacker, in);
        F8 v = C::template decode<CLASS>(coder, c);
        if (CHANNELS) v = v * load8(channels + i);
        if (ADD) v = load8(out + i) + v;
#if PC_AVX2
        if (STREAM) {
            _mm256_stream_ps(out + i, v);
            continue;
        }
#endif
        storeu(out + i, v);
    }
    for (; i < n; i += 8, in += bits) {
        int64_t left = n - i < 8 ? n - i : 8;
        F8 v = C::template decode<CLASS>(coder, Unpacker::get_some(unpacker, in, (left * bits + 7) / 8));
        if (CHANNELS) v = v * load_some(channels + i, left);
        if (ADD) v = load_some(out + i, left) + v;
        store_some(out + i, v, left);
    }
}

// For scale zero and scales that `quantize` never produces: folding powers of two into these would round differently.
static void dequantize_plainly(const uint8_t* in, const float* w, float* out, int64_t n, float scale, int bits, bool add,
                               const float* channels) {
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i * bits;
        uint32_t word = in[at / 8];
        if (at % 8 + bits > 8) word |= uint32_t(in[at / 8 + 1]) << 8;
        float v = w[word >> (at % 8) & ((1u << bits) - 1)] * scale + 0.0f;
        if (channels) v = v * channels[i];
        out[i] = add ? out[i] + v : v;
    }
}

template <int CLASS>
static void dequantize_class(const DequantizeArgs& a, const uint8_t* in, const uint8_t* limit, float* out, int64_t n,
                             float scale, bool stream, const float* channels) {
    if (channels) {  // nearest rounding
        if (a.add)
            return dequantize_values<CLASS, false, true, false, true>(in, limit, out, n, scale, a.bits, channels);
        if (stream)
            return dequantize_values<CLASS, false, false, true, true>(in, limit, out, n, scale, a.bits, channels);
        return dequantize_values<CLASS, false, false, false, true>(in, limit, out, n, scale, a.bits, channels);
    }
    if (a.stochastic) {
        if (a.add) return dequantize_values<CLASS, true, true, false>(in, limit, out, n, scale, a.bits);
        if (stream) return dequantize_values<CLASS, true, false, true>(in, limit, out, n, scale, a.bits);
        return dequantize_values<CLASS, true, false, false>(in, limit, out, n, scale, a.bits);
    }
    if (a.add) return dequantize_values<CLASS, false, true, false>(in, limit, out, n, scale, a.bits);
    if (stream) return dequantize_values<CLASS, false, false, true>(in, limit, out, n, scale, a.bits);
    dequantize_values<CLASS, false, false, false>(in, limit, out, n, scale, a.bits);
}

static void dequantize(const DequantizeArgs& a, const Layout::Unit& u, const uint8_t* limit, bool stream) {
    const uint8_t* in = a.codes + u.byte;
    float* out = a.out + u.row * a.out_stride + u.column;
    const float scale = get_scale(a.scales, u.id);
    const float* channels = a.channels ? a.channels + u.column : nullptr;
    uint32_t pattern = float_bits(scale);
    if (pattern < SCALE_MIN_BITS || pattern > SCALE_MAX_BITS)
        return dequantize_plainly(in, constants.w[a.stochastic][a.bits], out, u.n, scale, a.bits, a.add,
                                  channels);
    stream = stream && reinterpret_cast<uintptr_t>(out) % 32 == 0;
    if (a.bits <= 3) return dequantize_class<CLASS_OF(3)>(a, in, limit, out, u.n, scale, stream, channels);
    if (a.bits == 4) return dequantize_class<CLASS_OF(4)>(a, in, limit, out, u.n, scale, stream, channels);
    if (a.bits < 8) return dequantize_class<CLASS_OF(7)>(a, in, limit, out, u.n, scale, stream, channels);
    dequantize_class<8>(a, in, limit, out, u.n, scale, stream, channels);
}

template <class T>
static void widen_values(float* out, const T* x, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) storeu(out + i, load8(x + i));
    if (i < n) store_some(out + i, load_some(x + i, n - i), n - i);
}

// Converts n values, at any address, to float32.
static void widen(float* out, const void* x, int dtype, int64_t n) {
#define CALL(T) widen_values(out, static_cast<const T*>(x), n)
    BY_DTYPE(dtype, CALL)
#undef CALL
}
