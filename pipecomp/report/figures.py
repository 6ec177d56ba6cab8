"""The charts, as plotly's figures: plain dicts of traces and layout. Colours of text and grid are the page's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pipecomp.report import measures
from pipecomp.report.simulated import Simulated
from pipecomp.report.text import duration, percent, size, times
from pipecomp.report.words import Told, planned_seconds

COLORS = ("#3b82d6", "#e07b2e", "#2aa37c", "#c4569f", "#8a6ee0", "#b8961f", "#d1495b", "#71839a")
PART_COLORS = dict(zip(measures.PARTS, ("#3b82d6", "#e07b2e", "#a9b4c2", "#8a6ee0", "#b8961f", "#d5cfc4"), strict=True))

_POINTS = 4000  # of a curve: about four for each pixel of a wide screen, so that some are left to zoom into
_SHORT = 24  # characters of a run's name beside bars
_DOWN = {"type": "category", "autorange": "reversed", "automargin": True}  # names, also "7"; the first row on top


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of the page. key: its id. title, note: plain text. figure: plotly's data and layout. height: pixels."""

    key: str
    title: str
    note: str
    figure: dict[str, Any]
    height: int = 360


def label(text: str, longest: int = 36) -> str:
    """Make a text of a run safe and short for plotly, which reads some HTML; both its ends stay."""
    half = longest // 2
    return escape(text if len(text) <= longest else f"{text[:half]}…{text[-half:]}", quote=False)


def _names(all_told: Sequence[Told], longest: int = 36) -> list[str]:
    """The runs' labels, all different: plotly draws bars of one name as one bar.

    Where shortening would make two alike, each begins with its run's place on the page, in all charts.
    """
    alike = len({label(one.run.name, _SHORT) for one in all_told}) < len(all_told)
    return [(f"{i}. " if alike else "") + label(one.run.name, longest) for i, one in enumerate(all_told, 1)]


def _row(names: Sequence[str], i: int, what: str) -> str:
    """The name of a bar: with the run's name if there are several."""
    return what if len(names) == 1 else f"{names[i]}<br>{what}"


def losses(all_told: Sequence[Told], *, over: str) -> Chart | None:
    """The training loss, and what evaluations found. over: "steps" or "seconds"."""
    traces: list[dict[str, Any]] = []
    for i, (name, one) in enumerate(zip(_names(all_told), all_told, strict=True)):
        color = COLORS[i % len(COLORS)]
        x = _axis(one.curve, over)
        if x:
            x, y = _thinned(x, one.curve.smooth())
            tip = f"{name}<br>loss %{{y:.4f}} at %{{x:,}}<extra></extra>"
            traces.append(_line(x, y, name, color, tip))
        at = _axis(one.held_out, over)
        if at:
            tip = f"{name}<br>held-out loss %{{y:.4f}} at %{{x:,}}<extra></extra>"
            points = {"mode": "markers", "marker": {"symbol": "diamond", "size": 9, "color": color}}
            traces.append({**_line(at, one.held_out.losses, f"{name}, held out", color, tip), **points})
    if not traces:
        return None
    x_title = "optimizer step" if over == "steps" else "seconds since the start"
    return Chart(
        key=f"loss-{over}",
        title=f"Loss over {over}",
        note=f"Training loss, mean of {measures.SMOOTH} steps; diamonds are held-out data.",
        figure={
            "data": traces,
            "layout": {"xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": "loss"}}},
        },
    )


def _thinned(x: list[Any], y: list[float]) -> tuple[list[Any], list[float]]:
    """Both ends of a long curve, and of each of many stretches the lowest and the highest point: it looks the same."""
    n, stretches = len(y), _POINTS // 2
    if n <= _POINTS:
        return x, y
    kept = {0, n - 1}
    for i in range(stretches):
        stretch = range(i * n // stretches, (i + 1) * n // stretches)
        kept |= {min(stretch, key=y.__getitem__), max(stretch, key=y.__getitem__)}
    return [x[i] for i in sorted(kept)], [y[i] for i in sorted(kept)]


def _axis(curve: measures.Curve, over: str) -> list[Any]:
    return list(curve.steps if over == "steps" else curve.seconds or [])


def _line(x: Sequence[Any], y: Sequence[float], name: str, color: str, tip: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": [round(value, 6) for value in y],
        "name": name,
        "line": {"color": color, "width": 2},
        "hovertemplate": tip,
    }


def _over_steps(traces: list[dict[str, Any]], y_axis: dict[str, Any]) -> dict[str, Any]:
    return {"data": traces, "layout": {"xaxis": {"title": {"text": "optimizer step"}}, "yaxis": y_axis}}


def _bars(name: str, rows: list[str], values: list[Any], tips: list[str], marker: dict[str, Any]) -> dict[str, Any]:
    """Bars to the right, one for each row."""
    return {
        "type": "bar",
        "orientation": "h",
        "x": values,
        "y": rows,
        "name": name,
        "marker": marker,
        "hovertext": tips,
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def link_bytes(all_told: Sequence[Told]) -> Chart | None:
    """Bytes of each link, each way: sent, and what they would have been."""
    runs = _names(all_told, _SHORT)
    rows = [
        (_row(runs, i, f"{label(link.name)} {way}"), raw, sent, COLORS[i % len(COLORS)])
        for i, one in enumerate(all_told)
        for link in one.links
        for way, (raw, sent) in (("forward", link.forward), ("back", link.backward))
        if raw
    ]
    if not rows:
        return None
    names = [row[0] for row in rows]
    tips = [
        f"{name}<br>{size(sent)} sent, {size(raw)} uncompressed<br>{times(raw / sent)} less" if sent else name
        for name, raw, sent, _ in rows
    ]
    colors = [row[3] for row in rows]
    full = _bars("sent", names, [row[2] for row in rows], tips, {"color": colors})
    pale = _bars("uncompressed", names, [row[1] for row in rows], tips, {"color": colors, "opacity": 0.3})
    x_axis = {"title": {"text": "bytes"}, "exponentformat": "SI", "ticksuffix": "B"}
    return Chart(
        key="bytes",
        title="Bytes by link and direction",
        note="Of training, since the start of the run. Full colour: packets as sent; pale: the values in the training "
        "precision.",
        figure={
            "data": [pale, full],
            "layout": {"barmode": "overlay", "showlegend": False, "xaxis": x_axis, "yaxis": _DOWN},
        },
        height=130 + 34 * len(rows),
    )


def rank_times(all_told: Sequence[Told]) -> Chart | None:
    """Where each rank's training time went, in shares."""
    runs = _names(all_told, _SHORT)
    rows = [(_row(runs, i, f"rank {r.rank}"), r) for i, one in enumerate(all_told) for r in one.ranks if r.total > 0]
    if not rows:
        return None
    traces = []
    for part in measures.PARTS:
        shares = [r.parts[part] / r.total for _, r in rows]
        tips = [
            f"{name}, stage {r.stage}<br>{part}: {duration(r.parts[part])}, {percent(share)}"
            for (name, r), share in zip(rows, shares, strict=True)
        ]
        names, color = [name for name, _ in rows], {"color": PART_COLORS[part]}
        traces.append(_bars(part, names, [100 * share for share in shares], tips, color))
    return Chart(
        key="ranks",
        title="Where each rank’s time went",
        note="Of the training steps. Other: loading data, and all that is counted to no part.",
        figure={
            "data": traces,
            "layout": {
                "barmode": "stack",
                "xaxis": {"title": {"text": "% of the time"}, "range": [0, 100]},
                "yaxis": _DOWN,
                "legend": {"traceorder": "normal"},
            },
        },
        height=130 + 34 * len(rows),
    )


def hit_rates(all_told: Sequence[Told]) -> Chart | None:
    """How many of the samples crossed the links as changes, over the run."""
    traces = []
    for i, (name, one) in enumerate(zip(_names(all_told), all_told, strict=True)):
        steps, rates = measures.hit_rates(one.run)
        if any(rates):
            tip = f"{name}<br>%{{y:.0f}} % up to step %{{x}}<extra></extra>"
            traces.append(_line(steps, [100 * rate for rate in rates], name, COLORS[i % len(COLORS)], tip))
    if not traces:
        return None
    return Chart(
        key="hits",
        title="Store hit rate",
        note="The share of samples that were sent as changes of what is cached.",
        figure=_over_steps(traces, {"title": {"text": "%"}, "range": [-2, 102]}),
        height=300,
    )


def bits(all_told: Sequence[Told]) -> Chart | None:
    """How many bits the links' values had, over the run; None where they never changed."""
    traces, changed = [], False
    for i, (run, one) in enumerate(zip(_names(all_told), all_told, strict=True)):
        steps, means = measures.bits(one.run)
        for way, mean, dash in zip(("forward", "back"), means, ("solid", "dot"), strict=True):
            told = [(step, bits) for step, bits in zip(steps, mean, strict=True) if bits is not None]
            changed |= len({round(bits, 2) for _, bits in told}) > 1
            if told:
                name, color = f"{run}, {way}", COLORS[i % len(COLORS)]
                tip = f"{name}<br>%{{y:.2f}} bits up to step %{{x}}<extra></extra>"
                trace = _line([step for step, _ in told], [bits for _, bits in told], name, color, tip)
                trace["line"]["dash"] = dash
                traces.append(trace)
    if not changed:
        return None
    return Chart(
        key="bits",
        title="Bits over time",
        note="Of a quantized value on the links, on average; dotted: gradients.",
        figure=_over_steps(traces, {"title": {"text": "bits"}, "rangemode": "tozero"}),
        height=300,
    )


def predicted(all_told: Sequence[Told]) -> Chart | None:
    """Seconds of a step: measured, simulated over links whose rate is known, and of a plan."""
    columns: dict[str, list[tuple[str, float]]] = {"measured": [], "simulated": [], "planned": []}
    for name, one in zip(_names(all_told, _SHORT), all_told, strict=True):
        measured = measures.step_seconds(one.run)
        if measured is not None:
            columns["measured"].append((name, measured))
        if isinstance(one.simulated, Simulated) and one.simulated.known:
            columns["simulated"].append((name, one.simulated.seconds))
        seconds = planned_seconds(one)
        if seconds is not None:
            columns["planned"].append((name, seconds))
    if not columns["simulated"] and not columns["planned"]:
        return None
    traces = []
    for i, (what, found) in enumerate(columns.items()):
        tips = [f"{name}<br>{what}: {duration(seconds)}" for name, seconds in found]
        names, values = [name for name, _ in found], [round(seconds, 6) for _, seconds in found]
        if found:
            traces.append(_bars(what, names, values, tips, {"color": COLORS[i]}))
    return Chart(
        key="predicted",
        title="Predicted and measured step",
        note="Measured: mean of the run’s second half. Simulated: the run’s own compute times and bytes over the lab’s "
        "links. Planned: plan.json, made before; the first epoch’s step where nearly all samples were new.",
        figure={
            "data": traces,
            "layout": {
                "barmode": "group",
                "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
                "yaxis": _DOWN,
            },
        },
        height=140 + 26 * sum(len(found) for found in columns.values()),
    )
