"""The page: one HTML file with all in it. What comes from runs is escaped; only this page's own scripts may run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipecomp.report import figures, tables, words
from pipecomp.report.figures import COLORS, Chart
from pipecomp.report.read import Run
from pipecomp.report.timeline import timeline
from pipecomp.utils.serialization import replace_nonfinite

_MOST_TIMELINES = 6
_WIDE_FROM = 3  # so many runs make charts with a row for each link or rank too tall for half the width


def make_page(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of several side by side."""
    from plotly.offline import get_plotlyjs

    all_told = [words.told(run) for run in runs]
    charts = _charts(all_told)
    library, own = get_plotlyjs(), _text("page.js")
    values = [{"key": c.key, "height": c.height, "figure": c.figure} for c in charts]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(library, own)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>pipecomp: {escape(_names(runs))}</title><style>{_text('page.css')}</style></head><body><main>",
        f"<h1>{escape(_heading(runs))}</h1><p class='soft'>{escape(_made(runs))}</p>",
        *_summaries(all_told),
        "<h2>Charts</h2><div class='charts'>",
        *(_place(chart, wide=chart.key.startswith("time-") or len(runs) >= _WIDE_FROM) for chart in charts),
        "</div>",
        *tables.tables(all_told),
        *_notes(runs),
        f"<footer class='soft'>Made by pipecomp {escape(_version())}. This file needs no network.</footer></main>",
        f'<script type="application/json" id="charts">{_json(values)}</script>',
        f"<script>{library}</script><script>{own}</script></body></html>\n",
    ]
    return "\n".join(parts[:-1]) + parts[-1]


def _charts(all_told: Sequence[words.Told]) -> list[Chart]:
    found = [
        figures.losses(all_told, over="steps"),
        figures.losses(all_told, over="seconds"),
        figures.link_bytes(all_told),
        figures.rank_times(all_told),
        *(timeline(one.run, f"time-{i}") for i, one in enumerate(all_told[:_MOST_TIMELINES])),
        figures.predicted(all_told),
        figures.hit_rates(all_told),
        figures.bits(all_told),
    ]
    made = [chart for chart in found if chart is not None]
    if len(all_told) > 1:
        names = {f"time-{i}": one.run.name for i, one in enumerate(all_told)}
        made = [Chart(**{**vars(c), "title": f"{c.title}: {names[c.key]}"}) if c.key in names else c for c in made]
    return made


def _place(chart: Chart, *, wide: bool) -> str:
    """A chart's heading and the element that it is drawn in."""
    return (
        f"<section class='card{' wide' if wide else ''}'><h3>{escape(chart.title)}</h3>"
        f"<p class='note'>{escape(chart.note)}</p>"
        f"<div class='chart' id='{chart.key}' style='height:{chart.height}px'></div></section>"
    )


def _summaries(all_told: Sequence[words.Told]) -> list[str]:
    compared = words.comparison(all_told)
    out = [f"<p class='card lead'>{escape(compared)}</p>"] if compared else []
    out.append("<div class='runs'>")
    for i, one in enumerate(all_told):
        said = words.summary(one)
        items = "".join(
            f"<li{' class=next' if sentence.startswith('Next:') else ''}>{escape(sentence)}</li>" for sentence in said
        )
        dot = f"<span class='dot' style='background:{COLORS[i % len(COLORS)]}'></span>"
        out.append(f"<section class='card'><h3>{dot}{escape(one.run.name)}</h3><ul>{items}</ul></section>")
    return [*out, "</div>"]


def _notes(runs: Sequence[Run]) -> list[str]:
    """What is missing, run by run."""
    noted = [(run.name, note) for run in runs for note in run.notes]
    if not noted:
        return []
    items = "".join(f"<li>{escape(note if len(runs) == 1 else f'{name}: {note}')}.</li>" for name, note in noted)
    return [f"<h2>Missing here</h2><section class='card' id='missing'><ul>{items}</ul></section>"]


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(run.name for run in runs)


def _heading(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side"


def _made(runs: Sequence[Run]) -> str:
    made = f"pipecomp report of {datetime.now():%Y-%m-%d %H:%M}"
    started = runs[0].facts.get("started")
    if len(runs) > 1 or not isinstance(started, str):
        return made
    return f"{made}; run begun {started[:16].replace('T', ' ')}"


def _version() -> str:
    try:
        return version("pipecomp")
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def _text(name: str) -> str:
    return resources.files("pipecomp.report").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON inside a script element, which ends at the first "</script" or opens a comment at "<!--"."""
    return json.dumps(replace_nonfinite(value), separators=(",", ":")).replace("<", "\\u003c")


def _policy(*scripts: str) -> str:
    """Only these scripts run, and nothing is loaded from anywhere, whatever a run's files say."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
