// What memory alone allows the CPU kernels: their reads and writes without their arithmetic, beside memcpy.
//
//     g++ -O3 -mavx2 benchmarks/kernel_limits.cpp -o /tmp/kernel_limits && /tmp/kernel_limits
//
// Each line: bytes that must move, over the time of the bare loop, as a ratio to memcpy of as many bytes (half read,
// half written). A kernel with this access pattern cannot come out above it. Four-bit codes.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static float* floats(size_t n) {
    float* p = static_cast<float*>(aligned_alloc(4096, (n * 4 + 4095) / 4096 * 4096));
    for (size_t i = 0; i < n; i++) p[i] = float(i % 97);
    return p;
}

static __m256i seen;

static void read_one(const float* a, size_t n) {
    for (size_t i = 0; i < n; i += 8) seen = _mm256_or_si256(seen, _mm256_loadu_si256((const __m256i*)(a + i)));
}

// Eight bytes of result for sixteen values, as four-bit codes are; from one input or two.
static void read_write_codes(const float* a, const float* m, uint8_t* codes, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        __m256i any = _mm256_setzero_si256();
        for (size_t j = 0; j < 64; j += 8) {
            any = _mm256_or_si256(any, _mm256_loadu_si256((const __m256i*)(a + i + j)));
            if (m) any = _mm256_or_si256(any, _mm256_loadu_si256((const __m256i*)(m + i + j)));
        }
        _mm256_storeu_si256((__m256i*)(codes + i / 2), any);
    }
}

static void add_codes(float* m, const uint8_t* codes, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        __m256 c = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)(codes + i / 2)));
        for (size_t j = 0; j < 64; j += 8)
            _mm256_storeu_ps(m + i + j, _mm256_xor_ps(_mm256_loadu_ps(m + i + j), c));
    }
}

static void write_values(float* out, const uint8_t* codes, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        __m256 c = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)(codes + i / 2)));
        for (size_t j = 0; j < 64; j += 8) _mm256_storeu_ps(out + i + j, c);
    }
}

static void stream_values(float* out, const uint8_t* codes, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        __m256 c = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)(codes + i / 2)));
        for (size_t j = 0; j < 64; j += 8) _mm256_stream_ps(out + i + j, c);
    }
    _mm_sfence();
}

template <class Loop>
static void report(const char* what, size_t rows, size_t moved, const Loop& loop) {
    std::vector<char> from(moved / 2, 1), to(moved / 2, 1);
    std::vector<double> ratios, times;
    for (int i = 0; i < 41; i++) {
        double t = now();
        memcpy(to.data(), from.data(), moved / 2);
        asm volatile("" ::"r"(to.data()) : "memory");
        double copy = now() - t;
        t = now();
        loop();
        asm volatile("" ::: "memory");
        times.push_back(now() - t);
        ratios.push_back(copy / times.back());
    }
    std::sort(ratios.begin(), ratios.end());
    std::sort(times.begin(), times.end());
    printf("%-44s %5zu x 1600  %8.3f ms  ratio %.2f\n", what, rows, times[20] * 1e3, ratios[20]);
}

int main() {
    for (size_t rows : {1024, 8192}) {
        const size_t n = rows * 1600;
        float *a = floats(n), *m = floats(n), *out = floats(n);
        uint8_t* codes = static_cast<uint8_t*>(aligned_alloc(4096, n / 2));
        memset(codes, 1, n / 2);
        report("read a", rows, n * 4, [&] { read_one(a, n); });
        report("quantize: read x, write codes", rows, n * 9 / 2, [&] { read_write_codes(a, nullptr, codes, n); });
        report("delta: read a, m; write codes; update m", rows, n * 25 / 2, [&] {
            read_write_codes(a, m, codes, n);
            add_codes(m, codes, n);
        });
        report("dequantize into m: read m, codes; write m", rows, n * 17 / 2, [&] { add_codes(m, codes, n); });
        report("dequantize: read codes, write values", rows, n * 9 / 2, [&] { write_values(out, codes, n); });
        report("the same with non-temporal stores", rows, n * 9 / 2, [&] { stream_values(out, codes, n); });
        free(a), free(m), free(out), free(codes);
    }
    return int(_mm256_extract_epi32(seen, 0) == 1);
}
