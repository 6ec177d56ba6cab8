"""What every rank did, and when, as a chart to zoom into: a row for each rank and kind of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pipecomp.report.figures import Chart
from pipecomp.report.read import Run, number
from pipecomp.report.text import size

MOST = 6000  # events in a page; of a longer trace the last steps are shown, of a longer step its end
ROWS = {
    "compute": ("forward", "backward", "update"),
    "quantize": ("encode", "decode"),
    "wait": ("wait", "reduce"),
    "store": ("load", "keep", "commit"),
    "network": ("send", "receive"),
}
COLORS = {
    "forward": "#3b82d6",
    "backward": "#1f57a0",
    "update": "#b8961f",
    "encode": "#e07b2e",
    "decode": "#f0ab74",
    "wait": "#a9b4c2",
    "reduce": "#8a6ee0",
    "load": "#4fb3c4",
    "keep": "#2d8796",
    "commit": "#7fd0dd",
    "send": "#2aa37c",
    "receive": "#86cbb4",
}
_ROW_OF = {name: row for row, names in ROWS.items() for name in names}


def timeline(run: Run, key: str) -> Chart | None:
    """Draw the last step of a run, or as many steps as `MOST` events are. key: the chart's."""
    events = [e for e in run.events if e.get("ph") == "X" and e["name"] in _ROW_OF and e["dur"] > 0]
    events, steps = _last_steps(events)
    if not events:
        return None
    begin = min(e["ts"] for e in events)
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event)
    traces = [_bars(name, by_name[name], begin) for name in COLORS if name in by_name]
    seen = {(int(e["pid"]), _ROW_OF[e["name"]]) for e in events}
    rows = [_row(rank, row) for rank in sorted({r for r, _ in seen}) for row in ROWS if (rank, row) in seen]
    what = {0: "The end of the last step", 1: "The last step"}.get(steps, f"The last {steps} steps")
    return Chart(
        key=key,
        title="Time line",
        note=f"{what}. Drag to zoom, double-click to go back; a click on a name hides it. Each machine’s own clock."
        + ("" if any(_ROW_OF[n] == "network" for n in by_name) else " Run with a trace for the network and the store."),
        figure={
            "data": traces,
            "layout": {
                "barmode": "overlay",
                "bargap": 0.15,
                "hovermode": "closest",
                "dragmode": "zoom",
                "xaxis": {"title": {"text": "milliseconds"}, "rangeslider": {"visible": True, "thickness": 0.08}},
                "yaxis": {
                    "categoryorder": "array",
                    "categoryarray": rows[::-1],
                    "automargin": True,
                    "fixedrange": True,
                },
            },
        },
        height=180 + 30 * len(rows),
    )


def _last_steps(events: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The last steps with at most `MOST` events, and how many they are; 0 where these are only the last one's end."""
    by_step: dict[float, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_step[number(event["args"].get("step")) or 0.0].append(event)
    kept: list[dict[str, Any]] = []
    steps = 0
    for step in sorted(by_step, reverse=True):
        if steps and len(kept) + len(by_step[step]) > MOST:
            break
        kept, steps = by_step[step] + kept, steps + 1
    return (kept, steps) if len(kept) <= MOST else (sorted(kept, key=lambda e: e["ts"])[-MOST:], 0)


def _bars(name: str, events: Sequence[Mapping[str, Any]], begin: float) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [round((e["ts"] - begin) / 1000, 3) for e in events],
        "x": [round(e["dur"] / 1000, 3) for e in events],
        "y": [_row(int(e["pid"]), _ROW_OF[name]) for e in events],
        "marker": {"color": COLORS[name], "line": {"width": 0}},
        "hovertext": [_tip(e) for e in events],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _tip(event: Mapping[str, Any]) -> str:
    parts = [f"{event['name']}, rank {int(event['pid'])}: {event['dur'] / 1000:.3g} ms"]
    micro_batch, count = (number(event["args"].get(key)) for key in ("micro_batch", "bytes"))
    if micro_batch is not None:
        parts.append(f"micro-batch {micro_batch:.0f}")
    if count is not None:
        parts.append(size(count))
    return "<br>".join(parts)


def _row(rank: int, row: str) -> str:
    return f"rank {rank} {row}"
