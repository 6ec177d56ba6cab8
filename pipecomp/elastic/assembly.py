"""Make a checkpoint from the records of all ranks, which the machines that are left have in two copies.

The checkpoint of a single machine, which has no second home, becomes a record for the machines that join it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipecomp.allreduce.state import save_state_dict
from pipecomp.checkpoint import manifest
from pipecomp.checkpoint.writing import private_files, write_state
from pipecomp.elastic.index import IndexEntry, RecordFolder, find_records
from pipecomp.elastic.record import SHARED, RecordInfo, StateRecord
from pipecomp.errors import CheckpointError, WireError
from pipecomp.utils.files import UNFINISHED, atomic_write_text

_SINGLE = "single"  # subfolder for the record of a single machine's checkpoint
_COMPLETING = ("trainer_state.json",)  # written last: a folder without it is incomplete


@dataclass(frozen=True)
class CompleteState:
    """A step of which the records of all ranks are there.

    Attributes:
        step: Optimizer steps before it.
        world: Ranks of its session.
        records: A good file of each rank's record.
        lost: Reasons why later steps were passed over, newest first.
    """

    step: int
    world: int
    records: tuple[Path, ...]
    lost: tuple[str, ...] = ()


def newest_complete(
    folders: Iterable[str | os.PathLike[str]], *, step: int | None = None, session: str | None = None
) -> CompleteState:
    """Find the newest step of which the records of all ranks are in some folders, undamaged.

    Args:
        folders: `elastic.path` of the machines that are left, or copies.
        step: Only this step; None for the newest.
        session: Only records of this session; None for any.

    Raises:
        CheckpointError: There is none. The message names, for the newest steps, the ranks whose records are missing.

    Example:
        >>> newest_complete(["out/second-home"]).step
        120
    """
    paths = [Path(folder) for folder in folders]
    by_step: dict[tuple[int, str], list[IndexEntry]] = {}
    for entry in find_records(paths):
        if step in (None, entry.step) and session in (None, entry.session):
            by_step.setdefault((entry.step, entry.session), []).append(entry)
    lost: list[str] = []
    for (number, _), entries in sorted(by_step.items(), reverse=True):
        world = entries[0].world
        good: dict[int, Path] = {}
        problems: list[str] = []
        for entry in entries:
            problem = entry.problem() if entry.rank not in good else None
            if problem is not None:
                problems.append(problem)
            else:
                good.setdefault(entry.rank, entry.path)
        if len(good) == world:
            return CompleteState(number, world, tuple(good[rank] for rank in range(world)), tuple(lost))
        missing = [str(rank) for rank in range(world) if rank not in good]
        ranks = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        records = f"records of ranks {ranks} are" if len(missing) > 1 else f"record of rank {ranks} is"
        damaged = f" ({'; '.join(problems)})" if problems else ""
        lost.append(f"step {number}: the {records} missing{damaged}")
    places = ", ".join(map(str, paths))
    wanted = "complete state" if step is None else f"complete state of step {step}"
    reasons = "; ".join(lost[:3]) or "there are no records"
    raise CheckpointError(
        f"no {wanted} in {places}: {reasons}. Each rank's record is on its own machine and on its second home: add the "
        "folder of one of these machines, or resume from an earlier checkpoint"
    )


def assemble(
    folders: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    session: str | None = None,
) -> Path:
    """Write a complete checkpoint from the records that the remaining machines have.

    The checkpoint is as `engine.save_checkpoint` or a trainer writes it, without copies of message stores and without
    the model's own folder; it can be loaded with other cuts and another number of replicas. The folder appears whole.

    Args:
        folders: `elastic.path` of the machines that are left, or copies. Each has the records of its own ranks and
            those it holds for others.
        out: Folder of the checkpoints.
        step: Only this step; None for the newest complete one.
        session: Only records of this session; None for any.

    Returns:
        The checkpoint's folder: `out`/global_stepN, or `out`/checkpoint-N of a trainer. A whole one that is there
        already stays as it is; one with the files of some ranks is replaced.

    Raises:
        CheckpointError: No step is complete, or a record cannot be read. The message names what is missing.

    Example:
        >>> folder = assemble(["out/second-home"], "out/checkpoints")
        >>> engine.load_checkpoint("out/checkpoints")
    """
    state = newest_complete(folders, step=step, session=session)
    try:
        records = [StateRecord.open(path) for path in state.records]
        info, first = records[0].info, records[0].files()
        shared = first.pop(SHARED, {})
        target = Path(out) / info.folder
        names = {name for record in records for name in record.names} - {SHARED}

        def is_whole() -> bool:
            found = all((target / name).is_file() for name in names)
            return found and manifest.problem(target / info.engine) is None

        if is_whole():
            return target
        # Note: several machines may share the folder, and each assembles.
        part = target.with_name(f"{target.name}.{secrets.token_hex(4)}{UNFINISHED}")
        with private_files():
            shutil.rmtree(part, ignore_errors=True)
            (part / info.engine).mkdir(parents=True)
            last = {name: first.pop(name) for name in _COMPLETING if name in first}
            _write(first, shared, part)
            for record in records[1:]:  # one at a time: together they may not fit into memory
                _write(record.files(), shared, part)
            manifest.write(part / info.engine, 0)
            _write(last, shared, part)
            shutil.rmtree(target, ignore_errors=True)
            try:
                os.replace(part, target)
            except OSError:
                shutil.rmtree(part, ignore_errors=True)
                if not is_whole():
                    raise
            if not info.engine:
                atomic_write_text(Path(out) / "latest", info.folder)
    except WireError as error:
        raise CheckpointError(f"the records of step {state.step} cannot be read: {error}") from error
    return target


def _write(files: Mapping[str, Any], shared: Mapping[str, Any], folder: Path) -> None:
    """Write files in the form in which a checkpoint has them."""
    for name, content in files.items():
        path = folder / name
        if path.suffix == ".safetensors":
            save_state_dict(content, path)
        elif path.suffix == ".json":
            atomic_write_text(path, content)
        elif path.match("mp_rank_*_model_states.pt"):
            write_state({**content, **shared}, path)
        else:
            write_state(content, path)


def record_checkpoint(folder: Path, records: Path, *, step: int, engine: str) -> None:
    """Make a record of a checkpoint that a single rank has written, from which `assemble` makes it again.

    Other machines get the record: the checkpoint's own files are pickles, which they would have to trust.

    Args:
        folder: The checkpoint. Message stores and a model's own folder are left out.
        records: `elastic.path`; the record goes into a folder below it.
        step: Optimizer steps before the checkpoint.
        engine: Folder of the engine's part inside.

    Raises:
        CheckpointError: A file has objects of classes that a record cannot have.
        OSError: A file cannot be read or written.
    """
    info = RecordInfo(
        session=secrets.token_hex(8),
        step=step,
        rank=0,
        world=1,
        stage=0,
        cuts=(),
        folder=folder.name,
        engine=engine,
    )
    try:
        with private_files():
            target = RecordFolder(records / _SINGLE)
            target.forget_from(0)  # earlier ones
            record = StateRecord.take(info, dict(_read(folder, engine)))
            record.write(target.path)
            target.add(record)
    except TypeError as error:
        raise CheckpointError(f"{folder} cannot be brought to other machines: {error}") from error


def _read(folder: Path, engine: str) -> Iterator[tuple[str, Any]]:
    """Yield name and content of a checkpoint's files of the kinds that a single rank writes."""
    for path in sorted([*folder.iterdir(), *(folder / engine).iterdir()]):
        name = path.relative_to(folder).as_posix()
        if path.suffix in (".pt", ".pth"):
            yield name, torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        elif path.suffix == ".json" and path.parent == folder:
            yield name, path.read_text(encoding="utf-8")
