"""Micro-batches with sample ids: AQ-SGD needs to know a sample again when it comes back.

The id of a sample is its place in the dataset, unless the dataset has a method `sample_id(index)` that says otherwise:
one that shows a sample in several views gives one id to those that share a cached activation. Replicas of a pipeline
share the dataset out once and shuffle only within their own part, so that a sample stays with the replica that holds
its cached activation. The order of ids follows from the seed and the epoch alone; every stage that loads data loads
the same micro-batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipecomp.errors import DataError
from pipecomp.kernels import ops

LABEL_KEYS = ("labels", "label")
INPUT_KEYS = ("input_ids", "pixel_values")
ID_KEY = "sample_ids"
MAX_ID = 2**63 - 1
SHOWN = 8  # samples of a dataset that ranks compare


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the pipeline together.

    ids: B sample ids. inputs: for the first stage, with input_ids [B, S] or pixel_values [B, …] among them. labels: for
    the loss.
    """

    ids: tuple[int, ...]
    inputs: dict[str, Tensor]
    labels: Tensor | None

    def pin_memory(self) -> MicroBatch:
        """Copy it to page-locked memory, from which a GPU copies faster; torch's DataLoader calls this."""
        labels = None if self.labels is None else self.labels.pin_memory()
        return MicroBatch(self.ids, {key: value.pin_memory() for key, value in self.inputs.items()}, labels)


def as_micro_batch(batch: Any, ids: Sequence[int] | None = None, *, number_from: int | None = None) -> MicroBatch:
    """Make a MicroBatch of a collated batch.

    batch: a mapping with "input_ids" (or "pixel_values") and usually "labels", or DeepSpeed's pair (inputs, labels).
    Its ids come from `ids`, else from the key "sample_ids", else they are numbers from `number_from` on, where nothing
    needs to know a sample again. Raises DataError for anything else, or without ids.
    """
    if isinstance(batch, MicroBatch):
        return batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = batch
        batch = {**(dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}), "labels": labels}
    if not isinstance(batch, Mapping):
        raise DataError(f"a batch is a {type(batch).__name__}; expected a mapping with input_ids, or a pair")
    fields = {key: value for key, value in batch.items() if value is not None}
    found = fields.pop(ID_KEY, None)
    if ids is None and found is not None:
        ids = [_whole(i) for i in found]
    labels = next((fields.pop(k) for k in LABEL_KEYS if k in fields), None)
    main = next((fields[key] for key in INPUT_KEYS if isinstance(fields.get(key), Tensor)), None)
    if main is None:
        allowed = "input_ids as a tensor [B, S], or pixel_values [B, …]"
        raise DataError(f"a batch has the keys {sorted(batch)}; it needs {allowed}")
    for key, value in {**fields, "labels": labels}.items():
        if value is not None and not isinstance(value, Tensor):
            raise DataError(f"{key!r} of a batch is a {type(value).__name__}; expected a tensor")
    size = main.shape[0]
    if ids is None and number_from is not None:
        ids = range(number_from, number_from + size)
    if ids is None:
        raise DataError(f"a batch has no {ID_KEY!r}: 'aqsgd' needs ids that stay the same over epochs")
    if len(ids) != size:
        raise DataError(f"a batch of {size} samples has {len(ids)} ids")
    for i in ids:
        if not 0 <= i <= MAX_ID:
            raise DataError(f"sample id {i} is out of range: 0 to 2**63 - 1")
    return MicroBatch(tuple(ids), fields, labels)


def id_of_place(data: Any) -> Callable[[int], int]:
    """What gives the id of a place in the dataset: the dataset's own `sample_id`, else it is the place itself."""
    own = getattr(data, "sample_id", None)
    return int if own is None else partial(_own_id, own)


def _own_id(sample_id: Callable[[int], Any], place: int) -> int:
    return _whole(sample_id(place))


def _whole(sample_id: Any) -> int:
    """An id as Python's own number, for one of numpy or torch cannot be 2**63 more. DataError for anything else."""
    try:
        return operator.index(sample_id)
    except TypeError:
        raise DataError(f"sample id {sample_id!r} is a {type(sample_id).__name__}; expected a whole number") from None


class Sampler(Protocol):
    """The order of training. per_epoch: micro-batches of one pass over the data."""

    per_epoch: int

    def batch(self, number: int) -> list[int]:
        """List the dataset's indices of micro-batch `number`, counted from the start of training; endless."""


class ShardedSampler:
    """Endless micro-batches of one replica, as places in the dataset.

    Replica r of n takes the samples r, r + n, r + 2n, …; all replicas take equally many, so up to n − 1 samples at the
    end of the dataset are left out. An incomplete micro-batch at the end of an epoch is dropped; the shuffled order
    gives every sample its turn. With drop_last=False nothing is left out: the last micro-batch of an epoch may be
    short, and a replica that has one sample less than others repeats the first of the epoch at its end.
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
    ) -> None:
        self._own = torch.arange(samples)[replica::replicas]
        self._micro_batch, self._seed, self._replica, self._shuffle = micro_batch, seed, replica, shuffle
        if drop_last:
            self._own = self._own[: samples // replicas]
            self._length = len(self._own)
            self.per_epoch = self._length // micro_batch
        else:
            self._length = -(-samples // replicas)
            self.per_epoch = -(-self._length // micro_batch)
        if self.per_epoch == 0 or len(self._own) == 0:
            raise DataError(
                f"{samples} samples are too few for {replicas} replica(s) with micro-batches of {micro_batch}"
            )
        self._cached_epoch = -1
        self._order = self._own

    def size(self, number: int) -> int:
        """Count the samples of micro-batch `number`, which all replicas have alike."""
        return min(self._micro_batch, self._length - number % self.per_epoch * self._micro_batch)

    def batch(self, number: int) -> list[int]:
        """List the places of micro-batch `number`, counted from the start of training."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._cached_epoch:
            order = self._arrange(epoch)
            self._order = torch.cat([order, order[: self._length - len(order)]])
            self._cached_epoch = epoch
        start = place * self._micro_batch
        return self._order[start : start + self._micro_batch].tolist()

    def _arrange(self, epoch: int) -> Tensor:
        """Put this replica's samples in the order of an epoch."""
        return self._own[torch.randperm(len(self._own), generator=self._draw(epoch))] if self._shuffle else self._own

    def _draw(self, epoch: int) -> torch.Generator:
        # torch's generator takes 32 bits of a seed, and drops the others.
        return torch.Generator().manual_seed(ops.mix_seed(self._seed, epoch, self._replica) & 0xFFFFFFFF)


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Python's, numpy's and torch's generators seeded inside, and as they were afterwards."""
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


def _micro_batch(data: Any, places: list[int], collate: Callable[[list], Any] | None, *seed: int) -> MicroBatch:
    """Make one of the samples at these places.

    What data and collate draw follows from the seed alone: the labels of the last stage, which loads for itself, then
    are those of the first one's inputs.
    """
    sample_id = id_of_place(data)
    with seeded(*seed):
        return as_micro_batch((collate or default_collate)([data[i] for i in places]), [sample_id(i) for i in places])


def default_collate(samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack samples that are mappings of equally long lists, numbers or tensors."""
    if not isinstance(samples[0], Mapping):
        raise DataError(f"a sample is a {type(samples[0]).__name__}; expected a mapping, or give a collate_fn")
    found = {}
    for key in samples[0]:
        try:
            rows = [torch.as_tensor(s[key]) for s in samples]
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{key!r} is not a number, a tensor or lists of numbers in every sample: leave it out, or give a "
                f"collate_fn ({type(error).__name__}: {error})"
            ) from error
        try:
            found[key] = torch.stack(rows)
        except RuntimeError as error:
            raise DataError(f"samples of unequal length need a collate_fn that pads them ({error})") from error
    return found


def count_samples(data: Any, what: str) -> int:
    """How many there are. DataError for a stream, and for a mapping, whose keys are names of splits or columns."""
    if not isinstance(data, Sized) or isinstance(data, Mapping):
        raise DataError(
            f"{what} is a {type(data).__name__}; expected a list or dataset with a length, samples by number"
        )
    return len(data)


class TrainLoader:
    """Endless micro-batches for one replica, from where training stands; knows the ids that come next.

    seed: of what data and collate draw, together with a micro-batch's number.
    """

    def __init__(
        self, data: Any, sampler: Sampler, collate: Callable[[list], Any] | None = None, *, seed: int = 0
    ) -> None:
        self.sampler = sampler
        self.taken = 0  # micro-batches handed out so far
        self._data, self._collate, self._seed = data, collate, seed

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            batch = _micro_batch(self._data, self.sampler.batch(self.taken), self._collate, self._seed, self.taken)
            self.taken += 1
            yield batch

    def upcoming(self, ahead: int) -> list[int]:
        """List the ids of the micro-batch that is handed out `ahead` calls from now (0: the next one)."""
        return list(map(id_of_place(self._data), self.sampler.batch(self.taken + ahead)))


def eval_batches(data: Any, micro_batch: int, collate: Callable[[list], Any] | None = None) -> list[MicroBatch]:
    """All samples in order, the last micro-batch possibly short; for `engine.eval_batch`.

    micro_batch: samples of each, at most 64 or as many as in training, unless `engine.allow_evaluation` allows more.
    """
    size = count_samples(data, "evaluation data")
    starts = range(0, size, micro_batch)
    return [_micro_batch(data, list(range(a, min(a + micro_batch, size))), collate, a) for a in starts]


# -- what ranks compare of a dataset, which each of them makes for itself


def check_labels(make: Callable[[], MicroBatch], name: str) -> None:
    """DataError where labels follow from draws that are not seeded: the last stage's would not fit the first's inputs.

    make: makes the same micro-batch, seeded, every time. name: the dataset's.
    """
    if _digest(make().labels) != _digest(make().labels):
        raise DataError(
            f"{name}: the same samples get other labels when they are made again, and the first stage, which has the "
            "inputs, makes them apart from the last one, which has the labels. Let dataset and collator draw from the "
            "generators of random, numpy.random and torch themselves, which are seeded alike on all stages: of "
            "transformers' collators that is one without seed"
        )


def dataset_facts(data: Any, name: str) -> dict[str, Any]:
    """Return what is compared of a dataset: its length and a digest of some samples.

    data: samples by number. name: the dataset's, for errors.
    """
    facts: dict[str, Any] = {f"length of {name}": len(data)}
    places = sorted({round(i * (len(data) - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})
    with seeded(0):
        first = [_digest(data[i]) for i in places]
    with seeded(0):
        again = [_digest(data[i]) for i in places]
    if first == again:  # else it draws at random, from a generator of its own
        digest = hashlib.sha256("".join(first).encode()).hexdigest()[:12]
        facts[f"order or content of {name} (digest of {len(places)} samples)"] = digest
    return facts


def _digest(sample: Any) -> str:
    found = hashlib.sha256()
    _add(found, sample)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    """Values, in whatever order a mapping has them; of other objects only the type."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found.update(f"{key}:".encode())
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"[{len(value)}".encode())
        for item in value:
            _add(found, item)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        found.update(f"{flat.dtype}{tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSU":
        found.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        found.update(f"{value!r},".encode())
    else:
        found.update(type(value).__name__.encode())
