"""Evaluation and prediction over a pipeline: rank 0 gathers logits and broadcasts metrics.

The last stage of every replica computes the logits of its part of the dataset and sends them with the labels to rank 0,
which sorts them by the dataset's order, pads with -100 as Trainer does, and calls `compute_metrics`. B micro-batch.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_numpify
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, speed_metrics

from pipecomp.data import MicroBatch
from pipecomp.errors import DataError, PipecompError, WireError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.trainer.data_loading import EvalLoader
from pipecomp.trainer.losses import StepLoss
from pipecomp.utils.activity import local_activity
from pipecomp.utils.serialization import decode_tree, encode_tree

PADDING = -100
_PIECE = 1 << 24  # bytes of one message


def check_ignored_keys(name: str, keys: Any) -> None:
    """Raise ConfigError if there are keys of model outputs to ignore: the last stage returns only logits."""
    require(not keys, name, keys, "None: a pipeline's last stage returns only logits")


def select_dataset(wanted: Any, default: Any) -> Any:
    """Return the dataset `wanted`, the one of that name in `default`, or `default` for None. Raises ConfigError."""
    if wanted is None:
        return default
    if not isinstance(wanted, str):
        return wanted
    names = default if isinstance(default, dict) else {}
    allowed = f"a dataset, or one of the names {', '.join(names)}" if names else "a dataset"
    require(wanted in names, "eval_dataset", wanted, allowed)
    return names[wanted]


class EvaluatedBatch(NamedTuple):
    """A micro-batch's number in the dataset, B, mean loss (None without labels), and arrays (None if not kept)."""

    number: int
    samples: int
    loss: float | None
    logits: Any
    labels: Any
    inputs: Any


class Evaluation:
    """An evaluation of an engine. Every rank must construct and run it.

    Args:
        engine: The engine to evaluate.
        group: A gloo group of all ranks.
        args: TrainingArguments.
        loss: The trainer's loss.
        compute_metrics: Trainer's argument.
        preprocess: Trainer's `preprocess_logits_for_metrics`.
        on_step: Called after each micro-batch. All ranks call it equally often, `len(loader)` times.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        group: Any,
        args: Any,
        *,
        loss: StepLoss,
        compute_metrics: Callable[[EvalPrediction], dict] | None,
        preprocess: Callable[[Any, Any], Any] | None,
        on_step: Callable[[], None],
    ) -> None:
        self._engine, self._group, self._args = engine, group, args
        self._loss, self._compute_metrics, self._preprocess = loss, compute_metrics, preprocess
        self._on_step = on_step

    def run(self, loader: EvalLoader, prefix: str, *, loss_only: bool, arrays: bool) -> EvalLoopOutput:
        """Evaluate a dataset.

        Args:
            loader: The dataset's loader.
            prefix: Prefix of the metrics' names.
            loss_only: Keep no logits.
            arrays: Return predictions and labels too.

        Returns:
            Metrics and, with `arrays`, predictions and labels; the same on every rank.

        Raises:
            PipecompError: On the other ranks, if compute_metrics raises an error on rank 0.
        """
        began = time.time()
        own = self._evaluate(loader, loss_only)
        with self._engine.propagate_failure():
            rows = self._gather(own)
        data = b""
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                logits, labels, metrics = self._combine(rows, loader, prefix, began)
                data = pack((logits, labels, metrics) if arrays else (None, None, metrics))
            except Exception as raised:
                error, data = raised, pack(f"{type(raised).__name__}: {raised}")
        with self._engine.propagate_failure():
            result = unpack(self._broadcast(data))
        if error is not None:
            raise error
        if isinstance(result, str):
            raise PipecompError(f"evaluation failed on rank 0: {result}")
        logits, labels, metrics = result
        return EvalLoopOutput(predictions=logits, label_ids=labels, metrics=metrics, num_samples=loader.samples)

    # -- on every rank

    def _evaluate(self, loader: EvalLoader, loss_only: bool) -> list[EvaluatedBatch]:
        """Compute the results of this rank's replica on the last stage; other stages return none."""
        engine = self._engine
        pulled: deque[MicroBatch] = deque()
        results: list[EvaluatedBatch] = []
        keep_inputs = "inputs" in self._args.include_for_metrics and not loss_only
        numbers = iter(loader.own)
        stepped = 0

        def batches() -> Iterator[MicroBatch]:
            nonlocal stepped
            for batch in loader:
                if engine.is_last_stage():
                    self._loss.masked_labels(engine.stage, [batch])  # raises if a label is predicted from padding
                    pulled.append(batch)
                yield self._loss.model_inputs(batch)
                stepped += 1
                self._on_step()

        def on_logits(logits: Tensor, labels: Tensor | None) -> Tensor:
            batch, number = pulled.popleft(), next(numbers)
            loss = None if labels is None else float(self._loss.plain(logits, labels, batch))
            kept: list[Any] = [None, None, None]
            if not loss_only:
                inputs = batch.inputs["input_ids"] if keep_inputs else None
                logits, labels, inputs = (_by_sample(engine.stage, batch, x) for x in (logits, labels, inputs))
                shown = logits if self._preprocess is None else self._preprocess(logits, labels)
                kept = [None if x is None else nested_numpify(x) for x in (shown, labels, inputs)]
            results.append(EvaluatedBatch(number, len(batch.ids), loss, *kept))
            return logits.new_zeros(())

        count = len(loader.own)
        source = batches() if engine.is_first_stage() or engine.is_last_stage() else None
        engine.eval_batch(source, num_micro_batches=count, on_logits=on_logits)
        for _ in range(len(loader) - stepped):
            self._on_step()
        return results

    def _gather(self, own: list[EvaluatedBatch]) -> list[EvaluatedBatch]:
        """Gather all replicas' results on rank 0, in the dataset's order."""
        engine, rank = self._engine, dist.get_rank()
        rows = list(own) if rank == 0 else []
        for replica in range(engine.grid.data_parallel_size):
            source = engine.grid._topo.get_rank(pipe=engine.num_stages - 1, data=replica)
            if source != 0 and rank == source:
                self._send(pack(own))
            elif source != 0 and rank == 0:
                rows += [EvaluatedBatch(*row) for row in unpack(self._receive(source))]
        return sorted(rows, key=lambda row: row.number)

    def _broadcast(self, data: bytes) -> bytes:
        """Broadcast rank 0's bytes."""
        size, first = torch.tensor([len(data)]), dist.get_rank() == 0
        dist.broadcast(size, 0, group=self._group)
        received = bytearray()  # grows with received data, so a wrong size does not allocate memory
        for start in range(0, int(size), _PIECE):
            if first:
                piece = torch.frombuffer(bytearray(data[start : start + _PIECE]), dtype=torch.uint8)
                dist.broadcast(piece, 0, group=self._group)
            else:
                piece = torch.empty(min(_PIECE, int(size) - start), dtype=torch.uint8)
                dist.broadcast(piece, 0, group=self._group)
                received += piece.numpy().data
        return data if first else bytes(received)

    def _send(self, data: bytes) -> None:
        dist.send(torch.tensor([len(data)]), 0, group=self._group)
        for start in range(0, len(data), _PIECE):
            piece = torch.frombuffer(bytearray(data[start : start + _PIECE]), dtype=torch.uint8)
            dist.send(piece, 0, group=self._group)

    def _receive(self, source: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        received = bytearray()
        for start in range(0, int(size), _PIECE):
            piece = torch.empty(min(_PIECE, int(size) - start), dtype=torch.uint8)
            dist.recv(piece, source, group=self._group)
            received += piece.numpy().data
        return bytes(received)

    # -- on rank 0

    def _combine(
        self, rows: list[EvaluatedBatch], loader: EvalLoader, prefix: str, began: float
    ) -> tuple[Any, Any, dict[str, float]]:
        """Return logits, labels and metrics of the dataset."""
        args = self._args
        join: Callable[[list[Any]], Any] = _concatenate if args.eval_do_concat_batches else list
        logits, labels, inputs = (
            None if rows[0][place] is None else join([row[place] for row in rows]) for place in (3, 4, 5)
        )
        losses: np.ndarray | None = None
        if all(row.loss is not None for row in rows):
            losses = np.concatenate([np.full(row.samples, row.loss, dtype=np.float32) for row in rows])
        metrics: dict[str, Any] = {}
        if self._compute_metrics is not None and logits is not None and labels is not None:
            extra: dict[str, Any] = {
                "losses": losses if "loss" in args.include_for_metrics else None,
                "inputs": inputs if "inputs" in args.include_for_metrics else None,
            }
            with local_activity("is in compute_metrics"):
                metrics = self._compute_metrics(EvalPrediction(predictions=logits, label_ids=labels, **extra))
        metrics = denumpify_detensorize(metrics)
        if losses is not None:
            finite = np.isfinite(losses)
            shown = losses[finite] if args.logging_nan_inf_filter and finite.any() else losses
            metrics[f"{prefix}_loss"] = float(shown.mean())
        for key in [key for key in metrics if not key.startswith(f"{prefix}_")]:
            metrics[f"{prefix}_{key}"] = metrics.pop(key)  # a "loss" from compute_metrics replaces the mean loss
        metrics.update(speed_metrics(prefix, began, num_samples=loader.samples, num_steps=len(loader)))
        return logits, labels, metrics


def _by_sample(stage: Any, batch: MicroBatch, x: Tensor | None) -> Any:
    """Return values by row and token of a packed micro-batch as those of its samples, in the dataset's order."""
    if x is None or batch.lengths is None:
        return x
    apart = stage.layout(batch.ids, batch.inputs, batch.lengths).unpack(x, PADDING)
    return apart if batch.places is None else apart[torch.tensor(batch.places).argsort().to(apart.device)]


def _concatenate(parts: list[Any]) -> Any:
    """Concatenate the arrays of all micro-batches, padded in the second dimension to the longest."""
    first = parts[0]
    if isinstance(first, (list, tuple)):
        return type(first)(_concatenate(list(column)) for column in zip(*parts, strict=True))
    if isinstance(first, Mapping):
        return type(first)({key: _concatenate([part[key] for part in parts]) for key in first})  # type: ignore[call-arg]
    arrays = [np.atleast_1d(part) for part in parts]
    if arrays[0].ndim == 1 or len({array.shape[1] for array in arrays}) == 1:
        return np.concatenate(arrays)
    widest = max(array.shape[1] for array in arrays)
    shape = (sum(len(array) for array in arrays), widest, *arrays[0].shape[2:])
    out = np.full(shape, PADDING, dtype=arrays[0].dtype)
    start = 0
    for array in arrays:
        out[start : start + len(array), : array.shape[1]] = array
        start += len(array)
    return out


# -- arrays sent between ranks


_LENGTH = struct.Struct("<Q")
_KINDS = "biufc"  # of numpy dtypes: numbers only


def pack(value: Any) -> bytes:
    """Serialize nested values.

    Args:
        value: Numeric arrays, None, numbers, strings, and lists, tuples and mappings of them. Mappings become dicts.

    Raises:
        DataError: If the value contains another type.
    """
    arrays: list[np.ndarray] = []

    def put_aside(leaf: Any) -> Any:
        leaf = leaf.item() if isinstance(leaf, np.generic) else leaf
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in _KINDS:
            arrays.append(leaf.astype(leaf.dtype.newbyteorder("<"), copy=False))
            return {"array": [arrays[-1].dtype.str, list(leaf.shape)]}
        shown = f"array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        raise DataError(f"cannot send {shown} to another rank, allowed: numeric arrays, numbers, texts, lists of them")

    header = json.dumps(encode_tree(value, put_aside)).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)])


def unpack(data: bytes) -> Any:
    """Deserialize the bytes of `pack`. Lengths are checked before memory is allocated.

    Args:
        data: From `pack`.

    Raises:
        WireError: If the bytes are malformed.
    """
    end = _LENGTH.size

    def fetch(kind: str, content: Any) -> np.ndarray:
        nonlocal end
        dtype, shape = np.dtype(content[0]), tuple(content[1])
        if kind != "array" or dtype.kind not in _KINDS or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"not a numeric array: {kind} {content}")
        begin, count = end, math.prod(shape)
        end += count * dtype.itemsize
        return np.frombuffer(data, dtype, count, begin).reshape(shape).copy()

    try:
        (length,) = _LENGTH.unpack_from(data)
        end += length
        value = decode_tree(json.loads(data[_LENGTH.size : end]), fetch)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise WireError(f"{len(data)} bytes of malformed packed arrays: {error}") from error
    if end != len(data):
        raise WireError(f"packed arrays have {len(data)} bytes, their header requires {end}")
    return value
