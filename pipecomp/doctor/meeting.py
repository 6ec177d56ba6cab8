"""The ranks of one run, together: they meet in torch's key-value store, measure in turn, and hand in what they found.

The store comes first and is all that the rest needs: where gloo cannot connect, its ranks can still say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipecomp.doctor.compute import check_shared_gpus, own_gpu
from pipecomp.doctor.finding import OK, PROBLEM, Finding, has_problem
from pipecomp.doctor.launch import Launch
from pipecomp.doctor.measure import Measured, follow, lead
from pipecomp.doctor.peers import Identity, check_clocks, check_joined, check_pair, check_same_versions, pairs

_PREFIX = "pipecomp/doctor"
_SILENCE_S = 10.0  # of a rank that is being measured
_MEASURE_S = 60.0  # no pair begins to be measured after that


class Meeting:
    """This rank's part in a meeting of all ranks; call the methods in their order, on every rank.

    limit_s: how long to wait for the other ranks to come, and for each sign of life after that.
    Raises MeetingError if they do not come.
    """

    def __init__(self, launch: Launch, versions: Mapping[str, str], *, limit_s: float) -> None:
        assert launch.rank is not None, "started by a launcher"
        assert launch.world is not None, "started by a launcher"
        self.rank, self.world, self._limit_s = launch.rank, launch.world, limit_s
        self._limit = timedelta(seconds=limit_s)
        try:
            store, _, _ = next(iter(rendezvous("env://", self.rank, self.world, timeout=self._limit)))
            self._store = dist.PrefixStore(_PREFIX, store)
            mine = Identity(self.rank, socket.gethostname(), _machine(), own_gpu(launch.local_rank), versions)
            self._store.set(f"identity/{self.rank}", json.dumps(mine))
            self.identities = [Identity(*self._get(f"identity/{rank}")) for rank in range(self.world)]
        except (RuntimeError, ValueError) as error:
            raise MeetingError(_first_line(error)) from error

    def measure(self) -> list[Finding]:
        """Connect all ranks and measure, pair after pair; the findings on rank 0, nothing on the others."""
        error = None
        try:
            dist.init_process_group(
                "gloo", store=self._store, rank=self.rank, world_size=self.world, timeout=self._limit
            )  # fmt: skip
        except (RuntimeError, ValueError) as caught:
            error = _first_line(caught)
        self._store.set(f"joined/{self.rank}", json.dumps(error))
        joined = {rank: self._said(f"joined/{rank}", 2 * self._limit_s) for rank in range(self.world)}
        errors = {rank: found for rank, found in joined.items() if found is not None}
        findings = [check_joined(errors, self.identities), check_same_versions(self.identities)]
        findings += check_shared_gpus((i.rank, i.gpu) for i in self.identities if i.gpu is not None)
        chosen = [] if errors else pairs([i.machine for i in self.identities])
        until = time.monotonic() + _MEASURE_S
        for number, pair in enumerate(chosen):
            if self.rank in pair:
                self._take_turn(number, pair, until)
        for number, (first, second) in enumerate(chosen if self.rank == 0 else ()):
            result = self._said(f"pair/{number}", until - time.monotonic() + 2 * _SILENCE_S)
            if isinstance(result, list):
                result = Measured(*result)
            a, b = self.identities[first], self.identities[second]
            clocks = check_clocks(a, b, result) if isinstance(result, Measured) else None
            findings += [check_pair(a, b, result), *([clocks] if clocks else [])]
        return findings if self.rank == 0 else []

    def _take_turn(self, number: int, pair: tuple[int, int], until: float) -> None:
        """Measure one pair: they take turns, so that no two share a cable. until: when no more are begun."""
        if number:
            self._said(f"pair/{number - 1}", until - time.monotonic() + _SILENCE_S)
        leads = self.rank == pair[0]
        if leads:
            self._store.set(f"turn/{number}", json.dumps(time.monotonic() < until))
        if self._said(f"turn/{number}", until - time.monotonic() + 2 * _SILENCE_S) is not True:
            result: object = None
        elif leads:
            try:
                result = lead(pair[1], limit_s=_SILENCE_S)
            except RuntimeError as error:
                result = _first_line(error)
        else:
            with contextlib.suppress(RuntimeError):  # the leading rank reports it
                follow(pair[0], limit_s=_SILENCE_S)
        if leads:
            self._store.set(f"pair/{number}", json.dumps(result))

    def collect(self, own: Sequence[Finding], wait_s: float) -> list[Finding]:
        """Hand in what each rank found on its machine; all of it on rank 0, nothing on the others.

        Of the machines of other ranks, only what is not well, and how much is. wait_s: for all of them together.
        """
        if self.rank != 0:
            self._store.set(f"found/{self.rank}", json.dumps(own))
            return []
        collected = list(own)
        for identity in self.identities[1:]:
            where = f"rank {identity.rank} on {identity.host}"
            try:
                found = [Finding(*values) for values in self._get(f"found/{identity.rank}", wait_s)]
            except RuntimeError as error:
                advice = "Look at what that rank printed, and whether its machine is still there."
                collected.append(Finding(where, PROBLEM, f"said nothing: {_first_line(error)}", advice))
                continue
            collected += [f._replace(found=f"{where}: {f.found}") for f in found if f.verdict != OK]
            well = sum(f.verdict == OK for f in found)
            if found:
                collected.append(Finding(where, OK, f"{well} of {len(found)} checks of its machine are well"))
        return collected

    def finish(self, findings: Sequence[Finding]) -> bool:
        """End together, once rank 0 has reported; on every rank whether anything is a problem."""
        problem = has_problem(findings)
        try:
            if self.rank == 0:
                self._store.set("problem", json.dumps(problem))
                for rank in range(1, self.world):
                    self._get(f"left/{rank}")  # this process may serve the store: it must be the last
            else:
                problem = self._get("problem", 20 * self._limit_s)
                self._store.set(f"left/{self.rank}", "1")
        except RuntimeError:
            problem = True
        if dist.is_initialized():
            dist.destroy_process_group()
        return problem

    def _get(self, key: str, wait_s: float | None = None) -> Any:
        self._store.wait([key], timedelta(seconds=self._limit_s if wait_s is None else wait_s))
        return json.loads(self._store.get(key))


    def _said(self, key: str, wait_s: float) -> Any:
        """What another rank left there, or a sentence saying that it left nothing."""
        try:
            return self._get(key, max(1.0, wait_s))
        except RuntimeError as error:
            return f"a rank said nothing ({_first_line(error)})"


class MeetingError(RuntimeError):
    """The ranks did not meet; the message is torch's first line."""


def check_met(launch: Launch, error: str, limit_s: float) -> Finding:
    """The ranks did not meet."""
    port = os.environ.get("MASTER_PORT", "not set")
    found = f"the {launch.world} ranks did not meet at {launch.master} port {port} in {limit_s:.0f} s: {error}"
    advice = (
        f"Start all ranks within {limit_s:.0f} s, with the same MASTER_ADDR and MASTER_PORT; rank 0's machine must let "
        "that port in (see its firewall)."
    )
    return Finding("meeting", PROBLEM, found, advice)


def _machine() -> str:
    """The same for processes that share a network: containers and network namespaces are machines of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
