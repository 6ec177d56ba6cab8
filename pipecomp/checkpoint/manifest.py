"""Manifests, which tell complete checkpoints from unfinished and damaged ones.

A checkpoint consists of many files of many ranks, and a run that is killed while saving leaves some of them. When all
ranks have written, one rank of each machine lists every file that it sees, with size and CRC-32, in a manifest that is
written atomically. A checkpoint is valid if it has a manifest and every listed file matches.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pipecomp.utils.files import UNFINISHED, atomic_write_text, file_crc

NOT_FINISHED = "it was not finished"
_MANIFEST = "pipecomp-seal-{}.json"
_MANIFESTS = "pipecomp-seal-*.json"
_WRITTEN = ("*_states.pt", "pipecomp-*")  # by DeepSpeed, and beside it


def messages_copy(folder: Path, number: int) -> Path:
    """Path of the copy of a rank's message store in a checkpoint."""
    return folder / f"pipecomp-messages-rank-{number}"


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
