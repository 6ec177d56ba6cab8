"""Reading runs: their folders, or a file of metrics alone. What is missing, cut off or of another version is noted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipecomp.errors import ConfigError, DataError
from pipecomp.report.record import FORMAT, METRICS, PLAN, RANKS, RUN, TRACE, drop_counters, read_object

_MAX_TRACE_BYTES = 256 << 20
_MOST_COUNTED = 4000  # steps whose counters are kept, many times the points of a chart: others' take gigabytes
_WAYS, _BYTES = ("forward", "backward"), ("bytes_raw", "bytes_sent")
_SECONDS = ("forward", "backward", "encode", "decode", "wait", "reduce", "update")  # that a rank counts
_OF_ANOTHER_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


@dataclass(kw_only=True)
class Run:
    """What is known of one run.

    Attributes:
        name: For people; anything can be in it.
        folder: Where it was read.
        facts: Of run.json; empty where there is none.
        steps: A line for each optimizer step.
        evaluations: A line for each evaluation.
        ranks: Of ranks.json: "first_step", "halfway", "end"; empty where there is none.
        events: The trace, in Chrome's form.
        plan: What `pipecomp plan --json` wrote.
        notes: What is missing or was left out, and how to have it.
    """

    name: str
    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    ranks: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read runs, in the order of `paths`, each with a name of its own.

    Args:
        paths: Folders of runs, folders with such folders in them, of which those without a step are left out, or files
            of metrics.

    Raises:
        ConfigError: For a path that is neither.
        DataError: For a run without one step, or of a newer version of pipecomp.
    """
    found = [_read(place) for path in paths for place in _places(Path(path))]
    names: dict[str, int] = {}
    for run in found:
        names[run.name] = names.get(run.name, 0) + 1
        if names[run.name] > 1:
            run.name += f" ({names[run.name]})"
    return found


def number(value: Any) -> float | None:
    """Return a JSON value as a finite number, None if it is none: Python reads NaN and Infinity too."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _places(path: Path) -> Iterator[Path]:
    """The runs that a path means."""
    if path.is_file() or _is_run(path):
        yield path
        return
    inner = [p for p in path.glob("*") if p.is_dir() and _is_run(p)] if path.is_dir() else []
    inner = [p for p in inner if not _is_empty(p / METRICS)] or inner
    if not inner:
        raise ConfigError("RUN", str(path), f"a run's folder (with {RUN} or {METRICS}), or a file of metrics")
    yield from sorted(inner, key=lambda folder: (_started(folder), folder.name))


def _is_run(folder: Path) -> bool:
    return (folder / RUN).is_file() or (folder / METRICS).is_file()


def _is_empty(metrics: Path) -> bool:
    """Whether a run was ended before its first step."""
    return metrics.is_file() and metrics.stat().st_size == 0


def _started(folder: Path) -> str:
    return str(read_object(folder / RUN, []).get("started", ""))


def _read(place: Path) -> Run:
    folder, metrics = (place.parent, place) if place.is_file() else (place, place / METRICS)
    run = Run(name=place.stem if place.is_file() else place.resolve().name, folder=folder)
    if place.is_dir():
        run.facts = read_object(folder / RUN, run.notes, "what was run is not known")
        _check_version(run, folder / RUN)
        _check(run, "facts", RUN, _check_facts)
        run.name = str(run.facts.get("name") or run.name)
        run.ranks = read_object(folder / RANKS, run.notes, "no times of ranks, and no advice: the run was not finished")
        _check(run, "ranks", RANKS, _check_ranks)
        run.plan = read_object(folder / PLAN, run.notes)
        _check(run, "plan", PLAN, _check_plan)
        _read_trace(run, folder / TRACE)
    _read_metrics(run, metrics)
    if not run.steps:
        raise DataError(f"{metrics}: no step in it: the run was ended before its first one, or this is no such file")
    if run.steps[0]["step"] > 1:
        run.notes.append(f"nothing before step {run.steps[0]['step']}: seconds and bytes are counted from there")
    if any(number(line.get("seconds")) is None for line in run.steps):
        run.notes.append("steps without seconds: no loss over seconds, and no time to a loss that is compared")
    status = run.facts.get("status", "finished")
    if status != "finished":
        run.notes.append(
            f"the run is marked as {status}: it goes on, or it was ended after step {run.steps[-1]['step']}"
        )
    return run


def _check_version(run: Run, path: Path) -> None:
    found = run.facts.get("format", FORMAT)
    if not isinstance(found, int) or found > FORMAT:
        raise DataError(f"{path}: its format is {found!r}, this pipecomp knows {FORMAT}: use the version that ran it")


def _read_metrics(run: Run, path: Path) -> None:
    if not path.is_file():
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            counted = sum('"links"' in line for line in lines)
        with path.open(encoding="utf-8", errors="replace") as lines:
            broken = _read_lines(run, lines, 1 + counted // _MOST_COUNTED)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if broken:
        run.notes.append(
            f"{path.name}: {broken} line(s) that are no step of this run (cut off, or changed) are left out"
        )


def _read_lines(run: Run, lines: Iterable[str], every: int) -> int:
    """Take up lines; of steps with counters, only every so many and the last one keep them. Tells how many are none."""
    broken = told = 0
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
                if told % every != 1 % every:  # the first one keeps them
                    drop_counters(before)
                before, told = record, told + 1
    return broken


def _read_trace(run: Run, path: Path) -> None:
    if not path.is_file():
        run.notes.append(f"no {TRACE}, so no time line: it is written when a run has ended")
        return
    if path.stat().st_size > _MAX_TRACE_BYTES:
        run.notes.append(f"{TRACE} has more than {_MAX_TRACE_BYTES >> 20} MiB: open it in a browser's tracing page")
        return
    run.events = read_object(path, run.notes).get("traceEvents", run.events)
    _check(run, "events", TRACE, _check_events)


def _check(run: Run, attribute: str, file: str, check: Callable[[Any], None]) -> None:
    """Leave out, with a note, what does not have the form that this version writes."""
    try:
        check(getattr(run, attribute))
    except _OF_ANOTHER_FORM:
        setattr(run, attribute, getattr(Run(name="", folder=Path()), attribute))
        run.notes.append(f"{file} is not what this version of pipecomp writes, and is left out")


def _check_facts(facts: Mapping[str, Any]) -> None:
    settings = facts.get("settings", {})
    settings.get("activations", {}).items(), settings.get("store", {}).items()


def _check_counters(line: Mapping[str, Any]) -> None:
    """Of a step's line: what links and groups counted, waits, hits, and codes' bits."""
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


def _check_plan(plan: Mapping[str, Any]) -> None:
    iter(plan.get("methods") or ())


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
