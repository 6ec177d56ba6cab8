"""Tokens of texts of any length, equal to those of the whole text, in bounded memory.

Note: long texts
    A tokenizer needs 150 to 250 bytes of memory for each byte of a text, so a long text is tokenized in windows that
    overlap. Two windows are joined at a place where the tokens of the whole text have a border too:

    1. In the middle of the overlap both windows have the same tokens at the same characters. So neither the end of the
       first window nor the beginning of the second one has an influence there.
    2. The place is one where the tokenizer's pre-tokenizer splits, between characters of different classes (space,
       letter, digit, other) and beside at most one space. A pre-tokenizer's pattern goes from left to right and looks
       ahead within a run of one class, and several such places lie on both sides within the overlap.
    3. Without a pre-tokenizer, as in Llama 2, it is a place between two characters that no token of the vocabulary has
       side by side: no merge can cross it.

    Windows without such a place are joined and tokenized again, up to `Windows.most` characters; text that has none
    even then (a megabyte of a single letter) is cut there, and counted in `TextTokenizer.forced`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipecomp.errors import require

_AT_ONCE = 8  # windows that are tokenized by one call, in parallel
_AROUND = 4  # further borders on each side of a cut
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece writes characters that it does not know as bytes
_BATCH = 1 << 18  # characters of short texts that are tokenized by one call


@dataclass(frozen=True)
class Windows:
    """Sizes in characters. size: of a window. overlap: of two windows. most: of windows joined for want of a border."""

    size: int = 1 << 16
    overlap: int = 1 << 11
    most: int = 1 << 20


@dataclass
class _Window:
    """Tokens of a piece of text. start: its position in the text. starts, ends: of tokens in the text."""

    text: str
    start: int
    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    words: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class TextTokenizer:
    """Tokenizes documents: the tokenizer's beginning token once, then the text, then the end-of-text token once.

    Attributes:
        forced: cuts at places where the whole text might have other tokens.
    """

    def __init__(self, tokenizer: Any, *, end: bool = True, windows: Windows | None = None) -> None:
        """Find the special tokens.

        Args:
            tokenizer: a tokenizer of transformers.
            end: append the end-of-text token.
            windows: sizes for long texts.

        Raises:
            ConfigError: the tokenizer has no end-of-text token.
        """
        self.forced = 0
        self._tokenizer, self._windows = tokenizer, windows or Windows()
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a")["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        self._begin: list[int] = whole[:at]
        self._end: list[int] = []
        if end:
            allowed = "a tokenizer with an end-of-text token (eos_token)"
            require(tokenizer.eos_token_id is not None, "--tokenizer", type(tokenizer).__name__, allowed)
            self._end = [tokenizer.eos_token_id]

    def documents(self, texts: Iterable[str]) -> Iterator[list[np.ndarray]]:
        """Tokenize texts, each of them a document.

        Yields:
            For each text its tokens, int32 [any], in one or more pieces.
        """
        batch: list[str] = []
        size = 0
        for text in texts:
            if len(text) > self._windows.size:
                yield from self._batch(batch)
                batch, size = [], 0
                yield list(self.document([text]))
                continue
            batch.append(text)
            size += len(text)
            if size > _BATCH:
                yield from self._batch(batch)
                batch, size = [], 0
        yield from self._batch(batch)

    def document(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """Tokenize one document that is read in pieces.

        Yields:
            Its tokens in order, int32 [any].
        """
        parts = (ids for ids in self._joined(pieces) if len(ids))
        first = list(itertools.islice(parts, 1))
        if self._begin and not (first and first[0][: len(self._begin)].tolist() == self._begin):
            yield np.array(self._begin, np.int32)
        last = None
        for ids in itertools.chain(first, parts):
            last = int(ids[-1])
            yield ids
        if self._end and last != self._end[-1]:
            yield np.array(self._end, np.int32)

    def _batch(self, texts: list[str]) -> Iterator[list[np.ndarray]]:
        if not texts:
            return
        for ids in self._tokenizer(texts, **_BARE)["input_ids"]:
            begin = [] if ids[: len(self._begin)] == self._begin else self._begin
            end = [] if ids[-1:] == self._end else self._end
            yield [np.array([*begin, *ids, *end], np.int32)]

    # -- windows

    def _joined(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of one text without special tokens."""
        if not self._tokenizer.is_fast:  # has no positions; works in Python, a word at a time
            yield np.array(self._tokenizer("".join(pieces), **_BARE)["input_ids"], np.int32)
            return
        windows = self._encoded(pieces)
        current = next(windows, None)
        if current is None:
            return
        done = 0  # tokens of the current window that are not used, or were yielded
        for following in windows:
            cut = self._cut(current, following)
            if cut is not None:
                yield current.ids[done : cut[0]]
                current, done = following, cut[1]
                continue
            rest = following.text[current.end - following.start :]
            if len(current.text) + len(rest) > self._windows.most:
                self.forced += 1
                yield current.ids[done:]
                [current], done = self._encode([(current.end, rest)]), 0
            else:
                border = current.starts[done] if done else None
                [current] = self._encode([(current.start, current.text + rest)])
                done = 0 if border is None else int(np.searchsorted(current.starts, border))
        yield current.ids[done:]

    def _encoded(self, pieces: Iterable[str]) -> Iterator[_Window]:
        spans: list[tuple[int, str]] = []
        for span in self._spans(pieces):
            spans.append(span)
            if len(spans) == _AT_ONCE:
                yield from self._encode(spans)
                spans = []
        yield from self._encode(spans)

    def _spans(self, pieces: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Cut a text into windows that overlap."""
        size, overlap = self._windows.size, self._windows.overlap
        start, text = 0, ""
        for piece in pieces:
            text += piece
            at = 0
            while len(text) - at > size + overlap:  # so that the last window has more than its overlap
                yield start + at, text[at : at + size]
                at += size - overlap
            start, text = start + at, text[at:]
        if text:
            yield start, text

    def _encode(self, spans: Sequence[tuple[int, str]]) -> list[_Window]:
        if not spans:
            return []
        encoded = self._tokenizer([text for _, text in spans], **_BARE).encodings
        windows = []
        for (start, text), encoding in zip(spans, encoded, strict=True):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + start
            words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
            windows.append(_Window(text, start, np.array(encoding.ids, np.int32), offsets[:, 0], offsets[:, 1], words))
        return windows

    def _cut(self, left: _Window, right: _Window) -> tuple[int, int] | None:
        """Find a border of the whole text's tokens in the overlap; see the note at the top.

        Returns:
            Tokens of the left window before it, tokens of the right window before it.
        """
        low, high = right.start, left.end
        margin = (high - low) // 8
        low, high = low + margin, high - margin
        i, j = (int(np.searchsorted(window.starts, low)) for window in (left, right))
        count = int(np.searchsorted(left.ends, high, "right")) - i
        if count < 2 * _AROUND + 2:
            return None
        inner = [(window.ids, window.starts, window.ends) for window in (left, right)]
        if not all(np.array_equal(a[i : i + count], b[j : j + count]) for a, b in zip(*inner, strict=True)):
            return None
        borders = [
            k
            for k in range(1, count)
            if left.ends[i + k - 1] <= left.starts[i + k] < left.ends[i + k]
            and left.starts[i + k - 1] < left.ends[i + k - 1]
            and self._splits(left, i + k, right, j + k)
        ]
        if len(borders) < 2 * _AROUND + 1:
            return None
        k = borders[len(borders) // 2]
        return i + k, j + k

    def _splits(self, left: _Window, i: int, right: _Window, j: int) -> bool:
        """Return whether the whole text has a border before token i of `left`, which is token j of `right`."""
        if left.words[i - 1] != left.words[i] and right.words[j - 1] != right.words[j]:
            text, at = left.text, int(left.ends[i - 1]) - left.start
            if not 2 <= at < len(text) - 2:
                return False
            before, after = text[at - 1], text[at]
            if before.isspace():
                return not text[at - 2].isspace() and not after.isspace()
            if after.isspace():
                return not text[at + 1].isspace()
            return _class(before) != _class(after)
        ending, beginning = self._pieces.get(left.ids[i - 1]), self._pieces.get(left.ids[i])
        return ending is not None and beginning is not None and ending[-1] + beginning[0] not in self._pairs

    @cached_property
    def _pieces(self) -> dict[int, str]:
        """Tokens of BPE and Unigram by number, without special tokens and bytes; none for other models."""
        if type(self._tokenizer.backend_tokenizer.model).__name__ not in ("BPE", "Unigram"):
            return {}
        special = set(self._tokenizer.all_special_ids)
        pieces = {number: token for token, number in self._tokenizer.get_vocab().items() if number not in special}
        return {number: token for number, token in pieces.items() if not _BYTE.fullmatch(token)}

    @cached_property
    def _pairs(self) -> set[str]:
        """Characters that a token has side by side."""
        return {a + b for token in self._pieces.values() for a, b in itertools.pairwise(token)}


_BARE = {
    "add_special_tokens": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
    "verbose": False,
}


def _class(character: str) -> str:
    return "letter" if character.isalpha() else "digit" if character.isnumeric() else "other"
