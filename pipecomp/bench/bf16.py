"""BF16 matrix products on a CPU that has none.

Where the processor lacks BF16 instructions, torch multiplies BF16 matrices element by element, about ten times slower
than float32. What BF16 hardware does, multiply exactly, add up in float32 and round once at the end, is also what a
float32 product rounded to BF16 gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class _Float32Products(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if op in _PRODUCTS and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
            return op(*[x.float() for x in args], **(kwargs or {})).bfloat16()
        return op(*args, **(kwargs or {}))


def products_in_float32(enabled: bool) -> contextlib.AbstractContextManager:
    """Compute a CPU's BF16 matrix products through float32 inside a `with` block, if `enabled`."""
    return _Float32Products() if enabled else contextlib.nullcontext()


def cpu_multiplies_bf16() -> bool:
    """Say whether this processor has BF16 products of its own (x86: AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
