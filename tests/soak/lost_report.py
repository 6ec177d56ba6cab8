"""Report of `lost_machines.py`: figures, a verdict and a page."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import read_rows

Found = dict[str, Any]
COMPARED = ("spare", "shrink", "first", "cut")  # scenarios that end with a trained model
_TITLES = {
    "spare": "a random machine is killed again and again; three, and a spare one",
    "shrink": "the same without a spare one",
    "first": "the machine of rank 0 is killed; three machines",
    "cut": "the line of a machine is cut; three machines",
    "two": "two machines are killed at once, one the second home of the other; three machines",
}
_EVERY_S, _CUT_S = 20.0, 600.0  # of rows that do not have their own
EMPTIED = "emptied"  # scenario of `emptied_stores.py`
_MISSING, _REMEDY = "the records of rank", "Bring one of them back"


def processor() -> str:
    """Name this machine's processor, as far as its products may round differently."""
    lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in lines.items()}
    return " ".join(named.get(key, "") for key in ("model name", "cpu family", "model", "stepping")).strip()


def emptied_rows(rows: Iterable[Found], full: bool, steps: int) -> list[Found]:
    """The newest rows of `emptied_stores.py` with so many steps."""
    mine = [row for row in rows if (row["scenario"], row["full"], row["steps"]) == (EMPTIED, full, steps)]
    return [row for row in mine if row.get("setup") == mine[-1].get("setup")]


def summary(
    scenario: str, rows: Sequence[Found], undisturbed: Sequence[Found], *, full: bool, emptied: Sequence[Found] = ()
) -> Found:
    """The figures that count."""
    lost = [one for row in rows for one in row["lost"]]
    resumed = [one for one in lost if one.get("resumed") is not None]
    # Machines round differently, so that the same seed ends with another loss: runs of one machine are compared.
    plain = {_place(row): row["loss"] for row in undisturbed}
    plain |= {_place(row): row["undisturbed"] for row in emptied}
    apart = [row["loss"] - plain[_place(row)] for row in rows if row["loss"] and _place(row) in plain]
    seeds = [[loss for (own, _), loss in plain.items() if own == machine] for machine in {own for own, _ in plain}]
    pauses = [one["pause_s"] for one in resumed]
    told = [" ".join(row["said"]) for row in rows]
    return {
        "scenario": scenario,
        "trains": "all weights" if full else "LoRA",
        "runs": len(rows),
        "ended": sum(row["status"] == 0 for row in rows),
        "ended_with_reason": sum(_MISSING in text and _REMEDY in text for text in told),
        "stuck": sum(row["status"] is None for row in rows),
        "losses_of_machines": len(lost),
        "of_rank_0": sum(one["first"] for one in lost),
        "gone_on": len(resumed),
        "restarts": sum(row["restarts"] for row in rows),
        "taken_in": sum(row["taken_in"] for row in rows),
        "steps_lost": [statistics.median(one["lost"] for one in resumed), max(one["lost"] for one in resumed)]
        if resumed
        else None,
        "stated": max((one["stated"] or 0 for one in resumed), default=None),
        "more_than_stated": sum(one["lost"] > (one["stated"] or 0) for one in resumed),
        "pause_s": [round(statistics.median(pauses), 1), max(pauses)] if pauses else None,
        "drift": sum(row["drift"] for row in rows),
        "compressed": sum(row["compressed"] for row in rows),
        "apart": [min(apart), max(apart)] if apart else None,
        "spread": max((max(losses) - min(losses) for losses in seeds if len(losses) > 1), default=None),
        "emptied": [row["loss"] - row["undisturbed"] for row in emptied],
    }


def _place(row: Found) -> tuple[str, int]:
    """Return the processor and the seed, which runs must have in common for their losses to be compared."""
    return row.get("processor", ""), row["seed"]


def verdict(result: Found) -> list[str]:
    """Return the problems; empty if there are none."""
    wrong = [f"{key.replace('_', ' ')}: {result[key]}" for key in ("stuck", "drift", "more_than_stated") if result[key]]
    if result["scenario"] == "two":
        if result["ended_with_reason"] != result["runs"]:
            wrong.append(f"{result['runs'] - result['ended_with_reason']} runs did not say what is missing")
        if result["ended"]:
            wrong.append(f"{result['ended']} runs ended as if nothing were missing")
        return wrong
    if result["ended"] != result["runs"]:
        wrong.append(f"{result['runs'] - result['ended']} runs did not come to their end")
    if result["gone_on"] != result["losses_of_machines"]:
        wrong.append(f"{result['losses_of_machines'] - result['gone_on']} losses without a restart")
    if not result["losses_of_machines"]:
        wrong.append("no machine was lost")
    if result["compressed"] != result["runs"]:
        wrong.append("links were not compressed")
    if result["apart"] is not None and result["spread"] is not None:
        most = max(result["apart"], key=abs)
        if abs(most) > result["spread"]:
            wrong.append(f"a loss differs by {most:+.2g} from the undisturbed run's, whose seeds differ by less")
    return wrong


def page(file: Path) -> str:
    """The page for people. file: of the rows; of each scenario the newest settings count."""
    rows = list(read_rows(file))
    parts, shown = [], []
    for scenario, title in _TITLES.items():
        for full in (False, True):
            mine = [row for row in rows if (row["scenario"], row["full"]) == (scenario, full)]
            mine = [row for row in mine if row["setup"] == mine[-1]["setup"]]
            plain = [row for row in rows if (row["scenario"], row["full"]) == ("undisturbed", full)]
            if mine:
                steps = max(row["steps"] for row in mine)
                plain = [row for row in plain if row["steps"] == steps]
                shown += mine
                emptied = emptied_rows(rows, full, steps)
                parts.append(_part(title, summary(scenario, mine, plain, full=full, emptied=emptied)))
    every = {row.get("every", _EVERY_S) for row in shown}
    cut = {row.get("cut", _CUT_S) for row in shown if row["scenario"] == "cut"} or {_CUT_S}
    processor = platform.processor() or platform.machine()
    return f"""# Lost machines

`python -m tests.soak.lost_machines SCENARIO`, on {os.cpu_count()} cores of an {processor} machine that all nodes of
the lab share with a second run and other work, over 20 Mbit/s. A small GPT-2 over three stages in `pipecomp train
--peers`, AQ-SGD with 3 and 6 bits. The first kill or cut comes {_list(every)} s after the first step, the next as long
after it, but not before the run has gone on for {_list(each / 4 for each in every)} s. A killed machine answers again
after {_list(each / 2 for each in every)} s, or when the run goes on if that is later; a cut line carries again after
{_list(cut)} s. The planner says whether a machine that answers takes part. A pause is from the
kill to the next step's end, with the start of Python and the loading of the model; of a cut line 90 s of it are the
limit of silence. Losses are means of the last 50 steps. Where machines are lost their cached activations are too, and
samples are sent in 8 bits again, more exactly than their changes in 3: losses tend to be lower. `python -m
tests.soak.emptied_stores` shows that alone: it empties the stores of an undisturbed run at the steps after which a run
with 20 losses went on.

{"".join(parts)}"""


def _list(values: Iterable[float]) -> str:
    return " or ".join(f"{value:g}" for value in sorted(values))


def _part(title: str, result: Found) -> str:
    def both(values: Sequence[float] | None) -> str:
        return "–" if values is None else ", ".join(f"{value:g}" for value in values)

    def short(value: float | None) -> str:
        return "–" if value is None else f"{value:.2g}"

    def signed(values: Sequence[float] | None) -> str:
        return "–" if not values else ", ".join(f"{value:+.2g}" for value in values)

    agreement = (result["compressed"], result["drift"])
    lines: list[tuple[str, Any]] = [
        ("runs; of these came to their end by themselves", f"{result['runs']}; {result['ended']}"),
        ("machines lost; of these rank 0's", f"{result['losses_of_machines']}; {result['of_rank_0']}"),
    ]
    if result["scenario"] == "two":
        lines.append(("runs that ended and said what is missing and what to do", result["ended_with_reason"]))
    else:
        lines += [
            ("starts that went on; of these to take a machine in", f"{result['restarts']}; {result['taken_in']}"),
            ("steps lost with a machine: median, most", both(result["steps_lost"])),
            ("at most, as the runs said", result["stated"]),
            ("seconds from a loss to the next step: median, most", both(result["pause_s"])),
            ("runs with compressed activations; of these with ends that differed", both(agreement)),
            ("loss less the undisturbed run's with the same seed: least, most", signed(result["apart"])),
            ("difference between undisturbed runs of other seeds", short(result["spread"])),
        ]
    if result["emptied"]:
        what = (
            "without losses, the stores of all links emptied at the same steps: differences from undisturbed, by seed"
        )
        lines.append((what, ", ".join(f"{value:+.2g}" for value in result["emptied"])))
    table = "\n".join(f"| {name} | {value} |" for name, value in lines)
    wrong = verdict(result)
    end = "Nothing is wrong." if not wrong else f"Wrong: {'; '.join(wrong)}."
    return f"## {title[0].upper()}{title[1:]}: {result['trains']}\n\n| | |\n|---|---|\n{table}\n\n{end}\n\n"
