"""Program of a machine that a launcher sets up over ssh: receives files, makes an environment, checks and removes them.

`pipecomp.distributed.bring_up` sends its source; it imports nothing beside Python's own modules. All that it writes is
below one folder, the root:

environments/NAME    a virtual environment with the packages that pipecomp needs
packages/NAME        pipecomp itself, in PYTHONPATH of the ranks
work/NAME            working directory of the ranks: data, models, and what runs write
huggingface          models of the hub
python               Pythons that uv brings
cache                what pip and uv download, until an environment is complete, and caches of the ranks' packages
files/XX/DIGEST      content of every file, by its SHA-256; the others are hard links to it
state.json           what is complete

The time of change of an environment's or package's folder is that of its last use.

The launcher sends a request as one line of JSON. The answers are lines of JSON. After the first, which lists the files
that are missing, the launcher sends their contents in that order as one zlib stream, each from the listed offset.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO

FORMAT = 1
READY = "pipecomp peer ready"  # the line before the first answer; a login may print others before it
STATE_LINE = "pipecomp state "  # begins the line of `check`
STATE, LOCK, AGENT = "state.json", "lock", "agent.py"
ENVIRONMENTS, PACKAGES, WORK, HUB, FILES = "environments", "packages", "work", "huggingface", "files"
PYTHONS, CACHE = "python", "cache"
_DOWNLOADS = {"PIP_CACHE_DIR": f"{CACHE}/pip", "UV_CACHE_DIR": f"{CACHE}/uv"}
PLACES = (ENVIRONMENTS, PACKAGES, WORK, HUB)
UNFINISHED = ".part"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20
_UNUSED_S, _RECENT_S = 30 * 86400.0, 3600.0  # after which what is unused goes; the shorter one where room is short
_TAIL = 600  # characters of a failed command's output


class AgentError(Exception):
    """The request cannot be carried out."""


# -- files


def safe_path(root: Path, relative: str) -> Path:
    """Return the path of a file below the root. Raises AgentError for one that leaves it, also through a link."""
    parts = relative.split("/")
    bad = not relative or "\0" in relative or len(relative) > 4000 or any(part in ("", ".", "..") for part in parts)
    path = root.joinpath(*parts) if not bad else root
    folder = os.path.realpath(path.parent)
    if bad or not f"{folder}/".startswith(f"{os.path.realpath(root)}/"):
        raise AgentError(f"a file name that leaves the folder: {relative[:200]!r}")
    return path


def content(root: Path, digest: str) -> Path:
    """Return where the content of this digest is. Raises AgentError for text that is no digest."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise AgentError(f"no digest: {str(digest)[:100]!r}")
    return root / FILES / digest[:2] / digest


def missing_contents(root: Path, sizes: dict[str, int]) -> list[tuple[str, int]]:
    """Return the digests without content, and how many bytes of each an interrupted copy has left."""
    found = []
    for digest, size in sizes.items():
        path = content(root, digest)
        try:
            if path.stat().st_size == size:
                continue
            path.unlink()
        except FileNotFoundError:
            pass
        part = path.with_name(digest + UNFINISHED)
        have = part.stat().st_size if part.is_file() else 0
        found.append((digest, have if have <= size else 0))
    return found


class InflateReader:
    """Reads a zlib stream of several files one after another."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._inflate, self._rest = stream, zlib.decompressobj(), b""

    def read(self, most: int) -> bytes:
        """Return 1 to `most` bytes. Raises AgentError at the end of the stream."""
        while True:
            data = self._inflate.decompress(self._rest, most)  # also without input it may have output left
            self._rest = self._inflate.unconsumed_tail
            if data:
                return data
            if not self._rest:
                self._rest = self._stream.read1(_CHUNK)  # type: ignore[attr-defined]
                if not self._rest:
                    raise AgentError("the connection ended; the same command goes on from here")


def receive(root: Path, wanted: list[tuple[str, int]], sizes: dict[str, int], stream: BinaryIO) -> None:
    """Receive contents. Each appears under its name when all of it has arrived and has its digest."""
    reader = InflateReader(stream)
    for digest, offset in wanted:
        path = content(root, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        part, hashed = path.with_name(digest + UNFINISHED), hashlib.sha256()
        with open(part, "ab") as file:
            file.truncate(offset)
            if offset:
                with open(part, "rb") as before:
                    while chunk := before.read(_CHUNK):
                        hashed.update(chunk)
            left = sizes[digest] - offset
            while left:
                data = reader.read(min(left, _CHUNK))
                file.write(data)
                hashed.update(data)
                left -= len(data)
            if sizes[digest] > 16 * _CHUNK:  # a file that would take long to copy again
                file.flush()
                os.fsync(file.fileno())
        if hashed.hexdigest() != digest:
            part.unlink()
            raise AgentError(f"a file of {sizes[digest]} bytes arrived damaged; the same command copies it again")
        os.replace(part, path)


def link_tree(root: Path, place: str, entries: list[list[Any]]) -> dict[str, list[Any]]:
    """Give files of `entries`, [path, digest, mode], their names below a place.

    Returns [digest, size, time of change in ns] by path.
    """
    folder, made = safe_path(root, place), {}
    folder.mkdir(parents=True, exist_ok=True)
    for relative, digest, mode in entries:
        path, source = safe_path(folder, relative), content(root, digest)
        if not _same_file(path, source):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name[:200] + UNFINISHED)
            part.unlink(missing_ok=True)
            try:
                os.link(source, part)
            except OSError:  # a file system without hard links, or too many of them
                shutil.copyfile(source, part)
            os.chmod(part, 0o755 if mode & stat.S_IXUSR else 0o644)
            os.replace(part, path)
            part.unlink(missing_ok=True)  # where both are one file, nothing is replaced
        seen = path.stat()
        made[relative] = [digest, seen.st_size, seen.st_mtime_ns]
    return made


def _same_file(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


# -- what is complete


def read_state(root: Path) -> dict[str, Any]:
    """Read state.json; one that is missing, damaged or of another version counts as empty."""
    empty: dict[str, Any] = {"format": FORMAT, "index": False, ENVIRONMENTS: [], PACKAGES: [], "trees": {}}
    try:
        state = json.loads((root / STATE).read_text(encoding="utf-8"))
        kinds = [type(state[name]) for name in empty]
        return state if kinds == [type(value) for value in empty.values()] and state["format"] == FORMAT else empty
    except (OSError, ValueError, KeyError, TypeError):
        return empty


def write_state(root: Path, state: dict[str, Any]) -> None:
    """Replace state.json."""
    part = root / (STATE + UNFINISHED)
    part.write_text(json.dumps(state), encoding="utf-8")
    os.replace(part, root / STATE)


def check(root: Path) -> dict[str, Any]:
    """Return what is complete: environments, packages, and the digest of every file in the trees that is unchanged."""
    state = read_state(root)
    trees: dict[str, dict[str, str]] = {}
    for place, files in state["trees"].items():
        for relative, (digest, size, changed_ns) in files.items():
            try:
                seen = safe_path(safe_path(root, place), relative).stat()
            except (OSError, AgentError):
                continue
            if (seen.st_size, seen.st_mtime_ns) == (size, changed_ns):
                trees.setdefault(place, {})[relative] = digest
    environments = [name for name in state[ENVIRONMENTS] if (root / ENVIRONMENTS / name / "bin" / "python").exists()]
    packages = [name for name in state[PACKAGES] if (root / PACKAGES / name / "pipecomp" / "__init__.py").is_file()]
    return {**state, ENVIRONMENTS: environments, PACKAGES: packages, "trees": trees}


# -- making


@contextlib.contextmanager
def locked_root(root: Path) -> Iterator[None]:
    """Create the root and lock it. Raises AgentError if it has files of others, or another launcher works on it."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (root / LOCK).exists() and any(path.name != PYTHONS for path in root.iterdir()):
        raise AgentError(f"{root} has other files: give an empty folder with --remote-folder")
    with open(root / LOCK, "ab") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AgentError(f"another command sets up or removes {root} now; wait for its end") from None
        yield


def provide(request: dict[str, Any], stream: BinaryIO, reply: Any) -> None:
    """Receive what is missing, and make the environment and the trees of a request."""
    root = Path(request["root"])
    with locked_root(root):
        (root / AGENT).write_text(request["agent"], encoding="utf-8")
        sizes = {digest: int(size) for digest, size in request["files"].items()}
        wanted = missing_contents(root, sizes)
        needed = sum(sizes[digest] - offset for digest, offset in wanted) + int(request["room"])
        environment = request.get("environment")
        kept = {f"{PACKAGES}/{request['package']}"}
        kept |= set() if environment is None else {f"{ENVIRONMENTS}/{environment['name']}"}
        prune(root, kept, sizes, needed, reply)
        free = shutil.disk_usage(root).free
        if needed > free:
            raise AgentError(f"{needed >> 20} MiB are needed in {root}, and {free >> 20} MiB are free")
        reply({"wanted": wanted})
        receive(root, wanted, sizes, stream)
        state = read_state(root)
        if environment is not None:
            name = environment["name"]
            folder = safe_path(root, f"{ENVIRONMENTS}/{name}")
            if name not in state[ENVIRONMENTS]:
                shutil.rmtree(folder, ignore_errors=True)
                reply({"say": f"making {folder}"})
                make_environment(folder)
                site = next((folder / "lib").glob("python*")) / "site-packages"
                link_tree(root, site.relative_to(root).as_posix(), environment["entries"])
                if environment["requirements"]:
                    install(folder, environment, reply)
                state[ENVIRONMENTS].append(name)
        for place, entries in request["trees"].items():
            made = link_tree(root, place, entries)
            if place.startswith(f"{PACKAGES}/"):
                state[PACKAGES] = sorted({*state[PACKAGES], place.partition("/")[2]})
            else:
                state["trees"][place] = {**state["trees"].get(place, {}), **made}
        state["index"] = bool(request["index"])
        if environment is not None:
            finish(root, environment, request["package"], reply)
        write_state(root, state)
        for place in kept:
            note_use(root / place)
        for place in _DOWNLOADS.values():
            shutil.rmtree(root / place, ignore_errors=True)


def note_use(folder: Path) -> None:
    """Note that an environment or a copy of pipecomp is used now, in the folder's time of change."""
    if folder.parent.name in (ENVIRONMENTS, PACKAGES) and (folder.parents[1] / STATE).is_file():
        with contextlib.suppress(OSError):
            os.utime(folder)


def prune(root: Path, kept: set[str], wanted: Container[str], needed: int, reply: Any) -> None:
    """Remove environments and copies of pipecomp that are not used, and then contents that have no other name.

    Those unused for 30 days go; while there is no room, also those unused for an hour, the oldest first.

    Args:
        root: The root, locked.
        kept: Places that stay.
        wanted: Digests of contents that stay.
        needed: Bytes for which there must be room.
        reply: Takes a message for people.
    """
    now, found = time.time(), []
    for kind in (ENVIRONMENTS, PACKAGES):
        for path in (root / kind).glob("*"):
            if f"{kind}/{path.name}" not in kept:
                found.append((path.stat().st_mtime, kind, path))
    for used, kind, path in sorted(found):
        is_short = shutil.disk_usage(root).free < needed
        if now - used < (_RECENT_S if is_short else _UNUSED_S):
            continue
        if users(path if kind == ENVIRONMENTS else root):  # a run with a copy of pipecomp has an environment, too
            continue
        reply({"say": f"removing {path}, unused for {int((now - used) // 86400)} days"})
        state = read_state(root)
        state[kind] = [name for name in state[kind] if name != path.name]
        write_state(root, state)
        shutil.rmtree(path, ignore_errors=True)
        _remove_contents(root, wanted, now - (_RECENT_S if is_short else _UNUSED_S))
    is_short = shutil.disk_usage(root).free < needed
    _remove_contents(root, wanted, now - (_RECENT_S if is_short else _UNUSED_S))


def _remove_contents(root: Path, wanted: Container[str], before: float) -> None:
    """Remove contents without another name that were copied before a time."""
    for path in (root / FILES).glob("??/*"):
        seen = path.stat()
        if seen.st_nlink == 1 and seen.st_mtime < before and path.name.removesuffix(UNFINISHED) not in wanted:
            path.unlink()


def make_environment(folder: Path) -> None:
    """Make a virtual environment of this Python, without pip: Debian's Python lacks the module that installs it."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "bin").mkdir(parents=True)
    (folder / "lib" / version / "site-packages").mkdir(parents=True)
    python = os.path.realpath(sys.executable)
    for name in ("python", "python3", version):
        (folder / "bin" / name).symlink_to(python)
    home = f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n"
    (folder / "pyvenv.cfg").write_text(f"{home}version = {'.'.join(map(str, sys.version_info[:3]))}\n")


def install(folder: Path, environment: dict[str, Any], reply: Any) -> None:
    """Install pinned packages from an index: with uv, and with this Python's pip if uv is missing or fails."""
    python, root = str(folder / "bin" / "python"), folder.parents[1]
    variables = {**os.environ, **environment["variables"]}
    variables |= {name: str(root / place) for name, place in _DOWNLOADS.items()}
    tools = {"uv": [environment["uv"], "pip", "install", "--python", python]} if environment["uv"] else {}
    if not tools or importlib.util.find_spec("pip"):
        options = ["--disable-pip-version-check", "--no-input"]
        tools["pip"] = [sys.executable, "-m", "pip", "--python", python, "install", *options]
    for step in environment["requirements"]:
        problem = ""
        for (text, requirements), tool in itertools.product(step, tools):  # the first one that succeeds
            reply({"say": f"installing {text} with {tool}"})
            problem = run([*tools[tool], *requirements], variables)
            if not problem:
                break
        if problem:
            raise AgentError(f"the packages cannot be installed: {problem}")


def finish(root: Path, environment: dict[str, Any], package: str, reply: Any) -> None:
    """Compile the kernels if asked to, import the packages, and write a command for people."""
    python, path = root / ENVIRONMENTS / environment["name"] / "bin" / "python", root / PACKAGES / package
    variables = {**os.environ, **environment["variables"], "PYTHONPATH": str(path), "PYTHONNOUSERSITE": "1"}
    if environment["compile"] and not list((path / "pipecomp" / "kernels").glob("_native*.so")):
        reply({"say": "compiling the kernels"})
        problem = run([str(python), "-P", "-m", "pipecomp.kernels.build"], variables)
        if problem:
            reply({"say": f"without compiled kernels, plain torch does their work more slowly: {problem}"})
    reply({"say": "importing the packages for the first time"})
    problem = run([str(python), "-P", "-c", environment["test"]], variables)
    if problem:
        raise AgentError(f"the packages cannot be imported: {problem}")
    words = f"PYTHONPATH='{path}' PYTHONNOUSERSITE=1 exec '{python}' -P -m pipecomp.cli \"$@\""
    (root / "pipecomp").write_text(f"#!/bin/sh\n{words}\n")
    (root / "pipecomp").chmod(0o755)


def run(words: list[str], variables: dict[str, str]) -> str:
    """Run a command. Returns "", or the end of its output if it fails."""
    try:
        done = subprocess.run(
            words, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        return f"{words[0]}: {error.strerror}"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-_TAIL:] or f"{words[0]}: exit status {done.returncode}"


# -- listing and removing


def results(root: Path) -> list[Path]:
    """Return the files in working directories that runs have written."""
    state, found = read_state(root), []
    for path in sorted((root / WORK).rglob("*")):
        place = "/".join(path.relative_to(root).parts[:2])
        relative = "/".join(path.relative_to(root).parts[2:])
        if path.is_file() and relative not in state["trees"].get(place, {}):
            found.append(path)
    return found


def measure(root: Path) -> dict[str, int]:
    """Return bytes on the disk: all of them, and those that runs have written."""
    seen, total = set(), 0
    for folder, _, names in os.walk(root):
        for name in names:
            info = os.lstat(os.path.join(folder, name))
            if info.st_ino not in seen:
                seen.add(info.st_ino)
                total += info.st_blocks * 512
    written = results(root)
    return {"bytes": total, "results": sum(path.stat().st_size for path in written), "files": len(written)}


def users(root: Path) -> list[int]:
    """Return the processes that run a program of the root, or in it."""
    found, inside = [], f"{os.path.realpath(root)}/"
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            program = os.fsdecode(Path("/proc", name, "cmdline").read_bytes().partition(b"\0")[0])
            place = os.readlink(f"/proc/{name}/cwd")
            # An environment's python is a link to one elsewhere, so only its folder is resolved.
            folder = os.path.realpath(os.path.join(place, os.path.dirname(program)))
            if f"{place}/".startswith(inside) or f"{folder}/".startswith(inside):
                found.append(int(name))
    return found


def remove(root: Path, *, keep_results: bool) -> dict[str, int]:
    """Remove the root; with `keep_results` all but what runs have written. Returns as `measure`, of what is left."""
    if not (root / LOCK).is_file() or not (root / FILES).is_dir():
        raise AgentError(f"{root} is not a folder of pipecomp's")
    with locked_root(root):
        busy = users(root)
        if busy:
            raise AgentError(f"processes use {root}: {', '.join(map(str, busy[:5]))}; end the run first")
        kept = set(results(root)) if keep_results else set()
        for place in (ENVIRONMENTS, PACKAGES, HUB, FILES, PYTHONS, CACHE):
            shutil.rmtree(root / place, ignore_errors=True)
        for folder, _, names in os.walk(root / WORK, topdown=False):
            for name in names:
                if Path(folder, name) not in kept:
                    os.unlink(os.path.join(folder, name))
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        for name in (STATE, AGENT, "pipecomp"):
            (root / name).unlink(missing_ok=True)
        if kept:
            (root / FILES).mkdir(exist_ok=True)
            return measure(root)
        shutil.rmtree(root)
    return {"bytes": 0, "results": 0, "files": 0}


# -- conversation


def main() -> None:
    """Answer one request of standard input."""

    def reply(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    try:
        request = json.loads(sys.stdin.buffer.readline())
        kind, root = request["do"], Path.home() / request["root"]
        if kind == "provide":
            provide(request, sys.stdin.buffer, reply)
            reply({"done": {}})
        elif kind == "measure":
            reply({"done": measure(root) if (root / LOCK).is_file() else {}})
        else:
            reply({"done": remove(root, keep_results=request["keep_results"]) if root.exists() else {}})
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        reply({"error": f"{error.strerror or error}{where}"})
    except (AgentError, zlib.error, KeyError, ValueError, TypeError, AttributeError) as error:
        reply({"error": str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        print(STATE_LINE + json.dumps(check(Path(sys.argv[2]))))
    else:
        main()
