"""Data and models that some machines of a run lack, from the others over the run's own connections.

Only paths below the working directory that the machine's own command names are taken. Their files are listed first,
with sizes and SHA-256; a list with other names, or more bytes than the disk has room for, is refused. Files appear
under their names when all of them are whole; those of an interrupted copy stay beside them and are not sent again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipecomp.distributed.collectives import while_others_wait
from pipecomp.distributed.consistency import AllRanks
from pipecomp.errors import DataError, OutputError, write_error
from pipecomp.utils.files import UNFINISHED, atomic_write, hash_file
from pipecomp.utils.units import format_count, format_size

MOST_FILES = 5000  # of a path; their list is one message
_CHUNK = 1 << 20
_WINDOW = 16  # chunks until the receiver confirms them
_OK, _FAILED = 0, 1
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ListedFile(NamedTuple):
    """A file. name: relative to the path, "" for the path itself."""

    name: str
    size: int
    digest: str


class _Copy(NamedTuple):
    """The copy of a path. lacking: indexes of the files that each receiver asks for."""

    path: str
    source: int
    receivers: list[int]
    files: list[ListedFile]
    lacking: dict[int, list[int]]


def share_files(ranks: AllRanks, paths: Sequence[str], *, take: bool, say: Callable[[str], None]) -> None:
    """Copy files and folders to the machines that lack them; every rank must call this.

    Args:
        ranks: All ranks.
        paths: Files and folders that this machine's command names; those outside the working directory are left out.
        take: This machine takes what it lacks.
        say: Prints a line.

    Raises:
        DataError: A list of files is not valid, or does not fit the disk.
        OutputError: A file cannot be written.
        LinkError: On the other ranks.
    """
    own = {path: os.path.exists(path) for path in dict.fromkeys(paths) if is_inside(path)}
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    answers = ranks.all_gather_object({"has": own, "takes": take and first})
    offers: list[tuple[str, int, list[int]]] = []
    for path in own:
        has = [answer["has"].get(path) for answer in answers]
        receivers = [rank for rank, answer in enumerate(answers) if has[rank] is False and answer["takes"]]
        if None not in has and True in has and receivers:
            offers.append((path, has.index(True), receivers))
    if not offers:
        return
    mine = {path: list_files(Path(path)) for path, source, _ in offers if source == ranks.rank}
    with ranks.collective_errors():
        for path, files in mine.items():
            if len(files) > MOST_FILES:
                raise DataError(f"{path} has {len(files)} files, more than {MOST_FILES}: copy it by hand")
    listed = ranks.all_gather_object(mine)
    wanted: dict[str, list[int]] = {}
    with ranks.collective_errors():
        needed = 0
        for path, source, receivers in offers:
            files = parse_list(path, listed[source].get(path))
            if ranks.rank in receivers:
                wanted[path] = missing_files(Path(path), files)
                needed += sum(files[index].size for index in wanted[path])
        free = shutil.disk_usage(os.curdir).free
        if needed > free:
            raise DataError(
                f"{format_size(needed)} are needed for {', '.join(wanted)}, and {format_size(free)} are free"
            )
    asked = ranks.all_gather_object(wanted)
    copies = []
    for path, source, receivers in offers:
        files = parse_list(path, listed[source][path])
        lacking = {rank: _indexes(asked[rank].get(path), len(files)) for rank in receivers}
        copies.append(_Copy(path, source, receivers, files, lacking))
        size = format_size(sum(files[index].size for index in lacking[receivers[0]]))
        to = ", ".join(map(str, receivers))
        say(f"copying {path} ({format_count(len(files), 'file')}, {size}) from rank {source} to rank {to}")
    with ranks.collective_errors():
        while_others_wait(lambda: _take_part(copies, ranks.rank))


def is_inside(path: str) -> bool:
    """Return whether a path is below the working directory."""
    normal = os.path.normpath(path)
    return not os.path.isabs(path) and normal != "." and normal.split("/")[0] != ".." and "\0" not in path


def list_files(path: Path) -> list[ListedFile]:
    """List a file, or the files of a folder, with sizes and digests."""
    if path.is_file():
        return [ListedFile("", path.stat().st_size, hash_file(path))]
    found = sorted(inner for inner in path.rglob("*") if inner.is_file())
    if len(found) > MOST_FILES:  # refused by the caller
        return [ListedFile("", 0, "")] * len(found)
    return [ListedFile(inner.relative_to(path).as_posix(), inner.stat().st_size, hash_file(inner)) for inner in found]


def parse_list(path: str, given: Any) -> list[ListedFile]:
    """Check another rank's list of files. Raises DataError for names that leave the path, and other nonsense."""
    problem = DataError(f"the list of the files in {path} that another machine sends is not valid")
    if not isinstance(given, list) or not 0 < len(given) <= MOST_FILES:
        raise problem
    found = []
    for row in given:
        if not isinstance(row, list) or len(row) != 3:
            raise problem
        name, size, digest = row
        valid = isinstance(name, str) and isinstance(digest, str) and isinstance(size, int)
        if not valid or size < 0 or not _DIGEST.fullmatch(digest) or not _is_safe(name, alone=len(given) == 1):
            raise problem
        found.append(ListedFile(name, size, digest))
    names = [file.name for file in found]
    if len(set(names)) < len(names):
        raise problem
    return found


def _is_safe(name: str, *, alone: bool) -> bool:
    bad = "\0" in name or len(name) > 1000 or name.endswith(UNFINISHED)
    return (alone and name == "") or (not bad and all(part not in ("", ".", "..") for part in name.split("/")))


def _indexes(given: Any, count: int) -> list[int]:
    """Check which files a receiver asks for; an answer that makes no sense asks for none."""
    valid = isinstance(given, list) and all(isinstance(index, int) and 0 <= index < count for index in given)
    return sorted(set(given)) if valid else []


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED)


def missing_files(path: Path, files: Sequence[ListedFile]) -> list[int]:
    """Return which files an interrupted copy has not left whole."""
    part = _unfinished(path)
    found = []
    for index, file in enumerate(files):
        own = part / file.name if file.name else part
        whole = own.is_file() and own.stat().st_size == file.size and hash_file(own) == file.digest
        if not whole:
            found.append(index)
    return found


def _take_part(copies: Sequence[_Copy], rank: int) -> None:
    """Send and receive, in the order of the copies."""
    problem: Exception | None = None
    for copy in copies:
        if rank == copy.source:
            problem = _send(copy) or problem
        elif rank in copy.receivers:
            try:
                _receive(copy, rank)
            except (OSError, DataError) as error:
                text = write_error(error, copy.path) if isinstance(error, OSError) else str(error)
                problem = problem or OutputError(f"{copy.path} cannot be copied to rank {rank}: {text}")
    if problem is not None:
        raise problem


def _send(copy: _Copy) -> Exception | None:
    """Send files to the receivers; one that fails gets no more. Returns an error if a file changes meanwhile."""
    active = list(copy.receivers)
    problem: Exception | None = None
    for index, file in enumerate(copy.files):
        to = [rank for rank in active if index in copy.lacking[rank]]
        if not to:
            continue
        source = Path(copy.path) / file.name if file.name else Path(copy.path)
        for number, data in enumerate(_chunks(source, file.size)):
            if data is None:  # the receivers find another digest
                problem = DataError(f"{source} changes while it is copied")
            size = min(_CHUNK, file.size - number * _CHUNK)
            tensor = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
            for rank in to:
                dist.send(tensor, rank)
            if number % _WINDOW == _WINDOW - 1:
                to = [rank for rank in to if _confirmed(rank)]
        to = [rank for rank in to if _confirmed(rank)]
        active = [rank for rank in active if index not in copy.lacking[rank] or rank in to]
    return problem


def _chunks(path: Path, size: int) -> Iterator[bytes | None]:
    """Yield a file's chunks; None in place of one that cannot be read."""
    with contextlib.ExitStack() as opened:
        file = None
        with contextlib.suppress(OSError):
            file = opened.enter_context(path.open("rb"))
        for begin in range(0, size, _CHUNK):
            data = b""
            with contextlib.suppress(OSError):
                data = file.read(min(_CHUNK, size - begin)) if file is not None else b""
            yield data if len(data) == min(_CHUNK, size - begin) else None


def _confirmed(rank: int) -> bool:
    answer = torch.empty(1, dtype=torch.uint8)
    dist.recv(answer, rank)
    return int(answer) == _OK


def _confirm(rank: int, answer: int) -> None:
    dist.send(torch.tensor([answer], dtype=torch.uint8), rank)


def _receive(copy: _Copy, rank: int) -> None:
    """Receive the files that this rank lacks. Raises OSError or DataError, after the sender knows of it."""
    path = Path(copy.path)
    part = _unfinished(path)
    for index in copy.lacking[rank]:
        file = copy.files[index]
        chunks = _Incoming(copy.source, file.size)
        try:
            own = part / file.name if file.name else part
            own.parent.mkdir(parents=True, exist_ok=True)
            if not f"{os.path.realpath(own.parent)}/".startswith(f"{os.path.realpath(os.curdir)}/") or own.is_symlink():
                raise DataError(f"{own} leads out of the working directory")
            with atomic_write(own, part=own.with_name(f"{own.name}.{rank}{UNFINISHED}")) as new:
                with new.open("wb") as opened:
                    for data in chunks.read():
                        opened.write(data)
                if hash_file(new) != file.digest:
                    raise DataError(f"{file.name or copy.path} arrived damaged")
        except (OSError, DataError):
            chunks.refuse()
            raise
        _confirm(copy.source, _OK)
    os.replace(part, path)


class _Incoming:
    """The chunks of a file from another rank."""

    def __init__(self, source: int, size: int) -> None:
        self._source, self._size = source, size
        self._received = self._confirmed = 0

    def read(self) -> Iterator[bytes]:
        """Yield the chunks, and confirm each window after its last one has been used."""
        while self._more:
            yield self._next()
            if self._received % _WINDOW == 0:
                _confirm(self._source, _OK)
                self._confirmed = self._received

    def refuse(self) -> None:
        """Receive until the sender waits for an answer, and let it stop."""
        while self._more and not (self._received % _WINDOW == 0 and self._received > self._confirmed):
            self._next()
        _confirm(self._source, _FAILED)

    @property
    def _more(self) -> bool:
        return self._received * _CHUNK < self._size

    def _next(self) -> bytes:
        tensor = torch.empty(min(_CHUNK, self._size - self._received * _CHUNK), dtype=torch.uint8)
        dist.recv(tensor, self._source)
        self._received += 1
        return tensor.numpy().tobytes()
