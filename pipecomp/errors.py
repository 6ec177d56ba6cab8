"""Errors that pipecomp raises.

PipecompError
  ConfigError          a setting: its key, its value, the allowed values
  ShapeError           a tensor's shape, dtype or device
  NonFiniteError       NaN, Inf or a value too large to quantize
  KernelError          a kernel backend that cannot run here
  SplitError           a model that cannot be split into stages as requested
  DataError            samples, ids or labels
  WireError            bytes that are not a packet of this version
  StoreError           the message store: damaged, full, or of another run
  OutputError          a file that a run writes cannot be written; raised on every rank
    CheckpointError    a checkpoint
  StalledError         this rank's own data, callback or disk did not answer in time
  KeysError            keys and certificates: missing, expired, revoked, of another run or rank
  LinkError            the exchange between two stages
    BaseMismatchError  a delta against a cached activation that the receiver does not have
    DriftError         the cached activations of both ends differ, again after a repair
    LinkTimeoutError   nothing arrived in time
    PeerLostError      a rank is gone; its number is in `rank`
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from typing import Any


class PipecompError(Exception):
    """Base class of pipecomp's errors."""


class ConfigError(PipecompError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or without effect.

    Args:
        key: dotted name of the setting, such as "activations.forward_bits".
        got: the value.
        allowed: the values that are allowed, in words; "" where there are none to list.
        hint: a sentence with the reason or the remedy, appended to the message.
    """

    def __init__(self, key: str, got: object, allowed: str, hint: str | None = None) -> None:
        message = f"{key}: got {_shown(got)}"
        if allowed:
            message += f", allowed: {allowed}"
        if hint:
            message += f". {hint}" if hint.endswith((".", "?")) else f". {hint}."
        super().__init__(message)
        self.key, self.got, self.allowed, self.hint = key, got, allowed, hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker pools and data loaders pickle errors; the default would call the class with the message alone.
        return type(self), (self.key, self.got, self.allowed, self.hint)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"a {type(value).__name__} too large to show"


def foreign_text(value: object, limit: int = 1000) -> str:
    """Return what another process has sent, as a part of an error message: shortened, on one line, without controls."""
    text = str(value)
    shown = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return "".join(c if c.isprintable() else "; " if c == "\n" else repr(c)[1:-1] for c in shown)


def require(ok: object, key: str, got: object, allowed: str, hint: str | None = None) -> None:
    """Raise ConfigError with the other arguments unless `ok` is true."""
    if not ok:
        raise ConfigError(key, got, allowed, hint)


@contextlib.contextmanager
def writable(key: str, path: str | os.PathLike[str], what: str = "a folder") -> Iterator[None]:
    """Turn an OSError in the body into a ConfigError: `key` needs `what` (a noun) that can be written at `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(key, str(path), f"{what} that can be written ({write_error(error, path)})") from error


def write_error(error: OSError, path: str | os.PathLike[str]) -> str:
    """Return the system's message of a failed write at `path`, with the limit that may be its cause."""
    return (error.strerror or str(error)) + write_limits(error.errno, path)


def write_limits(code: int | None, path: str | os.PathLike[str]) -> str:
    """Return what limits writes at `path`, in brackets, where errno's `code` is of a limit; else an empty text."""
    if code not in (errno.EFBIG, errno.EDQUOT, errno.EIO):
        return ""
    limits = []
    if code == errno.EIO:  # also the code of LMDB for a write that a limit cut short
        limits.append(f"{_free_mib(path)} MiB are free; the disk fails, is full, or a quota is used up")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY:
        limits.append(f"files of this process may have at most {most >> 10} KiB (ulimit -f)")
    elif code == errno.EFBIG:
        limits.append("the file system allows no larger one")
    return f" ({'; '.join(limits)})" if limits else ""


def _free_mib(path: str | os.PathLike[str]) -> int:
    folder = os.path.realpath(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free >> 20


class ShapeError(PipecompError, ValueError):
    """A tensor has a shape, dtype or device that the operation does not support."""


class NonFiniteError(PipecompError, ArithmeticError):
    """A tensor holds NaN, Inf, or a value above 2**100; nothing has been modified."""


class KernelError(PipecompError, RuntimeError):
    """The named kernel backend cannot run on this machine or for this tensor."""


class SplitError(PipecompError, ValueError):
    """The model cannot be split into stages as requested."""


class DataError(PipecompError, ValueError):
    """Samples, their ids or their labels are unusable for training."""


class WireError(PipecompError, ValueError):
    """Received bytes are not a complete packet of this version and link."""


class StoreError(PipecompError, RuntimeError):
    """The message store is damaged, full, or belongs to another run."""


class OutputError(PipecompError, RuntimeError):
    """A file cannot be written; raised on every rank with the file, the rank and the reason. Training can continue."""


class CheckpointError(OutputError):
    """A checkpoint cannot be written; no part of it remains on disk."""


class StalledError(PipecompError):
    """A rank has waited too long for something of its own: data, a callback, a tracker, a disk."""


class KeysError(PipecompError, RuntimeError):
    """A key or certificate is missing, expired, revoked, or issued for another run or rank."""


class LinkError(PipecompError, RuntimeError):
    """The exchange between two stages failed."""


class BaseMismatchError(LinkError):
    """A delta refers to a version of a cached activation that this end of the link does not have."""


class DriftError(LinkError):
    """The cached activations of the two ends of a link differ in two consecutive checks."""


class LinkTimeoutError(LinkError, TimeoutError):
    """Nothing arrived in time. `rank` is the global rank that is silent, None if it is not known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank)


class PeerLostError(LinkError, ConnectionError):
    """A rank is gone. `rank` is the global rank that was lost first, as far as known."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank)
