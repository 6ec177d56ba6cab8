"""One link: codec, message store and transport joined, and what its two ends share.

The upstream end (stage k, sender.py) sends activations and receives their gradients, the downstream end (stage k + 1,
receiver.py) the other way round. With "aqsgd" both hold, for every sample they have seen, the same cached activation m
(arXiv:2206.01299, Algorithm 1):

    first visit   m ← a                     sent uncompressed, or quantized if `first_visit` says so
    later         m ← m + deq(Q(a − m))     sent as Q(a − m)

The sender's store decides which it is. Every packet says what it is, which version of m it builds on and which it
makes, so a delta can never be applied to another base. Nothing is changed at either end before a packet is checked.
An end whose disk refuses writes does not keep new samples, and says so in its next packet about them: the other end
then does not keep them either.

Shapes: B samples, S tokens with padding, H hidden size, T real tokens of a micro-batch, n of one sample.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipecomp.buffers.base import MessageStore
from pipecomp.config import Config
from pipecomp.errors import ConfigError, LinkError, WireError
from pipecomp.kernels import ops
from pipecomp.messages.codecs import Codec, wire_dtype
from pipecomp.messages.link_codecs import LinkCodecs
from pipecomp.messages.wire import Form, Header, Kind, Sample, decode, encode
from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.link.bounds import Bounds
from pipecomp.stages.link.transport import Transport
from pipecomp.stages.link.window import CropCanvas
from pipecomp.stats import LinkStats

FORWARD, BACKWARD = 0, 1  # which direction a random draw is for
MAX_TENSOR_BYTES = 1 << 34  # of a decoded packet, padding included


@dataclass(frozen=True, slots=True)
class Position:
    """Where in training a packet belongs: optimizer step and micro-batch within it."""

    step: int
    micro_batch: int


class Endpoint:
    """What both ends share.

    index: the link's number, counted from the first stage. replica: which pipeline. canvas: where the cached
    activations of images that crops move lie; None where they are just what was sent.
    """

    def __init__(
        self,
        index: int,
        config: Config,
        transport: Transport,
        store: MessageStore | None,
        *,
        replica: int = 0,
        device: torch.device | None = None,
        pass_nonfinite: bool = False,
        canvas: CropCanvas | None = None,
    ) -> None:
        a = config.activations
        if (a.method == "aqsgd") != (store is not None):
            raise ConfigError("activations.method", a.method, "'aqsgd' with a message store, the others without one")
        self.index, self.transport, self.store = index, transport, store
        self.device = device or torch.device("cpu")
        self.canvas = canvas
        self.stats = LinkStats()
        self.bounds: Bounds | None = None
        self.changed: set[int] = set()  # samples put since the last drift check
        self.drifted = False  # whether that found a difference
        # Samples whose fate a micro-batch's gradient packet tells: at the sender the first visits that the other end
        # may not keep, at the receiver those that it has not kept.
        self._unsettled: dict[Position, set[int]] = {}
        self._goes_on = store is not None and config.store.on_write_error == "continue"
        self._config, self._replica = config, replica
        self._pass_nonfinite = pass_nonfinite
        self._codecs = LinkCodecs(a, index)

    def _keep(self, sample: int, version: int, m_nH: Tensor) -> None:
        assert self.store is not None
        self.store.put(sample, version, m_nH)
        if self._config.store.drift_check is not None:
            self.changed.add(sample)

    def limit(self, bounds: Bounds, dtype: torch.dtype) -> None:
        """From now on refuse packets of the peer that hold more. dtype: the stages' own."""
        self.bounds = bounds
        self.transport.limit(bounds.most_bytes(self._codecs, dtype))

    # -- sending and receiving packets

    def _draw(self, direction: int, at: Position, part: int = 0) -> int:
        return ops.mix_seed(self._config.seed, self._replica, self.index, direction, at.step, at.micro_batch, part)

    def _header(
        self, kind: Kind, codec: Codec, x: Tensor, samples: list[Sample], layout: Layout, at: Position
    ) -> Header:
        return Header(
            kind=kind,
            method=codec.method,
            link=self.index,
            step=at.step,
            micro_batch=at.micro_batch,
            dtype=wire_dtype(x.dtype),
            payload_dtype=codec.payload_dtype,
            bits=codec.bits,
            first_bits=self._codecs.first_bits if kind is Kind.ACTIVATION else 0,
            tokens=layout.tokens,
            hidden=x.shape[-1],
            group_size=self._config.activations.group_size or 0,
            samples=tuple(samples),
        )

    def _send(self, header: Header, parts: list[np.ndarray]) -> int:
        packet = encode(header, parts, checksum=self._config.transport.checksum)
        self.transport.send(packet)
        return packet.size

    def _recv(self, kind: Kind, at: Position) -> tuple[Header, np.ndarray, int]:
        began = time.perf_counter()
        packet = self.transport.recv()
        self.stats.wait_seconds += time.perf_counter() - began
        try:
            header, payload = decode(packet)
        except WireError as error:
            raise WireError(f"link {self.index}, from rank {self.transport.peer}: {error}") from error
        expected = (kind, self.index, at.step, at.micro_batch)
        if (header.kind, header.link, header.step, header.micro_batch) != expected:
            raise LinkError(
                f"link {self.index}: rank {self.transport.peer} sent the {header.describe()}; expected the "
                f"{kind.name.lower()} of micro-batch {at.micro_batch}, step {at.step}"
            )
        if not header.samples or not header.hidden:
            raise WireError(f"link {self.index}: rank {self.transport.peer} sent the {header.describe()}: it is empty")
        rows = header.tokens if self.canvas is None else self.canvas.lines
        if self.bounds is not None:
            try:
                self.bounds.check(header, rows)
            except WireError as error:
                raise WireError(
                    f"link {self.index}: rank {self.transport.peer} sent what is too large: {error}"
                ) from error
        if 4 * len(header.samples) * rows * header.hidden > MAX_TENSOR_BYTES:
            raise WireError(
                f"link {self.index}: rank {self.transport.peer} sent the {header.describe()}, of {len(header.samples)} "
                f"samples with {rows} rows of {header.hidden} values: above the limit of {MAX_TENSOR_BYTES} bytes"
            )
        if header.group_size != (self._config.activations.group_size or 0):
            raise LinkError(
                f"link {self.index}: rank {self.transport.peer} uses group_size {header.group_size or None}, "
                f"this rank {self._config.activations.group_size}"
            )
        return header, payload, packet.size

    def _check_codec(self, header: Header, codec: Codec) -> None:
        got = (header.method, header.bits, header.payload_dtype)
        if got != (codec.method, codec.bits, codec.payload_dtype):
            raise LinkError(
                f"link {self.index}: rank {self.transport.peer} sent {got[0].name.lower()} values of {got[1]} bits "
                f"({got[2].name.lower()}), this rank expects {codec.method.name.lower()} of {codec.bits} "
                f"({codec.payload_dtype.name.lower()}): the ranks' configurations differ"
            )

    def _cached_shape(self, count: int, hidden: int) -> tuple[int, int]:
        """Give the shape of m for a sample of [count, hidden]."""
        if self.canvas is None:
            return count, hidden
        return self.canvas.canvas_lines, hidden // self.canvas.columns * self.canvas.canvas_columns

    def _where(self, at: Position, what: str) -> str:
        return f"link {self.index}, step {at.step}, micro-batch {at.micro_batch}, {what}"


def plain_samples(layout: Layout) -> list[Sample]:
    """Describe samples that no cached activation stands behind."""
    rows = zip(layout.ids, layout.starts, layout.counts, strict=True)
    return [Sample(i, Form.PLAIN, start, count) for i, start, count in rows]
