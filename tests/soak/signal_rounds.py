"""Rounds of SIGTERM and of kill -9 to a launcher, at random instants of a run of two ranks; see README.md of recipes.

    python -m tests.soak.signal_rounds --rounds 20

SIGTERM goes to the launcher alone or to all of its process group, in turn, as schedulers do either. Then all ranks
must end within `EXIT_S` and nothing be left of them; at most one step may be lost; and the same command must go on from
there. After kill -9 of the launcher, no rank may be left `GONE_S` later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from pipecomp.checkpoint import manifest
from pipecomp.distributed.placement import free_port
from pipecomp.trainer.checkpoints import DEEPSPEED, list_checkpoints
from tests.models import write_text

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gpt2_wikitext2" / "train.py"
LAUNCHERS = ("torchrun", "deepspeed", "srun")
WORLD = 2
BEGIN_S, EXIT_S, GONE_S, HANG_S = 600.0, 30.0, 10.0, 600.0
_TAIL = 3000


class Round(NamedTuple):
    """Outcome of one signal. step: the last complete one; saved: the last good checkpoint's."""

    launcher: str
    signal: str
    to: str
    status: int
    seconds: float
    left: int
    step: int
    saved: int
    output: str

    @property
    def lost(self) -> int:
        """Steps that a new start has to make again."""
        return self.step - self.saved


def make_work(folder: Path, *, lines: int = 150) -> Path:
    """Write a text, a tiny model with dropout, and a configuration whose checkpoints have the message stores."""
    write_text(folder / "text.txt", lines)
    model = {"model_type": "gpt2", "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model |= {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    (folder / "model.json").write_text(json.dumps(model))
    config = json.loads((RECIPE.parent / "ds_config_cpu.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config["pipecomp"]["store"] = {"path": "messages", "in_checkpoints": True}
    (folder / "ds_config.json").write_text(json.dumps(config))
    return folder


def arguments(work: Path, *, epochs: int = 2000) -> list[str]:
    """Return the recipe's command for a run whose folder is the current one."""
    return [
        *("--deepspeed_config", str(work / "ds_config.json"), "--model", str(work / "model.json")),
        *("--tokenizer", "train:300", "--train-file", str(work / "text.txt"), "--block-size", "16"),
        *("--epochs", str(epochs), "--seed", "3", "--metrics", "metrics.jsonl", "--no-report"),
        *("--checkpoint", "checkpoints", "--resume", "auto"),
    ]


def command(launcher: str, words: list[str]) -> list[str]:
    """Start two ranks of the recipe with these arguments."""
    port = str(free_port())
    if launcher == "torchrun":
        where = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
        return [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={WORLD}", str(RECIPE), *words]
    if launcher == "deepspeed":
        program = str(Path(sys.executable).with_name("deepspeed"))
        return [program, "--num_accelerators", str(WORLD), f"--master_port={port}", str(RECIPE), *words]
    task = f"RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={WORLD} "
    task += f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} {shlex.join([sys.executable, str(RECIPE), *words])}"
    return [str(Path(__file__).parent / "bin" / "srun"), "-n", str(WORLD), "bash", "-c", task]


def start(launcher: str, folder: Path, words: list[str]) -> subprocess.Popen:
    """Start it in `folder`, with its output in a file there."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with (folder / "output.txt").open("w") as out:
        return subprocess.Popen(
            command(launcher, words), cwd=folder, env=env, start_new_session=True, stdout=out, stderr=subprocess.STDOUT
        )


def steps(folder: Path) -> int:
    """The last step that is in the metrics."""
    found = 0
    with contextlib.suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)["step"]
    return found


def saved(folder: Path) -> int:
    """The step of the last good checkpoint."""
    found = list_checkpoints(str(folder / "checkpoints"))
    return max((step for step, path in found if manifest.problem(path / DEEPSPEED) is None), default=0)


def ranks(folder: Path) -> list[psutil.Process]:
    """All processes that run the recipe in this folder: ranks and what they have started."""

    def runs() -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                here = process.cwd() == str(folder.resolve())
                if here and str(RECIPE) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    return list(runs())


def one_round(
    launcher: str, folder: Path, words: list[str], number: int, *, to: str = "launcher", after: int, delay_s: float
) -> Round:
    """Start, wait until `after` more steps were made and `delay_s` more, send signal `number`, and see."""
    begun = steps(folder)
    process = start(launcher, folder, words)
    output = folder / "output.txt"
    try:
        deadline = time.monotonic() + BEGIN_S
        while steps(folder) < begun + after:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{launcher}: no step in time:\n{output.read_text()[-_TAIL:]}")
            time.sleep(0.02)
        time.sleep(delay_s)
        (os.killpg if to == "group" else os.kill)(process.pid, number)
        began = time.monotonic()
        while (ranks(folder) or process.poll() is None) and time.monotonic() < began + HANG_S:
            time.sleep(0.1)
        seconds, left = time.monotonic() - began, len(ranks(folder))
        status = process.wait(HANG_S)
    finally:
        for found in [*ranks(folder), *([process] if process.poll() is None else [])]:
            with contextlib.suppress(psutil.Error):
                found.kill()
        process.wait()
    name = signal.Signals(number).name
    said = output.read_text()
    return Round(launcher, name, to, status, round(seconds, 1), left, steps(folder), saved(folder), said)


def wrong(found: Round, *, limit_s: float) -> list[str]:
    """Return the problems of a round; empty if there are none."""
    problems = []
    if found.left or found.seconds > limit_s:
        problems.append(f"ended after {found.seconds} s, {found.left} left behind")
    if found.signal == "SIGTERM" and found.lost > 1:
        problems.append(f"{found.lost} steps lost")
    for word in ("Exception ignored", "frame #0", "terminate called", "core dumped"):
        if word in found.output:
            problems.append(f"{word!r} in the output")
    return problems


def main() -> None:
    """Run rounds under every launcher, and say what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="SIGTERMs under each launcher")
    parser.add_argument("--kills", type=int, default=5, help="kill -9 of each launcher")
    parser.add_argument("--launchers", nargs="+", default=LAUNCHERS, choices=LAUNCHERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for one JSON line for each round")
    args = parser.parse_args()
    draw, bad = random.Random(args.seed), 0
    for launcher in args.launchers:
        with tempfile.TemporaryDirectory(prefix="signals-") as temporary:
            work = make_work(Path(temporary))
            folder = work / launcher
            folder.mkdir()
            words = arguments(work)
            for turn in range(args.rounds + args.kills):
                number = signal.SIGTERM if turn < args.rounds else signal.SIGKILL
                to = "group" if number == signal.SIGTERM and turn % 2 else "launcher"
                after, delay_s = draw.randrange(1, 6), draw.random()
                found = one_round(launcher, folder, words, number, to=to, after=after, delay_s=delay_s)
                problems = wrong(found, limit_s=EXIT_S if number == signal.SIGTERM else GONE_S)
                bad += bool(problems)
                words_of = "; ".join(problems) or "well"
                print(f"{turn} {launcher} {found.signal} to {to}: status {found.status}, {found.seconds} s, "
                      f"step {found.step}, saved {found.saved}: {words_of}", flush=True)  # fmt: skip
                if args.out is not None:
                    with args.out.open("a") as file:
                        file.write(json.dumps(found._asdict() | {"wrong": problems}) + "\n")
    print("Nothing is wrong." if not bad else f"Wrong: {bad} rounds.")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
