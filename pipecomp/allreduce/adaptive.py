"""L-GreCo: one option of a method, as its bits, differs between layers, and is planned anew every so many steps.

A layer is a parameter of a bucket (`slices`), or a whole tensor that is averaged by itself. In the last steps of a
window each rank measures what every layer's squared error would be with every value; all ranks add up what all have
measured, and find the same plan: the fewest bytes with no more than `error` times the error that the method's own
value would have everywhere. Layers of a bucket that have the same value travel together.

Layers have scales of their own: a method whose codes are relative to a norm gets each layer divided by its norm over
all workers (8 bytes a layer to each other rank); others have scales for few values anyway.

Where this differs from the paper: errors are measured on single steps' gradients, not on their sum over the window,
which would take as much memory as the model.
Source: arXiv:2210.17357 (L-GreCo). d: values of a bucket, L: its layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from pipecomp.allreduce.adaptive_options import Adaptive
from pipecomp.allreduce.adaptive_planner import Planner
from pipecomp.allreduce.call import Call, Name, Slices
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.finite_check import within
from pipecomp.allreduce.method import LayerAverage, Method
from pipecomp.allreduce.norms import LARGEST, combine, local_norm
from pipecomp.kernels import ops
from pipecomp.kernels.reference.reproducible import divisor

_VALUE = 5  # what a random draw is for


@dataclass(frozen=True, slots=True)
class _Part:
    """A layer in its bucket: values [start, end), divided by `scale` before they are quantized."""

    layer: Name
    start: int
    end: int
    scale: float

    @property
    def count(self) -> int:
        """How many values."""
        return self.end - self.start


class AdaptiveAverage:
    """Averages each layer with its own value of an option.

    method: with the option's own value. residuals: of the state, by bucket, those of layers with one value together.
    """

    saved_as = "adaptive"

    def __init__(self, method: Method, adaptive: Adaptive, residuals: Residuals) -> None:
        self._adaptive = adaptive
        self._own = getattr(method, adaptive.option)
        self._methods = {v: dataclasses.replace(method, **{adaptive.option: v}) for v in adaptive.values}
        self._window = _Window(residuals)
        self._averages = {v: cast(LayerAverage, m.average(self._window)) for v, m in self._methods.items()}
        self._planner = Planner(adaptive, self._own, self._code_bytes)

    @property
    def values(self) -> dict[Name, Any]:
        """What layers have, those of the last plan."""
        return self._planner.values

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """See Average. With NaN or Inf on any rank all get NaN, and no residual changes."""
        self._planner.begin(call.key, call.counters, call.group.gather_numbers)
        parts = self._parts(x_d, call)
        if parts is None:
            out_d.fill_(math.nan)
            return
        divided = self._averages[self._own].exponents is not None
        known = 1.0 if divided else None
        if self._planner.measures:
            self._measure(x_d, parts, dataclasses.replace(call, norm=known))
        parts.sort(key=lambda part: self._planner.value(part.layer))  # stable: the bucket's order within a value
        y_d = torch.cat([self._divided(x_d, part) for part in parts])
        for value, start, chosen in self._runs(parts):
            count = sum(part.count for part in chosen)
            self._window.place(_slices(call, parts), start, start + count, sum(part.count for part in parts))
            sub = dataclasses.replace(
                call,
                slices=_slices(call, chosen),
                norm=known,
                seed=ops.mix_seed(call.seed, _VALUE, self._adaptive.values.index(value)),
            )
            y = y_d[start : start + count]
            self._averages[value].mean(y, y, sub)
        for part, mean in zip(parts, y_d.split([part.count for part in parts]), strict=True):
            torch.mul(mean, part.scale, out=out_d[part.start : part.end])

    def _parts(self, x_d: Tensor, call: Call) -> list[_Part] | None:
        """The bucket's layers with their scales; None if a value of any rank is not finite or too large."""
        slices: Sequence[tuple[Name, int]] = call.slices or ((call.key, x_d.numel()),)
        ends = list(accumulate(count for _, count in slices))
        places = [(layer, end - count, end) for (layer, count), end in zip(slices, ends, strict=True) if count]
        average = self._averages[self._own]
        if average.exponents is None:
            usable = within(x_d, call, average.largest)
            return [_Part(*place, 1.0) for place in places] if usable else None
        q, p = average.exponents
        with call.counters.part("quantize"):
            local = [local_norm(x_d[start:end], q) for _, start, end in places]
        with call.counters.part("wait"):
            rows = call.group.gather_numbers(local)
        norms = [combine(list(column), p) for column in zip(*rows, strict=True)]
        if not all(norm <= LARGEST for norm in norms):
            return None
        return [_Part(*place, norm or 1.0) for place, norm in zip(places, norms, strict=True)]

    def _divided(self, x_d: Tensor, part: _Part) -> Tensor:
        """A layer's values, float32."""
        y = x_d[part.start : part.end].to(torch.float32)
        return y / divisor(part.scale, y)

    def _runs(self, parts: list[_Part]) -> Iterator[tuple[Any, int, list[_Part]]]:
        """(value, where its first one starts, parts) of those that travel together."""
        start = 0
        for value in self._adaptive.values:
            chosen = [part for part in parts if self._planner.value(part.layer) == value]
            if chosen:
                yield value, start, chosen
                start += sum(part.count for part in chosen)

    def _measure(self, x_d: Tensor, parts: list[_Part], call: Call) -> None:
        with call.counters.part("quantize"):
            for part in parts:
                y = self._divided(x_d, part)
                found = [average.squared_error(y, call) * part.scale**2 for average in self._averages.values()]
                self._planner.add(part.layer, part.count, found)

    def _code_bytes(self, value: Any, d: int, n: int) -> float:
        """What passes a rank's link for the codes of a layer, without what is told before."""
        plan = self._methods[value].plan(d, max(n, 2))
        return sum(exchange.link for exchange in plan.exchanges()) - sum(exchange.link for exchange in plan.before)

    def state_dict(self) -> dict[Any, Any]:
        """See Stateful: the plan, and the place in the window."""
        return self._planner.state_dict()

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """See Stateful."""
        self._planner.load_state_dict(state)


class _Window(Residuals):
    """The part of a bucket's residual that layers with one value have; owners' residuals are the state's."""

    def __init__(self, residuals: Residuals) -> None:
        super().__init__()
        self._of = residuals
        self._place: tuple[Slices | None, int, int, int] = (None, 0, 0, 0)

    def place(self, slices: Slices | None, start: int, end: int, d: int) -> None:
        """Look at [start, end) of the d values whose parameters are `slices`."""
        self._place = (slices, start, end, d)

    def worker(self, key: str, slices: Slices | None, d: int, device: torch.device) -> Tensor:
        """See Residuals."""
        bucket, start, end, total = self._place
        return self._of.worker(key, bucket, total, device)[start:end]

    def owner(self, key: str, slices: Slices | None, d: int) -> Tensor:
        """See Residuals."""
        return self._of.owner(key, slices, d)


def _slices(call: Call, parts: list[_Part]) -> Slices | None:
    return None if call.slices is None else tuple((part.layer, part.count) for part in parts)
