// Error feedback, as in reference/gradients.py: quantizing x + e with a residual e, one group at a time. Included once per
// instruction set.

template <class T>
INLINE F8 load_sum(const T* x, const float* e) {
    return load8(x) + load8(e);
}

template <class T>
INLINE F8 load_some_sum(const T* x, const float* e, int64_t n) {
    return load_some(x, n) + load_some(e, n);
}

// The largest |x + e| as a bit pattern, as measure_values.
template <class T>
static uint32_t measure_sum(const T* x, const float* e, int64_t n) {
    const U8 magnitude = splat(0x7FFFFFFFu);
    U8 most[4] = {};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; j++) {
            U8 v = U8(load_sum(x + i + 8 * j, e + i + 8 * j)) & magnitude;
            most[j] = v > most[j] ? v : most[j];
        }
    for (; i < n; i += 8) {
        U8 v = U8(load_some_sum(x + i, e + i, n - i < 8 ? n - i : 8)) & magnitude;
        most[0] = v > most[0] ? v : most[0];
    }
    for (int j = 1; j < 4; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
    return reduce_max(most[0]);
}

// Sum of magnitudes relative to the largest, in units of 2**-30: integers, so that the order does not matter.
template <class T>
static int64_t sum_magnitudes(const T* x, const float* e, int64_t n, float inverse) {
    typedef int64_t L4 __attribute__((vector_size(32)));
    const F8 inv = splat(inverse), unit = splat(0x1p30f), magic = splat(0x1p23f);
    L4 total = {};
    for (int64_t i = 0; i < n; i += 8) {
        F8 v = n - i >= 8 ? load_sum(x + i, e + i) : load_some_sum(x + i, e + i, n - i);
        F8 t = F8(U8(v) & splat(0x7FFFFFFFu)) * inv * unit;
        U8 whole = U8(to_int(t < magic ? (t + magic) - magic : t));  // half to even, as in sum_values
        L4 even = L4(whole) & 0xFFFFFFFFll;
        total += even + (L4(whole) >> 32 & 0xFFFFFFFFll);
    }
    return total[0] + total[1] + total[2] + total[3];
}

template <class T>
static float scale_of_sum(const FeedbackArgs& a, const Layout::Unit& u) {
    const T* x = static_cast<const T*>(a.x) + u.column;
    const float* e = a.e + u.column;
    const uint32_t most = measure_sum(x, e, u.n);
    if (most > SCALE_MAX_BITS) return __builtin_inff();
    float scale = bits_float(most);
    if (a.mean && most >= SCALE_MIN_BITS) {
        double share = double(sum_magnitudes(x, e, u.n, 1.0f / scale)) / (double(u.n) * 0x1p30);
        scale = float(2.0 * double(scale) * share);
    }
    return scale < bits_float(SCALE_MIN_BITS) ? 0.0f : bits_float((float_bits(scale) + 0xFFFFu) & ~0xFFFFu);
}

template <class T, int CLASS>
static void feedback_values(const T* x, float* e, int64_t n, float scale, int bits, uint8_t* out,
                            const uint8_t* limit) {
    typedef Coder<false> C;
    const C coder = C::make(scale, bits);
    const Packer packer = Packer::make(bits);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32, out += 4 * bits) {
        I8 c[4];
        for (int j = 0; j < 4; j++) {
            F8 v = load_sum(x + i + 8 * j, e + i + 8 * j);
            c[j] = C::code(coder, v, U8{});
            storeu(e + i + 8 * j, v - C::template decode<CLASS>(coder, c[j]));
        }
        Packer::put<CLASS>(packer, c, out, limit);
    }
    if (i == n) return;
    const int64_t rest = n - i;
    I8 c[4] = {};
    for (int64_t j = 0; 8 * j < rest; j++) {
        int64_t at = i + 8 * j, left = n - at < 8 ? n - at : 8;
        F8 v = load_some_sum(x + at, e + at, left);
        c[j] = C::code(coder, v, U8{});
        store_some(e + at, v - C::template decode<CLASS>(coder, c[j]), left);
        c[j] = zero_from(c[j], left);
    }
    uint8_t part[64];
    Packer::put<CLASS>(packer, c, part, part + sizeof part);
    __builtin_memcpy(out, part, size_t((rest * bits + 7) / 8));
}

// Computes scale, codes and residual of one group. A group that cannot be quantized keeps its residual; its scale is NaN.
template <class T>
static void feedback_group(const FeedbackArgs& a, const Layout& l, const Layout::Unit& u, const uint8_t* limit) {
    const T* x = static_cast<const T*>(a.x) + u.column;
    float* e = a.e + u.column;
    uint8_t* out = a.codes + u.byte;
    const float scale = scale_of_sum<T>(a, u);
    const bool usable = scale < __builtin_inff();
    a.scales[u.id] = usable ? scale : __builtin_nanf("");
    if (scale == 0.0f || !usable) {
        __builtin_memset(out, 0, size_t(l.code_bytes(u.n)));
        if (usable)
            for (int64_t i = 0; i < u.n; i++) e[i] = one_value(x + i) + e[i];
        return;
    }
    if (a.bits <= 4) return feedback_values<T, CLASS_OF(4)>(x, e, u.n, scale, a.bits, out, limit);
    if (a.bits < 8) return feedback_values<T, CLASS_OF(7)>(x, e, u.n, scale, a.bits, out, limit);
    feedback_values<T, 8>(x, e, u.n, scale, a.bits, out, limit);
}

static void feedback_quantize(const FeedbackArgs& a, const Layout& l, const Layout::Unit& u, const uint8_t* limit) {
#define CALL(T) feedback_group<T>(a, l, u, limit)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

// Sets out to the sum of two workers' values, or adds the sum to it. Two at a time keep sums in registers.
template <int CLASS, bool FIRST>
static void add_two(const uint8_t* in0, const uint8_t* in1, int64_t readable, float scale0, float scale1, float* out,
                    int64_t n, int bits, float factor, float divisor) {
    typedef Coder<false> C;
    const C coder0 = C::make(scale0, bits), coder1 = C::make(scale1, bits);
    const Unpacker u = Unpacker::make(bits);
    auto sum = [&](I8 c0, I8 c1, F8 before) __attribute__((always_inline)) {
        F8 v = C::template decode<CLASS>(coder0, c0);
        if (!FIRST) v = before + v;
        v = v + C::template decode<CLASS>(coder1, c1);
        if (factor != 0) return v * splat(factor);
        return divisor != 0 ? v / splat(divisor) : v;
    };
    int64_t i = 0, at = 0;
    for (; i + 8 <= n && readable - at >= Unpacker::READS; i += 8, at += bits) {
        F8 before = FIRST ? F8{} : load8(out + i);
        storeu(out + i, sum(Unpacker::get(u, in0 + at), Unpacker::get(u, in1 + at), before));
    }
    for (; i < n; i += 8, at += bits) {
        const int64_t left = n - i < 8 ? n - i : 8, bytes = (left * bits + 7) / 8;
        F8 before = FIRST ? F8{} : load_some(out + i, left);
        F8 v = sum(Unpacker::get_some(u, in0 + at, bytes), Unpacker::get_some(u, in1 + at, bytes), before);
        store_some(out + i, v, left);
    }
}

static bool ordinary(float scale) {
    const uint32_t pattern = float_bits(scale);
    return pattern >= SCALE_MIN_BITS && pattern <= SCALE_MAX_BITS;
}

template <int CLASS>
static void mean_of_group(const FeedbackReduceArgs& a, const Layout& l, const Layout::Unit& u, float* out) {
    // Multiplying by 2**-k equals dividing by 2**k in a fraction of the time.
    const bool power = (a.parts & (a.parts - 1)) == 0;
    const float divisor = power ? 0.0f : float(a.parts), factor = power ? 1.0f / float(a.parts) : 0.0f;
    Layout::Unit here = u;
    here.column = 0;
    int p = 0;
    for (; p < a.parts; p++) {
        const float scale = a.in_scales[p][u.id];
        if (p + 1 < a.parts && ordinary(scale) && ordinary(a.in_scales[p + 1][u.id])) {
            const bool last = p + 2 == a.parts;
            const uint8_t *in0 = a.in_codes[p] + u.byte, *in1 = a.in_codes[p + 1] + u.byte;
            (p ? add_two<CLASS, false> : add_two<CLASS, true>)(in0, in1, l.row_bytes - u.byte, scale,
                                                               a.in_scales[p + 1][u.id], out, u.n, a.to.bits,
                                                               last ? factor : 0.0f, last ? divisor : 0.0f);
            if (last) return;
            p++;
            continue;
        }
        const DequantizeArgs one{a.in_codes[p], a.in_scales[p], nullptr, out, a.to.d, 1, a.to.d, a.to.group, 0, a.to.bits, 0, p > 0};
        dequantize(one, here, a.in_codes[p] + l.row_bytes, false);
    }
    for (int64_t i = 0; i < u.n; i++) out[i] = power ? out[i] * factor : out[i] / divisor;
}

// One group at a time keeps the mean in the L1 cache; passes over whole buckets would go to main memory.
static void feedback_reduce(const FeedbackReduceArgs& a, const Layout& l, const Layout::Unit& u, const uint8_t* limit,
                            float* mean) {
    const int bits = a.to.bits;
    (bits <= 3   ? mean_of_group<CLASS_OF(3)>
     : bits == 4 ? mean_of_group<CLASS_OF(4)>
     : bits < 8  ? mean_of_group<CLASS_OF(7)>
                 : mean_of_group<8>)(a, l, u, mean);
    FeedbackArgs to = a.to;
    to.x = mean;
    to.e = a.to.e + u.column;
    Layout::Unit here = u;
    here.column = 0;
    feedback_group<float>(to, l, here, limit);
}
