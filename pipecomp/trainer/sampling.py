"""The order in which a training sees its samples, as `TrainingArguments.train_sampling_strategy` names it."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import get_length_grouped_indices

from pipecomp.data import ShardedSampler
from pipecomp.errors import DataError
from pipecomp.trainer.feeding import Samples, data_seed


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
