"""Reads the folder of a run, or a metrics file alone; notes what is missing, truncated or of another version."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipecomp.errors import ConfigError, DataError
from pipecomp.report.recorder import FORMAT, METRICS, PLAN, RANKS, RUN, SAMPLE, TRACE, drop_counters, read_object

_MAX_TRACE_BYTES = 256 << 20
_MAX_COUNTED = 4000  # steps whose counters are kept, many times the points of a chart: others' take gigabytes
_WAYS, _BYTES = ("forward", "backward"), ("bytes_raw", "bytes_sent")
_SECONDS = ("forward", "backward", "encode", "decode", "wait", "reduce", "update")  # that a rank counts
_OF_ANOTHER_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


@dataclass(kw_only=True)
class RunRecord:
    """Everything that a run recorded.

    Attributes:
        name: Display name; arbitrary text.
        folder: Folder that it was read from.
        facts: Contents of run.json, or empty.
        steps: One record per optimizer step.
        evaluations: One record per evaluation.
        ranks: Contents of ranks.json ("first_step", "halfway", "end"), or empty.
        events: Trace events in Chrome's format.
        plan: Output of `pipecomp plan --json`, or empty.
        sample: The first training sample: pairs of a text and whether the model learns it; or empty.
        notes: What is missing or was left out, and how to get it.
    """

    name: str
    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    ranks: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    sample: list[tuple[str, bool]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_runs(paths: Sequence[str | Path]) -> list[RunRecord]:
    """Read runs in the order of `paths` and give them distinct names.

    Args:
        paths: Folders of runs, folders that contain such folders (those without a step are skipped), or metrics files.

    Raises:
        ConfigError: If a path is neither.
        DataError: If a run has no step, or is of a newer version of pipecomp.
    """
    runs = [_read(place) for path in paths for place in _places(Path(path))]
    names: dict[str, int] = {}
    for run in runs:
        names[run.name] = names.get(run.name, 0) + 1
        if names[run.name] > 1:
            run.name += f" ({names[run.name]})"
    return runs


def number(value: Any) -> float | None:
    """Return a JSON value as a finite number, or None: Python also reads NaN and Infinity."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _places(path: Path) -> Iterator[Path]:
    """The runs at a path."""
    if path.is_file() or _is_run(path):
        yield path
        return
    inner = [p for p in path.glob("*") if p.is_dir() and _is_run(p)] if path.is_dir() else []
    begun = [p for p in inner if not (p / METRICS).is_file() or (p / METRICS).stat().st_size]  # has a first step
    inner = begun or inner
    if not inner:
        raise ConfigError("RUN", str(path), f"a run's folder (with {RUN} or {METRICS}), or a file of metrics")
    yield from sorted(inner, key=lambda folder: (str(read_object(folder / RUN, []).get("started", "")), folder.name))


def _is_run(folder: Path) -> bool:
    return (folder / RUN).is_file() or (folder / METRICS).is_file()


def _read(place: Path) -> RunRecord:
    folder, metrics = (place.parent, place) if place.is_file() else (place, place / METRICS)
    run = RunRecord(name=place.stem if place.is_file() else place.resolve().name, folder=folder)
    if place.is_dir():
        run.facts = read_object(folder / RUN, run.notes, "model and settings are unknown")
        version = run.facts.get("format", FORMAT)
        if not isinstance(version, int) or version > FORMAT:
            reads = f"this version of pipecomp reads {FORMAT}; use the version that wrote it"
            raise DataError(f"{folder / RUN}: its format is {version!r}, {reads}")
        _check(run, "facts", RUN, _check_facts)
        run.name = str(run.facts.get("name") or run.name)
        run.ranks = read_object(folder / RANKS, run.notes, "no times per rank and no advice; the run did not finish")
        _check(run, "ranks", RANKS, _check_ranks)
        run.plan = read_object(folder / PLAN, run.notes)
        _check(run, "plan", PLAN, lambda plan: iter(plan.get("methods") or ()))
        run.sample = _read_sample(folder / SAMPLE)
        _read_trace(run, folder / TRACE)
    _read_metrics(run, metrics)
    if not run.steps:
        raise DataError(
            f"{metrics}: it has no step: the run ended before its first one, or this is another kind of file"
        )
    if run.steps[0]["step"] > 1:
        run.notes.append(f"nothing before step {run.steps[0]['step']}: seconds and bytes count from there")
    if any(number(line.get("seconds")) is None for line in run.steps):
        run.notes.append("steps without seconds: no loss over seconds, and no time to a common loss")
    status = run.facts.get("status", "finished")
    if status != "finished":
        run.notes.append(
            f"the run is marked as {status}: it is still running, or it ended after step {run.steps[-1]['step']}"
        )
    return run


def _read_sample(path: Path) -> list[tuple[str, bool]]:
    """Read the first training sample; empty if there is none, or the file is damaged."""
    try:
        return [(str(text), bool(learned)) for text, learned in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def _read_metrics(run: RunRecord, path: Path) -> None:
    if not path.is_file():
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            counted = sum('"links"' in line for line in lines)
        with path.open(encoding="utf-8", errors="replace") as lines:
            broken = _read_lines(run, lines, 1 + counted // _MAX_COUNTED)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if broken:
        run.notes.append(f"{path.name}: {broken} line(s) that are not steps (truncated or changed) are left out")


def _read_lines(run: RunRecord, lines: Iterable[str], every: int) -> int:
    """Add lines to the run, keeping the counters of every n-th step and the last; return the number of bad lines."""
    broken = counted = 0
    before: dict[str, Any] = {}  # the last step with counters
    for line in lines:
        try:
            record = json.loads(line)
            step = record["step"]
            _check_counters(record)
        except _OF_ANOTHER_FORM:
            broken += 1
            continue
        if not isinstance(step, int) or (run.steps and step < run.steps[-1]["step"]):
            broken += 1
        elif isinstance(record.get("eval"), dict):
            run.evaluations.append(record)
        else:
            run.steps.append(record)
            if "links" in record:
                if counted % every != 1 % every:  # the first one keeps them
                    drop_counters(before)
                before, counted = record, counted + 1
    return broken


def _read_trace(run: RunRecord, path: Path) -> None:
    if not path.is_file():
        run.notes.append(f"no {TRACE} and no time line: it is written when a run ends")
        return
    if path.stat().st_size > _MAX_TRACE_BYTES:
        run.notes.append(f"{TRACE} is larger than {_MAX_TRACE_BYTES >> 20} MiB: open it in a browser's tracing page")
        return
    run.events = read_object(path, run.notes).get("traceEvents", run.events)
    _check(run, "events", TRACE, _check_events)


def _check(run: RunRecord, attribute: str, file: str, check: Callable[[Any], object]) -> None:
    """Leave out, with a note, what does not have this version's form."""
    try:
        check(getattr(run, attribute))
    except _OF_ANOTHER_FORM:
        setattr(run, attribute, getattr(RunRecord(name="", folder=Path()), attribute))
        run.notes.append(f"{file} does not have the form that this version of pipecomp writes, and is left out")


def _check_facts(facts: Mapping[str, Any]) -> None:
    settings = facts.get("settings", {})
    settings.get("activations", {}).items(), settings.get("store", {}).items()


def _check_counters(line: Mapping[str, Any]) -> None:
    """Check a step's counters of links and groups, waits, hits and bits."""
    for link in line.get("links", {}).values():
        _numbers(link[f"{way}_{key}"] for way in _WAYS for key in _BYTES)
    for group in line.get("groups", {}).values():
        _numbers(group[key] for key in _BYTES)
    line.get("waits", {}).items()
    for name, length in (("hits", 2), ("bits", 4)):
        for counts in line.get(name, {}).values():
            _numbers(counts[i] for i in range(length))


def _check_ranks(ranks: Mapping[str, Any]) -> None:
    for when in ("halfway", "end"):
        for rank in ranks.get(when, ()):
            _numbers(rank[key] for key in ("rank", "stage", "replica", "steps"))
            _numbers(rank["seconds"][key] for key in _SECONDS)
            _numbers(rank["seconds"].values())
            for link in rank["links"].values():
                _numbers(link[way][key] for way in _WAYS for key in _BYTES)
                _numbers(link[key] for key in ("wait_seconds", "full_samples", "delta_samples"))


def _check_events(events: Any) -> None:
    if not isinstance(events, list):
        raise TypeError("events are a list")
    for event in events:
        if event["ph"] == "X":
            _numbers(event[key] for key in ("ts", "dur", "pid"))
            hash(event["name"]), event["args"].get("step")


def _numbers(values: Iterable[Any]) -> None:
    """Raise ValueError unless all are finite numbers."""
    if None in map(number, values):
        raise ValueError("no finite number")
