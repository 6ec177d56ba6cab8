"""Flip every bit of recorded messages and stored values, one at a time, and count the flips that go unnoticed.

    python -m tests.soak.bit_flips [--hidden N] [--json FILE] [--markdown FILE]

Recorded are one message of each kind and form that a link sends (first visits, changes, plain, cast and quantized
activations, gradients, evaluation, inventories) and one stored value for each width and grouping. A flip counts as
detected if the decoder raises the project's own error; if it raises anything else, the script stops with that.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pipecomp.buffers.value import ValueFormat, unpack
from pipecomp.codecs import wire
from pipecomp.errors import PipecompError
from pipecomp.stages.link.endpoint import Position
from pipecomp.stages.link.handshake import reconcile_stores
from pipecomp.stages.link.layout import Layout
from tests.link_fixtures import at_both, link

SECTIONS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "fp16": {"method": "fp16"},
    "bf16": {"method": "bf16"},
    "direct 3": {"method": "direct", "forward_bits": 3, "backward_bits": 6},
    "aqsgd 2": {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4},
    "aqsgd 4, groups": {"method": "aqsgd", "forward_bits": 4, "group_size": 5, "rounding": "stochastic"},
    "aqsgd 8, top k": {"method": "aqsgd", "forward_bits": 8, "first_visit": 8, "backward_top_k": 0.2, "eval": "direct"},
    "aqsgd 3, changes back": {"method": "aqsgd", "forward_bits": 3, "backward_method": "delta", "backward_bits": 4},
    "aqsgd, channels": {"method": "aqsgd", "forward_bits": 4, "backward_method": "delta", "scale": "channels"},
    "aqsgd, cached channels": {"method": "aqsgd", "forward_bits": 4, "scale": {"forward": "cached_channels"}},
    "aqsgd, constant error": {
        "method": "aqsgd",
        "backward_method": "delta",
        **{key: {"error": 0.1} for key in ("forward_bits", "backward_bits", "first_visit", "backward_first_visit")},
    },
}
CHANNELS = {"scale": "channels"}
CLUSTERS = {"method": "aqsgd", "forward_bits": 4}  # with `store.clusters`
WIDTHS = ((2, None), (4, None), (8, 5), (16, None), (32, None))


class Flips(NamedTuple):
    """One recorded thing: its length in bytes, the bits flipped one at a time, the positions that went unnoticed."""

    name: str
    size: int
    flipped: int
    missed: tuple[int, ...]


def recorded_messages(hidden: int) -> dict[str, np.ndarray]:
    """One message of each kind and form, uint8 [length] by name, of two samples with 3 and 5 tokens of `hidden`."""
    found: dict[str, np.ndarray] = {}
    for name, section in SECTIONS.items():
        for what, message in _exchange(section, hidden):
            found[f"{name}: {what}"] = message
    for name, section in {"16 clusters": CLUSTERS, "16 clusters, channels": CLUSTERS | CHANNELS}.items():
        for what, message in _exchange(section, hidden, {"clusters": 16})[:3]:
            found[f"{name}: {what.replace('visit', 'packet')}"] = message
    return found


def recorded_values(hidden: int) -> dict[str, bytearray]:
    """One stored value for each width and grouping, of 3 tokens of `hidden`, and one of no token."""
    m_nH = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0))
    found = {
        f"value: {bits} bits" + (f", groups of {group}" if group else ""): ValueFormat(bits, group).pack(
            2**40, 7, m_nH, "recorded"
        )
        for bits, group in WIDTHS
    }
    return {**found, "value: no token": ValueFormat(8).pack(3, 1, m_nH[:0], "recorded")}


def flip_message(name: str, message: np.ndarray) -> Flips:
    """All single flips of one message, decoded as a link does."""
    return _flip(name, message, wire.decode)


def flip_value(name: str, value: bytearray) -> Flips:
    """All single flips of one stored value, decoded as a store does that reads it from its file."""
    damaged = np.frombuffer(bytes(value), dtype=np.uint8).copy()
    return _flip(name, damaged, lambda data: unpack(data.data, name))


def _flip(name: str, data: np.ndarray, decode: Callable[[np.ndarray], object]) -> Flips:
    decode(data)  # whole, it must be accepted
    missed = []
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << (bit % 8)
        try:
            decode(data)
        except PipecompError:
            pass
        else:
            missed.append(bit)
        data[bit // 8] ^= 1 << (bit % 8)
    return Flips(name, data.size, 8 * data.size, tuple(missed))


def _exchange(
    section: dict[str, Any], hidden: int, store: dict[str, Any] | None = None
) -> list[tuple[str, np.ndarray]]:
    """Every message of two training steps and one evaluation over a link, with what it is. store: its section."""
    sent: list[np.ndarray] = []

    up, down = link(section, store=store)
    for end in (up, down):

        def record(message: np.ndarray, send: Callable[[np.ndarray], None] = end.transport.send) -> None:
            sent.append(message.copy())
            send(message)

        end.transport.send = record  # type: ignore[method-assign]
    layout = Layout((3, 2**40), (2, 0), (3, 5), 5)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        at = Position(step, 0)
        up.send_activation(torch.randn(2, 5, hidden, generator=generator), layout, at)
        down.recv_activation(at)
        down.send_gradient(torch.randn(2, 5, hidden, generator=generator), layout, at)
        up.recv_gradient(layout, at)
    up.send_activation(torch.randn(2, 5, hidden, generator=generator), layout, Position(2, 0), training=False)
    down.recv_activation(Position(2, 0), training=False)
    names = ["first visit", "gradient", "later visit", "gradient again", "evaluation"]
    if up.store is not None and not store:
        up.store.accepts_new = lambda: False  # type: ignore[method-assign]
        layout, at = replace(layout, ids=(4, 5)), Position(3, 0)
        up.send_activation(torch.randn(2, 5, hidden, generator=generator), layout, at)
        down.send_gradient(down.recv_activation(at)[0], layout, at)
        up.recv_gradient(layout, at)
        up.store.drop([3])
        at_both(up, down, lambda end: reconcile_stores(end, {}))
        names += ["not kept", "gradient of what is not kept", *(f"inventory {i}" for i in range(6))]
    assert len(sent) == len(names), "every message has a name"
    return list(zip(names, sent, strict=True))


def markdown(rows: list[Flips], command: str) -> str:
    """The table, and what it says."""
    flipped, missed = sum(row.flipped for row in rows), sum(len(row.missed) for row in rows)
    lines = [
        "# Flipped bits",
        "",
        f"`{command}`, Python {platform.python_version()}, torch {torch.__version__}.",
        "",
        f"Every bit of {len(rows)} recorded messages and stored values was flipped, one at a time: {flipped:,} flips, "
        f"{missed:,} not detected ({100 * (flipped - missed) / flipped:.4g} % detected). Messages carry a checksum, "
        "which is the default; with `transport.checksum: false` their payload's bits are not checked.",
        "",
        "| recorded | bytes | flips | not detected |",
        "|---|---|---|---|",
    ]
    lines += [f"| {row.name} | {row.size} | {row.flipped} | {len(row.missed)} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run from the command line; status 1 if a flip went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    rows = [flip_message(*item) for item in recorded_messages(options.hidden).items()]
    rows += [flip_value(*item) for item in recorded_values(options.hidden).items()]
    command = f"python -m tests.soak.bit_flips --hidden {options.hidden}"
    text = markdown(rows, command)
    print(text)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text)
    raise SystemExit(any(row.missed for row in rows))


if __name__ == "__main__":
    main()
