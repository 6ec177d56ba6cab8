"""The "gradients" section: a method and its options, checked once when they are made.

Which options there are is up to the methods, see `registry.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipecomp.allreduce import local_options
from pipecomp.allreduce.adaptive_options import Adaptive
from pipecomp.allreduce.local_options import LocalSteps
from pipecomp.allreduce.method import REQUIRED, Check, Method
from pipecomp.allreduce.registry import METHODS
from pipecomp.errors import ConfigError

CHECKS: dict[str, Check] = {}
for _method in METHODS.values():
    CHECKS |= _method.checks()

if TYPE_CHECKING:
    _Section = Any
else:
    _Section = dataclasses.make_dataclass(
        "_Section",
        [
            ("method", str, "none"),
            *((name, Any, None) for name in CHECKS),
            ("adaptive", Any, None),
            *((name, Any, None) for name in local_options.KEYS),
        ],
        namespace={"__post_init__": lambda self: None},  # without, no subclass's would be called
        frozen=True,
        kw_only=True,
    )


class Gradients(_Section):
    """Say what crosses data-parallel groups, and what tied weights exchange.

    A frozen dataclass whose fields are `method`, the options of all methods, `adaptive`, and those of local steps.

    Args:
        method: a name of `pipecomp.allreduce.registry.METHODS`; "none" is an uncompressed all-reduce.
        adaptive: None, or what `Adaptive` takes as a mapping: one option's value may then differ between layers.
        local_steps, local_steps_warmup, outer, second_moments, fragments, overlap, mixing: None, or how often replicas
            average and what they share, see `LocalSteps`; all are None without `local_steps`.
        **options: those of the method, see its class; None and options that are left out take the method's default.
            Options of other methods stay None.

    Raises:
        ConfigError: for a method that does not exist, an option that the method does not take, and values that are not
            allowed, alone or together.

    Example:
        >>> Gradients(method="double_squeeze", bits=3).group_size
        128
    """

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ConfigError("gradients.method", self.method, ", ".join(map(repr, METHODS)))
        kind = METHODS[self.method]
        given = {name: getattr(self, name) for name in CHECKS}
        defaults, checks = kind.defaults(given), kind.checks()
        for name, value in given.items():
            if name not in checks:
                if value is not None:
                    users = [f"'{other}'" for other, takes in METHODS.items() if name in takes.checks()]
                    raise ConfigError(f"gradients.{name}", value, f"only with {', '.join(users)}, not {self.method!r}")
                continue
            value = defaults[name] if value is None else value
            if value is REQUIRED:
                raise ConfigError(f"gradients.{name}", None, f"a whole number, which {self.method!r} needs")
            object.__setattr__(self, name, checks[name](f"gradients.{name}", value))
        self.chosen.check(self.method)
        if self.adaptive is not None:
            object.__setattr__(self, "adaptive", Adaptive.checked(self.adaptive, self.chosen, self.method).as_dict())
        local = self.local
        if local is not None:
            if self.exchanges_in_optimizer:
                allowed = f"null with {self.method!r}, whose momentum is averaged in every step"
                raise ConfigError("gradients.local_steps", self.local_steps, allowed)
            for name, value in local.as_dict().items():
                object.__setattr__(self, name, value)

    @property
    def chosen(self) -> Method:
        """The method with its options."""
        kind = METHODS[self.method]
        return kind(**{name: getattr(self, name) for name in kind.checks()})

    @property
    def layerwise(self) -> Adaptive | None:
        """`adaptive` as an object."""
        return None if self.adaptive is None else Adaptive.checked(self.adaptive, self.chosen, self.method)

    @property
    def local(self) -> LocalSteps | None:
        """The settings of local steps as an object; None where every step averages gradients."""
        return LocalSteps.checked({name: getattr(self, name) for name in local_options.KEYS})

    def of_average(self) -> dict[str, Any]:
        """List what a `State` takes: the method, and its options that are set."""
        given = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and k not in local_options.KEYS}
        if self.exchanges_in_optimizer:
            return {"method": "double_squeeze", "bits": self.bits, "group_size": self.group_size}
        return given

    def check_given(self, given: Mapping[str, object]) -> None:
        """Nothing more to refuse: all of it is checked when it is made."""

    def as_dict(self) -> dict[str, Any]:
        """All options as plain values; `adaptive` and local steps only where they are set.

        So it is what was saved before there were any.
        """
        values = dataclasses.asdict(self)
        for name in ("adaptive", *local_options.KEYS):
            if values[name] is None:
                del values[name]
        return values

    @property
    def exchanges_in_optimizer(self) -> bool:
        """Whether the optimizer exchanges (momentum), so that gradients stay local."""
        return self.chosen.in_optimizer
