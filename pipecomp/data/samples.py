"""Samples for training: documents of a token file, cut to a length, or blocks of consecutive tokens; samples as text.

S tokens of a sample.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

from pipecomp.data.packing import IGNORED
from pipecomp.data.token_file import TokenFile
from pipecomp.errors import DataError

_MOST = 2000  # tokens that are shown
_STYLE = "green"
_MORE = " …"


class DocumentSamples(torch.utils.data.Dataset):
    """Documents, or consecutive parts of long ones, as input_ids and labels int64 [S] of different lengths S.

    A label is IGNORED where the loss does not count the token. Sample i is always the same.
    """

    def __init__(self, file: TokenFile, spans: np.ndarray) -> None:
        """Choose the samples. spans: int64 [N, 2], positions in the file at which samples begin and end."""
        self._file, self._spans = file, spans

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, end = self._spans[index].tolist()
        return _sample(*self._file.read(start, end))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [N]."""
        return self._spans[:, 1] - self._spans[:, 0]

    def digest(self) -> str:
        """Return a short hash of all samples."""
        return _hashed(self._file.counts.digest, self._spans)


class BlockSamples(torch.utils.data.Dataset):
    """Blocks of S consecutive tokens of the documents one after the other, as input_ids and labels int64 [S].

    Sample i is always the i-th block; tokens that do not fill the last one are dropped.
    """

    def __init__(self, file: TokenFile, spans: np.ndarray, size: int, what: str = "text") -> None:
        """Cut tokens into blocks.

        Args:
            file: the tokens.
            spans: int64 [D, 2], positions in the file of what is joined.
            size: tokens of a block.
            what: name of the text, for the error.

        Raises:
            DataError: no block is full.
        """
        self._file, self._spans, self._size = file, spans, size
        self._starts = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
        self.dropped = int(self._starts[-1]) % size
        if self._starts[-1] < size:
            raise DataError(f"the {what} has {self._starts[-1]} tokens, too few for one block of {size}")

    def __len__(self) -> int:
        return int(self._starts[-1]) // self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start = index % len(self) * self._size
        end = start + self._size
        parts = []
        at = int(np.searchsorted(self._starts, start, "right")) - 1
        while start < end:
            begin, stop = self._spans[at].tolist()
            offset = start - int(self._starts[at])
            count = min(end - start, stop - begin - offset)
            parts.append(self._file.read(begin + offset, begin + offset + count)[0])
            start, at = start + count, at + 1
        return _sample(np.concatenate(parts), None)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [N]."""
        return np.full(len(self), self._size)

    def digest(self) -> str:
        """Return a short hash of all samples."""
        return _hashed(self._file.counts.digest, self._spans, self._size)


def cut_spans(spans: np.ndarray, most: int) -> np.ndarray:
    """Cut spans, int64 [N, 2], into consecutive ones of at most so many tokens."""
    counts = -(-(spans[:, 1] - spans[:, 0]) // most)
    first = np.repeat(np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    starts = np.repeat(spans[:, 0], counts) + (np.arange(len(first)) - first) * most
    return np.stack([starts, np.minimum(starts + most, np.repeat(spans[:, 1], counts))], 1)


def hold_out(count: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide numbers 0 to count - 1 at random, the same way for the same seed.

    Returns:
        Those for training and those held out, each in order.
    """
    order = np.random.default_rng(seed).permutation(count)
    held = max(1, round(count * share))
    return np.sort(order[held:]), np.sort(order[:held])


def _sample(ids: np.ndarray, learned: np.ndarray | None) -> dict[str, Tensor]:
    input_ids = torch.from_numpy(ids.astype(np.int64))
    labels = input_ids if learned is None else torch.where(torch.from_numpy(learned), input_ids, IGNORED)
    return {"input_ids": input_ids, "labels": labels}


def _hashed(*values: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else f"{value},".encode())
    return digest.hexdigest()[:16]


def documents_of(file: TokenFile, numbers: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
    """Return the spans of documents, int64 [D, 2]; all without numbers."""
    bounds = file.documents
    spans = np.stack([bounds[:-1], bounds[1:]], 1)
    return spans if numbers is None else spans[np.asarray(numbers)]


# -- samples as text: the tokens that are learned are set apart


class Segment(NamedTuple):
    """Decoded tokens in a row that are all learned, or all not learned."""

    text: str
    learned: bool


def decode_sample(tokenizer: Any, sample: Mapping[str, Any], most: int = _MOST) -> list[Segment]:
    """Decode a sample into segments.

    Args:
        tokenizer: a tokenizer of transformers.
        sample: input_ids and labels, int64 [S].
        most: tokens that are decoded; what follows is left out, and "…" marks it.

    Returns:
        Segments whose texts together are the decoded sample.

    Example:
        >>> decode_sample(tokenizer, data.training[0])
        [Segment(text='<|user|>Hello<|assistant|>', learned=False), Segment(text='Hi!<|end|>', learned=True)]
    """
    ids = [int(number) for number in sample["input_ids"]]
    learned = [int(label) != IGNORED for label in sample["labels"]]
    cut, ids = len(ids) > most, ids[:most]
    segments, text, at = [], "", 0
    while at < len(ids):
        end = next((i for i in range(at, len(ids)) if learned[i] != learned[at]), len(ids))
        # Decoding from the beginning keeps spaces and characters of several tokens.
        longer = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if end < len(ids):
            longer = longer.rstrip("\ufffd")  # a character that the next token completes
        segments.append(Segment(longer[len(text) :], learned[at]))
        text, at = longer, end
    return [*segments, Segment(_MORE, False)] if cut else segments


def sample_terminal(segments: list[Segment]) -> Text:
    """Return a sample for a rich console: learned text in green, other text dim."""
    return Text.assemble(*((segment.text, _STYLE if segment.learned else "dim") for segment in segments))


def sample_plain(segments: list[Segment]) -> str:
    """Return a sample as plain text: what is learned stands in ⟦ ⟧, unless all of it is."""
    if all(segment.learned for segment in segments if segment.text != _MORE):
        return "".join(segment.text for segment in segments)
    return "".join(f"⟦{segment.text}⟧" if segment.learned else segment.text for segment in segments)


def sample_html(segments: list[Segment]) -> str:
    """Return a sample as an HTML <pre> element: what is learned stands in <mark>."""
    parts = [html.escape(segment.text) for segment in segments]
    marked = (
        f"<mark>{part}</mark>" if segment.learned else part for part, segment in zip(parts, segments, strict=True)
    )
    return f'<pre class="sample">{"".join(marked)}</pre>'
