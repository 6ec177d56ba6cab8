"""The schedule of fragments of the weights, and their division into fragments."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor

from pipecomp.config.gradients import LocalSteps
from pipecomp.errors import ConfigError


class Timetable:
    """A sequence of intervals of inner steps.

    In an interval of h steps, fragment k of F is sent after step ⌈(k + 1)·h / F⌉, the last one after the last step.
    Intervals only grow, so a fragment is sent at most every h steps. All ranks count the same steps, and so agree
    without communication.

    Attributes:
        began: step after which the current interval began.
    """

    def __init__(self, options: LocalSteps, began: int = 0) -> None:
        self._options, self.began = options, began

    @property
    def length(self) -> int:
        """Steps of the current interval."""
        return self._options.interval(self.began)

    @property
    def overlap(self) -> int:
        """Steps while a fragment is averaged, fewer than an interval, so that it arrives before it is sent again."""
        return min(self._options.overlap, self.length - 1)

    def due(self, step: int) -> list[int]:
        """Return the fragments to send after `step` steps of the run."""
        fragments, length = self._options.fragments, self.length
        return [k for k in range(fragments) if -(-(k + 1) * length // fragments) == step - self.began]

    def finish_step(self, step: int) -> None:
        """Begin the next interval if the current one ends with `step`."""
        if step - self.began >= self.length:
            self.began = step


def fragments_of(weights: Mapping[str, Tensor], tied: Set[str], count: int) -> list[list[str]]:
    """Divide weights, in order, into fragments of about equal size with at least one weight each.

    Tied weights are all in the first fragment: every stage that shares them must average them after the same step.

    Args:
        weights: by name.
        tied: names of those that other stages share.
        count: F.

    Raises:
        ConfigError: for more fragments than weights.

    Example:
        >>> fragments_of({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(4)}, set(), 2)
        [['a', 'b'], ['c']]
    """
    order = [name for name in weights if name in tied] + [name for name in weights if name not in tied]
    most = len(order) - max(0, len(tied & set(order)) - 1)
    if count > most:
        hint = "Each fragment needs a trained weight of the stage; tied weights count as one."
        raise ConfigError("gradients.fragments", count, f"at most {most}", hint)
    total, before = sum(weights[name].numel() for name in order), 0
    fragments: list[list[str]] = [[] for _ in range(count)]
    for place, name in enumerate(order):
        middle = before + weights[name].numel() / 2
        before += weights[name].numel()
        target = 0 if name in tied else int(middle * count / max(1, total))
        filled = next((k for k in range(count) if not fragments[k]), count)  # the first empty fragment
        last = count - (len(order) - place)  # leaves enough weights for the remaining fragments
        fragments[min(max(target, last), filled, count - 1)].append(name)
    return fragments
