"""`pipecomp report`, and the same at the end of a run, where a report that fails must not fail the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipecomp.errors import writable
from pipecomp.report.page import make_page
from pipecomp.report.read import read_runs
from pipecomp.report.record import PAGE
from pipecomp.utils.files import atomic_write_text


def write_report(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of runs.

    Args:
        paths: Runs, as `read_runs` takes them.
        out: The file; by default `PAGE` in the only path, if that is a folder, and here if not.

    Returns:
        The file.

    Raises:
        ConfigError: For a path that is no run, or a file that cannot be written.
        DataError: For a run that has no step, or is of a newer version.
    """
    only = Path(paths[0]) if len(paths) == 1 else Path()
    target = Path(out) if out is not None else (only if only.is_dir() else Path()) / PAGE
    page = make_page(read_runs(paths))
    with writable("--out", target, "a file"):
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(target, page)
    return target


def try_report(paths: Sequence[str | Path], out: str | Path | None = None) -> str:
    """Write the page of runs that have just ended, as `write_report`, but never raise: a run is worth more.

    Returns:
        The file, or why there is none.
    """
    try:
        return str(write_report(paths, out))
    except Exception as error:
        return f"none, as it could not be made: {type(error).__name__}: {error}"
