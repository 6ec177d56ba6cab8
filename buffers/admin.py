"""Inspection and cleaning of message stores on disk: `pipecomp store info`, `verify` and `prune`.

PATH is the `store.path` of a run, with a folder `rank-<r>` per rank, or one such folder. A store that another process
uses is refused. `info` and `verify` write nothing. All raise StoreError if there is no store or it cannot be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipecomp.buffers.base import GRADIENT
from pipecomp.buffers.lmdb_file import FORMAT_KEY, RUN_KEY, ValueFile, link_key, page_problems
from pipecomp.buffers.lmdb_folder import DAMAGED_FILE, DATA_FILE, LOCK_FILE, UNSYNCED_FILE, RankFolder, store_errors
from pipecomp.buffers.store import sample_hash
from pipecomp.buffers.value import read_header, stored_size
from pipecomp.errors import ConfigError, StoreError, write_limits

_RANK = re.compile(r"rank-(\d+)")
_COPY = "compacted"
_COPY_BYTES = 32 << 20  # values in one transaction while a file is copied


@dataclass(frozen=True, kw_only=True)
class LinkInfo:
    """One link of one rank.

    Attributes:
        rank: None if the path names a folder without one.
        link: its name.
        run: id of the run that the store belongs to, None if no run has used it.
        configuration: hash of the settings.
        folder: folder of the rank.
        samples: number of samples.
        stored_bytes: bytes of its values.
        file_bytes: bytes of the rank's file, which its links share.
        bits, group_size: format of the values.
        versions: lowest and highest, None without samples.
        settings: those that the activations depend on.
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


class DamagedEntry(NamedTuple):
    """A damaged value; sample None: a link's settings or keys; link None: the file's metadata or pages."""

    rank: int | None
    link: str | None
    sample: int | None
    problem: str


@dataclass(kw_only=True)
class VerifyReport:
    """Result of `verify`. checked: values that were read."""

    checked: int = 0
    damaged: list[DamagedEntry] = field(default_factory=list)


@dataclass(kw_only=True)
class PruneReport:
    """Values over all ranks and links, `damaged` among the `removed`, and bytes of the files before and after."""

    kept: int = 0
    removed: int = 0
    damaged: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def rank_folders(path: str | os.PathLike[str]) -> list[tuple[int | None, Path]]:
    """List the ranks' folders in `path`, by rank, or `path` itself if it is one."""
    top = Path(path)
    with store_errors(top, "read"):
        if (top / DATA_FILE).is_file():
            match = _RANK.fullmatch(top.resolve().name)
            return [(int(match[1]) if match else None, top)]
        inside = top.iterdir() if top.is_dir() else ()
        found = [(int(m[1]), p) for p in inside if (m := _RANK.fullmatch(p.name)) and (p / DATA_FILE).is_file()]
    if not found:
        raise StoreError(f"{top}: no message store here: no {DATA_FILE}, and no folders rank-0, rank-1, … with one")
    return sorted(found)


def info(path: str | os.PathLike[str]) -> list[LinkInfo]:
    """List the stored samples by rank and link, from the values' headers alone."""
    found = []
    for rank, folder in rank_folders(path):
        with RankFolder(folder, shared=True), closing(_open_sound(folder, "see `pipecomp store verify`")) as file:
            for name in file.table_names():
                table = file.table(name, create=False)
                headers = [read_header(head.head, table.where(head.sample)) for head in file.scan(table)]
                settings = json.loads(file.meta(link_key(name)) or b"{}")
                versions = [header.version for header in headers]
                found.append(
                    LinkInfo(
                        rank=rank,
                        link=name,
                        run=file.run(),
                        configuration=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12],
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
    """Check the pages and the metadata of every file, then the CRC-32 of every value."""
    report = VerifyReport()
    for rank, folder in rank_folders(path):
        with RankFolder(folder, shared=True):
            pages = page_problems(folder)
            report.damaged += [DamagedEntry(rank, None, None, problem) for problem in pages]
            if pages:
                continue
            with closing(ValueFile(folder, readonly=True)) as file:
                problems = file.problems()
                report.damaged += [DamagedEntry(rank, link, None, problem) for link, problem in problems]
                bad = {link for link, _ in problems}
                for name in () if None in bad else file.table_names():
                    for value in () if name in bad else file.check_values(file.table(name, create=False)):
                        report.checked += 1
                        if value.problem is not None:
                            report.damaged.append(DamagedEntry(rank, name, value.sample, value.problem))
    return report


def prune(
    path: str | os.PathLike[str],
    *,
    link: str | None = None,
    ids_below: int | None = None,
    max_samples: int | None = None,
    everything: bool = False,
) -> PruneReport:
    """Remove samples and shrink the files. Damaged values always go; without options nothing else does.

    The kept values are copied beside the old file, and need room there. A resumed run sends the removed ones as
    first visits again.

    Args:
        path: see the module.
        link: remove this link's samples and settings.
        ids_below: keep only samples with ids below this, if a dataset became shorter.
        max_samples: keep at most so many per link, those that `store.max_bytes` would prefer.
        everything: remove the stores, whatever their state.

    Returns:
        Values kept and removed, and the files' bytes before and after.

    Raises:
        ConfigError: options that exclude each other.
        StoreError: no store, one in use, no such link, or a file with damaged pages or metadata.
    """
    for key, limit in (("ids_below", ids_below), ("max_samples", max_samples)):
        if limit is not None and limit < 0:
            raise ConfigError(key, limit, "a whole number from 0")
    if everything and (link is not None or ids_below is not None or max_samples is not None):
        raise ConfigError("everything", everything, "false with link, ids_below or max_samples")

    def select(ids: list[int]) -> set[int]:
        samples = {i & ~GRADIENT for i in ids}  # a sample's gradient goes, or stays, with it
        kept = {i for i in samples if ids_below is None or i < ids_below}
        kept = set(sorted(kept, key=sample_hash)[:max_samples])
        return {i for i in ids if i & ~GRADIENT in kept}

    report = PruneReport()
    with ExitStack() as opened:
        folders = [folder for _, folder in rank_folders(path)]
        locks = {}
        for folder in folders:  # all of them, before any is changed
            locks[folder] = opened.enter_context(RankFolder(folder))
            report.bytes_before += (folder / DATA_FILE).stat().st_size
        if everything:
            for folder in folders:
                _remove(folder, DATA_FILE, LOCK_FILE, DAMAGED_FILE, UNSYNCED_FILE)
            return report
        remedy = "`pipecomp store prune --everything` removes it; a run sets it aside and begins a new one"
        files = {f: opened.enter_context(closing(_open_sound(f, remedy))) for f in folders}
        names = sorted({name for file in files.values() for name in file.table_names()})
        if link is not None and link not in names:
            raise StoreError(f"{path}: no store of {link}; there are: {', '.join(names)}")
        for folder, file in files.items():
            _compact(folder, file, report, link, select)
            locks[folder].mark_synced()  # all that is left was verified
            report.bytes_after += (folder / DATA_FILE).stat().st_size
    return report


def forget(path: str | os.PathLike[str], rank: int) -> None:
    """Remove a rank's store in `path`, if there is one; it is not open."""
    folder = Path(path) / f"rank-{rank}"
    if (folder / DATA_FILE).is_file():
        prune(folder, everything=True)


def forget_other_cuts(
    path: str | os.PathLike[str], number: int, cuts: Sequence[int], replica: str | None = None
) -> list[str]:
    """Remove what a rank's store in `path` holds of other cuts of the model; it is not open.

    Args:
        path: See the module.
        number: State number of the rank.
        cuts: First block of each stage, and the number of blocks.
        replica: The rank's replica as links describe it, such as "0 of 2"; None for any.

    Returns:
        The links that are removed. A store that cannot be read stays as it is.
    """
    folder = Path(path) / f"rank-{number}"
    if not (folder / DATA_FILE).is_file():
        return []
    wanted = {f"link-{index}": cut for index, cut in enumerate(cuts[1:-1])}
    try:
        with RankFolder(folder, shared=True), closing(ValueFile(folder, readonly=True)) as file:
            stored = {name: json.loads(file.meta(link_key(name)) or b"{}") for name in file.table_names()}
    except (StoreError, ValueError):
        return []
    removed = [
        name
        for name, settings in stored.items()
        if settings.get("cut") != wanted.get(name) or replica not in (None, settings.get("replica"))
    ]
    try:
        for name in removed if len(removed) < len(stored) else ():
            prune(folder, link=name)
    except StoreError:  # damaged pages, or no room for a copy
        removed = list(stored)
    if removed and len(removed) == len(stored):
        forget(path, number)
    return removed


def _open_sound(folder: Path, remedy: str) -> ValueFile:
    """Open a file for reading; StoreError with the remedy if its pages or metadata are damaged."""
    pages = page_problems(folder)
    if pages:
        raise StoreError(f"{pages[0]}; {remedy}")
    file = ValueFile(folder, readonly=True)
    problems = file.problems()
    if problems:
        file.close()
        raise StoreError(f"{problems[0][1]}; {remedy}")
    return file


def _compact(
    folder: Path, old: ValueFile, report: PruneReport, link: str | None, select: Callable[[list[int]], set[int]]
) -> None:
    """Copy the selected values into a new file, which then replaces the old one."""
    target = folder / _COPY
    _remove(target, DATA_FILE, LOCK_FILE)
    try:
        target.mkdir(exist_ok=True)
        with closing(ValueFile(target)) as new:
            names = old.table_names()
            for key in (FORMAT_KEY, RUN_KEY, *(link_key(name) for name in names if name != link)):
                if (value := old.meta(key)) is not None:
                    new.set_meta(key, value)
            for name in names:
                source = old.table(name, create=False)
                selected = set() if name == link else select([head.sample for head in old.scan(source)])
                into = None if name == link else new.table(name)
                batch: dict[int, bytearray | None] = {}
                size = 0
                for checked in old.check_values(source):
                    report.damaged += checked.problem is not None
                    if into is None or checked.value is None or checked.sample not in selected:
                        report.removed += 1
                        continue
                    report.kept += 1
                    batch[checked.sample] = checked.value
                    size += len(checked.value)
                    if size >= _COPY_BYTES:
                        new.write({into: batch})
                        batch, size = {}, 0
                if into is not None:
                    new.write({into: batch})
            new.sync()
        old.close()
        (folder / LOCK_FILE).unlink(missing_ok=True)
        os.replace(target / DATA_FILE, folder / DATA_FILE)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be compacted: {error}{write_limits(error.errno, folder)}") from error
    finally:
        _remove(target, DATA_FILE, LOCK_FILE)
        if target.is_dir():
            target.rmdir()


def _remove(folder: Path, *names: str) -> None:
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{folder / name}: cannot be removed: {error}") from error
