"""The second home: each rank's record goes to another rank while training continues.

All ranks agree at the same steps whether a record is due: it is not while one of them still sends the one before. At
such a step the state is copied in host memory; threads do the rest. A rank writes its own record to disk, and sends its
second home the difference from the newest record that both have. The second home writes it, too. A step is complete
when all ranks have both copies; the two newest complete steps stay.

# Note: precedence
Records travel in the groups in which replicas average gradients, in slices of 64 KiB. Before each slice the thread
waits while packets of the pipeline are queued, and pauses so that records have part of the line only. So a packet waits
for one slice at most.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipecomp.allreduce.group import Group
from pipecomp.config.elastic import Elastic
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.preemption import say_here
from pipecomp.elastic.index import RecordFolder, forget_other_sessions
from pipecomp.elastic.record import RecordInfo, StateRecord
from pipecomp.elastic.schedule import BURST, LineShare, LossBound, RecordSchedule, steps_between
from pipecomp.elastic.transfer import NO_BASE, HomePlan, RecordJob, RecordReceiver, RecordSender
from pipecomp.errors import ConfigError, require, writable

_KEPT = 2  # newest complete steps
_TAKEN = 8  # steps of records that are remembered
_FAILED_S = 5.0  # for threads to end when other ranks may be gone
_SMOOTHING = 0.2  # weight of the last step in the mean step time
_SLACK_BYTES = 1 << 28

_log = logging.getLogger(__name__)


def choose_homes(
    setting: int | str,
    pipelines: Sequence[Sequence[int]],
    hosts: Sequence[str],
    machines: Sequence[str] | None = None,
) -> list[int]:
    """Return the second home of each rank.

    Args:
        setting: `elastic.second_home`, not "off".
        pipelines: For each replica the global ranks of its stages in order.
        hosts: Host of each rank.
        machines: Identifier of each rank's machine; by default the host's name, which several may have.

    Returns:
        By rank: the next stage's rank on another machine, after the last stage the first; with all stages on one
        machine a rank of another replica elsewhere, else the next stage's. If one rank holds all states, its own goes
        to the next one.

    Raises:
        ConfigError: There is one rank only, or no such rank or host.
    """
    world, machines = len(hosts), hosts if machines is None else machines
    require(world > 1, "elastic.second_home", setting, "'off' with one rank")
    spare: int | None = None
    if isinstance(setting, int):
        require(setting < world, "elastic.second_home", setting, f"a rank below {world}, 'next' or a host's name")
        spare = setting
    elif setting != "next":
        known = ", ".join(sorted(set(hosts)))
        allowed = f"'off', 'next', a rank, or one of the hosts {known}"
        require(setting in hosts, "elastic.second_home", setting, allowed)
        spare = hosts.index(setting)
    homes = [0] * world
    for ranks in pipelines:
        for stage, rank in enumerate(ranks):
            after = [*ranks[stage + 1 :], *ranks[:stage]]
            others = [*after, *((rank + i) % world for i in range(1, world))]
            elsewhere = (other for other in others if machines[other] != machines[rank])
            homes[rank] = next(elsewhere, others[0]) if spare in (None, rank) else int(spare or 0)
    return homes


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state of a rank after a step.

    files: Contents of the rank's files, see `StateRecord.take`. folder, engine: see `RecordInfo`.
    """

    files: Mapping[str, Any]
    folder: str
    engine: str = ""


def data_limit(trained: int, parameters: int) -> int:
    """Return the largest data of a record that a rank accepts, in bytes.

    trained, parameters: numbers of values of the stage. A trained one has at most weights, master, two moments,
    residuals and the state of local steps, in float32.
    """
    return 64 * trained + 8 * parameters + _SLACK_BYTES


class SecondHome:
    """Sends this rank's records to its second home, and takes those of others. All ranks call the same methods.

    Args:
        settings: The section "elastic".
        plan: Plan of all ranks.
        give_way: Returns when no packet of the pipeline is being sent.

    Attributes:
        folder: The records that this rank has.
        due: Step after which the next record is due.
        schedule: Schedule of the records so far; None before the first.

    Raises:
        ConfigError: The folder cannot be written. From `end_step` and `save`: the state has objects of other classes.
    """

    def __init__(self, settings: Elastic, plan: HomePlan, give_way: Callable[[], None]) -> None:
        self._settings, self.plan = settings, plan
        with writable("elastic.path", settings.path):
            self.folder = RecordFolder(Path(settings.path) / f"rank-{plan.rank}")
        self.due = 0
        self.schedule: RecordSchedule | None = None
        self._stated = LossBound()
        self._session = ""
        self._step_s = 0.0
        self._taken: list[int] = []  # steps of this session's records
        self._failed = False
        self._warned: set[str] = set()
        auto = settings.every_steps == "auto"
        share = LineShare(give_way, BURST * settings.line_share if auto else 1.0)
        self._sender: RecordSender | None = None
        self._receivers: dict[int, RecordReceiver] = {}
        for source, home in sorted(enumerate(plan.homes)):  # in the same order on all ranks
            if plan.rank not in (source, home):
                continue
            group = Group([source, home], timeout_s=plan.timeout_s)
            if plan.rank == source:
                group.give_way = share.wait
                self._sender = RecordSender(group, self.folder, share, home)
            else:
                group.give_way = _send_at_once  # slices, as at the sender
                self._receivers[source] = RecordReceiver(group, self.folder, plan, source)
        assert self._sender is not None

    # -- called after steps

    def end_step(self, step: int, step_s: float, state: Callable[[], RankState]) -> None:
        """Take and send a record if one is due after `step`.

        Args:
            step: Optimizer steps so far.
            step_s: Seconds of the last one.
            state: Called if a record is due.
        """
        self._step_s += (step_s - self._step_s) * (_SMOOTHING if self._step_s else 1.0)
        if step < self.due or self._failed:
            return
        if self._agree(step):
            self.due = step + max(1, (self.schedule.every_steps if self.schedule else 1) // 4)  # one is being sent
        elif not self._failed:
            self._start(step, state(), None)

    def save(self, step: int, folder: Path, state: Callable[[], RankState], *, again: bool = False) -> None:
        """Send a record of a checkpoint, and keep it as long as the checkpoint is there.

        Args:
            step: Optimizer steps so far.
            folder: The checkpoint's.
            state: Called if a record is taken.
            again: Take one even if the step has a record, which lacks something.
        """
        if self._failed:
            return
        self._agree(step)
        if step in self._taken and not again:
            self._keep(step, str(folder.absolute()))
        elif not self._failed:
            self._start(step, state(), str(folder.absolute()))

    def _agree(self, step: int) -> bool:
        """Learn what all ranks have, and delete what nobody needs; returns whether one of them still sends."""
        sender = self._require_sender()
        own = {
            "session": self._session or secrets.token_hex(8),
            "own": self.folder.steps_of(self.plan.rank, self._session),
            "held": {source: self.folder.steps_of(source, self._session) for source in self.plan.sources},
            "busy": sender.busy or any(receiver.busy for receiver in self._receivers.values()),
            "sent": sender.last,
            "step_s": self._step_s,
            "failed": self._failure(),
            "problem": self._take_problem(),
        }
        answers = gathered(own)
        if not self._session:
            self._session = str(answers[0]["session"])
            self.folder.forget_from(step)
        for rank, answer in enumerate(answers):
            if answer["problem"] and self.plan.rank == 0 and answer["problem"] not in self._warned:
                self._warned.add(answer["problem"])
                _log.warning("second home: rank %d: %s", rank, answer["problem"])
        homes = enumerate(self.plan.homes)
        common = [set(answers[rank]["own"]) & set(answers[home]["held"][rank]) for rank, home in homes]
        complete = sorted(set.intersection(*common))
        newer = complete != self.folder.complete
        self.folder.set_complete(complete)
        # On a second home whose disk is full nothing becomes complete, and yet records must not pile up elsewhere.
        wanted = {*complete[-_KEPT:], *self._taken[-_KEPT:]}
        if self._taken:
            self.folder.keep(wanted, self._session, earlier=len(complete) < _KEPT)
        if newer and len(complete) >= _KEPT and os.environ.get("LOCAL_RANK", "0") == "0":
            with contextlib.suppress(OSError):  # tried again with the next record
                forget_other_sessions(Path(self._settings.path), self._session)
        self._base = max(common[self.plan.rank] & wanted, default=NO_BASE)
        self._reschedule([answer["sent"] for answer in answers], max(answer["step_s"] for answer in answers))
        failed = next((answer["failed"] for answer in answers if answer["failed"]), None)
        if failed is not None:
            self._failed = True
            if self.plan.rank == 0:
                _log.warning("second home: no more records are sent: %s", failed)
        return any(answer["busy"] for answer in answers)

    def _reschedule(self, sent: list[list[float] | None], step_s: float) -> None:
        """Set the steps between records. sent: of each rank's last record, bytes, line seconds, all seconds."""
        given = [each for each in sent if each is not None]
        if not given or step_s <= 0:
            return
        size, line_s, sending_s = (max(each[i] for each in given) for i in range(3))
        every = self._settings.every_steps
        if every == "auto":
            every = steps_between(line_s, step_s, self._settings.line_share)
        self.schedule = RecordSchedule(size, int(every), max(1, math.ceil(sending_s / step_s)))
        if self._stated.update(self.schedule) and self.plan.rank == 0:
            say_here(f"second home: {self.schedule.describe(self._stated.steps)}")

    def _start(self, step: int, state: RankState, checkpoint: str | None) -> None:
        plan = self.plan
        self._require_sender().wait_for_room()
        info = RecordInfo(
            session=self._session,
            step=step,
            rank=plan.rank,
            world=len(plan.homes),
            stage=plan.stage,
            cuts=plan.cuts,
            folder=state.folder,
            engine=state.engine,
        )
        try:
            record = StateRecord.take(info, state.files)
        except TypeError as error:
            allowed = f"'off' with this optimizer or model: {error}"
            raise ConfigError("elastic.second_home", self._settings.second_home, allowed) from error
        job = RecordJob(step, self._session, checkpoint, self._base, record)
        self._taken = [*self._taken, step][-_TAKEN:]
        every = self._settings.every_steps
        interval = self.schedule.every_steps if self.schedule else 1
        self.due = step + interval if every == "auto" else (step // int(every) + 1) * int(every)
        for receiver in self._receivers.values():
            receiver.put(job.without_record())
        self._require_sender().put(job)

    def _keep(self, step: int, checkpoint: str) -> None:
        for worker in (self._require_sender(), *self._receivers.values()):
            worker.checkpoints[step] = checkpoint
        self.folder.bind(step, checkpoint)

    # -- state

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all records that were taken are on disk at both ends; return False after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for worker in (self._require_sender(), *self._receivers.values()):
            while worker.busy:
                if deadline is not None and time.monotonic() > deadline:
                    return False
                time.sleep(0.005)
        return True

    def stats(self) -> dict[str, Any]:
        """Return this rank's records so far.

        Returns:
            "home", "holds": ranks. "records": sent. "bytes": on the line. "raw_bytes": before compression. "line_s":
            seconds in which they were leaving, "waited_s" in which they waited for packets or their share.
            "complete": the newest complete step, None before the first. "every_steps", "lost_steps": of the schedule,
            None before the first record.
        """
        sender, schedule = self._require_sender(), self.schedule
        return {
            "home": sender.peer,
            "holds": self.plan.sources,
            "records": sender.records,
            "bytes": sender.sent_bytes,
            "raw_bytes": sender.raw_bytes,
            "line_s": sender.share.line_s,
            "waited_s": sender.share.waited_s,
            "complete": self.folder.complete[-1] if self.folder.complete else None,
            "every_steps": None if schedule is None else schedule.every_steps,
            "lost_steps": None if schedule is None else schedule.lost_steps,
        }

    def close(self, *, failed: bool = False) -> None:
        """Send the records of checkpoints that are still queued, cancel others, and end the threads.

        failed: other ranks may be gone; wait a few seconds only. May be called twice.
        """
        workers = [self._require_sender(), *self._receivers.values()]
        for worker in workers:
            worker.end(failed=failed)
        for worker in workers:
            worker.join(_FAILED_S / len(workers) if failed or self._failed else self.plan.stall_s)

    def _require_sender(self) -> RecordSender:
        assert self._sender is not None
        return self._sender

    def _failure(self) -> str | None:
        return next((w.failure for w in (self._require_sender(), *self._receivers.values()) if w.failure), None)

    def _take_problem(self) -> str | None:
        for worker in (self._require_sender(), *self._receivers.values()):
            if worker.problem:
                problem, worker.problem = worker.problem, None
                return problem
        return None


def _send_at_once() -> None:
    """Hold no slice back."""
