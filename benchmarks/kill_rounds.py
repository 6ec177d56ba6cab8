"""Rounds of kill -9 at a random instant of a random rank, each followed by a resume; see README.md.

A small GPT-2 is trained over pipeline stages by the code of the recipes, with checkpoints and `--resume auto`. In every
round one rank is killed: while the ranks start, while they train, or while they write a checkpoint. The others must
end by themselves. Then, before the next round, this process looks at what is on disk, without trusting the program:

- does every store open, with all of its pages and values whole?
- do the two ends of a link hold different messages under one version (a silent disagreement)?

and after the resume the ranks compare what they hold, sample for sample. When a run has reached its end, its last
losses are compared with those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGES = ["torch.distributed", "transformers.models.gpt2.modeling_gpt2", "deepspeed.pipe", "pipecomp.engine"]
SEEDS = 3
VOCABULARY, LENGTH, WIDTH, SAMPLES, MICRO_BATCH, MICRO_BATCHES = 61, 16, 32, 32, 2, 2
STEPS_OF_EPOCH = SAMPLES // (MICRO_BATCH * MICRO_BATCHES)
END_S = 90.0  # for the others to end by themselves
START_S = 120.0  # for a round to come to its first step, on a busy machine


# -- what a rank does


def one_rank(rank: int, world: int, port: int, job: dict[str, Any], notes: Any) -> None:
    """Train, or go on training, as the recipes do."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
    )  # fmt: skip
    said = os.open(Path(job["folder"]) / f"said-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    import torch

    from pipecomp import recipe
    from pipecomp.demo_task import Sequences, gpt2
    from pipecomp.recipe_resume import Checkpoints

    torch.set_num_threads(1)
    load, save = Checkpoints.load, Checkpoints.save

    def checked_load(self: Any, engine: Any) -> str:
        words = load(self, engine)
        if rank == 0:
            notes.put(("resumed", self.step, bool(engine.resumed and engine.resumed.exact)))
        compare(engine, notes)
        return words

    def noted_save(self: Any, engine: Any, step: int, **more: Any) -> None:
        if rank == 0:
            notes.put(("step", step))
        save(self, engine, step, **more)
        if more["last"]:
            compare(engine, notes)

    Checkpoints.load, Checkpoints.save = checked_load, noted_save  # type: ignore[method-assign]
    rows = [
        torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(SAMPLES)
    ]
    folder = job["folder"]
    parser = recipe.arguments("kill_rounds", "")
    args = parser.parse_args([
        "--deepspeed_config", f"{folder}/ds_config.json", "--model", "tiny", "--tokenizer", "none",
        "--epochs", str(job["epochs"]), "--seed", str(job["seed"]), "--metrics", f"{folder}/metrics.jsonl",
        "--checkpoint", f"{folder}/checkpoints", "--save-every", str(job["save_every"]), "--resume", "auto",
    ])  # fmt: skip

    def main(args: argparse.Namespace) -> None:
        recipe.join(args)
        notes.put(("joined", rank))
        model = gpt2(VOCABULARY, LENGTH, layers=world, width=WIDTH, heads=2, seed=job["seed"])
        recipe.train(args, model=model, training=Sequences(rows))

    parser.parse_args = lambda: args  # type: ignore[assignment,method-assign]
    recipe.run(main, parser)


def compare(engine: Any, notes: Any) -> None:
    """All ranks: how many samples the two ends of a link hold differently, by their values, not by the store's CRCs."""
    import torch.distributed as dist

    held: dict[int, dict[int, tuple[int, str]]] = {}
    for end in engine.links:
        ids = [line.sample for line in end.store.inventory()]
        found = zip(ids, end.store.get(ids), strict=True)
        held[end.index] = {i: (m.version, hashlib.sha256(m.m_nH.numpy().tobytes()).hexdigest()) for i, m in found}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    if dist.get_rank() == 0:
        differ = sum(
            len(dict(everyone[i][i].items() ^ everyone[i + 1][i].items())) for i in range(dist.get_world_size() - 1)
        )
        notes.put(("compared", sum(len(everyone[i][i]) for i in range(dist.get_world_size() - 1)), differ))


# -- one round


class Round:
    """The ranks of one start, and what they have said."""

    def __init__(self, context: Any, world: int, job: dict[str, Any]) -> None:
        from pipecomp.local import free_port

        self.notes = context.Queue()
        port = free_port()
        self.ranks = [
            context.Process(target=one_rank, args=(rank, world, port, job, self.notes), daemon=True)
            for rank in range(world)
        ]
        self.said: list[tuple] = []
        for process in self.ranks:
            process.start()

    def listen(self, seconds: float, until: str | None = None) -> bool:
        """Take in notes for so long, or until one of this kind comes (True), or nobody is left."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Exception):  # empty, or cut off by a kill
                self.said.append(self.notes.get(timeout=min(left, 0.05)))
                if self.said[-1][0] == until:
                    return True
                continue
            if not any(process.is_alive() for process in self.ranks):
                return False
        return False

    def kill(self, rank: int) -> bool:
        """kill -9; False if it had ended before."""
        pid = self.ranks[rank].pid
        alive = self.ranks[rank].is_alive()
        if alive and pid is not None:
            os.kill(pid, signal.SIGKILL)
        return alive

    def end(self, killed: int | None) -> dict[str, Any]:
        """Wait for all ranks; those that do not end by themselves are counted, and ended.

        killed: the rank that was. Where it had not come to the others yet, these cannot know of it; a launcher ends
        them, and so does this.
        """
        began = time.monotonic()
        self.listen(0.5)
        launcher = killed is not None and ("joined", killed) not in self.said
        if not launcher:
            self.listen(END_S)
        for process in self.ranks:
            if launcher and process.is_alive():
                process.terminate()
                process.join(5.0)
        hung = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
        for process in self.ranks:
            if process.is_alive():
                process.kill()
            process.join()
        return {
            "hung": hung, "seconds": time.monotonic() - began, "launcher": launcher,
            "status": [process.exitcode for process in self.ranks],
        }  # fmt: skip


def stores_on_disk(path: Path) -> dict[str, int]:
    """unopened: ranks whose store does not open or is damaged. silent: samples with one version and two values.
    differ: samples that the ends do not hold alike, as a kill leaves them. samples: held at both ends alike."""
    from pipecomp.buffers.admin import rank_folders, verify
    from pipecomp.buffers.lmdb_file import ValueFile
    from pipecomp.buffers.value import read_header
    from pipecomp.errors import StoreError

    found = {"unopened": 0, "silent": 0, "differ": 0, "samples": 0}
    held: dict[str, list[dict[int, tuple[int, int]]]] = {}
    try:
        folders = rank_folders(path)
    except StoreError:
        return found  # killed before there was any
    for _, folder in folders:
        try:
            damaged = verify(folder).damaged
            file = ValueFile(folder, readonly=True)
            for name in file.table_names():
                headers = [read_header(row.head, name) for row in file.scan(file.table(name, create=False))]
                held.setdefault(name, []).append({h.sample: (h.version, h.crc) for h in headers})
            file.close()
        except StoreError as error:
            damaged = [error]
        if damaged:
            found["unopened"] += 1
            print(f"{folder}: {damaged[0]}", flush=True)
    for ends in held.values():
        if len(ends) == 2:
            both = ends[0].keys() & ends[1].keys()
            found["samples"] += sum(ends[0][i] == ends[1][i] for i in both)
            found["differ"] += sum(ends[0].get(i) != ends[1].get(i) for i in ends[0].keys() | ends[1].keys())
            found["silent"] += sum(
                ends[0][i][0] == ends[1][i][0] and ends[0][i][1] != ends[1][i][1] for i in both
            )
    return found


# -- all rounds


def new_job(folder: Path, seed: int, *, copies: bool, epochs: int, save_every: int) -> dict[str, Any]:
    """A run's folder. copies: of the message store in every checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "pipecomp": {
            "activations": {"method": "aqsgd", "forward_bits": 4, "backward_bits": 8},
            "store": {"path": str(folder / "messages"), "in_checkpoints": copies},
            "transport": {"timeout_s": 30},
        },
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    return {"folder": str(folder), "seed": seed, "copies": copies, "epochs": epochs, "save_every": save_every}


def last_losses(job: dict[str, Any]) -> list[float]:
    """The losses of the last epoch, if the run has reached its end."""
    lines = [json.loads(line) for line in (Path(job["folder"]) / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "eval" not in line}
    assert sorted(losses) == list(range(1, job["epochs"] * STEPS_OF_EPOCH + 1)), "a step is missing in the metrics"
    return [losses[step] for step in sorted(losses)][-STEPS_OF_EPOCH:]


def kill_rounds(
    rounds: int, folder: Path, *, world: int = 2, epochs: int = 6, save_every: int = 5, seed: int = 0,
    say: Any = print,
) -> dict[str, Any]:  # fmt: skip
    """Do it; everything that was found, as JSON values. Ends with a run that reaches its end."""
    multiprocessing.set_forkserver_preload(PACKAGES)
    context = multiprocessing.get_context("forkserver")
    draw = random.Random(seed)
    options: dict[str, Any] = {"epochs": epochs, "save_every": save_every}
    undisturbed = {}
    starting = training = 0.0
    for run_seed in range(SEEDS):
        job = new_job(folder / f"undisturbed-{run_seed}", run_seed, copies=False, **options)
        began = time.monotonic()
        this = Round(context, world, job)
        this.listen(START_S, until="step")
        starting = time.monotonic() - began
        this.listen(10 * START_S)
        training = time.monotonic() - began - starting
        ended = this.end(None)
        if any(ended["status"]):
            raise RuntimeError(f"the undisturbed run failed: see {job['folder']}/said-*.txt")
        undisturbed[run_seed] = last_losses(job)
    say(f"undisturbed: {starting:.1f} s to the first step, {training:.1f} s for the others")
    found: list[dict[str, Any]] = []
    finished: list[dict[str, Any]] = []
    kills = 0
    job = None
    while kills < rounds or job is not None:
        if job is None:
            number = len(finished)
            job = new_job(folder / f"run-{number}", number % SEEDS, copies=number % 2 == 0, **options)
        this = Round(context, world, job)
        row: dict[str, Any] = {"round": len(found), "run": len(finished), "victim": None, "when": None}
        if kills < rounds:
            row["victim"] = draw.randrange(world)
            row["when"] = "start" if draw.random() < 0.3 else "training"
            if row["when"] == "start":
                this.listen(draw.uniform(0, starting))
            else:
                this.listen(START_S, until="step")
                this.listen(draw.uniform(0, training / 3))
            killed = this.kill(row["victim"])
            kills += killed
            row["killed"] = killed
        else:
            this.listen(10 * START_S)
        row |= this.end(row["victim"]) | stores_on_disk(Path(job["folder"]) / "messages")
        steps = [note[1] for note in this.said if note[0] == "step"]
        row["steps"] = [steps[0], steps[-1]] if steps else None
        row["resumed"] = next((list(note[1:]) for note in this.said if note[0] == "resumed"), None)
        row["compared"] = [list(note[1:]) for note in this.said if note[0] == "compared"]
        found.append(row)
        if all(status == 0 for status in row["status"]):
            finished.append(_finished(job, undisturbed[job["seed"]]))
            job = None
        elif row["victim"] is None or not row["killed"]:
            raise RuntimeError(f"a run failed that nobody had killed: see {job['folder']}/said-*.txt")
        if len(found) % 10 == 0:
            say(f"{len(found)} starts, {kills} kills, {len(finished)} runs at their end")
    return summary(found, finished, undisturbed, rounds=rounds, world=world, options=options)


def _finished(job: dict[str, Any], expected: list[float]) -> dict[str, Any]:
    losses = last_losses(job)
    return {
        "seed": job["seed"], "copies": job["copies"], "loss": statistics.fmean(losses),
        "undisturbed": statistics.fmean(expected), "same": losses == expected,
    }  # fmt: skip


def summary(
    found: list[dict[str, Any]], finished: list[dict[str, Any]], undisturbed: dict[int, list[float]], **settings: Any
) -> dict[str, Any]:
    """The figures that count, then every round."""
    without = [abs(run["loss"] - run["undisturbed"]) for run in finished if not run["copies"]]
    killed = [row for row in found if row.get("killed")]
    return {
        "settings": settings,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "kills": len(killed),
        "kills_at_the_start": sum(row["when"] == "start" for row in killed),
        "stores_that_do_not_open": sum(row["unopened"] for row in found),
        "silent_disagreements": sum(row["silent"] for row in found),
        "samples_left_different_by_a_kill": sum(row["differ"] for row in found),
        "samples_compared_after_resume": sum(c[0] for row in found for c in row["compared"]),
        "samples_different_after_resume": sum(c[1] for row in found for c in row["compared"]),
        "kills_before_the_ranks_had_met": sum(row["launcher"] for row in killed),
        "ranks_that_did_not_end": sum(len(row["hung"]) for row in found),
        "longest_end_s": round(max(row["seconds"] for row in killed), 1),
        "runs": len(finished),
        "runs_with_copies": sum(run["copies"] for run in finished),
        "runs_with_copies_and_the_same_losses": sum(run["copies"] and run["same"] for run in finished),
        "largest_difference_without_copies": max(without, default=None),
        "spread_of_seeds": max(map(statistics.fmean, undisturbed.values()))
        - min(map(statistics.fmean, undisturbed.values())),
        "finished": finished,
        "rounds": found,
    }


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong; empty if nothing is."""
    zero = ("stores_that_do_not_open", "silent_disagreements", "samples_different_after_resume",
            "ranks_that_did_not_end")  # fmt: skip
    wrong = [f"{key}: {result[key]}" for key in zero if result[key]]
    if result["runs_with_copies_and_the_same_losses"] != result["runs_with_copies"]:
        wrong.append("a run with copies of the store has other losses than the undisturbed one")
    difference = result["largest_difference_without_copies"]
    if difference is not None and difference > result["spread_of_seeds"]:
        wrong.append(f"losses differ by {difference} from undisturbed ones, whose seeds differ by less")
    return wrong


def page(result: dict[str, Any], command: str) -> str:
    """The summary for people."""
    r, wrong = result, verdict(result)
    rows = [
        ("kills −9 of a random rank", f"{r['kills']}, of them {r['kills_at_the_start']} before the first step"),
        ("of these before the rank had met the others, so that a launcher has to end them",
         r["kills_before_the_ranks_had_met"]),
        ("stores that do not open, or hold a damaged value", r["stores_that_do_not_open"]),
        ("samples with one version and two values on disk (silent disagreements)", r["silent_disagreements"]),
        ("samples that a kill left different on disk", r["samples_left_different_by_a_kill"]),
        ("samples compared at both ends after a resume and at the end", r["samples_compared_after_resume"]),
        ("of these different", r["samples_different_after_resume"]),
        ("ranks that did not end by themselves", r["ranks_that_did_not_end"]),
        ("longest time until the others had ended", f"{r['longest_end_s']} s"),
        ("runs that reached their end", r["runs"]),
        ("with the store in checkpoints, of these with the losses of an undisturbed run, bit for bit",
         f"{r['runs_with_copies']}, {r['runs_with_copies_and_the_same_losses']}"),
        ("without, largest difference of the last epoch's loss", _short(r["largest_difference_without_copies"])),
        ("difference between undisturbed runs of other seeds", _short(r["spread_of_seeds"])),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    s = r["settings"]
    return f"""# Kill and resume

`{command}`, on {r['machine']['cores']} cores of an {r['machine']['processor']} machine. A GPT-2 of {s['world']} stages,
AQ-SGD with 4 bits, LMDB stores, {s['options']['epochs']} epochs of {SAMPLES} samples, a checkpoint every
{s['options']['save_every']} steps. What is counted: the head of `benchmarks/kill_rounds.py`.

| | |
|---|---|
{table}

{'Nothing is wrong.' if not wrong else 'Wrong: ' + '; '.join(wrong) + '.'}
"""


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--world", type=int, default=2, help="pipeline stages, one process each")
    parser.add_argument("--seed", type=int, default=0, help="of victims and instants")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-rounds-") as folder:
        result = kill_rounds(
            args.rounds, Path(folder), world=args.world, seed=args.seed, say=lambda text: print(text, flush=True)
        )
    command = f"python benchmarks/kill_rounds.py --rounds {args.rounds} --world {args.world} --seed {args.seed}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "kill_rounds.json").write_text(json.dumps(result, indent=1) + "\n")
    text = page(result, command)
    (args.out / "kill_rounds.md").write_text(text)
    print(text)
    sys.exit(bool(verdict(result)))


if __name__ == "__main__":
    main()
