"""`pipecomp train --peers` while a machine joins, and while one is slow. All machines are this one, with one folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipecomp.distributed.elastic_launcher import JOIN
from pipecomp.distributed.placement import free_port
from pipecomp.report.recorder import PLAN
from tests.limits import HANG_S, until
from tests.models import byte_pairs, gpt2, metrics, write_text
from tests.recipes.recipe_runs import ROOT

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(3 * HANG_S)]
HOSTS = ("127.0.0.1", "127.0.0.2")
BLOCKS, WIDTH, STEPS = 8, 128, 60
QUIET = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
# Imported by every Python process with this folder in its search path: minutes would take too long here.
SHORT = "import pipecomp.recipes.machine_watch as watch\nwatch.WINDOW_S = 8.0\n"


class Run:
    """The command, in a folder with a model and a text."""

    def __init__(self, folder: Path, *options: str, hosts: tuple[str, ...] = HOSTS) -> None:
        self.folder, self.out = folder, folder / "run"
        text = write_text(folder / "text.txt").read_text()
        gpt2(BLOCKS, WIDTH, vocab_size=300, n_positions=32, n_head=2).save_pretrained(folder / "model")
        byte_pairs(text.splitlines(keepends=True)).save_model(str(folder / "model"))
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SHORT)
        words = [
            "--model",
            "model",
            "--data",
            "text.txt",
            "--out",
            "run",
            "--epochs",
            "999",
            "--batch",
            "8",
            "--lora",
            "8",
            "--second-home",
            "next",
        ]
        words += ["--peers", ",".join(hosts), *options]
        path = f"{folder / 'site'}:{ROOT}"
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipecomp.cli", "train", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PWD": str(folder), "MASTER_PORT": str(free_port()), **QUIET},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def steps(self) -> list[int]:
        path = self.out / "metrics.jsonl"
        return [line["step"] for line in metrics(self.out) if "loss" in line] if path.is_file() else []

    def rank(self, number: int) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if child.environ().get("RANK") == str(number))

    def close(self) -> None:
        if self.process.poll() is None:
            for child in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
                child.kill()
            self.process.wait()
        self.log.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    runs: list[Run] = []

    def make(*options: str, **more: object) -> Run:
        runs.append(Run(tmp_path, *options, **more))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def test_a_host_joins_and_the_run_goes_on_from_its_step(start) -> None:
    run = start("--max-steps", str(STEPS))
    until(lambda: len(run.steps()) >= 2)
    with (run.out / JOIN).open("a") as file:
        file.write("127.0.0.3\n")
    assert run.process.wait(2 * HANG_S) == 0, run.said()
    said = run.said()
    assert "127.0.0.3 joins: a spare, unless steps get 10 % faster with it" in said
    decision = next(line for line in said.splitlines() if "127.0.0.3 can take part: " in line)
    assert " s a step instead of " in decision
    if "it is taken in" in decision:
        assert "Restart 1: 3 stages on 127.0.0.1, 127.0.0.2, 127.0.0.3" in said
    else:
        assert "Restart" not in said
    assert run.steps() == list(range(1, STEPS + 1)), "no step is lost, and none is taken twice"


def test_a_machine_whose_rank_gets_sigterm_leaves(start) -> None:
    """The others go on from the checkpoint that is written then: no step is lost."""
    run = start("--max-steps", str(STEPS), hosts=(*HOSTS, "127.0.0.3"))
    until(lambda: len(run.steps()) >= 5)
    run.rank(1).terminate()
    assert run.process.wait(2 * HANG_S) == 0, run.said()
    left = "127.0.0.2 (it was told to end) leaves. Restart 1: 2 stages on 127.0.0.1, 127.0.0.3"
    assert left in run.said(), run.said()
    assert run.steps() == list(range(1, STEPS + 1)), run.said()


def slow_down(process: psutil.Process, ended: threading.Event) -> None:
    """Let a process run for a fifth of the time."""
    while not ended.is_set():
        try:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.4)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        except psutil.NoSuchProcess:
            return


def test_a_new_cut_for_a_slow_machine(start) -> None:
    """The slow one gets fewer blocks; the run goes on from its step."""
    run = start("--max-steps", "1000", "--rebalance")
    until(lambda: len(run.steps()) >= 2)
    ended = threading.Event()
    thread = threading.Thread(target=slow_down, args=(run.rank(1), ended))
    thread.start()
    try:
        until(lambda: "Restart 1: " in run.said() or run.process.poll() is not None)
    finally:
        ended.set()
        thread.join()
    said = run.said()
    assert "slow for " in said
    assert "127.0.0.2 (" in said
    assert "; it is made now" in said
    assert "a new cut. Restart 1: 2 stages on 127.0.0.1, 127.0.0.2" in said
    before = len(run.steps())
    until(lambda: len(run.steps()) > before + 2 or run.process.poll() is not None)
    cuts = json.loads((run.out / PLAN).read_text())["cuts"]
    assert cuts[1] > BLOCKS // 2, run.said()
    assert run.steps()[: before + 2] == list(range(1, before + 3)), run.said()
