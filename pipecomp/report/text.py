"""Numbers as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes: "12.3 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def duration(seconds: float) -> str:
    """Seconds: "0.843 s", "42 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def percent(share: float) -> str:
    """A share: "41 %"."""
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.1g} %"


def times(ratio: float) -> str:
    """How many times: "7.9×"."""
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"
