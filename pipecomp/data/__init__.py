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
from pipecomp.data.loading import DataCounts, DataOptions, TrainingData, load_data
from pipecomp.data.packing import PackedSampler, PackingCollator
from pipecomp.data.rendering import Segment, decode_sample, sample_html, sample_plain, sample_terminal
from pipecomp.data.samples import IGNORED, BlockSamples, DocumentSamples
from pipecomp.data.sources import find_sources

__all__ = [
    "ID_KEY",
    "IGNORED",
    "INPUT_KEYS",
    "LABEL_KEYS",
    "MAX_ID",
    "SHOWN",
    "BlockSamples",
    "DataCounts",
    "DataOptions",
    "DocumentSamples",
    "MicroBatch",
    "PackedSampler",
    "PackingCollator",
    "Sampler",
    "Segment",
    "ShardedSampler",
    "TrainLoader",
    "TrainingData",
    "as_micro_batch",
    "check_labels",
    "count_samples",
    "dataset_facts",
    "decode_sample",
    "default_collate",
    "eval_batches",
    "find_sources",
    "load_data",
    "sample_html",
    "sample_id_function",
    "sample_plain",
    "sample_terminal",
    "seeded",
]
