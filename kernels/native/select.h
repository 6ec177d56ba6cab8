// Bit streams of small integers, the largest magnitudes of a group, and cluster assignment. Included once per
// instruction set.

template <class T>
static void pack_values(uint8_t* out, const T* values, int64_t n, int bits) {
    const uint32_t mask = (1u << bits) - 1;
    int64_t i = 0;
    if (bits <= 8) {
        const Packer packer = Packer::make(bits);
        const uint8_t* limit = out + (n * bits + 7) / 8;
        for (; i + 32 <= n; i += 32, out += 4 * bits) {
            typedef T V __attribute__((vector_size(8 * sizeof(T))));
            I8 c[4];
            for (int j = 0; j < 4; j++)
                c[j] = I8(__builtin_convertvector(loadu<V>(values + i + 8 * j), U8) & splat(mask));
            if (bits <= 4) Packer::put<CLASS_OF(4)>(packer, c, out, limit);
            else if (bits < 8) Packer::put<CLASS_OF(7)>(packer, c, out, limit);
            else Packer::put<8>(packer, c, out, limit);
        }
    }
    if (bits > 8 && bits <= 16) {
        typedef T V __attribute__((vector_size(8 * sizeof(T))));
        const uint8_t* limit = out + (n * bits + 7) / 8;
        for (; i + 8 <= n; i += 8, out += bits)
            put_wide(I8(__builtin_convertvector(loadu<V>(values + i), U8) & splat(mask)), bits, out, limit);
    }
    uint64_t word = 0;
    int have = 0;
    for (; i < n; i++) {
        word |= uint64_t(uint32_t(values[i]) & mask) << have;
        for (have += bits; have >= 8; have -= 8, word >>= 8) *out++ = uint8_t(word);
    }
    if (have) *out = uint8_t(word);
}

static void pack(uint8_t* out, const void* values, int value_bytes, int64_t n, int bits) {
    switch (value_bytes) {
        case 1: return pack_values(out, static_cast<const uint8_t*>(values), n, bits);
        case 2: return pack_values(out, static_cast<const uint16_t*>(values), n, bits);
        case 4: return pack_values(out, static_cast<const uint32_t*>(values), n, bits);
        default: return pack_values(out, static_cast<const uint64_t*>(values), n, bits);
    }
}

static void unpack(int32_t* out, const uint8_t* codes, int64_t n, int bits) {
    int64_t i = 0;
    if (bits <= 16) {
        const Unpacker u = Unpacker::make(bits);
        const uint8_t* limit = codes + (n * bits + 7) / 8;
        for (; i + 8 <= n && limit - codes >= Unpacker::READS; i += 8, codes += bits) storeu(out + i, Unpacker::get(u, codes));
    }
    const uint32_t mask = (1u << bits) - 1;
    uint64_t word = 0;
    int have = 0;
    for (; i < n; i++) {
        for (; have < bits; have += 8) word |= uint64_t(*codes++) << have;
        out[i] = int32_t(uint32_t(word) & mask);
        word >>= bits;
        have -= bits;
    }
}

template <class T>
INLINE I8 magnitudes(const T* x, int64_t n) {
    F8 v = n >= 8 ? load8(x) : load_some(x, n);
    return I8(v) & splat(0x7FFFFFFF);
}

// Search for the k-th largest magnitude as a bit pattern: it is in [low, high], and `above` magnitudes are above high.
struct Search {
    int32_t low = 0, high = 0x7FFFFFFF;
    int64_t above = 0;

    // Narrows the range to `width`, to a quarter at each step; starts around the magnitude `guess`.
    template <class T>
    void narrow(const T* x, int64_t n, int64_t k, int32_t width, int32_t guess) {
        for (int64_t middle = guess, step = 2 << 23; high - low > width;) {
            int32_t pivots[3];
            I8 below[3] = {};
            for (int p = 0; p < 3; p++) {
                const int64_t at = middle + (p - 1) * step;
                pivots[p] = at > high ? high : at > low ? int32_t(at) : low + 1;
            }
            int64_t i = 0;
            for (; i + 8 <= n; i += 8) {
                I8 v = magnitudes(x + i, 8);
                for (int p = 0; p < 3; p++) below[p] += splat(pivots[p]) > v;  // -1 where true
            }
            int32_t narrowed = high;
            for (int p = 2; p >= 0; p--) {
                int64_t reach = n + reduce_add(below[p]);
                for (int64_t j = i; j < n; j++) reach -= magnitudes(x + j, 1)[0] < pivots[p];
                if (reach >= k) {
                    low = pivots[p];
                    break;
                }
                narrowed = pivots[p] - 1;
                above = reach;
            }
            high = narrowed;
            step = (int64_t(high) - low) / 4 + 1;
            middle = low + 2 * step;
        }
    }
};

// Keeps the k largest magnitudes, of equal ones the first. `first`: position of the group in its row. Counting, eight at
// a time, narrows the range to a few candidates, and then finds the k-th magnitude among them.
template <class T>
static void select_values(float* values, int32_t* index, const T* x, int64_t n, int64_t k, int32_t first,
                          uint32_t* candidates) {
    Search all, some;
    const uint32_t guess = reduce_max(U8(magnitudes(x, n)));
    all.narrow(x, n, k, 1 << 20, int32_t(guess));
    int64_t size = 0, i = 0;
    for (; i + 8 <= n; i += 8) {
        I8 v = magnitudes(x + i, 8);
        size += put_chosen(candidates + size, v, (v >= splat(all.low)) & (v <= splat(all.high)));
    }
    for (; i < n; i++) {
        int32_t v = magnitudes(x + i, 1)[0];
        candidates[size] = uint32_t(v);
        size += v >= all.low && v <= all.high;
    }
    some.low = all.low;
    some.high = all.high;
    some.narrow(reinterpret_cast<const float*>(candidates), size, k - all.above, 0, all.low + (all.high - all.low) / 2);
    const int32_t threshold = some.low;
    int64_t equal = k - all.above - some.above, same = 0;  // number of kept magnitudes at the threshold, and of all
    for (int64_t c = 0; c < size; c++) same += candidates[c] == uint32_t(threshold);
    int64_t kept = 0;
    i = 0;
    if (same == equal)
        for (; i + 8 <= n && kept + 8 <= k; i += 8) {
            F8 v = load8(x + i);
            I8 chosen = (I8(v) & splat(0x7FFFFFFF)) >= splat(threshold);
            put_chosen(index + kept, lanes() + splat(first + int32_t(i)), chosen);
            kept += put_chosen(values + kept, I8(v), chosen);
        }
    for (; i < n && kept < k; i++) {
        float value = one_value(x + i);
        int32_t v = int32_t(float_bits(value) & 0x7FFFFFFFu);
        values[kept] = value;
        index[kept] = first + int32_t(i);
        bool tie = v == threshold && equal > 0;
        if (same != equal) equal -= tie;
        kept += v > threshold || tie;
    }
}

static void select(float* values, int32_t* index, const void* x, int dtype, int64_t n, int64_t k, int32_t first,
                   uint32_t* scratch) {
#define CALL(T) select_values(values, index, static_cast<const T*>(x), n, k, first, scratch)
    BY_DTYPE(dtype, CALL)
#undef CALL
}

static void kmeans_assign(uint8_t* out, const void* x, int dtype, const float* bounds, int count, int64_t begin,
                          int64_t end) {
    const Nearest nearest(bounds, count);
#define CALL(T) encode<T, 8>(nearest, static_cast<const T*>(x), out, 8, begin, end, NoRandom{})
    BY_DTYPE(dtype, CALL)
#undef CALL
}
