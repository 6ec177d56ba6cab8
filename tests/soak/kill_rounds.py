"""Rounds of kill -9 at a random instant of a random rank, each followed by a resume; see README.md.

    python -m tests.soak.kill_rounds --rounds 200
    python -m tests.soak.kill_rounds --rounds 50 --local-steps

A small GPT-2 is trained over pipeline stages by the code of the recipes, with checkpoints and `--resume auto`. In every
round one rank is killed: while the ranks start, train, write a checkpoint or close. The others must end by themselves.
Then, before the next start, this process looks at what is on disk, without trusting the program:

- does every store open, with all of its pages and values whole?
- do the two ends of a link hold different messages under one version (a silent disagreement)?

In runs without copies of the stores one rank writes them late, as to a slow disk: killed there, it leaves its store up
to two steps behind its peer's, and the samples of these steps in doubt.

With --local-steps there are two replicas, which take local steps, and every kill that counts is in an outer step: from
when the rank sends how far it has moved until it takes the mean. One rank comes late to outer steps, so that the others
wait in them. The stores are in the checkpoints.

After every resume, and at the end, the ranks compare what they hold, sample for sample. The losses of a run that has
reached its end are compared with those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple

from benchmarks.runner import Kept, digest
from tests.soak.kill_report import page, summary, verdict
from tests.soak.restart_work import ACTIVATIONS, PHASES, make_job, steps_of_epoch
from tests.soak.restarts import Start, stores_on_disk

SEEDS = 3
EPOCHS, TIMEOUT_S = 3, 30.0
BEGIN_S, END_S = 120.0, 120.0  # on a busy machine: for a start to come to its first step, for the others to end
OUTER_STEPS = 4  # of a run with local steps that is not killed
SLOW_S, SLOW_SHARE = 0.3, 0.7  # for a step to be written by the late rank; how often that one is killed in training

Found = dict[str, Any]


class Series(NamedTuple):
    """Rounds of one kind.

    aims: at which phases kills are aimed, how often. counted: the phases in which a kill counts. kills_of_a_run: the
    most that do.
    """

    name: str
    stages: int
    replicas: int
    save_every: int
    aims: dict[str, float]
    counted: tuple[str, ...]
    gradients: list[dict[str, Any]]
    kills_of_a_run: int
    activations: dict[str, Any] = ACTIVATIONS

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.stages * self.replicas

    @property
    def local(self) -> bool:
        """Return True if replicas take local steps."""
        return self.replicas > 1


PLAIN = Series(
    "kill_rounds",
    2,
    1,
    4,
    {"start": 0.3, "training": 0.35, "saving": 0.25, "closing": 0.1},
    PHASES,
    gradients=[],
    kills_of_a_run=200,
)
CHANNELS = PLAIN._replace(
    name="kill_rounds_channels",
    activations={**ACTIVATIONS, "backward_method": "delta", "scale": "channels"},
)
_LOCAL = {"method": "double_squeeze", "bits": 1, "local_steps": 4}
LOCAL = Series(
    "kill_rounds_local",
    2,
    2,
    3,
    {"outer": 1.0},
    ("outer",),
    gradients=[_LOCAL, {**_LOCAL, "fragments": 2, "overlap": 1}],
    kills_of_a_run=8,
)


def settings(series: Series) -> list[Any]:
    """Return the settings that finished runs depend on."""
    return [series[:-2], EPOCHS, SLOW_S, SLOW_SHARE, series.activations]


def one_start(
    folder: Path, world: int, run: int, number: int, aim: Callable[[Start], int] | None
) -> tuple[Found, Start]:
    """One start of a run, and what is found after it. aim: waits for its instant, says which rank is to be killed."""
    start = Start(json.loads((folder / "job.json").read_text()), world, number, lambda rank: {})
    row: Found = {"victim": None, "phase": None}
    victim = None if aim is None else aim(start)
    if victim is not None and start.send(victim, SIGKILL):
        row["victim"] = victim
    killed = time.monotonic()
    if row["victim"] is not None:
        start.ranks[victim].join()
        row["phase"] = start.phase(victim)
    # What has not joined cannot be missed by the others: a launcher ends them, and so does this.
    row["alone"] = row["phase"] == "start"
    row["late"] = start.end(0.0 if row["alone"] else END_S)
    if row["alone"]:
        row["late"] = []
    disk = stores_on_disk(folder / "messages")
    compared = start.found("compared")
    row |= {
        "seconds": round(time.monotonic() - killed, 2),
        "status": start.statuses(),
        "steps": start.steps(),
        "resumed": next(iter(start.found("resumed")), None),
        "compared": [sum(c) for c in zip(*compared, strict=True)],
        "dropped": sum(words[0] for words in start.found("dropped")),
        **disk._asdict(),
    }
    if row["victim"] is None and any(row["status"]):
        raise RuntimeError(f"run {run} failed without a kill:\n{start.said()}")
    return row, start


def aimed(
    series: Series, draw: random.Random, starting_s: float, training_s: float, late: int | None, *, doubt: bool
) -> Callable[[Start], int]:
    """A random instant of a random rank. late: the rank that writes late, if there is one, or that comes late to outer
    steps. doubt: always that one, in training."""
    phase = draw.choices(list(series.aims), list(series.aims.values()))[0]
    victim, delay, saves = draw.randrange(series.world), draw.random(), draw.randrange(1, 3)
    phase = "training" if doubt else phase
    if phase == "outer":
        # One of those who wait for each other, in any of the outer steps: a run ends if it does not come to that one.
        victim = (late or 0) // series.replicas * series.replicas + draw.randrange(series.replicas)
        saves = draw.randrange(1, OUTER_STEPS + 1)
    elif late is not None and phase == "training" and (doubt or draw.random() < SLOW_SHARE):
        victim = late

    def wait(start: Start) -> int:
        if phase == "start":
            start.wait(delay * starting_s, lambda: False)
        elif phase == "training":
            start.wait(BEGIN_S, lambda: start.steps() > 0)
            start.wait(delay * training_s, lambda: False)
        elif phase == "saving":
            start.wait(BEGIN_S, lambda: sum(n[0] == "saving" for n in start.notes(victim)) >= saves)
            start.wait(delay * 0.2, lambda: False)
        elif phase == "outer":
            start.wait(BEGIN_S, lambda: sum(n[0] == "outer" for n in start.notes(victim)) >= saves)
            start.wait(delay * SLOW_S, lambda: False)
        else:
            start.wait(2 * BEGIN_S, lambda: start.phase(victim) == "closing")
            start.wait(delay * 0.1, lambda: False)
        return victim

    return wait


def losses(folder: Path, replicas: int) -> list[float]:
    """The losses of the last epoch of a run that has reached its end; every step must be there."""
    steps = steps_of_epoch(replicas)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in lines if "eval" not in line}
    assert sorted(found) == list(range(1, EPOCHS * steps + 1)), "a step is missing in the metrics"
    return [found[step] for step in sorted(found)][-steps:]


def new_run(series: Series, folder: Path, seed: int, *, copies: bool, timeout_s: float | None, **more: Any) -> None:
    """An empty folder with a job. copies: of the message stores in checkpoints. timeout_s: as for `kill_rounds`.

    more: of the job.
    """
    shutil.rmtree(folder, ignore_errors=True)
    job = make_job(
        folder,
        seed=seed,
        stages=series.stages,
        epochs=EPOCHS,
        save_every=series.save_every,
        timeout_s=timeout_s or TIMEOUT_S,
        store={"in_checkpoints": copies},
        gradients=series.gradients[seed % len(series.gradients)] if series.local else None,
        activations=series.activations,
    )
    job |= {"start_timeout_s": timeout_s, **more}
    (folder / "job.json").write_text(json.dumps(job))


def undisturbed(series: Series, folder: Path, seed: int) -> Found:
    """A run that nobody kills: the losses of its last epoch, seconds until its first step and after."""
    new_run(series, folder, seed, copies=False, timeout_s=None)
    row, start = one_start(folder, series.world, -1, 0, None)
    notes = start.notes(0)
    first = next(note[-1] for note in notes if note[0] == "step")
    closed = notes[-1][-1]
    return {
        "run": f"undisturbed {seed}",
        "seed": seed,
        "losses": losses(folder, series.replicas),
        "rounds": [row],
        "starting_s": first - start.began,
        "training_s": closed - first,
    }


def disturbed(
    series: Series,
    folder: Path,
    number: int,
    seed: int,
    reference: list[Found],
    kills: int,
    timeout_s: float | None,
    *,
    agreement: bool,
) -> Found:
    """A run from its beginning to its end with kills, `kills` at most."""
    draw = random.Random(f"{seed} {number}")
    run_seed, copies = number % SEEDS, agreement and (series.local or number % 2 == 0)
    late = number % series.world if series.local else None if copies else number // 2 % series.world
    slow: dict[str, Any] = {"slow_s": SLOW_S}
    if series.local:
        slow["late_in_outer_steps"] = late
    elif late is not None:
        slow["slow_rank"] = late
    new_run(series, folder, run_seed, copies=copies, timeout_s=timeout_s, agreement=agreement, **slow)
    starting_s = min(run["starting_s"] for run in reference)  # the first one loads the packages
    training_s = statistics.fmean(run["training_s"] for run in reference) / 2
    rounds: list[Found] = []
    while not rounds or any(rounds[-1]["status"]):
        left = kills - sum(counts(series, row) for row in rounds)
        aim = aimed(series, draw, starting_s, training_s, late, doubt=not agreement) if left > 0 else None
        row, _ = one_start(folder, series.world, number, len(rounds), aim)
        rounds.append(row)
    expected = next(run["losses"] for run in reference if run["seed"] == run_seed)
    found = losses(folder, series.replicas)
    return {
        "run": number,
        "seed": run_seed,
        "copies": copies,
        "losses": found,
        "same": found == expected,
        "rounds": rounds,
    }


def counts(series: Series, row: Found) -> bool:
    """Return True if a start ended by a kill that counts."""
    return row["victim"] is not None and row["phase"] in series.counted


def killed(series: Series, runs: list[Found]) -> int:
    """Return the number of kills that count."""
    return sum(counts(series, row) for run in runs for row in run["rounds"])


def kill_rounds(
    rounds: int,
    folder: Path,
    kept: Path,
    *,
    series: Series = PLAIN,
    seed: int = 0,
    timeout_s: float | None = None,
    agreement: bool = True,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Rounds that are not in `kept` yet, up to `rounds`; the summary. A run that has begun is brought to its end.

    timeout_s: for a rank to be silent, also before it knows its configuration, where it is 120 s otherwise. agreement:
    False to see that the rounds notice ends that keep what they do not have in common.
    """
    keeping = Kept(kept, digest([settings(series), seed]))
    runs, keep = keeping.rows, keeping.add
    for number in range(SEEDS):
        if not any(run["run"] == f"undisturbed {number}" for run in runs):
            keep(undisturbed(series, folder / "undisturbed", number))
    reference = [run for run in runs if isinstance(run["run"], str)]
    while (left := rounds - killed(series, runs)) > 0:
        number = len(runs) - SEEDS
        run = folder / f"run-{number}"
        kills = min(left, series.kills_of_a_run)
        keep(disturbed(series, run, number, seed, reference, kills, timeout_s, agreement=agreement))
        shutil.rmtree(run)
        phases = [row["phase"] for row in runs[-1]["rounds"] if row["victim"] is not None]
        say(f"{killed(series, runs)} of {rounds} kills; run {number}: {', '.join(phases)}")
    return summary(runs[:SEEDS], runs[SEEDS:], **series._asdict(), epochs=EPOCHS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--local-steps", action="store_true", help="two replicas, killed in outer steps")
    parser.add_argument("--channels", action="store_true", help="scales of channels both ways")
    parser.add_argument("--seed", type=int, default=0, help="of victims and instants")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "benchmarks" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    series = LOCAL if args.local_steps else CHANNELS if args.channels else PLAIN
    with tempfile.TemporaryDirectory(prefix="kill-rounds-") as folder:
        result = kill_rounds(
            args.rounds,
            Path(folder),
            args.out / f"{series.name}.jsonl",
            series=series,
            seed=args.seed,
            say=lambda text: print(text, flush=True),
        )
    more = " --local-steps" if args.local_steps else " --channels" if args.channels else ""
    text = page(result, f"python -m tests.soak.kill_rounds --rounds {args.rounds} --seed {args.seed}{more}")
    (args.out / f"{series.name}.md").write_text(text)
    print(text)
    raise SystemExit(bool(verdict(result)))


if __name__ == "__main__":
    main()
