// CASQ's sketches of flat buckets, as in reference/gradients.py. Included once per instruction set. Functions work on
// values [begin, end), begin a multiple of SKETCH_BLOCK.

// Cluster numbers: the number of boundaries at or below a value.
struct Nearest {
    const float* bounds;
    int count;
    float sorted[256];

    Nearest(const float* bounds_, int count_) : bounds(bounds_), count(count_) {
        for (int k = 0; k < 256; k++) sorted[k] = k < count ? bounds[k] : __builtin_inff();
    }

    __attribute__((always_inline)) I8 operator()(F8 v, int64_t, U8) const {
        if (count <= 16) {
            I8 at = splat(int32_t(count));
            for (int k = 0; k < count; k++) at += splat(bounds[k]) > v;  // -1 where true
            return at;
        }
        I8 low = {};
        for (int step = 128; step; step /= 2) {
            I8 below = ~(gather(sorted, low + splat(int32_t(step - 1))) > v);
            low += below & splat(int32_t(step));
        }
        return minimum(low, splat(int32_t(count)));
    }
};

// The slot of each value: a hash selects one of its cluster's.
struct Slots {
    const SketchArgs& a;
    Random random;
    F8 size[2], first[2];  // of the first 16 clusters: gathering from memory takes four times as long

    Slots(const SketchArgs& a_, int64_t begin) : a(a_), random(Random::start(a_.seed, uint64_t(begin))) {
        for (int half = 0; half < 2; half++) {
            const int64_t n = a.clusters - 8 * half < 8 ? a.clusters - 8 * half : 8;
            size[half] = n > 0 ? load_some(a.size + 8 * half, n) : F8{};
            first[half] = n > 0 ? load_some(reinterpret_cast<const float*>(a.first) + 8 * half, n) : F8{};
        }
    }

    INLINE F8 of_16(const F8* table, I8 index) {
        return index > splat(7) ? look_up(table[1], index) : look_up(table[0], index);
    }

    __attribute__((always_inline)) I8 next(I8 cluster) {
        const F8 u = uniform(Random::take(random));
        const bool few = a.clusters <= 16;
        I8 inside = to_int((few ? of_16(size, cluster) : gather(a.size, cluster)) * u);
        if (a.rounds) inside = minimum(inside, gather(a.last, cluster));
        return inside + (few ? I8(of_16(first, cluster)) : gather(a.first, cluster));
    }
};

// Computes packed cluster numbers, and slots, which `out` holds until sketch_residual.
static void sketch_slots(const SketchArgs& a, int64_t begin, int64_t end) {
    const Nearest nearest(a.bounds, a.clusters - 1);
    Slots slots_of(a, begin);
    int32_t* const slots = reinterpret_cast<int32_t*>(a.out);
    auto code = [&](F8 v, int64_t at, U8) __attribute__((always_inline)) {
        I8 cluster = nearest(v, at, U8{});
        I8 slot = slots_of.next(cluster);
        const int64_t n = end - at < 8 ? end - at : 8;
        __builtin_memcpy(slots + at, &slot, n == 8 ? 32 : size_t(n) * 4);
        return cluster;
    };
    if (a.bits <= 4) return encode<float, CLASS_OF(4)>(code, a.x, a.codes, a.bits, begin, end, NoRandom{});
    if (a.bits < 8) return encode<float, CLASS_OF(7)>(code, a.x, a.codes, a.bits, begin, end, NoRandom{});
    encode<float, 8>(code, a.x, a.codes, a.bits, begin, end, NoRandom{});
}

// Sets out to x minus the slot's mean.
static void sketch_residual(const SketchArgs& a, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) storeu(a.out + i, load8(a.x + i) - gather(a.means, loadu<I8>(a.out + i)));
    for (; i < end; i++) {
        int32_t slot;
        __builtin_memcpy(&slot, a.out + i, 4);
        a.out[i] = a.x[i] - a.means[slot];
    }
}

template <bool ADD>
static void sketch_decode_values(const SketchArgs& a, int64_t begin, int64_t end) {
    const Unpacker u = Unpacker::make(a.bits);
    Slots slots(a, begin);
    const uint8_t* in = a.codes + begin / 8 * a.bits;
    const uint8_t* limit = a.codes + (a.d * a.bits + 7) / 8;
    const F8 divisor = splat(a.divisor);
    auto value = [&](I8 cluster, F8 before) __attribute__((always_inline)) {
        return (before + gather(a.means, slots.next(cluster))) / divisor;
    };
    int64_t i = begin;
    for (; i + 8 <= end && limit - in >= Unpacker::READS; i += 8, in += a.bits)
        storeu(a.out + i, value(Unpacker::get(u, in), ADD ? load8(a.out + i) : F8{}));
    for (; i < end; i += 8, in += a.bits) {
        const int64_t left = end - i < 8 ? end - i : 8;
        I8 cluster = Unpacker::get_some(u, in, (left * a.bits + 7) / 8);
        store_some(a.out + i, value(cluster, ADD ? load_some(a.out + i, left) : F8{}), left);
    }
}

static void sketch_decode(const SketchArgs& a, int64_t begin, int64_t end) {
    if (a.add) return sketch_decode_values<true>(a, begin, end);
    sketch_decode_values<false>(a, begin, end);
}
