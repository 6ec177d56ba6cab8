"""`pipecomp train --peers` while machines are lost and come back, in a network lab; see `lost_report.py`.

    python -m tests.soak.lost_machines spare [--full] [--kills 20] [--every 60] [--runs 5]
    python -m tests.soak.lost_machines shrink | first | cut | two

spare    three machines and a spare one: a random machine is killed again and again
shrink   the same without a spare one
first    without a spare one: the machine of rank 0 is killed, once a run
cut      the line of a machine is cut for --cut seconds, once a run
two      two machines are killed at once, one of them the second home of the other: the run must end, and say why

A machine is a node of the lab with a folder of its own; a stand-in for ssh enters it. A killed one loses all of its
processes by SIGKILL, and nobody can log in to it for half of --every and until the others go on; a cut one stays alive.
Trains LoRA adapters; with --full all weights. Losses are compared with those of undisturbed runs of --seeds seeds. Rows
are kept: a run that is there is not made again. Losses depend on the bits that the plan chooses, and these on the
machine's load: all runs start with a plan that has LINKS, beside the rows. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runner import Kept, digest, read_rows
from pipecomp.netlab import Lab
from pipecomp.recipes.planned import PLAN
from tests.models import byte_pairs, gpt2, write_text
from tests.soak.lost_report import COMPARED, emptied_rows, page, processor, summary, verdict

ROOT = Path(__file__).resolve().parents[2]
STAGES, BLOCKS, WIDTH = 3, 6, 64
BANDWIDTH, DELAY = "20mbit", "2ms"
LINKS: dict[str, Any] = {"method": "aqsgd", "forward_bits": 3, "backward_bits": 6, "first_visit": 8}
TIED = {"method": "double_squeeze", "bits": 8}  # gradients of the embedding, which the first and last stage hold
LAST = 50  # steps, of which losses are compared
NAME = "lost_machines"
_TICK_S = 0.1
_SIZES = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
_RESUMED = re.compile(r"restart (\d+): goes on after step (\d+)")
_STATED = re.compile(r"at most (\d+) steps? (?:is|are) lost")
# Its last argument is a line for the other machine's shell. A machine whose file "down-N" is there does not answer.
SSH = """#!/bin/sh
node=$((${{7##*.}} - 1))
[ -e {work}/down-$node ] && {{ echo "ssh: connect to host $7: No route to host" >&2; exit 255; }}
exec env -i PATH="$PATH" ip netns exec {lab}-n$node unshare -m sh -c "mount --bind {work}/node-$node {work}/run && $8"
"""


class Scenario(NamedTuple):
    """A way to lose machines.

    spares: of the start. kills: by default. steps: of a run by default. cuts: lines are cut instead. first: always the
    machine of rank 0. at_once: machines that are lost together.
    """

    spares: int = 0
    kills: int = 1
    steps: int = 400
    cuts: bool = False
    first: bool = False
    at_once: int = 1


SCENARIOS = {
    "spare": Scenario(spares=1, kills=20, steps=2000),
    "shrink": Scenario(kills=20, steps=2000),
    "first": Scenario(first=True),
    "cut": Scenario(cuts=True),
    "two": Scenario(at_once=2),
}


def make_model(work: Path) -> None:
    """Make text.txt, and the folder `model` with a GPT-2 and its tokenizer."""
    write_text(work / "text.txt")
    gpt2(BLOCKS, WIDTH, vocab_size=300, n_positions=32, n_head=2).save_pretrained(work / "model")
    byte_pairs((work / "text.txt").read_text().splitlines(keepends=True)).save_model(str(work / "model"))


class Machines:
    """The machines of a lab, the last of which only starts the run."""

    def __init__(self, work: Path, lab: Lab, count: int, plan: Path | None) -> None:
        self.work, self.lab, self.count = work, lab, count
        (work / "bin").mkdir()
        (work / "bin" / "ssh").write_text(SSH.format(work=work, lab=lab.name))
        (work / "bin" / "ssh").chmod(0o755)
        (work / "run").mkdir()
        make_model(work)
        shutil.copy(work / "text.txt", work / "run")  # the launcher looks at the names of files
        for node in range(count):
            own = work / f"node-{node}"
            own.mkdir()
            shutil.copy(work / "text.txt", own)
            shutil.copytree(work / "model", own / "model")
            if plan is not None:
                shutil.copy(plan, own / PLAN)
        if plan is not None:
            shutil.copy(plan, work / "run" / PLAN)
        self._read: dict[Path, tuple[float, set[str]]] = {}

    def start(self, *options: str) -> subprocess.Popen:
        """Start the run from the last machine."""
        peers = ",".join(f"198.18.0.{node + 1}" for node in range(STAGES))
        given = [*f"--model model --data text.txt --peers {peers} --out mine".split(), *options]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("MASTER", "GLOO"))}
        environment |= {"PATH": f"{self.work / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        environment |= {"DS_ACCELERATOR": "cpu", "PWD": str(self.work / "run"), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            [*f"ip netns exec {self.lab.name}-n{self.count} {sys.executable} -m pipecomp.cli train".split(), *given],
            cwd=self.work / "run",
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lose(self, node: int, *, cuts: bool) -> None:
        """Cut the line of a machine, or kill all that runs there; nobody reaches it from now on."""
        (self.work / f"down-{node}").touch()
        if cuts:
            self.lab.cut(node)
            return
        for _ in range(2):  # a process may have started another one meanwhile
            for pid in self._processes(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def repair(self, node: int, *, cuts: bool) -> None:
        """Let a machine be reached again."""
        if cuts:
            self.lab.join(node)
        (self.work / f"down-{node}").unlink(missing_ok=True)

    def running(self) -> list[int]:
        """Return the machines that have processes of the run, in order."""
        return [node for node in range(self.count) if self._processes(node)]

    def _processes(self, node: int) -> list[int]:
        command = ["ip", "netns", "pids", f"{self.lab.name}-n{node}"]
        return list(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))

    def new_losses(self) -> list[tuple[int, float, int]]:
        """Return step, loss and machine of the lines of metrics that have appeared since the last call."""
        found = []
        for path in sorted(self.work.glob("node-*/mine/metrics.jsonl")):
            with contextlib.suppress(OSError):
                at, known = self._read.get(path, (0.0, set()))
                if (now := path.stat().st_mtime) == at:
                    continue
                lines = {line for line in path.read_text().splitlines() if '"loss"' in line and line.endswith("}")}
                self._read[path] = now, known | lines
                node = int(path.parts[-3].rpartition("-")[2])
                rows = [json.loads(line) for line in lines - known]
                found += sorted((row["step"], row["loss"], node) for row in rows if "eval" not in row)
        return found


class Output:
    """The lines of a run, with the time of each, and what they tell."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.lines: list[tuple[float, str]] = []
        self._process = process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def end(self) -> None:
        self._thread.join(10)

    def resumed_after(self, since: float) -> int | None:
        """Return the step after which the first restart since then goes on."""
        found = [match for at, line in list(self.lines) if at > since and (match := _RESUMED.search(line))]
        return int(found[0][2]) if found else None

    def stated(self) -> int | None:
        """Return how many steps are lost at most, as the run says now."""
        text = " ".join(line for _, line in list(self.lines))  # a narrow console breaks lines
        found = _STATED.findall(text)
        return int(found[-1]) if found else None


def make_plan(given: argparse.Namespace) -> Path:
    """Return the plan of all runs that train the same: that of a short run, with equal cuts and LINKS."""
    path = Path(given.out / f"{NAME}{'_full' if given.full else ''}.plan.json")
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="lost-machines-") as folder:
            short = argparse.Namespace(**{**vars(given), "steps": 2})
            row = run(Path(folder), "", short, 0, 0, None)
            if row["status"] != 0:
                raise SystemExit("\n".join(row["said"]))
            made = json.loads((Path(folder) / "node-0" / "mine" / PLAN).read_text())
            made["cuts"] = [stage * BLOCKS // STAGES for stage in range(STAGES + 1)]
            section = {"activations": LINKS, **({"gradients": TIED} if given.full else {})}
            made["config"] = {**_SIZES, "pipecomp": section}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(made, indent=1) + "\n")
    return path


def run(
    work: Path, scenario: str, given: argparse.Namespace, seed: int, number: int, plan: Path | None
) -> dict[str, Any]:
    """Run once; return its row. scenario: "" for an undisturbed run."""
    kind = SCENARIOS[scenario] if scenario else Scenario(kills=0)
    kills = 0 if not scenario else kind.kills if given.kills is None or kind.kills == 1 else given.kills
    draw, count = random.Random(f"{scenario} {number}"), STAGES + kind.spares
    row: dict[str, Any] = {"scenario": scenario or "undisturbed", "full": given.full, "run": number, "seed": seed}
    with Lab(nodes=count + 1, bandwidth=BANDWIDTH, delay=DELAY) as lab:
        machines = Machines(work, lab, count, plan)
        options = [f"--max-steps={given.steps}", "--epochs=100000", "--batch=8", "--lr=1e-3", f"--seed={seed}"]
        options += [] if given.full else ["--lora=8"]
        options += [] if plan is None else [f"--plan={PLAN}"]
        if kind.spares:
            options.append(f"--spare={','.join(f'198.18.0.{STAGES + 1 + n}' for n in range(kind.spares))}")
        began = time.monotonic()
        process = machines.start(*options)
        output = Output(process)
        losses: dict[int, float] = {}
        down: list[int] = []
        repair_at = next_at = float("inf")
        waiting: dict[str, Any] | None = None
        first = -1  # machine of rank 0
        lost: list[dict[str, Any]] = []
        while process.poll() is None and time.monotonic() - began < given.limit:
            time.sleep(_TICK_S)
            now = time.monotonic()
            for step, loss, node in machines.new_losses():
                if not losses:
                    next_at = now + given.every
                if waiting is not None and output.resumed_after(waiting["time"]) is not None:
                    waiting |= {"pause_s": round(now - waiting["time"], 1)}
                    waiting["resumed"] = output.resumed_after(waiting["time"])
                    waiting["lost"] = max(0, waiting["step"] - waiting["resumed"])
                    waiting, next_at = None, max(next_at, now + given.every / 4)
                losses[step], first = loss, node
            if now > repair_at and down and (kind.cuts or waiting is None):
                for node in down:
                    machines.repair(node, cuts=kind.cuts)
                down, repair_at = [], float("inf")
            live = machines.running() if now > next_at and not waiting and not down and len(lost) < kills else []
            if len(live) > kind.at_once:
                others = [node for node in live if node != first or kind.at_once == 1]
                down = [first] if kind.first else draw.sample(others, kind.at_once)
                now = time.monotonic()
                for node in down:
                    machines.lose(node, cuts=kind.cuts)
                waiting = {"time": now, "at_s": round(now - began, 1), "machines": down, "first": first in down}
                waiting |= {"step": max(losses), "stated": output.stated()}
                lost.append(waiting)
                next_at, repair_at = now + given.every, now + (given.cut if kind.cuts else given.every / 2)
                if kind.at_once > 1:
                    repair_at = float("inf")
        status = process.poll()
        if status is None:
            for node in range(count + 1):
                machines.lose(node, cuts=False)
            process.kill()
            process.wait()
        output.end()
        for step, loss, _ in machines.new_losses():
            losses[step] = loss
    said = [line for _, line in output.lines]
    text = " ".join(said)
    row |= {
        "processor": processor(),
        "every": given.every,
        "cut": given.cut,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "steps": len(losses),
        "loss": statistics.fmean([losses[step] for step in sorted(losses)][-LAST:]) if losses else None,
        "lost": [{key: value for key, value in one.items() if key != "time"} for one in lost],
        "restarts": len(_RESUMED.findall(text)),
        "taken_in": len(re.findall(r"it is taken in", text)),
        "stay_spare": len(re.findall(r"so it stays a spare", text)),
        "compressed": "links     aqsgd" in text,
        "drift": text.count("DriftError"),
        "said": [line for line in said if "pipecomp:" in line or line.startswith("train: ") or "error" in line][-12:],
    }
    if given.show:
        print("\n".join(said[-given.show :]))
    return row


def main() -> None:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="of undisturbed runs, and of the others in turn")
    parser.add_argument("--kills", type=int, help="of a run with several")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between them")
    parser.add_argument("--cut", type=float, default=600.0, help="seconds for which a line is cut")
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds after which a run is stuck")
    parser.add_argument("--show", type=int, default=0, help="print so many last lines of each run")
    parser.add_argument("--work", type=Path, help="folder for the machines, kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    kind = SCENARIOS[given.scenario]
    given.steps = given.steps or kind.steps
    limits = [STAGES, BLOCKS, WIDTH, BANDWIDTH, DELAY, LAST, LINKS, TIED, _SIZES]
    settings = [*limits, given.every, given.kills or kind.kills, given.cut if kind.cuts else 0, given.steps]
    kept = Kept(given.out / f"{NAME}.jsonl", digest([given.scenario, given.full, *settings]))
    plain = Kept(given.out / f"{NAME}.jsonl", digest(["undisturbed", given.full, *limits, given.steps]))
    todo = [("", number) for number in range(given.seeds if given.scenario in COMPARED else 0)]
    todo += [(given.scenario, number) for number in range(given.runs)]
    plan = make_plan(given)
    for scenario, number in todo:
        rows = kept if scenario else plain
        if any(row["run"] == number for row in rows.rows):
            continue
        folder = given.work or Path(tempfile.mkdtemp(prefix="lost-machines-"))
        work = folder / f"{scenario or 'undisturbed'}-{number}"
        work.mkdir(parents=True)
        found = run(work, scenario, given, number % given.seeds, number, plan)
        rows.add(found)
        shown = {key: value for key, value in found.items() if key not in ("lost", "said")}
        print(json.dumps(shown), flush=True)
        if given.work is None:
            shutil.rmtree(folder)
    emptied = emptied_rows(read_rows(given.out / f"{NAME}.jsonl"), given.full, given.steps)
    plain_rows = plain.rows[: given.seeds]
    result = summary(given.scenario, kept.rows[: given.runs], plain_rows, full=given.full, emptied=emptied)
    print("\n".join(f"{key}: {value}" for key, value in result.items()))
    (given.out / f"{NAME}.md").write_text(page(given.out / f"{NAME}.jsonl"))
    print("; ".join(verdict(result)) or "nothing is wrong")
    raise SystemExit(bool(verdict(result)))


if __name__ == "__main__":
    main()
