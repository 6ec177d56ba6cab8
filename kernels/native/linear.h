// Exact sums of linear codes, and their decoding, as in reference/gradients.py. Included once per instruction set.
// Functions work on values [begin, end) of a flat bucket, begin a multiple of 32.

constexpr int64_t SUMS = 256;  // values summed at a time

// Adds codes to total[0 ... n - 1], or with FIRST sets it. The codes' bytes end at limit.
template <bool FIRST>
INLINE void add_codes(int32_t* total, const Unpacker& u, const uint8_t* in, const uint8_t* limit, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n && limit - in >= Unpacker::READS; i += 8, in += u.bits) {
        I8 c = Unpacker::get(u, in);
        storeu(total + i, FIRST ? c : loadu<I8>(total + i) + c);
    }
    for (; i < n; i += 8, in += u.bits) {
        int64_t left = n - i < 8 ? n - i : 8;
        I8 c = Unpacker::get_some(u, in, (left * u.bits + 7) / 8);
        for (int64_t t = 0; t < left; t++) total[i + t] = FIRST ? c[t] : total[i + t] + c[t];
    }
}

static void linear_reduce(const LinearReduceArgs& a, int64_t begin, int64_t end) {
    const Unpacker u = Unpacker::make(a.bits);
    const int64_t bytes = (a.d * a.bits + 7) / 8;
    int32_t total[SUMS];
    for (int64_t i = begin; i < end; i += SUMS) {
        const int64_t n = end - i < SUMS ? end - i : SUMS, at = i / 8 * a.bits;
        add_codes<true>(total, u, a.codes[0] + at, a.codes[0] + bytes, n);
        for (int p = 1; p < a.parts; p++) add_codes<false>(total, u, a.codes[p] + at, a.codes[p] + bytes, n);
        pack(a.out + i / 8 * a.sum_bits, total, 4, n, a.sum_bits);
    }
}

template <bool INDEXED, bool ADD>
static void linear_decode_values(const LinearDecodeArgs& a, int64_t begin, int64_t end) {
    const I8 offset = splat(a.offset);
    const Choice<INDEXED> factors(a.factors, a.count, a.index);
    const int bits = a.bits;
    const uint8_t* in = a.codes + begin / 8 * bits;
    const uint8_t* limit = a.codes + (a.d * bits + 7) / 8;
    float* const out = a.out;
    auto value = [&](I8 c, int64_t at, int64_t n) __attribute__((always_inline)) {
        return to_float(c - offset) * factors.at(at, n);
    };
    int64_t i = begin;
    if (bits <= 16) {
        const Unpacker u = Unpacker::make(bits);
        for (; i + 8 <= end && limit - in >= Unpacker::READS; i += 8, in += bits)
            put_values<ADD>(out + i, value(Unpacker::get(u, in), i, 8));
    }
    for (; i < end; i += 8, in += bits) {
        const int64_t left = end - i < 8 ? end - i : 8;
        int32_t c[8] = {};
        unpack(c, in, left, bits);
        put_some_values<ADD>(out + i, value(loadu<I8>(c), i, left), left);
    }
}

static void linear_decode(const LinearDecodeArgs& a, int64_t begin, int64_t end) {
    if (a.index && a.add) return linear_decode_values<true, true>(a, begin, end);
    if (a.index) return linear_decode_values<true, false>(a, begin, end);
    if (a.add) return linear_decode_values<false, true>(a, begin, end);
    linear_decode_values<false, false>(a, begin, end);
}
