"""The report's tables, as HTML: what to change, links, ranks, and what was run. Every text of a run is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from pipecomp.report import measures, words
from pipecomp.report.simulated import Simulated
from pipecomp.report.text import duration, percent, size, times


def tables(all_told: Sequence[words.Told]) -> list[str]:
    """All of them that have a row."""
    several = len(all_told) > 1
    made = [
        _changes(all_told, several),
        _steps(all_told),
        _table(
            "Links", _link_rows(all_told), several, "A stage’s wait includes what it waits for the others to compute."
        ),
        _table("Ranks", _rank_rows(all_told), several, "Seconds of training since the start, or since it was resumed."),
        _table("What was run", _fact_rows(all_told), True, ""),
    ]
    return [table for table in made if table]


Row = dict[str, str]
_RIGHT = (
    "predicted step", "speed", "forward", "back", "uncompressed", "less", "waited", "store hits", "measured",
    "simulated", "planned", *measures.PARTS,
)  # fmt: skip


def _table(title: str, rows: Sequence[Row], several: bool, note: str, best: Sequence[int] = ()) -> str:
    """A table whose columns are the rows' keys; "run" is left out where there is only one."""
    if not rows:
        return ""
    columns = [key for key in rows[0] if several or key != "run"]

    def kind(key: str) -> str:
        return "number" if key in _RIGHT else "text"

    head = "".join(f"<th class='{kind(key)}'>{escape(key)}</th>" for key in columns)
    body = "".join(
        f"<tr{' class=best' if i in best else ''}>"
        + "".join(
            f"<td class='{kind(key)}' data-label='{escape(key)}'>{escape(row.get(key, ''))}</td>" for key in columns
        )
        + "</tr>"
        for i, row in enumerate(rows)
    )
    below = f"<p class='note'>{escape(note)}</p>" if note else ""
    return (
        f"<h2>{escape(title)}</h2><section class='card'>{below}<div class='scroll'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _changes(all_told: Sequence[words.Told], several: bool) -> str:
    rows: list[Row] = []
    best: list[int] = []
    played = [(one.run.name, words.network(one.simulated)) for one in all_told if isinstance(one.simulated, Simulated)]
    alike = len({network for _, network in played}) == 1
    notes = [f"{played[0][1]}."] if alike else [f"{name}: {network}." for name, network in played]
    for one in all_told:
        for change in one.changes:
            if change.pays:
                best.append(len(rows))
            rows.append(
                {
                    "run": one.run.name,
                    "change": change.what,
                    "predicted step": duration(change.step_s),
                    "speed": times(change.gain),
                    "why": change.why,
                }
            )
    note = "Each change alone, in the planner’s simulation of the run’s second half; bold ones pay. " + " ".join(notes)
    return _table("What to change next", rows, several, note, best)


def _steps(all_told: Sequence[words.Told]) -> str:
    """Measured, simulated and planned seconds of a step."""
    rows = []
    for one in all_told:
        planned = words.planned_seconds(one)
        simulated = "the link’s rate is not known"
        if isinstance(one.simulated, str):
            simulated = one.simulated
        elif one.simulated.known:
            simulated = duration(one.simulated.seconds)
        measured = measures.step_seconds(one.run)
        rows.append(
            {
                "run": one.run.name,
                "measured": "–" if measured is None else duration(measured),
                "simulated": simulated,
                "planned": duration(planned) if planned is not None else "no plan.json of these settings",
            }
        )
    note = "pipecomp plan … --json RUN/plan.json puts a plan beside a run. In a network lab the links’ rates are known."
    return _table("Seconds of a step: measured and predicted", rows, len(rows) > 1, note)


def _link_rows(all_told: Sequence[words.Told]) -> list[Row]:
    return [
        {
            "run": one.run.name,
            "link": link.name,
            "forward": size(link.forward[1]),
            "back": size(link.backward[1]),
            "uncompressed": size(link.raw),
            "less": times(link.raw / link.sent) if link.sent else "–",
            "waited": "–" if link.waited is None else percent(link.waited),
            "store hits": "–" if link.hit_rate is None else percent(link.hit_rate),
        }
        for one in all_told
        for link in one.links
    ]


def _rank_rows(all_told: Sequence[words.Told]) -> list[Row]:
    return [
        {
            "run": one.run.name,
            "rank": f"{rank.rank} (stage {rank.stage}, replica {rank.replica})",
            **{part: f"{rank.parts[part]:.2f} s" for part in measures.PARTS},
        }
        for one in all_told
        for rank in one.ranks
    ]


def _fact_rows(all_told: Sequence[words.Told]) -> list[Row]:
    names = {
        "model": "model",
        "stages": "stages",
        "replicas": "replicas",
        "cuts": "cuts",
        "micro_batch": "micro-batch",
        "micro_batches": "micro-batches",
        "dtype": "precision",
    }
    return [
        {
            "run": one.run.name,
            **{words_: _short(one.run.facts.get(key)) for key, words_ in names.items()},
            "activations": _activations(one.run.facts),
            "folder": str(one.run.folder),
        }
        for one in all_told
    ]


def _short(value: Any) -> str:
    return "–" if value is None else str(value)[:80]


def _activations(facts: dict[str, Any]) -> str:
    a = facts.get("settings", {}).get("activations", {})
    if not isinstance(a, dict) or "method" not in a:
        return "–"
    if a["method"] not in ("direct", "aqsgd"):
        return str(a["method"])
    forward, back, first = (_bits(a.get(key)) for key in ("forward_bits", "backward_bits", "first_visit"))
    words_ = f"{a['method']}, {forward} bits forward, {back} back"
    clusters = facts["settings"].get("store", {}).get("clusters")
    if clusters is not None:
        return f"{words_}, from {clusters} cluster centers"
    return words_ + (f", first visit {first}" if a["method"] == "aqsgd" else "")


def _bits(value: Any) -> str:
    """Of a packet: a number, or the range within which they keep an error; of links that differ one of these each."""
    if isinstance(value, list):
        return "/".join(map(_bits, value))
    if isinstance(value, dict):
        return f"{value.get('min')} to {value.get('max')} (error {value.get('error')})"
    return str(value)
