// The fewest bits that keep an error, found on the way to the codes. What a number of bits leaves out is known within
// bounds, which mostly decide; where they do not, the caller measures exactly. So the bits are always those that
// distortion_ops.py finds, and only the time differs. Then every m takes what its codes say, as in quantize_call.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "shared.h"
#include "calls.h"
#include "parallel.h"

namespace pipecomp {

constexpr double ROUNDING = 1e-4;  // relative: more than all float32 sums of squares are off, here and in distortion.py
constexpr int FIRST_LOOK = 4;      // as in distortion_ops.py
constexpr int64_t SAMPLE_ROWS = 16;
constexpr int MOST_LOOKS = 3;

// What some bits leave out of the rows that were looked at, in the squared units of x.
struct Outcome {
    double norm = 0;           // squared, of x
    double room = 0;           // a step's square, summed over all values: a value leaves out at most a quarter
    double left = 0, less = 0;  // with these bits, and with one less; see `doubt`
    bool bad = false;          // rows that cannot be quantized

    // How far off `left` or `less` may be: each value is at most a step of 2**-fine_bits above what it counts as.
    double doubt(double squares, int bits) const {
        const double step = std::ldexp(1.0, -fine_bits(bits));
        return 2 * step * std::sqrt(room * squares) + step * step * room + ROUNDING * squares;
    }
    void operator+=(const Outcome& o) {
        norm += o.norm, room += o.room, left += o.left, less += o.less, bad = bad || o.bad;
    }
};

// Samples that are sent together, of which at most `share` of the squared norm may be left out, with `low` to `high` bits.
// payload: room for the parts of all, one after the other, with the most bits; or null.
struct Fitting {
    const QuantizeArgs* const samples;
    const int64_t count, values;
    const double share;
    const int low, high;
    uint8_t* const payload;
    const int isa, threads;
    const Table& t = table_of(isa);
    int64_t rows = 0;

    // The fewest bits, whose codes and scales lie in the payload; 0 where that is not certain. No m is changed.
    int bits() {
        for (int64_t i = 0; i < count; i++) {
            const QuantizeArgs& a = samples[i];
            if (a.rms || a.stochastic || a.group > FIT_VALUES) return 0;
            rows += a.rows;
        }
        const int first = std::min(std::max(FIRST_LOOK, low), high);
        const Outcome sample = look(first, std::max<int64_t>(1, rows / SAMPLE_ROWS));
        int bits = likely(first, sample);
        for (int i = 0; i < MOST_LOOKS; i++) {
            const Outcome all = look(bits, 1);
            // Within these no float32 square or sum overflows, and what underflows does not matter.
            if (all.bad || !(all.norm > 0x1p-60 && all.norm < 0x1p100)) return 0;
            const int next = likely(bits, all);
            if (next == bits) return fewest(bits, first, all) ? bits : 0;
            bits = next;
        }
        return 0;
    }

    // The fewest bits, if a bit less leaves out four times as much.
    int likely(int bits, const Outcome& o) const {
        const double most = share * o.norm;
        double left = o.left;
        if (left <= most)
            for (left = o.less; bits > low && left <= most; left *= 4) bits--;
        else
            for (; bits < high && left > most; left /= 4) bits++;
        return bits;
    }

    // Whether distortion_ops.py certainly comes to these bits: it begins with `first` bits, and goes up until some suffice
    // or down as long as some do. So it matters which suffice of those that it may come by.
    bool fewest(int bits, int first, const Outcome& all) const {
        const double most = share * all.norm * (1 - ROUNDING), least = share * all.norm * (1 + ROUNDING);
        // Of more bits each value leaves out at most a quarter of their step's square.
        if (bits < high && (all.left + all.doubt(all.left, bits) > most || all.room / 16 > most)) return false;
        if (bits > low && all.less - all.doubt(all.less, bits) <= least) return false;
        if (bits == first && 4 * (all.left - all.doubt(all.left, bits)) > least) return true;
        double left = all.less;
        for (int b = bits - 2; b >= (bits > first ? first : low); b--) {
            left *= 4;  // more or less: as many rows as leave out enough
            const Outcome some = look(b, std::max<int64_t>(1, int64_t(std::min(0.8 * left / least, double(rows)))), true);
            if (some.left - some.doubt(some.left, b) <= least) return false;
        }
        return true;
    }

    // Every m moves by what its codes in the payload decode to, or is set to it.
    void update(int bits) const {
        uint8_t* at = payload;
        for (int64_t i = 0; i < count; i++) {
            const DequantizeArgs moved = update_of(placed(samples[i], bits, at));
            if (moved.out) dequantize_call(moved, isa, threads);
        }
    }

    // A sample with these bits, its scales and codes at `at`, if that is not null, which becomes where they end.
    static QuantizeArgs placed(QuantizeArgs a, int bits, uint8_t*& at) {
        const Layout l(a.H, a.group, bits);
        a.bits = bits;
        if (!at) return a;
        a.scales = reinterpret_cast<float*>(at);
        a.codes = at + 4 * a.rows * l.groups;
        at = a.codes + a.rows * l.row_bytes;
        return a;
    }

    // Of every `stride`th row. Codes go into the payload, if all rows are looked at and not `only` that.
    Outcome look(int bits, int64_t stride, bool only = false) const {
        std::vector<Outcome> found(size_t(std::max(threads, 1)));
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

    // keep: its codes and scales; else they are forgotten.
    Outcome rows_of(QuantizeArgs a, int64_t begin, int64_t end, int64_t stride, bool keep) const {
        const int bits = a.bits;
        const Layout l(a.H, a.group, bits);
        std::vector<uint8_t> scratch(keep ? 0 : size_t(l.group_bytes + 64));
        if (!keep) a.codes = scratch.data();
        const uint8_t* const limit = keep ? a.codes + end * l.row_bytes : a.codes + scratch.size();
        const double unit = std::ldexp(1.0, -2 * fine_bits(bits)), step = 2.0 / double(1 << bits);
        Outcome found;
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
                found.room += square * double(u.n);
                found.left += square * unit * double(squares[0]);
                found.less += square * unit * double(squares[1]);
            }
        return found;
    }
};

}  // namespace pipecomp
