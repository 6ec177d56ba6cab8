"""The value that each layer has of an adaptive option: steps are counted, errors added up, plans made from them.

See `adaptive.py` for what is averaged with these values, and docs/algorithms.md, section 2.7, for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipecomp.allreduce.adaptive_options import Adaptive
from pipecomp.allreduce.call import Counters, Name
from pipecomp.allreduce.layer_plan import choose

MEASURED = 4  # steps at the end of a window
GatherNumbers = Callable[[list[float]], list[list[float]]]


class Planner:
    """Plans anew every so many steps; `values` has what layers have been given, the others have the method's own value.

    own: value of the method. code_bytes(value, size, n): what passes a rank's link for the codes of a layer, whose size
    is what `add` was given.
    """

    def __init__(self, adaptive: Adaptive, own: Any, code_bytes: Callable[[Any, Any, int], float]) -> None:
        self.values: dict[Name, Any] = {}
        self.step = 0
        self._adaptive, self._own, self._code_bytes = adaptive, own, code_bytes
        self._seen = dict[str, None]()
        self._sizes: dict[Name, Any] = {}
        self._errors: dict[Name, list[float]] = {}  # sums over measured steps, with each value

    def value(self, layer: Name) -> Any:
        """What a layer has now."""
        return self.values.get(layer, self._own)

    def begin(self, key: str, counters: Counters, gather: GatherNumbers) -> None:
        """Count steps, and plan where it is time to: one is over when a key comes again.

        gather: each rank's numbers, of all ranks, on all ranks.
        """
        if key in self._seen:
            self._seen.clear()
            self.step += 1
            if self.step % self._adaptive.every == 0 and self._errors:
                self._plan(counters, gather)
        self._seen[key] = None

    @property
    def measures(self) -> bool:
        """Whether errors of this step are wanted."""
        return self.step % self._adaptive.every >= self._adaptive.every - MEASURED

    def add(self, layer: Name, size: Any, errors: Sequence[float]) -> None:
        """Squared errors of a layer with each value, in this step."""
        before = self._errors.get(layer, [0.0] * len(errors))
        self._errors[layer] = [a + b for a, b in zip(before, errors, strict=True)]
        self._sizes[layer] = size

    def _plan(self, counters: Counters, gather: GatherNumbers) -> None:
        """Choose values by what all ranks have measured, the same on all of them."""
        with counters.part("wait"):
            rows = gather([error for row in self._errors.values() for error in row])
        flat, values = [sum(column) for column in zip(*rows, strict=True)], self._adaptive.values
        errors = [flat[i : i + len(values)] for i in range(0, len(flat), len(values))]
        costs = [[self._code_bytes(v, self._sizes[layer], len(rows)) for v in values] for layer in self._errors]
        found = choose(errors, costs, values.index(self._own), self._adaptive.error)
        self.values = {layer: values[i] for layer, i in zip(self._errors, found, strict=True)}
        self._errors = {}

    def state_dict(self) -> dict[Any, Any]:
        """The plan, and the place in the window: plain containers."""
        return {
            "values": dict(self.values),
            "step": self.step,
            "seen": list(self._seen),
            "sizes": dict(self._sizes),
            "errors": {layer: list(row) for layer, row in self._errors.items()},
        }

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Go on with what `state_dict` returned."""
        self.values, self.step, self._seen = dict(state["values"]), state["step"], dict.fromkeys(state["seen"])
        self._sizes = dict(state["sizes"])
        self._errors = {layer: list(row) for layer, row in state["errors"].items()}
