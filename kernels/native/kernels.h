// The kernels of one instruction set. Included once for each, inside its namespace, with PC_AVX2 set to 0 or 1.

#include "simd.h"
#include "quantize.h"
#include "distortion.h"
#include "channels.h"
#include "gradient.h"
#include "sketch.h"
#include "select.h"
#include "linear.h"
#include "feedback.h"

const Table table = {
    measure,         sum_squares,   quantize,           dequantize,         widen, linear_encode,      linear_reduce,
    linear_decode,   scale_index,   exponential_encode, exponential_decode, exponential_reduce, feedback_quantize,
    feedback_reduce, kmeans_assign, sketch_slots,       sketch_residual,    sketch_decode,      pack,               unpack,
    select,          squared_norm,  squared_error,           sum_of_groups,      measure_norm,       fit,
    add_squares,     normalize,     sum_along,          squared_off,        sum_of_squares,     quantize_normalized,
};
