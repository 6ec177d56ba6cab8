"""Images for recipes: reading files, views of them, clients and their turns."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from pipecomp.data import TrainLoader
from pipecomp.errors import ConfigError, DataError
from pipecomp.recipes.images import ClientTurns, Images, Views, dataset_images, read_images, shares
from pipecomp.recipes.resnet import client_cuts, resnet


def images(n=6, side=5, classes=3):
    draw = torch.Generator().manual_seed(0)
    return Images(torch.randint(0, 256, (n, side, side, 3), generator=draw).byte(), torch.arange(n) % classes)


# -- files


def test_npz_files(tmp_path):
    pixels = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    np.savez(tmp_path / "both.npz", x_train=pixels, y_train=[1, 0], x_test=pixels[:1], y_test=[[3]])
    np.savez(tmp_path / "one.npz", x=pixels, y=[2, 2])
    found = read_images([str(tmp_path / "both.npz"), str(tmp_path / "one.npz")], part="train")
    assert (len(found), found.shape, found.classes) == (4, (3, 4, 5), 3)
    assert found.labels.tolist() == [1, 0, 2, 2]
    assert torch.equal(found[1]["pixel_values"], torch.tensor(pixels[1]).permute(2, 0, 1) / 255 * 4 - 2)
    assert read_images([str(tmp_path / "both.npz")], part="test").labels.tolist() == [3]


@pytest.mark.parametrize("labels", [1, 2])
def test_cifar_files(tmp_path, labels):
    rows = np.random.default_rng(0).integers(0, 100, (3, labels + 3072)).astype(np.uint8)
    rows.tofile(tmp_path / "data.bin")
    found = read_images([str(tmp_path / "data.bin")], part="train")
    assert found.labels.tolist() == rows[:, labels - 1].tolist(), "the fine label is CIFAR-100's second byte"
    value = rows[2, labels + 2 * 1024 + 7 * 32 + 9]  # blue, line 7, column 9
    assert float(found[2]["pixel_values"][2, 7, 9]) == pytest.approx(value / 255 * 4 - 2)


def test_files_that_are_none(tmp_path):
    (tmp_path / "short.bin").write_bytes(b"abc")
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_text("")
    with open(tmp_path / "array.npz", "wb") as file:
        np.save(file, np.zeros(3))
    np.savez(tmp_path / "floats.npz", x=np.zeros((1, 4, 4, 3)), y=[0])
    np.savez(tmp_path / "names.npz", a=np.zeros(1))
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 4, 4, 3), np.uint8), y=np.zeros(0, np.int64))
    (tmp_path / "half.npz").write_bytes((tmp_path / "names.npz").read_bytes()[:100])
    np.savez(tmp_path / "labels.npz", x=np.zeros((2, 4, 4, 3), np.uint8), y=[0])
    np.savez(tmp_path / "small.npz", x=np.zeros((2, 2, 2, 3), np.uint8), y=[0, 1])
    np.savez(tmp_path / "large.npz", x=np.zeros((2, 4, 4, 3), np.uint8), y=[0, 1])
    for names, message in {
        ("nowhere.bin",): "nowhere.bin: cannot be read: No such file",
        ("nowhere.npz",): "nowhere.npz: cannot be read: No such file",
        ("short.bin",): "3 bytes are not whole images of CIFAR-10 or CIFAR-100",
        ("text.npz",): "text.npz: not an .npz file",
        ("empty.npz",): "empty.npz: not an .npz file",
        ("array.npz",): "array.npz: not an .npz file",
        ("floats.npz",): r"x is float64 \(1, 4, 4, 3\); needed: uint8",
        ("none.npz",): "x has no images",
        ("half.npz",): "half.npz: not an .npz file",
        ("names.npz",): "has a; needed: x_train and y_train, or x and y",
        ("labels.npz",): "y must have an integer of at least 0 for each of 2 images",
        ("small.npz", "large.npz"): "images of different sizes",
    }.items():
        with pytest.raises(DataError, match=message):
            read_images([str(tmp_path / name) for name in names], part="train")


def test_a_dataset_of_images(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3)).astype(np.uint8)
    for number, (part, kind) in enumerate(product(("train", "test"), ("cat", "dog"))):
        (tmp_path / "data" / part / kind).mkdir(parents=True)
        Image.fromarray(pixels[number]).save(tmp_path / "data" / part / kind / "one.png")
    for part, first in (("train", 0), ("test", 2)):
        found = dataset_images(str(tmp_path / "data"), part=part)
        assert (found.shape, found.labels.tolist()) == ((3, 5, 6), [0, 1])
        assert torch.equal(found[1]["pixel_values"], torch.tensor(pixels[first + 1]).permute(2, 0, 1) / 255 * 4 - 2)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({"img": [4, 4], "y": [0, 1]}, "dataset mine has the columns img, y; needed: image and label"),
        ({"img": [4, 5], "label": [0, 1]}, r"dataset mine: images of different sizes: \[\(4, 4, 3\), \(5, 5, 3\)\]"),
        ({"image": [4, 4], "label": [1, -1]}, "dataset mine, sample 1: label -1; needed: a class, from 0 on"),
        ({"image": [4, 4], "fine_label": [None, 1]}, "dataset mine, sample 0: label None; needed: a class"),
    ],
)
def test_datasets_of_images_that_are_none(monkeypatch, rows, told):
    """Datasets of the hub: parts whose labels are secret have -1."""
    from PIL import Image

    columns = {key: [Image.new("L", (n, n)) for n in rows[key]] if "im" in key else rows[key] for key in rows}
    split = type("Split", (dict,), {"column_names": list(columns)})(columns)
    monkeypatch.setattr("pipecomp.recipes.images.dataset_split", lambda *given: split)
    with pytest.raises(DataError, match=told):
        dataset_images("mine", part="train")


# -- views


def test_every_view_is_the_crop_and_flip_that_its_index_names():
    data = images(2, side=4)
    views = Views(data, 2)
    seen = set()
    for index in range(len(views)):
        image, flipped, down, right = views.view(index)
        seen.add((image, flipped, down, right))
        sample = views[index]
        x = data.image(image).numpy()
        x = x[:, :, ::-1] if flipped else x
        padded = np.zeros((3, 8, 8), np.float32)
        padded[:, 2:6, 2:6] = x
        assert np.array_equal(sample["pixel_values"], padded[:, 2 + down : 6 + down, 2 + right : 6 + right])
        assert sample["shifts"].tolist() == [down, right]
        assert sample["labels"] == data.labels[image]
        assert views.sample_id(index) == 2 * image + flipped
    assert len(seen) == len(views) == 2 * 2 * 5 * 5
    plain = Views(data, 2, matched=False)
    assert {plain.sample_id(i) for i in range(len(plain))} == {0, 1}
    assert "shifts" not in plain[0]
    assert "shifts" not in Views(data, 0)[1]
    assert torch.equal(plain[77]["pixel_values"], views[77]["pixel_values"])


def test_views_are_drawn_evenly():
    views = Views(images(), 1)
    drawn = views.draw(torch.zeros(3600).long(), torch.Generator().manual_seed(0))
    counts = Counter(drawn)
    assert set(counts) == set(range(18))
    assert all(140 < count < 270 for count in counts.values())
    unflipped = Views(images(), 1, flip=False).draw(torch.arange(6), torch.Generator().manual_seed(0))
    assert [views.view(i)[:2] for i in unflipped] == [(n, False) for n in range(6)]


# -- clients


def test_shares_are_a_partition_and_follow_the_concentration():
    labels = torch.arange(4000) % 10

    def spread(concentration):
        parts = shares(labels, 16, concentration, 0)
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(4000))
        assert min(len(part) for part in parts) > 0
        counts = torch.stack([labels[part].bincount(minlength=10) for part in parts]).float()
        return float((counts / counts.sum(1, keepdim=True)).max(1).values.mean())

    # The largest class of a client: 0.1 of it if all are alike, 1 if it has one class only.
    assert spread(1000.0) < 0.13 < 0.3 < spread(0.5) < 0.75 < spread(0.02)
    again, other = (shares(labels, 16, 0.5, seed) for seed in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(again, shares(labels, 16, 0.5, 0), strict=True))
    assert [len(part) for part in again] != [len(part) for part in other]
    with pytest.raises(DataError, match="3 images are too few for 4 clients"):
        shares(torch.zeros(3), 4, 0.5, 0)


def test_turns():
    views = Views(images(11), 1)
    parts = [torch.arange(7), torch.tensor([7]), torch.tensor([8, 9, 10])]
    turns = ClientTurns(views, parts, batch=4, micro_batch=2, epochs=2, seed=0)
    # 14 images are 3 steps of 4, 2 are fewer than one step and repeated, 6 are one step.
    assert (turns.per_round, turns.per_epoch) == (5, 10)
    assert [turns.turn(step) for step in range(7)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
        (0, 1, 0),
        (0, 2, 0),
        (1, 0, 0),
        (1, 0, 1),
    ]
    rounds = [[turns.batch(10 * r + n) for n in range(10)] for r in range(2)]
    for found in rounds:
        shown = [views.view(i)[0] for batch in found for i in batch]
        assert Counter(shown[:7]) == Counter(range(7)), "a pass shows every image once"
        assert set(shown[7:12]) <= set(range(7))
        assert len(set(shown[7:12])) == 5
        assert shown[12:16] == [7] * 4
        assert set(shown[16:19]) == {8, 9, 10}
    assert rounds[0] != rounds[1]
    assert turns.batch(3) == rounds[0][3], "any batch can be asked for at any time"
    other = ClientTurns(views, parts, batch=4, micro_batch=2, epochs=2, seed=1)
    assert other.batch(0) != rounds[0][0]


def test_the_loader_hands_out_ids_of_samples_and_not_of_views():
    views = Views(images(), 1)
    turns = ClientTurns(views, [torch.arange(6)], batch=4, micro_batch=2, epochs=1, seed=0)
    loader = TrainLoader(views, turns)
    batches = iter(loader)
    for number in range(3):
        upcoming = loader.upcoming(0)
        batch = next(batches)
        expected = [views.view(i) for i in turns.batch(number)]
        assert upcoming == list(batch.ids) == [2 * image + flipped for image, flipped, *_ in expected]
        assert batch.inputs["shifts"].tolist() == [[down, right] for *_, down, right in expected]


# -- the model


def test_resnet34_is_the_papers():
    net = resnet("resnet34", 10)
    weights = sum(p.numel() for p in net.parameters())
    assert weights == 21_282_122  # torchvision's 21,284,672 with 10 classes and a stem of 3 × 3
    assert len(net) == 1 + 16 + 1
    assert client_cuts(net) == [0, 2, 16, 18]
    x = torch.empty(2, 3, 32, 32, device="meta")
    shapes = []
    for block in resnet("resnet34", 100, norm="group").to("meta"):
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes[1] == (64, 32, 32)
    assert shapes[15] == (512, 4, 4)
    assert shapes[-1] == (100,)


def test_sizes_and_norms_that_are_none():
    with pytest.raises(ConfigError, match="--model: got 'resnet9'"):
        resnet("resnet9", 10)
    with pytest.raises(ConfigError, match="--norm: got 'layer'"):
        resnet("tiny", 10, norm="layer")
