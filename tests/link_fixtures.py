"""Two ends of a link over the loopback transport, layouts, and one step of training."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pipecomp.buffers import MemoryStore
from pipecomp.codecs import wire
from pipecomp.codecs.codecs import Quantized, encoded
from pipecomp.config import Config
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.transport import finish_packet, loopback_pair
from tests.limits import HANG_S

S = 8
Ends = tuple[LinkSender, LinkReceiver]


def link(
    activations: dict[str, Any],
    stores: Sequence[Any] | None = None,
    *,
    store: dict[str, Any] | None = None,
    seed: int = 0,
    index: int = 0,
    timeout_s: float = 5.0,
    **ends: Any,
) -> Ends:
    """Connect a sender and a receiver.

    stores: theirs; memory for "aqsgd" where left out. store: its section; ends: other arguments of both ends.
    """
    config = Config.from_dict({"activations": activations, "seed": seed, **({"store": store} if store else {})})
    a, b = loopback_pair(timeout_s=timeout_s)
    if stores is None:
        options = {"bits": config.store.bits, "group_size": config.activations.group_size}
        aqsgd = config.activations.method == "aqsgd"
        stores = [MemoryStore(f"link-{index}", **options) if aqsgd else None for _ in "ab"]
    return LinkSender(index, config, a, stores[0], **ends), LinkReceiver(index, config, b, stores[1], **ends)


def layout(ids: Sequence[int] = (1, 2, 3), counts: Sequence[int] | None = None) -> Layout:
    """Lay out samples padded to S tokens, whole where counts are left out."""
    return Layout(tuple(ids), (0,) * len(ids), tuple(counts or (S,) * len(ids)), S)


def send_activation(up: Any, down: Any, x_BSH: Tensor, where: Layout, step: int, micro_batch: int = 0) -> Tensor:
    """Send an activation over the link; returns what arrives."""
    at = Position(step, micro_batch)
    up.send_activation(x_BSH, where, at)
    y_BSH, seen = down.recv_activation(at)
    assert seen == where
    return y_BSH


def train_step(
    ends: Ends, x_BSH: Tensor, g_BSH: Tensor, where: Layout, step: int, unit: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Send an activation and its gradient; returns what arrives."""
    up, down = ends
    y_BSH = send_activation(up, down, x_BSH, where, step)
    down.send_gradient(g_BSH, where, Position(step, 0), unit=unit)
    return y_BSH, up.recv_gradient(where, Position(step, 0), unit=unit)


def cached(end: Any, kind: int = 0) -> dict[int, Any]:
    """Return every entry of an end's store. kind: GRADIENT for those of gradients alone, by their sample."""
    ids = [h.sample for h in end.store.inventory() if h.sample & kind == kind]
    return {i & ~kind: entry for i, entry in zip(ids, end.store.get(ids), strict=True)}


def stored(end: Any, kind: int = 0) -> dict[int, tuple[int, list[float]]]:
    """Return the version and values of every entry, as `cached`."""
    return {i: (version, m_nH.flatten().tolist()) for i, (version, m_nH) in cached(end, kind).items()}


def change_packets(end: Any, change: Callable[[wire.PacketHeader, Any], Any]) -> None:
    """Send what `change` makes of the header and payload of every packet from here on."""
    send = end.transport.send

    def send_changed(packet: Any) -> None:
        header, payload = wire.decode(finish_packet(packet))
        send(wire.encode(*change(header, payload.copy())))

    end.transport.send = send_changed


def change_headers(end: Any, **values: Any) -> None:
    """Send packets with other values in their headers from here on."""
    change_packets(end, lambda header, payload: (dataclasses.replace(header, **values), payload))


def at_both(up: Any, down: Any, call: Callable[[Any], Any]) -> list[Any]:
    """Call it with both ends at once; returns its results or errors."""
    found: list[Any] = [None, None]

    def run(place: int, end: Any) -> None:
        try:
            found[place] = call(end)
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((up, down))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    return found


def quantized(bits: int, x_nH: Tensor) -> Tensor:
    """Quantize and dequantize."""
    codec = Quantized(bits)
    return codec.decode(encoded(codec, x_nH.contiguous()), *x_nH.shape)
