"""Manifests, which tell complete checkpoints from unfinished and damaged ones.

A checkpoint consists of many files of many ranks, and a run that is killed while saving leaves some of them. When all
ranks have written, one rank of each machine lists every file that it sees, with size and CRC-32, in a manifest that is
written atomically. A checkpoint is valid if it has a manifest and every listed file matches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from pipecomp.utils.files import UNFINISHED, atomic_write_text, file_crc

NOT_FINISHED = "it was not finished"
_MANIFEST = "pipecomp-seal-{}.json"
_MANIFESTS = "pipecomp-seal-*.json"
_WRITTEN = ("*_states.pt", "pipecomp-*")  # by DeepSpeed, and beside it
_STEP = re.compile(r"global_step(\d+)")


def messages_copy(folder: Path, rank: int) -> Path:
    """Path of the copy of a rank's message store in a checkpoint."""
    return folder / f"pipecomp-messages-rank-{rank}"


def remove(folder: Path) -> None:
    """Remove the manifests, before files change."""
    for path in folder.glob(_MANIFESTS):
        path.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Delete an earlier checkpoint of the same name; several ranks may call this at once. Other files stay.

    A checkpoint of more stages has files that the next one would not overwrite.
    """
    remove(folder)
    for path in [path for pattern in _WRITTEN for path in folder.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write(folder: Path, rank: int) -> None:
    """Write the manifest of all files in the folder, after every rank has written. rank: names the manifest."""
    files = {
        str(path.relative_to(folder)): [path.stat().st_size, file_crc(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.match(_MANIFESTS) and not path.name.endswith((UNFINISHED, ".tmp"))
    }
    atomic_write_text(folder / _MANIFEST.format(rank), json.dumps({"format": 1, "files": files}, indent=0) + "\n")


def finished(folder: Path) -> bool:
    """Return True if a checkpoint has a manifest. `problem` checks the files, too."""
    return any(folder.glob(_MANIFESTS))


def problem(folder: Path) -> str | None:
    """Check a checkpoint; returns what is wrong, or None if it is valid."""
    manifests = sorted(folder.glob(_MANIFESTS))
    if not manifests:
        return NOT_FINISHED
    for path in manifests:
        try:
            listed = json.loads(path.read_text(encoding="utf-8"))["files"]
            for name, (size, crc) in listed.items():
                file = folder / name
                if not file.is_file():
                    return f"{name} is missing"
                if file.stat().st_size != size or file_crc(file) != crc:
                    return f"{name} was changed"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{path.name} cannot be read: {error}"
    return None


def steps(save_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """The checkpoints in `save_dir` with DeepSpeed's default names, valid or not, by step."""
    folders = {}
    for path in Path(save_dir).glob("global_step*"):
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            folders[int(match[1])] = path
    return dict(sorted(folders.items()))


def keep_last_good(save_dir: str | os.PathLike[str]) -> None:
    """Delete all checkpoints but the last valid one, to make room; none if none is valid."""
    folders = list(steps(save_dir).values())
    good = next((path for path in reversed(folders) if problem(path) is None), None)
    for path in folders:
        if good is not None and path != good:
            with suppress(OSError):  # the disk may accept no writes at all
                _delete(path)


def remove_old(save_dir: str | os.PathLike[str], keep: int, *, written: int) -> None:
    """Delete all checkpoints but the last `keep` finished ones.

    Args:
        save_dir: Their folder.
        keep: How many to keep, at least 1.
        written: Step of the checkpoint that was just written, which is kept.
    """
    folders = steps(save_dir)
    others = [step for step, path in folders.items() if step != written and finished(path)]
    kept = {written, *others[len(others) - min(keep - 1, len(others)) :]}
    for step, path in folders.items():
        if step not in kept:
            with suppress(OSError):  # a write-protected folder stays
                _delete(path)


def remove_after(save_dir: str | os.PathLike[str], step: int) -> None:
    """Delete the checkpoints after `step`, when a run goes back to it."""
    for number, path in steps(save_dir).items():
        if number > step:
            _delete(path)


def _delete(folder: Path) -> None:
    remove(folder)  # first, so that a half-deleted checkpoint is not valid
    shutil.rmtree(folder, ignore_errors=True)
