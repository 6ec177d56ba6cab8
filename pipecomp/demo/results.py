"""The demo's results: losses and times of each method, the derived run over the slow link, a table and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipecomp.demo.settings import NAMES, WARM_UP, Settings
from pipecomp.errors import DataError
from pipecomp.report.recorder import METRICS, RUN
from pipecomp.stats import total_bytes
from pipecomp.utils.files import atomic_write_text
from pipecomp.utils.tables import table
from pipecomp.utils.units import format_duration, format_nominal_rate, format_ratio, parse_rate

_STYLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": SIMPLE_HEAD, "collapse_padding": True}


def summarize(settings: Settings, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one method's results from its ranks' measurements."""
    first, steps = ranks[0], settings.steps
    plain = {"none": 32, "fp16": 16, "bf16": 16}
    # Both ends count a link alike; take link k from rank k, which sends its activations.
    links = [r["stats"]["links"][f"{k}->{k + 1}"] for k, r in enumerate(ranks[:-1])]
    traffic = {}
    for way in ("forward", "backward"):
        traffic[f"{way}_bytes_raw"], traffic[f"{way}_bytes_sent"] = total_bytes(links, way)
    measured = first["seconds"]
    seconds = extrapolate(measured, steps, WARM_UP)
    derived = len(measured) < steps
    return {
        "method": first["method"],
        "forward_bits": plain.get(first["method"], settings.forward_bits),
        "backward_bits": plain.get(first["method"], settings.backward_bits),
        "train_loss": epoch_means(first["losses"], settings.per_epoch)[-1],
        "eval_loss": first["eval_loss"],
        **traffic,
        "store_bytes": sum(r["store_bytes"] for r in ranks),
        "step_s": seconds_per_step(measured, WARM_UP) if derived else seconds[-1] / steps,
        "measured_steps": len(measured),
        "losses": first["losses"],
        "seconds": seconds,
    }


def epoch_means(losses: Sequence[float], per_epoch: int) -> list[float]:
    """Return the mean loss of the last epoch's length of steps, for every step from the end of the first epoch."""
    return [sum(losses[end - per_epoch : end]) / per_epoch for end in range(per_epoch, len(losses) + 1)]


def steps_to(losses: Sequence[float], per_epoch: int, loss: float) -> int | None:
    """Return the number of steps after which `epoch_means` is first at most `loss`, or None."""
    means = epoch_means(losses, per_epoch)
    return next((i for i, mean in enumerate(means, per_epoch) if mean <= loss), None)


def compare(settings: Settings, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the methods.

    Returns:
        "settings": of the demo. "link": formatted rate. "bandwidth": bits per second. "per_epoch": steps. "results":
        each method's `summarize`, with "reached": steps until AQ-SGD's final loss, or None. "loss": that loss.
        "gap_closed": share of DirectQ's additional loss that AQ-SGD avoids. "faster": how much longer FP32 takes.
        "sentence": the comparison in one sentence. None where a method is missing or its loss is not finite.
    """
    by_name = {r["method"]: r for r in results}
    fp32, direct, aqsgd = (by_name.get(name) for name in ("none", "direct", "aqsgd"))
    loss = aqsgd["train_loss"] if aqsgd and math.isfinite(aqsgd["train_loss"]) else None
    for r in results:
        r["reached"] = None if loss is None else steps_to(r["losses"], settings.per_epoch, loss)
    closed = None
    if fp32 and direct and loss is not None and fp32["train_loss"] < direct["train_loss"] < math.inf:
        closed = (direct["train_loss"] - loss) / (direct["train_loss"] - fp32["train_loss"])
    faster = None
    if fp32 and aqsgd and fp32["reached"]:
        faster = seconds_until(fp32) / seconds_until(aqsgd)
    rate = parse_rate("bandwidth", settings.bandwidth)
    comparison = {
        "settings": asdict(settings),
        "link": format_nominal_rate(rate),
        "bandwidth": rate,
        "per_epoch": settings.per_epoch,
        "loss": loss,
        "gap_closed": closed,
        "faster": faster,
        "results": results,
    }
    return {**comparison, "sentence": _sentence(comparison)}


def seconds_until(result: dict[str, Any]) -> float:
    """Return the seconds until a result "reached" the loss."""
    return result["seconds"][result["reached"] - 1]


def _sentence(comparison: dict[str, Any]) -> str | None:
    """The comparison in one sentence; None if AQ-SGD has no rival."""
    by_name = {r["method"]: r for r in comparison["results"]}
    aqsgd, others = by_name.pop("aqsgd", None), list(by_name.values())
    if aqsgd is None or not others:
        return None
    link = f"Over this link of {comparison['link']}"
    if comparison["loss"] is None:
        return f"{link}, AQ-SGD ended with a training loss that is not finite."
    mine = seconds_until(aqsgd)
    arrived = [r for r in others if r["reached"] is not None]
    if arrived:
        first, *arrived = arrived
        needs = "needs" if first["measured_steps"] < len(first["losses"]) else "needed"
        theirs = seconds_until(first)
        parts = [
            f"{link}, {NAMES[first['method']]} {needs} {format_duration(theirs)} to reach the training loss that "
            f"AQ-SGD reached in {format_duration(mine)}: {format_ratio(theirs / mine)} as long"
        ]
    else:
        parts = [f"{link}, AQ-SGD reached a training loss of {comparison['loss']:.3f} in {format_duration(mine)}"]
    parts += [f"{NAMES[r['method']]} reached it in {format_duration(seconds_until(r))}" for r in arrived]
    parts += [f"{NAMES[r['method']]} did not reach it" for r in others if r["reached"] is None]
    return "; ".join(parts) + "."


# -- FP32 over the slow link: its first steps are measured, later ones derived


def seconds_per_step(measured: Sequence[float], warm_up: int) -> float:
    """Return the mean seconds of the steps after `warm_up`. measured: seconds since the start, for each step."""
    first = min(warm_up, len(measured) - 1)
    before = measured[first - 1] if first else 0.0
    return (measured[-1] - before) / (len(measured) - first)


def extrapolate(measured: Sequence[float], steps: int, warm_up: int) -> list[float]:
    """Return seconds since the start for each of `steps` steps: measured ones, then equally long ones."""
    each = seconds_per_step(measured, warm_up)
    return [*measured, *(measured[-1] + each * (i + 1) for i in range(steps - len(measured)))]


def check_same_start(few: Sequence[float], whole: Sequence[float]) -> None:
    """Raise DataError unless a run's first losses equal the whole run's, bit for bit; NaN equals NaN."""
    for step, (one, other) in enumerate(zip(few, whole, strict=False), 1):
        if one != other and not (math.isnan(one) and math.isnan(other)):
            raise DataError(
                f"FP32's losses depend on the link: in step {step} {one!r} over the slow one, else {other!r}"
            )


def extend_run(folder: Path, unlimited: Path, measured: Sequence[float], *, warm_up: int) -> None:
    """Extend a stopped run's folder by the later steps of the same run without a link limit.

    Args:
        folder: Folder of the run over the slow link; its report mentions the extension.
        unlimited: Folder of the whole run, for losses, bytes and evaluations of later steps.
        measured: Seconds since the start, for each step over the slow link.
        warm_up: Steps that do not count for the time of a step.
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


# -- table and picture


def method_label(result: dict[str, Any]) -> str:
    """Return a method's label, such as "AQ-SGD fw2 bw4"."""
    name = NAMES.get(result["method"], result["method"])
    if result["method"] in ("direct", "aqsgd"):
        return f"{name} fw{result['forward_bits']} bw{result['backward_bits']}"
    return name


def megabytes(size: float) -> str:
    """Format bytes in MB with three digits, or all digits of large numbers."""
    return f"{size / 1e6:.3g}" if size < 1e8 else f"{size / 1e6:.0f}"


def result_table(comparison: dict[str, Any]) -> Table:
    """Tabulate a comparison: loss, bytes and time of each method; * marks derived times."""
    rows = []
    for r in comparison["results"]:
        mark = "*" if r["measured_steps"] < len(r["losses"]) else ""
        until = f"{format_duration(seconds_until(r))}{mark}" if r["reached"] else "not reached"
        row = (
            method_label(r),
            f"{r['train_loss']:.3f}",
            f"{r['eval_loss']:.3f}",
            f"{megabytes(r['forward_bytes_sent'])} + {megabytes(r['backward_bytes_sent'])}",
            f"{r['step_s']:.2f}",
            "–" if comparison["loss"] is None else until,
        )
        rows.append(row)
    title = f"Over a link of {comparison['link']}, {len(comparison['results'][0]['losses'])} steps"
    headings = ("method", "training\nloss", "held-out\nloss", "MB there,\nback", "s a\nstep", "time to AQ-\nSGD's loss")
    return table(headings, rows, left=("method",), title=title, **_STYLE)


def table_notes(comparison: dict[str, Any]) -> list[str]:
    """List the table's notes, a sentence each."""
    lines = [
        "Training loss: mean over the last epoch. Held-out loss: evaluated without quantization.",
        "pipecomp itself slows the link down, each way, and counts headers. Input and output embeddings are untied, so "
        "that only activations and their gradients are sent.",
    ]
    for r in comparison["results"]:
        count = r["measured_steps"]
        if count < len(r["losses"]):
            lines.append(
                f"* Derived: {count} steps were run over this link, and {r['step_s']:.3g} s is what the last "
                f"{count - min(WARM_UP, count - 1)} of them took on average. {method_label(r)}'s losses and bytes are "
                f"those of a run without a limit on its link; checked: the first {count} losses of both are equal, "
                "bit for bit."
            )
    if comparison["gap_closed"] is not None:
        percent = f"{100 * comparison['gap_closed']:.0f} %"
        lines.append(f"AQ-SGD closes {percent} of the gap between DirectQ's training loss and FP32's.")
    return lines


def plot(comparison: dict[str, Any], file: Path) -> None:
    """Draw the loss over steps and over time on the slow link, averaged over an epoch's steps, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    first = comparison["per_epoch"]
    for r in comparison["results"]:
        means, name = epoch_means(r["losses"], first), method_label(r)
        derived = r["measured_steps"] < len(r["losses"])
        left.plot(range(first, len(r["losses"]) + 1), means, label=name)
        timed = f"{name} (time of a step measured, losses equal)" if derived else name
        minutes = [s / 60 for s in r["seconds"][first - 1 :]]
        right.plot(minutes, means, label=timed, linestyle="--" if derived else "-")
    left.set_xlabel("optimizer step")
    left.set_ylabel("training loss (mean over an epoch's steps)")
    right.set_xlabel(f"minutes over a link of {comparison['link']}")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)
