"""Optimizers that average over data-parallel ranks themselves (docs/algorithms.md, 2.9)."""

from pipecomp.optim.quantized_adam import QuantizedAdam

__all__ = ["QuantizedAdam"]
