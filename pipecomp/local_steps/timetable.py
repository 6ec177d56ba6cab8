"""After which inner steps which fragment of the weights is averaged."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor

from pipecomp.allreduce.local_options import LocalSteps
from pipecomp.errors import ConfigError


class Timetable:
    """Intervals of inner steps, one after the other.

    In an interval of h steps, fragment k of F is sent after step ⌈(k + 1)·h / F⌉, the last one after the last step.
    Intervals only grow, so at least h steps are between two turns of a fragment. All ranks count the same steps and so
    come to the same without a word.

    Attributes:
        began: Steps that were over when the present interval began.
    """

    def __init__(self, options: LocalSteps, began: int = 0) -> None:
        self._options, self.began = options, began

    @property
    def length(self) -> int:
        """Steps of the present interval."""
        return self._options.interval(self.began)

    @property
    def overlap(self) -> int:
        """Steps that go on while a fragment is averaged, less than an interval: it is there for its next turn."""
        return min(self._options.overlap, self.length - 1)

    def due(self, step: int) -> list[int]:
        """List the fragments that are sent after `step` steps of the run."""
        fragments, length = self._options.fragments, self.length
        return [k for k in range(fragments) if -(-(k + 1) * length // fragments) == step - self.began]

    def passed(self, step: int) -> None:
        """Note that `step` steps of the run are over: the next interval may begin."""
        if step - self.began >= self.length:
            self.began = step


def fragments_of(weights: Mapping[str, Tensor], tied: Set[str], count: int) -> list[list[str]]:
    """Cut weights into fragments of about equal size, in order; each has one at least.

    Weights that are tied to another stage's are all in the first: every stage that holds them has to average them after
    the same step.

    Args:
        weights: By name.
        tied: Names of those that other stages hold too.
        count: F.

    Raises:
        ConfigError: For more fragments than weights.

    Example:
        >>> fragments_of({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(4)}, set(), 2)
        [['a', 'b'], ['c']]
    """
    order = [name for name in weights if name in tied] + [name for name in weights if name not in tied]
    most = len(order) - max(0, len(tied & set(order)) - 1)
    if count > most:
        raise ConfigError(
            "gradients.fragments", count, f"at most {most}, the weights that a stage trains; tied ones are one"
        )
    total, before = sum(weights[name].numel() for name in order), 0
    found: list[list[str]] = [[] for _ in range(count)]
    for place, name in enumerate(order):
        middle = before + weights[name].numel() / 2
        before += weights[name].numel()
        wanted = 0 if name in tied else int(middle * count / max(1, total))
        filled = next((k for k in range(count) if not found[k]), count)  # none stays empty, none is left out
        last = count - (len(order) - place)  # what is needed for those that are left to fill the rest
        found[min(max(wanted, last), filled, count - 1)].append(name)
    return found
