"""The settings of local steps, `gradients.local_steps` and what belongs to it: replicas that average now and then.

H inner steps, then an outer step (DiLoCo, arXiv:2311.08105); in fragments and overlapped (Streaming DiLoCo,
arXiv:2501.18512).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipecomp.allreduce.method import whole
from pipecomp.errors import ConfigError, require

KEYS = ("local_steps", "local_steps_warmup", "outer", "second_moments", "fragments", "overlap", "mixing")
OPTIMIZERS = ("nesterov", "sgd")
SECOND_MOMENTS = ("rows", "own")
LARGEST = sys.float_info.max  # there are whole numbers above it


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The optimizer of outer steps: SGD on how far the replicas have moved, on the average.

    optimizer: "nesterov" (DiLoCo's), or "sgd" with or without heavy-ball momentum. lr: 1 and no momentum is plain
    averaging; None for a rate of each row's own, see `CommonWeights.step`. momentum: of the outer gradients.
    """

    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float = 0.0

    @classmethod
    def checked(cls, given: object) -> Outer:
        """Read what a configuration has. ConfigError names what is not allowed."""
        key = "gradients.outer"
        allowed = "an object with optimizer, lr and momentum, or some of them"
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise ConfigError(key, given, allowed)
        for name, value in given.items():
            require(name in ("optimizer", "lr", "momentum"), f"{key}.{name}", value, "no such key; " + allowed)
        optimizer = given.get("optimizer", "sgd")
        require(optimizer in OPTIMIZERS, f"{key}.optimizer", optimizer, ", ".join(map(repr, OPTIMIZERS)))
        plain = NESTEROV if optimizer == "nesterov" else cls()
        lr, momentum = given.get("lr", plain.lr), given.get("momentum", plain.momentum)
        require(_number(momentum) and 0 <= momentum < 1, f"{key}.momentum", momentum, "a number from 0 to below 1")
        require(optimizer == "sgd" or momentum > 0, f"{key}.momentum", momentum, "a number above 0 with 'nesterov'")
        if lr is None:
            require(optimizer == "sgd" and momentum == 0, f"{key}.lr", lr, "a number above 0 with momentum")
        else:
            require(_number(lr) and 0 < lr <= LARGEST, f"{key}.lr", lr, "a number above 0")
            lr = float(lr)
        return cls(optimizer=optimizer, lr=lr, momentum=float(momentum))

    @property
    def averages_alike(self) -> bool:
        """Whether an outer step leaves the weights as they are where all replicas have the same ones."""
        return self.lr in (None, 1) and self.momentum == 0


NESTEROV = Outer(optimizer="nesterov", lr=0.7, momentum=0.9)  # arXiv:2311.08105, for pre-training


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """How often replicas average, and what they do then.

    local_steps: H, inner steps from one averaging to the next. local_steps_warmup: steps over which that grows from 1.
    second_moments: "rows" where replicas share the means of the rows of their Adam's, "own" where they share nothing.
    fragments: F parts of the weights that are averaged in turn. overlap: T, inner steps that go on while a fragment is
    averaged. mixing: α, what of its own weights a replica keeps where others arrive late, beside 1 − α of the common
    ones (arXiv:2501.18512, section 2.4); None where it takes the common ones and keeps its steps since they were sent.
    """

    local_steps: int
    local_steps_warmup: int = 0
    outer: Outer = Outer()
    second_moments: str = "rows"
    fragments: int = 1
    overlap: int = 0
    mixing: float | None = None

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> LocalSteps | None:
        """Read the keys KEYS of a "gradients" section, None for those that are left out.

        Raises ConfigError for values that are not allowed or could not take effect. None without local steps.
        """
        local = {key: given.get(key) for key in KEYS}
        h = local.pop("local_steps")
        if h is None:
            for key, value in local.items():
                require(value is None, f"gradients.{key}", value, "only with gradients.local_steps")
            return None
        h = whole(1)("gradients.local_steps", h)

        def number(key: str, default: int, low: int, high: int | None = None) -> int:
            found: int = whole(low, high)(f"gradients.{key}", default if local[key] is None else local[key])
            return found

        needs_several = (("local_steps_warmup", 0), ("fragments", 1), ("overlap", 0), ("second_moments", "rows"))
        for key, default in needs_several:
            allowed = "only with local_steps of at least 2"
            require(h > 1 or local[key] in (None, default), f"gradients.{key}", local[key], allowed)
        overlap = number("overlap", 0, 0, h - 1)
        moments = local["second_moments"] or "rows"
        require(moments in SECOND_MOMENTS, "gradients.second_moments", moments, ", ".join(map(repr, SECOND_MOMENTS)))
        mixing = local["mixing"]
        if mixing is not None:
            require(overlap > 0, "gradients.mixing", mixing, "only with gradients.overlap")
            require(_number(mixing) and 0 <= mixing < 1, "gradients.mixing", mixing, "a number from 0 to below 1")
        return cls(
            local_steps=h,
            local_steps_warmup=number("local_steps_warmup", 0, 0),
            outer=Outer.checked(local["outer"]),
            second_moments=moments,
            fragments=number("fragments", 1, 1, h),
            overlap=overlap,
            mixing=None if mixing is None else float(mixing),
        )

    def interval(self, began: int) -> int:
        """Count the inner steps of the interval that begins after step `began`: 1 at first, H after the warm-up."""
        if began >= self.local_steps_warmup:
            return self.local_steps
        return 1 + began * (self.local_steps - 1) // self.local_steps_warmup

    @property
    def shares_rows(self) -> bool:
        """Whether replicas average numbers of each row exactly, beside their weights."""
        return self.local_steps > 1 and (self.second_moments == "rows" or self.outer.lr is None)

    @property
    def ever_synchronous(self) -> bool:
        """Whether there are intervals of one step, in which gradients are averaged."""
        return self.interval(0) == 1

    def as_dict(self) -> dict[str, Any]:
        """As a configuration has it, complete but for what is None."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
