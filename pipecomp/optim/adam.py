"""Adam's arithmetic for one parameter, and the freezing of its variance, on one rank.

Operations and their order are those of `torch.optim.Adam`, for the same bits. All are in float32 for any dtype of the
parameter. A parameter's `Moments` are a dict, as torch saves optimizer states as dicts:

    step         steps so far
    frozen_at    step that froze the variance; 0 before
    unit         divisor of the momentum in exchanges, a power of two; 1.0 before
    exp_avg      momentum, of the parameter's shape
    exp_avg_sq   variance, likewise
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipecomp.errors import ConfigError

Moments = dict[str, Any]
Listed = list[tuple[Tensor, dict[str, Any]]]  # all parameters of an optimizer in their order, with their groups


def check_options(group: Mapping[str, Any]) -> None:
    """Raise ConfigError for options of a parameter group that are not allowed."""
    for key in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[key]) < math.inf:
            raise ConfigError(key, group[key], "a number of at least 0")
    betas = tuple(group["betas"])
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ConfigError("betas", group["betas"], "two numbers from 0 to below 1")


def new_moments(p: Tensor) -> Moments:
    """Return the moments of a parameter before its first step."""
    momentum, variance = (torch.zeros(p.shape, device=p.device, dtype=torch.float32) for _ in range(2))
    return {"step": 0, "frozen_at": 0, "unit": 1.0, "exp_avg": momentum, "exp_avg_sq": variance}


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam, or AdamW.

    Attributes:
        adam_w: decoupled weight decay; otherwise it is added to the gradient.
    """

    adam_w: bool

    def update_momentum(self, momentum: Tensor, g: Tensor, p: Tensor, options: Mapping[str, Any]) -> Tensor:
        """momentum ← β1·momentum + (1 − β1)·g, in place.

        Args:
            momentum: momentum of a parameter or of a part of it, float32.
            g: gradient of these values, float32. One rank's gradient is enough, as the update is linear in it.
            p: these values.
            options: options of the parameter's group.

        Returns:
            The gradient, with weight decay unless that is decoupled.
        """
        if options["weight_decay"] and not self.adam_w:
            g = g.add(p, alpha=options["weight_decay"])
        momentum.lerp_(g, 1 - options["betas"][0])
        return g

    def update_moments(self, moments: Moments, gradient_d: Tensor, p: Tensor, options: Mapping[str, Any]) -> None:
        """Update momentum and variance with the mean gradient of all ranks: the variance is not linear in it."""
        g = self.update_momentum(moments["exp_avg"], gradient_d.view(p.shape).to(torch.float32), p, options)
        beta2 = options["betas"][1]
        moments["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)

    def move(self, p: Tensor, moments: Moments, options: Mapping[str, Any]) -> None:
        """Count the step and update p. A frozen variance keeps its bias correction."""
        (beta1, beta2), lr = options["betas"], float(options["lr"])
        moments["step"] += 1
        x = p if p.dtype == torch.float32 else p.to(torch.float32)
        if options["weight_decay"] and self.adam_w:
            x.mul_(1 - lr * options["weight_decay"])
        corrected = (1 - beta2 ** (moments["frozen_at"] or moments["step"])) ** 0.5
        denominator = (moments["exp_avg_sq"].sqrt() / corrected).add_(options["eps"])
        x.addcdiv_(moments["exp_avg"], denominator, value=-lr / (1 - beta1 ** moments["step"]))
        if x is not p:
            p.copy_(x)


def freeze_variance(moments: Moments, bits: int) -> bool:
    """Freeze the variance of a parameter, and set the unit of its momentum.

    The square root of the variance is raised to at least 2^-bits of its typical value. Otherwise rounding errors would
    move values with tiny gradients by more than 1 (unused rows of an embedding).

    Args:
        moments: the parameter's moments; modified.
        bits: bits per exchanged value.

    Returns:
        True if it is frozen now; False while all gradients have been zero.
    """
    unit = _typical_scale(moments["exp_avg_sq"])
    if not unit:
        return False
    moments["exp_avg_sq"].clamp_(min=(unit * 2.0**-bits) ** 2)
    moments["frozen_at"], moments["unit"] = moments["step"], unit
    return True


def thaw(optimizer: torch.optim.Optimizer) -> None:
    """Convert loaded states of `QuantizedAdam` to those of torch's Adam.

    A frozen variance is scaled, because Adam corrects its bias by the current step.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = optimizer.state.get(p, {})
            frozen_at = moments.pop("frozen_at", 0)
            moments.pop("unit", None)
            if frozen_at:
                beta2 = group["betas"][1]
                moments["exp_avg_sq"].mul_((1 - beta2 ** float(moments["step"])) / (1 - beta2**frozen_at))


def _typical_scale(variance: Tensor) -> float:
    """Return the power of two nearest to the root mean variance of values with a gradient; 0 if there are none.

    A power of two of a float64 sum is the same on ranks with different numbers of threads.
    """
    mean = float(variance.sum(dtype=torch.float64)) / max(1, int(variance.count_nonzero()))
    return 2.0 ** round(math.log2(mean) / 2) if mean else 0.0
