"""Labelled images for recipes: files, random crops and flips with ids for cached activations, clients in turn.

Shapes: N images, h rows, w columns.
"""

from __future__ import annotations

import hashlib
import zipfile
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipecomp.errors import DataError
from pipecomp.kernels import ops
from pipecomp.recipes.text import dataset_split

CIFAR_SIDE = 32
CIFAR_LABELS = {1: "CIFAR-10", 2: "CIFAR-100"}  # bytes of labels before the pixels of an image
IMAGE_COLUMNS, LABEL_COLUMNS = ("img", "image"), ("label", "labels", "fine_label")


class Images(Dataset):
    """Unchanged images with labels, for evaluation and as the source of `Views`.

    Samples have pixel_values float32 [3, h, w], centered at zero, and labels.

    Args:
        pixels: uint8 [N, h, w, 3].
        labels: Integers [N].
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.labels = labels.long()
        self.classes = int(self.labels.max()) + 1
        self._pixels = pixels.permute(0, 3, 1, 2).contiguous()

    @property
    def shape(self) -> tuple[int, int, int]:
        """3, h and w."""
        return (3, self._pixels.shape[2], self._pixels.shape[3])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.image(index), "labels": self.labels[index]}

    def image(self, index: int) -> Tensor:
        """Return an image as float32 [3, h, w], values from -2 to 2."""
        return (self._pixels[index].float() / 255 - 0.5) * 4

    def digest(self) -> str:
        """Return a short hash of all images and labels."""
        digest = hashlib.sha256(self._pixels.numpy().tobytes())
        digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()[:16]


# -- reading


def read_images(paths: list[str], *, part: str) -> Images:
    """Read the images of one or several files.

    Args:
        paths: An .npz file has the arrays x_train [N, h, w, 3] uint8 and y_train [N] (x_test and y_test for the part
            "test"), or x and y. A .bin file is the binary version of CIFAR-10, or of CIFAR-100 with its fine labels.
        part: "train" or "test".

    Raises:
        DataError: If a file has another format.
    """
    parts = [_read_npz(path, part) if path.endswith(".npz") else _read_cifar(path) for path in paths]
    _check_sizes(", ".join(paths), {pixels.shape[1:] for pixels, _ in parts})
    return Images(torch.cat([pixels for pixels, _ in parts]), torch.cat([labels for _, labels in parts]))


def _read_npz(path: str, part: str) -> tuple[Tensor, Tensor]:
    try:
        with np.load(path) as arrays:
            pairs = ((f"x_{part}", f"y_{part}"), ("x", "y"))
            names = next((pair for pair in pairs if all(name in arrays for name in pair)), None)
            if names is None:
                raise DataError(f"{path}: has {', '.join(arrays)}; needed: x_{part} and y_{part}, or x and y")
            pixels, labels = (arrays[name] for name in names)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    # EOFError: the file is empty. TypeError: it has one array, as an .npy file does.
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not an .npz file of arrays: {error}") from error
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
        raise DataError(f"{path}: {names[0]} is {pixels.dtype} {pixels.shape}; needed: uint8 [N, h, w, 3]")
    if not len(pixels):
        raise DataError(f"{path}: {names[0]} has no images")
    labels = labels.reshape(-1)
    if len(labels) != len(pixels) or not np.issubdtype(labels.dtype, np.integer) or (labels < 0).any():
        raise DataError(f"{path}: {names[1]} must have an integer of at least 0 for each of {len(pixels)} images")
    return torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64))


def _read_cifar(path: str) -> tuple[Tensor, Tensor]:
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    size = 3 * CIFAR_SIDE * CIFAR_SIDE
    labels = next((count for count in CIFAR_LABELS if len(data) and len(data) % (size + count) == 0), None)
    if labels is None:
        raise DataError(f"{path}: {len(data)} bytes are not whole images of {' or '.join(CIFAR_LABELS.values())}")
    rows = torch.from_numpy(data).view(-1, size + labels)
    pixels = rows[:, labels:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).permute(0, 2, 3, 1)
    return pixels, rows[:, labels - 1].long()


def dataset_images(name: str, *, part: str) -> Images:
    """Read the images of a dataset.

    Args:
        name: For `datasets.load_dataset`, NAME or NAME:CONFIG.
        part: The split.

    Raises:
        ConfigError: If there is no such dataset.
        DataError: If it has no images or labels, or images of different sizes or without a label.
    """
    rows = dataset_split(name, (part,), ())
    image = next((column for column in IMAGE_COLUMNS if column in rows.column_names), None)
    label = next((column for column in LABEL_COLUMNS if column in rows.column_names), None)
    if image is None or label is None:
        raise DataError(f"dataset {name} has the columns {', '.join(rows.column_names)}; needed: image and label")
    pixels = [np.asarray(picture.convert("RGB")) for picture in rows[image]]
    _check_sizes(f"dataset {name}", {array.shape for array in pixels})
    labels = list(rows[label])
    unknown = next((i for i, number in enumerate(labels) if not isinstance(number, int) or number < 0), None)
    if unknown is not None:
        raise DataError(f"dataset {name}, sample {unknown}: label {labels[unknown]!r}; needed: a class, from 0 on")
    return Images(torch.from_numpy(np.stack(pixels)), torch.tensor(labels))


def _check_sizes(where: str, shapes: set[tuple[int, ...]]) -> None:
    if len(shapes) > 1:
        raise DataError(f"{where}: images of different sizes: {sorted(shapes)}")


class Elsewhere(Dataset):
    """The number of samples that other ranks hold."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> NoReturn:
        raise DataError("the samples are on other ranks")


# -- random crops and flips


class Views(Dataset):
    """Crops and flips of images. An index encodes an image and its view, so the dataset itself draws nothing.

    Args:
        images: The images.
        margin: Width of the zero padding from which a crop of the image's size is taken.
        flip: Flip images at random.
        matched: Match cached activations to the view (arXiv:2206.01299, H.6): a flipped image has its own sample id,
            and samples have the crop's `shifts`, int64 [2], pixels down and right, unless the margin is 0. Otherwise
            all views of an image have one sample id.
    """

    def __init__(self, images: Images, margin: int, *, flip: bool = True, matched: bool = True) -> None:
        self.images, self.margin, self.flip, self.matched = images, margin, flip, matched
        self._side = 2 * margin + 1

    def __len__(self) -> int:
        return len(self.images) * 2 * self._side**2

    def draw(self, images: Tensor, generator: torch.Generator) -> list[int]:
        """Draw a random view of each of these images, int64 [any]."""
        n = len(images)
        flips = torch.randint(2, (n,), generator=generator) * int(self.flip)
        crops = torch.randint(self._side**2, (n,), generator=generator)
        return ((images * 2 + flips) * self._side**2 + crops).tolist()

    def view(self, index: int) -> tuple[int, bool, int, int]:
        """Return the image's index, whether it is flipped, and the crop's shift in pixels down and right."""
        shown, crop = divmod(index, self._side**2)
        down, right = divmod(crop, self._side)
        return shown // 2, bool(shown % 2), down - self.margin, right - self.margin

    def sample_id(self, index: int) -> int:
        """Return the id of a view's sample; views with the same id share a cached activation."""
        shown = index // self._side**2
        return shown if self.matched else shown // 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, flipped, down, right = self.view(index)
        x = self.images.image(image)
        if flipped:
            x = x.flip(2)
        p, (_, rows, columns) = self.margin, x.shape
        x = nn.functional.pad(x, (p, p, p, p))[:, p + down : p + down + rows, p + right : p + right + columns]
        sample = {"pixel_values": x, "labels": self.images.labels[image]}
        return {**sample, "shifts": torch.tensor([down, right])} if self.matched and p else sample


# -- clients


def shares(labels: Tensor, clients: int, concentration: float, seed: int) -> list[Tensor]:
    """Divide images among clients, every class by a Dirichlet distribution, until every client has an image.

    Args:
        labels: The images' labels, int64 [N].
        clients: Number of clients.
        concentration: Parameter of the distribution; clients differ more if it is smaller.
        seed: For the random draws.

    Returns:
        Each client's images, as int64 indices.

    Raises:
        DataError: If some clients get no image.
    """
    draw = np.random.default_rng(seed)
    for _ in range(1000):
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label in labels.unique().tolist():
            own = draw.permutation((labels == label).nonzero().flatten().numpy())
            ends = np.cumsum(draw.dirichlet([concentration] * clients))[:-1]
            for part, some in zip(parts, np.split(own, (ends * len(own)).round().astype(int)), strict=True):
                part.append(some)
        joined = [torch.from_numpy(np.sort(np.concatenate(part))) for part in parts]
        if all(len(part) for part in joined):
            return joined
    raise DataError(f"{len(labels)} images are too few for {clients} clients: use fewer clients")


class OtherOrder:
    """The size of an order of samples that other ranks hold. per_epoch: micro-batches of a round."""

    def __init__(self, per_epoch: int, micro_batch: int) -> None:
        self.per_epoch, self._micro = per_epoch, micro_batch

    def size(self, number: int) -> int:
        """Return the images of a micro-batch."""
        return self._micro


class ClientTurns:
    """The order of split learning: in every round each client trains on its own images, one client after another.

    A turn is `epochs` passes over the client's images in new orders, cut into steps of `batch` images. An incomplete
    last step is dropped, but a client with few images repeats them to fill one step.

    Args:
        views: Views of all images.
        parts: Each client's images, from `shares`.
        batch: Images per step.
        micro_batch: Images per micro-batch.
        epochs: Passes per turn.
        seed: For orders and views.

    Attributes:
        per_round: Steps of a round.
        per_epoch: Micro-batches of a round.
    """

    def __init__(
        self, views: Views, parts: list[Tensor], *, batch: int, micro_batch: int, epochs: int, seed: int
    ) -> None:
        self._views, self._parts, self._seed, self._epochs = views, parts, seed, epochs
        self._micro, self._per_step = micro_batch, batch // micro_batch
        self._size = batch
        self._steps = [max(1, epochs * len(part) // batch) for part in parts]
        self.per_round = sum(self._steps)
        self.per_epoch = self.per_round * self._per_step
        self._turn: tuple[int, int] | None = None
        self._order: list[int] = []

    def size(self, number: int) -> int:
        """Return the images of a micro-batch."""
        return self._micro

    def turn(self, step: int) -> tuple[int, int, int]:
        """Return round, client and the client's own step of an optimizer step, all counted from 0."""
        number, step = divmod(step, self.per_round)
        for client, steps in enumerate(self._steps):
            if step < steps:
                return number, client, step
            step -= steps
        raise AssertionError("a round's steps are the sum of its clients' steps")

    def batch(self, number: int) -> list[int]:
        """Return the views of micro-batch `number`, counted from the start of training."""
        step, part = divmod(number, self._per_step)
        turn, client, own = self.turn(step)
        if self._turn != (turn, client):
            self._turn, self._order = (turn, client), self._arrange(turn, client)
        start = own * self._size + part * self._micro
        return self._order[start : start + self._micro]

    def _arrange(self, turn: int, client: int) -> list[int]:
        draw = torch.Generator().manual_seed(ops.mix_seed(self._seed, turn, client) & 0xFFFFFFFF)  # it takes 32 bits
        images, needed = self._parts[client], self._steps[client] * self._size
        passes = max(self._epochs, -(-needed // len(images)))
        order = torch.cat([images[torch.randperm(len(images), generator=draw)] for _ in range(passes)])
        return self._views.draw(order[:needed], draw)
