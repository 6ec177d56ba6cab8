// The kernels for x86-64 with AVX2 and F16C; empty on other CPUs. The headers come before the pragma because other
// translation units share their inline functions.

#if defined(__x86_64__)

#include "shared.h"

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wpsabi"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define PC_AVX2 1
namespace pipecomp {
namespace avx2 {
#include "kernels.h"
}
}  // namespace pipecomp

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
