"""Training data: micro-batches with sample ids, sources of documents and chats, and their tokens."""

from pipecomp.data.batches import (
    ID_KEY,
    INPUT_KEYS,
    LABEL_KEYS,
    MAX_ID,
    SHOWN,
    MicroBatch,
    Sampler,
    ShardedSampler,
    TrainLoader,
    as_micro_batch,
    check_labels,
    count_samples,
    dataset_facts,
    default_collate,
    eval_batches,
    sample_id_function,
    seeded,
)
from pipecomp.data.packing import PackedSampler, PackingCollator

__all__ = [
    "ID_KEY",
    "INPUT_KEYS",
    "LABEL_KEYS",
    "MAX_ID",
    "SHOWN",
    "MicroBatch",
    "PackedSampler",
    "PackingCollator",
    "Sampler",
    "ShardedSampler",
    "TrainLoader",
    "as_micro_batch",
    "check_labels",
    "count_samples",
    "dataset_facts",
    "default_collate",
    "eval_batches",
    "sample_id_function",
    "seeded",
]
