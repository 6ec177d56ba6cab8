"""The report's sentences: what a run reached and sent, who waited, what to change; plain text, not escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipecomp.report import measures
from pipecomp.report.advice import Change, changes
from pipecomp.report.read import Run, number
from pipecomp.report.simulated import Simulated, simulate
from pipecomp.report.text import duration, percent, size, times
from pipecomp.utils.units import format_rate


@dataclass(kw_only=True)
class Told:
    """A run with what is computed of it once. simulated: the step, or why there is none."""

    run: Run
    curve: measures.Curve
    held_out: measures.Curve
    links: list[measures.LinkUse]
    ranks: list[measures.RankTime]
    simulated: Simulated | str
    changes: list[Change]


def told(run: Run) -> Told:
    """Compute them."""
    try:
        simulated = simulate(run)
        tried = [] if isinstance(simulated, str) else changes(run, simulated)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError) as error:
        simulated, tried = f"its files do not fit together ({type(error).__name__}: {error})", []
    return Told(
        run=run,
        curve=measures.training_curve(run),
        held_out=measures.held_out_curve(run),
        links=measures.link_use(run),
        ranks=measures.rank_times(run),
        simulated=simulated,
        changes=tried,
    )


def summary(one: Told) -> list[str]:
    """What to know of a run before any chart."""
    return [
        sentence
        for sentence in (_training(one), _traffic(one), _exchanged(one), _waiting(one), _next(one), _remark(one))
        if sentence
    ]


def _training(one: Told) -> str:
    spent, smooth = measures.seconds(one.run), one.curve.smooth()
    said = f"{len(one.run.steps):,} steps" + ("" if spent is None else f" in {duration(spent)}")
    if one.curve.lost:
        said += f"; the training loss was no number in {_lost(one.curve, 'steps')}"
    elif smooth:
        said += f"; training loss {one.curve.losses[0]:.3f} → {smooth[-1]:.3f}"
    if one.held_out.lost:
        said += ", the held-out loss " + ("" if one.curve.lost else "was no number ")
        said += f"in {_lost(one.held_out, 'evaluations')}"
    elif one.held_out.losses:
        said += f", held-out loss {one.held_out.losses[-1]:.3f}"
    speeds = [s for s in (number(line.get("per_s")) for line in one.run.steps) if s is not None]
    if speeds:
        said += f"; {sorted(speeds)[len(speeds) // 2]:,.0f} {one.run.facts.get('unit', 'tokens')}/s"
    return said + "."


def _lost(curve: measures.Curve, what: str) -> str:
    return f"{len(curve.lost)} of {len(curve.lost) + len(curve.losses)} {what}, first in step {curve.lost[0]}"


def _traffic(one: Told) -> str:
    raw, sent = sum(link.raw for link in one.links), sum(link.sent for link in one.links)
    if not sent:
        return ""
    if sent >= 0.98 * raw:
        return f"The links carried {size(sent)}, not compressed."
    return f"The links carried {size(sent)} in place of {size(raw)}: {times(raw / sent)} less."


def _exchanged(one: Told) -> str:
    raw, sent = measures.exchanged(one.run)
    if not sent:
        return ""
    plain = "" if sent >= 0.98 * raw else f" in place of {size(raw)}"
    return f"Besides, ranks sent each other {size(sent)} of gradients and weights{plain}."


def _waiting(one: Told) -> str:
    known = [link for link in one.links if link.waited is not None]
    if not known:
        return ""
    slowest = max(known, key=lambda link: link.waited or 0.0)
    share = percent(slowest.waited or 0.0)
    if isinstance(one.simulated, Simulated) and not one.simulated.limited:
        return f"Stages waited at link {slowest.name} for up to {share} of the time, though not for its rate."
    return f"At link {slowest.name} a stage waited for packets {share} of the time."


def _next(one: Told) -> str:
    if isinstance(one.simulated, str):
        return f"No advice: {one.simulated}."
    best = next((change for change in one.changes if change.pays), None)
    if best is not None:
        return f"Next: {best.what} predicts {times(best.gain)} the speed ({best.why})."
    return "No setting that was tried in the simulation makes a step much faster."


def _remark(one: Told) -> str:
    return str(one.run.facts.get("remark", ""))


def comparison(all_told: Sequence[Told]) -> str:
    """How long each run took to the lowest loss that two of them reach; empty for fewer than two."""
    loss = measures.common_loss([one.curve for one in all_told])
    if loss is None:
        return ""
    times_to = [(one.run.name, measures.seconds_to(one.curve, loss)) for one in all_told if one.curve.seconds]
    reached = sorted((s, name) for name, s in times_to if s is not None)
    said = [f"{name} in {duration(s)}" for s, name in reached]
    missed = [name for name, s in times_to if s is None]
    sentence = f"The training loss {loss:.3f} (mean of {measures.SMOOTH} steps) was reached by {_list(said)}"
    sentence += f"; {_list(missed)} did not reach it." if missed else "."
    lost = [(one.run.name, _lost(one.curve, "steps")) for one in all_told if one.curve.lost]
    return sentence + "".join(f" But {name}'s loss was no number in {steps}." for name, steps in lost)


def _list(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def network(simulated: Simulated) -> str:
    """Where the simulation's links come from."""
    slowest = simulated.network.slowest
    rate = "without limits" if slowest == float("inf") else f"of {format_rate(slowest)} of content"
    if simulated.known:
        return f"Links as the network lab throttled them, the slowest {rate}"
    if slowest == float("inf"):
        return "Links that cost no time: they do not limit this run"
    return f"Links {rate}: the rate with which the simulated step takes the measured time"


def planned_seconds(one: Told) -> float | None:
    """Of a step, by the plan; of one that sends first visits where nearly all samples of the run's later half did."""
    plan = planned(one.run) or {}
    new = isinstance(one.simulated, Simulated) and min(one.simulated.new_share) > 0.9
    return number(plan.get("first_epoch_s" if new and "first_epoch_s" in plan else "step_s"))


def planned(run: Run) -> dict | None:
    """The row of plan.json that is of this run's method, bits and number of stages; None without one.

    Of bits that follow an error the most count, as in the plan.
    """
    a = run.facts.get("settings", {}).get("activations", {})
    quantized = a.get("method") in ("direct", "aqsgd")
    wanted = [
        run.facts.get("stages"),
        a.get("method"),
        *([_most(a.get("forward_bits")), _most(a.get("backward_bits"))] if quantized else [None, None]),
    ]
    rows = [run.plan.get("chosen"), run.plan.get("plain"), *(run.plan.get("methods") or [])]
    keys = ("stages", "method", "forward_bits", "backward_bits")
    return next((row for row in rows if isinstance(row, dict) and [row.get(k) for k in keys] == wanted), None)


def _most(bits: Any) -> Any:
    """Of bits as JSON has them, one or one for each link, the most that packets may have."""
    if isinstance(bits, list):
        return [_most(each) for each in bits]
    return bits.get("max") if isinstance(bits, dict) else bits
