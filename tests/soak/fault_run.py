"""A training with four ranks for an hour under faults that are drawn at random; see README.md.

Two stages with two replicas train a tiny GPT-2 by the code of the recipes. This process is their supervisor: where a
fault ends them, it starts them again, and they go on from the last checkpoint. In the first third of the time only
faults are drawn that a run survives, so that one start runs long enough to show leaks. After every end the stores of
both ends of all links are compared on disk, after every start by the ranks themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import tempfile
import time
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

from tests.soak.fault_report import NOTICED, SURVIVED, Event, Life, page, problems
from tests.soak.fault_work import ORDERED, order
from tests.soak.leaks import Sampler
from tests.soak.restart_work import Job, make_job, steps_of_epoch
from tests.soak.restarts import Start, stores_on_disk

WORLD, STAGES = 4, 2
TIMEOUT_S = 20.0  # transport.timeout_s
BEGIN_S, END_S = 300.0, 150.0  # on a busy machine: for a start to train, for the ranks to end by themselves
AGAIN_S = 90.0  # for a run to go on after a fault that it survives
PAUSE_S, CUT_S = (1.0, 6.0), (2.0, 8.0)
FATAL = (*NOTICED, "stored byte")
_VALUE = b"PCMV"  # what a stored value begins with


class FaultRun:
    """The supervisor of one run in `folder`."""

    def __init__(self, folder: Path, seed: int) -> None:
        from pipecomp.netlab.software import SharedState

        self.folder, self._draw = folder, random.Random(seed)
        self.job: Job = make_job(
            folder / "run",
            seed=0,
            stages=STAGES,
            epochs=10**7,
            save_every=100,
            timeout_s=TIMEOUT_S,
            store={"drift_check": 5},
        )
        self.job |= {"faults": True, "note_every": 10}
        self.events: list[Event] = []
        self.lives: list[Life] = []
        self._network = SharedState.create(folder / "network", WORLD)
        self.start = self._new_start()
        self._flipped = False  # since stores were last looked at
        self.sampler = Sampler(self._processes, folder, every_s=3.0)

    def run(self, minutes: float) -> None:
        """Until the time is over; then an end in order."""
        began = time.monotonic()
        while (left_s := began + 60 * minutes - time.monotonic()) > 0:
            if not self.start.wait(BEGIN_S, lambda: bool(self.start.found("step"))):
                raise RuntimeError(f"no step within {BEGIN_S:g} s:\n{self.start.said()}")
            at_s = round(time.monotonic() - began)
            if self.start.wait(min(left_s, self._draw.uniform(10, 30)), lambda: len(self.start.alive()) < WORLD):
                self.fault("nothing", at_s)
            elif left_s > 60:
                self.fault(self._draw.choice(SURVIVED if left_s > 40 * minutes else SURVIVED + FATAL * 2), at_s)
        for rank in range(WORLD):  # as a power cut does
            self.start.send(rank, SIGKILL)
        self._ended()
        steps = max(life.steps for life in self.lives)
        self.job |= {"epochs": steps // steps_of_epoch(WORLD // STAGES) + 5}
        self.start = self._new_start()
        late = self.start.end(2 * BEGIN_S)
        self._ended()
        if late or any(self.start.statuses()):
            raise RuntimeError(f"the last start did not end in order: {self.start.statuses()}\n{self.start.said()}")
        self.sampler.stop()
        self.sampler.sample()

    # -- faults

    def fault(self, kind: str, at_s: int) -> None:
        """Do it, and see what becomes of the run; starts it again if that ends it."""
        rank = self._draw.randrange(WORLD)
        said = self._said_bytes()
        began, victims = time.monotonic(), ()
        name = re.sub(r"\W", "_", kind)
        if kind in ORDERED:
            order(self.folder / "run", rank, kind)
            self.start.wait(AGAIN_S, lambda: ["fault", kind] in [n[:2] for n in self.start.notes(rank)][-50:])
            began = time.monotonic()
        else:
            victims = getattr(self, f"_{name}")(rank)
        mark = self.start.steps()
        went_on = (
            self.start.wait(
                END_S if kind in ("stop", "cut for good", "kill") else AGAIN_S,
                lambda: len(self.start.alive()) < WORLD or (not victims and self._all_beyond(mark + 20)),
            )
            and len(self.start.alive()) == WORLD
        )
        late: list[int] = []
        words = ""
        if not went_on:
            late = self.start.end(END_S, but=victims)
            words = self._words(said)
        seconds = time.monotonic() - began
        self.events.append(Event(at_s, kind, rank, went_on, round(seconds, 1), words, late))
        print(self.events[-1], flush=True)
        with self._network.change(*range(WORLD)) as states:
            for state in states:
                state.cut = False
        if not went_on:
            self._ended()
            self.start = self._new_start()

    def _nothing(self, rank: int) -> tuple[int, ...]:
        """The ranks have ended by themselves."""
        return ()

    def _kill(self, rank: int) -> tuple[int, ...]:
        self.start.send(rank, SIGKILL)
        return (rank,)

    def _stop(self, rank: int) -> tuple[int, ...]:
        self.start.send(rank, SIGSTOP)
        self.start.wait(END_S, lambda: self.start.alive() == [rank])
        return (rank,)

    def _pause(self, rank: int) -> tuple[int, ...]:
        self.start.send(rank, SIGSTOP)
        time.sleep(self._draw.uniform(*PAUSE_S))
        self.start.send(rank, SIGCONT)
        return ()

    def _cut_for_a_while(self, rank: int) -> tuple[int, ...]:
        with self._network.change(rank) as (state,):
            state.cut = True
        time.sleep(self._draw.uniform(*CUT_S))
        with self._network.change(rank) as (state,):
            state.cut = False
        return ()

    def _cut_for_good(self, rank: int) -> tuple[int, ...]:
        with self._network.change(rank) as (state,):
            state.cut = True
        self.start.wait(END_S, lambda: not self.start.alive())
        return ()

    def _stored_byte(self, rank: int) -> tuple[int, ...]:
        """Flip a bit of a value in a store's file; it may be in a page that is free, or soon overwritten."""
        path = self.folder / "run" / "messages" / f"rank-{rank}" / "data.mdb"
        places = [found.start() for found in re.finditer(_VALUE, path.read_bytes())]
        place = self._draw.choice(places) + 44
        with path.open("r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << self._draw.randrange(8)]), place)
        self._flipped = True
        return ()

    # -- what there is

    def _new_start(self) -> Start:
        from pipecomp.netlab.software import VARIABLE, ThrottleSettings

        def environment(rank: int) -> dict[str, str]:
            settings = ThrottleSettings(
                state=str(self.folder / "network"),
                node=rank,
                procs_per_node=1,
                up=[None] * WORLD,
                down=[None] * WORLD,
                delay_s=0.0,
                jitter_s=0.0,
            )
            return {VARIABLE: settings.text()}

        return Start(self.job, WORLD, len(self.lives), environment)

    def _processes(self) -> dict[str, int]:
        start = self.start
        number = len(self.lives)
        found = {f"start {number} rank {r}": process.pid for r, process in enumerate(start.ranks) if process.pid}
        return {"supervisor": os.getpid(), **found}

    def _all_beyond(self, step: int) -> bool:
        lasts = [[n[1] for n in self.start.notes(rank)[-60:] if n[0] == "step"] for rank in range(WORLD)]
        return all(steps and steps[-1] > step for steps in lasts)

    def _said_bytes(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in (self.folder / "run").glob("said-*.txt")}

    def _words(self, before: dict[Path, int]) -> str:
        """The errors that the ranks have printed since."""
        found: list[str] = []
        for path in sorted((self.folder / "run").glob("said-*.txt")):
            text = path.read_bytes()[before.get(path, 0) :].decode(errors="replace")
            found += [line for line in text.splitlines() if re.match(r"restarts: error|pipecomp: rank|\w+Error", line)]
        found.sort(key=lambda line: not line.startswith("restarts: error"))
        return " | ".join(dict.fromkeys(line[:300] for line in found))

    def _ended(self) -> None:
        """Look at what an ended start has left; after a flipped byte prune the stores, as the error says."""
        from pipecomp.buffers.admin import prune

        self.start.end(END_S)
        messages = self.folder / "run" / "messages"
        disk = stores_on_disk(messages)
        if disk.unopened and self._flipped:  # what was flipped is to be found as damaged, and nothing else
            prune(messages)
            disk = stores_on_disk(messages)
        self._flipped = False
        compared = [sum(column) for column in zip(*self.start.found("compared"), strict=True)]
        drifts = sum(words[0] for words in self.start.found("drifts"))
        dropped = sum(words[0] for words in self.start.found("dropped"))
        self.lives.append(Life(self.start.steps(), compared, drifts, dropped, disk))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of faults")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "benchmarks" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m tests.soak.fault_run --minutes {args.minutes:g} --seed {args.seed}"
    with tempfile.TemporaryDirectory(prefix="fault-run-") as folder:
        run = FaultRun(Path(folder), args.seed)
        run.run(args.minutes)
        text = page(run.events, run.lives, run.sampler, minutes=args.minutes, command=command)
        wrong = problems(run.events, run.lives, run.sampler)
    (args.out / "fault_run.md").write_text(text)
    print(text)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
