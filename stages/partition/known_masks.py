"""What transformers asks a GPU about attention masks, answered from what the host knows: each question waits for it.

At the beginning of a stage's forward it asks whether a mask leaves anything out, and, without one, whether positions
begin anew within a sample. A layout tells the first; a stage takes no positions, so they never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils


@contextmanager
def known_masks(*, full: bool, device: torch.device) -> Iterator[None]:
    """While inside, models take a mask to leave nothing out if `full`, else something, without a look at its values.

    On a CPU, where looking costs nothing, they look.
    """
    if device.type == "cpu":
        yield
        return
    stock = {name: getattr(masking_utils, name) for name in _ASKING if hasattr(masking_utils, name)}
    for name, ask in stock.items():
        setattr(masking_utils, name, _ASKING[name](ask, full))
    try:
        yield
    finally:
        for name, ask in stock.items():
            setattr(masking_utils, name, ask)


def _needs_no_mask(ask: Callable[..., bool], full: bool) -> Callable[..., bool]:
    def answer(padding_mask: Any, *rest: Any, **more: Any) -> bool:
        return (full or padding_mask is None) and ask(None, *rest, **more)

    return answer


# What takes the place of each function that looks, made of itself and of whether masks leave nothing out.
_ASKING: dict[str, Callable[[Callable[..., Any], bool], Callable[..., Any]]] = {
    "find_packed_sequence_indices": lambda ask, full: lambda positions: None,
    "fast_all": lambda ask, full: lambda mask: full,  # for flash_attention_2
    "_ignore_causal_mask_sdpa": _needs_no_mask,
    "_ignore_bidirectional_mask_sdpa": _needs_no_mask,
}
