"""Global-QSGD: one norm for all workers, linear or exponential levels, dense or only what is not zero. Unbiased.

Source: arXiv:2305.18627.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipecomp.allreduce.all_gather import GatheredAverage
from pipecomp.allreduce.dithering import DitheredAverage, levels_of, linear_plan
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.exchanges import Piece, Plan, Shapes, packed, scattered, to_all
from pipecomp.allreduce.method import Average, Method, exponential_width, flag, one_width, option, widths
from pipecomp.allreduce.reduce_scatter import PIECE, packed_bytes, spans
from pipecomp.errors import ConfigError
from pipecomp.kernels import ops

_MAX_NORM = 2**53
Norm = str | float | tuple[str | float, str | float]


def _levels(key: str, value: Any) -> str:
    if value not in ("linear", "exponential"):
        raise ConfigError(key, value, "'linear' or 'exponential'")
    return str(value)


def _norm(key: str, value: Any) -> Norm:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        q, p = (_one_norm(key, part) for part in value)
        return q, p
    return _one_norm(key, value)


def _one_norm(key: str, value: Any) -> str | float:
    if value == "inf":
        return "inf"
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1
    if not ok:
        raise ConfigError(key, value, "'inf', a number of at least 1, or a pair of these")
    if isinstance(value, int) and value > _MAX_NORM:
        raise ConfigError(key, value, "a number up to 2**53, or 'inf'")
    return "inf" if math.isinf(value) else value


@dataclass(frozen=True, kw_only=True)
class GlobalQsgd(Method):
    """`global_qsgd`.

    levels: "linear" or "exponential" (4 or 8 bits). bits: of a value. norm: "inf", a number p >= 1, or [q, p]: the
    p-norm over workers of each worker's q-norm. sparse: send only what is not zero (norm 2).
    """

    levels: str = option("exponential", _levels)
    bits: int = option(8, widths)
    norm: Norm = option("inf", _norm)
    sparse: bool = option(False, flag)

    measured: ClassVar = (
        {"levels": "exponential", "bits": 8},
        {"levels": "exponential", "bits": 4},
        {"levels": "linear", "bits": 8},
        {"levels": "linear", "bits": 4},
        {"levels": "linear", "sparse": True},
    )

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """See Method; few levels where zeros are not sent."""
        found = super().defaults(given)
        if given.get("sparse") is True:
            found |= {"norm": 2, "bits": 2 if given.get("levels") == "linear" else 4}
        return found

    def check(self, name: str) -> None:
        (exponential_width if self._exponential else one_width)(self.bits, name)
        if self.sparse and self.norm != 2:
            raise ConfigError("gradients.norm", self.norm, "2 with sparse (others leave few zeros)")

    def adaptable(self) -> tuple[str, tuple[Any, ...]] | None:
        """See Method. What sparse codes take depends on the values."""
        return None if self.sparse else ("bits", (4, 8) if self._exponential else (2, 3, 4, 5, 6, 8))

    @property
    def _exponential(self) -> bool:
        return self.levels == "exponential"

    @property
    def exponents(self) -> tuple[float, float]:
        """(q, p): q inside a worker, p over workers."""
        q, p = self.norm if isinstance(self.norm, tuple) else (self.norm, self.norm)
        return float(q), float(p)

    def average(self, residuals: Residuals) -> Average:
        kind: Any = GatheredAverage if self.sparse else DitheredAverage
        average: Average = kind(self.bits, self.exponents, exponential=self._exponential)
        return average

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        norm = (to_all(8, n),)
        if self.sparse:
            return Plan(norm, (_sparse(d, n, self.bits, linear=not self._exponential),), exact=False)
        if self._exponential:
            return Plan(norm, (scattered(d, n, packed(self.bits)),))
        return Plan(norm, (linear_plan(d, n, self.bits),))


def _sparse(d: int, n: int, bits: int, *, linear: bool) -> tuple[Piece, ...]:
    """Non-zero codes and their positions, spread evenly: at most s·√(n·d) of them on all ranks together.

    A value x of a bucket with the norm ‖x‖₂ over all workers is sent with a probability of at most s·|x| / ‖x‖₂, 1/s
    the smallest level; the sum is largest where all values are equal.
    """
    s = levels_of(bits) if linear else 1 << (ops.exponential_levels(bits) - 1)
    share = min(1.0, s / math.sqrt(n * d))
    pieces = []
    for span in spans(0, d, PIECE):
        count = round(share * span.count)
        size = 4
        if count:
            size += ops.position_bytes(span.count, count)[1] + packed_bytes(count, 1 if linear and bits == 2 else bits)
        pieces.append(Piece(to_all(size, n), lengths=to_all(8, n)))
    return tuple(pieces)
