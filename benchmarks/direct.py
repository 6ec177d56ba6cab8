"""Plain quantization (DirectQ) in all its forms, so that AQ-SGD is compared with the best of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from benchmarks.boundaries import Coders
from benchmarks.page import Row, values
from benchmarks.rival_rows import Published
from benchmarks.rivals import Whole

Setting = dict[str, Any] | Callable[[], Coders]  # the section "activations", or what makes the ends of a rival's links
# Behind a line's name: settings of the product.
FORMS: dict[str, dict[str, Any]] = {
    "": {},
    ", rms scale": {"scale": "rms"},
    ", channel scales": {"scale": "channels"},
    ", rotated": {"rotation": True},
    ", stochastic": {"rounding": "stochastic"},
}
AS_PUBLISHED = ", as published"
CLIPPING = """Rms scales clip in these runs whatever the bits are; the product's do not where steps are fine
        ([algorithm](../../docs/algorithms.md#12-the-quantizer-q_b-b--1-to-8))."""  # in pages


def published(forward: int, backward: int) -> Coders:
    """An end of a link that quantizes as the code of AQ-SGD's authors does."""
    return Coders(Whole(Published(forward)), Whole(Published(backward)))


def forms(forward: int, backward: int) -> dict[str, Setting]:
    """Every form with these bits, by what stands behind a line's name."""
    bits = {"method": "direct", "forward_bits": forward, "backward_bits": backward}
    own: dict[str, Setting] = {name: {**bits, **more} for name, more in FORMS.items()}
    return {**own, AS_PUBLISHED: partial(published, forward, backward)}


def names(prefix: str) -> list[str]:
    """The names of all forms' lines."""
    return [prefix + form for form in (*FORMS, AS_PUBLISHED)]


def best(groups: Iterable[Sequence[Row]], key: str = "train_loss") -> Sequence[Row]:
    """The runs with the least mean of `key`; none of none."""
    return min((group for group in groups if group), key=lambda group: statistics.mean(values(group, key)), default=[])
