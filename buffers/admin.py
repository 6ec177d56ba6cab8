"""Looking at message stores on disk and cleaning them up: what `pipecomp store info`, `verify` and `prune` call.

PATH is the `store.path` of a run, with a folder `rank-<r>` per rank, or one such folder. A store that another process
uses is refused. `info` and `verify` write nothing. All raise StoreError where there is no store or it cannot be read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipecomp.buffers.base import GRADIENT
from pipecomp.buffers.lmdb_check import check_values, structure_problems, unsound
from pipecomp.buffers.lmdb_file import ValueFile, check_length, configuration, link_key, read_remarks, read_run
from pipecomp.buffers.lmdb_folder import DATA_FILE, LOCK_FILE, UNSYNCED_FILE, Folder, explained
from pipecomp.buffers.salvage import salvage
from pipecomp.buffers.store import sample_hash
from pipecomp.buffers.value import read_header, stored_size
from pipecomp.errors import ConfigError, StoreError

_RANK = re.compile(r"rank-(\d+)")
_COPY = "compacted"
_COPY_BYTES = 32 << 20  # values in one transaction while a file is copied


@dataclass(frozen=True, kw_only=True)
class LinkInfo:
    """One link of one rank. sizes in bytes; versions: lowest and highest, None without samples; settings: as given.

    run: the id of the run that the store belongs to, None if no run has used it; configuration: hash of settings.
    file_bytes is the size of the rank's file, which its links share.
    """

    rank: int | None
    link: str
    run: str | None
    configuration: str
    folder: str
    samples: int
    stored_bytes: int
    file_bytes: int
    bits: int | None
    group_size: int | None
    versions: tuple[int, int] | None
    settings: dict[str, Any]


class Damaged(NamedTuple):
    """A sample whose value is not what was stored.

    sample None: what is said about a link, all of which is pruned then. link None: what the file says about itself, for
    which all of it is pruned, or its pages, of which what can still be read is kept.
    """

    rank: int | None
    link: str | None
    sample: int | None
    problem: str


@dataclass(kw_only=True)
class VerifyReport:
    """checked: values that were read."""

    checked: int = 0
    damaged: list[Damaged] = field(default_factory=list)


@dataclass(kw_only=True)
class PruneReport:
    """Values over all ranks and links, `damaged` among the `removed`, and what the files took before and after."""

    kept: int = 0
    removed: int = 0
    damaged: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def rank_folders(path: str | os.PathLike[str]) -> list[tuple[int | None, Path]]:
    """List the ranks' folders in `path`, by rank, or `path` itself if it is one."""
    top = Path(path)
    with explained(top, "read"):
        if (top / DATA_FILE).is_file():
            match = _RANK.fullmatch(top.resolve().name)
            return [(int(match[1]) if match else None, top)]
        inside = top.iterdir() if top.is_dir() else ()
        found = [(int(m[1]), p) for p in inside if (m := _RANK.fullmatch(p.name)) and (p / DATA_FILE).is_file()]
    if not found:
        raise StoreError(f"{top}: no message store here: no {DATA_FILE}, and no folders rank-0, rank-1, … with one")
    return sorted(found)


def info(path: str | os.PathLike[str]) -> list[LinkInfo]:
    """List what is stored, by rank and link, from the values' headers alone."""
    found = []
    for rank, folder in rank_folders(path):
        with _opened(folder) as file:
            for name in file.table_names():
                table = file.table(name, create=False)
                headers = [read_header(row.head, table.where(row.sample)) for row in file.scan(table)]
                settings = json.loads(file.meta(link_key(name)) or b"{}")
                versions = [header.version for header in headers]
                found.append(
                    LinkInfo(
                        rank=rank,
                        link=name,
                        run=read_run(file),
                        configuration=configuration(settings),
                        folder=str(folder),
                        samples=len({header.sample & ~GRADIENT for header in headers}),
                        stored_bytes=sum(map(stored_size, headers)),
                        file_bytes=file.size_bytes(),
                        bits=settings.pop("bits", None),
                        group_size=settings.pop("grouping", None),
                        versions=(min(versions), max(versions)) if versions else None,
                        settings=settings,
                    )
                )
    return found


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Check the structure of every file, then the CRC-32 of every value."""
    report = VerifyReport()
    for rank, folder in rank_folders(path):
        with Folder(folder, shared=True):
            problems = structure_problems(folder)
            if problems:
                report.damaged += [Damaged(rank, None, None, problem) for problem in problems]
                continue
            with closing(ValueFile(folder, readonly=True)) as file:
                remarks = read_remarks(file)
                report.damaged += [Damaged(rank, name, None, what) for name, what in remarks.problems.items()]
                for name in file.table_names():
                    for checked in check_values(file, file.table(name, create=False)):
                        report.checked += 1
                        if checked.problem is not None:
                            report.damaged.append(Damaged(rank, name, checked.sample, checked.problem))
    return report


def prune(
    path: str | os.PathLike[str],
    *,
    link: str | None = None,
    ids_below: int | None = None,
    max_samples: int | None = None,
    everything: bool = False,
) -> PruneReport:
    """Remove samples and make the files small again. Damaged values always go; without options nothing else does.

    Where it is damaged what a store says about a link, or about itself (its run), the link's values go, or all.

    Of a file whose pages are damaged, all values that can still be read are kept.

    What is kept is copied beside the old file, and needs room there. A run that goes on sends what is missing as first
    visits once more.

    Args:
        path: see the module.
        link: remove this link's samples and settings.
        ids_below: keep only samples with ids below this, where a dataset became shorter.
        max_samples: keep at most so many per link, those that `store.max_bytes` would prefer.
        everything: remove the stores, whatever their state.

    Returns:
        Values kept and removed, and the files' bytes before and after.

    Raises:
        ConfigError: options that exclude each other.
        StoreError: no store, one in use, no such link, or a file of which nothing can be read.
    """
    for key, limit in (("ids_below", ids_below), ("max_samples", max_samples)):
        if limit is not None and limit < 0:
            raise ConfigError(key, limit, "a whole number from 0")
    if everything and (link is not None or ids_below is not None or max_samples is not None):
        raise ConfigError("everything", everything, "without link, ids_below and max_samples: nothing is kept")
    folders = [folder for _, folder in rank_folders(path)]
    report = PruneReport()
    with ExitStack() as held:
        for folder in folders:  # all of them before any is changed
            held.enter_context(Folder(folder))
            report.bytes_before += (folder / DATA_FILE).stat().st_size
        if not everything:
            for folder in folders:
                _mend_pages(folder)
        if link is not None:
            names = sorted(set().union(*map(_links, folders)))
            if link not in names:
                raise StoreError(f"{path}: no store of {link}; there are: {', '.join(names)}")
        for folder in folders:
            if everything:
                _remove(folder)
            else:
                _copy(folder, report, link, lambda ids: _kept(ids, ids_below, max_samples))
                report.bytes_after += (folder / DATA_FILE).stat().st_size
    return report


def forget(path: str | os.PathLike[str], rank: int) -> None:
    """Remove what one rank has stored in `path`, if anything: it is of another model's weights. Nobody has it open."""
    folder = Path(path) / f"rank-{rank}"
    if (folder / DATA_FILE).is_file():
        prune(folder, everything=True)


def _kept(ids: list[int], ids_below: int | None, max_samples: int | None) -> set[int]:
    samples = {i & ~GRADIENT for i in ids}  # with a sample its gradient goes, or stays
    kept = {i for i in samples if ids_below is None or i < ids_below}
    kept = set(sorted(kept, key=sample_hash)[:max_samples])
    return {i for i in ids if i & ~GRADIENT in kept}


def _copy(folder: Path, report: PruneReport, link: str | None, keep: Callable[[list[int]], set[int]]) -> None:
    """Copy what is kept into a new file, and put it in the place of the old one."""
    with (
        _replacing(folder, "compacted") as target,
        closing(ValueFile(folder, readonly=True)) as old,
        closing(ValueFile(target)) as new,
    ):
        remarks = read_remarks(old)
        for key, remark in remarks.whole.items():
            if link is None or key != link_key(link):
                new.set_meta(key, remark)
        for name in old.table_names():
            stays = name in remarks.links and name != link
            _copy_link(old, new, name, report, keep if stays else lambda ids: set(), create=stays)
        new.sync()


@contextmanager
def _replacing(folder: Path, what: str) -> Iterator[Path]:
    """Yield a folder for a new file, which then takes the old one's place. what: is being done, for StoreError."""
    target = folder / _COPY
    _remove(target)
    try:
        target.mkdir(exist_ok=True)
        yield target
        (folder / LOCK_FILE).unlink(missing_ok=True)
        os.replace(target / DATA_FILE, folder / DATA_FILE)
        (folder / UNSYNCED_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be {what}: {error}") from error
    finally:
        _remove(target)
        if target.is_dir():
            target.rmdir()


def _copy_link(
    old: ValueFile,
    new: ValueFile,
    name: str,
    report: PruneReport,
    keep: Callable[[list[int]], set[int]],
    *,
    create: bool,
) -> None:
    source = old.table(name, create=False)
    kept = keep([row.sample for row in old.scan(source)])
    values: dict[int, bytearray | None] = {}
    changes = {new.table(name): values} if create else {}
    size = 0
    for checked in check_values(old, source):
        report.damaged += checked.problem is not None
        if checked.value is None or checked.sample not in kept:
            report.removed += 1
            continue
        report.kept += 1
        values[checked.sample] = checked.value
        size += len(checked.value)
        if size >= _COPY_BYTES:
            new.write(changes)
            values.clear()
            size = 0
    new.write(changes)


def _links(folder: Path) -> set[str]:
    with closing(ValueFile(folder, readonly=True)) as file:
        return set(file.table_names())


def _mend_pages(folder: Path) -> None:
    """Put what is whole of a file with damaged pages in its place. StoreError if nothing is."""
    problems = structure_problems(folder)
    if not problems:
        return
    with _replacing(folder, "mended") as target:
        if not salvage(folder, target):
            raise StoreError(
                f"{folder}: the file's pages are damaged ({problems[0]}), and none of its values can be read. "
                f"`pipecomp store prune {folder} --everything` removes it; then all samples are sent as first visits"
            )


def _remove(folder: Path) -> None:
    for name in (DATA_FILE, LOCK_FILE, UNSYNCED_FILE):
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{folder / name}: cannot be removed: {error}") from error


@contextmanager
def _opened(folder: Path) -> Iterator[ValueFile]:
    """Open a file to look at, of which at least the pages are sound: LMDB would crash with them."""
    with Folder(folder, shared=True) as held:
        check_length(folder / DATA_FILE)
        problem = unsound(folder) if held.restarted() else next(iter(structure_problems(folder)), None)
        if problem is not None:
            raise StoreError(f"{folder}: damaged: {problem}; see `pipecomp store verify`")
        with closing(ValueFile(folder, readonly=True)) as file:
            yield file
