"""Parsing and formatting of rates, times and counts; overhead of TCP on Ethernet.

Rates are in bits per second. Nominal rates include headers, as those of network equipment do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pipecomp.errors import ConfigError

RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MIN_RATE, MAX_RATE = 10**4, 10**10
MAX_DELAY_S = 10.0
_RATES = "a number and bit, kbit, mbit or gbit (per second, powers of 1000), 10kbit to 10gbit, as in 100mbit"

FRAME = 14 + 1500  # bytes of a full frame as counted by Linux: Ethernet header without checksum, and the MTU
FRAME_HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps
SEGMENT = FRAME - FRAME_HEADERS  # payload bytes of a full frame


def parse_rate(key: str, text: str) -> int:
    """Parse a rate such as "100mbit" to bits per second. Raises ConfigError for `key`."""
    rate = _quantity(text, RATE_UNITS)
    if rate is None or math.isinf(rate) or not MIN_RATE <= round(rate) <= MAX_RATE:
        raise ConfigError(key, text, _RATES)
    return round(rate)


def parse_time(key: str, text: str, most_s: float) -> float:
    """Parse a time such as "20ms" to seconds. Raises ConfigError for `key`."""
    seconds = _quantity(text, TIME_UNITS)
    if seconds is None or seconds > most_s:
        raise ConfigError(key, text, f"a number and us, ms or s, up to {most_s:g}s, as in 20ms")
    return seconds


def _quantity(text: object, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text) if isinstance(text, str) else None
    return None if match is None or match[2] not in units else float(match[1]) * units[match[2]]


def format_nominal_rate(rate: int | None) -> str:
    """Format a nominal rate; None is unlimited."""
    if rate is None:
        return "unlimited"
    unit = next(u for u in ("gbit", "mbit", "kbit", "bit") if rate >= RATE_UNITS[u])
    return f"{rate / RATE_UNITS[unit]:g} {unit[0].upper() if unit != 'kbit' else 'k'}bit/s"


def format_rate(rate: float) -> str:
    """Format a measured rate with three digits; `math.inf` is unlimited."""
    if math.isinf(rate):
        return "unlimited"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= size:
            return f"{_digits(rate / size)} {unit}"
    return f"{_digits(rate / 1e3)} kbit/s"


def format_time(seconds: float) -> str:
    """Format a time in milliseconds, or in seconds from one second on."""
    return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(1e3 * seconds)} ms"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_count(number: int, thing: str) -> str:
    """Format a count with its noun: 1 stage, 4 stages."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def wire_bytes(size: int) -> int:
    """Return the bytes on the wire for `size` bytes of a TCP connection, without acknowledgements."""
    return size + FRAME_HEADERS * -(-size // SEGMENT)


def format_size(count: float) -> str:
    """Format bytes: "12.3 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def format_duration(seconds: float) -> str:
    """Format seconds: "0.843 s", "42 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def format_share(share: float) -> str:
    """Format a share as a percentage: "41 %"."""
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.1g} %"


def format_ratio(ratio: float) -> str:
    """Format a ratio: "7.9×"."""
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"
