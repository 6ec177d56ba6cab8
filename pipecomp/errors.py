"""Every error that pipecomp raises on purpose.

PipecompError
  ConfigError          a setting: its key, what it got, what is allowed
  ShapeError           a tensor's shape, dtype or device
  NonFiniteError       NaN, Inf or a value too large to quantize
  KernelError          a kernel backend that cannot run here
  SplitError           a model that cannot be cut as asked
  DataError            samples, ids or labels
  WireError            bytes that are not a packet of this version
  StoreError           the message store: damaged, full, or of another run
  OutputError          a file that a run writes cannot be written; raised on every rank
    CheckpointError    a checkpoint
  KeysError            keys and certificates: missing, expired, revoked, of another run or rank
  LinkError            the exchange between two stages
    BaseMismatchError  a delta on a cached activation that the receiver does not hold
    DriftError         the two ends hold different cached activations, again after they were repaired
    LinkTimeoutError   nothing arrived within the stated time
    PeerLostError      a rank is gone; `rank` says which
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


class PipecompError(Exception):
    """Base of all errors that pipecomp raises on purpose."""


class ConfigError(PipecompError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or cannot take effect.

    `key` is dotted ("activations.forward_bits"), `got` the value, `allowed` a sentence or list for people.
    """

    def __init__(self, key: str, got: object, allowed: str) -> None:
        super().__init__(f"{key}: got {_shown(got)}, allowed: {allowed}")
        self.key, self.got, self.allowed = key, got, allowed

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker pools and data loaders send errors by pickle, whose own way calls the class with the message alone.
        return type(self), (self.key, self.got, self.allowed)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"a {type(value).__name__} too large to show"


def require(ok: object, key: str, got: object, allowed: str) -> None:
    """Raise ConfigError with the other arguments unless `ok` is true."""
    if not ok:
        raise ConfigError(key, got, allowed)


@contextlib.contextmanager
def writable(key: str, path: str | os.PathLike[str], what: str = "a folder") -> Iterator[None]:
    """Inside, an OSError becomes a ConfigError for `path`, which `key` names: `what` that can be written is needed."""
    try:
        yield
    except OSError as error:
        raise ConfigError(key, str(path), f"{what} that can be written ({error.strerror or error})") from error


class ShapeError(PipecompError, ValueError):
    """A tensor has a shape, dtype or device that the operation does not take."""


class NonFiniteError(PipecompError, ArithmeticError):
    """A tensor holds NaN, Inf, or a value above 2**100; nothing was changed."""


class KernelError(PipecompError, RuntimeError):
    """The named kernel backend cannot run on this machine or for this tensor."""


class SplitError(PipecompError, ValueError):
    """The model cannot be cut as asked."""


class DataError(PipecompError, ValueError):
    """Samples, their ids or their labels are not what training needs."""


class WireError(PipecompError, ValueError):
    """Received bytes are not a whole packet of this version and link."""


class StoreError(PipecompError, RuntimeError):
    """The message store is damaged, full, or belongs to another run."""


class OutputError(PipecompError, RuntimeError):
    """Something cannot be written: which file, on which rank, and why. Every rank has it, and training can go on."""


class CheckpointError(OutputError):
    """A checkpoint cannot be written, and nothing of it is left."""


class KeysError(PipecompError, RuntimeError):
    """A key or certificate is missing, expired, revoked, of another run, or not for that rank."""


class LinkError(PipecompError, RuntimeError):
    """The exchange between two stages failed."""


class BaseMismatchError(LinkError):
    """A delta builds on a version of a cached activation that this end of the link does not hold."""


class DriftError(LinkError):
    """The two ends of a link hold different cached activations of one version, in two checks in a row."""


class LinkTimeoutError(LinkError, TimeoutError):
    """Nothing arrived on the link within the stated time."""


class PeerLostError(LinkError, ConnectionError):
    """A rank is gone. `rank` is the global rank that was lost first, as far as is known."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank)
