"""The Triton backend: GPU kernels and the host functions that launch them.

With TRITON_INTERPRET=1, set before triton is imported, the kernels also run on CPU tensors, slowly, for tests.
"""

from __future__ import annotations

from types import SimpleNamespace

from pipecomp.kernels.triton import batches, fewest_bits, gradients, rows  # noqa: F401 (their operations register)

BACKEND = SimpleNamespace(**rows.OPERATIONS)
