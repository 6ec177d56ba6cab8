"""What a store on disk says about itself: its format, its run, and what each link's activations depend on.

A cached activation is only good for the run that made it: another model, cut or number of bits has other activations,
and the other endpoint does not hold it. So a store is refused where any of that differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipecomp.buffers.lmdb_file import ValueFile
from pipecomp.errors import ConfigError, StoreError

FORMAT_KEY = b"format"
FORMAT = b"1"
RUN_KEY = b"run"
_LINK = b"link:"


def link_key(name: str) -> bytes:
    """Name the remark in which a file keeps a link's settings."""
    return _LINK + name.encode()


def configuration(settings: Mapping[str, Any]) -> str:
    """Hash, in short, what a link's activations depend on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


class Remarks(NamedTuple):
    """What a file says about itself, as far as it is whole.

    links: whose settings, and whose file's format and run, are whole. problems: by link, None: of the file.
    """

    whole: dict[bytes, bytes]
    links: list[str]
    problems: dict[str | None, str]


def read_remarks(file: ValueFile) -> Remarks:
    """Read all of it; a damaged remark is no error here."""
    names = file.table_names()
    whole: dict[bytes, bytes] = {}
    problems: dict[str | None, str] = {}
    for name, key in ((None, FORMAT_KEY), (None, RUN_KEY), *((name, link_key(name)) for name in names)):
        try:
            value = file.meta(key)
        except StoreError as error:
            problems[name] = str(error)
        else:
            if value is not None:
                whole[key] = value
            elif name is not None:
                problems[name] = f"{file.path}: {name} has no settings: its name, or theirs, is damaged"
    return Remarks(whole, [] if None in problems else [name for name in names if name not in problems], problems)


def read_run(file: ValueFile) -> str | None:
    """Read the id of the run that a store belongs to, None if no run has used it."""
    found = file.meta(RUN_KEY)
    return None if found is None else found.decode(errors="replace")


def check_format(file: ValueFile) -> None:
    """Mark a new file; StoreError for one of another format."""
    found = file.meta(FORMAT_KEY)
    if found is None:
        file.set_meta(FORMAT_KEY, FORMAT)
    elif found != FORMAT:
        raise StoreError(
            f"{file.path}: message store of format {found.decode(errors='replace')}, this program reads "
            f"{FORMAT.decode()}: give another store.path, or remove it with `pipecomp store prune --everything`"
        )


def check_settings(file: ValueFile, name: str, settings: Mapping[str, Any]) -> None:
    """Keep a new link's settings; StoreError if there are others, ConfigError if they are not JSON values."""
    try:
        mine = json.loads(json.dumps(settings))
    except (TypeError, ValueError) as error:
        raise ConfigError("settings", dict(settings), f"JSON values: {error}") from error
    if file.meta(link_key(name)) is None:
        file.set_meta(link_key(name), json.dumps(mine, sort_keys=True).encode())
    elif differs := other_settings(file, name, mine):
        raise StoreError(
            f"{file.path}: {name} was stored with other settings ({differs}). Keep them, give "
            f"another store.path, or remove what is stored with `pipecomp store prune "
            f"{file.path} --link {name}`"
        )


def other_settings(file: ValueFile, name: str, settings: Mapping[str, Any]) -> str:
    """Say in which settings a link's activations were stored otherwise; nothing if in none, or there are none."""
    found = file.meta(link_key(name))
    if found is None:
        return ""
    mine, theirs = json.loads(json.dumps(settings)), json.loads(found)
    return "; ".join(
        f"{k}: {mine.get(k, 'not set')!r}, stored with {theirs.get(k, 'not set')!r}"
        for k in sorted({*mine, *theirs})
        if mine.get(k) != theirs.get(k) or (k in mine) != (k in theirs)
    )
