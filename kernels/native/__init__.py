"""The native backend: C++ kernels for CPU tensors, compiled by `pipecomp.kernels.build` and called through ctypes."""
