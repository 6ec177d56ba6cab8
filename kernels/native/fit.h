// Search for the fewest bits that keep an error, in the same pass as the encoding. Errors are known within bounds, which
// mostly decide; where they do not, the caller measures exactly. So the bits always equal those of ops.fewest_bits, and
// only the time differs. Then every m takes its decoded values, as in quantize_call.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "shared.h"
#include "calls.h"
#include "parallel.h"

namespace pipecomp {

constexpr double ROUNDING = 1e-4;  // bound on relative rounding errors of float32 sums of squares, here and elsewhere
constexpr int FIRST_TRY = 4;       // as in reference/batches.py
constexpr int64_t SAMPLE_ROWS = 16;
constexpr int MAX_TRIES = 3;

// Squared errors of the measured rows, in squared units of x.
struct ErrorSums {
    double norm = 0;            // squared, of x
    double steps = 0;           // sum of squared steps: each squared error is at most a quarter of its squared step
    double error = 0;           // squared, with these bits; see `uncertainty`
    double error_below = 0;     // squared, with one bit less
    bool bad = false;           // whether a row cannot be quantized

    // Bound on the error of `error` or `error_below`: each value counts rounded down to a unit of 2**-fine_bits steps.
    double uncertainty(double squares, int bits) const {
        const double step = std::ldexp(1.0, -fine_bits(bits));
        return 2 * step * std::sqrt(steps * squares) + step * step * steps + ROUNDING * squares;
    }
    void operator+=(const ErrorSums& o) {
        norm += o.norm, steps += o.steps, error += o.error, error_below += o.error_below, bad = bad || o.bad;
    }
};

// The search for samples that are sent together: the squared error is at most `share` of the squared norm, the bits `low`
// to `high`. payload: room for the parts of all, one after the other, with the most bits; or null.
struct BitSearch {
    const QuantizeArgs* const samples;
    const int64_t count, values;
    const double share;
    const int low, high;
    uint8_t* const payload;
    const int isa, threads;
    const Table& t = table_of(isa);
    int64_t rows = 0;

    // Returns the fewest bits, with their codes and scales in the payload; 0 if uncertain. No m is changed.
    int bits() {
        for (int64_t i = 0; i < count; i++) {
            const QuantizeArgs& a = samples[i];
            if (a.rms || a.stochastic || a.inverse || a.group > FIT_VALUES) return 0;
            rows += a.rows;
        }
        const int first = std::min(std::max(FIRST_TRY, low), high);
        const ErrorSums sample = measure_rows(first, std::max<int64_t>(1, rows / SAMPLE_ROWS));
        int bits = extrapolate(first, sample);
        for (int i = 0; i < MAX_TRIES; i++) {
            const ErrorSums all = measure_rows(bits, 1);
            // In this range no float32 square or sum overflows, and underflow does not matter.
            if (all.bad || !(all.norm > 0x1p-60 && all.norm < 0x1p100)) return 0;
            const int next = extrapolate(bits, all);
            if (next == bits) return is_fewest(bits, first, all) ? bits : 0;
            bits = next;
        }
        return 0;
    }

    // Estimates the fewest bits, if one bit less makes the squared error four times as large.
    int extrapolate(int bits, const ErrorSums& o) const {
        const double most = share * o.norm;
        double error = o.error;
        if (error <= most)
            for (error = o.error_below; bits > low && error <= most; error *= 4) bits--;
        else
            for (; bits < high && error > most; error /= 4) bits++;
        return bits;
    }

    // Whether ops.fewest_bits certainly returns these bits. It starts at `first` bits and goes up until the bits suffice,
    // or down as long as they do; so the bits on its way have to be checked.
    bool is_fewest(int bits, int first, const ErrorSums& all) const {
        const double most = share * all.norm * (1 - ROUNDING), least = share * all.norm * (1 + ROUNDING);
        // With more bits each squared error is at most a quarter of their step's square.
        if (bits < high && (all.error + all.uncertainty(all.error, bits) > most || all.steps / 16 > most)) return false;
        if (bits > low && all.error_below - all.uncertainty(all.error_below, bits) <= least) return false;
        if (bits == first && 4 * (all.error - all.uncertainty(all.error, bits)) > least) return true;
        double error = all.error_below;
        for (int b = bits - 2; b >= (bits > first ? first : low); b--) {
            error *= 4;  // a rough estimate of the number of rows with enough error
            const int64_t stride = std::max<int64_t>(1, int64_t(std::min(0.8 * error / least, double(rows))));
            const ErrorSums some = measure_rows(b, stride, true);
            if (some.error - some.uncertainty(some.error, b) <= least) return false;
        }
        return true;
    }

    // Moves every m by the decoded values of its codes in the payload, or sets it to them.
    void update(int bits) const {
        uint8_t* at = payload;
        for (int64_t i = 0; i < count; i++) {
            const DequantizeArgs moved = update_of(placed(samples[i], bits, at));
            if (moved.out) dequantize_call(moved, isa, threads);
        }
    }

    // Places a sample's scales and codes, with these bits, at `at`, and advances it; unless it is null.
    static QuantizeArgs placed(QuantizeArgs a, int bits, uint8_t*& at) {
        const Layout l(a.H, a.group, bits);
        a.bits = bits;
        if (!at) return a;
        a.scales = reinterpret_cast<float*>(at);
        a.codes = at + 4 * a.rows * l.groups;
        at = a.codes + a.rows * l.row_bytes;
        return a;
    }

    // Measures every `stride`th row. Writes codes into the payload if that is every row and not `only` measuring.
    ErrorSums measure_rows(int bits, int64_t stride, bool only = false) const {
        std::vector<ErrorSums> found(size_t(std::max(threads, 1)));
        run_threads(useful_threads(threads, values / stride), [&](int thread, int parts, Barrier&) {
            const Range part((rows + stride - 1) / stride, 1, thread, parts);
            uint8_t* at = stride == 1 && !only ? payload : nullptr;
            int64_t first = 0;
            for (int64_t i = 0; i < count; first += samples[i++].rows) {
                const QuantizeArgs a = placed(samples[i], bits, at);
                const int64_t begin = std::max(part.begin, (first + stride - 1) / stride) * stride - first;
                const int64_t end = std::min(part.end * stride - first, a.rows);
                if (begin < end) found[size_t(thread)] += rows_of(a, begin, end, stride, at != nullptr);
            }
        });
        for (size_t i = 1; i < found.size(); i++) found[0] += found[i];
        return found[0];
    }

    // keep: whether codes and scales are written.
    ErrorSums rows_of(QuantizeArgs a, int64_t begin, int64_t end, int64_t stride, bool keep) const {
        const int bits = a.bits;
        const Layout l(a.H, a.group, bits);
        std::vector<uint8_t> scratch(keep ? 0 : size_t(l.group_bytes + 64));
        if (!keep) a.codes = scratch.data();
        const uint8_t* const limit = keep ? a.codes + end * l.row_bytes : a.codes + scratch.size();
        const double unit = std::ldexp(1.0, -2 * fine_bits(bits)), step = 2.0 / double(1 << bits);
        ErrorSums found;
        for (int64_t row = begin; row < end; row += stride)
            for (int64_t g = 0; g < l.groups; g++) {
                Layout::Unit u = l.at(row * l.groups + g);
                if (!keep) u.byte = 0;
                const uint32_t most = t.measure_norm(a, u, &found.norm);
                found.bad = found.bad || most > SCALE_MAX_BITS;
                const float scale = most < SCALE_MIN_BITS ? 0.0f : bits_float(most);
                if (keep) put_scale(a.scales, u.id, scale);
                if (scale == 0 || found.bad) {
                    std::memset(a.codes + u.byte, 0, size_t(l.code_bytes(u.n)));
                    continue;
                }
                uint64_t squares[2] = {};
                t.fit(a, u, scale, limit, squares);
                const double width = double(scale) * step, square = width * width;
                found.steps += square * double(u.n);
                found.error += square * unit * double(squares[0]);
                found.error_below += square * unit * double(squares[1]);
            }
        return found;
    }
};

}  // namespace pipecomp
