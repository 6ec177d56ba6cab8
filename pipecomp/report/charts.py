"""The report's charts as plotly figures: plain dicts of traces and layout. The page sets text and grid colors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pipecomp.report import metrics
from pipecomp.report.reader import RunRecord, number
from pipecomp.report.summary import RunSummary
from pipecomp.utils.units import format_duration, format_ratio, format_share, format_size

COLORS = ("#3b82d6", "#e07b2e", "#2aa37c", "#c4569f", "#8a6ee0", "#b8961f", "#d1495b", "#71839a")
PART_COLORS = dict(zip(metrics.PARTS, ("#3b82d6", "#e07b2e", "#a9b4c2", "#8a6ee0", "#b8961f", "#d5cfc4"), strict=True))

_POINTS = 4000  # points of a curve: about four per pixel of a wide screen, so zooming shows more
_SHORT = 24  # characters of a run name beside bars
# "category": names such as "7" are no numbers; the first row is on top
_DOWN = {"type": "category", "autorange": "reversed", "automargin": True}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of the page. key: element id. title, note: plain text. figure: plotly's data, layout. height: pixels."""

    key: str
    title: str
    note: str
    figure: dict[str, Any]
    height: int = 360


def label(text: str, longest: int = 36) -> str:
    """Escape and shorten a run's text in the middle; plotly interprets some HTML."""
    half = longest // 2
    return escape(text if len(text) <= longest else f"{text[:half]}…{text[-half:]}", quote=False)


def _names(summaries: Sequence[RunSummary], longest: int = 36) -> list[str]:
    """Distinct labels of the runs, numbered where shortening makes two equal: plotly merges bars of one name."""
    alike = len({label(one.run.name, _SHORT) for one in summaries}) < len(summaries)
    return [(f"{i}. " if alike else "") + label(one.run.name, longest) for i, one in enumerate(summaries, 1)]


def _row(names: Sequence[str], i: int, what: str) -> str:
    """Name of a bar, with the run's name if there are several."""
    return what if len(names) == 1 else f"{names[i]}<br>{what}"


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def losses(summaries: Sequence[RunSummary], *, over: str) -> Chart | None:
    """Chart training and held-out loss. over: "steps" or "seconds"."""
    traces: list[dict[str, Any]] = []
    for i, (name, one) in enumerate(zip(_names(summaries), summaries, strict=True)):
        color = COLORS[i % len(COLORS)]
        x = list(getattr(one.curve, over) or [])
        if x:
            x, y = _thinned(x, one.curve.smooth())
            tip = f"{name}<br>loss %{{y:.4f}} at %{{x:,}}<extra></extra>"
            traces.append(_line(x, y, name, color, tip))
        at = getattr(one.held_out, over)
        if at:
            tip = f"{name}<br>held-out loss %{{y:.4f}} at %{{x:,}}<extra></extra>"
            points = {"mode": "markers", "marker": {"symbol": "diamond", "size": 9, "color": color}}
            traces.append({**_line(at, one.held_out.losses, f"{name}, held out", color, tip), **points})
    if not traces:
        return None
    x_axis = _axis("optimizer step" if over == "steps" else "seconds since the start")
    return Chart(
        key=f"loss-{over}",
        title=f"Loss over {over}",
        note=f"Training loss, mean of {metrics.SMOOTH} steps; diamonds are held-out data.",
        figure={"data": traces, "layout": {"xaxis": x_axis, "yaxis": _axis("loss")}},
    )


def _thinned(x: list[Any], y: list[float]) -> tuple[list[Any], list[float]]:
    """Both ends of a long curve, and the lowest and highest point of each of many stretches."""
    n, stretches = len(y), _POINTS // 2
    if n <= _POINTS:
        return x, y
    kept = {0, n - 1}
    for i in range(stretches):
        stretch = range(i * n // stretches, (i + 1) * n // stretches)
        kept |= {min(stretch, key=y.__getitem__), max(stretch, key=y.__getitem__)}
    return [x[i] for i in sorted(kept)], [y[i] for i in sorted(kept)]


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


def _bars(name: str, rows: list[str], values: list[Any], tips: list[str], marker: dict[str, Any]) -> dict[str, Any]:
    """Horizontal bars, one per row."""
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


def link_bytes(summaries: Sequence[RunSummary]) -> Chart | None:
    """Chart sent and uncompressed bytes of each link and direction."""
    runs = _names(summaries, _SHORT)
    rows = [
        (_row(runs, i, f"{label(link.name)} {way}"), raw, sent, COLORS[i % len(COLORS)])
        for i, one in enumerate(summaries)
        for link in one.links
        for way, (raw, sent) in (("forward", link.forward), ("back", link.backward))
        if raw
    ]
    if not rows:
        return None
    names = [row[0] for row in rows]
    tips = [
        f"{name}<br>{format_size(sent)} sent, {format_size(raw)} uncompressed<br>{format_ratio(raw / sent)} less"
        if sent
        else name
        for name, raw, sent, _ in rows
    ]
    colors = [row[3] for row in rows]
    full = _bars("sent", names, [row[2] for row in rows], tips, {"color": colors})
    pale = _bars("uncompressed", names, [row[1] for row in rows], tips, {"color": colors, "opacity": 0.3})
    x_axis = _axis("bytes", exponentformat="SI", ticksuffix="B")
    return Chart(
        key="bytes",
        title="Bytes by link and direction",
        note="Training traffic since the start of the run. Full color: as sent; pale: in the training precision.",
        figure={
            "data": [pale, full],
            "layout": {"barmode": "overlay", "showlegend": False, "xaxis": x_axis, "yaxis": _DOWN},
        },
        height=130 + 34 * len(rows),
    )


def rank_times(summaries: Sequence[RunSummary]) -> Chart | None:
    """Chart the shares of each rank's training time."""
    runs = _names(summaries, _SHORT)
    rows = [(_row(runs, i, f"rank {r.rank}"), r) for i, one in enumerate(summaries) for r in one.ranks if r.total > 0]
    if not rows:
        return None
    traces = []
    for part in metrics.PARTS:
        shares = [r.parts[part] / r.total for _, r in rows]
        tips = [
            f"{name}, stage {r.stage}<br>{part}: {format_duration(r.parts[part])}, {format_share(share)}"
            for (name, r), share in zip(rows, shares, strict=True)
        ]
        names, color = [name for name, _ in rows], {"color": PART_COLORS[part]}
        traces.append(_bars(part, names, [100 * share for share in shares], tips, color))
    x_axis = _axis("% of the time", range=[0, 100])
    return Chart(
        key="ranks",
        title="Where each rank’s time went",
        note="Training steps only. Other: loading data, and everything that no part counts.",
        figure={
            "data": traces,
            "layout": {"barmode": "stack", "xaxis": x_axis, "yaxis": _DOWN, "legend": {"traceorder": "normal"}},
        },
        height=130 + 34 * len(rows),
    )


def hit_rates(summaries: Sequence[RunSummary]) -> Chart | None:
    """Chart the share of samples that crossed the links as changes, over the run."""
    traces = []
    for i, (name, one) in enumerate(zip(_names(summaries), summaries, strict=True)):
        steps, rates = metrics.hit_rates(one.run)
        if any(rates):
            tip = f"{name}<br>%{{y:.0f}} % up to step %{{x}}<extra></extra>"
            traces.append(_line(steps, [100 * rate for rate in rates], name, COLORS[i % len(COLORS)], tip))
    note = "Share of samples sent as changes of their cached activation."
    return _over_steps("hits", "Store hit rate", note, traces, _axis("%", range=[-2, 102])) if traces else None


def bits(summaries: Sequence[RunSummary]) -> Chart | None:
    """Chart the mean bits per quantized value over the run; None if they never changed."""
    traces, changed = [], False
    for i, (run, one) in enumerate(zip(_names(summaries), summaries, strict=True)):
        steps, means = metrics.bits(one.run)
        for way, mean, dash in zip(("forward", "back"), means, ("solid", "dot"), strict=True):
            points = [(step, bits) for step, bits in zip(steps, mean, strict=True) if bits is not None]
            changed |= len({round(bits, 2) for _, bits in points}) > 1
            if points:
                name, color = f"{run}, {way}", COLORS[i % len(COLORS)]
                tip = f"{name}<br>%{{y:.2f}} bits up to step %{{x}}<extra></extra>"
                trace = _line([step for step, _ in points], [bits for _, bits in points], name, color, tip)
                trace["line"]["dash"] = dash
                traces.append(trace)
    note = "Mean bits per quantized value on the links; dotted: gradients."
    return _over_steps("bits", "Bits over time", note, traces, _axis("bits", rangemode="tozero")) if changed else None


def _over_steps(key: str, title: str, note: str, traces: list[dict[str, Any]], y_axis: dict[str, Any]) -> Chart:
    figure = {"data": traces, "layout": {"xaxis": _axis("optimizer step"), "yaxis": y_axis}}
    return Chart(key=key, title=title, note=note, figure=figure, height=300)


# -- the time line

MAX_EVENTS = 6000  # of a longer trace the last steps are shown, of a longer step its end
# Name of an event -> its row, and its color.
EVENTS = {
    "forward": ("compute", "#3b82d6"),
    "backward": ("compute", "#1f57a0"),
    "update": ("compute", "#b8961f"),
    "encode": ("quantize", "#e07b2e"),
    "decode": ("quantize", "#f0ab74"),
    "wait": ("wait", "#a9b4c2"),
    "reduce": ("wait", "#8a6ee0"),
    "load": ("store", "#4fb3c4"),
    "keep": ("store", "#2d8796"),
    "commit": ("store", "#7fd0dd"),
    "send": ("network", "#2aa37c"),
    "receive": ("network", "#86cbb4"),
}


def timeline(run: RunRecord, key: str) -> Chart | None:
    """Chart what every rank did in the last steps, at most `MAX_EVENTS` events. key: the chart's."""
    events = [e for e in run.events if e.get("ph") == "X" and e["name"] in EVENTS and e["dur"] > 0]
    events, steps = _last_steps(events)
    if not events:
        return None
    begin = min(e["ts"] for e in events)
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event)
    traces = [_event_bars(name, by_name[name], begin) for name in EVENTS if name in by_name]
    seen, order = {_event_row(e) for e in events}, dict.fromkeys(row for row, _ in EVENTS.values())
    rows = [f"rank {rank} {row}" for rank in sorted({int(e["pid"]) for e in events}) for row in order]
    rows = [row for row in rows if row in seen]
    what = {0: "The end of the last step", 1: "The last step"}.get(steps, f"The last {steps} steps")
    note = f"{what}. Drag to zoom, double-click to go back, click a name to hide it. Each machine’s own clock."
    if not {"send", "receive"} & by_name.keys():
        note += " Trace the run to see the network and the store."
    layout = {
        "barmode": "overlay",
        "bargap": 0.15,
        "hovermode": "closest",
        "dragmode": "zoom",
        "xaxis": _axis("milliseconds", rangeslider={"visible": True, "thickness": 0.08}),
        "yaxis": {"categoryorder": "array", "categoryarray": rows[::-1], "automargin": True, "fixedrange": True},
    }
    figure = {"data": traces, "layout": layout}
    return Chart(key=key, title="Time line", note=note, figure=figure, height=180 + 30 * len(rows))


def _last_steps(events: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The last steps with at most `MAX_EVENTS` events and their number; 0 if only the end of the last step fits."""
    by_step: dict[float, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_step[number(event["args"].get("step")) or 0.0].append(event)
    kept: list[dict[str, Any]] = []
    steps = 0
    for step in sorted(by_step, reverse=True):
        if steps and len(kept) + len(by_step[step]) > MAX_EVENTS:
            break
        kept, steps = by_step[step] + kept, steps + 1
    return (kept, steps) if len(kept) <= MAX_EVENTS else (sorted(kept, key=lambda e: e["ts"])[-MAX_EVENTS:], 0)


def _event_bars(name: str, events: Sequence[Mapping[str, Any]], begin: float) -> dict[str, Any]:
    rows, values = [_event_row(e) for e in events], [round(e["dur"] / 1000, 3) for e in events]
    marker = {"color": EVENTS[name][1], "line": {"width": 0}}
    bars = _bars(name, rows, values, [_event_tip(e) for e in events], marker)
    return {**bars, "base": [round((e["ts"] - begin) / 1000, 3) for e in events]}


def _event_tip(event: Mapping[str, Any]) -> str:
    parts = [f"{event['name']}, rank {int(event['pid'])}: {event['dur'] / 1000:.3g} ms"]
    micro_batch, count = (number(event["args"].get(key)) for key in ("micro_batch", "bytes"))
    if micro_batch is not None:
        parts.append(f"micro-batch {micro_batch:.0f}")
    if count is not None:
        parts.append(format_size(count))
    return "<br>".join(parts)


def _event_row(event: Mapping[str, Any]) -> str:
    return f"rank {int(event['pid'])} {EVENTS[event['name']][0]}"
