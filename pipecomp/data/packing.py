"""Packing: documents of different lengths one after another in rows, without padding and without seeing each other.

A packed batch has input_ids, labels and position_ids [R, S]. Positions restart at each document; a document is a sample
with its own id. R rows, S tokens of a row, n of a document.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipecomp.errors import DataError, require

POSITIONS = "position_ids"
DOCUMENTS = "documents"  # rows of (place in the list of samples, tokens), one pair for each document
SEQ_LENGTHS = "seq_lengths"  # column of TRL's `pack_dataset`: the documents' lengths in a sample
IGNORED = -100  # label
DOCUMENT_BITS = 20  # of an id, for the number of a document in a sample of several

# Note: Plan of packs
# Packing changes neither which samples an optimizer step has nor their order over the epochs, so a run has the same
# losses with and without it. A step's samples are first divided among its micro-batches, longest first, each into the
# micro-batch with the fewest tokens so far. So micro-batches take equally long, and none has more tokens than a
# micro-batch of the longest samples would have. Then the collator puts the samples of a micro-batch into as few rows as
# the best fit finds, and evens out their lengths, so that hardly any place of [R, S] is padding.


def fit_rows(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Divide documents among as few rows as best fit decreasing finds, of nearly equal lengths.

    Args:
        lengths: Tokens of each document, at most `max_length`.
        max_length: Tokens of a row.

    Returns:
        For each row the places of its documents in `lengths`.

    Example:
        >>> fit_rows([5, 3, 2, 2], max_length=6)
        [[0], [1, 2], [3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # of rows: tokens left, number; ascending
    for i in order:
        at = bisect.bisect_left(spaces, (lengths[i], -1))
        if at < len(spaces):
            space, row = spaces.pop(at)
        else:
            space, row = max_length, len(rows)
            rows.append([])
        rows[row].append(i)
        bisect.insort(spaces, (space - lengths[i], row))
    even = divide(lengths, len(rows)) if rows else []
    longest = max((sum(lengths[i] for i in row) for row in even), default=0)
    chosen = even if longest <= max_length else rows
    return [sorted(row) for row in chosen]


def divide(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Divide documents into parts of nearly equal length: longest first, each into the part with the fewest tokens.

    Args:
        lengths: Tokens of each document.
        parts: At most the number of documents.

    Returns:
        For each part the places of its documents in `lengths`, ascending; no part is empty.
    """
    heap = [(0, 0, part) for part in range(parts)]  # tokens, documents, number
    divided: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, count, part = heapq.heappop(heap)
        divided[part].append(i)
        heapq.heappush(heap, (tokens + lengths[i], count + 1, part))
    return [sorted(part) for part in divided]


class Order(Protocol):
    """The order of samples that is packed, see `pipecomp.data.ShardedSampler`."""

    per_epoch: int

    def size(self, number: int) -> int:
        """Return the number of samples of micro-batch `number`."""

    def batch(self, number: int) -> list[int]:
        """Return the indices of micro-batch `number`."""

    def position(self, number: int) -> Any:
        """Return the position before micro-batch `number`."""

    def seek(self, position: Any) -> int:
        """Continue at a position. Returns the number of the next micro-batch."""


class PackedSampler:
    """Micro-batches of nearly equal length. Each step has the same samples as without packing.

    See Note: Plan of packs. The plan depends on the order and the lengths only, so all ranks have the same.

    Args:
        order: Order of the samples, and the number in each micro-batch before packing.
        lengths: Tokens of each sample of the dataset.
        micro_batches: Micro-batches in a step.
        spanning: Whether steps extend from one epoch into the next; else an epoch's last step may have fewer.

    Attributes:
        per_epoch: Micro-batches in one pass over the data.
    """

    def __init__(self, order: Order, lengths: Sequence[int], micro_batches: int, *, spanning: bool = False) -> None:
        self.per_epoch, self._spanning = order.per_epoch, spanning
        self._order, self._lengths, self._micro_batches = order, lengths, micro_batches
        self._first, self._parts = -1, list[list[int]]()
        self._start = 0  # the first micro-batch of a step

    def position(self, number: int) -> Any:
        """Return the position before micro-batch `number`, the first one of a step, as `ShardedSampler.position`."""
        return self._order.position(number)

    def seek(self, position: Any) -> int:
        """Continue at a position, see `ShardedSampler.seek`. Returns the number of the next micro-batch."""
        number = self._order.seek(position)
        # In an unchanged layout steps are counted from the start of training, or of an epoch.
        self._start = number if self._order.position(number).changed else 0
        self._first = -1
        return number

    def size(self, number: int) -> int:
        """Return the number of samples of micro-batch `number` without packing.

        Packing moves samples only within a step, so the step's total is the same.
        """
        return self._order.size(number)

    def batch(self, number: int) -> list[int]:
        """Return the indices of micro-batch `number`, counted from the start of training."""
        epoch = number // self.per_epoch
        start = self._start if self._spanning else max(self._start, epoch * self.per_epoch)
        first = number - (number - start) % self._micro_batches
        if first != self._first:
            last = first + self._micro_batches
            if not self._spanning:
                last = min(last, (epoch + 1) * self.per_epoch)
            indices = [index for n in range(first, last) for index in self._order.batch(n)]
            parts = divide([self._lengths[index] for index in indices], last - first)
            self._first, self._parts = first, [[indices[i] for i in part] for part in parts]
        return self._parts[number - first]


# -- batches


class PackingCollator:
    """Pack samples into rows.

    Args:
        collate: Makes the batch of one sample, with input_ids and usually labels, such as a collator that masks labels;
            None to take the sample's own "input_ids" and "labels", by default the same tokens.
        max_length: Tokens of a row; None for as many as the longest sample has.
        causal: Whether the label of a token is predicted from the token before it.

    Example:
        >>> batch = PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10]}])
        >>> batch["input_ids"], batch["position_ids"]
        (tensor([[ 5,  6,  7], [ 8,  9, 10]]), tensor([[0, 1, 2], [0, 0, 1]]))
    """

    def __init__(
        self, collate: Callable[[list], Any] | None = None, max_length: int | None = None, *, causal: bool = True
    ) -> None:
        allowed = "a whole number, 1 or more, or None"
        require(max_length is None or max_length >= 1, "max_length", max_length, allowed)
        self.collate, self.max_length, self.causal = collate, max_length, causal

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return input_ids, labels and position_ids, int64 [R, S], and which documents the rows have.

        Samples without tokens are left out. Labels of padding are -100, and of a causal model that of each document's
        first token, so that no token is predicted from another document.

        Args:
            samples: Mappings with input_ids.

        Raises:
            DataError: A sample is longer than `max_length`, or none has tokens.
        """
        documents = [self._document(sample) for sample in samples]
        lengths = [len(tokens) for tokens, _ in documents]
        places = [i for i, length in enumerate(lengths) if length]
        if not places:
            raise DataError(f"none of the {len(samples)} samples of a batch has tokens")
        longest = max(lengths)
        max_length = longest if self.max_length is None else self.max_length
        if longest > max_length:
            raise DataError(
                f"a sample of {longest} tokens does not fit a row of {max_length}: cut samples to max_length, or raise "
                "max_length"
            )
        rows = [[places[k] for k in row] for row in fit_rows([lengths[i] for i in places], max_length)]
        shape = len(rows), max(sum(lengths[i] for i in row) for row in rows)
        tokens_RS, position_RS = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        labels_RS = torch.full(shape, IGNORED)
        for r, row in enumerate(rows):
            start = 0
            for i in row:
                stop = start + lengths[i]
                tokens_RS[r, start:stop], labels_RS[r, start:stop] = documents[i]
                position_RS[r, start:stop] = torch.arange(lengths[i])
                if self.causal:
                    labels_RS[r, start] = IGNORED
                start = stop
        table = [[(i, lengths[i]) for i in row] for row in rows]
        return {"input_ids": tokens_RS, "labels": labels_RS, POSITIONS: position_RS, DOCUMENTS: table}

    def _document(self, sample: Any) -> tuple[Tensor, Tensor]:
        """Return tokens and labels of a sample, [n] each, without padding."""
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            got = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
            raise DataError(f"a sample to be packed needs input_ids; got {got}")
        if SEQ_LENGTHS in sample:
            raise DataError(
                f"samples with the column {SEQ_LENGTHS!r} are packed already: give TRL's collator with "
                "padding_free=True instead of packing"
            )
        if not len(sample["input_ids"]):
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        batch: Mapping[str, Any] = sample
        if self.collate is not None:
            batch = {key: x[0] for key, x in self.collate([sample]).items() if isinstance(x, Tensor)}
        tokens = torch.as_tensor(batch["input_ids"])
        labels = tokens if batch.get("labels") is None else torch.as_tensor(batch["labels"])
        mask = batch.get("attention_mask")
        if labels.shape != tokens.shape or tokens.dim() != 1:
            raise DataError(
                f"a sample to be packed has input_ids of shape {tuple(tokens.shape)} and labels of "
                f"{tuple(labels.shape)}; needed: a label for each token"
            )
        if mask is not None:
            real = torch.as_tensor(mask).bool()
            tokens, labels = tokens[real], labels[real]
        return tokens, labels


def take_documents(fields: dict[str, Any]) -> list[list[tuple[int, int]]] | None:
    """Bring the fields of a batch into one form, and return the table of documents of `PackingCollator`, if it has one.

    Fields that only repeat the positions are removed. "position_ids" stay only if a row has several documents, or the
    batch a table.

    Args:
        fields: Fields of a batch, with input_ids; modified.

    Raises:
        DataError: Positions that restart, or do not begin at 0, together with an attention_mask.
    """
    bounds = fields.pop("cu_seq_lens_q", None)
    for key in ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
        fields.pop(key, None)
    table: list[list[tuple[int, int]]] | None = fields.pop(DOCUMENTS, None)
    positions, tokens = fields.get(POSITIONS), fields.get("input_ids")
    if positions is None and bounds is not None and isinstance(tokens, Tensor):
        positions = fields[POSITIONS] = positions_of(torch.as_tensor(bounds), tokens.shape[-1])
    if not isinstance(positions, Tensor) or not isinstance(tokens, Tensor):
        return table
    if positions.shape != tokens.shape or positions.dim() != 2:
        raise DataError(
            f"{POSITIONS} has shape {tuple(positions.shape)}, expected {tuple(tokens.shape)}: a position for each token"
        )
    mask = fields.get("attention_mask")
    place_RS = torch.arange(tokens.shape[1], device=positions.device).expand_as(positions)
    places_only = positions == place_RS if mask is None else (positions == place_RS) | (mask == 0)
    if bool(places_only.all()) and table is None:
        del fields[POSITIONS]  # those that the model uses by itself
    elif mask is not None and not bool(mask.all()):
        raise DataError(
            f"a batch has an attention_mask with padding and {POSITIONS} that are not the places 0, 1, …; allowed: "
            f"{POSITIONS} that restart at each document, without padding"
        )
    else:
        fields.pop("attention_mask", None)
    return table


def document_ids(samples: Sequence[Any], ids: Sequence[int]) -> list[int]:
    """Return the ids of a flattened batch's documents. An empty sample has no document, a packed sample several.

    Document d of a sample with the column "seq_lengths", as TRL's `pack_dataset` makes it, has the id
    `id * 2**20 + d`.

    Args:
        samples: The batch's samples.
        ids: Their sample ids.
    """
    found: list[int] = []
    for sample, i in zip(samples, ids, strict=True):
        if isinstance(sample, Mapping) and SEQ_LENGTHS in sample:
            found += [(i << DOCUMENT_BITS) + d for d in range(len(sample[SEQ_LENGTHS]))]
        elif not isinstance(sample, Mapping) or "input_ids" not in sample or len(sample["input_ids"]):
            found.append(i)
    return found


def document_lengths(position_RS: Tensor, documents: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the documents' lengths in each row, by the positions, which restart at each document.

    Args:
        position_RS: Integers.
        documents: Number of documents, if known; then one row may end with padding, whose positions are all the same.

    Raises:
        DataError: The positions show another number of documents.
    """
    change_RS = torch.ones_like(position_RS, dtype=torch.bool)
    change_RS[:, 1:] = position_RS[:, 1:] - position_RS[:, :-1] != 1
    tokens = position_RS.shape[1]
    rows = []
    for change_S in change_RS.cpu():
        starts = [*change_S.nonzero()[:, 0].tolist(), tokens]
        rows.append([b - a for a, b in itertools.pairwise(starts)])
    found = sum(map(len, rows))
    if documents is not None and found > documents and len(rows) == 1 and set(rows[0][documents:]) == {1}:
        del rows[0][documents:]  # each token of padding restarts
        found = documents
    if documents is not None and found != documents:
        raise DataError(
            f"a packed batch has {found} documents by its {POSITIONS}, which restart at each, and {documents} ids: "
            "give an id for each document in 'sample_ids'"
        )
    return tuple(map(tuple, rows))


def positions_of(cu_seq_lens: Tensor, tokens: int) -> Tensor:
    """Return position_ids [1, S] of documents. cu_seq_lens: the start of each, then S."""
    starts = cu_seq_lens.to(torch.int64).cpu()
    place_S = torch.arange(tokens)
    return (place_S - starts[torch.searchsorted(starts, place_S, right=True) - 1])[None]
