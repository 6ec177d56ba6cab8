"""What transformers asks a GPU about attention masks, answered from what the host knows: each question waits for it.

At the beginning of a stage's forward it asks whether a mask leaves anything out, and, without one, whether positions
begin anew within a sample. A layout tells the first; a stage takes no positions, so they never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import masking_utils

_ASKING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def known_masks(*, full: bool, device: torch.device) -> Iterator[None]:
    """While inside, models take a mask to leave nothing out if `full`, else something, without a look at its values.

    On a CPU, where looking costs nothing, they look.
    """
    if device.type == "cpu":
        yield
        return
    answers: dict[str, Callable[..., Any]] = {
        "find_packed_sequence_indices": lambda positions: None,
        "fast_all": lambda mask: full,  # for flash_attention_2
        **{name: partial(_answer, getattr(masking_utils, name, None), full) for name in _ASKING},
    }
    before = {name: getattr(masking_utils, name) for name in answers if hasattr(masking_utils, name)}
    for name in before:
        setattr(masking_utils, name, answers[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(masking_utils, name, function)


def _answer(ask: Callable[..., bool] | None, full: bool, padding_mask: Any, *rest: Any, **more: Any) -> bool:
    """Whether no mask has to be made."""
    assert ask is not None
    return ask(None, *rest, **more) if full or padding_mask is None else False
