"""Training data from files, folders and data sets: found, tokenized once a machine, cut, and counted."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipecomp.data import sources as src
from pipecomp.data.chat import ALL, ASSISTANT, COMPLETION, ExampleTokenizer, choose_loss, set_chat_template
from pipecomp.data.formats import (
    ALPACA,
    CHAT,
    PROMPT,
    TEXT,
    detect_format,
    example_of,
    parse_columns,
    rename,
    unused_columns,
)
from pipecomp.data.samples import BlockSamples, DocumentSamples, cut_spans, documents_of, hold_out
from pipecomp.data.sources import DataSource, SourceRecord, find_sources, find_split
from pipecomp.data.token_file import TokenCounts, TokenFile, TokenWriter, is_complete
from pipecomp.data.tokenization import TextTokenizer
from pipecomp.errors import ConfigError, DataError, require, writable
from pipecomp.utils.units import format_count

FILES, LINES = "files", "lines"
SPLIT, CUT = "split", "cut"
_FIRST_S, _NEXT_S = 5.0, 10.0  # until a line of progress

Samples = DocumentSamples | BlockSamples


@dataclass(frozen=True)
class DataOptions:
    """Options of training data.

    Attributes:
        columns: OLD=NEW renames a column; NAME is the column with the text.
        documents: documents in plain text: "files", a file is one; "lines", each line is one.
        loss: "all", "completion" or "assistant"; None for the format's default.
        chat_template: a Jinja file or template, instead of the tokenizer's.
        max_length: most tokens of a sample; None for no limit.
        overflow: treatment of longer documents: "split" makes several samples, "cut" drops the rest; None splits text
            and cuts prompts and chats.
        blocks: make samples of this many consecutive tokens, across documents.
        eval_split: share that is held out; None for none, or a data set's own split.
        seed: seed that selects the held-out samples.
        join_white_space: make one space of each run of white space in texts.
        keys: names of the options above for errors, such as {"columns": "--column"}.
    """

    columns: Sequence[str] = ()
    documents: str = FILES
    loss: str | None = None
    chat_template: str | None = None
    max_length: int | None = None
    overflow: str | None = None
    blocks: int | None = None
    eval_split: float | None = None
    seed: int = 0
    join_white_space: bool = False
    keys: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = (FILES, LINES)
        require(self.documents in kinds, self.key("documents"), self.documents, " or ".join(kinds))
        require(self.overflow in (None, SPLIT, CUT), self.key("overflow"), self.overflow, f"{SPLIT} or {CUT}")
        for name in ("max_length", "blocks"):
            value = getattr(self, name)
            require(value is None or value >= 2, self.key(name), value, "a whole number of at least 2")
        share = self.eval_split
        require(share is None or 0 < share < 1, self.key("eval_split"), share, "a share between 0 and 1, such as 0.05")
        if self.blocks is not None:
            hint = "Blocks have one length and cross documents"
            require(self.max_length is None, self.key("max_length"), self.max_length, "only without blocks", hint)
            require(self.overflow is None, self.key("overflow"), self.overflow, "only without blocks", hint)

    def key(self, name: str) -> str:
        """Return the name of an option for errors."""
        return self.keys.get(name, "--column" if name == "columns" else f"--{name.replace('_', '-')}")


@dataclass(frozen=True)
class DataCounts:
    """Counts of what became of the documents, without those held out.

    Attributes:
        samples: number of samples for training.
        tokens: number of tokens in these samples.
        cut: samples that lost their end, with `cut_tokens` tokens.
        split: documents that became several samples.
        dropped: samples without a token to learn after the cut, or with a single token.
        unused: tokens that do not fill the last block.
    """

    samples: int
    tokens: int
    cut: int = 0
    cut_tokens: int = 0
    split: int = 0
    dropped: int = 0
    unused: int = 0


@dataclass
class TrainingData:
    """Training and held-out samples, and what is known of them.

    Attributes:
        training: the samples; torch data sets with `lengths` and `digest()`.
        held_out: samples to evaluate on, or None.
        format: "text", "prompt and completion", "messages" or "instruction and output".
        loss: "all", "completion" or "assistant".
        tokens: counts of the file of tokens.
        counts: what became of its documents.
        notes: sentences about what is left out or unusual.
    """

    training: Samples
    held_out: Samples | None
    format: str
    loss: str
    tokens: TokenCounts
    counts: DataCounts
    notes: list[str]

    def digest(self) -> str:
        """Return a short hash of the training samples."""
        return self.training.digest()

    def facts(self) -> dict[str, str | None]:
        """Return hashes of the data, which all ranks compare before training."""
        return {
            "the training data or the tokenizer (a hash)": self.digest(),
            "the held-out data (a hash)": None if self.held_out is None else self.held_out.digest(),
        }

    def describe(self) -> list[str]:
        """Return sentences for the reader: samples, tokens, what is learned, and the notes."""
        learned = {ALL: "all tokens", COMPLETION: "the completions", ASSISTANT: "what the assistant says"}[self.loss]
        held = "" if self.held_out is None else f", {format_count(len(self.held_out), 'sample')} held out"
        line = (
            f"Data: {self.format}, {format_count(self.tokens.documents, 'document')}; "
            f"{format_count(self.counts.samples, 'sample')} of {self.counts.tokens:,} tokens{held}. "
            f"The model learns {learned}."
        )
        return [line, *self.notes]


def load_data(
    data: Any,
    tokenizer: Any,
    options: DataOptions | None = None,
    *,
    evaluate: Any = None,
    vocabulary: int | None = None,
    cache: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> TrainingData:
    """Load training data: tokenize them once a machine, and cut them to samples.

    The first process of a machine tokenizes and writes; others wait for it and read its files through a memory map.

    Args:
        data: paths and names, as `find_sources` takes them.
        tokenizer: a transformers tokenizer; gets the chat template of the options.
        options: see DataOptions.
        evaluate: held-out data, like `data`.
        vocabulary: size of the model's vocabulary, to check tokens.
        cache: folder of tokenized data; by default pipecomp in the cache of `datasets`.
        say: prints a line; None for standard error.

    Returns:
        The samples.

    Raises:
        ConfigError: an option or a path is wrong, or does not apply to the data.
        DataError: the data are wrong; the error names file and line.

    Example:
        >>> data = load_data("chat.jsonl", tokenizer, DataOptions(max_length=1024, eval_split=0.05))
        >>> data.training[0]["input_ids"].shape
        torch.Size([312])
    """
    options, say = options or DataOptions(), say or _print
    data_key, eval_key = options.keys.get("data", "--data"), options.keys.get("evaluate", "--eval")
    both = options.eval_split is None or evaluate is None
    require(both, options.key("eval_split"), options.eval_split, f"only without {eval_key}")
    found = find_sources(data, data_key)
    prepared = _Preparation.of(found, tokenizer, options)
    cache = cache_folder(cache)
    file = prepared.tokenize(found, tokenizer, cache, say)
    others = None
    if evaluate is not None:
        others = find_sources(evaluate, eval_key)
    elif options.eval_split is None and (split := find_split(data, ("validation", "test"), data_key)):
        others = [split]
    held_file = None
    if others is not None:
        prepared.check_same(others)
        held_file = prepared.tokenize(others, tokenizer, cache, say)
    for one in (file, held_file):
        if one is not None and vocabulary is not None and one.counts.largest >= vocabulary:
            raise DataError(
                f"the tokenizer makes token {one.counts.largest}, the model's vocabulary has {vocabulary}: they do "
                "not match"
            )
    return _samples(file, held_file, prepared, options)


def data_format(data: Any, options: DataOptions) -> str:
    """Return the format of data, "text", "prompt and completion", "messages" or "instruction and output".

    Raises:
        ConfigError: an option or a path is wrong.
        DataError: the data have no known format.
    """
    [first, *_] = find_sources(data, options.keys.get("data", "--data"))
    return _format(first, parse_columns(options.columns, options.key("columns")), options)[0]


def read_texts(data: Any, options: DataOptions) -> Iterator[str]:
    """Read the texts of data without tokenizing them, for example to train a tokenizer; see `load_data`."""
    renames = parse_columns(options.columns, options.key("columns"))
    for source in find_sources(data, options.keys.get("data", "--data")):
        if source.kind == src.TEXT:
            yield from source.text() if options.documents == FILES else source.lines()
            continue
        kind, _ = _format(source, renames, options)
        for record in _records([source], renames, options):
            example = example_of(record, kind, conversational=False)
            for value in example.values():
                yield value if isinstance(value, str) else " ".join(str(message["content"]) for message in value)


# -- tokens


@dataclass
class _Preparation:
    """Decisions about data that are taken before they are read."""

    options: DataOptions
    format: str
    conversational: bool
    loss: str
    renames: dict[str, str]
    unused: list[str]
    examples: ExampleTokenizer | None

    @classmethod
    def of(cls, found: Sequence[DataSource], tokenizer: Any, options: DataOptions) -> _Preparation:
        """Detect the format from the first row, and check the options against it."""
        renames = parse_columns(options.columns, options.key("columns"))
        kind, first = _format(found[0], renames, options)
        made = cls(options, kind, False, ALL, renames, [], None)
        if first is not None:
            made.unused = unused_columns(first.values, kind)
        made.check_same(found)
        plain = [source.name for source in found if source.kind == src.TEXT]
        hint = f"{found[0].name} is {found[0].kind}, whose rows are documents"
        require(options.documents == FILES or plain, options.key("documents"), options.documents, FILES, hint)
        template = options.chat_template or getattr(tokenizer, "chat_template", None)
        prompt = None if first is None else first.values.get("prompt")
        text_prompt = kind == PROMPT and isinstance(prompt, str) and not prompt.lstrip().startswith("[{")
        made.conversational = (
            kind == CHAT or (kind == PROMPT and not text_prompt) or (kind == ALPACA and bool(template))
        )
        if not made.conversational:
            hint = f"{found[0].name} has the format {kind}, which uses no chat template"
            key = options.key("chat_template")
            require(options.chat_template is None, key, options.chat_template, "only with conversations", hint)
        set_chat_template(tokenizer, options.chat_template, options.key("chat_template"))
        made.loss = choose_loss(options.loss, kind, conversational=made.conversational, key=options.key("loss"))
        if kind != TEXT:
            hint, allowed = f"{found[0].name} has the format {kind}", f"only with the format {TEXT}"
            require(not options.join_white_space, options.key("join_white_space"), True, allowed, hint)
            hint += ": blocks would cross samples, each with its own prompt"
            require(options.blocks is None, options.key("blocks"), options.blocks, allowed, hint)
            made.examples = ExampleTokenizer(tokenizer, made.loss, conversational=made.conversational)
        return made

    def check_same(self, found: Sequence[DataSource]) -> None:
        """Raise DataError unless all sources have this format."""
        for source in found:
            kind, _ = _format(source, self.renames, self.options)
            if kind != self.format:
                raise DataError(f"{source.name} has the format {kind}, other data {self.format}: train on one of them")

    def tokenize(
        self, found: Sequence[DataSource], tokenizer: Any, cache: Path, say: Callable[[str], None]
    ) -> TokenFile:
        """Return the file of tokens, after this process or another one of the machine has written it."""
        path = cache / f"{self._key(found, tokenizer)}.arrow"

        def write() -> None:
            self._write(path, found, tokenizer, say)

        once_per_machine(path, lambda: is_complete(path), write)
        return TokenFile(path)

    def _key(self, found: Sequence[DataSource], tokenizer: Any) -> str:
        options = self.options
        parts = [source.digest() for source in found]
        parts += [tokenizer_digest(tokenizer), self.format, self.loss, options.documents]
        parts += [str(sorted(self.renames.items())), str(options.join_white_space), str(self.conversational)]
        parts.append(str(self.examples and self.examples.template))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def _write(self, path: Path, found: Sequence[DataSource], tokenizer: Any, say: Callable[[str], None]) -> None:
        progress = _Progress(found, say)
        with TokenWriter(path, masked=self.loss != ALL) as writer:
            forced = left_out = 0
            if self.examples is not None:
                for record in progress.records(_records(found, self.renames, self.options)):
                    example = example_of(record, self.format, conversational=self.conversational)
                    ids, learned = self.examples(example, record.where)
                    writer.add([np.array(ids, np.int32)], None if learned is None else np.array(learned, bool))
                left_out = self.examples.left_out
            else:
                text = TextTokenizer(tokenizer)
                for source in found:
                    if source.kind == src.TEXT and self.options.documents == FILES:
                        pieces = self._clean(progress.pieces(source.text()))
                        first = next((piece for piece in pieces if piece), None)
                        if first is None:
                            writer.empty += 1
                        else:
                            writer.add(text.document(itertools.chain([first], pieces)))
                        continue
                    for tokens in text.documents(self._texts(source, writer, progress)):
                        writer.add(tokens)
                forced = text.forced
            names = ", ".join(source.name for source in found[:3]) + (", …" if len(found) > 3 else "")
            if writer.documents == 0:
                raise DataError(f"{names}: no text in it, only white space")
            counts = writer.finish(forced=forced, left_out=left_out)
        progress.finish(counts)

    def _clean(self, pieces: Iterable[str]) -> Iterator[str]:
        """Leave out a text that is white space only; join white space where that is asked for."""
        if self.options.join_white_space:
            yield " ".join("".join(pieces).split())
            return
        blank: list[str] = []
        pieces = iter(pieces)
        for piece in pieces:
            if piece.strip():
                yield from (*blank, piece)
                yield from pieces
                return
            blank.append(piece)

    def _texts(self, source: DataSource, writer: TokenWriter, progress: _Progress) -> Iterator[str]:
        if source.kind == src.TEXT:
            texts: Iterable[str] = source.lines()
        else:
            records = _records([source], self.renames, self.options)
            texts = (example_of(record, TEXT, conversational=False)["text"] for record in records)
        for text in progress.pieces(texts):
            made = " ".join(text.split()) if self.options.join_white_space else text
            if made.strip():
                yield made
            else:
                writer.empty += 1


def _format(source: DataSource, renames: dict[str, str], options: DataOptions) -> tuple[str, SourceRecord | None]:
    """Return a source's format and its first row."""
    if source.kind == src.TEXT:
        hint = f"{source.name} is plain text, which has no columns. Files with columns end in .jsonl, .csv or .parquet"
        require(not renames, options.key("columns"), list(options.columns), "only with data that have columns", hint)
        return TEXT, None
    records = source.records()
    first = next(records, None)
    if first is None:
        raise DataError(f"{source.name} has no rows")
    first = rename(first, renames, options.key("columns"))
    return detect_format(first.values, first.where), first


def _records(found: Sequence[DataSource], renames: dict[str, str], options: DataOptions) -> Iterator[SourceRecord]:
    for source in found:
        for record in source.records():
            yield rename(record, renames, options.key("columns"))


def once_per_machine(path: Path, is_complete: Callable[[], bool], write: Callable[[], Any]) -> None:
    """Write files in the cache of tokenized data, unless they are complete; this machine's other processes wait.

    A process that has waited for one that failed raises the same error.

    Args:
        path: path of the files, without a suffix or with one that is replaced by those of a lock and of an error.
        is_complete: Returns whether the files are written.
        write: Writes them.

    Raises:
        ConfigError: a setting is wrong, or the cache cannot be written.
        DataError: the data are wrong.
    """
    from filelock import FileLock, Timeout

    if is_complete():
        return
    failure = path.with_suffix(".error")
    waited = False
    with writable("HF_DATASETS_CACHE", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waited = True
            lock.acquire()
    try:  # `with lock` would acquire it once more, and an error's traceback would keep it for the other ranks
        if is_complete():
            return
        if waited:
            _raise_failure(failure)
        failure.unlink(missing_ok=True)
        try:
            with writable("HF_DATASETS_CACHE", path.parent):
                write()
        except (ConfigError, DataError) as error:
            _note_failure(failure, error)
            raise
    finally:
        lock.release()


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a hash of all that decides which tokens a text has: vocabulary, merges, special tokens, chat template."""
    parts = [type(tokenizer).__name__, str(sorted(map(str, tokenizer.special_tokens_map.items())))]
    parts.append(str(getattr(tokenizer, "chat_template", None)))
    if tokenizer.is_fast:
        core = json.loads(tokenizer.backend_tokenizer.to_str())
        parts.append(json.dumps({k: v for k, v in core.items() if k not in ("truncation", "padding")}))
    else:
        parts += [str(sorted(tokenizer.get_vocab().items())), str(sorted(map(str, tokenizer.init_kwargs.items())))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def cache_folder(cache: Path | None = None) -> Path:
    """Return the folder of tokenized data: the given one, or pipecomp's in the cache of `datasets`."""
    if cache is not None:
        return Path(cache)
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "pipecomp"


def _note_failure(path: Path, error: ConfigError | DataError) -> None:
    """Leave an error to the processes that wait for this one."""
    made: dict[str, Any] = {"message": str(error)}
    if isinstance(error, ConfigError):
        made = {"key": error.key, "got": str(error.got), "allowed": error.allowed, "hint": error.hint}
    try:
        path.write_text(json.dumps(made))
    except OSError:
        return  # they find the error themselves


def _raise_failure(path: Path) -> None:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    raise DataError(values["message"]) if "message" in values else ConfigError(**values)


class _Progress:
    """Prints how far the tokenization of large data is."""

    def __init__(self, found: Sequence[DataSource], say: Callable[[str], None]) -> None:
        self._say, self._begun = say, time.monotonic()
        self._next, self._spoken = self._begun + _FIRST_S, False
        self._total = sum(source.size for source in found)
        self._bytes = all(source.kind in (src.TEXT, src.JSON, src.CSV) for source in found)
        self._done = self._count = 0
        self._names = found[0].name if len(found) == 1 else f"{len(found)} sources"

    def pieces(self, texts: Iterable[str]) -> Iterator[str]:
        """Count texts by their characters."""
        for text in texts:
            yield text
            self._done += len(text)
            self._look()

    def records(self, records: Iterable[SourceRecord]) -> Iterator[SourceRecord]:
        """Count rows by their texts' characters."""
        for record in records:
            yield record
            self._done += sum(len(str(value)) for value in record.values.values())
            self._look()

    def finish(self, counts: TokenCounts) -> None:
        """Print the end, if a line was printed."""
        if self._spoken:
            seconds = time.monotonic() - self._begun
            self._say(f"Tokenized {self._names}: {counts.tokens:,} tokens in {seconds:.0f} s.")

    def _look(self) -> None:
        self._count += 1
        if time.monotonic() < self._next:
            return
        self._next, self._spoken = time.monotonic() + _NEXT_S, True
        share = min(99, 100 * self._done // max(1, self._total))
        done = f"{share} %" if self._bytes else f"{self._count:,} texts"
        self._say(f"Tokenizing {self._names}: {done}.")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- samples


def _samples(
    file: TokenFile, held_file: TokenFile | None, prepared: _Preparation, options: DataOptions
) -> TrainingData:
    spans = documents_of(file)
    notes: list[str] = []
    held_spans = None if held_file is None else documents_of(held_file)
    share = options.eval_split
    if share is not None and len(spans) * share >= 1:
        kept, held = hold_out(len(spans), share, options.seed)
        held_file, held_spans, spans = file, spans[held], spans[kept]
        notes.append(f"Held out: {len(held):,} of {len(held) + len(kept):,} documents, drawn with seed {options.seed}.")
        share = None
    if options.blocks is not None:
        whole = BlockSamples(file, spans, options.blocks)
        training: Samples = whole
        counts = DataCounts(len(whole), len(whole) * options.blocks, unused=whole.dropped)
        if share is not None:
            last = _tail(len(training), share, options)
            at = (len(training) - last) * options.blocks
            held_file, held_spans = file, _part(spans, at, len(training) * options.blocks)
            training = BlockSamples(file, _part(spans, 0, at), options.blocks)
            counts = DataCounts(len(training), at, unused=counts.unused)
        held_out: Samples | None = None
        if held_file is not None and held_spans is not None:
            held_out = BlockSamples(held_file, held_spans, options.blocks, "held-out text")
    else:
        made, counts = _cut(file, spans, prepared, options)
        if share is not None:
            last = _tail(len(made), share, options)
            held_file, held_made, made = file, made[-last:], made[:-last]
            counts = replace(counts, samples=len(made))
        elif held_spans is not None and held_file is not None:
            held_made, _ = _cut(held_file, held_spans, prepared, options)
        training = DocumentSamples(file, made)
        counts = replace(counts, tokens=int(training.lengths.sum()))
        held_out = None if held_file is None else DocumentSamples(held_file, held_made)
    if share is not None:
        few = "too few documents to hold out whole ones"
        notes.append(f"Held out: the last {last:,} of {len(training) + last:,} samples, as there are {few}.")
    notes += _notes(file.counts, counts, prepared, options)
    return TrainingData(training, held_out, prepared.format, prepared.loss, file.counts, counts, notes)


def _tail(samples: int, share: float, options: DataOptions) -> int:
    """Return how many samples at the end are held out."""
    if samples < 2:
        key = options.key("eval_split")
        raise ConfigError(
            key, share, "only with two samples or more", f"The data have {format_count(samples, 'sample')}"
        )
    return min(samples - 1, max(1, round(samples * share)))


def _part(spans: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return the part of joined spans between two positions of their tokens."""
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    begins = ends - (spans[:, 1] - spans[:, 0])
    made = np.stack([spans[:, 0] + np.maximum(start - begins, 0), spans[:, 1] - np.maximum(ends - end, 0)], 1)
    return made[made[:, 0] < made[:, 1]]


def _cut(
    file: TokenFile, spans: np.ndarray, prepared: _Preparation, options: DataOptions
) -> tuple[np.ndarray, DataCounts]:
    """Cut documents to the largest length, and drop samples without a token to learn."""
    lengths, most = spans[:, 1] - spans[:, 0], options.max_length
    overflow = options.overflow or (SPLIT if prepared.format == TEXT else CUT)
    long = lengths > most if most is not None else np.zeros(len(lengths), bool)
    cut = split = cut_tokens = 0
    if most is not None and overflow == SPLIT:
        split, spans = int(long.sum()), cut_spans(spans, most)
        check = np.ones(len(spans), bool)
    elif most is not None:
        cut, cut_tokens = int(long.sum()), int((lengths[long] - most).sum())
        spans = np.stack([spans[:, 0], np.minimum(spans[:, 1], spans[:, 0] + most)], 1)
        check = long
    else:
        check = np.zeros(len(spans), bool)
    # The first token of a sample is never predicted.
    learned = spans[:, 1] - spans[:, 0] - 1
    if prepared.loss != ALL:
        learned[check] = file.learned_between(spans[check, 0] + 1, spans[check, 1])
    kept = spans[learned > 0]
    if not len(kept):
        if cut:
            hint = "Of all samples the learned part begins after this many tokens"
            raise ConfigError(options.key("max_length"), most, "a larger number", hint)
        raise DataError("no document has two tokens, so there is nothing to predict")
    return kept, DataCounts(len(kept), 0, cut, cut_tokens, split, len(spans) - len(kept))


def _notes(tokens: TokenCounts, counts: DataCounts, prepared: _Preparation, options: DataOptions) -> list[str]:
    notes = []
    limit = f"{options.key('max_length')} {options.max_length}"
    if counts.cut:
        notes.append(
            f"{limit} cuts {format_count(counts.cut, 'sample')}: {counts.cut_tokens:,} tokens at their ends are not "
            "trained on."
        )
    if counts.split:
        notes.append(f"{limit} divides {format_count(counts.split, 'document')} into several samples.")
    if counts.dropped:
        notes.append(f"{format_count(counts.dropped, 'sample')} without a token to learn left out.")
    if counts.unused:
        notes.append(f"{format_count(counts.unused, 'token')} at the end do not fill a block, and are left out.")
    if tokens.empty:
        notes.append(f"{format_count(tokens.empty, 'document')} without text left out.")
    if tokens.forced:
        notes.append(
            f"Long texts are cut at {format_count(tokens.forced, 'place')} where the tokens of the whole text may "
            "differ: a megabyte without a place where words end."
        )
    if tokens.left_out:
        notes.append(
            f"In {format_count(tokens.left_out, 'sample')} the prompt alone ends in other tokens than before its "
            "completion; the completion begins where they part."
        )
    if prepared.unused:
        notes.append(f"Columns that are not used: {', '.join(prepared.unused)}.")
    if prepared.examples is not None:
        notes += prepared.examples.warnings
    return notes
