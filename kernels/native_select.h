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

constexpr int BUCKET_SHIFT = 20;  // 11 bits: exponent and three bits of the mantissa
constexpr int BUCKETS = 1 << 11;

// Keeps the k largest magnitudes, of equal ones those that come first. `first`: position of the group in its row.
// A histogram of the leading bits finds the bucket in which the k-th one lies; only that bucket is ordered.
template <class T>
static void select_values(float* values, int32_t* index, const T* x, int64_t n, int64_t k, int32_t first,
                          uint32_t* candidates) {
    uint32_t count[BUCKETS] = {};
    for (int64_t i = 0; i < n; i++) count[(float_bits(one_value(x + i)) & 0x7FFFFFFFu) >> BUCKET_SHIFT]++;
    int64_t above = 0;
    uint32_t bucket = BUCKETS;
    while (above + count[--bucket] < k) above += count[bucket];
    int64_t size = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t v = float_bits(one_value(x + i)) & 0x7FFFFFFFu;
        candidates[size] = v;
        size += v >> BUCKET_SHIFT == bucket;
    }
    const uint32_t threshold = kth_largest(candidates, size, k - above);
    int64_t equal = k - above;  // how many at the threshold are kept
    for (int64_t i = 0; i < size; i++) equal -= candidates[i] > threshold;
    int64_t kept = 0;
    for (int64_t i = 0; i < n && kept < k; i++) {
        float value = one_value(x + i);
        uint32_t v = float_bits(value) & 0x7FFFFFFFu;
        values[kept] = value;
        index[kept] = first + int32_t(i);
        bool tie = v == threshold && equal > 0;
        equal -= tie;
        kept += v > threshold || tie;
    }
}

static void select(float* values, int32_t* index, const void* x, int dtype, int64_t n, int64_t k, int32_t first,
                   uint32_t* scratch) {
#define CALL(T) select_values(values, index, static_cast<const T*>(x), n, k, first, scratch)
    BY_DTYPE(dtype, CALL)
#undef CALL
}

template <class T>
static void kmeans_values(uint8_t* out, const T* x, const float* bounds, int count, int64_t begin, int64_t end) {
    if (count <= 16) {
        auto below = [bounds, count](F8 v, int64_t, U8) __attribute__((always_inline)) {
            I8 at = splat(int32_t(count));
            for (int k = 0; k < count; k++) at += splat(bounds[k]) > v;  // -1 where true
            return at;
        };
        return encode<T, 8>(below, x, out, 8, begin, end, NoRandom{});
    }
    float sorted[256];
    for (int k = 0; k < 256; k++) sorted[k] = k < count ? bounds[k] : __builtin_inff();
    for (int64_t i = begin; i < end; i++) {
        float v = one_value(x + i);
        int low = 0;
        for (int step = 128; step; step /= 2) low += step & -int(!(sorted[low + step - 1] > v));
        out[i] = uint8_t(low < count ? low : count);
    }
}

static void kmeans_assign(uint8_t* out, const void* x, int dtype, const float* bounds, int count, int64_t begin,
                          int64_t end) {
#define CALL(T) kmeans_values(out, static_cast<const T*>(x), bounds, count, begin, end)
    BY_DTYPE(dtype, CALL)
#undef CALL
}
