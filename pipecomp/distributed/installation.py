"""This installation as files for another machine: pipecomp itself, and the packages that it needs."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pipecomp
from pipecomp.errors import ConfigError, require
from pipecomp.utils.files import atomic_write_text, hash_file

NAME = "pipecomp"
_FOLDER = Path(pipecomp.__file__).parent
_OUTSIDE = ("stages", "buffers", "kernels")  # beside the package in a checkout
_RECIPES = "recipe_files"  # in an installed package; recipes/ beside the package in a checkout
_OPTIONAL = ("lora", "chat", "qlora", "tensorboard", "trackio")  # extras whose packages go along if they are here
_SUFFIXES = (".py", ".cpp", ".h", ".css", ".js", ".j2", ".typed")
_RECIPE_SUFFIXES = (".py", ".json", ".md")
_CHUNK = 1 << 20
_HINT = "Or let the machine take its packages from an index: --packages index"


@dataclass(frozen=True)
class SourceFile:
    """A file to copy.

    Attributes:
        path: Where it goes, relative to its tree, with "/".
        source: The file here.
        data: Its content, if there is no file here.
    """

    path: str
    source: Path | None = None
    data: bytes = b""

    @cached_property
    def size(self) -> int:
        """Bytes."""
        return len(self.data) if self.source is None else self.source.stat().st_size

    @cached_property
    def mode(self) -> int:
        """Permission bits."""
        return 0o644 if self.source is None else self.source.stat().st_mode & 0o777

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.data).hexdigest() if self.source is None else hash_file(self.source)


def hash_all(files: Iterable[SourceFile]) -> None:
    """Compute the digests of files, on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda file: file.digest, files):
            pass


class DigestCache:
    """Digests of large files of earlier starts, by path, size and time of change.

    Args:
        path: The file that keeps them; one that cannot be read or written is ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new = False
        try:
            self._known = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            self._known = {}

    def fill(self, files: Sequence[SourceFile]) -> None:
        """Set the digests of files: known ones, or computed ones."""
        for file in files:
            if file.source is None:
                continue
            info = file.source.stat()
            key, seen = str(file.source.resolve()), [info.st_size, info.st_mtime_ns, info.st_ino]
            known = self._known.get(key)
            if isinstance(known, list) and known[:3] == seen:
                file.__dict__["digest"] = str(known[3])  # the value of the cached property
            elif info.st_size >= _CHUNK:
                self._known[key], self._new = [*seen, file.digest], True
        if self._new:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write_text(self._path, json.dumps(self._known))
            except OSError:
                pass


# -- pipecomp itself


def package_files(*, native: bool) -> list[SourceFile]:
    """Return pipecomp as a wheel has it: modules, metadata, recipes and, if `native`, the compiled kernels.

    It works from a checkout, with or without symbolic links, and from an installed package.
    """
    found = _walk(_FOLDER, NAME, _SUFFIXES, leave_out=(*_OUTSIDE, _RECIPES))
    for name in _OUTSIDE:
        inside = _FOLDER / name
        found += _walk(inside if inside.is_dir() else _FOLDER.parent / name, f"{NAME}/{name}", _SUFFIXES)
    kernels = _FOLDER / "kernels" if (_FOLDER / "kernels").is_dir() else _FOLDER.parent / "kernels"
    if native:
        # A build by hand may be beside that of the installation; Python prefers the longer name.
        built = sorted(kernels.glob("_native*.so"), key=lambda path: path.name == "_native.so")
        found += [SourceFile(f"{NAME}/kernels/{path.name}", path) for path in built[:1]]
    recipes = _FOLDER / _RECIPES if (_FOLDER / _RECIPES).is_dir() else _FOLDER.parent / "recipes"
    found += _walk(recipes, f"{NAME}/{_RECIPES}", _RECIPE_SUFFIXES)
    return [*found, *_metadata(found)]


def _walk(folder: Path, name: str, suffixes: Sequence[str], leave_out: Sequence[str] = ()) -> list[SourceFile]:
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = parts[0] in leave_out or any(part == "__pycache__" or part.startswith(".") for part in parts)
        if not hidden and path.suffix in suffixes and path.is_file():
            found.append(SourceFile(f"{name}/{'/'.join(parts)}", path))
    return found


def _metadata(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The wheel's .dist-info: packages are compared by its version, and commands found by its entry points."""
    info = f"{NAME}-{pipecomp.__version__}.dist-info"
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in own_requirements())
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {pipecomp.__version__}\n{requires}",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        "entry_points.txt": f"[console_scripts]\n{NAME} = pipecomp.cli:app\n",
    }
    made = [SourceFile(f"{info}/{name}", data=text.encode()) for name, text in texts.items()]
    lines = []
    for file in (*files, *made):
        digest = base64.urlsafe_b64encode(bytes.fromhex(file.digest)).rstrip(b"=").decode()
        lines.append(f"{file.path},sha256={digest},{file.size}\n")
    record = f"{info}/RECORD"
    return [*made, SourceFile(record, data="".join([*lines, f"{record},,\n"]).encode())]


def own_requirements() -> list[str]:
    """Return the requirements of this checkout or package, those of its extras with their marker."""
    project = _FOLDER.parent / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if table.get("name") == NAME:
            found = list(table["dependencies"])
            for extra, requirements in table.get("optional-dependencies", {}).items():
                for text in requirements:
                    word, semicolon, marker = text.partition(";")
                    condition = f"extra == '{extra}'" + (f" and ({marker.strip()})" if semicolon else "")
                    found.append(f"{word.strip()}; {condition}")
            return found
    return importlib.metadata.distribution(NAME).requires or []


# -- the packages that it needs


def needed_distributions() -> dict[str, importlib.metadata.Distribution]:
    """Return the installed packages that pipecomp needs, directly or not, by name.

    Packages of extras go along if they are installed here.

    Raises:
        ConfigError: One is missing here.
    """
    found: dict[str, importlib.metadata.Distribution] = {}
    done: set[tuple[str, str]] = set()
    queue: list[tuple[str, str, bool]] = [(text, "", False) for text in own_requirements()]
    queue += [(text, extra, True) for extra in _OPTIONAL for text in own_requirements()]
    while queue:
        text, extra, optional = queue.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            distribution = found.get(name) or importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            require(optional, "packages", name, f"an installed package ({text})", "Install pipecomp here once more")
            continue
        found[name] = distribution
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in done:
                done.add((name, wanted))
                queue += [(inner, wanted, optional or bool(wanted)) for inner in distribution.requires or []]
    return dict(sorted(found.items()))


def distribution_files(distributions: Iterable[importlib.metadata.Distribution]) -> list[SourceFile]:
    """Return the files of installed packages, relative to site-packages; scripts and compiled bytecode are left out.

    Raises:
        ConfigError: A package has no list of its files, or is installed in editable form.
    """
    found: dict[str, SourceFile] = {}
    for distribution in distributions:
        name = distribution.metadata["Name"]
        editable = '"editable":true' in (distribution.read_text("direct_url.json") or "").replace(" ", "")
        require(not editable, "packages", name, "an ordinary installation here, not an editable one", _HINT)
        if distribution.files is None:
            raise ConfigError("packages", name, "a package that lists its files (RECORD)", _HINT)
        for file in distribution.files:
            if ".." in file.parts or "__pycache__" in file.parts or file.suffix == ".pyc" or file.is_absolute():
                continue
            source = Path(str(file.locate()))
            if source.is_file():
                found[file.as_posix()] = SourceFile(file.as_posix(), source)
    return list(found.values())


@dataclass(frozen=True)
class Installation:
    """Python, packages and files of this machine, as others get them.

    Attributes:
        minor: Version of Python, two numbers.
        soabi: Python's and the platform's binary interface.
        machine: Processor type.
        libc: Version of glibc; () for another C library.
        distributions: Packages that pipecomp needs.
    """

    minor: tuple[int, int] = field(default_factory=lambda: sys.version_info[:2])
    soabi: str = field(default_factory=lambda: str(sysconfig.get_config_var("SOABI")))
    machine: str = field(default_factory=platform.machine)
    libc: tuple[int, ...] = field(default_factory=lambda: parse_version(" ".join(platform.libc_ver())))
    distributions: dict[str, importlib.metadata.Distribution] = field(default_factory=needed_distributions)

    @staticmethod
    def version(name: str) -> str:
        """Return the version of an installed package."""
        return importlib.metadata.version(name)

    @cached_property
    def pins(self) -> dict[str, str]:
        """Versions of the packages."""
        return {name: distribution.version for name, distribution in self.distributions.items()}

    @cached_property
    def environment_files(self) -> list[SourceFile]:
        """Files of the packages."""
        return distribution_files(self.distributions.values())

    @cached_property
    def records(self) -> str:
        """Digest of the lists of the packages' files, which have a digest of each."""
        lists = [distribution.read_text("RECORD") or "" for distribution in self.distributions.values()]
        return hashlib.sha256("\0".join(lists).encode()).hexdigest()


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of glibc's version in "glibc 2.36"; () for another library."""
    words = text.split()
    numbers = words[1].split(".") if len(words) == 2 and words[0] == "glibc" else []
    return tuple(int(number) for number in numbers[:2] if number.isdecimal())


def name_of(*parts: object) -> str:
    """Return a name for what these values describe."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
