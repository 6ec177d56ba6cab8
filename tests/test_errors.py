"""Errors pass from process to process: worker pools and data loaders send them by pickle."""

import pickle

import pytest

from pipecomp import errors
from pipecomp.errors import ConfigError, PeerLostError, PipecompError, foreign_text


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("store.bits", 3, "2, 4, 8, 16, 32"),
        ConfigError("store.clusters", 3, "a power of two", hint="A center is numbered in whole bits."),
        PeerLostError("rank 2 is gone", 2),
    ]
    + [
        kind("what went wrong")
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, PipecompError) and "__init__" not in vars(kind)
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_the_same_in_another_process(error: PipecompError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_what_another_process_sent_is_short_and_on_one_line() -> None:
    assert (
        foreign_text("disk full\n\x1b[2Jpipecomp: rank 0: fine\u202e")
        == "disk full; \\x1b[2Jpipecomp: rank 0: fine\\u202e"
    )
    assert foreign_text("é" * 3000, 10) == "é" * 9 + "…"
    assert foreign_text({"no": "text"}) == "{'no': 'text'}"
