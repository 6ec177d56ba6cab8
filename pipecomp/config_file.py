"""JSON files with settings, read with errors that name the setting which gave the path."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pipecomp.errors import ConfigError


def read_json_object(key: str, path: str | os.PathLike) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError with `key` and the path: not readable, not JSON, not an object."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(key, str(path), f"a file that can be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(key, str(path), f"valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(key, str(path), "a JSON object")
    return found
