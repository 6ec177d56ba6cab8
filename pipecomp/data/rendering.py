"""A sample as text, with the tokens that are learned set apart: for the terminal, as plain text, as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.text import Text

from pipecomp.data.samples import IGNORED

_MOST = 2000  # tokens that are shown
_STYLE = "green"
_MORE = " …"


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
