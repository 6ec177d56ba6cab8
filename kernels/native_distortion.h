// What quantizing leaves out of a row, in the order of additions that distortion.py defines. Included once per instruction
// set.

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
static float left_out_values(const T* x, const float* m, int64_t n, float scale, int bits, float* y) {
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
static float left_out_rounded(const QuantizeArgs& a, const Layout::Unit& u, float scale, float* y) {
    const T* x = unit_values<T>(a, u);
    const float* m = unit_message(a, u);
    return a.stochastic ? left_out_values<T, DELTA, true>(x, m, u.n, scale, a.bits, y)
                        : left_out_values<T, DELTA, false>(x, m, u.n, scale, a.bits, y);
}

// Squared norm of a unit's values; y: room for as many floats.
static float squared_norm(const QuantizeArgs& a, const Layout::Unit& u, float* y) {
#define CALL(T) return squared_norm_values<T>(unit_values<T>(a, u), u.n, y)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

// Squared norm of what quantizing a unit leaves out, in steps.
static float left_out(const QuantizeArgs& a, const Layout::Unit& u, float scale, float* y) {
#define CALL(T)                                                   \
    return a.m ? left_out_rounded<T, true>(a, u, scale, y) \
               : left_out_rounded<T, false>(a, u, scale, y)
    BY_DTYPE(a.dtype, CALL)
#undef CALL
}

static double sum_of_groups(double* y, int64_t n) { return halved_sum(y, n); }
