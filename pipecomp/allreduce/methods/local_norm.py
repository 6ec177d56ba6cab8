"""QSGD, TernGrad and NUQSGD: each worker's own norm, codes from everyone to everyone. Unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from pipecomp.allreduce.all_gather import GatheredAverage, gathered_plan
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.exchanges import Plan, Shapes
from pipecomp.allreduce.method import Average, LinearLevels, Method, exponential_width, option, widths


@dataclass(frozen=True, kw_only=True)
class Qsgd(LinearLevels):
    """`qsgd`: linear levels of the L2 norm. bits: of a value. Source: arXiv:1610.02132."""

    def average(self, residuals: Residuals) -> Average:
        return GatheredAverage(self.bits, 2.0)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        return gathered_plan(d, n, self.bits)


@dataclass(frozen=True, kw_only=True)
class NuQsgd(Qsgd):
    """`nuqsgd`: powers of two of the L2 norm. bits: of a value, 4 or 8. Source: arXiv:1908.06077."""

    bits: int = option(4, widths)

    measured: ClassVar = ({"bits": 4},)

    def check(self, name: str) -> None:
        exponential_width(self.bits, name)

    def adaptable(self) -> tuple[str, tuple[Any, ...]] | None:
        return "bits", (4, 8)

    def average(self, residuals: Residuals) -> Average:
        return GatheredAverage(self.bits, 2.0, exponential=True)


@dataclass(frozen=True, kw_only=True)
class TernGrad(Method):
    """`terngrad`: −1, 0 or 1 of the largest magnitude. Source: arXiv:1705.07878."""

    def average(self, residuals: Residuals) -> Average:
        return GatheredAverage(2, math.inf)

    def plan(self, d: int, n: int, shapes: Shapes | None = None) -> Plan:
        return gathered_plan(d, n, 2)
