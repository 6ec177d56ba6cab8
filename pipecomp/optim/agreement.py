"""What ranks tell each other so that all of them take the same step."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor

from pipecomp.allreduce.group import Group
from pipecomp.errors import ConfigError, ShapeError
from pipecomp.optim.adam import Listed

LARGEST = 2.0**60  # of a gradient: beyond it the square, and with it the variance, may leave float32
_NONE, _USABLE, _BAD = 0, 1, 2  # what a rank has as a parameter's gradient


class Agreement:
    """Find out in every step which parameters it changes, on all ranks alike.

    Args:
        group: the ranks.
        tied: ids of the parameters that other pipeline stages hold too.

    Attributes:
        skipped_steps: those in which a gradient was bad.
        bytes_sent: by this rank, for finding out.
    """

    def __init__(self, group: Group, tied: Set[int]) -> None:
        self._group, self._tied = group, tied
        self.skipped_steps = 0
        self.bytes_sent = 0

    def changed(self, listed: Listed, unscale: float | None, found_inf: Tensor | None) -> list[int]:
        """Return the parameters that this step changes: with a gradient on some rank, and usable gradients on all.

        If a gradient is bad, NaN, Inf or too large, these are the tied ones with usable gradients: the other stages
        that hold them see only those.

        Args:
            listed: the parameters.
            unscale: what their gradients are to be multiplied by, None for nothing.
            found_inf: what a GradScaler has found on this rank, None without one.

        Raises:
            ShapeError: for sparse gradients.
            PeerLostError: for a rank that is gone.
        """
        flags = torch.full((len(listed) + 1,), _NONE, dtype=torch.uint8)
        held = [i for i, (p, _) in enumerate(listed) if p.grad is not None and p.numel()]
        gradients = [cast(Tensor, listed[i][0].grad) for i in held]
        if any(g.layout != torch.strided for g in gradients):
            raise ShapeError("a sparse gradient: make the embedding with sparse=False")
        if held:
            norms = torch._foreach_norm(gradients, math.inf)
            largest = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).cpu()
            flags[held] = torch.where(largest * (unscale or 1) <= LARGEST, _USABLE, _BAD).to(torch.uint8)
        if found_inf is not None and float(found_inf):
            flags[-1] = _BAD
        flags = self._largest(flags)
        bad = int(flags.amax()) == _BAD
        if bad:
            self.skipped_steps += 1
            if found_inf is None:  # shown where `step` was called: it has two decorators
                warnings.warn("a gradient is NaN, Inf or above 2**60: its group of ranks skips this step", stacklevel=5)
        usable = [i for i, flag in enumerate(flags[:-1].tolist()) if flag == _USABLE]
        return [i for i in usable if not bad or id(listed[i][0]) in self._tied]

    def numbers(self, own: float) -> list[float]:
        """Each rank's number, on all ranks."""
        with self._counted():
            rows = self._group.gather_numbers([own])
        return [number for (number,) in rows]

    def _largest(self, flags: Tensor) -> Tensor:
        """Of all ranks' flags."""
        with self._counted():
            pending = self._group.gather(flags)
            largest = torch.stack(pending.wait()).amax(dim=0)
            pending.finish()
        return largest

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count what is sent inside."""
        before = self._group.bytes_sent
        yield
        self.bytes_sent += self._group.bytes_sent - before


def check_alike(group: Group, listed: Listed, settings: Mapping[str, Any], steps: int) -> None:
    """ConfigError if ranks differ: they would wait for each other's messages, or train different models.

    Args:
        group: the ranks.
        listed: this rank's parameters.
        settings: of its exchange, by name; numbers.
        steps: that its parameters have taken so far, added up.
    """
    contents = sum(_sum_of_bits(p) * (i + 1) for i, (p, _) in enumerate(listed))
    mine = {
        "params": len(listed),
        "values": sum(p.numel() for p, _ in listed),
        **settings,
        "steps so far": steps,
        "contents of params": contents % 2**50,
    }
    rows = group.gather_numbers([float(value) for value in mine.values()])
    for rank, row in enumerate(rows):
        for (key, value), other in zip(mine.items(), row, strict=True):
            if value != other:
                raise ConfigError(key, value, f"the same on all ranks (rank {rank} of the group has {other:.0f})")


def _sum_of_bits(p: Tensor) -> int:
    """A number that depends on all values, the same on any device."""
    whole = torch.int32 if p.dtype == torch.float32 else torch.int16
    return int(p.detach().reshape(-1).view(whole).sum(dtype=torch.int64))
