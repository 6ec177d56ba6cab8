"""Optimizers that average over data-parallel ranks themselves.

docs/algorithms.md, 2.9. `quantized_adam.py` is the optimizer; it agrees with the other ranks on what a step changes
(`agreement.py`), averages with them (`exchange.py`) and changes parameter after parameter (`adam.py`).
"""

from pipecomp.optim.quantized_adam import QuantizedAdam

__all__ = ["QuantizedAdam"]
