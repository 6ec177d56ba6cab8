"""Recorded runs, bit for bit; work.py states when golden.json may be recorded anew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden.json").read_text())
RUNS = [name for name in GOLDEN if name not in ("environment", "probe")]

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def now(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("golden") / "now.json"
    subprocess.run([sys.executable, str(HERE / "work.py"), "run", str(out)], check=True, timeout=HANG_S)
    return json.loads(out.read_text())


def excuse_other_bits(now: dict) -> None:
    """Skip where plain torch computes other last bits, if another version or processor explains that; else fail."""
    if now["probe"] != GOLDEN["probe"]:
        before, here = GOLDEN["environment"], now["environment"]
        others = [f"{name} is {here[name]}, was {value}" for name, value in before.items() if here[name] != value]
        assert others, f"plain torch computes other last bits than with the same of all of {before}"
        pytest.skip(f"plain torch computes other last bits than where golden.json was recorded: {'; '.join(others)}")


def differing(golden: object, now: object, where: str = "") -> list[str]:
    """The places where two nested containers differ."""
    if not isinstance(golden, dict) or not isinstance(now, dict):
        return [] if golden == now else [f"{where}: {golden} before, {now} now"]
    keys = [*golden, *(key for key in now if key not in golden)]
    return [found for key in keys for found in differing(golden.get(key), now.get(key), f"{where}/{key}")]


@pytest.mark.parametrize("run", RUNS)
def test_every_bit_is_as_recorded(now, run):
    excuse_other_bits(now)
    assert not differing(GOLDEN[run], now[run])


def test_other_bits_are_excused_by_another_environment_alone():
    now = {"probe": "of other bits", "environment": dict(GOLDEN["environment"])}
    with pytest.raises(AssertionError, match="with the same of all of"):
        excuse_other_bits(now)
    now["environment"] |= {"torch": "9.9.9", "processor": "another"}
    with pytest.raises(pytest.skip.Exception, match=r"recorded: torch is 9\.9\.9, was .*; processor is another, was "):
        excuse_other_bits(now)
