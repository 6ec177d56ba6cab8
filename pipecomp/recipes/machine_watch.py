"""Machines of a run that come, and those that become slow: rank 0 decides whether a new cut of the model is worth it.

The launcher tells rank 0 which machines wait to take part (`Candidates`, over TLS the mesh). The plan predicts a step
with them; if it gets at least 10 % faster, the ranks save a checkpoint and end with a status that asks the launcher for
a start with them. Otherwise they stay spares. In the same way a machine whose forward and backward take long is
reported, and with --rebalance the run goes on with a cut that suits it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipecomp.distributed.launch_env import CANDIDATES, machine_name, restarts
from pipecomp.distributed.preemption import MOST_MORE, current_interruption, say_here
from pipecomp.plan.new_cut import CutPlanner, NewCut
from pipecomp.tls.process_group import current_mesh

SLOW = 1.5  # times the seconds of the plan
WINDOW_S = 180.0  # of a machine that is reported
_FEWEST_STEPS = 3  # in a window
_LOOK_S = 1.0


def read_candidates(folder: Path) -> list[str]:
    """Return the machines that wait to take part, as the launcher of this start has written them."""
    try:
        found = json.loads((folder / CANDIDATES).read_text())
        return [str(name) for name in found["names"]] if found["start"] == restarts() else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def visiting_machines(procs: int) -> list[str]:
    """Return the machines that wait to take part in a run of `pipecomp up`. procs: ranks per machine."""
    mesh = current_mesh()
    return [] if mesh is None else [machine_name(rank // procs) for rank in mesh.visitors()]


def request_new_cut(more: int) -> None:
    """Let the ranks end after this step, and start again with `more` machines and a new cut."""
    interruption = current_interruption()
    if interruption is not None:
        interruption.ask_for_new_cut(more)


class MachineWatch:
    """Looks, after each step, for machines that wait to take part and for slow ones; on rank 0.

    Args:
        planner: Predicts steps.
        candidates: Returns the names of the machines that wait, in the order in which they are taken.
        each: Stages per machine.
        rebalance: True to make a new cut for a slow machine.
        write_plan: Writes the plan with a new cut of the same machines, which the next start reads.
        request: Called with the number of further machines to ask for a new cut.
        say: Prints a line.
        window_s: Seconds over which a machine is slow; None for WINDOW_S.
        clock: Returns seconds.
    """

    def __init__(
        self,
        planner: CutPlanner,
        candidates: Callable[[], Sequence[str]],
        *,
        each: int = 1,
        rebalance: bool = False,
        write_plan: Callable[[Mapping[str, Any]], None] = lambda made: None,
        request: Callable[[int], None] = request_new_cut,
        say: Callable[[str], None] = say_here,
        window_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner, self._candidates, self._each = planner, candidates, each
        self._rebalance, self._write_plan = rebalance, write_plan
        self._request, self._say = request, say
        self._window_s, self._clock = WINDOW_S if window_s is None else window_s, clock
        self._answered: tuple[str, ...] = ()
        self._next_look = 0.0
        self._requested = False
        self._planned: list[float] | None = None
        self._rows: deque[tuple[float, int, list[float]]] = deque()  # time, steps, seconds of each stage so far
        self._reported: set[str] = set()

    def end_step(self, stats: Sequence[Mapping[str, Any]]) -> None:
        """Look after a step. stats: `comm_stats` of all ranks."""
        if self._requested:
            return
        now = self._clock()
        try:
            if now >= self._next_look:
                self._next_look = now + _LOOK_S
                self._look_for_machines()
            if not self._requested and stats:
                self._look_for_slow(now, stats)
        except Exception as error:  # training goes on without an answer
            self._requested = True
            self._say(f"no prediction for other machines or cuts: {type(error).__name__}: {error}")

    def _look_for_machines(self) -> None:
        waiting = tuple(self._candidates())[:MOST_MORE]
        if not set(waiting) - set(self._answered):
            self._answered = waiting
            return
        self._answered = waiting
        names = self._planner.names
        ways = []
        for more in range(1, len(waiting) + 1):
            added = [name for name in waiting[:more] for _ in range(self._each)]
            ways.append((more, self._planner.choose([*names, *added])))
        possible = [way for way in ways if way[1].fits] or ways
        more, cut = min(possible, key=lambda way: way[1].step_s)
        text = f"{', '.join(waiting[:more] if cut.pays else waiting)} can take part: {cut}"
        if not cut.pays:
            self._say(f"{text}; under 10 % faster, so it stays a spare")
            return
        self._say(f"{text}; it is taken in, with a new cut")
        self._requested = True
        self._request(more)

    def _look_for_slow(self, now: float, stats: Sequence[Mapping[str, Any]]) -> None:
        if self._planned is None:
            self._planned = self._planner.stage_seconds()
        seconds = [0.0] * len(self._planner.names)
        for rank in stats:
            spent = rank["seconds"]["forward"] + rank["seconds"]["backward"]
            seconds[rank["stage"]] = max(seconds[rank["stage"]], spent)
        self._rows.append((now, stats[0]["steps"], seconds))
        while len(self._rows) > 2 and now - self._rows[1][0] >= self._window_s:
            self._rows.popleft()
        began, first, before = self._rows[0]
        steps = stats[0]["steps"] - first
        if now - began < self._window_s or steps < _FEWEST_STEPS:
            return
        measured = [(after - at_first) / steps for after, at_first in zip(seconds, before, strict=True)]
        factors: dict[str, float] = {}
        for name, spent, planned in zip(self._planner.names, measured, self._planned, strict=True):
            factors[name] = max(factors.get(name, 0.0), spent / planned)
        least = min(factors.values())
        slow = {name: factor for name, factor in factors.items() if factor > SLOW * max(1.0, least)}
        new = slow.keys() - self._reported
        self._reported = set(slow)
        if not new:
            return
        cut = self._planner.choose(self._planner.names, factors)
        self._report_slow({name: slow[name] for name in sorted(new)}, factors, cut, now - began)

    def _report_slow(
        self, slow: Mapping[str, float], factors: Mapping[str, float], cut: NewCut, passed_s: float
    ) -> None:
        listed = ", ".join(
            f"{name} ({factor:.1f} times the planned forward and backward)" for name, factor in slow.items()
        )
        text = f"slow for {passed_s / 60:.1f} minutes: {listed}. A new cut: {cut}"
        if not cut.pays:
            self._say(f"{text}; under 10 % faster, so the cut stays")
        elif not self._rebalance:
            self._say(f"{text}. Start the run with --rebalance for that, or replace the machine")
        else:
            self._say(f"{text}; it is made now")
            self._write_plan(self._planner.plan_of(cut, factors))
            self._requested = True
            self._request(0)
