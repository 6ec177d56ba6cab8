// The kernels for any CPU with little-endian memory.

#include "shared.h"

#pragma GCC diagnostic ignored "-Wpsabi"

#define PC_AVX2 0
namespace pipecomp {
namespace base {
#include "kernels.h"
}
}  // namespace pipecomp
