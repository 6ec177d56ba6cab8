"""Micro-batches for the first and the last stage, equal on both even if the collator draws random numbers."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from pyarrow.compute import list_value_length
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import DataCollatorWithFlattening
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.trainer_utils import RemoveColumnsCollator, has_length

from pipecomp.data import (
    EpochPart,
    MicroBatch,
    PackedSampler,
    PackingCollator,
    ShardedSampler,
    TrainLoader,
    as_micro_batch,
    check_labels,
    sample_id_function,
    seeded,
)
from pipecomp.data.packing import SEQ_LENGTHS
from pipecomp.errors import DataError
from pipecomp.plan.auto_bits import SAMPLES_READ
from pipecomp.utils.activity import waiting_for_data

# Note: each stage loads its own data. Random generators are seeded by a micro-batch's number, so a collator that masks
# tokens masks the same ones on both stages, in any worker process, and after a resume.
TRAINING, EVALUATION = 0, 1  # part of the seed
_BY_LENGTH = "train_sampling_strategy 'group_by_length'"


class SampleSource(NamedTuple):
    """A dataset with the columns that the model takes, and its collator.

    sample_id: Returns the id of an index: the dataset's own id, or the index itself (see pipecomp.data).
    loader: A subclass's DataLoader, whose batches and worker processes are used; None for the trainer's own.
    """

    data: Any
    collate: Callable[[list], Any]
    sample_id: Callable[[int], int] = int
    loader: DataLoader | None = None

    @classmethod
    def of(cls, data: Any, collate: Callable[[list], Any], columns: list[str] | None, name: str) -> SampleSource:
        """Wrap a dataset without the columns that the model does not take.

        Args:
            data: A dataset with a length and indices.
            collate: Makes a batch of a list of samples.
            columns: The columns to keep; None for all.
            name: The dataset's name for errors.

        Raises:
            DataError: If it has no length, no samples, or no column that the model takes.
        """
        _check_indexable(data, name)
        sample_id = sample_id_function(data)
        if columns is None:
            return cls(data, collate, sample_id)
        if not hasattr(data, "remove_columns"):
            return cls(data, RemoveColumnsCollator(collate, columns), sample_id)
        unused = [column for column in data.column_names if column not in columns]
        if len(unused) == len(data.column_names):
            raise DataError(f"{name}: the dataset has the columns {data.column_names}, the model takes {columns}")
        return cls(data.remove_columns(unused), collate, sample_id)

    @classmethod
    def of_loader(cls, loader: Any, name: str) -> SampleSource:
        """Wrap the dataset and collator of a DataLoader. name: of the method that returned it, for errors.

        Raises:
            DataError: If it is no DataLoader with batches of a dataset with a length and indices.
        """
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            got = type(loader).__name__
            raise DataError(f"{name}: got {got}, allowed: a torch DataLoader with a batch_size or batch_sampler")
        _check_indexable(loader.dataset, name)
        return cls(loader.dataset, loader.collate_fn, sample_id_function(loader.dataset), loader)


def _check_indexable(data: Any, name: str) -> None:
    # torch's IterableDataset inherits a __getitem__ that raises NotImplementedError.
    indexable = has_length(data) and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    if data is None or not indexable:
        # Cached activations belong to samples, which a stream does not number.
        way = (
            ". Read a stream first: datasets.Dataset.from_list(list(stream.take(100_000)))" if data is not None else ""
        )
        raise DataError(f"{name}: got {type(data).__name__}, allowed: a dataset with a length and indices{way}")
    if len(data) == 0:
        raise DataError(f"{name}: the dataset has no samples")


def longest_sample(samples: SampleSource, seed: int) -> int:
    """Count the tokens of the longest of the first samples after collation, padding included; if packed, their mean.

    Args:
        samples: The dataset.
        seed: For the collator's random draws.

    Raises:
        DataError: If the collator does not return a batch.
    """
    indices = range(min(SAMPLES_READ, len(samples.data)))
    batch = _CollatedBatches(samples, seed, TRAINING)[0, list(indices)]
    if batch.lengths is not None:
        return -(-sum(map(sum, batch.lengths)) // len(batch.ids))
    return int(batch.inputs["input_ids"].shape[1])


def set_epoch(data: Any, epoch: int) -> None:
    """Call the dataset's `set_epoch`, if it has one, as Trainer does."""
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)


def check_seeded_collator(samples: SampleSource, micro_batch: int, seed: int, name: str) -> None:
    """Check that both ends of a pipeline make the same micro-batch of the first samples.

    Args:
        samples: The dataset.
        micro_batch: Samples of a micro-batch.
        seed: For the collator's random draws.
        name: The dataset's name for errors.

    Raises:
        DataError: If its labels depend on unseeded random draws.
    """
    batches, indices = _CollatedBatches(samples, seed, TRAINING), list(range(min(micro_batch, len(samples.data))))
    check_labels(lambda: batches[0, indices], name)


def data_seed(args: Any) -> int:
    """Return the seed for the order of samples and the collator's random draws."""
    return int(args.seed if args.data_seed is None else args.data_seed)


# -- micro-batches


class _CollatedBatches(Dataset):
    """Collated micro-batches, indexed by (number, indices in the dataset)."""

    def __init__(self, samples: SampleSource, seed: int, kind: int) -> None:
        self._data, self._collate, self._sample_id, _ = samples
        self._seed, self._kind = seed, kind

    def __getitem__(self, key: Any) -> MicroBatch:
        number, indices = key
        with seeded(self._seed, self._kind, number):
            fetch = getattr(self._data, "__getitems__", None)
            chosen = fetch(indices) if fetch is not None else [self._data[i] for i in indices]
            return as_micro_batch(self._collate(chosen), self.ids(indices), samples=chosen)

    def ids(self, indices: Iterable[int]) -> list[int]:
        """List the samples' ids."""
        return [self._sample_id(index) for index in indices]


def _identity(batch: MicroBatch) -> MicroBatch:
    return batch


def loader_options(args: Any, loader: DataLoader | None = None) -> dict[str, Any]:
    """Return DataLoader's options from TrainingArguments, or those of a subclass's loader."""
    if loader is not None:
        names = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context", "pin_memory")
        return {name: getattr(loader, name) for name in (*names, "timeout", "worker_init_fn")}
    return {
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
    }


def _loader(batches: _CollatedBatches, keys: Iterable[tuple[int, list[int]]], options: dict[str, Any]) -> DataLoader:
    # Note: a separate generator keeps the loader from advancing torch's global one, which checkpoints restore.
    own: dict[str, Any] = {"batch_size": None, "collate_fn": _identity, "generator": torch.Generator()}
    return DataLoader(batches, sampler=keys, **own, **options)


class StepLoader(TrainLoader):
    """One replica's training micro-batches. Those of a step are loaded together, to count their labels beforehand.

    Args:
        samples: The dataset.
        sampler: The order of samples.
        seed: For the collator's random draws.
        options: From `loader_options`.
        pad: The padding token's id, for batches without attention_mask.
        model_inputs: Leaves out the inputs that the stages do not take; iteration returns its results.

    Attributes:
        dataset: The dataset with the columns that the model takes.
        tokens: Input tokens of the batches returned so far, padding included.
        real_tokens: The same without padding.
    """

    def __init__(
        self,
        samples: SampleSource,
        sampler: ShardedSampler | PackedSampler,
        seed: int,
        options: dict[str, Any],
        pad: int | None = None,
        model_inputs: Callable[[MicroBatch], MicroBatch] = _identity,
    ) -> None:
        super().__init__(samples.data, sampler, samples.collate)
        self.dataset, self._pad, self._model_inputs = samples.data, pad, model_inputs
        self._batches, self._options = _CollatedBatches(samples, seed, TRAINING), options
        self._ahead: deque[MicroBatch] = deque()
        self._source: Iterator[MicroBatch] | None = None
        self.tokens = self.real_tokens = 0

    def __len__(self) -> int:
        return self.sampler.per_epoch

    def begin_epoch(self, epoch: int, number: int) -> None:
        """Continue in `epoch` with micro-batch `number`, counted from the start of training.

        Calls the dataset's `set_epoch`. Worker processes get a new copy of the dataset unless they are persistent.
        """
        if number != self.taken:
            self.taken = number
            self._ahead.clear()
            self._source = None
        set_epoch(self.dataset, epoch)

    def begin_step(self, micro_batches: int) -> list[MicroBatch]:
        """Load and return a step's micro-batches; iteration yields them afterwards."""
        while len(self._ahead) < micro_batches:
            if self._source is None:
                keys = self._keys(self.taken + len(self._ahead))
                self._source = iter(_loader(self._batches, keys, self._options))
            with waiting_for_data(self._source):
                batch = next(self._source, None)
            if batch is None:  # the epoch's last micro-batch is already loaded
                self._source = None
            else:
                self._ahead.append(batch)
        return list(self._ahead)

    def upcoming(self, ahead: int) -> list[int]:
        """List the sample ids of the micro-batch `ahead` iterations from now (0: the next one)."""
        return self._batches.ids(self.sampler.batch(self.taken + ahead))

    def _keys(self, number: int) -> Iterator[tuple[int, list[int]]]:
        """Yield keys from `number` to the end of its epoch, when worker processes end; without end if they persist."""
        end = math.inf if self._options.get("persistent_workers") else (number // len(self) + 1) * len(self)
        while number < end:
            yield number, self.sampler.batch(number)
            number += 1

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            self.begin_step(1)
            batch = self._ahead.popleft()
            self.taken += 1
            ids, mask = batch.inputs.get("input_ids"), batch.inputs.get("attention_mask")
            if ids is not None:  # None for images
                self.tokens += ids.numel()
            if batch.lengths is not None:
                self.real_tokens += sum(map(sum, batch.lengths))
            elif ids is not None:
                real = (ids != self._pad) if mask is None and self._pad is not None else mask
                self.real_tokens += ids.numel() if real is None else int(real.sum())
            yield self._model_inputs(batch)


class EvalLoader:
    """The micro-batches of an evaluation. Batch b of replica r of n is micro-batch r + b·n of the dataset."""

    def __init__(
        self,
        samples: SampleSource,
        micro_batch: int,
        seed: int,
        options: dict[str, Any],
        *,
        drop_last: bool = False,
        replicas: int = 1,
        replica: int = 0,
    ) -> None:
        """Partition a dataset into micro-batches. Iteration yields those of this replica.

        Args:
            samples: The dataset.
            micro_batch: Samples of a micro-batch.
            seed: For the collator's random draws.
            options: From `loader_options`.
            drop_last: Drop an incomplete last micro-batch, as Trainer does.
            replicas: Number of pipeline replicas.
            replica: This replica's number.

        Raises:
            DataError: If the samples do not fill one micro-batch.
        """
        self.dataset, self.samples = samples.data, len(samples.data)
        count = self.samples // micro_batch if drop_last else -(-self.samples // micro_batch)
        batches = [list(range(n * micro_batch, min((n + 1) * micro_batch, self.samples))) for n in range(count)]
        if samples.loader is not None:
            batches = _epoch_of(samples.loader, seed, 0, EVALUATION)
            count, self.samples = len(batches), sum(map(len, batches))
        self.largest = max(map(len, batches), default=0)
        if count == 0:
            raise DataError(
                f"{self.samples} samples do not fill a micro-batch of {micro_batch}: set dataloader_drop_last to False"
            )
        self.own = range(replica, count, replicas)
        self._length = -(-count // replicas)
        keys = [(n, batches[n]) for n in self.own]
        self._loader = _loader(_CollatedBatches(samples, seed, EVALUATION), keys, options)

    def __len__(self) -> int:
        """Return the largest number of micro-batches of any replica, Trainer's number of steps for progress bars."""
        return self._length

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._loader)


class EvalLoaders:
    """A cache of evaluation loaders with persistent worker processes."""

    def __init__(self) -> None:
        self._persistent: dict[tuple[int, int], tuple[Any, EvalLoader]] = {}

    def of(
        self, data: Any, samples: SampleSource, args: Any, *, replicas: int, replica: int, sequences: int = 1
    ) -> EvalLoader:
        """Return the loader of a dataset. samples: the dataset with the columns that the model takes.

        sequences: sequences of the model for each sample that `args` counts.
        """
        key = (id(data), args.per_device_eval_batch_size)
        if key in self._persistent and samples.loader is None:
            return self._persistent[key][1]
        loader = EvalLoader(
            samples,
            args.per_device_eval_batch_size * sequences,
            data_seed(args),
            loader_options(args, samples.loader),
            drop_last=args.dataloader_drop_last,
            replicas=replicas,
            replica=replica,
        )
        if args.dataloader_persistent_workers and samples.loader is None:
            self._persistent[key] = (data, loader)  # the reference to data keeps its id from being reused
        return loader


# -- order of samples


def _epoch_of(loader: DataLoader, seed: int, epoch: int, kind: int) -> list[list[int]]:
    """Return a loader's batches in an epoch, as indices. Draws of its sampler are the same on all ranks."""
    sampler: Any = loader.batch_sampler
    for each in (sampler, getattr(sampler, "sampler", None)):
        set_epoch(each, epoch)
    with seeded(seed, kind, -1 - epoch):
        return [[int(i) for i in batch] for batch in sampler]


class SamplerBatches(Sampler):
    """The batches of an epoch of a trainer's own order, as a DataLoader's batch_sampler. order: the trainer's."""

    def __init__(self, order: ShardedSampler) -> None:
        self.order, self._epoch = order, 0

    def set_epoch(self, epoch: int) -> None:
        """Iterate over another epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.order.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self._epoch * self.order.per_epoch
        return map(self.order.batch, range(first, first + self.order.per_epoch))


class LoaderOrder:
    """The order of a subclass's DataLoader. Replica r of n takes the batches r, r + n, … of every epoch.

    A replica with one batch less repeats the first ones of the epoch at its end.

    Args:
        loader: The DataLoader.
        seed: For the sampler's random draws.
        replicas: Their number.
        replica: This one's number.

    Attributes:
        per_epoch: Micro-batches of a replica in an epoch.
    """

    def __init__(self, loader: DataLoader, seed: int, *, replicas: int, replica: int) -> None:
        self._loader, self._seed, self._replicas, self._replica = loader, seed, replicas, replica
        self._epoch, self._batches = 0, _epoch_of(loader, seed, 0, TRAINING)
        self.per_epoch = -(-len(self._batches) // replicas)
        self.largest = max(map(len, self._batches))
        self.digest = hashlib.sha256(repr(self._batches).encode()).hexdigest()[:12]

    def batch(self, number: int) -> list[int]:
        """Return the indices of micro-batch `number`, counted from the start of training."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch < self._epoch:
            self._epoch, self._batches = epoch, _epoch_of(self._loader, self._seed, epoch, TRAINING)
        while self._epoch < epoch:  # one after the other: a sampler may have a generator of its own
            self._epoch += 1
            self._batches = _epoch_of(self._loader, self._seed, self._epoch, TRAINING)
        return self._batches[(place * self._replicas + self._replica) % len(self._batches)]

    def size(self, number: int) -> int:
        """Return the number of samples of micro-batch `number`."""
        return len(self.batch(number))


class LengthSampler(ShardedSampler):
    """Steps of samples with similar lengths, as Trainer's group_by_length. lengths: tokens of every sample."""

    def __init__(self, lengths: list[int], step: int, micro_batch: int, **options: Any) -> None:
        """step: samples of one replica in an optimizer step. options: for ShardedSampler."""
        super().__init__(len(lengths), micro_batch, accumulation=step // micro_batch, **options)
        self._lengths = lengths

    def _arrange(self, samples: Tensor, layout: EpochPart, replicas: int, draw: torch.Generator) -> Tensor:
        lengths = [int(self._lengths[i]) for i in samples.tolist()]
        step = layout.micro_batch * layout.accumulation * replicas
        return torch.tensor(get_length_grouped_indices(lengths, step, generator=draw))


class TrainerSampler(ShardedSampler):
    """The order of transformers.Trainer in one process, for one replica; several have parts of their own.

    Trainer's loader draws an epoch's order from a generator with the seed `seed + epoch`.
    """

    def _draw(self, epoch: int, replica: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed + epoch) if replica == 0 else super()._draw(epoch, replica)


def sample_lengths(data: Any, column: str, input_name: str, what: str = _BY_LENGTH) -> list[int]:
    """Return the number of tokens of every sample.

    Args:
        data: The dataset. An attribute `lengths` is used, if it has one.
        column: The column with lengths, if the dataset has it.
        input_name: The input whose values are counted otherwise.
        what: What needs the lengths, for errors.

    Raises:
        DataError: If the dataset has neither.
    """
    names = getattr(data, "column_names", None) or ()
    if column in names:
        return [int(n) for n in data[column]]
    if getattr(data, "lengths", None) is not None:
        return [int(n) for n in data.lengths]
    try:
        if input_name in names and hasattr(data, "with_format"):  # a thousand samples at a time, without Python's lists
            tables = data.select_columns([input_name]).with_format("arrow").iter(batch_size=1000)
            return [n or 0 for table in tables for n in list_value_length(table.column(0)).to_pylist()]
        return [len(sample[input_name]) for sample in islice(data, len(data))]  # some datasets never raise IndexError
    except (KeyError, TypeError) as error:
        allowed = f"a column {column!r}, or samples with {input_name!r}"
        raise DataError(f"{what} needs {allowed}") from error


def make_sampler(
    samples: SampleSource,
    args: Any,
    data: Any,
    processing_class: Any,
    *,
    replicas: int,
    replica: int,
    kind: type[ShardedSampler] = ShardedSampler,
) -> Any:
    """Make the order of a subclass's loader or for `args.train_sampling_strategy`.

    Args:
        samples: The dataset.
        args: TrainingArguments.
        data: The dataset with all of its columns.
        processing_class: Trainer's argument.
        replicas: Number of pipeline replicas.
        replica: This replica's number.
        kind: Class for the strategies "random" and "sequential".

    Raises:
        DataError: If a loader's batch has more samples than a micro-batch.
    """
    if samples.loader is not None:
        own = samples.loader.batch_sampler
        if isinstance(own, SamplerBatches):
            return own.order
        order = LoaderOrder(samples.loader, data_seed(args), replicas=replicas, replica=replica)
        most = args.per_device_train_batch_size
        if order.largest > most:
            raise DataError(
                f"the training loader has batches of {order.largest} samples, allowed: per_device_train_batch_size, "
                f"{most}"
            )
        return order
    options: dict[str, Any] = {
        "replicas": replicas,
        "replica": replica,
        "seed": data_seed(args),
        "drop_last": args.dataloader_drop_last,
    }
    micro_batch = args.per_device_train_batch_size
    if args.train_sampling_strategy == "group_by_length":
        names = getattr(processing_class, "model_input_names", ["input_ids"])
        lengths = sample_lengths(data, args.length_column_name, names[0])
        return LengthSampler(lengths, micro_batch * args.gradient_accumulation_steps, micro_batch, **options)
    shuffle = args.train_sampling_strategy == "random"
    options["accumulation"] = args.gradient_accumulation_steps
    return kind(len(samples.data), micro_batch, shuffle=shuffle, **options)


# -- packing


def packs(collate: Any) -> bool:
    """Return whether a collator makes one row of several samples: this project's, transformers' or TRL's."""
    flattens = isinstance(collate, (PackingCollator, DataCollatorWithFlattening))
    return flattens or bool(getattr(collate, "padding_free", False))


def packed_sampler(sampler: Any, collate: Any, data: Any, args: Any, *, spanning: bool = False) -> Any:
    """Return the sampler that divides each step's samples evenly among its micro-batches, if they are to be packed.

    Args:
        sampler: The order of samples.
        collate: The collator; the sampler stays as it is unless this is a `PackingCollator`.
        data: The dataset with all of its columns.
        args: TrainingArguments.
        spanning: Whether steps extend from one epoch into the next.

    Raises:
        DataError: If the samples' lengths are unknown.
    """
    if not isinstance(collate, PackingCollator):
        return sampler
    lengths = sample_lengths(data, args.length_column_name, "input_ids", "packing")
    return PackedSampler(sampler, lengths, args.gradient_accumulation_steps, spanning=spanning)


def packed_documents(data: Any) -> int | None:
    """Return the most documents in a sample of a dataset that TRL's `pack_dataset` has packed; None for other ones."""
    names = getattr(data, "column_names", None)
    if names is not None:
        return max(map(len, data[SEQ_LENGTHS])) if SEQ_LENGTHS in names else None
    first = data[0]
    if not isinstance(first, Mapping) or SEQ_LENGTHS not in first:
        return None
    return max(len(data[i][SEQ_LENGTHS]) for i in range(len(data)))
