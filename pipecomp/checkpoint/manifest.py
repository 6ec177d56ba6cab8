"""Which checkpoints are good: a manifest of all files of a folder, written last.

A checkpoint is many files of many ranks; a run that is killed meanwhile leaves some of them. So when all ranks have
written, one rank of each machine lists every file that it sees, with its size and CRC-32, in a file of its own that
appears whole. A folder is good where its manifests are there and every file is as listed.
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
    """Name the copy of a rank's message store in a checkpoint."""
    return folder / f"pipecomp-messages-rank-{rank}"


def remove(folder: Path) -> None:
    """Take the manifests away: the files are about to change, and nothing vouches for them."""
    for path in folder.glob(_MANIFESTS):
        path.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Delete an earlier checkpoint of this name, whose files would be taken for the next one's; several ranks may.

    One of more stages has files that the next one does not write. What else is in the folder stays.
    """
    remove(folder)
    for path in [path for pattern in _WRITTEN for path in folder.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write(folder: Path, rank: int) -> None:
    """Vouch for all files of the folder; call it when every rank has written. rank: names the manifest."""
    files = {
        str(path.relative_to(folder)): [path.stat().st_size, file_crc(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.match(_MANIFESTS) and not path.name.endswith((UNFINISHED, ".tmp"))
    }
    atomic_write_text(folder / _MANIFEST.format(rank), json.dumps({"format": 1, "files": files}, indent=0) + "\n")


def finished(folder: Path) -> bool:
    """Whether somebody vouches for a checkpoint; that its files are still as they were, only `problem` finds out."""
    return any(folder.glob(_MANIFESTS))


def problem(folder: Path) -> str | None:
    """Find out what is wrong with a checkpoint; None if it is good."""
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
    """List the checkpoints in `save_dir` with DeepSpeed's usual names, good or not, by step."""
    found = {}
    for path in Path(save_dir).glob("global_step*"):
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def keep_last_good(save_dir: str | os.PathLike[str]) -> None:
    """Delete all checkpoints but the last good one, to make room; none if none is good."""
    found = list(steps(save_dir).values())
    good = next((path for path in reversed(found) if problem(path) is None), None)
    for path in found:
        if good is not None and path != good:
            with suppress(OSError):  # of a disk that takes no writes at all
                _delete(path)


def remove_old(save_dir: str | os.PathLike[str], keep: int, *, written: int) -> None:
    """Delete all checkpoints but the last `keep` finished ones.

    Args:
        save_dir: Where they are.
        keep: How many stay, at least 1.
        written: The step of the one that was just written, which is one of them.
    """
    found = steps(save_dir)
    others = [step for step, path in found.items() if step != written and finished(path)]
    stay = {written, *others[len(others) - min(keep - 1, len(others)) :]}
    for step, path in found.items():
        if step not in stay:
            with suppress(OSError):  # of a folder that somebody has protected: it stays
                _delete(path)


def remove_after(save_dir: str | os.PathLike[str], step: int) -> None:
    """Delete the checkpoints of later steps than `step`: they are of what a run has been taken back from."""
    for number, path in steps(save_dir).items():
        if number > step:
            _delete(path)


def _delete(folder: Path) -> None:
    remove(folder)  # what is deleted halfway must not look good
    shutil.rmtree(folder, ignore_errors=True)
