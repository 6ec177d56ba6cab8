"""What replicas share of their Adam's second moments: each row's mean, in float32, beside the weights.

The row of a token that one replica alone has met is near zero in the second moments of all others, and these take a
step of full size when they first meet it. With the rows' means in common each keeps its own moments within a row, and
one number a row is all that is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_LEAST = 1e-30  # of a row's mean by which something can be divided


class SecondMoments:
    """The second moments of a replica's weights.

    Args:
        weights: By name.
        states: Returns the inner optimizer's states by weight, as `torch.optim.Optimizer.state`.
    """

    def __init__(self, weights: Mapping[str, Tensor], states: Callable[[], Mapping[Tensor, Any]]) -> None:
        self._weights, self._states = weights, states

    def rows(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Compute the mean of each row of some weights' second moments; nothing for an optimizer that has none.

        Returns:
            By name, float32 of as many values as the weight has rows, new; zeros where it has not been trained yet,
            also where that is all: other replicas may have trained, and all have to exchange the same.
        """
        states = self._states()
        there = [state for state in states.values() if state]
        if there and not any("exp_avg_sq" in state for state in there):
            return {}
        found = {}
        for name in names:
            weight = self._weights[name]
            v = states[weight].get("exp_avg_sq") if weight in states else None
            rows = weight.shape[0] if weight.dim() else 1
            zeros = torch.zeros(rows, device=weight.device, dtype=torch.float32)
            found[name] = zeros if v is None else v.detach().float().reshape(rows, -1).mean(1)
        return found

    @torch.no_grad()
    def follow(self, own: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> None:
        """Scale rows to the replicas' mean; a row that had nothing gets the mean.

        What has been added to a row since `rows` looked at it, on the mean's way, is added to the mean: a row that was
        tiny then and is large now would become larger by as much as the mean is larger than tiny.

        Args:
            own: What `rows` returned.
            means: The same, averaged over replicas.
        """
        states = self._states()
        for name, mean in means.items():
            v = states[self._weights[name]].get("exp_avg_sq") if self._weights[name] in states else None
            if v is None:
                continue
            now = v.detach().float().reshape(len(mean), -1).mean(1)
            wanted = mean + (now - own[name]).clamp_min(0.0)
            there = (own[name] > _LEAST) & (now > _LEAST)
            factor = torch.where(there, wanted / now.clamp_min(_LEAST), 1.0)
            more = torch.where(there, 0.0, mean)
            shape = (-1, *(1,) * (v.dim() - 1)) if v.dim() else ()
            v.mul_(factor.view(shape)).add_(more.view(shape))
