"""Rates and times as text, read strictly and written for people, and what TCP adds to content on Ethernet.

Rates are bits per second; nominal ones count headers too, as network equipment does.
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

FRAME = 14 + 1500  # bytes of a full frame as Linux counts it: Ethernet's header without the checksum, and the MTU
FRAME_HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps
SEGMENT = FRAME - FRAME_HEADERS  # content bytes of a full frame


def parse_rate(key: str, text: str) -> int:
    """Read bits per second, as in "100mbit". ConfigError names `key`."""
    rate = _quantity(text, RATE_UNITS)
    if rate is None or math.isinf(rate) or not MIN_RATE <= round(rate) <= MAX_RATE:
        raise ConfigError(key, text, _RATES)
    return round(rate)


def parse_time(key: str, text: str, most_s: float) -> float:
    """Read seconds, as in "20ms". ConfigError names `key`."""
    seconds = _quantity(text, TIME_UNITS)
    if seconds is None or seconds > most_s:
        raise ConfigError(key, text, f"a number and us, ms or s, up to {most_s:g}s, as in 20ms")
    return seconds


def _quantity(text: object, units: Mapping[str, float]) -> float | None:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text) if isinstance(text, str) else None
    return None if found is None or found[2] not in units else float(found[1]) * units[found[2]]


def rate_text(rate: int | None) -> str:
    """Write a stated rate for people; None is unlimited."""
    if rate is None:
        return "unlimited"
    unit = next(u for u in ("gbit", "mbit", "kbit", "bit") if rate >= RATE_UNITS[u])
    return f"{rate / RATE_UNITS[unit]:g} {unit[0].upper() if unit != 'kbit' else 'k'}bit/s"


def bits_per_second(rate: float) -> str:
    """Write a measured rate for people, with three digits; `math.inf` is unlimited."""
    if math.isinf(rate):
        return "unlimited"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= size:
            return f"{_digits(rate / size)} {unit}"
    return f"{_digits(rate / 1e3)} kbit/s"


def milliseconds(seconds: float) -> str:
    """Write a time for people: in milliseconds, from one second on in seconds."""
    return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(1e3 * seconds)} ms"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def wire_bytes(size: int) -> int:
    """Count the bytes on the wire for `size` bytes of a TCP connection, acknowledgements left out."""
    return size + FRAME_HEADERS * -(-size // SEGMENT)
