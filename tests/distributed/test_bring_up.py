"""Machines that are set up: decisions from their answers, and one with Python alone behind a stand-in for ssh."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipecomp.distributed import bring_up, peer_question, peer_session
from pipecomp.distributed.bring_up import InputFiles, choose_environment, make_plan, requirements
from pipecomp.distributed.installation import Installation, SourceFile
from pipecomp.distributed.peer_question import PeerAnswer, PeerPython, parse_answer, question
from pipecomp.errors import ConfigError
from tests.limits import HANG_S

HERE = Installation(
    minor=(3, 11), soabi="cpython-311-x86_64-linux-gnu", machine="x86_64", libc=(2, 36),
    distributions={name: importlib.metadata.distribution(name) for name in ("torch", "packaging")},
)  # fmt: skip
HERE.__dict__["pins"] = {"torch": "2.13.0+cpu", "packaging": "26.4", "nvidia-nccl-cu12": "1", "triton": "3.5"}
SAME = PeerPython((3, 11), HERE.soabi, "/usr/bin/python3")
NEWER = PeerPython((3, 13), "cpython-313-x86_64-linux-gnu", "/usr/bin/python3.13")
OLD = PeerPython((3, 9), "cpython-39-x86_64-linux-gnu", "/usr/bin/python3")
BARE = PeerAnswer(root="/home/me/.pipecomp", machine="x86_64", libc=(2, 36), free_bytes=1 << 40, pythons=(SAME,))


class TestAnswer:
    TEXT = """Welcome to two!
pipecomp begin
pipecomp root /home/me/.pipecomp
pipecomp system Linux x86_64
pipecomp libc glibc 2.36
pipecomp free 2048
pipecomp uv /home/me/.local/bin/uv
pipecomp python 3 11 cpython-311-x86_64-linux-gnu /usr/bin/python3
pipecomp folder
pipecomp state {"format": 1, "index": true, "environments": ["a"], "packages": [], "trees": {"work/x": {"f": "d"}}}
pipecomp end
"""

    def test_is_read(self):
        found = parse_answer("two", self.TEXT)
        assert (found.root, found.system, found.machine, found.libc) == (BARE.root, "Linux", "x86_64", (2, 36))
        assert (found.free_bytes, found.uv, found.pythons) == (2 << 20, "/home/me/.local/bin/uv", (SAME,))
        assert (found.gpu, found.index, found.imports, found.as_here, found.inputs) == (False, True, False, False, True)
        assert found.has("environments", "a")
        assert found.tree("work/x") == {"f": "d"}
        assert not parse_answer("two", self.TEXT.replace("folder", "lacks text.txt")).inputs

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("pipecomp end\n", ""),
            ("root /home/me/.pipecomp", "root relative"),
            ("root /home/me/.pipecomp", "root /home/../etc"),
            ("root /home/me/.pipecomp", "root /home/a:b"),  # PYTHONPATH has colons
            ("root /home/me/.pipecomp", "root"),
        ],
    )
    def test_makes_no_sense(self, old, new):
        with pytest.raises(ConfigError, match="--peers: got 'two'"):
            parse_answer("two", self.TEXT.replace(old, new))

    @pytest.mark.parametrize(
        "state", ["{", "[]", '{"format": 2}', '{"format": 1, "environments": [[]], "packages": 3, "trees": ["x"]}']
    )
    def test_with_a_hostile_state_has_nothing(self, state):
        lines = [line for line in self.TEXT.splitlines() if "state" not in line]
        found = parse_answer("two", "\n".join([*lines, f"pipecomp state {state}"]))
        assert not found.has("environments", "a")
        assert (dict(found.tree("work/x")), found.index) == ({}, False)

    def test_a_python_is_a_path(self):
        text = self.TEXT.replace("linux-gnu /usr/bin/python3", "linux-gnu python3 -c evil")
        assert parse_answer("two", text).pythons == ()


def test_the_hub_answers(tmp_path):
    """Any answer counts; where nothing listens there is no hub."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask_for_hub(tmp_path, f"http://127.0.0.1:{port}/config.json").hub
        thread.join(HANG_S)
    assert not ask_for_hub(tmp_path, f"http://127.0.0.1:{port}/config.json").hub


def ask_for_hub(folder: Path, hub: str) -> PeerAnswer:
    asked = question([sys.executable], str(folder), [], str(folder / "root"), {}, "no-such-package==1", hub)
    variables = {**os.environ, "HOME": str(folder), "PIP_NO_INDEX": "1"}
    done = subprocess.run(["sh", "-s"], input=asked, env=variables, capture_output=True, timeout=HANG_S, check=True)
    return parse_answer("two", done.stdout.decode())


class TestDecision:
    def test_without_an_index_packages_are_copied(self):
        found = choose_environment("two", BARE, HERE, "auto")
        assert (found.from_index, found.python, found.native) == (False, SAME, True)

    def test_an_index_comes_first(self):
        found = choose_environment("two", replace(BARE, index=True), HERE, "auto")
        assert (found.from_index, found.python) == (True, SAME)
        assert choose_environment("two", replace(BARE, index=True), HERE, "here").from_index is False
        assert choose_environment("two", BARE, HERE, "index").from_index is True

    def test_what_an_earlier_start_has_made_stays(self):
        made = choose_environment("two", BARE, HERE, "here").name
        answer = replace(BARE, index=True, state={"environments": [made]})
        assert choose_environment("two", answer, HERE, "auto").name == made

    def test_other_versions_are_another_environment(self):
        other = replace(HERE)
        other.__dict__["pins"] = {**HERE.pins, "packaging": "1"}
        index = replace(BARE, index=True)
        names = {choose_environment("two", index, here, "auto").name for here in (HERE, other)}
        names.add(choose_environment("two", replace(index, gpu=True), HERE, "auto").name)
        assert len(names) == 3

    def test_uv_brings_python(self):
        found = choose_environment("two", replace(BARE, pythons=(OLD,), uv="/bin/uv", index=True), HERE, "auto")
        assert (found.python, found.from_index) == (None, True)

    def test_another_python_takes_an_index(self):
        found = choose_environment("two", replace(BARE, pythons=(NEWER,), index=True), HERE, "auto")
        assert (found.python, found.from_index, found.native) == (NEWER, True, False)

    def test_kernels_of_a_newer_c_library_are_compiled_there(self):
        assert not choose_environment("two", replace(BARE, libc=(2, 28)), HERE, "auto").native
        assert not choose_environment("two", replace(BARE, machine="aarch64", index=True), HERE, "auto").native

    def test_a_gpu_that_stays_idle_is_said(self):
        assert "GPU is not used" in choose_environment("two", replace(BARE, gpu=True), HERE, "auto").note

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ({"pythons": ()}, "or uv .it has no Python.. Install Python 3.11 or uv there"),
            ({"pythons": (OLD,)}, "or uv .it has Python 3.9"),
            ({"pythons": (NEWER,)}, "reaches a package index, or has Linux, x86_64 and Python 3.11 as here"),
            ({"machine": "aarch64"}, "reaches a package index.*it has aarch64"),
            ({"libc": ()}, "reaches a package index"),  # musl
            ({"libc": (2, 17)}, "reaches a package index"),
            ({"system": "Darwin", "machine": "arm64"}, "a machine with Linux. It has Darwin on arm64"),
        ],
    )
    def test_machines_that_cannot_be_set_up(self, answer, message):
        with pytest.raises(ConfigError, match=f"--peers: got 'two'.*{message}"):
            choose_environment("two", replace(BARE, **answer), HERE, "auto")

    def test_packages_of_this_machine_do_not_fit_all(self):
        with pytest.raises(ConfigError, match="--packages: got 'here', allowed: index for two"):
            choose_environment("two", replace(BARE, pythons=(NEWER,), index=True), HERE, "here")

    def test_wheels_of_torch_are_those_of_the_machine(self):
        [[(_, cpu), (text, ordinary)], [(_, rest)]] = requirements(HERE.pins, False, {"TORCH_INDEX_URL": "x"})
        assert (cpu, ordinary) == (["torch==2.13.0+cpu", "--extra-index-url", "x"], ["torch==2.13.0"])
        assert "TORCH_INDEX_URL" in text, "the remedy for several GB"
        assert rest == ["packaging==26.4"]
        assert [words for _, words in requirements(HERE.pins, True, {})[0]] == [["torch==2.13.0"]]

    def test_a_model_of_the_hub_is_copied_where_the_hub_is_out_of_reach(self):
        model = InputFiles("me/small", (SourceFile("config.json", data=b"{}"),), "huggingface/hub/models--me--small")
        for answer, copied in ((replace(BARE, index=True), True), (replace(BARE, hub=True), False)):
            plan = make_plan(
                "two", answer, HERE, packages="index", work="w", inputs=[model], own=lambda native: ("p", [])
            )
            assert (model.place in plan.lacking, plan.offline) == (copied, copied)


TOOLS = (
    "sh",
    "env",
    "uname",
    "getconf",
    "df",
    "tail",
    "awk",
    "dirname",
    "mktemp",
    "rm",
    "timeout",
    "ls",
    "cat",
    "head",
)
STAND_IN = """#!/bin/sh
echo "$7" >> {calls}
for line; do :; done
exec env -i HOME={home} PATH={path} sh -c "$line"
"""
# The system's Python: without pip, so that no index is asked.
PYTHON = f"""#!/bin/sh
case "$*" in *"-m pip"*) exit 1 ;; esac
exec {sys.executable} "$@"
"""


class BareMachine:
    """A machine "two" behind a stand-in for ssh, and a small installation to copy."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.folder, self.home, self.calls = folder, folder / "home", folder / "calls"
        for name in ("home", "own", "tools", "bin"):
            (folder / name).mkdir()
        for tool in TOOLS:
            (folder / "tools" / tool).symlink_to(str(shutil.which(tool)))
        (folder / "tools" / "python3").write_text(PYTHON)
        (folder / "bin" / "ssh").write_text(STAND_IN.format(calls=self.calls, home=self.home, path=folder / "tools"))
        for script in ("tools/python3", "bin/ssh"):
            (folder / script).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
        monkeypatch.setenv("HOME", str(folder / "own"))
        packages = {name: importlib.metadata.distribution(name) for name in ("packaging", "rich")}
        monkeypatch.setattr(bring_up, "Installation", lambda: Installation(distributions=packages))
        monkeypatch.setattr(bring_up, "_TEST", "import packaging, rich, pipecomp; assert pipecomp.__version__")
        self.said: list[str] = []
        self.shown: list[str] = []

    def start(
        self, python: str = "/nowhere/python", *, spares: tuple[str, ...] = (), agree: Any = None, **contents: bytes
    ) -> Any:
        """Bring the machine to a run with these files; the machine's plan."""
        files = [SourceFile(name, data=data) for name, data in contents.items()]
        inputs = [InputFiles(file.path, (file,)) for file in files]
        asked = question([python, "-P"], str(self.folder), list(contents), ".pipecomp", {}, "packaging==1")
        self.shown, self.said = [], []
        plans = bring_up.bring_up(
            ["two"], spares, asked, packages="auto", work="work/run", inputs=lambda: inputs,
            agree=agree or self.shown.extend, say=self.said.append,
        )  # fmt: skip
        return plans.get("two")

    def count(self) -> int:
        """Calls of ssh since the last count."""
        count = len(self.calls.read_text().splitlines())
        self.calls.unlink()
        return count


@pytest.fixture
def bare(tmp_path, monkeypatch):
    return BareMachine(tmp_path, monkeypatch)


def test_a_bare_machine_is_set_up_once(bare):
    plan = bare.start(text=b"one", other=b"two")
    assert bare.count() == 2, "a question, and the files"
    [line] = bare.shown
    assert line.startswith(f"two: Python {sys.version_info[0]}.{sys.version_info[1]} with ")
    assert "pipecomp (" in line
    assert "text (3 B), other (3 B)" in line
    assert plan.folder == f"{bare.home}/.pipecomp/work/run"
    assert (Path(plan.folder) / "text").read_bytes() == b"one"
    program = "import sys, packaging, rich, pipecomp, pipecomp.kernels; print(sys.prefix, pipecomp.__file__)"
    done = subprocess.run(
        [plan.python, "-P", "-c", program], env=plan.variables, cwd=plan.folder, capture_output=True, text=True,
        timeout=HANG_S, check=True,
    )  # fmt: skip
    assert all(word.startswith(f"{bare.home}/.pipecomp/") for word in done.stdout.split())
    again = bare.start(text=b"one", other=b"two")
    assert bare.count() == 1
    assert (bare.shown, bare.said) == ([], [])
    assert (again.python, again.folder, again.variables) == (plan.python, plan.folder, plan.variables)
    bare.start(text=b"one", other=b"three")
    assert bare.shown == [f"two: other (5 B), in {bare.home}/.pipecomp"]
    assert bring_up.known_peers() == {"two": f"{bare.home}/.pipecomp"}


def test_nothing_is_made_without_consent(bare):
    def refuse(lines: list[str]) -> None:
        raise ConfigError("--yes", False, "given")

    with pytest.raises(ConfigError, match="--yes"):
        bare.start(agree=refuse, text=b"one")
    assert list(bare.home.iterdir()) == []


def test_a_machine_that_has_all_is_left_as_it_is(bare):
    (bare.folder / "text").write_bytes(b"one")
    (bare.folder / "tools" / "python3").unlink()
    python = bare.folder / "same"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={Path(bring_up.__file__).parents[2]} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert bare.start(str(python), text=b"anything") is None
    assert bare.count() == 1
    assert list(bare.home.iterdir()) == []
    plan = bare.start(str(python), text=b"one", absent=b"two")  # a file is missing
    assert (plan.environment, plan.python, plan.variables) == (None, None, {})
    assert (Path(plan.folder) / "absent").read_bytes() == b"two"


def test_an_interrupted_set_up_goes_on(bare, monkeypatch):
    whole, sent = bring_up._chunks, []

    def interrupted(file: SourceFile, offset: int) -> Any:
        sent.append(file.size)
        if len(sent) == 40:
            raise KeyboardInterrupt
        yield from whole(file, offset)

    monkeypatch.setattr(bring_up, "_CHUNK", 1)  # nothing waits to be sent
    monkeypatch.setattr(bring_up, "_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bare.start(text=b"one")
    monkeypatch.setattr(bring_up, "_chunks", whole)
    root = bare.home / ".pipecomp"
    kept = {path.name for path in (root / "files").rglob("*") if path.is_file() and path.suffix != ".part"}
    assert kept
    offered: list[Any] = []
    send = bring_up._send
    monkeypatch.setattr(bring_up, "_send", lambda *given: (offered.extend(given[1]), send(*given)))
    assert bare.start(text=b"one").complete is False
    assert not kept & {digest for digest, _ in offered}
    assert (root / "work/run/text").read_bytes() == b"one"


def test_an_error_there_names_the_machine(bare, monkeypatch):
    (bare.home / ".pipecomp").mkdir()
    (bare.home / ".pipecomp" / "letter").write_text("mine")
    with pytest.raises(ConfigError, match=r"--peers: got 'two', allowed: a machine that can be set up .*other files"):
        bare.start(text=b"one")
    assert [path.name for path in (bare.home / ".pipecomp").iterdir()] == ["letter"]


def test_too_little_room(bare, monkeypatch):
    (bare.folder / "tools" / "df").unlink()
    (bare.folder / "tools" / "df").write_text("#!/bin/sh\necho 'disk 100 50 1 50% /'\n")
    (bare.folder / "tools" / "df").chmod(0o755)
    with pytest.raises(ConfigError, match=r"free disk for .*1.0 kB are free.*--remote-folder"):
        bare.start(text=b"one")
    assert list(bare.home.iterdir()) == []


def test_packages_that_cannot_be_imported(bare, monkeypatch):
    monkeypatch.setattr(bring_up, "_TEST", "raise SystemExit('torch needs another library')")
    with pytest.raises(ConfigError, match=r"two.*cannot be imported: torch needs another library"):
        bare.start(text=b"one")
    assert bare.count() == 2
    with pytest.raises(ConfigError, match="cannot be imported"):
        bare.start(text=b"one")


def test_a_machine_that_asks_for_other_files(bare, monkeypatch):
    program = peer_session.agent_source().replace('reply({"wanted": wanted})', 'reply({"wanted": [["0" * 64, 0]]})')
    for module in (bring_up, peer_session):
        monkeypatch.setattr(module, "agent_source", lambda: program)
    with pytest.raises(ConfigError, match="asks for files that were not offered"):
        bare.start(text=b"one")


def test_a_spare_that_does_not_answer_is_left_out(bare):
    script = bare.folder / "bin" / "ssh"
    script.write_text(script.read_text().replace("#!/bin/sh", '#!/bin/sh\n[ "$7" = two ] || exit 255'))
    assert bare.start(spares=("three",), text=b"one") is not None
    assert any(line.startswith("spare machine left out: --peers: got 'three'") for line in bare.said)


def test_the_book_of_machines_may_be_damaged(bare):
    bring_up.book_path().parent.mkdir()
    bring_up.book_path().write_text("[")
    assert bring_up.known_peers() == {}
    bare.start(text=b"one")
    assert peer_session.request_of("two", ".pipecomp", {"do": "measure"})["bytes"] > 0
    assert peer_session.request_of("two", ".pipecomp", {"do": "remove", "keep_results": False})["files"] == 0
    assert list(bare.home.iterdir()) == []


@pytest.mark.parametrize("stream", ["1", "2"])
def test_an_answer_without_an_end_takes_no_memory(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    endless = f"exec yes {'x' * 1000} >&{stream}"
    monkeypatch.setattr(peer_question, "SSH", ("sh", "-c", endless))
    monkeypatch.setattr(peer_question, "MOST_BYTES", 1 << 22)
    monkeypatch.setattr(peer_question, "_LOGIN_S", 30.0)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"its answer has more than 4\.2 MB"):
        peer_question.ask("host", b"")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("says", "limit"), [("true", "0.5"), ("echo pipecomp begin", "1")])
def test_a_machine_that_stays_silent(monkeypatch: pytest.MonkeyPatch, says: str, limit: str) -> None:
    monkeypatch.setattr(peer_question, "SSH", ("sh", "-c", f"{says}; exec sleep 60"))
    monkeypatch.setattr(peer_question, "_LOGIN_S", 0.5)
    monkeypatch.setattr(peer_question, "_QUESTION_S", 1.0)
    with pytest.raises(ConfigError, match=rf"no answer within {limit} s"):
        peer_question.ask("host", b"")
