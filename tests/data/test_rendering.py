"""A sample as text, with what is learned set apart."""

import io

from rich.console import Console

from pipecomp.data import Segment, decode_sample, sample_html, sample_plain, sample_terminal
from tests.data import tokenizers_for_tests as made

TEXT = "größe <b> the [red]cat[/red] 日本語 sat"


def sample(tokenizer, learned: int) -> dict:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return {"input_ids": ids, "labels": [-100] * (len(ids) - learned) + ids[len(ids) - learned :]}


def test_segments_together_are_the_text():
    for own in (made.gpt2("the cat " * 9), made.sentencepiece("the cat " * 9)):
        for learned in (0, 3, 8):
            segments = decode_sample(own, sample(own, learned))
            assert "".join(segment.text for segment in segments) == TEXT
            assert any(segment.learned for segment in segments) == (learned > 0)
            assert len(segments) == 1 + (learned > 0)


def test_a_long_sample_is_shortened():
    own = made.gpt2(TEXT)
    assert [segment.text for segment in decode_sample(own, sample(own, 1), 2)][-1] == " …"


def test_what_is_learned_is_set_apart_and_markup_is_text():
    segments = [Segment("<b>[red]a ", False), Segment("b&\n", True), Segment("c", False)]
    assert sample_plain(segments) == "<b>[red]a ⟦b&\n⟧c"
    assert sample_plain([Segment("a", True)]) == "a"
    assert sample_html(segments) == '<pre class="sample">&lt;b&gt;[red]a <mark>b&amp;\n</mark>c</pre>'
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="standard").print(sample_terminal(segments))
    assert "\x1b[32mb&" in file.getvalue()
    assert "[red]a" in file.getvalue()
