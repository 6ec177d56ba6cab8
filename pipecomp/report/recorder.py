"""Records a run's folder: steps, evaluations, times per rank and the last step's trace, as JSON files.

All but the trace and the report are written during the run, so a killed run has them too. If one cannot be written, the
recorder logs one warning, and the run continues without it; the end of the run names the steps that are missing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from pipecomp.errors import ConfigError, StalledError, write_error
from pipecomp.stats import Traffic, code_bits
from pipecomp.utils.activity import local_activity
from pipecomp.utils.files import atomic_write_text
from pipecomp.utils.serialization import json_line

FORMAT = 1
RUN = "run.json"  # model, stages, settings, links
METRICS = "metrics.jsonl"  # per step: loss, seconds, and bytes and bits of each link since the start
RANKS = "ranks.json"  # times per rank, half way and at the end
TRACE = "trace.json"  # the last step of every rank, in Chrome's trace format
PLAN = "plan.json"  # the prediction of `pipecomp train` or `pipecomp plan --json`
SAMPLE = "sample.json"  # the first sample: pairs of a text and whether the model learns it
PAGE = "report.html"
CHECKPOINTS = "checkpoints"  # of `pipecomp train`
_EVERY_S = 30.0  # interval at which times per rank are written during the run
_log = logging.getLogger(__name__)


def default_folder(name: str) -> Path:
    """Return a free default folder: runs/NAME-DATE-TIME, with a number if that exists."""
    base = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    return next(p for p in (base, *(Path(f"{base}-{n}") for n in range(2, 1000))) if not p.exists())


class Recorder:
    """Record a run's folder, on one rank.

    Args:
        folder: Created if missing; None records nothing, as on all other ranks.
        after: Last step of the earlier part of a resumed run. Its lines up to that step are kept, and its bytes and
            seconds are added to this part's.
        required: Whether an unwritable folder is an error rather than a warning.

    Attributes:
        kept: The kept lines; only the last one with counters still has them.

    Raises:
        ConfigError: If `required` and the folder cannot be written.
    """

    def __init__(self, folder: str | Path | None, *, after: int = 0, required: bool = False) -> None:
        self.folder = None if folder is None else Path(folder)
        self._after, self._steps = after, 0
        self._recorded = after  # the last step whose line is written
        self._gave_up = False
        self._facts: dict[str, Any] = {}
        self._ranks: dict[str, Any] = {"first_step": after}
        self.kept: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}  # of the earlier part
        self._metrics: TextIO | None = None
        self._began = self._written = time.perf_counter()
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.kept, end = lines_until(self.folder / METRICS, after)
            self._metrics = open(self.folder / METRICS, "a", encoding="utf-8")  # noqa: SIM115 (closed in _close)
            self._metrics.truncate(end)
            for record in self.kept:
                self._last |= record  # an evaluation's line may have no counters
        except OSError as error:
            reason = write_error(error, self.folder)
            if required:
                raise ConfigError("--out", str(folder), f"a folder that can be written ({reason})") from error
            self._give_up(error)

    def start(self, steps: int, **facts: Any) -> None:
        """Write run.json. steps: of the whole run, 0 if unknown. facts: JSON values by name.

        A finished run that is started again is left as it is.
        """
        earlier = read_object(self.folder / RUN, []) if self.folder is not None and self._after else {}
        if 0 < steps <= self._after and earlier.get("status") == "finished":
            self._close()
        if self._metrics is not None and self.folder is not None:
            with self._giving_up():
                for name in (RANKS, TRACE, PAGE):  # of an earlier run, or part
                    (self.folder / name).unlink(missing_ok=True)
        self._steps = steps
        self._began = time.perf_counter()
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        started = earlier.get("started", now)
        self._facts = {"format": FORMAT, "status": "running", "started": started, "steps": steps, **facts}
        self._save(RUN, self._facts)

    def step(self, step: int, stats: Sequence[Mapping[str, Any]] | None = None, **record: Any) -> None:
        """Write one optimizer step.

        Args:
            step: From 1.
            stats: `engine.gather_comm_stats()`, or None if not gathered at this step.
            record: Further values such as "loss", "lr", "step_s" (seconds of this step) and "per_s"; "seconds" if the
                step ended earlier.
        """
        if self._metrics is None:
            return
        line: dict[str, Any] = {"step": step, "seconds": self.seconds(), **record}
        if stats is not None:
            line |= self._counters(stats)
            self._keep(stats, halfway=2 * (step - self._after) >= self._steps - self._after > 0)
        self._write(line)

    def evaluated(
        self, step: int, measures: Mapping[str, float], stats: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Write an evaluation after this step. measures: "loss" and others. stats: as for `step`, with its traffic."""
        counters = {} if stats is None else self._counters(stats)
        self._write({"step": step, "seconds": self.seconds(), "eval": dict(measures), **counters})

    def end(self, stats: Sequence[Mapping[str, Any]], last_step: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write the end of a finished run.

        Args:
            stats: `engine.gather_comm_stats()`.
            last_step: `engine.gather_last_step()`.
        """
        if self._gave_up:
            _log.warning("%s has nothing of the steps after %d: it could not be written", self.folder, self._recorded)
        if self._metrics is None:
            return
        self._ranks["end"] = counted(stats)
        self._save(RANKS, self._ranks)
        if last_step:
            self._save(TRACE, {"traceEvents": list(last_step), "displayTimeUnit": "ms"})
        self._save(RUN, {**self._facts, "status": "finished", "seconds": self.seconds()})
        self._close()

    def interrupted(self) -> None:
        """Mark the run as interrupted; it may be resumed."""
        self._save(RUN, {**self._facts, "status": "interrupted", "seconds": self.seconds()})

    # -- what a line has

    def seconds(self) -> float:
        """Return the seconds since the start, including an earlier part of the run."""
        return round(time.perf_counter() - self._began + float(self._last.get("seconds", 0.0)), 4)

    def _counters(self, stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Bytes, waits, store hits and code bits of each link since the start of the run."""
        before = Traffic(self._last.get("links", {}), self._last.get("groups", {}))
        traffic = before.plus(Traffic.of(stats))
        counters: dict[str, Any] = {"links": traffic.links, "groups": traffic.groups}
        for name, now in (("waits", waits(stats)), ("hits", hits(stats)), ("bits", code_bits(stats))):
            then = self._last.get(name, {})
            counters[name] = {link: _plus(value, then.get(link)) for link, value in now.items()}
        return counters

    def _keep(self, stats: Sequence[Mapping[str, Any]], *, halfway: bool) -> None:
        """Keep the times per rank at half time, and write the latest ones now and then."""
        if halfway and "halfway" not in self._ranks:
            self._ranks["halfway"] = counted(stats)
        elif time.perf_counter() - self._written >= _EVERY_S:
            self._written = time.perf_counter()
            self._save(RANKS, {**self._ranks, "end": counted(stats)})

    # -- files

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._metrics is None:
            return
        with self._giving_up():
            self._metrics.write(json_line(record))
            self._metrics.flush()
            self._recorded = record["step"]

    def _save(self, name: str, value: Mapping[str, Any]) -> None:
        if self._metrics is None or self.folder is None:
            return
        with self._giving_up():
            atomic_write_text(self.folder / name, json_line(value))

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """End the recording if the file cannot be written, or its disk does not answer."""
        try:
            with local_activity(f"writes to {self.folder}"):
                yield
        except (OSError, StalledError) as error:
            self._give_up(error)

    def _close(self) -> None:
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            with contextlib.suppress(OSError):  # it flushes what was refused
                metrics.close()

    def _give_up(self, error: OSError | StalledError) -> None:
        self._close()
        self._gave_up = True
        why = write_error(error, self.folder or ".") if isinstance(error, OSError) else error
        _log.warning("%s cannot be written (%s); the run continues without it", self.folder, why)


def read_object(path: Path, notes: list[str], without: str = "") -> dict[str, Any]:
    """Read a JSON object; empty if there is none.

    notes: Receives the reason if it cannot be read, and `without` if the file is missing.
    """
    if not path.is_file():
        if without:
            notes.append(f"no {path.name}: {without}")
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read and is left out ({type(error).__name__}: truncated or changed)")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} is not a JSON object and is left out")
        return {}
    return found


def lines_until(path: Path, step: int) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines of a metrics file up to a step; none for step 0.

    Returns:
        The lines, with counters only in the last one that has any, and their bytes in the file.
    """
    found: list[dict[str, Any]] = []
    end, before = 0, dict[str, Any]()
    if step and path.is_file():
        with path.open("rb") as lines:
            for line in lines:
                try:
                    record = json.loads(line.decode(errors="replace"))
                    later = record["step"] > step
                except (ValueError, KeyError, TypeError):
                    break  # the run was killed while writing, or the file is another program's
                if later or not line.endswith(b"\n"):
                    break
                if "links" in record:
                    drop_counters(before)
                    before = record
                found.append(record)
                end += len(line)
    return found, end


def drop_counters(line: dict[str, Any]) -> None:
    """Remove a metrics line's counters since the start, which take most of its memory."""
    for name in ("links", "groups", "waits", "hits", "bits"):
        line.pop(name, None)


def waits(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each link's seconds waited by the endpoint that waited longer, averaged over replicas."""
    ends: dict[str, dict[int, list[float]]] = {}
    for rank in stats:
        for name, link in rank["links"].items():
            ends.setdefault(name, {}).setdefault(rank["replica"], []).append(link["wait_seconds"])
    return {
        name: round(sum(max(both) for both in replicas.values()) / len(replicas), 6)
        for name, replicas in sorted(ends.items())
    }


def hits(stats: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return for each link the samples that crossed as changes, and all samples."""
    ends = {(rank["replica"], name): link for rank in stats for name, link in rank["links"].items()}
    found: dict[str, list[int]] = {}
    for (_, name), link in sorted(ends.items()):
        counts = found.setdefault(name, [0, 0])
        counts[0] += link["delta_samples"]
        counts[1] += link["delta_samples"] + link["full_samples"]
    return found


def _plus(now: Any, then: Any) -> Any:
    if then is None:
        return now
    return [a + b for a, b in zip(now, then, strict=True)] if isinstance(now, list) else now + then


def counted(stats: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the counters since the start, without the last step's micro-batches, which the trace has."""
    return [{key: value for key, value in rank.items() if key != "micro_batches"} for rank in stats]
