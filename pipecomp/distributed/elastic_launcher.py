"""Ranks that start again without a lost machine: on a spare one in its place, or on those that are left.

One launcher decides, the one that `pipecomp train --peers` runs in, so that a network that is cut in two cannot make
two runs of one. Ranks on machines that it cannot reach end by themselves. The ranks find the newest complete state
themselves; the launcher knows nothing about it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from pipecomp.distributed.launch_env import RESTARTS
from pipecomp.distributed.preemption import REQUEUE_STATUS
from pipecomp.distributed.ssh_launcher import (
    assign_ranks,
    is_this_machine,
    try_login,
    watch_ranks,
    working_directory,
)
from pipecomp.errors import require
from pipecomp.utils.units import format_count

LOCAL = "this machine"  # in a roster without hosts
_GRACE_S = 15.0  # for the remaining ranks to notice a loss and to end
_LOOK_S = 30.0  # between two attempts to reach a lost machine
_ADVICE = "The run goes on without it"
_GO_ON = "Run the same command again once they do; it goes on from the newest complete state that they have"


@dataclass(frozen=True)
class Roster:
    """The machines of a run.

    Attributes:
        hosts: In the order of the stages, as for ssh; LOCAL for all ranks on this one.
        spares: Machines that take the place of lost ones, the first one first.
        lost: Machines that did not answer.
        places: Number of machines at the start.
    """

    hosts: tuple[str, ...]
    spares: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    places: int = 0

    @classmethod
    def start(cls, hosts: Sequence[str], spares: Sequence[str] = ()) -> Roster:
        """Return the roster at the start. Raises ConfigError for a spare machine that already takes part."""
        twice = sorted(set(hosts) & set(spares)) or sorted({host for host in spares if spares.count(host) > 1})
        require(not twice, "--spare", ",".join(spares), "machines that are not in --peers, each once")
        return cls(tuple(hosts), tuple(spares), (), len(hosts))

    def without(self, silent: Iterable[str]) -> Roster:
        """Return the roster after a loss: spares take the places of lost machines, as far as there are any.

        The order of the machines that stay is kept, so that they keep their stages where they can.
        """
        silent = set(silent)
        spares = [host for host in self.spares if host not in silent]
        hosts: list[str] = []
        for host in self.hosts:
            if host not in silent:
                hosts.append(host)
            elif spares:
                hosts.append(spares.pop(0))
        lost = [host for host in (*self.lost, *self.hosts, *self.spares) if host in silent]
        return replace(self, hosts=tuple(hosts), spares=tuple(spares), lost=tuple(dict.fromkeys(lost)))

    def with_returned(self, answering: Iterable[str]) -> Roster:
        """Return the roster with lost machines that answer again: in an open place, otherwise as spares."""
        back = [host for host in self.lost if host in set(answering)]
        count = max(0, self.places - len(self.hosts))
        return replace(
            self,
            hosts=(*self.hosts, *back[:count]),
            spares=(*self.spares, *back[count:]),
            lost=tuple(host for host in self.lost if host not in back),
        )


def silent_hosts(hosts: Iterable[str]) -> dict[str, str]:
    """Return the hosts that this machine cannot log in to, and why."""
    others = [host for host in dict.fromkeys(hosts) if host != LOCAL and not is_this_machine(host)]
    if not others:
        return {}
    line = f"cd {working_directory()}"
    with ThreadPoolExecutor(len(others)) as pool:
        answers = dict(zip(others, pool.map(lambda host: try_login(host, line), others), strict=True))
    return {host: why for host, why in answers.items() if why is not None}


class Returning:
    """Looks from time to time whether a lost machine answers again.

    Args:
        roster: The machines.
        silent: See `silent_hosts`.
    """

    def __init__(self, roster: Roster, silent: Callable[[Iterable[str]], dict[str, str]]) -> None:
        self.found: tuple[str, ...] = ()
        self._roster, self._silent = roster, silent
        self._next_look = time.monotonic() + _LOOK_S
        self._pool = ThreadPoolExecutor(1)
        self._look: Future[dict[str, str]] | None = None

    def __enter__(self) -> Returning:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fills_a_place(self) -> bool:
        """Return True once a lost machine can take an open place."""
        roster = self._roster
        if self.found or not roster.lost or len(roster.hosts) >= roster.places:
            return bool(self.found)
        if self._look is None and time.monotonic() > self._next_look:
            self._look = self._pool.submit(self._silent, roster.lost)
        if self._look is not None and self._look.done():
            silent, self._look = self._look.result(), None
            self._next_look = time.monotonic() + _LOOK_S
            self.found = tuple(host for host in roster.lost if host not in silent)
        return bool(self.found)


def launch_elastic(
    command: Callable[[int], Sequence[str]],
    roster: Roster,
    each: int,
    silent: Callable[[Iterable[str]], dict[str, str]] = silent_hosts,
) -> int:
    """Start the ranks, and start them again on the machines that answer after one is lost.

    Args:
        command: Takes the number of ranks, and returns program and arguments of a rank.
        roster: The machines.
        each: Ranks per machine.
        silent: See `silent_hosts`.

    Returns:
        0, or the status of the rank that failed first in the last start.

    Raises:
        ConfigError: A program cannot be started, or the first machine has no address.
    """
    restarts = 0
    while True:
        world = each * len(roster.hosts)
        hosts = () if roster.hosts == (LOCAL,) else roster.hosts
        ranks = assign_ranks(command(world), world, hosts, {RESTARTS: str(restarts)})
        with Returning(roster, silent) as returning:
            ended = watch_ranks(ranks, grace_s=_GRACE_S, go_on=_ADVICE, asks_to_stop=returning.fills_a_place)
        if ended.status == REQUEUE_STATUS and returning.found and not ended.stopped:
            roster = roster.with_returned(returning.found)
            reason = f"{', '.join(returning.found)} answers again"
        elif ended.is_loss:
            why = silent((*roster.hosts, *roster.spares, *roster.lost))
            before, roster = roster, roster.without(why).with_returned(set(roster.lost) - set(why))
            if not roster.hosts:
                _say(f"no machine of the run answers: {_list(why)}. {_GO_ON}")
                return ended.status
            gone = {host: why[host] for host in before.hosts if host in why}
            reason = f"{_list(gone)} is lost" if gone else "a rank was lost, and its machine answers"
        else:
            return ended.status
        restarts += 1
        count = format_count(each * len(roster.hosts), "stage")
        _say(f"{reason}. Restart {restarts}: {count} on {', '.join(roster.hosts)}{_spares(roster)}")


def _list(why: dict[str, str]) -> str:
    return ", ".join(f"{host} ({reason})" for host, reason in why.items())


def _spares(roster: Roster) -> str:
    return f"; spare: {', '.join(roster.spares)}" if roster.spares else ""


def _say(text: str) -> None:
    print(f"pipecomp: {text}", file=sys.stderr, flush=True)
