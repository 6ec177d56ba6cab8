"""A run's folder: what happened in each step, where each rank's time went, and the last step, as files of JSON.

All but the trace and the report are written while the run goes on, so that one that was killed has them too. A run is
worth more than its report: once one of these files cannot be written, that is said, and the run goes on without them.
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

from pipecomp.errors import ConfigError
from pipecomp.stats import Traffic, code_bits
from pipecomp.utils.files import atomic_write_text
from pipecomp.utils.serialization import json_line

FORMAT = 1
RUN = "run.json"  # what was run: model, stages, settings, links
METRICS = "metrics.jsonl"  # a line for each step: loss, seconds, bytes and bits of codes of each link since the start
RANKS = "ranks.json"  # where each rank's time went: half way, and at the end
TRACE = "trace.json"  # what every rank did in the last step, in Chrome's trace format
PLAN = "plan.json"  # what was predicted before: of `pipecomp train`, or put there by `pipecomp plan --json`
PAGE = "report.html"
CHECKPOINTS = "checkpoints"  # beside them, of `pipecomp train`
_EVERY_S = 30.0  # so often the ranks' times are written while the run goes on
_log = logging.getLogger(__name__)


def default_folder(name: str) -> Path:
    """Name a folder for a run that is given none: runs/NAME-DATE-TIME, with a number where that is taken."""
    base = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    return next(p for p in (base, *(Path(f"{base}-{n}") for n in range(2, 1000))) if not p.exists())


class Recorder:
    """Write a run's folder, on one rank.

    Args:
        folder: Made if it is not there; None records nothing, as on all ranks but one.
        after: The step that an earlier part of the run has reached: its lines up to there stay, and its bytes and
            seconds are added to those of this part.
        required: Whether a folder that cannot be written is an error, and not merely said.

    Attributes:
        kept: Those lines, without counters but for the last that has any.

    Raises:
        ConfigError: If the folder cannot be written and is `required`.
    """

    def __init__(self, folder: str | Path | None, *, after: int = 0, required: bool = False) -> None:
        self.folder = None if folder is None else Path(folder)
        self._after, self._steps = after, 0
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
            if required:
                raise ConfigError("--run", str(folder), f"a folder that can be written ({error.strerror})") from error
            self._give_up(error)

    def start(self, steps: int, **facts: Any) -> None:
        """Write what is run. steps: of the whole run, 0 where that is not known. facts: JSON values by name.

        Of a run that is started again after its last step, all stays as it is.
        """
        earlier = self._earlier()
        if 0 < steps <= self._after and earlier.get("status") == "finished":
            self._close()
        self._remove(RANKS, TRACE, PAGE)  # of an earlier run, or part
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
            stats: `engine.gather_comm_stats()`, None where it was not gathered at this step.
            record: What else is known, as "loss", "lr", "step_s" (seconds of this step) and "per_s"; "seconds" where
                the step has not just ended.
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
        """Write what an evaluation after this step found, "loss" among it. stats: with its traffic, as of `step`."""
        counters = {} if stats is None else self._counters(stats)
        self._write({"step": step, "seconds": self.seconds(), "eval": dict(measures), **counters})

    def end(self, stats: Sequence[Mapping[str, Any]], last_step: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write the end of a run that reached it.

        Args:
            stats: `engine.gather_comm_stats()`.
            last_step: `engine.gather_last_step()`.
        """
        if self._metrics is None:
            return
        self._ranks["end"] = counted(stats)
        self._save(RANKS, self._ranks)
        if last_step:
            self._save(TRACE, {"traceEvents": list(last_step), "displayTimeUnit": "ms"})
        self._save(RUN, {**self._facts, "status": "finished", "seconds": self.seconds()})
        self._close()

    def interrupted(self) -> None:
        """Write that the run was asked to stop, and may go on."""
        self._save(RUN, {**self._facts, "status": "interrupted", "seconds": self.seconds()})

    # -- what a line has

    def seconds(self) -> float:
        """Tell how long the run has taken, its earlier part included."""
        return round(time.perf_counter() - self._began + float(self._last.get("seconds", 0.0)), 4)

    def _counters(self, stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Bytes, waits, store hits and bits of codes since the start of the run, by link."""
        before = Traffic(self._last.get("links", {}), self._last.get("groups", {}))
        traffic = before.plus(Traffic.of(stats))
        counters: dict[str, Any] = {"links": traffic.links, "groups": traffic.groups}
        for name, now in (("waits", waits(stats)), ("hits", hits(stats)), ("bits", code_bits(stats))):
            then = self._last.get(name, {})
            counters[name] = {link: _plus(value, then.get(link)) for link, value in now.items()}
        return counters

    def _keep(self, stats: Sequence[Mapping[str, Any]], *, halfway: bool) -> None:
        """Keep the ranks' times: those at half time for good, the others until there are newer ones."""
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

    def _save(self, name: str, value: Mapping[str, Any]) -> None:
        if self._metrics is None or self.folder is None:
            return
        with self._giving_up():
            atomic_write_text(self.folder / name, json_line(value))

    def _earlier(self) -> dict[str, Any]:
        """What was written of an earlier part of the run, empty without one."""
        return read_object(self.folder / RUN, []) if self.folder is not None and self._after else {}

    def _remove(self, *names: str) -> None:
        if self._metrics is None or self.folder is None:
            return
        with self._giving_up():
            for name in names:
                (self.folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Inside, an OSError ends the recording."""
        try:
            yield
        except OSError as error:
            self._give_up(error)

    def _close(self) -> None:
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            with contextlib.suppress(OSError):  # it writes again what was refused
                metrics.close()

    def _give_up(self, error: OSError) -> None:
        self._close()
        _log.warning("%s cannot be written (%s): the run goes on without it", self.folder, error.strerror or error)


def read_object(path: Path, notes: list[str], without: str = "") -> dict[str, Any]:
    """Read a JSON object, empty where there is none.

    notes: gets why it cannot be read, and `without` where it is not there.
    """
    if not path.is_file():
        if without:
            notes.append(f"no {path.name}: {without}")
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read and is left out ({type(error).__name__}: it was cut off, or changed)")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} is no JSON object and is left out")
        return {}
    return found


def lines_until(path: Path, step: int) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines of a metrics file that is there, up to a step; none for step 0.

    Returns:
        They, with counters only in the last one that has any, and the bytes of the file that they take.
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
                    break  # a run that was killed while it wrote, or another program's file
                if later or not line.endswith(b"\n"):
                    break
                if "links" in record:
                    drop_counters(before)
                    before = record
                found.append(record)
                end += len(line)
    return found, end


def drop_counters(line: dict[str, Any]) -> None:
    """Take away what a line of metrics has counted since the start: of a long run, many times the rest."""
    for name in ("links", "groups", "waits", "hits", "bits"):
        line.pop(name, None)


def waits(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that the endpoint that waited longest has waited, by link; of replicas the mean."""
    ends: dict[str, dict[int, list[float]]] = {}
    for rank in stats:
        for name, link in rank["links"].items():
            ends.setdefault(name, {}).setdefault(rank["replica"], []).append(link["wait_seconds"])
    return {
        name: round(sum(max(both) for both in replicas.values()) / len(replicas), 6)
        for name, replicas in sorted(ends.items())
    }


def hits(stats: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Count the samples that crossed each link as a change of a cached activation, and all samples."""
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
    """Leave what is counted since the start; the last step's micro-batches are in the trace."""
    return [{key: value for key, value in rank.items() if key != "micro_batches"} for rank in stats]
