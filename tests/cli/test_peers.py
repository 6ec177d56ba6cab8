"""The files of a run on machines that are set up, ranks there, and `pipecomp peers`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pipecomp.cli import app, peers
from pipecomp.cli.peers import PeerPlaces, find_inputs, model_files, options_there, place_there
from pipecomp.distributed import bring_up, peer_session
from pipecomp.distributed.bring_up import EnvironmentPlan, PeerPlan
from pipecomp.distributed.peer_question import PeerAnswer
from pipecomp.distributed.ssh_launcher import RankCommand
from pipecomp.errors import ConfigError
from pipecomp.plan.options import TrainOptions
from pipecomp.utils.processes import python_module_command


def told(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, done.output
    return " ".join(done.output.split())


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home of this machine, and a working directory with a model and a text."""
    work = tmp_path / "run"
    for folder in (tmp_path / "home", work / "model", tmp_path / "data"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(work)
    monkeypatch.setenv("PWD", str(work))
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin", "onnx.onnx"):
        (work / "model" / name).write_text(name)
    (work / "model" / "model.safetensors").write_text("weights")
    (tmp_path / "data" / "text.txt").write_text("text")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("text.txt", "text.txt"),
        ("./a/../b", "b"),
        ("/home/me/run/a", "a"),
        ("..data", "..data"),
        ("../data", "outside/home/me/data"),
        ("/data/a", "outside/data/a"),
        (".", "."),
    ],
)
def test_paths_stay_in_the_working_directory_there(text, there):
    assert place_there(text, "/home/me/run") == there


def options(**more: object) -> TrainOptions:
    return TrainOptions(model="model", data=[Path("../data/text.txt"), Path("a/data-set")], **more)  # type: ignore[arg-type]


def test_the_files_of_a_run(home):
    model, data = find_inputs(options())[1], find_inputs(options())[0]
    assert [file.path for file in data.files] == [f"outside{home.parent}/data/text.txt"]
    assert [file.path for file in model.files] == [
        f"model/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")
    ]


def test_shards_of_weights_that_an_index_lists(home):
    folder = home.parent / "run" / "model"
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "other.safetensors").write_text("not listed")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    names = [path.name for path in model_files(folder)]
    assert names == ["config.json", "model-1.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    for name in ("model-1.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink()
    assert "pytorch_model.bin" in [path.name for path in model_files(folder)]


def test_a_model_of_the_hub_comes_from_the_cache(home, monkeypatch):
    from huggingface_hub import constants

    repository = home / "hub" / "models--me--small"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text(name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    found = peers.hub_files("me/small")
    if not found:  # the function has taken the folder when it was defined
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(snapshot / file))
        found = peers.hub_files("me/small")
    [item] = found
    assert item.place == "huggingface/hub/models--me--small"
    assert [file.path for file in item.files] == [
        f"snapshots/{'a' * 40}/config.json", f"snapshots/{'a' * 40}/model.safetensors", "refs/main",
    ]  # fmt: skip
    assert peers.hub_files("train:2048") == []


def test_options_have_the_paths_of_the_machine(home):
    found = options_there(options(out=Path("/abs/run"), store=Path("s")), str(home.parent / "run"))
    assert found.data == [Path(f"outside{home.parent}/data/text.txt"), Path("a/data-set")]
    assert (found.model, found.out, found.store) == ("model", Path("outside/abs/run"), Path("s"))


def plan(**more: object) -> PeerPlan:
    given = {"environment": EnvironmentPlan("e", None, False, True), "package": "p", "work": "work/run-1", **more}
    return PeerPlan("two", PeerAnswer(root="/r"), lacking={}, **given)  # type: ignore[arg-type]


def test_ranks_of_the_machine_have_its_python_and_folder(home):
    command = tuple(python_module_command("pipecomp.recipes.planned", options(out=Path("run")).to_json()))
    ranks = [RankCommand(rank=n, host=host, command=command, variables={"RANK": str(n)}) for n, host in
             enumerate((None, "two", "three"))]  # fmt: skip
    own, two, three = PeerPlaces({"two": plan()}, str(home.parent / "run")).place(ranks)
    assert (own, three) == (ranks[0], ranks[2])
    assert two.command[:4] == ("/r/environments/e/bin/python", "-P", "-m", "pipecomp.recipes.planned")
    assert TrainOptions.from_json(two.command[-1]).data[0] == Path(f"outside{home.parent}/data/text.txt")
    assert two.folder == "/r/work/run-1"
    assert PeerPlaces({}, "").results(two) == "two:/r/work/run-1/run"
    assert PeerPlaces({}, "").results(own) is None
    assert two.variables["RANK"] == "1"
    assert two.variables["PYTHONPATH"] == "/r/packages/p"
    assert two.variables["HF_HOME"] == "/r/huggingface"
    same = PeerPlaces({"two": plan(environment=None, package=None)}, str(home.parent / "run")).place(ranks)[1]
    assert same.command[:-1] == command[:-1]
    assert same.variables == ranks[1].variables


def start(monkeypatch, **more: object) -> PeerPlaces:
    """Set up a machine that asks for consent."""
    monkeypatch.setattr(bring_up, "ask", lambda host, asked: PeerAnswer(root="/r"))

    def all_of_it(hosts: list[str], spares: list[str], asked: bytes, **given: object) -> dict[str, PeerPlan]:
        given["agree"](["two: Python"])  # type: ignore[operator]
        return {"two": plan()}

    monkeypatch.setattr(bring_up, "bring_up", all_of_it)
    command = tuple(python_module_command("pipecomp.recipes.planned", "{}"))
    ranks = [RankCommand(rank=0, host="two", command=command)]
    given = {"packages": "auto", "remote_folder": ".pipecomp", "yes": False, **more}
    return peers.set_up_peers(options(), ranks, [], **given)  # type: ignore[arg-type]


def test_consent(home, monkeypatch):
    assert list(start(monkeypatch, yes=True).plans) == ["two"]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    with pytest.raises(ConfigError, match="--yes: got False"):
        start(monkeypatch)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(peers.typer, "confirm", lambda text, err: False)
    with pytest.raises(peers.typer.Exit):
        start(monkeypatch)
    monkeypatch.setattr(peers.typer, "confirm", lambda text, err: True)
    assert list(start(monkeypatch).plans) == ["two"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"packages": "pip"}, "--packages: got 'pip', allowed: auto, index, here"),
        ({"remote_folder": "a:b"}, "--remote-folder: got 'a:b'"),
        ({"remote_folder": "../a"}, "--remote-folder"),
        ({"remote_folder": ""}, "--remote-folder"),
    ],
)
def test_options_of_setting_up(home, monkeypatch, more, message):
    with pytest.raises(ConfigError, match=message):
        start(monkeypatch, **more)


class TestCommands:
    def test_list_and_remove(self, home, monkeypatch, tmp_path):
        assert "No machine was set up from here" in told("peers", "list")
        bring_up.remember({"two": "/r", "three": "/r"})
        answers = {"measure": {"bytes": 1700000000, "results": 5000, "files": 2}, "remove": {"files": 0}}

        def request_of(host: str, root: str, request: dict[str, object]) -> dict[str, object]:
            if host == "three":
                raise ConfigError("--peers", host, "a machine that answers")
            asked.append((host, root, request))
            return answers[str(request["do"])]

        asked: list[object] = []
        monkeypatch.setattr(peer_session, "request_of", request_of)
        text = told("peers", "list", "--json", str(tmp_path / "list.json"))
        assert "two │ /r │ 1.7 GB │ 5.0 kB" in text
        assert "three │ /r │ no answer" in text
        assert json.loads((tmp_path / "list.json").read_text())[0]["bytes"] == 1700000000
        assert "--yes: got False" in told("peers", "remove", "two", status=1)
        assert asked == [("two", "/r", {"do": "measure"})]
        answers["remove"] = {"files": 2, "results": 5000}
        assert "5.0 kB of results are left in /r/work (--results)" in told("peers", "remove", "two", "--yes")
        assert "two" in bring_up.known_peers()
        answers["remove"] = {"files": 0}
        assert "two: removed" in told("peers", "remove", "two", "--yes", "--results")
        assert asked[-1] == ("two", "/r", {"do": "remove", "keep_results": False})
        assert bring_up.known_peers() == {"three": "/r"}
        assert "got 'three'" in told("peers", "remove", "three", "--yes", status=1)
        bring_up.remember({}, gone=["three"])
        assert list(home.iterdir()) == [], "after the last machine nothing is left here"
