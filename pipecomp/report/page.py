"""Renders runs as one HTML file, and writes it for `pipecomp report` and at the end of a run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipecomp.errors import writable
from pipecomp.report import charts, metrics
from pipecomp.report.advice import ACCURACY, RunSimulation, SettingChange
from pipecomp.report.charts import COLORS, Chart
from pipecomp.report.reader import RunRecord, read_runs
from pipecomp.report.recorder import PAGE
from pipecomp.report.summary import RunSummary, comparison, describe_network, summarize
from pipecomp.utils.files import atomic_write_text
from pipecomp.utils.serialization import replace_nonfinite
from pipecomp.utils.units import format_duration, format_ratio, format_share, format_size

_MAX_TIMELINES = 6
_WIDE_FROM = 3  # with so many runs, charts with a row per link or rank are too tall for half the width
_SETTINGS = {
    "model": "model",
    "stages": "stages",
    "replicas": "replicas",
    "cuts": "cuts",
    "micro_batch": "micro-batch",
    "micro_batches": "micro-batches",
    "dtype": "precision",
}
_RIGHT_ALIGNED = (
    "predicted step", "speed", "forward", "back", "uncompressed", "less", "waited", "store hits", "measured",
    "simulated", "planned", *metrics.PARTS,
)  # fmt: skip

Row = dict[str, str]


def write_report(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of runs.

    Args:
        paths: Runs, as for `read_runs`.
        out: The file. Default: `PAGE` in the only path if that is a folder, else in the current folder.

    Returns:
        The file.

    Raises:
        ConfigError: If a path is not a run, or the file cannot be written.
        DataError: If a run has no step, or is of a newer version.
    """
    only = Path(paths[0]) if len(paths) == 1 else Path()
    target = Path(out) if out is not None else (only if only.is_dir() else Path()) / PAGE
    page = render_page(read_runs(paths))
    with writable("--out", target, "a file"):
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(target, page)
    return target


def try_write_report(paths: Sequence[str | Path], out: str | Path | None = None) -> str:
    """Write the page of runs that just ended, as `write_report` does, but never raise.

    Returns:
        The file, or why there is none.
    """
    try:
        return str(write_report(paths, out))
    except Exception as error:  # a failed report must not fail the run
        return f"not written: {type(error).__name__}: {error}"


def render_page(runs: Sequence[RunRecord]) -> str:
    """Render the page of one run, or of several side by side."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    summaries = [summarize(run) for run in runs]
    made = f"pipecomp report of {datetime.now():%Y-%m-%d %H:%M}"
    started = runs[0].facts.get("started")
    if len(runs) == 1 and isinstance(started, str):
        made += f"; run started {started[:16].replace('T', ' ')}"
    library, script = get_plotlyjs(), _resource("page.js")
    drawn, changes = _charts(summaries), [(one, change) for one in summaries for change in one.changes]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_resource("page.html.j2")).render(
        policy=_content_policy(library, script),
        css=_resource("page.css"),
        library=library,
        script=script,
        summaries=summaries,
        several=len(runs) > 1,
        several_wide=len(runs) >= _WIDE_FROM,
        heading=runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side",
        made=made,
        comparison=comparison(summaries),
        colors=COLORS,
        charts=drawn,
        chart_values=_json([{"key": c.key, "height": c.height, "figure": c.figure} for c in drawn]),
        right=_RIGHT_ALIGNED,
        changes=[_change_row(one.run, change) for one, change in changes],
        best_changes=[i for i, (_, change) in enumerate(changes) if change.pays],
        changes_note=_changes_note(summaries),
        steps=[_step_row(one) for one in summaries],
        links=[_link_row(one.run, link) for one in summaries for link in one.links],
        ranks=[_rank_row(one.run, rank) for one in summaries for rank in one.ranks],
        settings=[_settings_row(one.run) for one in summaries],
        notes=[note if len(runs) == 1 else f"{run.name}: {note}" for run in runs for note in run.notes],
        version=_version(),
    )


def _charts(summaries: Sequence[RunSummary]) -> list[Chart]:
    timelines = [charts.timeline(one.run, f"time-{i}") for i, one in enumerate(summaries[:_MAX_TIMELINES])]
    if len(summaries) > 1:
        timelines = [
            chart and Chart(**{**vars(chart), "title": f"{chart.title}: {one.run.name}"})
            for chart, one in zip(timelines, summaries, strict=False)
        ]
    made = [
        charts.losses(summaries, over="steps"),
        charts.losses(summaries, over="seconds"),
        charts.link_bytes(summaries),
        charts.rank_times(summaries),
        *timelines,
        charts.hit_rates(summaries),
        charts.bits(summaries),
    ]
    return [chart for chart in made if chart is not None]


# -- rows of tables


def _changes_note(summaries: Sequence[RunSummary]) -> str:
    networks = [
        (one.run.name, describe_network(one.simulation))
        for one in summaries
        if isinstance(one.simulation, RunSimulation) and one.changes
    ]
    equal = len({network for _, network in networks}) <= 1
    notes = (
        [f"{network}." for _, network in networks[:1]]
        if equal
        else [f"{name}: {network}." for name, network in networks]
    )
    return "Each change alone, in the planner’s simulation of the run’s second half; bold ones pay. " + " ".join(notes)


def _change_row(run: RunRecord, change: SettingChange) -> Row:
    speed, step = format_ratio(change.gain), format_duration(change.step_s)
    return {"run": run.name, "change": change.what, "predicted step": step, "speed": speed, "why": change.why}


def _step_row(one: RunSummary) -> Row:
    measured, planned = metrics.step_seconds(one.run), one.planned_seconds()
    simulated = "the link’s rate is unknown"
    if isinstance(one.simulation, str):
        simulated = one.simulation
    elif not one.simulation.accurate:
        simulated = f"over {format_share(ACCURACY)} off"
    elif one.simulation.known:
        simulated = format_duration(one.simulation.seconds)
    return {
        "run": one.run.name,
        "measured": "–" if measured is None else format_duration(measured),
        "simulated": simulated,
        "planned": "no plan.json with these settings" if planned is None else format_duration(planned),
    }


def _link_row(run: RunRecord, link: metrics.LinkUse) -> Row:
    return {
        "run": run.name,
        "link": link.name,
        "forward": format_size(link.forward[1]),
        "back": format_size(link.backward[1]),
        "uncompressed": format_size(link.raw),
        "less": format_ratio(link.raw / link.sent) if link.sent else "–",
        "waited": "–" if link.waited is None else format_share(link.waited),
        "store hits": "–" if link.hit_rate is None else format_share(link.hit_rate),
    }


def _rank_row(run: RunRecord, rank: metrics.RankTime) -> Row:
    return {
        "run": run.name,
        "rank": f"{rank.rank} (stage {rank.stage}, replica {rank.replica})",
        **{part: f"{rank.parts[part]:.2f} s" for part in metrics.PARTS},
    }


def _settings_row(run: RunRecord) -> Row:
    facts = {name: run.facts.get(key) for key, name in _SETTINGS.items()}
    return {
        "run": run.name,
        **{name: "–" if value is None else str(value)[:80] for name, value in facts.items()},
        "activations": describe_activations(run.facts),
        "folder": str(run.folder),
    }


def describe_activations(facts: dict[str, Any]) -> str:
    """Describe the activation settings of a run's facts in a few words."""
    a = facts.get("settings", {}).get("activations", {})
    if not isinstance(a, dict) or "method" not in a:
        return "–"
    if a["method"] not in ("direct", "aqsgd"):
        return str(a["method"])
    forward, back, first = (_describe_bits(a.get(key)) for key in ("forward_bits", "backward_bits", "first_visit"))
    text = f"{a['method']}, {forward} bits forward, {back} back"
    clusters = facts["settings"].get("store", {}).get("clusters")
    if clusters is not None:
        text += f", from {clusters} cluster centers"
    elif a["method"] == "aqsgd":
        text += f", first visit {first}"
    scale = a.get("scale", "max")
    kinds = list(dict.fromkeys(scale.values() if isinstance(scale, dict) else [scale]))
    return text if kinds == ["max"] else f"{text}, scales of {'/'.join(map(str, kinds))}"


def _describe_bits(value: Any) -> str:
    if isinstance(value, list):  # one for each link
        return "/".join(map(_describe_bits, value))
    if isinstance(value, dict):
        return f"{value.get('min')} to {value.get('max')} (error {value.get('error')})"
    return str(value)


# -- parts of the file


def _version() -> str:
    try:
        return version("pipecomp")
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def _resource(name: str) -> str:
    return resources.files("pipecomp.report").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON for a script element, which ends at the first "</script" or opens a comment at "<!--"."""
    return json.dumps(replace_nonfinite(value), separators=(",", ":")).replace("<", "\\u003c")


def _content_policy(*scripts: str) -> str:
    """A policy under which only these scripts run and nothing is loaded, whatever a run's files contain."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
