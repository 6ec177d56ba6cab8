"""A run over a slow link that takes too long for a demo, from its first steps and a run without a limit on its link."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from pipecomp.errors import DataError
from pipecomp.report.recorder import METRICS, RUN
from pipecomp.utils.files import atomic_write_text


def seconds_per_step(measured: Sequence[float], warm_up: int) -> float:
    """Return the mean of the steps after the first `warm_up`. measured: seconds since the start, for each step."""
    first = min(warm_up, len(measured) - 1)
    before = measured[first - 1] if first else 0.0
    return (measured[-1] - before) / (len(measured) - first)


def lengthened(measured: Sequence[float], steps: int, warm_up: int) -> list[float]:
    """Return seconds since the start for each of `steps` steps: those measured, then one like another."""
    each = seconds_per_step(measured, warm_up)
    return [*measured, *(measured[-1] + each * (i + 1) for i in range(steps - len(measured)))]


def check_same_start(few: Sequence[float], whole: Sequence[float]) -> None:
    """Raise DataError unless the losses of a run's first steps are those of the whole run, bit for bit; NaN is NaN."""
    for step, (one, other) in enumerate(zip(few, whole, strict=False), 1):
        if one != other and not (math.isnan(one) and math.isnan(other)):
            raise DataError(
                f"FP32's losses depend on the link: in step {step} {one!r} over the slow one, else {other!r}"
            )


def lengthen(folder: Path, unlimited: Path, measured: Sequence[float], *, warm_up: int) -> None:
    """Add to the folder of a run that was stopped the later steps of the same run without a limit on its link.

    Args:
        folder: Of the run over the slow link. Its report says what was added, and from where.
        unlimited: Of the whole run: losses, bytes and evaluations of later steps.
        measured: Seconds since the start, for each step of the run over the slow link.
        warm_up: How many of these do not count for the time of a step.
    """
    count, each = len(measured), seconds_per_step(measured, warm_up)
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    whole = [json.loads(line) for line in (unlimited / METRICS).read_text().splitlines()]
    waits = lines[-1]["waits"]
    for line in whole:
        step = line["step"]
        if "eval" not in line and step <= count:
            continue
        line["seconds"] = round(lines[-1]["seconds"] if step <= count else measured[-1] + each * (step - count), 4)
        if "eval" not in line:
            line |= {"step_s": each, "waits": {link: wait / count * step for link, wait in waits.items()}}
        lines.append(line)
    atomic_write_text(folder / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
    facts = json.loads((folder / RUN).read_text())
    facts |= {"steps": whole[-1]["step"], "seconds": lines[-1]["seconds"]}
    facts["remark"] = (
        f"Derived: only the first {count} steps were run over this link. Later ones are taken to last {each:.3g} s, "
        f"the mean of the last {count - min(warm_up, count - 1)} of these; their losses and bytes are those of a run "
        f"without a limit on its link. The first {count} losses of both are equal, bit for bit."
    )
    atomic_write_text(folder / RUN, json.dumps(facts) + "\n")
