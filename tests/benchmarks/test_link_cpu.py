"""The benchmark of a link's CPU time runs with the links as they are."""

from __future__ import annotations

import pytest

from benchmarks import link_cpu

pytestmark = pytest.mark.ranks


def test_every_line_sends_and_is_counted(capsys):
    link_cpu.main(["--rounds", "1", "--steps", "1", "--tokens", "3", "--hidden", "16"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines if "ms a sample" in line] == list(link_cpu.LINES)
