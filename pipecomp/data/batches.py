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


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass through the pipeline together.

    Attributes:
        ids: B sample ids.
        inputs: of the first stage, with input_ids [B, S] or pixel_values [B, …].
        labels: of the loss.
        lengths: of a packed micro-batch, tokens of each sample in each row, in the order of the ids; None otherwise.
        places: of a packed micro-batch, the place of each sample in the list that was collated; None if in its order.
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
        ids: of the samples; None to take them from the key "sample_ids".
        number_from: first of consecutive ids for a batch without ids, if samples need not be recognized later.
        samples: that were collated, in the order of `ids`; a flattened batch may have none or several documents of one.

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


class ShardedSampler:
    """Endless micro-batches of one replica, as indices of the dataset.

    Replica r of n takes the samples r, r + n, r + 2n, …; all replicas take equally many, which leaves out up to n − 1
    samples at the end of the dataset. An incomplete micro-batch at the end of an epoch is dropped; with shuffling its
    samples change from epoch to epoch. With drop_last=False nothing is left out: the last micro-batch of an epoch may
    be short, and a replica with one sample less repeats the first of the epoch at its end.

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
        """Return the number of samples of micro-batch `number`, the same on all replicas."""
        return min(self._micro_batch, self._length - number % self.per_epoch * self._micro_batch)

    def batch(self, number: int) -> list[int]:
        """Return the indices of micro-batch `number`, counted from the start of training."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._cached_epoch:
            order = self._arrange(epoch)
            self._order = torch.cat([order, order[: self._length - len(order)]])
            self._cached_epoch = epoch
        start = place * self._micro_batch
        return self._order[start : start + self._micro_batch].tolist()

    def _arrange(self, epoch: int) -> Tensor:
        """Return this replica's samples in the order of an epoch."""
        return self._own[torch.randperm(len(self._own), generator=self._draw(epoch))] if self._shuffle else self._own

    def _draw(self, epoch: int) -> torch.Generator:
        # torch's generator uses only 32 bits of a seed.
        return torch.Generator().manual_seed(ops.mix_seed(self._seed, epoch, self._replica) & 0xFFFFFFFF)


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
        seed: of random draws in data and collate, mixed with the micro-batch's number.

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
        name: of the dataset.
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
        name: of the dataset, for errors.
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
