"""Rates and times as text, and bytes on the wire."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecomp.errors import ConfigError
from pipecomp.utils.units import format_nominal_rate, format_rate, format_time, parse_rate, parse_time, wire_bytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10kbit", 10_000),
        ("100mbit", 100_000_000),
        ("1.5mbit", 1_500_000),
        ("10gbit", 10**10),
        ("20000bit", 20_000),
    ],
)
def test_rates(text, rate):
    assert parse_rate("bandwidth", text) == rate


@pytest.mark.parametrize(
    "text",
    [
        "100",
        "mbit",
        "100mbps",
        "100 mbit",
        "100Mbit",
        "-1mbit",
        "9kbit",
        "11gbit",
        "1e3mbit",
        "0mbit",
        "",
        "9" * 400 + "bit",
        100,
    ],
)
def test_other_rates_are_refused(text):
    with pytest.raises(ConfigError, match=r"^bandwidth: got .*100mbit") as error:
        parse_rate("bandwidth", text)
    assert error.value.got == text


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("0ms", 0), ("500us", 0.0005), ("1.5s", 1.5)])
def test_times(text, seconds):
    assert parse_time("delay", text, 10) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["20", "ms", "20 ms", "-1ms", "11s", "20sec", "nan", "1m", 3])
def test_other_times_are_refused(text):
    with pytest.raises(ConfigError, match=r"^delay: got .*up to 10s, as in 20ms"):
        parse_time("delay", text, 10)


@pytest.mark.parametrize(
    ("rate", "text"), [(64_000, "64 kbit/s"), (1_500_000, "1.5 Mbit/s"), (10**10, "10 Gbit/s"), (None, "unlimited")]
)
def test_stated_rates_for_people(rate, text):
    assert format_nominal_rate(rate) == text


@given(st.floats(1, 1e12))
def test_measured_rates_for_people(rate):
    number, unit = format_rate(rate).split()
    size = {"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}[unit]
    assert float(number) * size == pytest.approx(rate, rel=0.006)
    assert "e" not in number or rate < 1


def test_no_limit_and_times_for_people():
    assert format_rate(math.inf) == "unlimited"
    assert [format_time(s) for s in (0.0005, 0.1234, 1.5)] == ["0.5 ms", "123 ms", "1.5 s"]


@given(st.integers(0, 10**7))
def test_bytes_on_the_wire(size):
    full, rest = divmod(size, 1448)
    assert wire_bytes(size) == full * 1514 + (66 + rest if rest else 0)
