"""One link: codec, message store and transport joined, and packets as both ends make, check and read them.

The upstream end (stage k, sender.py) sends activations and receives their gradients, the downstream end (stage k + 1,
receiver.py) the other way round; link_end.py is what they share of samples that come back. With "aqsgd" both hold, for
every sample they have seen, the same cached activation m (arXiv:2206.01299, Algorithm 1):

    first visit   m ← a                     sent uncompressed, or quantized if `first_visit` says so
    later         m ← m + deq(Q(a − m))     sent as Q(a − m)

and with `backward_method: "delta"` the same of its gradient (visits.py). The sender's store decides which it is. With
`store.clusters` both hold cluster centers of token rows in place of that (clusters.py). Every packet says what it is,
which version of m it builds on and which it makes, so a delta can never be applied to another base. Nothing is changed
at either end before a packet is checked. An end whose disk refuses writes does not keep new samples, and says so in its
next packet about them: the other end then does not keep them either.

Shapes: B samples, S tokens with padding, H hidden size, T real tokens of a micro-batch, n of one sample.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipecomp.buffers.base import MessageStore
from pipecomp.codecs.codecs import Codec, Quantized, torch_dtype, wire_dtype
from pipecomp.codecs.link_codecs import LinkCodecs
from pipecomp.codecs.wire import Header, Kind, Sample, begin, decode, packet_bytes, payload_of
from pipecomp.config import Config
from pipecomp.errors import ConfigError, LinkError, WireError
from pipecomp.kernels import ops
from pipecomp.kernels.ops import FiniteFlag
from pipecomp.kernels.staging import Copy, HostStaging, Staging
from pipecomp.stages.link.arrivals import Arrivals
from pipecomp.stages.link.boundary import Layout, scatter
from pipecomp.stages.link.bounds import EVALUATED, Bounds
from pipecomp.stages.link.packet import Contents, Encode, Fitted, Packet
from pipecomp.stages.link.transport import MAX_PACKET_BYTES, Transport
from pipecomp.stages.link.window import CropCanvas
from pipecomp.stats import LinkStats

MAX_TENSOR_BYTES = 1 << 34  # of a decoded packet, padding included


@dataclass(frozen=True, slots=True)
class Position:
    """Where in training a packet belongs: optimizer step and micro-batch within it."""

    step: int
    micro_batch: int


class Endpoint:
    """Packets of one end of a link.

    index: the link's number, counted from the first stage. replica: which pipeline. canvas: where the cached
    activations of images that crops move lie; None where they are just what was sent. staging: between the device that
    the stage computes on and the host; None where that is the host.
    """

    def __init__(
        self,
        index: int,
        config: Config,
        transport: Transport,
        store: MessageStore | None,
        *,
        replica: int = 0,
        staging: Staging | None = None,
        pass_nonfinite: bool = False,
        canvas: CropCanvas | None = None,
    ) -> None:
        a = config.activations
        if (a.method == "aqsgd") != (store is not None):
            raise ConfigError("activations.method", a.method, "'aqsgd' with a message store, the others without one")
        clusters = config.store.clusters
        if clusters is not None and canvas is not None:
            raise ConfigError("store.clusters", clusters, "null for images that crops move, which come back")
        self.index, self.transport, self.store = index, transport, store
        self.staging = staging or HostStaging()
        self.arrivals = Arrivals(transport, self.staging)
        self.canvas = canvas
        self.stats = LinkStats()
        self.bounds: Bounds | None = None
        self._bounded_dtype = torch.float32
        self.changed: set[int] = set()  # entries put since the last drift check, where `compares`
        self.compares = config.store.drift_check is not None
        self.drifted = False  # whether that found a difference
        # Samples whose fate a micro-batch's gradient packet tells: at the sender the first visits that the other end
        # may not keep, at the receiver those that it has not kept.
        self._undecided: dict[Position, set[int]] = {}
        # Whether either end may refuse to keep a first visit.
        self.goes_on = store is not None and config.store.on_write_error == "continue"
        self._config, self._replica = config, replica
        self._pass_nonfinite = pass_nonfinite
        self.codecs = LinkCodecs(a, index, clusters)
        self._uncounted: deque[Contents] = deque()  # of packets whose bits were not known when they were sent
        self._measured: deque[Copy] = deque()  # norms of sampled activations and of what is left out of them

    def limit(self, bounds: Bounds, dtype: torch.dtype) -> None:
        """From now on refuse packets of the peer that hold more. dtype: the stages' own."""
        self.bounds, self._bounded_dtype = bounds, dtype
        self.arrivals.most_samples = bounds.most_samples
        self.transport.limit(self.most_bytes)

    @property
    def most_bytes(self) -> int:
        """Of a packet of the peer."""
        if self.bounds is None:
            return MAX_PACKET_BYTES
        return self.bounds.most_bytes(self.codecs, self._bounded_dtype)

    def take_bits(self, config: Config) -> None:
        """Go on with this configuration's bits; both ends must do so between the same two packets."""
        self._config, self.codecs = config, LinkCodecs(config.activations, self.index, config.store.clusters)
        if self.bounds is not None:
            self.limit(self.bounds, self._bounded_dtype)

    @contextlib.contextmanager
    def taking(self, most_bytes: int) -> Iterator[None]:
        """Inside, take packets of so many bytes too; the peer must know when, and the last one must have come inside.

        Raises WireError if that is more than any packet may have.
        """
        if most_bytes > MAX_PACKET_BYTES:
            raise WireError(self.peer(f"announces a packet of {most_bytes} bytes, allowed: {MAX_PACKET_BYTES}"))
        self.transport.limit(max(most_bytes, self.most_bytes))
        try:
            yield
        finally:
            self.transport.limit(self.most_bytes)

    def allow_evaluation(self, samples: int) -> None:
        """From now on take evaluation micro-batches of so many samples, or `EVALUATED` if that is more."""
        if self.bounds is not None:
            self.limit(self.bounds._replace(evaluated=max(EVALUATED, samples)), self._bounded_dtype)

    # -- sending and receiving packets

    def draw(self, kind: Kind, at: Position, part: int = 0) -> int:
        """Mix the seed of a packet's rounding: both ends know what it is made of; 0 where nothing is drawn."""
        if self._config.activations.rounding == "nearest":
            return 0
        direction = int(kind is Kind.GRADIENT)
        return ops.mix_seed(self._config.seed, self._replica, self.index, direction, at.step, at.micro_batch, part)

    def header(
        self,
        kind: Kind,
        codec: Codec,
        hidden: int,
        samples: list[Sample],
        layout: Layout,
        at: Position,
        dtype: torch.dtype,
        first_bits: int = 0,
    ) -> Header:
        """Describe a packet of rows of `hidden` values. dtype: the stages' own. first_bits: of first visits, if any."""
        return Header(
            kind=kind,
            method=codec.method,
            link=self.index,
            step=at.step,
            micro_batch=at.micro_batch,
            dtype=wire_dtype(dtype),
            payload_dtype=codec.payload_dtype,
            bits=codec.bits,
            first_bits=first_bits,
            tokens=layout.tokens,
            hidden=hidden,
            group_size=self._config.activations.group_size or 0,
            samples=tuple(samples),
        )

    def pack(self, header: Header | Fitted, most_bytes: int, encode: Encode, at: Position) -> Packet:
        """Encode a packet; on the host it is whole, and could be encoded, when this returns.

        most_bytes: of its payload, which is as long where the header is known.
        """
        checksum = self._config.transport.checksum
        buffer = self.staging.buffer(packet_bytes(len(header.samples), most_bytes))
        whole = None
        if isinstance(header, Header):
            begin(buffer, header, checksum=checksum)
            whole = torch.from_numpy(buffer) if checksum else None
        target = torch.from_numpy(payload_of(buffer, len(header.samples)))
        payload = self.staging.place(target)
        verdicts, bits = encode(payload, whole if payload is target else None)
        what = self.where(at, "gradients" if header.kind is Kind.GRADIENT else "activations")
        contents = Contents(header, buffer.size, None if bits is None else self.staging.to_host(bits))
        copy = self.staging.to_host(payload, target)
        packet = Packet(header.samples, contents, buffer, verdicts, copy, self.staging, what, checksum=checksum)
        if self.staging.immediate:
            packet.finish()
        return packet

    def _encode(
        self, kind: Kind, codec: Codec, x_TH: Tensor, samples: list[Sample], layout: Layout, at: Position
    ) -> Packet:
        """Encode all rows by one codec."""
        (rows, hidden), dtype = x_TH.shape, x_TH.dtype

        def header(codec: Codec) -> Header:
            return self.header(kind, codec, hidden, samples, layout, at, dtype)

        most, seed = codec.payload_bytes(rows, hidden), self.draw(kind, at)
        fitting = codec if isinstance(codec, Quantized) and codec.error is not None else None

        def encode(payload: Tensor, whole: Tensor | None) -> tuple[list[FiniteFlag], Tensor | None]:
            if fitting is None:
                return codec.encode(x_TH, payload, seed, whole), None
            visit = ops.EncodeItem(fitting.before(x_TH), None, fitting.options(seed))
            bits, verdict = fitting.encode_fewest([visit], payload)
            return [verdict], bits

        def describe(bits: int) -> tuple[Header, int]:
            assert fitting is not None
            fitted = fitting.of_packet(bits)
            return header(fitted), fitted.payload_bytes(rows, hidden)

        return self.pack(Fitted(kind, samples, describe) if fitting else header(codec), most, encode, at)

    def _send(self, packet: Packet) -> None:
        self.transport.send(packet.buffer if self.staging.immediate else packet)
        if packet.contents.known:
            self._count(*packet.contents.found())
        else:
            self._uncounted.append(packet.contents)

    def count_sent(self, *, wait: bool = False) -> None:
        """Count packets whose bits were not known when they were sent. wait: for those whose bits still are not."""
        while self._uncounted and (wait or self._uncounted[0].known):
            self._count(*self._uncounted.popleft().found())

    def receive(self, kind: Kind, at: Position) -> tuple[np.ndarray, Header, np.ndarray]:
        """Wait for the peer's next packet: the whole, its header, its payload. LinkError if it is not that of `at`."""
        began = time.perf_counter()
        packet = self.transport.recv()
        if kind in (Kind.ACTIVATION, Kind.GRADIENT):  # of the training time, as all that reports set beside it
            self.stats.wait_seconds += time.perf_counter() - began
        try:
            header, payload = decode(packet, most_samples=self.arrivals.most_samples)
        except WireError as error:
            raise WireError(f"link {self.index}, from rank {self.transport.peer}: {error}") from error
        expected = (kind, self.index, at.step, at.micro_batch)
        if (header.kind, header.link, header.step, header.micro_batch) != expected:
            what = f"expected the {kind.name.lower()} of micro-batch {at.micro_batch}, step {at.step}"
            raise LinkError(self.peer(f"sent the {header.describe()}; {what}"))
        return packet, header, payload

    def _recv(self, kind: Kind, at: Position) -> tuple[Header, Tensor]:
        """Receive a packet of samples: its header, and its payload on the device."""
        packet, header, payload = self.receive(kind, at)
        if not header.samples or not header.hidden:
            raise WireError(self.peer(f"sent the {header.describe()}: it is empty"))
        rows = header.tokens if self.canvas is None else self.canvas.lines
        if self.bounds is not None:
            try:
                self.bounds.check(header, rows)
            except WireError as error:
                raise WireError(self.peer(f"sent what is too large: {error}")) from error
        if 4 * len(header.samples) * rows * header.hidden > MAX_TENSOR_BYTES:
            what = f"{len(header.samples)} samples with {rows} rows of {header.hidden} values"
            limit = f"above the limit of {MAX_TENSOR_BYTES} bytes"
            raise WireError(self.peer(f"sent the {header.describe()}, of {what}: {limit}"))
        group_size = self._config.activations.group_size
        if header.group_size != (group_size or 0):
            raise LinkError(self.peer(f"uses group_size {header.group_size or None}, this rank {group_size}"))
        return header, self.arrivals.payload(packet, payload)

    def _received(self, header: Header, payload: Tensor, x_TH: Tensor, layout: Layout) -> Tensor:
        """Count a packet whose values are decoded, and give these as [B, S, H] in the stages' dtype."""
        self._count(header, packet_bytes(len(header.samples), payload.numel()))
        return scatter(x_TH.to(torch_dtype(header.dtype)), layout)

    def _count(self, header: Header, size: int) -> None:
        """Count a packet that has been sent or received."""
        counters = {Kind.ACTIVATION: self.stats.forward, Kind.GRADIENT: self.stats.backward}
        raw = sum(s.count for s in header.samples) * header.hidden * torch_dtype(header.dtype).itemsize
        counters.get(header.kind, self.stats.evaluation).add(raw, size, header.quantized())

    def codec_of(self, header: Header, codec: Codec) -> Codec:
        """Find a packet's codec: `codec`, with the header's bits where they follow an error. LinkError if not that."""
        taken: Codec = codec
        if isinstance(codec, Quantized) and codec.may_have(header.bits):
            taken = codec.of_packet(header.bits)
        got = (header.method, header.bits, header.payload_dtype)
        if got != (taken.method, taken.bits, taken.payload_dtype):
            allowed = getattr(codec, "error", None) or codec.bits
            sent = f"{got[0].name.lower()} values of {got[1]} bits ({got[2].name.lower()})"
            expected = f"{codec.method.name.lower()} of {allowed} ({codec.payload_dtype.name.lower()})"
            what = f"sent {sent}, this rank expects {expected}: the ranks' configurations differ"
            raise LinkError(self.peer(what))
        return taken

    def peer(self, what: str) -> str:
        """Name the link and the rank at its other end, of which `what` is said, for errors."""
        return f"link {self.index}: rank {self.transport.peer} {what}"

    def where(self, at: Position, what: str) -> str:
        """Name the link and the place in training, for errors."""
        return f"link {self.index}, step {at.step}, micro-batch {at.micro_batch}, {what}"
