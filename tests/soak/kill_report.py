"""Report of `kill_rounds.py`: figures, a verdict and a page."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from typing import Any

from tests.soak.restart_work import PHASES, SAMPLES

Found = dict[str, Any]
MANY_KILLS, IN_DOUBT = 20, 50
_WORDS = {
    "start": "while it starts, before it has joined the others",
    "engine": "while the engine is made",
    "loading": "while a checkpoint is loaded",
    "training": "between or in steps",
    "outer": "in an outer step, from sending to taking the mean",
    "saving": "while a checkpoint is written",
    "closing": "while it closes",
}


def summary(undisturbed: list[Found], runs: list[Found], **settings: Any) -> dict[str, Any]:
    """The figures that count. Losses are means of the last epoch."""
    rows = [row for run in runs for row in run["rounds"]]
    kills = [row for row in rows if row["victim"] is not None]
    expected = {run["seed"]: statistics.fmean(run["losses"]) for run in undisturbed}
    apart = [abs(statistics.fmean(run["losses"]) - expected[run["seed"]]) for run in runs if not run["copies"]]
    # What ends drop when they compare leaves the disk with the next step: a start that has none left to take keeps it.
    last = [row for run in runs if (row := run["rounds"][-1])["steps"]]
    return {
        "settings": settings,
        "kills": len(kills),
        "phases": {phase: sum(row["phase"] == phase for row in kills) for phase in PHASES},
        "victims": dict(sorted(Counter(row["victim"] for row in kills).items())),
        "stores that do not open, or hold a damaged value": sum(len(row["unopened"]) for row in rows),
        "silent disagreements": sum(row["silent"] for row in rows),
        "left_different": sum(row["differ"] for row in rows),
        "different at the end of a run": sum(row["differ"] for row in last),
        "alike_at_the_end": sum(row["alike"] for row in last),
        "compared": sum(row["compared"][0] for row in rows if row["compared"]),
        "different after a resume": sum(row["compared"][1] for row in rows if row["compared"]),
        "dropped": sum(row["dropped"] for row in rows) // 2,  # counted at both ends
        "ranks that did not end": sum(len(row["late"]) for row in rows),
        "resumes": sum(bool(row["resumed"] and row["resumed"][0]) for row in rows),
        "median_end_s": round(statistics.median(row["seconds"] for row in kills), 1) if kills else 0.0,
        "longest_end_s": max((row["seconds"] for row in kills), default=0.0),
        "runs": len(runs),
        "copies": sum(run["copies"] for run in runs),
        "same": sum(run["copies"] and run["same"] for run in runs),
        "apart": max(apart, default=None),
        "spread": max(expected.values()) - min(expected.values()),
    }


def verdict(result: dict[str, Any]) -> list[str]:
    """Return the problems; empty if there are none."""
    zero = (
        "stores that do not open, or hold a damaged value",
        "silent disagreements",
        "different at the end of a run",
        "different after a resume",
        "ranks that did not end",
    )
    wrong = [f"{key}: {result[key]}" for key in zero if result[key]]
    if result["kills"] >= MANY_KILLS and result["runs"] > result["copies"] and result["left_different"] < IN_DOUBT:
        wrong.append(f"only {result['left_different']} samples were in doubt: these rounds prove little")
    if result["same"] != result["copies"]:
        wrong.append("a run with copies of the store has other losses than the undisturbed one")
    if result["apart"] is not None and result["apart"] > result["spread"]:
        wrong.append(f"losses differ by {result['apart']} from undisturbed ones, whose seeds differ by less")
    return wrong


def page(result: dict[str, Any], command: str) -> str:
    """The summary for people."""
    r, wrong, s = result, verdict(result), result["settings"]
    rows = [
        ("kills −9", r["kills"]),
        *((f"· {_WORDS[phase]}", count) for phase, count in r["phases"].items() if count or phase != "outer"),
        ("· of rank " + ", ".join(map(str, r["victims"])), ", ".join(map(str, r["victims"].values()))),
        ("starts that went on from a checkpoint", r["resumes"]),
        *((key, r[key]) for key in ("stores that do not open, or hold a damaged value", "silent disagreements")),
        ("samples that the ends held differently on disk after a kill", r["left_different"]),
        ("samples dropped by both ends when they compared, to be sent whole again", r["dropped"]),
        (
            "samples compared at both ends after a resume and at the end, of these different",
            f"{r['compared']}, {r['different after a resume']}",
        ),
        (
            "samples compared on disk when a run had ended whose last start took steps, of these different",
            f"{r['alike_at_the_end'] + r['different at the end of a run']}, {r['different at the end of a run']}",
        ),
        ("ranks that did not end by themselves", r["ranks that did not end"]),
        (
            "seconds from a kill until all others had ended and the stores were read: median, longest",
            f"{r['median_end_s']}, {r['longest_end_s']}",
        ),
        ("runs that reached their end", r["runs"]),
        (
            "with the stores in checkpoints; of these with the losses of an undisturbed run, bit for bit",
            f"{r['copies']}; {r['same']}",
        ),
        ("without: largest difference of the last epoch's loss from an undisturbed run", _short(r["apart"])),
        ("difference between undisturbed runs of other seeds", _short(r["spread"])),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    processor = platform.processor() or platform.machine()
    return f"""# Kill and resume

`{command}`, on {os.cpu_count()} cores of an {processor} machine.

{_what(s)} Who has not joined the others cannot be missed by them: the
script ends the others there, as a launcher does. A silent disagreement is a sample that two ends hold under one version
with different bytes. The longest waits are for a rank that is killed before the others have a connection to it and know
`transport.timeout_s`: it is lost after 90 s of silence. The machine had other work beside this.

| | |
|---|---|
{table}

{"Nothing is wrong." if not wrong else "Wrong: " + "; ".join(wrong) + "."}
"""


def _what(s: dict[str, Any]) -> str:
    """Describe the kills and the runs."""
    text = f"""{"Two replicas of a" if s["replicas"] > 1 else "A"} GPT-2 of {s["stages"]} stages, AQ-SGD with 4 bits
both ways, changes of gradients too, LMDB stores, {s["epochs"]} epochs of {SAMPLES} samples, a checkpoint every
{s["save_every"]} steps. One rank is killed at a random instant, and the run starts again with `--resume auto`, until it
reaches its end."""
    if s["replicas"] > 1:
        return f"""{text} Replicas average after every {s["gradients"][0]["local_steps"]} steps, with 1 bit, in some
runs in two fragments that are exchanged while the next step is computed. One rank comes late to every outer step, so
that others wait in it; only kills in outer steps count. The stores are in the checkpoints."""
    return f"""{text} In runs without the stores in checkpoints one rank writes its store late, as to a slow disk:
killed, it leaves the samples of up to two steps in doubt."""


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"
