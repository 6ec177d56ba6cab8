"""L-GreCo: one option of a method, such as its bits, differs between layers and is planned every so many steps.

A layer is a parameter of a bucket (`slices`), or a tensor that is averaged by itself. In the last steps of a window
each rank measures the squared error of every layer with every value. All ranks add up these errors and compute the same
plan: the fewest bytes with at most `error` times the error of the method's own value in all layers. Layers of a bucket
that have the same value are sent together.

Note: [Scales of layers]
    A method whose codes are relative to a norm gets each layer divided by its norm over all workers (8 bytes per layer
    to each other rank). Other methods have scales of small groups anyway.
    Unlike in the paper, errors are measured on gradients of single steps, as their sum over the window would need as
    much memory as the model.

Source: arXiv:2210.17357 (L-GreCo). d: values of a bucket, L: layers, V: values of the option.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from pipecomp.allreduce.call import LARGEST, Call, Counters, Name, Slices, all_within, combine_norms, local_norm
from pipecomp.allreduce.error_feedback import Residuals
from pipecomp.allreduce.method import GradientMethod, LayerAverage
from pipecomp.config.gradients import Adaptive
from pipecomp.kernels import ops
from pipecomp.kernels.reference.reproducible import divisor

MEASURED = 4  # steps at the end of a window
STEPS = 10_000  # of the error limit in the knapsack
STEPS_PER_LAYER = 50  # at least, as each layer's error is rounded up
_VALUE = 5  # purpose of random draws
GatherNumbers = Callable[[list[float]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class _LayerSpan:
    """The values [start, end) of a layer in its bucket, divided by `scale` before quantization."""

    layer: Name
    start: int
    end: int
    scale: float

    @property
    def count(self) -> int:
        """Number of values."""
        return self.end - self.start


class AdaptiveAverage:
    """Averages each layer with its own value of an option. method: has the own value. residuals: the state's."""

    saved_as = "adaptive"

    def __init__(self, method: GradientMethod, adaptive: Adaptive, residuals: Residuals) -> None:
        self._adaptive = adaptive
        self._own = getattr(method.options, adaptive.option)
        self._methods = {v: method.with_options(**{adaptive.option: v}) for v in adaptive.values}
        self._window = _ResidualWindow(residuals)
        self._averages = {v: cast(LayerAverage, m.average(self._window)) for v, m in self._methods.items()}
        self._planner = Planner(adaptive, self._own, self._code_bytes)

    @property
    def values(self) -> dict[Name, Any]:
        """Values of the last plan, by layer."""
        return self._planner.values

    def mean(self, x_d: Tensor, out_d: Tensor, call: Call) -> None:
        """Average. NaN or Inf on any rank gives NaN on all, without changes to residuals."""
        self._planner.begin(call.key, call.counters, call.group.gather_numbers)
        parts = self._parts(x_d, call)
        if parts is None:
            out_d.fill_(math.nan)
            return
        divided = self._averages[self._own].exponents is not None
        known = 1.0 if divided else None
        if self._planner.measures:
            self._measure(x_d, parts, dataclasses.replace(call, norm=known))
        parts.sort(key=lambda part: self._planner.value(part.layer))  # stable: keeps the bucket's order within a value
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

    def _parts(self, x_d: Tensor, call: Call) -> list[_LayerSpan] | None:
        """Return the bucket's layers with their scales; None if a value of any rank is not finite or too large."""
        slices: Sequence[tuple[Name, int]] = call.slices or ((call.key, x_d.numel()),)
        ends = list(accumulate(count for _, count in slices))
        places = [(layer, end - count, end) for (layer, count), end in zip(slices, ends, strict=True) if count]
        average = self._averages[self._own]
        if average.exponents is None:
            usable = all_within(x_d, call, average.largest)
            return [_LayerSpan(*place, 1.0) for place in places] if usable else None
        q, p = average.exponents
        with call.counters.part("quantize"):
            local = [local_norm(x_d[start:end], q) for _, start, end in places]
        with call.counters.part("wait"):
            rows = call.group.gather_numbers(local)
        norms = [combine_norms(list(column), p) for column in zip(*rows, strict=True)]
        if not all(norm <= LARGEST for norm in norms):
            return None
        return [_LayerSpan(*place, norm or 1.0) for place, norm in zip(places, norms, strict=True)]

    def _divided(self, x_d: Tensor, part: _LayerSpan) -> Tensor:
        """Return a layer's divided values, float32."""
        y = x_d[part.start : part.end].to(torch.float32)
        return y / divisor(part.scale, y)

    def _runs(self, parts: list[_LayerSpan]) -> Iterator[tuple[Any, int, list[_LayerSpan]]]:
        """Yield (value, start of its first layer, layers) for layers that are sent together."""
        start = 0
        for value in self._adaptive.values:
            chosen = [part for part in parts if self._planner.value(part.layer) == value]
            if chosen:
                yield value, start, chosen
                start += sum(part.count for part in chosen)

    def _measure(self, x_d: Tensor, parts: list[_LayerSpan], call: Call) -> None:
        with call.counters.part("quantize"):
            for part in parts:
                y = self._divided(x_d, part)
                errors = [average.squared_error(y, call) * part.scale**2 for average in self._averages.values()]
                self._planner.add_errors(part.layer, part.count, errors)

    def _code_bytes(self, value: Any, d: int, n: int) -> float:
        """Return the bytes of a layer's codes through a rank's link, without norms."""
        plan = self._methods[value].plan(d, max(n, 2))
        return sum(exchange.link for exchange in plan.exchanges()) - sum(exchange.link for exchange in plan.before)

    def state_dict(self) -> dict[Any, Any]:
        """Return the plan and the place in the window."""
        return self._planner.state_dict()

    def load_state_dict(self, state: dict[Any, Any], device: torch.device) -> None:
        """Restore the return value of `state_dict`."""
        self._planner.load_state_dict(state)


class _ResidualWindow(Residuals):
    """The part of a bucket's residual that belongs to the layers with one value; owners' residuals are the state's."""

    def __init__(self, residuals: Residuals) -> None:
        super().__init__()
        self._residuals = residuals
        self._place: tuple[Slices | None, int, int, int] = (None, 0, 0, 0)

    def place(self, slices: Slices | None, start: int, end: int, d: int) -> None:
        """Select [start, end) of the d values whose parameters are `slices`."""
        self._place = (slices, start, end, d)

    def worker(self, key: str, slices: Slices | None, d: int, device: torch.device) -> Tensor:
        bucket, start, end, total = self._place
        return self._residuals.worker(key, bucket, total, device)[start:end]

    def owner(self, key: str, slices: Slices | None, d: int) -> Tensor:
        return self._residuals.owner(key, slices, d)


def _slices(call: Call, parts: list[_LayerSpan]) -> Slices | None:
    return None if call.slices is None else tuple((part.layer, part.count) for part in parts)


# -- plans


class Planner:
    """Counts steps, adds up errors, and plans the value of each layer every so many steps.

    Args:
        adaptive: the settings.
        own: the method's own value, of layers without a planned one.
        code_bytes: bytes of a layer through a rank's link, by value, size (as given to `add_errors`) and ranks.

    Attributes:
        values: values of the last plan, by layer.
    """

    def __init__(self, adaptive: Adaptive, own: Any, code_bytes: Callable[[Any, Any, int], float]) -> None:
        self.values: dict[Name, Any] = {}
        self.step = 0
        self._adaptive, self._own, self._code_bytes = adaptive, own, code_bytes
        self._seen = dict[str, None]()
        self._sizes: dict[Name, Any] = {}
        self._errors: dict[Name, list[float]] = {}  # sums over measured steps, with each value

    def value(self, layer: Name) -> Any:
        """Return a layer's value."""
        return self.values.get(layer, self._own)

    def begin(self, key: str, counters: Counters, gather: GatherNumbers) -> None:
        """Begin a bucket. A repeated key ends the step; at the end of a window, make a new plan.

        gather: returns the numbers of all ranks, on all ranks.
        """
        if key in self._seen:
            self._seen.clear()
            self.step += 1
            if self.step % self._adaptive.every == 0 and self._errors:
                self._plan(counters, gather)
        self._seen[key] = None

    @property
    def measures(self) -> bool:
        """True if errors are measured in this step."""
        return self.step % self._adaptive.every >= self._adaptive.every - MEASURED

    def add_errors(self, layer: Name, size: Any, errors: Sequence[float]) -> None:
        """Add a layer's squared errors with each value, in this step."""
        before = self._errors.get(layer, [0.0] * len(errors))
        self._errors[layer] = [a + b for a, b in zip(before, errors, strict=True)]
        self._sizes[layer] = size

    def _plan(self, counters: Counters, gather: GatherNumbers) -> None:
        """Choose values by the errors of all ranks, the same on all of them."""
        with counters.part("wait"):
            rows = gather([error for row in self._errors.values() for error in row])
        flat, values = [sum(column) for column in zip(*rows, strict=True)], self._adaptive.values
        errors = [flat[i : i + len(values)] for i in range(0, len(flat), len(values))]
        costs = [[self._code_bytes(v, self._sizes[layer], len(rows)) for v in values] for layer in self._errors]
        indices = choose_values(errors, costs, values.index(self._own), self._adaptive.error)
        self.values = {layer: values[i] for layer, i in zip(self._errors, indices, strict=True)}
        self._errors = {}

    def state_dict(self) -> dict[Any, Any]:
        """Return the plan and the place in the window, as plain containers."""
        return {
            "values": dict(self.values),
            "step": self.step,
            "seen": list(self._seen),
            "sizes": dict(self._sizes),
            "errors": {layer: list(row) for layer, row in self._errors.items()},
        }

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self.values, self.step, self._seen = dict(state["values"]), state["step"], dict.fromkeys(state["seen"])
        self._sizes = dict(state["sizes"])
        self._errors = {layer: list(row) for layer, row in state["errors"].items()}


def choose_values(
    errors: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], own: int, factor: float
) -> list[int]:
    """Choose a value for every layer: the fewest bytes under a limit on the sum of the layers' errors.

    A multiple-choice knapsack, solved by dynamic programming over errors in whole steps (L-GreCo, section 3). Errors
    are rounded up, so a plan never exceeds the limit. Integers and float64 operations in a fixed order give the same
    plan on all ranks.

    Args:
        errors: squared error of each layer with each value, finite, [L][V].
        costs: bytes, [L][V].
        own: index of the method's own value.
        factor: limit relative to the error with the own value in all layers.

    Returns:
        An index for each layer; each layer's value of least error if no plan fits the limit.
    """
    error_LV, cost_LV = (torch.tensor(rows, dtype=torch.float64) for rows in (errors, costs))
    limit = factor * _total(errors, [own] * len(errors))
    if not limit:
        return [own] * len(errors)
    indices = _fewest_bytes(error_LV / limit, cost_LV)
    if factor >= 1 and (indices is None or _total(costs, indices) >= _total(costs, [own] * len(errors))):
        return [own] * len(errors)  # it fits, and another plan can only seem better by rounding
    return [int(i) for i in error_LV.argmin(dim=1)] if indices is None else indices


def _total(rows: Sequence[Sequence[float]], plan: Sequence[int]) -> float:
    return sum(row[i] for row, i in zip(rows, plan, strict=True))


def _fewest_bytes(share_LV: Tensor, cost_LV: Tensor) -> list[int] | None:
    """Return the cheapest plan; None if none fits. share: of the limit, for each layer and value."""
    layers, values = share_LV.shape
    steps = max(STEPS, STEPS_PER_LAYER * layers)
    need_LV = (share_LV * steps).ceil().clamp(max=steps + 1).long().tolist()
    least = torch.zeros(steps + 1, dtype=torch.float64)  # bytes of the layers so far, by steps used
    choices = torch.zeros(layers, steps + 1, dtype=torch.uint8)
    for layer in range(layers):
        options = torch.full((values, steps + 1), torch.inf, dtype=torch.float64)
        for value, need in enumerate(need_LV[layer]):
            if need <= steps:
                options[value, need:] = least[: steps + 1 - need] + cost_LV[layer, value]
        least, index = options.min(dim=0)
        choices[layer] = index.to(torch.uint8)
    if not bool(least[steps].isfinite()):
        return None
    plan, left = [0] * layers, steps
    for layer in reversed(range(layers)):
        plan[layer] = int(choices[layer, left])
        left -= need_LV[layer][plan[layer]]
    return plan
