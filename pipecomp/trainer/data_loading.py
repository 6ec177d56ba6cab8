"""Loads micro-batches for the first and the last stage, equal on both whatever the collator draws."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.trainer_utils import RemoveColumnsCollator, has_length

from pipecomp.data import (
    MicroBatch,
    ShardedSampler,
    TrainLoader,
    as_micro_batch,
    check_labels,
    sample_id_function,
    seeded,
)
from pipecomp.errors import DataError
from pipecomp.plan.auto_bits import SAMPLES_READ

# Note: each stage loads for itself. A micro-batch is made with the random generators seeded by its number, so a
# collator that masks tokens masks the same ones on both stages, in any worker process, and after a resume.
TRAINING, EVALUATION = 0, 1  # which numbers a micro-batch is counted by


class Samples(NamedTuple):
    """A dataset without the columns that the model does not take, and what makes batches of it.

    sample_id: gives the id of a place in the dataset: what the dataset says, else the place itself (see pipecomp.data).
    """

    data: Any
    collate: Callable[[list], Any]
    sample_id: Callable[[int], int] = int

    @classmethod
    def of(cls, data: Any, collate: Callable[[list], Any], columns: list[str] | None, name: str) -> Samples:
        """Take a dataset, or the part of it that the model takes.

        Args:
            data: Samples with a length and numbers.
            collate: Makes a batch of a list of samples.
            columns: The ones to keep, None for all.
            name: The dataset's, for errors.

        Raises:
            DataError: If it has no length, no samples, or no column that the model takes.
        """
        if data is None or not _is_numbered(data):
            raise DataError(f"{name}: got {type(data).__name__}, allowed: a dataset with a length and numbered samples")
        if len(data) == 0:
            raise DataError(f"{name}: has no samples")
        sample_id = sample_id_function(data)
        if columns is None:
            return cls(data, collate, sample_id)
        if not hasattr(data, "remove_columns"):
            return cls(data, RemoveColumnsCollator(collate, columns), sample_id)
        unused = [column for column in data.column_names if column not in columns]
        if len(unused) == len(data.column_names):
            raise DataError(f"{name}: has the columns {data.column_names}, the model takes {columns}")
        return cls(data.remove_columns(unused), collate, sample_id)


def _is_numbered(data: Any) -> bool:
    # torch's IterableDataset inherits a method that only says that there is none.
    return has_length(data) and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def longest_sample(samples: Samples, seed: int) -> int:
    """Count the tokens of the longest of the first samples as the collator makes them, padding included.

    Args:
        samples: The dataset.
        seed: Of what a collator draws.

    Raises:
        DataError: If what the collator makes is no batch.
    """
    places = range(min(SAMPLES_READ, len(samples.data)))
    batch = _Batches(samples, seed, TRAINING)[0, list(places)]
    return int(batch.inputs["input_ids"].shape[1])


def set_epoch(data: Any, epoch: int) -> None:
    """Tell a dataset that changes by epoch which one it is, as Trainer does."""
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)


def check_draws(samples: Samples, micro_batch: int, seed: int, name: str) -> None:
    """Check that both ends of a pipeline would make the same micro-batch of the first samples.

    Args:
        samples: The dataset.
        micro_batch: Samples of a micro-batch.
        seed: Of what a collator draws.
        name: The dataset's, for errors.

    Raises:
        DataError: If its labels follow from draws that are not seeded.
    """
    batches, places = _Batches(samples, seed, TRAINING), list(range(min(micro_batch, len(samples.data))))
    check_labels(lambda: batches[0, places], name)


def data_seed(args: Any) -> int:
    """Of the order of samples, and of what a collator draws."""
    return int(args.seed if args.data_seed is None else args.data_seed)


# -- micro-batches


class _Batches(Dataset):
    """Micro-batches, ready to use, by (number, places in the dataset)."""

    def __init__(self, samples: Samples, seed: int, kind: int) -> None:
        self._data, self._collate, self._sample_id = samples
        self._seed, self._kind = seed, kind

    def __getitem__(self, key: Any) -> MicroBatch:
        number, places = key
        with seeded(self._seed, self._kind, number):
            fetch = getattr(self._data, "__getitems__", None)
            chosen = fetch(places) if fetch is not None else [self._data[i] for i in places]
            return as_micro_batch(self._collate(chosen), self.ids(places))

    def ids(self, places: Iterable[int]) -> list[int]:
        """List the samples' ids."""
        return [self._sample_id(place) for place in places]


def _as_is(batch: MicroBatch) -> MicroBatch:
    return batch


def loader_options(args: Any) -> dict[str, Any]:
    """Read what TrainingArguments says about worker processes."""
    return {
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
    }


def _loader(batches: _Batches, places: Iterable[tuple[int, list[int]]], options: dict[str, Any]) -> DataLoader:
    # With a generator of its own the loader leaves torch's alone, whose state a resumed training must find again.
    own: dict[str, Any] = {"batch_size": None, "collate_fn": _as_is, "generator": torch.Generator()}
    return DataLoader(batches, sampler=places, **own, **options)


class StepLoader(TrainLoader):
    """The training micro-batches of one replica, a step's made together: their labels must be counted first.

    Args:
        samples: The dataset.
        sampler: The order.
        seed: Of what a collator draws.
        options: Of `loader_options`.
        pad: The id by which padding is known where there is no attention_mask.

    Attributes:
        dataset: What is read, without columns that the model does not take.
        tokens: Input tokens of what was handed out, padding included.
        real_tokens: The same without padding.
    """

    def __init__(
        self,
        samples: Samples,
        sampler: ShardedSampler,
        seed: int,
        options: dict[str, Any],
        pad: int | None = None,
    ) -> None:
        super().__init__(samples.data, sampler, samples.collate)
        self.dataset, self._pad = samples.data, pad
        self._batches, self._options = _Batches(samples, seed, TRAINING), options
        self._ahead: deque[MicroBatch] = deque()
        self._source: Iterator[MicroBatch] | None = None
        self.tokens = self.real_tokens = 0

    def __len__(self) -> int:
        return self.sampler.per_epoch

    def begin_epoch(self, epoch: int, number: int) -> None:
        """Go on in `epoch` with micro-batch `number`, counted from the start of training.

        The dataset is told; worker processes get it anew, unless they are to stay.
        """
        if number != self.taken:
            self.taken = number
            self._ahead.clear()
            self._source = None
        set_epoch(self.dataset, epoch)

    def begin_step(self, micro_batches: int) -> list[MicroBatch]:
        """Make a step's micro-batches, which are then handed out."""
        while len(self._ahead) < micro_batches:
            if self._source is None:
                places = self._places(self.taken + len(self._ahead))
                self._source = iter(_loader(self._batches, places, self._options))
            made = next(self._source, None)
            if made is None:  # the epoch's last one is among those made ahead
                self._source = None
            else:
                self._ahead.append(made)
        return list(self._ahead)

    def upcoming(self, ahead: int) -> list[int]:
        """List the ids of the micro-batch that is handed out `ahead` calls from now (0: the next one)."""
        return self._batches.ids(self.sampler.batch(self.taken + ahead))

    def _places(self, number: int) -> Iterator[tuple[int, list[int]]]:
        """Those from `number` to the end of its epoch, with which worker processes end too; all, where they stay."""
        end = math.inf if self._options.get("persistent_workers") else (number // len(self) + 1) * len(self)
        while number < end:
            yield number, self.sampler.batch(number)
            number += 1

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            self.begin_step(1)
            batch = self._ahead.popleft()
            self.taken += 1
            ids, mask = batch.inputs["input_ids"], batch.inputs.get("attention_mask")
            real = (ids != self._pad) if mask is None and self._pad is not None else mask
            self.tokens += ids.numel()
            self.real_tokens += ids.numel() if real is None else int(real.sum())
            yield batch


class EvalLoader:
    """The micro-batches of an evaluation: number b of replica r of n is micro-batch r + b·n of the dataset."""

    def __init__(
        self,
        samples: Samples,
        micro_batch: int,
        seed: int,
        options: dict[str, Any],
        *,
        drop_last: bool = False,
        replicas: int = 1,
        replica: int = 0,
    ) -> None:
        """Make it. Iterating gives this replica's micro-batches; the length counts those of all replicas.

        Args:
            samples: The dataset.
            micro_batch: Samples of a micro-batch.
            seed: Of what a collator draws.
            options: Of `loader_options`.
            drop_last: Leave out a last one that is short, as Trainer does.
            replicas: Of the pipeline.
            replica: This one.

        Raises:
            DataError: If the samples do not fill one.
        """
        self.dataset, self.samples = samples.data, len(samples.data)
        count = self.samples // micro_batch if drop_last else -(-self.samples // micro_batch)
        if count == 0:
            raise DataError(f"{self.samples} samples do not fill a micro-batch of {micro_batch}: dataloader_drop_last")
        self.own = range(replica, count, replicas)
        self._most = -(-count // replicas)
        places = [(n, list(range(n * micro_batch, min((n + 1) * micro_batch, self.samples)))) for n in self.own]
        # Its workers stay for the next evaluation, if the options say so.
        self._loader = _loader(_Batches(samples, seed, EVALUATION), places, options)

    def __len__(self) -> int:
        """The most that a replica has: so many steps its progress is shown in, as Trainer's is."""
        return self._most

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._loader)


class EvalLoaders:
    """The loaders of evaluations; one whose worker processes stay is kept for the next evaluation of its dataset."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Any, EvalLoader]] = {}

    def of(self, data: Any, samples: Samples, args: Any, *, replicas: int, replica: int) -> EvalLoader:
        """Make the loader of a dataset, `samples` of which are what the model takes."""
        key = (id(data), args.per_device_eval_batch_size)
        if key in self._kept:
            return self._kept[key][1]
        loader = EvalLoader(
            samples,
            args.per_device_eval_batch_size,
            data_seed(args),
            loader_options(args),
            drop_last=args.dataloader_drop_last,
            replicas=replicas,
            replica=replica,
        )
        if args.dataloader_persistent_workers:
            self._kept[key] = (data, loader)  # with the data, so that nothing else gets its id
        return loader


# -- order of samples


class LengthSampler(ShardedSampler):
    """Samples of about the same length in a step, as Trainer's group_by_length. lengths: of all samples, tokens."""

    def __init__(self, lengths: list[int], step: int, micro_batch: int, **options: Any) -> None:
        """step: samples of one replica in an optimizer step. options: ShardedSampler's."""
        super().__init__(len(lengths), micro_batch, **options)
        self._lengths, self._step = [int(lengths[i]) for i in self._own.tolist()], step

    def _arrange(self, epoch: int) -> Tensor:
        places = get_length_grouped_indices(self._lengths, self._step, generator=self._draw(epoch))
        return self._own[torch.tensor(places)]


def lengths_of(data: Any, column: str, input_name: str) -> list[int]:
    """Return how many tokens every sample has.

    Args:
        data: The dataset.
        column: Where a dataset may say it.
        input_name: Whose values are counted if it does not.

    Raises:
        DataError: If there is neither.
    """
    if column in getattr(data, "column_names", ()):
        return [int(n) for n in data[column]]
    try:
        return [len(sample[input_name]) for sample in islice(data, len(data))]  # not all datasets end by IndexError
    except (KeyError, TypeError) as error:
        allowed = f"a column {column!r}, or samples with {input_name!r}"
        raise DataError(f"train_sampling_strategy 'group_by_length' needs {allowed}") from error


def make_sampler(
    samples: Samples, args: Any, data: Any, processing_class: Any, *, replicas: int, replica: int
) -> ShardedSampler:
    """Make the order that `args.train_sampling_strategy` names. data: the dataset with all of its columns."""
    options: dict[str, Any] = {
        "replicas": replicas,
        "replica": replica,
        "seed": data_seed(args),
        "drop_last": args.dataloader_drop_last,
    }
    micro_batch = args.per_device_train_batch_size
    if args.train_sampling_strategy == "group_by_length":
        names = getattr(processing_class, "model_input_names", ["input_ids"])
        lengths = lengths_of(data, args.length_column_name, names[0])
        return LengthSampler(lengths, micro_batch * args.gradient_accumulation_steps, micro_batch, **options)
    shuffle = args.train_sampling_strategy == "random"
    return ShardedSampler(len(samples.data), micro_batch, shuffle=shuffle, **options)
