"""How many ranks share a machine, by what launchers say."""

from __future__ import annotations

import pytest

from pipecomp.cluster.rendezvous import ranks_here


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "3"}, 3),
        ({"LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, 2),  # the second by accelerate, for use_cpu
    ],
)
def test_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch, said: dict[str, str], found: int | None) -> None:
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert ranks_here() == found
