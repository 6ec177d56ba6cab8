"""The files of the recipes, which an installation holds too, and a copy of a recipe's that stands on its own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pipecomp
from pipecomp.errors import ConfigError, require, writable
from pipecomp.utils.files import write_whole

_HERE = Path(pipecomp.__file__).parent
_README = "README.md"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)[^)]*\)")  # links to pages that the copy does not have
_SHARED = re.compile(r"recipes/((?:\w+/)?\w+\.(?:py|json))")  # files that its commands need of others


def recipes_folder() -> Path:
    """Find the recipes: in an installed package, or beside it in a checkout. Raises ConfigError if they are gone."""
    for folder in (_HERE / "recipe_files", _HERE.parent / "recipes"):
        if (folder / _README).is_file():
            return folder
    raise ConfigError("recipe", str(_HERE), "an installation with pipecomp/recipe_files: install it again")


def recipe_names() -> dict[str, str]:
    """List the recipes by name, with the first line of each one's README."""
    readmes = sorted(recipes_folder().glob(f"*/{_README}"))
    return {path.parent.name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in readmes}


def lay_out(recipe: str, folder: Path) -> list[Path]:
    """Copy a recipe's files, with a README whose commands are those of the new folder.

    Args:
        recipe: One of `recipe_names`.
        folder: A new one, or an empty one.

    Returns:
        The files.

    Raises:
        ConfigError: There is no such recipe, or the folder holds something or cannot be written.
    """
    require(recipe in recipe_names(), "recipe", recipe, ", ".join(recipe_names()))
    source = recipes_folder() / recipe
    page = (source / _README).read_text(encoding="utf-8")
    page = _OUTSIDE.sub(r"\1", page).replace(f"recipes/{recipe}/", "")
    files = {path.name: path for path in source.iterdir() if path.is_file() and path.name != _README}
    files |= {name: recipes_folder() / name for name in _SHARED.findall(page)}
    with writable("folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        require(
            not any(folder.iterdir()), "folder", str(folder), "a new folder, or an empty one: nothing is overwritten"
        )
        for name, path in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        page = _SHARED.sub(r"\1", page)
        write_whole(folder / _README, re.sub(r"^make setup .*\n\n?", "", page, flags=re.MULTILINE))
    return sorted(folder / name for name in (*files, _README))
