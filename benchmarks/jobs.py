"""Runs that are shared out among worker processes and kept as they finish, so that a stopped benchmark goes on.

With the arguments that such benchmarks have in common.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

Run = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
OPTIONS: dict[str, dict[str, Any]] = {
    "--seeds": {"type": int, "default": 3, "help": "runs of every method (3)"},
    "--only": {"nargs": "*", "default": [], "metavar": "NAME", "help": "lines whose name contains one of these"},
    "--workers": {"type": int, "default": 2, "help": "runs at the same time, one thread each (2)"},
    "--data": {"type": Path, "default": SHARED / "wikitext-2", "help": "folder with WikiText-2"},
    "--cache": {"type": Path, "default": ROOT / "runs" / "convergence", "help": "where what runs start from is kept"},
    "--out": {
        "type": Path,
        "default": ROOT / "benchmarks" / "results",
        "help": "where runs are kept and tables written",
    },
}


def parser(doc: str | None, *options: str) -> argparse.ArgumentParser:
    """A parser of these OPTIONS and of --out, with the script's docstring as its help."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in (*options, "--out"):
        found.add_argument(option, **OPTIONS[option])
    return found


def chosen(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The names that contain one of `only`, in capitals or not; all without `only`."""
    return [name for name in names if not only or any(part.lower() in name.lower() for part in only)]


def digest(settings: Any) -> str:
    """A short mark of plain settings, kept with every run so that runs of other settings are not mixed in."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


def finished(kept: Path, setup: str) -> list[Run]:
    """The runs of this set-up that are kept."""
    if not kept.exists():
        return []
    runs = [json.loads(line) for line in kept.read_text().splitlines()]
    return [run for run in runs if run.pop("setup", None) == setup]


def work_off(
    train: Callable[..., Run],
    todo: Sequence[tuple[Any, ...]],
    more: tuple[Any, ...],
    runs: list[Run],
    *,
    workers: int,
    kept: Path,
    setup: str,
    line: Callable[[Run], str],
    report: Callable[[list[Run]], None],
) -> None:
    """Call `train(*job, *more)` for every job, one thread each, `workers` at a time.

    A finished run is added to `runs` and, marked with `setup`, to the file `kept`; `line(run)` is printed, and
    `report(runs)` called, which is called at the end in any case if there are runs. A job that fails keeps no other
    from running; RuntimeError at the end then.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    kept.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    with pool, kept.open("a") as file:
        waiting = {pool.submit(train, *job, *more): job for job in todo}
        failed = []
        for number, ready in enumerate(as_completed(waiting), 1):
            if (error := ready.exception()) is not None:
                failed.append(waiting[ready])
                print(f"{number}/{len(todo)}  {waiting[ready]} failed: {error!r}", flush=True)
                continue
            run = ready.result()
            runs.append(run)
            print(json.dumps({**run, "setup": setup}), file=file, flush=True)
            print(f"{number}/{len(todo)}  {line(run)}", flush=True)
            report(runs)
    if runs:
        report(runs)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(todo)} runs failed: {failed}")


def _end_with_parent() -> None:
    """A worker whose benchmark was killed would go on with its run, and disturb the next benchmark."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end(sentinel: int = parent.sentinel) -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
