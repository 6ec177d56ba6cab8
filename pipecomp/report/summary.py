"""The report's sentences: what a run reached and sent, which stage waited, what to change. Plain text, not escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipecomp.report import metrics
from pipecomp.report.advice import ACCURACY, LAB, RunSimulation, SettingChange, simulate, try_changes
from pipecomp.report.reader import RunRecord, number
from pipecomp.utils.units import format_duration, format_rate, format_ratio, format_share, format_size


@dataclass(kw_only=True)
class RunSummary:
    """A run and everything that is computed from it once. simulation: the simulated step, or why there is none."""

    run: RunRecord
    curve: metrics.Curve
    held_out: metrics.Curve
    links: list[metrics.LinkUse]
    ranks: list[metrics.RankTime]
    simulation: RunSimulation | str
    changes: list[SettingChange]

    def sentences(self) -> list[str]:
        """List what to know about the run before any chart."""
        made = (
            _training(self),
            _traffic(self),
            _exchanged(self),
            _waiting(self),
            _next(self),
            self.run.facts.get("remark"),
        )
        return [str(sentence) for sentence in made if sentence]

    def planned_seconds(self) -> float | None:
        """Return the planned seconds of a step, of a first-epoch step if nearly all later samples were new."""
        plan = planned_row(self.run) or {}
        new = isinstance(self.simulation, RunSimulation) and min(self.simulation.new_share) > 0.9
        return number(plan.get("first_epoch_s" if new and "first_epoch_s" in plan else "step_s"))


def summarize(run: RunRecord) -> RunSummary:
    """Compute a run's summary; files that contradict each other leave out the simulation only."""
    simulation: RunSimulation | str
    try:
        simulation = simulate(run)
        changes = [] if isinstance(simulation, str) else try_changes(run, simulation)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError) as error:
        simulation, changes = f"the run's files are inconsistent ({type(error).__name__}: {error})", []
    return RunSummary(
        run=run,
        curve=metrics.training_curve(run),
        held_out=metrics.held_out_curve(run),
        links=metrics.link_use(run),
        ranks=metrics.rank_times(run),
        simulation=simulation,
        changes=changes,
    )


def _training(one: RunSummary) -> str:
    spent, smooth = metrics.seconds(one.run), one.curve.smooth()
    text = f"{len(one.run.steps):,} steps" + ("" if spent is None else f" in {format_duration(spent)}")
    if one.curve.not_finite:
        text += f"; the training loss was not finite in {_not_finite(one.curve, 'steps')}"
    elif smooth:
        text += f"; training loss {one.curve.losses[0]:.3f} → {smooth[-1]:.3f}"
    if one.held_out.not_finite:
        text += ", the held-out loss " + ("" if one.curve.not_finite else "was not finite ")
        text += f"in {_not_finite(one.held_out, 'evaluations')}"
    elif one.held_out.losses:
        text += f", held-out loss {one.held_out.losses[-1]:.3f}"
    speeds = [s for s in (number(line.get("per_s")) for line in one.run.steps) if s is not None]
    if speeds:
        text += f"; {sorted(speeds)[len(speeds) // 2]:,.0f} {one.run.facts.get('unit', 'tokens')}/s"
    return text + "."


def _not_finite(curve: metrics.Curve, what: str) -> str:
    count = len(curve.not_finite)
    return f"{count} of {count + len(curve.losses)} {what}, first in step {curve.not_finite[0]}"


def _traffic(one: RunSummary) -> str:
    raw, sent = sum(link.raw for link in one.links), sum(link.sent for link in one.links)
    if not sent:
        return ""
    if sent >= 0.98 * raw:
        return f"The links carried {format_size(sent)}, uncompressed."
    return f"The links carried {format_size(sent)} instead of {format_size(raw)}: {format_ratio(raw / sent)} less."


def _exchanged(one: RunSummary) -> str:
    raw, sent = metrics.exchanged(one.run)
    if not sent:
        return ""
    plain = "" if sent >= 0.98 * raw else f" instead of {format_size(raw)}"
    return f"Ranks also exchanged {format_size(sent)} of gradients and weights{plain}."


def _waiting(one: RunSummary) -> str:
    known = [link for link in one.links if link.waited is not None]
    if not known:
        return ""
    slowest = max(known, key=lambda link: link.waited or 0.0)
    share = format_share(slowest.waited or 0.0)
    if isinstance(one.simulation, RunSimulation) and not one.simulation.limited:
        return f"Stages waited at link {slowest.name} for up to {share} of the time, but not because of its rate."
    return f"At link {slowest.name} a stage waited for packets {share} of the time."


def _next(one: RunSummary) -> str:
    if isinstance(one.simulation, str):
        return f"No advice: {one.simulation}."
    if not one.simulation.accurate:
        return f"No advice: {_describe_inaccuracy(one.simulation)}."
    best = next((change for change in one.changes if change.pays), None)
    if best is not None:
        return f"Next: {best.what} predicts {format_ratio(best.gain)} the speed ({best.why})."
    return "No simulated setting makes a step much faster."


def comparison(summaries: Sequence[RunSummary]) -> str:
    """Describe the time of each run to the lowest loss that two of them reach; empty for fewer than two."""
    loss = metrics.common_loss([one.curve for one in summaries])
    if loss is None:
        return ""
    times = [(one.run.name, metrics.seconds_to(one.curve, loss)) for one in summaries if one.curve.seconds]
    reached = [f"{name} in {format_duration(s)}" for s, name in sorted((s, name) for name, s in times if s is not None)]
    missed = [name for name, s in times if s is None]
    text = f"The training loss {loss:.3f} (mean of {metrics.SMOOTH} steps) was reached by {_list(reached)}"
    text += f"; {_list(missed)} did not reach it." if missed else "."
    lost = [(one.run.name, _not_finite(one.curve, "steps")) for one in summaries if one.curve.not_finite]
    return text + "".join(f" But {name}'s loss was not finite in {steps}." for name, steps in lost)


def _list(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _describe_inaccuracy(simulation: RunSimulation) -> str:
    return (
        f"the run's steps took {format_duration(simulation.measured_s)}, and its own compute over these links predicts "
        f"{'less' if simulation.seconds < simulation.measured_s else 'more'} by over {format_share(ACCURACY)}, so that "
        "predictions for other settings would be wrong, too"
    )


def describe_network(simulation: RunSimulation) -> str:
    """Describe where the simulation's link rates come from."""
    slowest = simulation.network.slowest
    rate = "without limits" if slowest == float("inf") else f"of {format_rate(slowest)} of content"
    if simulation.known:
        how = "as the network lab throttled them" if simulation.source == LAB else "as measured between the ranks"
        return f"Links {how}, the slowest {rate}"
    if slowest == float("inf"):
        return "Links take no time: they do not limit this run"
    return f"Links {rate}: the rate at which the simulated step takes the measured time"


def planned_row(run: RunRecord) -> dict | None:
    """Return the row of plan.json with this run's stages, method and bits; bits by error count with their maximum."""
    a = run.facts.get("settings", {}).get("activations", {})
    quantized = a.get("method") in ("direct", "aqsgd")
    bits = [_max_bits(a.get(f"{way}_bits")) if quantized else None for way in ("forward", "backward")]
    wanted = [run.facts.get("stages"), a.get("method"), *bits]
    rows = [run.plan.get("chosen"), run.plan.get("plain"), *(run.plan.get("methods") or [])]
    keys = ("stages", "method", "forward_bits", "backward_bits")
    return next((row for row in rows if isinstance(row, dict) and [row.get(k) for k in keys] == wanted), None)


def _max_bits(bits: Any) -> Any:
    if isinstance(bits, list):
        return [_max_bits(each) for each in bits]
    return bits.get("max") if isinstance(bits, dict) else bits
