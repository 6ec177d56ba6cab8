"""`pipecomp train --peers` while machines are lost and come back: does the run end by itself, with the same loss?

    python -m tests.soak.lost_machines [--kills 20] [--every 60] [--spares 1] [--first] [--full] [--work FOLDER]

Nodes of a network lab, each with a folder of its own; a stand-in for ssh enters them. Every --every seconds all
processes of a machine that takes part are killed with SIGKILL, and nobody can log in to it until the next kill. With
--first it is always the machine of rank 0. Trains LoRA adapters; with --full all weights. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipecomp.netlab import Lab
from tests.models import byte_pairs, gpt2, write_text

ROOT = Path(__file__).resolve().parents[2]
STAGES, BLOCKS = 3, 6
STEPS = 400
# Its last argument is a line for the other machine's shell. A machine whose file "down-N" is there does not answer.
SSH = """#!/bin/sh
node=$((${{7##*.}} - 1))
[ -e {work}/down-$node ] && {{ echo "ssh: connect to host $7: No route to host" >&2; exit 255; }}
exec env -i PATH="$PATH" ip netns exec {lab}-n$node unshare -m sh -c "mount --bind {work}/node-$node {work}/run && $8"
"""


@dataclass
class Found:
    """What a run did.

    status: of the launcher. output: its lines. kills: (seconds, node). losses: by step, of the last time that the step
    was trained. evaluated: held-out loss at the end. pauses: seconds from a kill to the next step.
    """

    status: int = -1
    output: list[str] = field(default_factory=list)
    kills: list[tuple[float, int]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    steps_lost: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Machines:
    """The machines of a lab, the last of which only starts the run."""

    def __init__(self, work: Path, lab: Lab, count: int) -> None:
        self.work, self.lab, self.count = work, lab, count
        (work / "bin").mkdir()
        (work / "bin" / "ssh").write_text(SSH.format(work=work, lab=lab.name))
        (work / "bin" / "ssh").chmod(0o755)
        (work / "run").mkdir()
        write_text(work / "text.txt")
        shutil.copy(work / "text.txt", work / "run")  # the launcher looks at the names of files
        gpt2(BLOCKS, vocab_size=300, n_positions=32, n_head=2).save_pretrained(work / "model")
        byte_pairs((work / "text.txt").read_text().splitlines(keepends=True)).save_model(str(work / "model"))
        for node in range(count):
            own = work / f"node-{node}"
            own.mkdir()
            shutil.copy(work / "text.txt", own)
            shutil.copytree(work / "model", own / "model")

    def start(self, *options: str) -> subprocess.Popen:
        """Start the run from the last machine."""
        peers = ",".join(f"198.18.0.{node + 1}" for node in range(STAGES))
        given = [*f"--model model --data text.txt --eval text.txt --peers {peers} --seed 1".split(), *options]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("MASTER", "GLOO"))}
        environment |= {"PATH": f"{self.work / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        environment |= {"DS_ACCELERATOR": "cpu", "PWD": str(self.work / "run"), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            [*f"ip netns exec {self.lab.name}-n{self.count} {sys.executable} -m pipecomp.cli train".split(), *given],
            cwd=self.work / "run",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self, node: int) -> None:
        """Kill all that runs on a machine; nobody reaches it from now on."""
        (self.work / f"down-{node}").touch()
        for _ in range(2):  # a process may have started another one meanwhile
            for pid in self._processes(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def repair(self, node: int) -> None:
        """Let a machine be reached again."""
        (self.work / f"down-{node}").unlink(missing_ok=True)

    def running(self) -> list[int]:
        """Return the machines that have processes of the run, in order."""
        return [node for node in range(self.count) if self._processes(node)]

    def _processes(self, node: int) -> list[int]:
        command = ["ip", "netns", "pids", f"{self.lab.name}-n{node}"]
        return list(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))

    def metrics(self) -> list[dict]:
        """Read the lines of all machines' metrics."""
        lines = []
        for path in sorted(self.work.glob("node-*/mine/metrics.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:  # its last line was cut
                    continue
        return lines


def run(
    work: Path, *, kills: int, every_s: float, spares: int, first: bool, options: list[str], seed: int = 0
) -> Found:
    """Run once; see the top of the file."""
    draw, found, count = random.Random(seed), Found(), STAGES + spares
    with Lab(nodes=count + 1, bandwidth="200mbit", delay="2ms") as lab:
        machines = Machines(work, lab, count)
        spare = [f"--spare={','.join(f'198.18.0.{STAGES + 1 + n}' for n in range(spares))}"] if spares else []
        began = time.monotonic()
        process = machines.start("--out", "mine", *spare, *options)

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                found.output.append(line.rstrip("\n"))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        down: int | None = None
        waiting: tuple[float, int] | None = None  # of a kill: when, and the step that had been reached
        last = 0
        next_kill = None
        while process.poll() is None:
            time.sleep(0.2)
            step = max((line["step"] for line in machines.metrics() if "loss" in line), default=0)
            now = time.monotonic()
            if step and next_kill is None:
                next_kill = now + every_s
            trained = _last_step(machines)
            if waiting is not None and trained != waiting[1]:
                found.pauses.append(now - waiting[0])
                found.steps_lost.append(max(0, waiting[1] - trained + 1))
                waiting = None
            last = trained
            if waiting is None and next_kill is not None and now > next_kill and len(found.kills) < kills:
                if down is not None:
                    machines.repair(down)
                live = machines.running()
                if len(live) < 2:
                    continue
                down = live[0] if first else draw.choice(live)
                machines.kill(down)
                found.kills.append((now - began, down))
                waiting, next_kill = (now, last), now + every_s
        reader.join(10)
        found.status, found.seconds = process.returncode, time.monotonic() - began
        for line in machines.metrics():
            if "loss" in line:
                found.losses[line["step"]] = line["loss"]
    return found


def _last_step(machines: Machines) -> int:
    """Return the step of the newest line of metrics on any machine."""
    newest, step = 0.0, 0
    for path in machines.work.glob("node-*/mine/metrics.jsonl"):
        lines = [line for line in path.read_text().splitlines() if '"loss"' in line]
        if lines and path.stat().st_mtime > newest:
            try:
                step, newest = json.loads(lines[-1])["step"], path.stat().st_mtime
            except ValueError:
                continue
    return step


def main() -> None:
    """Run undisturbed and disturbed, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="lost-machines-"))
    work.mkdir(parents=True, exist_ok=True)
    options = [f"--max-steps={given.steps}", "--epochs=1000", "--batch=8", "--lr=1e-3"]
    options += [] if given.full else ["--lora=8"]
    found = run(work, kills=given.kills, every_s=given.every, spares=given.spares, first=given.first, options=options)
    print("\n".join(found.output[-60:]))
    print(f"status {found.status}, {found.seconds:.0f} s, {len(found.kills)} kills: {found.kills}")
    print(f"steps lost {found.steps_lost}, pauses {[round(p, 1) for p in found.pauses]}")
    print(f"steps {min(found.losses, default=0)}-{max(found.losses, default=0)}: {len(found.losses)} with a loss")


if __name__ == "__main__":
    main()
