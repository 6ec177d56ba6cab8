"""The program of a machine that is set up: hostile names, damaged and interrupted copies, what it removes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipecomp.distributed import peer_agent
from pipecomp.distributed.peer_agent import AgentError
from tests.limits import HANG_S

CONTENTS = [b"first", b"second" * 1000, b"", b"\0" * (5 << 20)]  # the last one takes few bytes of the stream


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def request(root: Path, names: dict[str, bytes]) -> dict[str, Any]:
    return {
        "root": str(root),
        "agent": "# the program",
        "index": False,
        "files": {digest(data): len(data) for data in names.values()},
        "room": 0,
        "trees": {"work/run": [[name, digest(data), 0o644] for name, data in names.items()]},
        "package": None,
        "environment": None,
    }


def provide(root: Path, names: dict[str, bytes], *, most: int | None = None, altered: bytes | None = None) -> int:
    """Answer a request as a launcher does; returns the bytes that are asked for. most: those of the stream."""
    by_digest, asked = {digest(data): data for data in names.values()}, []
    stream = io.BytesIO()

    def reply(message: dict[str, Any]) -> None:
        for wanted, offset in message.get("wanted", []):
            asked.append(by_digest[wanted][offset:])
        sent = zlib.compress(altered if altered is not None else b"".join(asked), 1)
        stream.write(sent if most is None else sent[:most])
        stream.seek(0)

    peer_agent.provide(request(root, names), io.BufferedReader(stream), reply)  # type: ignore[type-var]
    return sum(map(len, asked))


def test_files_arrive_once(tmp_path):
    root = tmp_path / "root"
    names = {f"folder/{number}": data for number, data in enumerate(CONTENTS)}
    assert provide(root, names) == sum(map(len, CONTENTS))
    assert {name: (root / "work" / "run" / name).read_bytes() for name in names} == names
    assert provide(root, names) == 0
    assert provide(root, {**names, "other name": CONTENTS[1], "new": b"new"}) == 3
    assert (root / "work/run/other name").samefile(root / "work/run/folder/1"), "the content is there once"
    kept = peer_agent.check(root)["trees"]["work/run"]
    assert kept == {name: digest(data) for name, data in {**names, "other name": CONTENTS[1], "new": b"new"}.items()}


def test_a_file_that_has_changed_is_seen(tmp_path):
    provide(tmp_path / "root", {"a": b"one", "b": b"two"})
    (tmp_path / "root/work/run/a").unlink()
    (tmp_path / "root/work/run/b").unlink()
    (tmp_path / "root/work/run/b").write_bytes(b"ten")
    assert peer_agent.check(tmp_path / "root")["trees"] == {}


def test_an_interrupted_copy_goes_on(tmp_path):
    big = os.urandom(3 << 20)
    names = {"a": b"small", "big": big}
    with pytest.raises(AgentError, match="the same command goes on from here"):
        provide(tmp_path / "root", names, most=2 << 20)
    assert not (tmp_path / "root/work").exists()
    assert 0 < provide(tmp_path / "root", names) < 1.1 * (1 << 20) + len("small")
    assert (tmp_path / "root/work/run/big").read_bytes() == big


def test_a_damaged_file_gets_no_name(tmp_path):
    with pytest.raises(AgentError, match="arrived damaged"):
        provide(tmp_path / "root", {"a": b"right"}, altered=b"wrong")
    assert not list((tmp_path / "root/files").rglob(digest(b"right")))
    assert provide(tmp_path / "root", {"a": b"right"}) == 5


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/../../b", "", "a//b", "./a", "a\0b", "a/" * 3000 + "b"])
def test_a_name_that_leaves_the_folder(tmp_path, name):
    with pytest.raises(AgentError, match="leaves the folder"):
        provide(tmp_path / "root", {name: b"x"})
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_link_leads_nowhere_else(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    provide(tmp_path / "root", {"a": b"x"})
    (tmp_path / "root/work/run/folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AgentError, match="leaves the folder"):
        provide(tmp_path / "root", {"folder/b": b"y"})
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("given", ["../" * 8 + "etc", "A" * 64, "0" * 63, 7])
def test_what_is_no_digest(tmp_path, given):
    with pytest.raises(AgentError, match="no digest"):
        peer_agent.content(tmp_path, given)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 9}', json.dumps({"format": 1, "index": 1, "environments": {}, "trees": []})],
)
def test_a_damaged_state_counts_as_empty(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    found = peer_agent.check(tmp_path)
    assert (found["environments"], found["packages"], found["trees"]) == ([], [], {})


def test_a_state_does_not_reach_other_folders(tmp_path):
    (tmp_path / "secret").write_text("x")
    root = tmp_path / "root"
    provide(root, {"a": b"x"})
    state = peer_agent.read_state(root)
    info = (tmp_path / "secret").stat()
    state["trees"] = {"..": {"secret": [digest(b"x"), info.st_size, info.st_mtime_ns]}}
    peer_agent.write_state(root, state)
    assert peer_agent.check(root)["trees"] == {}


def test_a_full_disk_is_said_before_anything_is_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_agent.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    with pytest.raises(AgentError, match=r"5 MiB are needed in .*, and 3 MiB are free"):
        provide(tmp_path / "root", {"a": CONTENTS[3]})


def test_another_launcher_waits(tmp_path):
    with peer_agent.locked_root(tmp_path / "root"), pytest.raises(AgentError, match="another command sets up"):
        provide(tmp_path / "root", {"a": b"x"})


class TestPrune:
    DAY_S = 86400

    def used(self, root: Path, place: str, days: float, text: bytes) -> Path:
        """Make an environment or a copy of pipecomp with one file; returns its content."""
        with peer_agent.locked_root(root):
            source = peer_agent.content(root, digest(text))
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_bytes(text)
            peer_agent.link_tree(root, place, [["file", digest(text), 0o644]])
            kind, name = place.split("/")
            state = peer_agent.read_state(root)
            peer_agent.write_state(root, {**state, kind: [*state[kind], name]})
        then = time.time() - days * self.DAY_S
        os.utime(source, (then, then))
        os.utime(root / place, (then, then))
        return source

    def test_what_is_unused_for_30_days_goes(self, tmp_path):
        root = tmp_path / "root"
        provide(root, {"data": b"of a run"})
        old = self.used(root, "environments/old", 31, b"old")
        self.used(root, "packages/old", 31, b"old package")
        recent = self.used(root, "environments/recent", 29, b"recent")
        again = self.used(root, "environments/again", 31, b"again")
        peer_agent.note_use(root / "environments/again")
        provide(root, {"data": b"new"})
        assert sorted(path.name for path in (root / "environments").iterdir()) == ["again", "recent"]
        assert not list((root / "packages").iterdir())
        assert not old.exists()
        assert recent.exists()
        assert again.exists()
        state = peer_agent.read_state(root)
        assert (state["environments"], state["packages"]) == (["recent", "again"], [])

    def test_where_room_is_short_the_oldest_go(self, tmp_path, monkeypatch):
        root = tmp_path / "root"
        provide(root, {"data": b"of a run"})
        contents = [self.used(root, f"environments/{days}", days, bytes([days]) * 1000) for days in (3, 2, 1, 0)]
        monkeypatch.setattr(
            peer_agent.shutil, "disk_usage",
            lambda path: SimpleNamespace(free=500 + sum(1000 for content in contents if not content.exists())),
        )  # fmt: skip
        provide(root, {"data": b"1" * 2200})
        assert sorted(path.name for path in (root / "environments").iterdir()) == ["0", "1"]
        with pytest.raises(AgentError, match="MiB are free"):
            provide(root, {"data": b"1" * 9000})
        assert [path.name for path in (root / "environments").iterdir()] == ["0"], "it was used just now"

    @pytest.mark.parametrize("linked", [False, True], ids=["", "by another name of its folder"])
    def test_what_a_run_uses_stays(self, tmp_path, linked):
        root = tmp_path / "root"
        provide(root, {"data": b"of a run"})
        for place in ("environments/old", "packages/old"):
            self.used(root, place, 31, place.encode())
        (tmp_path / "link").symlink_to(root)
        program = (tmp_path / "link" if linked else root) / "environments" / "old" / "sleep"
        program.symlink_to(shutil.which("sleep"))
        then = time.time() - 31 * self.DAY_S
        os.utime(program.parent, (then, then))
        with subprocess.Popen([str(program), "100"]) as run:
            provide(root, {"data": b"new"})
            run.kill()
        assert (root / "environments" / "old" / "file").exists()
        assert (root / "packages" / "old" / "file").exists()

    def test_an_interrupted_copy_stays(self, tmp_path):
        root, big = tmp_path / "root", os.urandom(3 << 20)
        with pytest.raises(AgentError):
            provide(root, {"big": big}, most=2 << 20)
        for path in (root / "files").rglob("*.part"):
            os.utime(path, (0, 0))
        assert provide(root, {"big": big}) < len(big)


class TestRemove:
    def test_a_folder_of_others_stays(self, tmp_path):
        (tmp_path / "letter").write_text("mine")
        with pytest.raises(AgentError, match="is not a folder of pipecomp's"):
            peer_agent.remove(tmp_path, keep_results=False)
        with pytest.raises(AgentError, match="has other files"):
            provide(tmp_path, {"a": b"x"})
        assert [path.name for path in tmp_path.iterdir()] == ["letter"]

    def test_results_of_runs_stay_unless_asked_for(self, tmp_path):
        root = tmp_path / "root"
        provide(root, {"data/text.txt": b"x" * 100})
        (root / "work/run/out").mkdir()
        (root / "work/run/out/model").write_bytes(b"weights")
        left = peer_agent.remove(root, keep_results=True)
        assert (left["files"], left["results"]) == (1, 7)
        assert [path.name for path in root.rglob("*") if path.is_file()] == ["lock", "model"]
        assert provide(root, {"data/text.txt": b"x" * 100}) == 100, "the folder can be used again"
        assert peer_agent.remove(root, keep_results=False)["files"] == 0
        assert not root.exists()

    def test_a_run_that_goes_on_keeps_its_folder(self, tmp_path):
        root = tmp_path / "root"
        provide(root, {"a": b"x"})
        process = subprocess.Popen([sys.executable, "-c", "input()"], cwd=root / "work/run", stdin=subprocess.PIPE)
        try:
            with pytest.raises(AgentError, match=f"processes use .*: {process.pid}; end the run first"):
                peer_agent.remove(root, keep_results=False)
        finally:
            process.communicate(b"\n", timeout=HANG_S)
        peer_agent.remove(root, keep_results=False)
        assert not root.exists()


def test_an_error_of_the_system_is_one_line(tmp_path):
    """A disk that is full or not writable: the launcher names the machine with it."""
    (tmp_path / "file").write_text("")
    words = json.dumps({"do": "provide", **request(tmp_path / "file" / "root", {"a": b"x"})})
    done = subprocess.run(
        [sys.executable, peer_agent.__file__], input=words + "\n", capture_output=True, text=True, timeout=HANG_S,
        check=True,
    )  # fmt: skip
    ready, answer = done.stdout.splitlines()
    assert ready == peer_agent.READY
    assert "Not a directory" in json.loads(answer)["error"]


def test_the_program_needs_nothing_beside_python():
    done = subprocess.run(
        [sys.executable, "-I", "-S", peer_agent.__file__, "check", "/nonexistent"], capture_output=True, text=True,
        timeout=HANG_S, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(peer_agent.STATE_LINE)


TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
mkdir -p "$UV_CACHE_DIR" "$PIP_CACHE_DIR"
echo broken
exit {status}
"""


@pytest.mark.parametrize(("uv", "tried"), [(0, ["uv"]), (1, ["uv", "pip"])])
def test_pip_installs_where_uv_fails(tmp_path, monkeypatch, uv, tried):
    """And what they download is in the root."""
    said: list[str] = []
    for name, status in (("uv", uv), ("python", 0)):
        (tmp_path / name).write_text(TOOL.format(log=tmp_path / "log", status=status))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    folder = tmp_path / "root" / "environments" / "e"
    environment = {"uv": str(tmp_path / "uv"), "variables": {}, "requirements": [[("torch 1", ["torch==1"])]]}
    peer_agent.install(folder, environment, lambda message: said.append(message["say"]))
    assert said == [f"installing torch 1 with {tool}" for tool in tried]
    calls = (tmp_path / "log").read_text().splitlines()
    assert all(f"{folder}/bin/python" in call and call.endswith("torch==1") for call in calls)
    assert sorted(path.name for path in (tmp_path / "root" / "cache").iterdir()) == ["pip", "uv"]


def test_packages_that_cannot_be_installed(tmp_path):
    (tmp_path / "uv").write_text(TOOL.format(log=tmp_path / "log", status=1))
    (tmp_path / "uv").chmod(0o755)
    step = [("torch 1 for the CPU", ["torch==1+cpu"]), ("torch 1", ["torch==1"])]
    environment = {"uv": str(tmp_path / "uv"), "variables": {}, "requirements": [step]}
    with pytest.raises(AgentError, match="cannot be installed: ERROR"):
        peer_agent.install(tmp_path / "root" / "environments" / "e", environment, lambda message: None)
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_python_that_uv_has_brought_is_no_file_of_others(tmp_path):
    (tmp_path / "root" / "python" / "3.11").mkdir(parents=True)
    provide(tmp_path / "root", {"a": b"x"})
    peer_agent.remove(tmp_path / "root", keep_results=False)
    assert not (tmp_path / "root").exists()
