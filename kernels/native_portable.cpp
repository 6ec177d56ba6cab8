// The kernels for any CPU with little-endian memory.

#include "native.h"

#pragma GCC diagnostic ignored "-Wpsabi"

#define PC_AVX2 0
namespace pipecomp {
namespace base {
#include "native_body.h"
}
}  // namespace pipecomp
