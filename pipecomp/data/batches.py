"""Micro-batches with sample ids, by which AQ-SGD recognizes a sample in later epochs.

The id of a sample is its index in the dataset, or the result of the dataset's method `sample_id(index)`: a dataset with
several views of a sample returns the same id for those that share a cached activation. Each replica of a pipeline
shuffles within a fixed part of the dataset, so that a sample stays with the replica that has its cached activation.
The order depends on the seed and the epoch only, and all stages that load data load the same micro-batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipecomp.data.packing import POSITIONS, document_ids, document_lengths, take_documents
from pipecomp.errors import DataError
from pipecomp.kernels import ops

LABEL_KEYS = ("labels", "label")
INPUT_KEYS = ("input_ids", "pixel_values")
ID_KEY = "sample_ids"
MAX_ID = 2**63 - 1
SHOWN = 8  # samples of a dataset in a comparison between ranks
_REST = 2**31 - 1  # in place of a replica in the seed of the rest of an epoch


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass through the pipeline together.

    Attributes:
        ids: B sample ids.
        inputs: inputs of the first stage, with input_ids [B, S] or pixel_values [B, …].
        labels: labels of the loss.
        lengths: for a packed micro-batch, tokens of each sample in each row, in the order of the ids; None otherwise.
        places: for a packed micro-batch, the place of each sample in the list that was collated; None if in its order.
    """

    ids: tuple[int, ...]
    inputs: dict[str, Tensor]
    labels: Tensor | None
    lengths: tuple[tuple[int, ...], ...] | None = None
    places: tuple[int, ...] | None = None

    def pin_memory(self) -> MicroBatch:
        """Return a copy in page-locked memory, for fast copies to a GPU; called by torch's DataLoader."""
        labels = None if self.labels is None else self.labels.pin_memory()
        inputs = {key: value.pin_memory() for key, value in self.inputs.items()}
        return replace(self, inputs=inputs, labels=labels)


def as_micro_batch(
    batch: Any,
    ids: Sequence[int] | None = None,
    *,
    number_from: int | None = None,
    samples: Sequence[Any] | None = None,
) -> MicroBatch:
    """Convert a collated batch to a MicroBatch.

    A batch whose "position_ids" restart within a row is packed, see `pipecomp.data.packing`: it needs an id for each
    document.

    Args:
        batch: a mapping with "input_ids" (or "pixel_values") and usually "labels", or DeepSpeed's pair (inputs,
            labels).
        ids: ids of the samples; None to take them from the key "sample_ids".
        number_from: first of consecutive ids for a batch without ids, if samples need not be recognized later.
        samples: samples that were collated, in the order of `ids`; a flattened batch may have none or several documents
            of one.

    Raises:
        DataError: for other batches, and batches without ids.
    """
    if isinstance(batch, MicroBatch):
        return batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = batch
        batch = {**(dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}), "labels": labels}
    if not isinstance(batch, Mapping):
        raise DataError(f"a batch is a {type(batch).__name__}; expected a mapping with input_ids, or a pair")
    fields = {key: value for key, value in batch.items() if value is not None}
    own_ids = fields.pop(ID_KEY, None)
    given = ids
    if ids is None and own_ids is not None:
        ids = [_whole(i) for i in own_ids]
    labels = next((fields.pop(k) for k in LABEL_KEYS if k in fields), None)
    main = next((fields[key] for key in INPUT_KEYS if isinstance(fields.get(key), Tensor)), None)
    if main is None:
        allowed = "input_ids as a tensor [B, S], or pixel_values [B, …]"
        raise DataError(f"a batch has the keys {sorted(batch)}; it needs {allowed}")
    table = take_documents(fields)
    for key, value in {**fields, "labels": labels}.items():
        if value is not None and not isinstance(value, Tensor):
            raise DataError(f"{key!r} of a batch is a {type(value).__name__}; expected a tensor")
    lengths, places = None, None
    if table is not None:
        lengths = tuple(tuple(length for _, length in row) for row in table)
        if given is not None:
            places = tuple(place for row in table for place, _ in row)
            ids = [given[place] for place in places]
    elif POSITIONS in fields:
        if given is not None and samples is not None:
            ids = document_ids(samples, given)
        lengths = document_lengths(fields[POSITIONS], None if ids is None else len(ids))
    size = main.shape[0] if lengths is None else sum(map(len, lengths))
    if ids is None and number_from is not None:
        ids = range(number_from, number_from + size)
    if ids is None:
        raise DataError(f"a batch has no {ID_KEY!r}: 'aqsgd' needs ids that stay the same over epochs")
    if len(ids) != size:
        what = "samples" if lengths is None else "documents"
        raise DataError(f"a batch of {size} {what} has {len(ids)} ids")
    for i in ids:
        if not 0 <= i <= MAX_ID:
            raise DataError(f"sample id {i} is out of range: 0 to 2**63 - 1")
    return MicroBatch(tuple(ids), fields, labels, lengths, places)


def sample_id_function(data: Any) -> Callable[[int], int]:
    """Return the function from index to id: the dataset's `sample_id`, or the index itself."""
    own = getattr(data, "sample_id", None)
    return int if own is None else partial(_own_id, own)


def _own_id(sample_id: Callable[[int], Any], index: int) -> int:
    return _whole(sample_id(index))


def _whole(sample_id: Any) -> int:
    """Convert an id to a Python int, as those of NumPy and torch overflow. Raises DataError for anything else."""
    try:
        return operator.index(sample_id)
    except TypeError:
        raise DataError(f"sample id {sample_id!r} is a {type(sample_id).__name__}; expected a whole number") from None


class Sampler(Protocol):
    """The order of training samples. per_epoch: micro-batches in one pass over the data."""

    per_epoch: int

    def batch(self, number: int) -> list[int]:
        """Return the dataset's indices of micro-batch `number`, counted from the start of training; endless."""


@dataclass(frozen=True)
class EpochPart:
    """Samples of an epoch that were taken in one layout.

    replicas: their number. micro_batch: samples. accumulation: micro-batches of a replica in a step. taken:
    micro-batches that each replica took.
    """

    replicas: int
    micro_batch: int
    accumulation: int
    taken: int = 0

    @property
    def step_samples(self) -> int:
        """Samples of an optimizer step of all replicas."""
        return self.replicas * self.micro_batch * self.accumulation

    def is_like(self, other: EpochPart) -> bool:
        """Return whether the other part has the same layout."""
        return replace(self, taken=0) == replace(other, taken=0)


@dataclass(frozen=True)
class DataPosition:
    """A place in the training data that does not depend on the layout of the run that goes on from it.

    Attributes:
        epoch: from 0.
        parts: parts of the epoch so far, in their order. The last one has the layout of the run, even if nothing is
            taken.
        changed: the layout has changed since training began, so a number of steps does not tell the position.
    """

    epoch: int
    parts: tuple[EpochPart, ...]
    changed: bool = False

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> DataPosition:
        """Return the position that a checkpoint has as `dataclasses.asdict` makes it."""
        parts = tuple(EpochPart(**part) for part in saved["parts"])
        return cls(saved["epoch"], parts, saved["changed"])

    @property
    def samples(self) -> int:
        """Samples of the epoch that are taken."""
        return sum(part.replicas * part.micro_batch * part.taken for part in self.parts)


class ShardedSampler:
    """Endless micro-batches of one replica, as indices of the dataset.

    Replica r of n takes the samples r, r + n, r + 2n, …; all replicas take equally many, which leaves out up to n − 1
    samples at the end of the dataset. An incomplete micro-batch at the end of an epoch is dropped; with shuffling its
    samples change from epoch to epoch. With drop_last=False nothing is left out: the last micro-batch of an epoch may
    be short, and a replica with one sample less repeats the first of the epoch at its end.

    After `seek` in the middle of an epoch to a position of another layout, the rest of that epoch has the samples that
    were not taken yet. With the same number of replicas each takes what is left of its own; otherwise the rest is
    arranged by seed and epoch alone, and replica r of n takes samples r, r + n, … of it. These micro-batches have the
    last numbers of the epoch.

    Args:
        samples: number of samples of the dataset.
        micro_batch: samples of a micro-batch.
        replicas: their number.
        replica: this one's number.
        seed: seed of the order.
        shuffle: rearrange each replica's samples in every epoch.
        drop_last: see above.
        accumulation: micro-batches of a replica in an optimizer step; positions have it.

    Attributes:
        per_epoch: micro-batches in one pass over the data.
    """

    def __init__(
        self,
        samples: int,
        micro_batch: int,
        *,
        replicas: int = 1,
        replica: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        accumulation: int = 1,
    ) -> None:
        self._samples, self._layout = samples, EpochPart(replicas, micro_batch, accumulation)
        self._micro_batch, self._seed, self._replica, self._shuffle = micro_batch, seed, replica, shuffle
        self._drop_last = drop_last
        self._length = samples // replicas if drop_last else -(-samples // replicas)
        self.per_epoch = self._length // micro_batch if drop_last else -(-self._length // micro_batch)
        if self.per_epoch == 0 or samples <= replica:
            raise DataError(
                f"{samples} samples are too few for {replicas} replica(s) with micro-batches of {micro_batch}"
            )
        self._cached_epoch = -1
        self._order = torch.arange(0)
        self._begin = DataPosition(0, ())  # of the run, at the last `seek`
        self._rest: Tensor | None = None  # of the epoch of `_begin`, in another order than usual
        self._rest_from = 0  # its first micro-batch, counted from the start of that epoch

    def size(self, number: int) -> int:
        """Return the number of samples of micro-batch `number`, the same on all replicas."""
        epoch, place = divmod(number, self.per_epoch)
        length = self._length
        if self._rest is not None and epoch == self._begin.epoch:
            place, length = place - self._rest_from, len(self._rest)
        return min(self._micro_batch, length - place * self._micro_batch)

    def batch(self, number: int) -> list[int]:
        """Return the indices of micro-batch `number`, counted from the start of training."""
        epoch, place = divmod(number, self.per_epoch)
        if self._rest is not None and epoch == self._begin.epoch:
            assert place >= self._rest_from, "these samples were taken in another layout"
            start = (place - self._rest_from) * self._micro_batch
            return self._rest[start : start + self._micro_batch].tolist()
        if epoch != self._cached_epoch:
            self._order, self._cached_epoch = self._share(self._layout, self._replica, epoch), epoch
        start = place * self._micro_batch
        return self._order[start : start + self._micro_batch].tolist()

    # -- resuming

    def position(self, number: int) -> DataPosition:
        """Return the position before micro-batch `number`, for `seek` of this or another layout's sampler."""
        epoch, place = divmod(number, self.per_epoch)
        parts: tuple[EpochPart, ...] = ()
        if self._rest is not None and epoch == self._begin.epoch:
            parts, place = self._begin.parts, place - self._rest_from
            if self._layout.is_like(parts[-1]):
                parts, place = parts[:-1], parts[-1].taken + place
        return DataPosition(epoch, (*parts, replace(self._layout, taken=place)), self._begin.changed)

    def seek(self, position: DataPosition) -> int:
        """Continue at a position, which may be of another layout. Returns the number of the next micro-batch."""
        epoch, layout = position.epoch, self._layout
        parts = tuple(part for part in position.parts if part.taken)
        changed = position.changed or not all(layout.is_like(part) for part in position.parts)
        self._begin, self._rest, self._rest_from = DataPosition(epoch, parts, changed), None, 0
        if all(layout.is_like(part) for part in parts):
            return epoch * self.per_epoch + sum(part.taken for part in parts)
        self._rest = rest = self._left(epoch, parts)
        count = len(rest) // self._micro_batch if self._drop_last else -(-len(rest) // self._micro_batch)
        self._rest_from = self.per_epoch - count
        return epoch * self.per_epoch + self._rest_from

    def _left(self, epoch: int, parts: Sequence[EpochPart]) -> Tensor:
        """Return this replica's samples in the rest of an epoch of which these parts are taken."""
        taken = torch.zeros(self._samples, dtype=torch.bool)
        shares: list[Tensor] = []
        for part in (*parts, self._layout):
            if not shares:
                shares = [self._share(part, replica, epoch) for replica in range(part.replicas)]
            elif len(shares) != part.replicas:
                left = (~taken).nonzero()[:, 0]
                if len(left):
                    left = left[self._arrange(left, part, part.replicas, self._draw(epoch, _REST))]
                shares = self._deal(left, part.replicas)
            count = part.micro_batch * part.taken
            for share in shares:
                taken[share[:count]] = True
            shares = [share[count:] for share in shares]
        return shares[self._replica]

    def _deal(self, samples: Tensor, replicas: int) -> list[Tensor]:
        """Divide samples among replicas, equally many for each."""
        if self._drop_last:
            samples = samples[: len(samples) // replicas * replicas]
        elif len(samples) % replicas:
            again = torch.arange(-len(samples) % replicas) % len(samples)
            samples = torch.cat([samples, samples[again]])
        return [samples[replica::replicas] for replica in range(replicas)]

    # -- the usual order

    def _share(self, layout: EpochPart, replica: int, epoch: int) -> Tensor:
        """Return a replica's samples in the order of an epoch."""
        own = torch.arange(self._samples)[replica :: layout.replicas]
        length = -(-self._samples // layout.replicas)
        if self._drop_last:
            length = self._samples // layout.replicas
            own = own[:length]
        if len(own) == 0:  # another layout's replica that has only repeated samples
            return own
        order = own[self._arrange(own, layout, 1, self._draw(epoch, replica))]
        return torch.cat([order, order[: length - len(order)]])

    def _arrange(self, samples: Tensor, layout: EpochPart, replicas: int, draw: torch.Generator) -> Tensor:
        """Return an order of samples as places in the tensor. replicas: those that take turns in it."""
        return torch.randperm(len(samples), generator=draw) if self._shuffle else torch.arange(len(samples))

    def _draw(self, epoch: int, replica: int) -> torch.Generator:
        # torch's generator uses only 32 bits of a seed.
        return torch.Generator().manual_seed(ops.mix_seed(self._seed, epoch, replica) & 0xFFFFFFFF)


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch (CPU) during the body, and restore them after it."""
    python, legacy = random.getstate(), np.random.get_state()
    seed = ops.mix_seed(*numbers)
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.random.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def _micro_batch(data: Any, indices: list[int], collate: Callable[[list], Any] | None, *seed: int) -> MicroBatch:
    """Load and collate the samples at these indices.

    Random draws of data and collate depend on the seed only, so that the labels that the last stage loads belong to the
    inputs that the first stage loads.
    """
    sample_id = sample_id_function(data)
    with seeded(*seed):
        samples = [data[i] for i in indices]
        return as_micro_batch((collate or default_collate)(samples), list(map(sample_id, indices)), samples=samples)


def default_collate(samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack samples that are mappings of equally long lists, numbers or tensors."""
    if not isinstance(samples[0], Mapping):
        raise DataError(f"a sample is a {type(samples[0]).__name__}; expected a mapping, or give a collate_fn")
    batch = {}
    for key in samples[0]:
        try:
            rows = [torch.as_tensor(s[key]) for s in samples]
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{key!r} is not a number, a tensor or lists of numbers in every sample: leave it out, or give a "
                f"collate_fn ({type(error).__name__}: {error})"
            ) from error
        try:
            batch[key] = torch.stack(rows)
        except RuntimeError as error:
            raise DataError(f"samples of unequal length need a collate_fn that pads them ({error})") from error
    return batch


def count_samples(data: Any, what: str) -> int:
    """Return the number of samples. Raises DataError for streams, and mappings of splits or columns."""
    if not isinstance(data, Sized) or isinstance(data, Mapping):
        raise DataError(
            f"{what} is a {type(data).__name__}; expected a list or dataset with a length, samples by number"
        )
    return len(data)


class TrainLoader:
    """Endless micro-batches of one replica, with a look-ahead of their ids.

    Args:
        data: the dataset.
        sampler: the order.
        collate: converts a list of samples to a batch; None to stack them.
        seed: seed of random draws in data and collate, mixed with the micro-batch's number.

    Attributes:
        taken: micro-batches handed out so far; set it to resume.
    """

    def __init__(
        self, data: Any, sampler: Sampler, collate: Callable[[list], Any] | None = None, *, seed: int = 0
    ) -> None:
        self.sampler = sampler
        self.taken = 0
        self._data, self._collate, self._seed = data, collate, seed

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            batch = _micro_batch(self._data, self.sampler.batch(self.taken), self._collate, self._seed, self.taken)
            self.taken += 1
            yield batch

    def upcoming(self, ahead: int) -> list[int]:
        """Return the ids of the micro-batch `ahead` calls from now (0: the next one)."""
        return list(map(sample_id_function(self._data), self.sampler.batch(self.taken + ahead)))


def eval_batches(data: Any, micro_batch: int, collate: Callable[[list], Any] | None = None) -> list[MicroBatch]:
    """Return all samples in order, for `engine.eval_batch`; the last micro-batch may be short.

    Args:
        data: the dataset.
        micro_batch: samples of each; at most 64 or as many as in training, unless `engine.allow_evaluation` allows
            more.
        collate: converts a list of samples to a batch; None to stack them.
    """
    size = count_samples(data, "evaluation data")
    starts = range(0, size, micro_batch)
    return [_micro_batch(data, list(range(a, min(a + micro_batch, size))), collate, a) for a in starts]


# -- comparison of datasets between ranks


def check_labels(make: Callable[[], MicroBatch], name: str) -> None:
    """Raise DataError if labels depend on unseeded random draws: they would not match the first stage's inputs.

    Args:
        make: loads the same micro-batch, seeded, in every call.
        name: name of the dataset.
    """
    if _digest(make().labels) != _digest(make().labels):
        raise DataError(
            f"{name}: the same samples get other labels when they are made again, and the first stage, which has the "
            "inputs, makes them apart from the last one, which has the labels. Let dataset and collator draw from the "
            "generators of random, numpy.random and torch themselves, which are seeded alike on all stages: of "
            "transformers' collators that is one without seed"
        )


def dataset_facts(data: Any, name: str) -> dict[str, Any]:
    """Return the length of a dataset and a digest of some samples, for comparison between ranks.

    Args:
        data: samples by index.
        name: name of the dataset, for errors.
    """
    facts: dict[str, Any] = {f"length of {name}": len(data)}
    indices = sorted({round(i * (len(data) - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})
    with seeded(0):
        first = [_digest(data[i]) for i in indices]
    with seeded(0):
        again = [_digest(data[i]) for i in indices]
    if first == again:  # otherwise it draws from a generator of its own
        digest = hashlib.sha256("".join(first).encode()).hexdigest()[:12]
        facts[f"order or content of {name} (digest of {len(indices)} samples)"] = digest
    return facts


def _digest(sample: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, sample)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Hash a value, independently of the order of mappings; of unknown objects only the type."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        digest.update(f"{flat.dtype}{tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSU":
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        digest.update(f"{value!r},".encode())
    else:
        digest.update(type(value).__name__.encode())
