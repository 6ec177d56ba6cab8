"""Ranks that start again without a lost machine: on a spare one in its place, or on those that are left.

Machines that answer again, and new ones, become spares. Rank 0 predicts what a new cut with them would bring, and may
ask for a start with them (`pipecomp.recipes.machine_watch`). One launcher decides about losses, the one that `pipecomp
train --peers` runs in, so that a network that is cut in two cannot make two runs of one. Ranks on machines that it
cannot reach end by themselves. The ranks find the newest complete state themselves; the launcher knows nothing about
it.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from pipecomp.distributed.launch_env import CANDIDATES, COMMAND, MACHINES, RESTARTS, STARTS, read_start
from pipecomp.distributed.ssh_launcher import (
    RankCommand,
    assign_ranks,
    is_this_machine,
    read_remote,
    try_login,
    watch_ranks,
    working_directory,
)
from pipecomp.distributed.supervisor import StartCount, final_status
from pipecomp.errors import require, writable, write_error
from pipecomp.utils.files import UNFINISHED, atomic_write_text
from pipecomp.utils.units import format_count

LOCAL = "this machine"  # in a roster without hosts
_GRACE_S = 15.0  # for the remaining ranks to notice a loss and to end
_LOOK_S = 30.0  # between two attempts to reach a lost machine
_READ_BYTES = 1 << 16
_READ_S = 1.0  # between two looks for requests to join
JOIN = "join.txt"  # in the run's folder on the launcher's machine
_ADVICE = "The launcher looks which machines answer"
_GO_ON = "Run the same command again once that is mended; it goes on from the newest complete state of its machines"


@dataclass(frozen=True)
class Roster:
    """The machines of a run.

    Attributes:
        hosts: In the order of the stages, as for ssh; LOCAL for all ranks on this one.
        spares: Machines that take the place of lost ones, the first one first.
        lost: Machines that did not answer.
        places: Number of machines at the start.
        kept: Number of spare machines at the start, which a new cut leaves.
        refused: Machines with which the run did not go on.
        leaving: Lost machines that were told to end, and may still answer: they are back once they were silent.
    """

    hosts: tuple[str, ...]
    spares: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    places: int = 0
    kept: int = 0
    refused: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()

    @classmethod
    def start(cls, hosts: Sequence[str], spares: Sequence[str] = ()) -> Roster:
        """Return the roster at the start. Raises ConfigError for a spare machine that already takes part."""
        twice = sorted(set(hosts) & set(spares)) or sorted({host for host in spares if spares.count(host) > 1})
        require(not twice, "--spare", ",".join(spares), "machines that are not in --peers, each once")
        return cls(tuple(hosts), tuple(spares), (), len(hosts), len(spares))

    def without(self, silent: Iterable[str], left: Iterable[str] = ()) -> Roster:
        """Return the roster after a loss: spares take the places of lost machines, as far as there are any.

        The order of the machines that stay is kept, so that they keep their stages where they can.

        Args:
            silent: Machines that do not answer.
            left: Machines that answer, and were told to end.
        """
        leaving = tuple(dict.fromkeys((*self.leaving, *left)))
        silent = {*silent, *left}
        spares = [host for host in self.spares if host not in silent]
        hosts: list[str] = []
        for host in self.hosts:
            if host not in silent:
                hosts.append(host)
            elif spares:
                hosts.append(spares.pop(0))
        lost = [host for host in (*self.lost, *self.hosts, *self.spares) if host in silent]
        lost = list(dict.fromkeys(lost))
        return replace(self, hosts=tuple(hosts), spares=tuple(spares), lost=tuple(lost), leaving=leaving)

    def after_look(self, asked: Sequence[str], silent: Iterable[str]) -> tuple[Roster, list[str]]:
        """Return the roster after a look at some of the lost machines, and those that are back."""
        back = [host for host in asked if host not in silent and host not in self.leaving]
        leaving = tuple(host for host in self.leaving if host not in asked or host not in silent)
        return replace(self, leaving=leaving), back

    def with_spares(self, found: Iterable[str]) -> Roster:
        """Return the roster with machines that came, or came back, as spares."""
        found = [host for host in dict.fromkeys(found) if host not in (*self.hosts, *self.spares)]
        lost = tuple(host for host in self.lost if host not in found)
        leaving = tuple(host for host in self.leaving if host not in found)
        return replace(self, spares=(*self.spares, *found), lost=lost, leaving=leaving)

    def candidates(self) -> tuple[str, ...]:
        """Return the spare machines that a new cut may take in: all that are needed, beyond those of --spare.

        With fewer machines than at the start all of them are needed.
        """
        return self.spares if len(self.hosts) < self.places else self.spares[self.kept :]

    def grown(self, more: int) -> Roster:
        """Return the roster with the first `more` candidates in the last places."""
        taken = self.candidates()[:more]
        spares = tuple(host for host in self.spares if host not in taken)
        return replace(self, hosts=(*self.hosts, *taken), spares=spares)

    def without_newcomers(self, before: Roster) -> Roster:
        """Return the roster of an earlier start, as far as its machines take part now."""
        stay = tuple(host for host in self.hosts if host in before.hosts)
        return replace(self, hosts=stay, refused=(*self.refused, *(host for host in self.hosts if host not in stay)))


def silent_hosts(hosts: Iterable[str], folders: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the hosts that this machine cannot log in to, and why.

    folders: Working directories of hosts that have another one than this process.
    """
    others = [host for host in dict.fromkeys(hosts) if host != LOCAL and not is_this_machine(host)]
    if not others:
        return {}
    lines = [f"cd {shlex.quote(folders.get(host, working_directory()))}" for host in others]
    with ThreadPoolExecutor(len(others)) as pool:
        answers = dict(zip(others, pool.map(try_login, others, lines), strict=True))
    return {host: why for host, why in answers.items() if why is not None}


def write_file(host: str, path: Path, text: str, folder: str | None = None) -> str | None:
    """Write a file on a host, below the run's working directory; return why that failed, None if it has succeeded.

    folder: The working directory there; None for that of this process.
    """
    if host == LOCAL or is_this_machine(host):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(path, text)
        except OSError as error:
            return write_error(error, str(path))
        return None
    part = path.with_name(f"{path.name}{UNFINISHED}")
    words = [f"cd {shlex.quote(folder or working_directory())}", f"mkdir -p {shlex.quote(str(path.parent))}"]
    words += [f"printf %s {shlex.quote(text)} > {shlex.quote(str(part))}"]
    words += [f"mv {shlex.quote(str(part))} {shlex.quote(str(path))}"]
    return try_login(host, " && ".join(words))


def read_file(host: str, path: Path, folder: str | None = None) -> str | None:
    """Return the text of a small file on a host, None if it cannot be read. The arguments are those of `write_file`."""
    if host == LOCAL or is_this_machine(host):
        try:
            return path.read_text(errors="replace")
        except OSError:
            return None
    words = [f"cd {shlex.quote(folder or working_directory())}", f"head -c {_READ_BYTES} {shlex.quote(str(path))}"]
    return read_remote(host, " && ".join(words))


class Arrivals:
    """Looks, while ranks run, for machines that answer again and for requests to join; tells rank 0 of them.

    Args:
        roster: The machines of this start.
        number: Number of this start.
        out: The run's folder. Each line that is added to its file JOIN, here, names a host that joins.
        seen: Number of lines of that file that were handled.
        silent: See `silent_hosts`.
        write: See `write_file`.
        lacking: Returns which of the hosts that would join cannot run a rank, and why.

    Attributes:
        roster: The machines, with those that came.
        seen: As above. Lines that are not handled yet at the end are those of the next start.
    """

    def __init__(
        self,
        roster: Roster,
        number: int,
        out: Path | None,
        seen: int,
        silent: Callable[[Iterable[str]], dict[str, str]],
        write: Callable[[str, Path, str], str | None],
        lacking: Callable[[Sequence[str]], dict[str, str]],
    ) -> None:
        self.roster, self.seen = roster, seen
        self._number, self._out, self._silent, self._write = number, out, silent, write
        self._lacking = lacking
        self._pool = ThreadPoolExecutor(1)
        self._work: Future[None] | None = None
        self._next_read = 0.0
        self._next_look = time.monotonic() + _LOOK_S
        self._told: tuple[str, ...] = ()
        self._ending = threading.Lock()
        self._ended = False

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._ending:
            self._ended = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self) -> None:
        """Look, if it is time; called again and again. Logins take seconds, and happen on a thread."""
        now = time.monotonic()
        if now < self._next_read or (self._work is not None and not self._work.done()):
            return
        if self._work is not None and (error := self._work.exception()) is not None:
            _say(f"machines that come are not noticed for now: {error}")
        self._next_read, self._work = now + _READ_S, None
        asked, seen = self._requests()
        lost = self.roster.lost if now >= self._next_look else ()
        if asked or lost or self.roster.candidates() != self._told:
            self._work = self._pool.submit(self._admit, asked, seen, lost)

    def _requests(self) -> tuple[list[str], int]:
        """Return the hosts that ask to join, and the number of lines up to the last one."""
        if self._out is None:
            return [], self.seen
        try:
            lines = (self._out / JOIN).read_text().splitlines()
        except OSError:
            return [], self.seen
        new = [line.strip() for line in lines[self.seen :] if line.strip() and not line.startswith("#")]
        return new, max(self.seen, len(lines))

    def _admit(self, asked: Sequence[str], seen: int, lost: Sequence[str]) -> None:
        """Ask machines, take those in that answer, and tell rank 0. seen: number of lines with the requests."""
        known = {*self.roster.hosts, *self.roster.spares}
        joining = [host for host in dict.fromkeys(asked) if host not in known and not host.startswith("-")]
        try:
            why = self._lacking(joining) | self._silent([*joining, *lost])
        except Exception:
            self.seen = seen
            raise
        with self._ending:  # a start that ends meanwhile leaves the requests to the next one
            if self._ended:
                return
            for host in asked:
                if host not in joining:
                    _say(f"{host} cannot join: it {'takes part already' if host in known else 'is no name of a host'}")
            for host in joining:
                if host in why:
                    _say(f"{host} cannot join: {why[host]}. Add the line once more when that is mended")
            came = [host for host in joining if host not in why]
            roster, back = self.roster.after_look(lost, why)
            for text, hosts in (("joins", came), ("answers again", back)):
                if hosts:
                    _say(f"{', '.join(hosts)} {text}: a spare, unless steps get 10 % faster with it")
            if lost:
                self._next_look = time.monotonic() + _LOOK_S
            self.roster, self.seen = roster.with_spares([*back, *came]), seen
        candidates = self.roster.candidates()
        if candidates == self._told or self._out is None:
            return
        text = json.dumps({"start": self._number, "names": candidates})
        problem = self._write(self.roster.hosts[0], self._out / CANDIDATES, text)
        if problem is None:
            self._told = candidates
        else:
            _say(f"{', '.join(candidates)} stays a spare for now: {self.roster.hosts[0]} was not told ({problem})")


def launch_elastic(
    command: Callable[[int], Sequence[str]],
    roster: Roster,
    each: int,
    silent: Callable[[Iterable[str]], dict[str, str]] = silent_hosts,
    *,
    out: Path | None = None,
    write: Callable[[str, Path, str], str | None] = write_file,
    read: Callable[[str, Path], str | None] = read_file,
    place: Callable[[list[RankCommand]], list[RankCommand]] = lambda ranks: ranks,
    lacking: Callable[[Sequence[RankCommand]], dict[str, str]] = lambda ranks: {},
    needs: Sequence[str] = (),
) -> int:
    """Start the ranks, and start them again on the machines that answer after one is lost, or with those that come.

    Args:
        command: Takes the number of ranks, and returns program and arguments of a rank.
        roster: The machines.
        each: Ranks per machine.
        silent: See `silent_hosts`.
        out: The run's folder, relative to the working directory of all machines; None if no machine can join.
        write: See `write_file`.
        read: See `read_file`.
        place: Changes the commands of ranks on machines that were set up.
        lacking: Returns hosts that cannot run their ranks, and why; a machine that joins is asked before.
        needs: Files and folders that a machine which joins must have.

    Returns:
        0, or the status of the rank that failed first in the last start, also after MOST_STARTS starts in a row that
        have reached no newer step.

    Raises:
        ConfigError: A program cannot be started, or the first machine has no address.
    """

    def cannot_join(hosts: Sequence[str]) -> dict[str, str]:
        one = tuple(command(each))
        return lacking([RankCommand(rank=0, host=host, command=one, needs=tuple(needs)) for host in hosts])

    def begun_at(hosts: Sequence[str]) -> int | None:
        if out is None:
            return None
        with ThreadPoolExecutor(len(hosts)) as pool:
            texts = pool.map(read, hosts, [out / STARTS] * len(hosts))
        return next((step for text in texts if (step := read_start(text, name, number)) is not None), None)

    number, seen, before, starts, name = 0, 0, roster, StartCount(), secrets.token_hex(8)
    if out is not None and LOCAL not in roster.hosts:
        with writable("--out", out):
            out.mkdir(parents=True, exist_ok=True)
            (out / JOIN).write_text("# Hosts that join this run, one a line.\n")
        seen = 1
        _say(f"another machine joins with: echo HOST >> {shlex.quote(str(out / JOIN))}")
    while True:
        world = each * len(roster.hosts)
        hosts = () if roster.hosts == (LOCAL,) else roster.hosts
        variables = {RESTARTS: str(number), MACHINES: ",".join(roster.hosts), COMMAND: name} | starts.variables()
        ranks = place(assign_ranks(command(world), world, hosts, variables))
        with Arrivals(roster, number, out, seen, silent, write, cannot_join) as arrivals:
            ended = watch_ranks(ranks, grace_s=_GRACE_S, go_on=_ADVICE, meanwhile=arrivals.look)
        earlier, before = before, roster
        roster, seen = arrivals.roster, arrivals.seen
        newcomers = [host for host in roster.hosts if host not in earlier.hosts]
        left = {hosts[rank // each] for rank in ended.left if hosts}
        answering: list[str] = []  # machines that were told to end
        failed = ended.status and not (ended.stopped or ended.is_whole)
        if ended.more is not None:
            starts = StartCount()  # this one has trained
        if ended.more is not None and not ended.lost:
            roster = roster.grown(ended.more)
            added = [host for host in roster.hosts if host not in before.hosts]
            reason = f"{', '.join(added)} takes part" if added else "a new cut"
        elif ended.is_loss or ended.more is not None:
            why = silent((*roster.hosts, *roster.spares, *roster.lost))
            answering = [host for host in before.hosts if host in left and host not in why]
            roster, back = roster.after_look(roster.lost, why)
            roster = roster.with_spares(back).without(why, left - set(why))
            why = dict.fromkeys(left, "it was told to end") | why
            if not roster.hosts:
                _say(f"no machine of the run is left: {_list(why)}. {_GO_ON}")
                return final_status(ended.status)
            fruitless = starts.add(begun_at(roster.hosts)) if ended.more is None else None
            if fruitless is not None:
                _say(f"{fruitless}. {_GO_ON}")
                return final_status(ended.status)
            roster = roster.grown(ended.more or 0)
            gone = {host: why[host] for host in before.hosts if host in why}
            what = "leaves" if left.issuperset(gone) else "is lost"
            reason = f"{_list(gone)} {what}" if gone else "a rank was lost, and its machine answers"
        elif failed and 0 < len(newcomers) < len(roster.hosts) and not starts.ends_at(begun_at(roster.hosts)):
            roster = before = roster.without_newcomers(earlier)
            reason = f"the run did not go on with {', '.join(newcomers)}"
        else:
            return final_status(ended.status)
        number += 1
        count = format_count(each * len(roster.hosts), "stage")
        _say(f"{reason}. Restart {number}: {count} on {', '.join(roster.hosts)}{_spares(roster)}")
        joins = None if out is None else shlex.quote(str(out / JOIN))
        for host in answering if joins else ():
            line = f"echo {shlex.quote(host)} >> {joins}"
            _say(f"{host} still answers: it is a spare again once it was away for some time, or at once with: {line}")


def _list(why: dict[str, str]) -> str:
    return ", ".join(f"{host} ({reason})" for host, reason in why.items())


def _spares(roster: Roster) -> str:
    return f"; spare: {', '.join(roster.spares)}" if roster.spares else ""


def _say(text: str) -> None:
    print(f"pipecomp: {text}", file=sys.stderr, flush=True)
