"""Consistency checks between the ranks of a run: versions, settings, and errors of single ranks.

They use torch's key-value store, which works before gloo connects and after a rank has failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipecomp.codecs import wire
from pipecomp.distributed.heartbeat import DEFAULT_TIMEOUT_S, call_store, is_collective_error, lost_store
from pipecomp.distributed.launch_env import JOIN_TIMEOUT_S
from pipecomp.distributed.preemption import say_here
from pipecomp.errors import LinkError, LinkTimeoutError, PeerLostError, PipecompError

_PART_S, _POLL_S = 10.0, 0.2
_NOTICE_S = 300.0  # of waiting for a rank, until this rank says so
_LOST_S = 2.0  # for the answer of a rank that another one has lost: it may be alive
_SILENCE_S = DEFAULT_TIMEOUT_S  # for the store to answer
_T = TypeVar("_T")
_NO_ANSWER = "no answer"
_UNKNOWN = -1
_PREFIX = "pipecomp/start"
_VERSIONS = ("pipecomp", "torch", "deepspeed", "transformers")  # other versions may compute or save differently
# Settings of DeepSpeed's output, which may differ between ranks.
_OUTPUT_SETTINGS = (
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comms_logger",
    "flops_profiler",
    "comet",
)
_numbers = itertools.count()


class AllRanks:
    """A sequence of exchanges between all ranks through a key-value store; every rank must make the same calls.

    Args:
        rank: This rank; by default torch's.
        world: Number of ranks; by default torch's.
        store: The store; by default torch's own.
        wait_s: Seconds to wait for a rank that has not answered yet; infinite with heartbeats.
        missed: Returns why a rank will not answer, None if it may.
    """

    def __init__(
        self,
        rank: int | None = None,
        world: int | None = None,
        store: Any = None,
        *,
        wait_s: float = JOIN_TIMEOUT_S,
        missed: Callable[[int], Exception | None] = lambda rank: None,
    ) -> None:
        self.rank = dist.get_rank() if rank is None else rank
        self.world = dist.get_world_size() if world is None else world
        self._store = dist.PrefixStore(
            f"{_PREFIX}/{next(_numbers)}", distributed_c10d._get_default_store() if store is None else store
        )
        self._wait_s, self._missed = wait_s, missed
        self._rounds = itertools.count()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Exchange a JSON value, and return the values of all ranks, by rank.

        Raises LinkTimeoutError if a rank does not answer, PeerLostError if the store is gone.
        """
        return self._exchange(value)

    def _exchange(self, value: Any, lost: int | None = None) -> list[Any]:
        """Exchange a value. lost: a rank that this one has lost; nobody waits long for it, its value is _NO_ANSWER."""
        number = next(self._rounds)
        with lost_store(lambda: self._missed(0)):
            if lost is not None:
                self._call(lambda: self._store.set(f"{number}/lost/{lost}", ""))
            self._call(lambda: self._store.set(f"{number}/{self.rank}", json.dumps(value)))
            return [self._answer(number, rank) for rank in range(self.world)]

    def _call(self, act: Callable[[], _T]) -> _T:
        return call_store(act, _SILENCE_S)

    def _answer(self, number: int, rank: int) -> Any:
        key, lost = f"{number}/{rank}", f"{number}/lost/{rank}"
        began, notice_s = time.monotonic(), _NOTICE_S
        until = math.inf  # or some seconds after another rank has lost this one
        while not self._call(lambda: self._store.check([key])):
            if until == math.inf and self._call(lambda: self._store.check([lost])):
                until = time.monotonic() + _LOST_S
            if time.monotonic() > until:
                return _NO_ANSWER
            missed = self._missed(rank)
            if missed is not None:
                self.leave(but=rank)
                raise missed
            passed_s = time.monotonic() - began
            if passed_s > self._wait_s:
                raise LinkTimeoutError(
                    f"rank {rank} did not reach the start of the run within {self._wait_s:g} s: see its output"
                )
            if passed_s > notice_s:
                notice_s *= 2
                say_here(f"waits for rank {rank} since {passed_s:.0f} s: see its output")
            time.sleep(min(_POLL_S, max(0.001, passed_s / 10)))
        return json.loads(self._call(lambda: self._store.get(key)))

    def assert_same_on_all_ranks(self, facts: Mapping[str, Any]) -> None:
        """Raise LinkError with ranks and values, on every rank, unless these JSON values are the same on all."""
        mine = json.dumps(facts, sort_keys=True)
        hashes = self.all_gather_object(hashlib.sha256(mine.encode()).hexdigest())
        if len(set(hashes)) > 1:
            self._compare(self.all_gather_object(json.loads(mine)))

    def assert_same_where_known(self, facts: Mapping[str, Any]) -> None:
        """Do the same with facts of which each rank has only some."""
        given = self.all_gather_object(json.loads(json.dumps(facts, sort_keys=True)))
        known = {key: value for some in reversed(given) for key, value in some.items()}
        self._compare([{**known, **some} for some in given])

    def _compare(self, facts: list[dict[str, Any]]) -> None:
        found = differences(facts)
        if found:
            self.leave()
            raise LinkError(f"the ranks of this run do not fit together: {'; '.join(found)}")

    def leave(self, *, but: int | None = None) -> None:
        """Let rank 0, which may serve the store, wait until all ranks but one have read the values.

        Call it before an error that ends all ranks.
        """
        with contextlib.suppress(RuntimeError):
            call_store(lambda: self._store.set(f"parted/{self.rank}", ""), _PART_S)
            if self.rank == 0:
                self._store.wait(
                    [f"parted/{rank}" for rank in range(self.world) if rank != but], timedelta(seconds=_PART_S)
                )

    @contextlib.contextmanager
    def collective_errors(
        self, doing: str = "start", on_error: Callable[[Exception], None] = lambda error: None
    ) -> Iterator[None]:
        """Raise an error of the body, and an error with its text on the ranks without one.

        They raise a LinkError; PeerLostError or LinkTimeoutError if nothing else has happened than the loss of a rank.
        A rank that has lost one with an error of its own raises that rank's.

        Args:
            doing: A verb for the body.
            on_error: Called with an error of the body first, to end what other ranks wait for.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
            on_error(raised)
        lost = None if error is None else _lost_rank(error)
        answers: list[Any] = []
        try:
            answers = self._exchange(None if error is None else [f"{type(error).__name__}: {error}", lost], lost)
        except PipecompError:
            if error is None:
                raise
        if any(answer is not None for answer in answers):
            self.leave(but=answers.index(_NO_ANSWER) if _NO_ANSWER in answers else None)
        told = {rank: answer for rank, answer in enumerate(answers) if answer not in (None, _NO_ANSWER)}
        causes = {rank: text for rank, (text, lost_there) in told.items() if lost_there is None}
        if error is not None and lost not in causes:
            raise error
        for rank, text in causes.items():
            raise LinkError(f"rank {rank} could not {doing}: {text}") from error
        for rank, (text, lost_there) in told.items():
            text = f"rank {rank} could not {doing}: {text}"
            raise LinkTimeoutError(text) if lost_there == _UNKNOWN else PeerLostError(text, lost_there)


def _lost_rank(error: Exception) -> int | None:
    """Return the rank whose loss is the error, _UNKNOWN if it is not known, None for another error."""
    if isinstance(error, (PeerLostError, LinkTimeoutError)):
        return _UNKNOWN if error.rank is None else error.rank
    return _UNKNOWN if is_collective_error(error) else None


def versions() -> dict[str, Any]:
    """Return what must be the same before ranks communicate: package versions, packet format, byte order.

    The device suffix of torch's version may differ.
    """
    found: dict[str, Any] = {}
    for name in _VERSIONS:
        try:
            found[f"{name} version"] = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[f"{name} version"] = "not installed"  # pipecomp may run from a checkout
    return {**found, "format of packets": wire.VERSION, "order of bytes": sys.byteorder}


def check_byte_order() -> None:
    """Raise PipecompError on big-endian machines: packets are little-endian and copied as they are."""
    if sys.byteorder != "little":
        raise PipecompError(f"this machine is {sys.byteorder}-endian: pipecomp needs little-endian ones")


def settings_of(ds_config: Mapping[str, Any], section: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration with flat keys, without settings that may differ between ranks.

    Args:
        ds_config: The configuration.
        section: Key of pipecomp's section.
        shared: Its complete settings.
    """
    return dict(_flat({**{k: v for k, v in ds_config.items() if k not in _OUTPUT_SETTINGS}, section: shared}))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def differences(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the differences between the facts of all ranks, one phrase for each key."""
    found = []
    for key in sorted(set().union(*facts)):
        by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(facts):
            by_value.setdefault(json.dumps(values[key]) if key in values else "not set", []).append(rank)
        if len(by_value) > 1:
            rarest_first = sorted(by_value.items(), key=lambda item: (len(item[1]), -item[1][0]))
            found.append(f"{key} is {', '.join(f'{value} on {_ranks(ranks)}' for value, ranks in rarest_first)}")
    return found


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown}"
