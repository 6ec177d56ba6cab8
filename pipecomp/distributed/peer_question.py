"""Question to a machine over ssh, before it is set up, and its answer.

One question per machine, a shell script on standard input, tells its Pythons, platform, package index, and the digests
of what an earlier start has left in its folder.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipecomp.distributed import peer_agent
from pipecomp.distributed.installation import NAME, parse_version
from pipecomp.distributed.ssh_launcher import SSH, export_commands, login_error
from pipecomp.errors import ConfigError, WireError, foreign_text
from pipecomp.utils.units import format_size

MOST_BYTES = 256 << 20  # of an answer
_LOGIN_S, _QUESTION_S = 12.0, 60.0
_READ_BYTES = 1 << 16
_MOST_PYTHONS = 16
_INDEX_VARIABLES = re.compile(
    r"PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|NO_INDEX)"
    r"|UV_(INDEX|INDEX_URL|DEFAULT_INDEX|EXTRA_INDEX_URL|INSECURE_HOST|NATIVE_TLS|SYSTEM_CERTS)"
)

# Each answer is a line "pipecomp KEY VALUE"; other lines are the login's.
_QUESTION = r"""
exec 2>/dev/null
say() { printf 'pipecomp %s\n' "$*"; }
say begin
cd "$HOME" || cd /
case $root in /*) ;; *) root=$PWD/$root ;; esac
say root "$root"
say system "$(uname -s) $(uname -m)"
say libc "$(getconf GNU_LIBC_VERSION)"
gpu=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
[ -n "$gpu" ] || { [ -e /dev/nvidiactl ] && gpu=unknown; }
[ -z "$gpu" ] || say gpu "$gpu"
there=$root
while [ ! -e "$there" ]; do there=$(dirname "$there"); done
say free "$(df -Pk "$there" | tail -n 1 | awk '{print $4}')"
export UV_PYTHON_INSTALL_DIR="$root/python"
uv=
for word in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
    uv=$(command -v "$word") && break
done
[ -z "$uv" ] || say uv "$uv"
found=
for word in "$same" python3.11 python3 python3.12 python3.13 python3.14 \
    "$([ -z "$uv" ] || "$uv" python find --no-project ">=3.11")"; do
    path=$(command -v "$word") || continue
    case " $found " in *" $path "*) continue ;; esac
    found="$found $path"
    told=$("$path" -c 'import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_config_var("SOABI"))')
    [ -z "$told" ] || say python "$told $path"
done
(eval "$exports"; cd / && "$same" -P -c "$test" && say imports)
(eval "$exports"; cd "$folder" && "$same" $flags -c "$test" && say as-here)
(cd "$folder" && say folder && eval "set -- $inputs" && for path; do [ -e "$path" ] || say lacks "$path"; done)
if [ -f "$root/agent.py" ]; then
    for path in "$root"/environments/*/bin/python $found; do
        "$path" "$root/agent.py" check "$root" && break
    done
fi
if [ -n "$hub" ]; then
    for path in $found; do
        (eval "$exports"; timeout 15 "$path" -c "$reach" "$hub") && say hub && break
    done
fi
if ! ls "$root"/environments/*/bin/python >/dev/null; then
    eval "$indexes"
    for path in $found; do
        "$path" -m pip --version >/dev/null || continue
        place=$(mktemp -d)
        timeout 15 "$path" -m pip download -q --no-deps --no-cache-dir --no-input --timeout 4 --retries 0 \
            -d "$place" "$probe" >/dev/null && say index
        rm -rf "$place"
        break
    done
    [ -z "$uv" ] || { echo "$probe" | timeout 15 "$uv" pip compile -q --no-cache - >/dev/null && say index; }
fi
say end
"""
# Any answer counts, such as that a token is missing.
_REACH = """import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=4)
except urllib.error.HTTPError:
    pass
"""


@dataclass(frozen=True)
class PeerPython:
    """A Python of another machine."""

    version: tuple[int, int]
    soabi: str
    path: str


@dataclass(frozen=True)
class PeerAnswer:
    """Answer of another machine: what it has.

    Attributes:
        root: Folder for what it lacks.
        system, machine, libc: Its platform.
        free_bytes: Room at the root.
        pythons: Its Pythons.
        uv: Path of uv.
        gpu: It has an NVIDIA driver.
        index: It reaches a package index.
        hub: It reaches Hugging Face's hub.
        imports: This machine's Python is at the same path there, and imports pipecomp.
        as_here: It does so in the same folder.
        inputs: The same folder has all input files.
        state: As of `peer_agent.check`.
    """

    root: str
    system: str = "Linux"
    machine: str = ""
    libc: tuple[int, ...] = ()
    free_bytes: int = 0
    pythons: tuple[PeerPython, ...] = ()
    uv: str | None = None
    gpu: bool = False
    index: bool = False
    hub: bool = False
    imports: bool = False
    as_here: bool = False
    inputs: bool = False
    state: Mapping[str, Any] = field(default_factory=dict)

    def has(self, kind: str, name: str) -> bool:
        """Return whether an environment or a copy of pipecomp is complete."""
        return name in self.state.get(kind, [])

    def tree(self, place: str) -> Mapping[str, str]:
        """Return the digests of the unchanged files in a tree."""
        found = self.state.get("trees", {}).get(place, {})
        return found if isinstance(found, dict) else {}


def question(
    python: Sequence[str],
    folder: str,
    inputs: Sequence[str],
    root: str,
    environment: Mapping[str, str],
    probe: str,
    hub: str = "",
) -> bytes:
    """Write the question.

    Args:
        python: This machine's Python and its options.
        folder: Working directory.
        inputs: Paths of the input files.
        root: Folder on the other machine, from its home unless absolute.
        environment: Variables of this process.
        probe: A small pinned package to ask an index for.
        hub: Address to ask the hub for; "" not to ask.
    """
    values = {
        "same": python[0],
        "flags": " ".join(python[1:]),
        "folder": folder,
        "root": root,
        "probe": probe,
        "hub": hub,
        "reach": _REACH,
        "inputs": shlex.join(inputs),
        "exports": export_commands(environment),
        "indexes": "".join(f"export {key}={shlex.quote(value)}\n" for key, value in index_variables(environment)),
        "test": "import importlib.util as u, sys; sys.exit(u.find_spec('pipecomp') is None)",
    }
    lines = [f"{key}={shlex.quote(value)}\n" for key, value in values.items()]
    return os.fsencode("".join(lines) + _QUESTION)


def index_variables(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the variables that name package indexes for pip and uv."""
    return [(key, value) for key, value in environment.items() if _INDEX_VARIABLES.fullmatch(key)]


def parse_answer(host: str, text: str) -> PeerAnswer:
    """Read the answer to a question. Raises ConfigError for one that is incomplete or makes no sense."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == NAME:
            key, _, value = rest.partition(" ")
            values.setdefault(key, []).append(value.strip())

    def first(key: str) -> str:
        return values.get(key, [""])[0]

    pythons = []
    for line in values.get("python", [])[:_MOST_PYTHONS]:
        match = re.fullmatch(r"(\d{1,3}) (\d{1,3}) (\S+) (/[^\0]+)", line)
        if match:
            pythons.append(PeerPython((int(match[1]), int(match[2])), match[3], match[4]))
    root, (system, _, machine) = first("root"), first("system").partition(" ")
    if "end" not in values or not re.fullmatch(r"/[^\0-\x1f\x7f:]+", root) or ".." in root.split("/"):
        shown = foreign_text(text.strip()[-200:]) or "nothing"
        raise ConfigError("--peers", host, "a machine whose shell runs sh scripts", f"It answers: {shown}")
    try:
        state = json.loads(first("state") or "{}")
    except ValueError:
        state = {}
    valid = isinstance(state, dict) and state.get("format") == peer_agent.FORMAT
    state = {
        **{
            key: state.get(key)
            for key in (peer_agent.ENVIRONMENTS, peer_agent.PACKAGES)
            if valid and _names(state, key)
        },
        "trees": state["trees"] if valid and isinstance(state.get("trees"), dict) else {},
        "index": valid and state.get("index") is True,
    }
    free = first("free")
    return PeerAnswer(
        root=root,
        system=system,
        machine=machine,
        libc=parse_version(first("libc")),
        free_bytes=int(free) << 10 if free.isdecimal() and len(free) < 16 else 0,
        pythons=tuple(pythons),
        uv=first("uv") if first("uv").startswith("/") else None,
        gpu="gpu" in values,
        index="index" in values or state["index"] is True,
        hub="hub" in values,
        imports="imports" in values,
        as_here="as-here" in values,
        inputs="folder" in values and "lacks" not in values,
        state=state,
    )


def _names(state: Mapping[str, Any], key: str) -> bool:
    return isinstance(state.get(key), list) and all(isinstance(name, str) for name in state[key])


def ask(host: str, asked: bytes) -> PeerAnswer:
    """Ask a machine.

    Raises:
        ConfigError: After 12 s without a login, or 60 s without an answer, or after MOST_BYTES; with ssh's reason and
            what to try.
    """
    with tempfile.TemporaryFile() as question:
        question.write(asked)
        question.seek(0)
        words = [*SSH, host, "exec sh -s"]
        process = subprocess.Popen(words, stdin=question, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        try:
            out, err = _read_answer(process)
            process.wait(_LOGIN_S)
        except (TimeoutError, subprocess.TimeoutExpired, WireError) as error:
            process.kill()
            raise login_error(host, str(error)) from None
    text = out.decode(errors="replace")
    if process.returncode and f"{NAME} begin" not in text:
        said = [line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()]
        raise login_error(host, (said or [f"exit status {process.returncode}"])[-1])
    return parse_answer(host, text)


def _read_answer(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Read a process's output and errors until both end.

    Raises:
        TimeoutError: There is no login, or no answer.
        WireError: One of them is longer than MOST_BYTES.
    """
    out, err = bytearray(), bytearray()
    begun, end = False, time.monotonic() + _LOGIN_S
    with selectors.DefaultSelector() as selector:
        for stream, read in ((process.stdout, out), (process.stderr, err)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, read)
        while selector.get_map():
            ready = selector.select(max(0.0, end - time.monotonic()))
            if time.monotonic() >= end:
                raise TimeoutError(f"no answer within {_QUESTION_S if begun else _LOGIN_S:g} s")
            for key, _ in ready:
                data = os.read(key.fd, _READ_BYTES)
                key.data.extend(data)
                if len(key.data) > MOST_BYTES:
                    raise WireError(f"its answer has more than {format_size(MOST_BYTES)}")
                if not data:
                    selector.unregister(key.fileobj)
            if not begun and f"{NAME} begin".encode() in out[-2 * _READ_BYTES :]:
                begun, end = True, end + _QUESTION_S
    return bytes(out), bytes(err)
