"""How few bits carry the changes of a model with dropout, and a line at the start where there are fewer.

A sample's activation changes from visit to visit by its mask too, so that what AQ-SGD sends is larger, and so is the
error of the same number of bits. What that costs is measured: benchmarks/results/convergence.md, lines with "dropout",
and for a classifier benchmarks/results/shootout.md.
"""

from __future__ import annotations

import logging

from torch import nn

from pipecomp.config import Config
from pipecomp.config.activations import FEWEST, ConstantError, each_link

# Forward, that cost at most 1 % of the training loss with dropout 0.1, Hugging Face's default.
FEWEST_BITS = 3
CLASSIFIERS_FEWEST_BITS = 4
_CLASSIFIERS = ("Classification", "MaskedLM")  # the latter are encoders of the hub, before they get a head for classes
_SMALL = 0.01  # dropout that changes hardly anything
_ADAPTERS = "lora_dropout"  # 2 bits forward and 4 back lose 0.2 to 0.5 % there: benchmarks/results/shootout.md
_log = logging.getLogger(__name__)


def dropout_of(module: nn.Module) -> float:
    """Find the largest share that any part of a model drops, but before LoRA's adapters, where it changes little."""
    parts = module.named_modules()
    return max((float(p.p) for name, p in parts if isinstance(p, nn.Dropout) and _ADAPTERS not in name), default=0.0)


def bits_for_dropout(module: nn.Module) -> int:
    """Say how few bits forward the changes of a model, or of a stage of it, take with dropout."""
    plan = getattr(module, "plan", None)  # of a Stage
    name = type(module).__name__ if plan is None else plan.model_class
    return CLASSIFIERS_FEWEST_BITS if any(kind in name for kind in _CLASSIFIERS) else FEWEST_BITS


def advice(dropout: float, settings: Config, fewest: int = FEWEST_BITS) -> str | None:
    """Say what fewer than the `fewest` bits cost with so much dropout, and what to do; None where it is little.

    Bits that follow an error need no advice where they may grow with the changes: their most count.
    """
    every = each_link(settings.activations.forward_bits)
    bits = min(e.max if isinstance(e, ConstantError) else e for e in every)
    if not _feels(dropout, settings) or bits >= fewest:
        return None
    return (
        f"this model trains with dropout {dropout:g}, which makes the changes that AQ-SGD sends larger: "
        f"activations.forward_bits {bits} may cost more than 1 % of the training loss. Use {fewest} or more, "
        '{"error": 0.05}, which takes as many as are needed, or no dropout (`--dropout 0` of a recipe)'
    )


def fewest_bits(module: nn.Module, settings: Config, dropout: float | None = None) -> int:
    """Say how few bits forward "auto" may take for a model. dropout: that it is trained with, None for its own."""
    share = dropout_of(module) if dropout is None else dropout
    return bits_for_dropout(module) if _feels(share, settings) else FEWEST["forward_bits"]


def warn_of_dropout(module: nn.Module, settings: Config) -> None:
    """Log the advice, if there is any; the level is one that Python shows where nobody has set up logging."""
    text = advice(dropout_of(module), settings, bits_for_dropout(module))
    if text is not None:
        _log.warning("%s", text)


def _feels(dropout: float, settings: Config) -> bool:
    """Say whether the changes sent are those since a sample's last visit, which had another mask."""
    return dropout >= _SMALL and settings.activations.method == "aqsgd" and settings.store.clusters is None
