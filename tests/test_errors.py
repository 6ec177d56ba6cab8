"""Errors pass from process to process: worker pools and data loaders send them by pickle."""

import pickle

import pytest

from pipecomp import errors
from pipecomp.errors import ConfigError, PeerLostError, PipecompError


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
