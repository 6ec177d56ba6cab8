"""Comparing the files that a recipe's arguments name, before minutes are spent: every machine must have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pipecomp.distributed.consistency import AllRanks
from pipecomp.errors import DataError

# Arguments of recipes that name what a run reads; several words may follow one.
_READ = (
    *("--deepspeed_config", "--deepspeed-config", "--model", "--tokenizer"),
    *("--train-file", "--eval-file", "--start", "--adapter"),
)
_MOST_NAMED = 5
_MISSING = "missing"
_CHUNK = 16 << 20


def compare_files(ranks: AllRanks, arguments: Sequence[str]) -> None:
    """Compare by content what the arguments name and a rank has; every rank must call this.

    Args:
        ranks: The round that this belongs to.
        arguments: Of a recipe. What is a file on no rank is none: a name on the hub, or "train:2048".

    Raises:
        DataError: On every rank, naming files and ranks, if one has another file or none.
    """
    names = named(arguments)
    told: list[dict[str, str]] = ranks.all_gather_object({name: digest(Path(name)) for name in names})
    wrong = []
    for name in sorted(set().union(*told)):
        found = [of.get(name, _MISSING) for of in told]
        if len(set(found)) > 1:
            lack = [str(rank) for rank, value in enumerate(found) if value == _MISSING]
            where = f"is missing on rank {', '.join(lack)}" if lack else "is not the same on all ranks"
            wrong.append(f"{name} {where}")
    if wrong:
        ranks.leave()
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise DataError(f"the machines have different files: {'; '.join(wrong[:_MOST_NAMED])}{more}")


def named(arguments: Sequence[str]) -> list[str]:
    """List the values of arguments that name what a run reads."""
    found, reads = [], False
    for word in arguments:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            reads = flag in _READ
            if reads and value:
                found.append(value)
        elif reads:
            found.append(word)
    return found


def digest(path: Path) -> str:
    """Hash a file, or all files of a folder with their names; "missing" where there is neither."""
    if path.is_file():
        return _hash_file(path)
    if not path.is_dir():
        return _MISSING
    files = sorted(p for p in path.rglob("*") if p.is_file())
    text = "".join(f"{file.relative_to(path)} {_hash_file(file)}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_file(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            found.update(part)
    return found.hexdigest()
