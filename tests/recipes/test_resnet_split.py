"""Split learning as a user runs it: client, server and client as three nodes of the launcher, files of images."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipecomp.errors import DataError
from pipecomp.recipes.images import read_images
from pipecomp.recipes.resnet import resnet
from pipecomp.recipes.resume import DATA
from tests.recipes.recipe_runs import ROOT, Ended, launch, launch_each, script

RECIPE = ROOT / "recipes" / "resnet_split"
IMAGES, HELD_OUT, CLASSES, SIDE, ROUNDS, BATCH = 40, 11, 3, 16, 3, 8

NO_FILES = {"train-file": "none.npz", "eval-file": "none.npz"}

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images whose class is a bright stripe, and a configuration."""
    folder = tmp_path_factory.mktemp("split")
    draw = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", IMAGES), ("test", HELD_OUT)):
        y = np.arange(count) % CLASSES
        x = draw.integers(0, 100, (count, SIDE, SIDE, 3))
        for image, label in zip(x, y, strict=True):
            image[:, :, label] += 120
        arrays |= {f"x_{part}": x.astype(np.uint8), f"y_{part}": y}
    np.savez(folder / "images.npz", **arrays)
    config = json.loads((RECIPE / "ds_config.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": BATCH // 2, "gradient_accumulation_steps": 2}
    config["optimizer"]["params"]["lr"] = 0.05
    config["pipecomp"]["store"]["path"] = "messages"
    (folder / "ds_config.json").write_text(json.dumps(config))
    return folder


def arguments(**changed: str) -> list[str]:
    given = {
        "deepspeed_config": "ds_config.json",
        "model": "tiny",
        "norm": "group",
        "train-file": "images.npz",
        "eval-file": "images.npz",
        "clients": "2",
        "rounds": str(ROUNDS),
        "epochs": "2",
        "crop": "2",
        "seed": "3",
        "decay-rounds": "2",
        "metrics": "metrics.jsonl",
        "save": "model",
    } | changed
    return [word for key, value in given.items() for word in (f"--{key}", value)]


@pytest.fixture(scope="module")
def ended(work: Path) -> Ended:
    """Each process has arguments of its own, as on three machines. The server has no images."""
    nodes = [arguments(checkpoint="checkpoints", **(NO_FILES if node == 1 else {})) for node in range(3)]
    return launch_each(work, "resnet_split", *nodes)


@pytest.fixture
def metrics(work: Path, ended: Ended) -> list[dict]:
    assert ended.status == 0, ended.output
    return [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]


def test_metrics_tell_rounds_accuracy_and_bytes(metrics: list[dict], ended: Ended) -> None:
    assert "Traceback" not in ended.output
    assert ended.output.count(f"{IMAGES} training samples, {HELD_OUT} held out") == 1
    trained = [line for line in metrics if "eval" not in line]
    evaluated = [line for line in metrics if "eval" in line]
    assert [line["step"] for line in trained] == list(range(1, len(trained) + 1))
    assert [line["round"] for line in evaluated] == list(range(1, ROUNDS + 1))
    per_round = len(trained) // ROUNDS
    assert per_round in (2 * IMAGES // BATCH, 2 * IMAGES // BATCH - 1)  # two clients, each leaving out less than a step
    assert [line["round"] for line in trained] == [1 + i // per_round for i in range(len(trained))]
    rates = [0.05 * 0.1 ** ((line["round"] - 1) // 2) for line in trained]
    assert [line["lr"] for line in trained] == pytest.approx(rates)
    assert all(line["images_per_s"] > 0 for line in trained)
    assert evaluated[-1]["eval"]["loss"] < evaluated[0]["eval"]["loss"]
    assert list(trained[-1]["links"]) == ["0->1", "1->2"], "the server has a link to each of the client's ends"
    for name, values in (("0->1", 16 * 8 * 8), ("1->2", 32 * 4 * 4)):
        link = trained[-1]["links"][name]
        raw = len(trained) * BATCH * values * 4
        assert link["forward_bytes_raw"] == link["backward_bytes_raw"] == raw
        # Of a line of 128 values 26 are kept: their places in 16 bytes, a scale, and a byte each.
        sent = raw // (128 * 4) * (16 + 4 + 26)
        assert sent < link["backward_bytes_sent"] < sent + len(trained) * 2 * (64 + 4 * 33)
        last = link["forward_bytes_sent"] - trained[-2]["links"][name]["forward_bytes_sent"]
        assert last < 0.5 * BATCH * values * 4, "most images have been seen before"


def test_the_saved_parts_are_the_network_that_was_evaluated(work: Path, metrics: list[dict]) -> None:
    from safetensors.torch import load_file

    parts = [load_file(work / "model" / f"part-{i}.safetensors") for i in range(3)]
    assert set(parts[1]) == {name for name in parts[1] if name.startswith("2.")}, "the server has the middle block"
    net = resnet("tiny", CLASSES, norm="group").eval()
    net.load_state_dict({name: value for part in parts for name, value in part.items()})
    arrays = np.load(work / "images.npz")
    x = torch.from_numpy(arrays["x_test"]).permute(0, 3, 1, 2) / 255 * 4 - 2
    y = torch.from_numpy(arrays["y_test"])
    with torch.no_grad():
        logits = net(x)
    expected = metrics[-1]["eval"]
    assert float(torch.nn.functional.cross_entropy(logits, y)) == pytest.approx(expected["loss"], rel=1e-4)
    assert float((logits.argmax(1) == y).float().mean()) == pytest.approx(expected["accuracy"])


def test_all_of_its_checkpoint_knows_what_was_trained(work: Path, metrics: list[dict]) -> None:
    last = work / "checkpoints" / f"checkpoint-{metrics[-1]['step']}"
    images = read_images([str(work / "images.npz")], part="train")
    assert json.loads((last / "pipeline.json").read_text())["run"]["trained"] == {
        "--model": "tiny",
        "--norm": "group",
        "--clients": 2,
        "--concentration": 0.5,
        "--epochs": 2,
        "--crop": 2,
        "--decay-rounds": 2,
        "--no-flip": False,
        "--unmatched": False,
        "samples of a step": 2 * (BATCH // 2),
        "replicas": 1,
        "stages": 3,
        DATA: images.digest(),
    }


def test_a_run_starts_from_what_another_saved(work: Path, metrics: list[dict]) -> None:
    more = {"metrics": "again.jsonl", "save": "again", "weights": "model", "max-steps": "1", "clients": "1"}
    found = launch(work, "resnet_split", *arguments(**more), processes=3)
    assert found.status == 0, found.output
    lines = [json.loads(line) for line in (work / "again.jsonl").read_text().splitlines()]
    before = [line for line in metrics if "eval" in line]
    assert lines[1]["eval"]["loss"] == pytest.approx(before[-1]["eval"]["loss"], rel=0.2)
    assert lines[1]["eval"]["loss"] < before[0]["eval"]["loss"] - 0.1 < 1.2


def test_another_number_of_processes_is_refused_in_one_line(work: Path) -> None:
    found = launch(work, "resnet_split", *arguments(metrics="no.jsonl", save="no"))
    assert found.status != 0
    assert found.output.count("resnet_split: error: processes: got 2, allowed: 3: a client's first part") == 1
    assert "Traceback" not in found.output
    assert not (work / "no.jsonl").exists()


def test_parts_of_another_network_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    train = script("resnet_split")
    monkeypatch.setattr(train.dist, "get_rank", lambda: 2)
    net, other = resnet("tiny", 3, norm="group"), resnet("tiny", 3, norm="group")
    mine = {name: value for name, value in other.state_dict().items() if name[0] in "34"}
    save_file(mine, tmp_path / "part-2.safetensors")
    train.load(net, str(tmp_path))
    assert torch.equal(net[4][2].weight, other[4][2].weight)
    assert not torch.equal(net[2].conv1.weight, other[2].conv1.weight), "another rank's part"
    for wrong, told in (
        ({name: value for name, value in mine.items() if name[0] == "3"}, r"lacks 4\.2\.weight"),
        (mine | {"9.bias": torch.zeros(1)}, r"has no use for 9\.bias"),
        (resnet("tiny", 5, norm="group").state_dict(), "not a part of this network"),
    ):
        save_file(wrong, tmp_path / "part-2.safetensors")
        with pytest.raises(DataError, match=told):
            train.load(net, str(tmp_path))
    with pytest.raises(DataError, match=r"part-2\.safetensors: not a part of this network"):
        train.load(net, str(tmp_path / "nowhere"))


def test_half_precision_counts_further_than_256() -> None:
    train = script("resnet_split")
    labels = torch.arange(301) % 5
    logits = torch.zeros(301, 5, dtype=torch.bfloat16)
    logits[torch.arange(301), labels] = 1.0
    expected = torch.nn.functional.cross_entropy(logits.double(), labels)
    assert float(train.mean_loss(logits, labels)) == pytest.approx(float(expected), rel=1e-6)
    predicted = SimpleNamespace(predictions=logits.float().numpy(), label_ids=labels.numpy())
    assert train.accuracy(predicted) == {"accuracy": 1.0}
    predicted.label_ids = (labels.numpy() + (np.arange(301) < 1)) % 5
    assert train.accuracy(predicted)["accuracy"] == pytest.approx(300 / 301)
