"""Machines without pipecomp brought to a run over ssh: asked what they have, decided, and given what they lack.

A machine (`pipecomp.distributed.peer_question`) on which the launcher's own Python imports pipecomp, with the same
folder and files, is left as it is. The others get an environment with the versions of this installation, pipecomp
itself, and the files of the run, all below one folder, in a session (`pipecomp.distributed.peer_session`) with the
program that receives them (`pipecomp.distributed.peer_agent`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipecomp.distributed import peer_agent
from pipecomp.distributed.installation import (
    NAME,
    Installation,
    SourceFile,
    hash_all,
    name_of,
    package_files,
)
from pipecomp.distributed.peer_question import PeerAnswer, PeerPython, ask, index_variables
from pipecomp.distributed.peer_session import PeerSession, agent_source, open_session
from pipecomp.errors import ConfigError, foreign_text, require
from pipecomp.utils.files import atomic_write_text
from pipecomp.utils.units import format_count, format_size

FOLDER = ".pipecomp"  # in the home of the other machine, and of this one
PACKAGES = ("auto", "index", "here")
TORCH_INDEX = "TORCH_INDEX_URL"  # of CPU wheels, as for `make setup`
OLDEST = (3, 11)
_BOOK = "peers.json"  # in FOLDER of this machine: the folder on each machine that was set up
_DIGESTS = "digests.json"  # beside it: of the files that were copied
_CHUNK = 1 << 20
_PROGRESS_S = 5.0
_INDEX_BYTES = {False: 3 << 30, True: 12 << 30}  # free space for packages of an index, without and with CUDA
_OWN_PACKAGES = re.compile(r"(nvidia|cuda)-|triton$")  # torch's wheel for the machine names its own
_TEST = "import torch, deepspeed, transformers, datasets, pipecomp.recipes.planned"


# -- the decision


@dataclass(frozen=True)
class InputFiles:
    """Files of a run.

    Attributes:
        given: As the command line names it; several machines may have it at the same path.
        files: Their content, and where they go in the working directory.
        place: Tree, if it is not the working directory: the hub's folder.
    """

    given: str
    files: tuple[SourceFile, ...]
    place: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class EnvironmentPlan:
    """An environment for another machine.

    Attributes:
        name: Its folder; another one for other versions.
        python: The Python that it is made of; None: uv brings one.
        from_index: Its packages come from an index, not from here.
        native: This machine's compiled kernels run there.
        note: For people.
    """

    name: str
    python: PeerPython | None
    from_index: bool
    native: bool
    note: str = ""


@dataclass(frozen=True)
class PeerPlan:
    """Everything that a machine gets.

    Attributes:
        host: As for ssh.
        answer: What it has.
        environment: None: its own, as here.
        package: Name of the copy of pipecomp; None: its own.
        work: Working directory; None: the same as here.
        lacking: Files to copy, by tree.
        labels: The files, for people.
        offline: Models of the hub are copies.
    """

    host: str
    answer: PeerAnswer
    environment: EnvironmentPlan | None
    package: str | None
    work: str | None
    lacking: Mapping[str, Sequence[SourceFile]]
    labels: Sequence[str] = ()
    offline: bool = False

    @property
    def makes_environment(self) -> bool:
        """True if the environment is not complete."""
        return self.environment is not None and not self.answer.has(peer_agent.ENVIRONMENTS, self.environment.name)

    @property
    def complete(self) -> bool:
        """True if the machine lacks nothing."""
        return not self.makes_environment and not any(self.lacking.values())

    @property
    def python(self) -> str | None:
        """Python of the ranks; None for the same path as here."""
        if self.environment is None:
            return None
        return f"{self.answer.root}/{peer_agent.ENVIRONMENTS}/{self.environment.name}/bin/python"

    @property
    def folder(self) -> str | None:
        """Working directory of the ranks; None for the same as here."""
        return None if self.work is None else f"{self.answer.root}/{self.work}"

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the ranks."""
        if self.package is None:
            return {}
        hub = f"{self.answer.root}/{peer_agent.HUB}"
        own = {"PYTHONPATH": f"{self.answer.root}/{peer_agent.PACKAGES}/{self.package}", "PYTHONNOUSERSITE": "1"}
        offline = {"HF_HUB_OFFLINE": "1"} if self.offline else {}
        caches = {"HF_HOME": hub, "HF_HUB_CACHE": f"{hub}/hub", "HF_DATASETS_CACHE": f"{hub}/datasets"}
        other = f"{self.answer.root}/{peer_agent.CACHE}"
        caches |= {
            "XDG_CACHE_HOME": other,
            "TRITON_CACHE_DIR": f"{other}/triton",
            "MPLCONFIGDIR": f"{other}/matplotlib",
        }
        return {**own, **caches, **offline}


def choose_environment(host: str, answer: PeerAnswer, here: Installation, packages: str) -> EnvironmentPlan:
    """Choose the environment of a machine.

    Args:
        host: As for ssh.
        answer: What it has.
        here: This installation.
        packages: "here": copied; "index": from a package index; "auto": from an index if it reaches one.

    Raises:
        ConfigError: It has no Python, another system, or neither an index nor this platform.
    """
    system = f"{answer.system} on {answer.machine}"
    require(answer.system == "Linux", "--peers", host, "a machine with Linux", f"It has {foreign_text(system, 80)}")
    usable = sorted(
        (python for python in answer.pythons if python.version >= OLDEST),
        key=lambda python: (python.version != here.minor, python.version),
    )
    same = [python for python in usable if python.soabi == here.soabi]
    has = ", ".join(f"Python {'.'.join(map(str, python.version))}" for python in answer.pythons[:4]) or "no Python"
    platform_fits = answer.machine == here.machine and bool(answer.libc) and answer.libc >= (2, 28)
    fits = bool(same) and platform_fits
    native = platform_fits and answer.libc >= here.libc
    minor = ".".join(map(str, here.minor))
    wanted = f"Linux, {here.machine} and Python {minor} as here (it has {answer.machine}, {has})"
    copied = EnvironmentPlan(name_of("here", here.soabi, here.records), same[0] if same else None, False, native)
    if fits and answer.gpu and "+cpu" in here.pins.get("torch", ""):
        copied = EnvironmentPlan(
            copied.name, copied.python, False, native, "its GPU is not used: torch here has no CUDA"
        )
    best = usable[0] if usable else None
    version = best.version if best else here.minor
    name = name_of("index", version, answer.machine, answer.gpu, here.pins)
    native = native and version == here.minor and (best is None or best.soabi == here.soabi)
    indexed = EnvironmentPlan(name, best, True, native)
    if packages == "here":
        require(fits, "--packages", packages, f"index for {host}, or a machine with {wanted}")
        return copied
    for plan in (indexed, copied) if packages == "auto" else ():
        if answer.has(peer_agent.ENVIRONMENTS, plan.name):
            return plan
    if packages == "auto" and fits and not answer.index:
        return copied
    if not usable and answer.uv is None:
        remedy = f"Install Python {minor} or uv there"
        raise ConfigError("--peers", host, f"a machine with Python 3.11 or newer, or uv (it has {has})", remedy)
    reaches = answer.index or packages == "index"
    require(reaches, "--peers", host, f"a machine that reaches a package index, or has {wanted}")
    return indexed


def make_plan(
    host: str,
    answer: PeerAnswer,
    here: Installation,
    *,
    packages: str,
    work: str,
    inputs: Sequence[InputFiles],
    own: Callable[[bool], tuple[str, list[SourceFile]]],
) -> PeerPlan:
    """Decide what a machine gets. Files that it has with the same content are not copied.

    Args:
        host: As for ssh.
        answer: What it has.
        here: This installation.
        packages: See `choose_environment`.
        work: Working directory below the root.
        inputs: Files of the run.
        own: Returns a name and the files of pipecomp, with the compiled kernels or without.

    Raises:
        ConfigError: It cannot take part, or has too little room.
    """
    as_is = answer.as_here and answer.inputs
    environment = None if answer.imports or as_is else choose_environment(host, answer, here, packages)
    lacking: dict[str, Sequence[SourceFile]] = {}
    labels: list[str] = []
    package = None
    if environment is not None:
        package, files = own(environment.native)
        if not answer.has(peer_agent.PACKAGES, package):
            lacking[f"{peer_agent.PACKAGES}/{package}"] = files
            labels.append(f"{NAME} ({format_size(sum(file.size for file in files))})")
    moves, offline = not answer.inputs, False
    for item in inputs:
        if item.place is None and not moves:
            continue
        if item.place is not None and (environment is None or answer.hub):  # the machine asks the hub
            continue
        place = item.place or work
        offline = offline or item.place is not None
        kept = answer.tree(place)
        left = [file for file in item.files if kept.get(file.path) != file.digest]
        if left:
            lacking[place] = [*lacking.get(place, ()), *left]
            labels.append(f"{item.given} ({format_size(sum(file.size for file in left))})")
    plan = PeerPlan(host, answer, environment, package, work if moves else None, lacking, labels, offline)
    _check_room(plan, here)
    return plan


def copied_files(plan: PeerPlan, here: Installation) -> list[SourceFile]:
    """Return the files that a plan copies; those with the same content as one that is there are not sent."""
    files = [file for tree in plan.lacking.values() for file in tree]
    if plan.makes_environment and plan.environment is not None and not plan.environment.from_index:
        files += here.environment_files
    return files


def _index_bytes(plan: PeerPlan) -> int:
    """Return the room that packages of an index need."""
    from_index = plan.makes_environment and plan.environment is not None and plan.environment.from_index
    return _INDEX_BYTES[plan.answer.gpu] if from_index else 0


def _check_room(plan: PeerPlan, here: Installation) -> None:
    size = sum(file.size for file in copied_files(plan, here)) + _index_bytes(plan)
    used = None if plan.environment is None else plan.environment.name
    if set(plan.answer.state.get(peer_agent.ENVIRONMENTS, [])) - {used}:
        return  # the machine looks whether it can do without them
    free, root = plan.answer.free_bytes, plan.answer.root
    allowed = f"a machine with {format_size(size)} of free disk for {root} ({format_size(free)} are free)"
    require(plan.complete or size <= free, "--peers", plan.host, allowed, "Or another place: --remote-folder FOLDER")


def describe_plan(plan: PeerPlan, here: Installation) -> str:
    """Describe a plan in a line."""
    parts = []
    environment = plan.environment
    if environment is not None and plan.makes_environment:
        version = environment.python.version if environment.python else here.minor
        brought = "" if environment.python else ", which uv brings,"
        count = format_count(len(here.pins), "package")
        size = format_size(sum(file.size for file in here.environment_files)) if not environment.from_index else ""
        kind = "torch for CUDA" if plan.answer.gpu else "torch for the CPU, or for CUDA where it has no other"
        origin = f"from its package index ({kind})" if environment.from_index else f"copied from here ({size})"
        parts.append(f"Python {'.'.join(map(str, version))}{brought} with {count} {origin}")
    parts += plan.labels
    note = f"; {environment.note}" if environment is not None and environment.note else ""
    return f"{plan.host}: {', '.join(parts)}, in {plan.answer.root}{note}"


# -- what a machine lacks


def set_up(plan: PeerPlan, here: Installation, environment: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Give a machine what it lacks. What an interrupted copy has left is not sent again.

    Args:
        plan: The plan.
        here: This installation.
        environment: Variables of this process, some of which name package indexes.
        say: Prints a line.

    Returns:
        Bytes sent.

    Raises:
        ConfigError: The machine's error, such as a full disk, or a lost connection.
    """
    files = copied_files(plan, here)
    hash_all(files)
    by_digest = {file.digest: file for file in files}
    request = {
        "do": "provide",
        "root": plan.answer.root,
        "agent": agent_source(),
        "index": plan.answer.index,
        "files": {digest: file.size for digest, file in by_digest.items()},
        "room": _index_bytes(plan),
        "trees": {
            place: [[file.path, file.digest, file.mode] for file in tree] for place, tree in plan.lacking.items()
        },
        "package": plan.package,
        "environment": _environment_request(plan, here, environment),
    }
    with open_session(plan.host, agent_python(plan, here), request) as session:
        for message in session.messages():
            if "error" in message:
                raise session.error(str(message["error"]))
            if "say" in message:
                say(f"{plan.host}: {foreign_text(message['say'])}")
            if isinstance(message.get("wanted"), list):
                _send(session, message["wanted"], by_digest, say)
                break
        session.result(say)
        return session.sent_bytes


def agent_python(plan: PeerPlan, here: Installation) -> str:
    """Return the shell's words that start a Python on the machine."""
    chosen = plan.environment.python if plan.environment is not None else None
    usable = [python for python in plan.answer.pythons if python.version >= OLDEST]
    if chosen is None and plan.environment is None and usable:
        chosen = usable[0]
    if chosen is not None:
        return f"exec {shlex.quote(chosen.path)}"
    uv, version = shlex.quote(str(plan.answer.uv)), ".".join(map(str, here.minor))
    place = f"export UV_PYTHON_INSTALL_DIR={shlex.quote(f'{plan.answer.root}/{peer_agent.PYTHONS}')}"
    return (
        f'{place}; {uv} python install -q --no-bin {version} 1>&2 && exec "$({uv} python find --no-project {version})"'
    )


def _environment_request(plan: PeerPlan, here: Installation, environment: Mapping[str, str]) -> dict[str, Any] | None:
    chosen = plan.environment
    if chosen is None:
        return None
    entries = [] if chosen.from_index or not plan.makes_environment else here.environment_files
    variables = {} if plan.answer.gpu else {"DS_ACCELERATOR": "cpu"}
    return {
        "name": chosen.name,
        "entries": [[file.path, file.digest, file.mode] for file in entries],
        "requirements": requirements(here.pins, plan.answer.gpu, environment) if chosen.from_index else [],
        "variables": variables | (dict(index_variables(environment)) if chosen.from_index else {}),
        "uv": plan.answer.uv,
        "compile": not chosen.native,
        "test": _TEST,
    }


def requirements(
    pins: Mapping[str, str], gpu: bool, environment: Mapping[str, str]
) -> list[list[tuple[str, list[str]]]]:
    """Return arguments of pip and a text for people, step by step, each step with alternatives.

    The ordinary wheel of torch for Linux has CUDA. Without a GPU the CPU wheel comes first, where an index has it.
    """
    version = pins["torch"].partition("+")[0]
    other = ["--extra-index-url", environment[TORCH_INDEX]] if environment.get(TORCH_INDEX) else []
    ordinary = f"torch {version}", [f"torch=={version}", *(other if gpu else [])]
    cpu = f"torch {version} for the CPU", [f"torch=={version}+cpu", *other]
    large = f"torch {version} for CUDA, several GB, as the index has none for the CPU ({TORCH_INDEX})", ordinary[1]
    rest = [f"{name}=={pin}" for name, pin in pins.items() if name != "torch" and not _OWN_PACKAGES.match(name)]
    # DeepSpeed is built from source, which asks for these where it runs.
    return [[ordinary] if gpu else [cpu, large], [(format_count(len(rest), "package"), rest)]]


def _send(session: PeerSession, wanted: list[Any], files: Mapping[str, SourceFile], say: Callable[[str], None]) -> None:
    """Send the contents that a machine lacks, in its order."""
    try:
        listed = [(str(digest), int(offset)) for digest, offset in wanted]
    except (TypeError, ValueError):
        raise session.error("its answer makes no sense") from None
    asked = all(digest in files and 0 <= offset <= files[digest].size for digest, offset in listed)
    if not asked or len({digest for digest, _ in listed}) != len(listed):
        raise session.error("it asks for files that were not offered")
    total, done, deflate = sum(files[digest].size - offset for digest, offset in listed), 0, zlib.compressobj(1)
    said = time.monotonic()
    pending = bytearray()
    for digest, offset in listed:
        for chunk in _chunks(files[digest], offset):
            pending += deflate.compress(chunk)
            done += len(chunk)
            if len(pending) >= _CHUNK:
                session.write(bytes(pending))
                pending.clear()
            if time.monotonic() > said + _PROGRESS_S:
                said = time.monotonic()
                say(f"{session.host}: {format_size(done)} of {format_size(total)}")
    session.write(bytes(pending) + deflate.flush())


def _chunks(file: SourceFile, offset: int) -> Iterator[bytes]:
    if file.source is None:
        yield file.data[offset:]
        return
    left = file.size - offset
    with file.source.open("rb") as opened:
        opened.seek(offset)
        while left:
            chunk = opened.read(min(_CHUNK, left))
            require(chunk, "file", str(file.source), "a file that does not change while it is copied")
            left -= len(chunk)
            yield chunk


# -- all machines of a run


def bring_up(
    hosts: Sequence[str],
    spares: Sequence[str],
    asked: bytes,
    *,
    packages: str,
    work: str,
    inputs: Callable[[], Sequence[InputFiles]],
    agree: Callable[[list[str]], None],
    say: Callable[[str], None],
) -> dict[str, PeerPlan]:
    """Bring machines to a run.

    Args:
        hosts: The other machines.
        spares: Those that take the places of lost ones; one that does not answer is left out.
        asked: From `question`.
        packages: See `choose_environment`.
        work: Working directory below the root.
        inputs: Returns the files of the run.
        agree: Takes lines that say what is made where, and raises an error unless it may be.
        say: Prints a line.

    Returns:
        The plans of the machines that do not run everything as here, by host.

    Raises:
        ConfigError: A machine cannot be reached or set up.
    """
    with ThreadPoolExecutor(len(hosts) + len(spares)) as pool:
        asking = {host: pool.submit(ask, host, asked) for host in (*hosts, *spares)}
        answers = {host: asking[host].result() for host in hosts}
        for host in spares:
            try:
                answers[host] = asking[host].result()
            except ConfigError as error:
                say(f"spare machine left out: {error}")
        others = {host: answer for host, answer in answers.items() if not (answer.as_here and answer.inputs)}
        if not others:
            return {}
        here, found = Installation(), inputs()
        copies: dict[bool, tuple[str, list[SourceFile]]] = {}

        def own(native: bool) -> tuple[str, list[SourceFile]]:
            if native not in copies:
                files = package_files(native=native)
                hash_all(files)
                copies[native] = name_of("package", [[file.path, file.digest] for file in files]), files
            return copies[native]

        plans = {
            host: make_plan(host, answer, here, packages=packages, work=work, inputs=found, own=own)
            for host, answer in others.items()
        }
        todo = [plan for plan in plans.values() if not plan.complete]
        if todo:
            agree([describe_plan(plan, here) for plan in todo])
        remember({plan.host: plan.answer.root for plan in plans.values()})  # also those whose set-up will fail
        if todo:
            began = time.monotonic()
            sent = pool.map(lambda plan: set_up(plan, here, os.environ, say), todo)
            total = format_size(sum(sent))
            say(f"{', '.join(plan.host for plan in todo)}: ready after {time.monotonic() - began:.0f} s, {total} sent")
    return plans


# -- the machines that were set up


def book_path() -> Path:
    """Return the file that lists the machines which were set up from here."""
    return Path.home() / FOLDER / _BOOK


def digests_path() -> Path:
    """Return the file that keeps the digests of large files that were copied."""
    return book_path().with_name(_DIGESTS)


def known_peers() -> dict[str, str]:
    """Return the folder on each machine that was set up from here."""
    try:
        found = json.loads(book_path().read_text(encoding="utf-8"))
        return {str(host): str(root) for host, root in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def remember(roots: Mapping[str, str], gone: Sequence[str] = ()) -> None:
    """Add machines to the list, and take others out of it; after the last one nothing is left here."""
    before = known_peers()
    after = {host: root for host, root in {**before, **roots}.items() if host not in gone}
    if after and after != before:
        book_path().parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(book_path(), json.dumps(after, indent=2) + "\n")
    elif not after:
        for path in (book_path(), digests_path()):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # this machine may have been set up from another one
            book_path().parent.rmdir()
