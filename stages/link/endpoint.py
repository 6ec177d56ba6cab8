"""The two ends of a link: they join codecs, message store, staging and transport.

`LinkSender` (stage k) sends activations and receives their gradients; `LinkReceiver` (stage k + 1) receives activations
and sends their gradients. An end passes rows to a coder and the coder's packet to the transport, and the other way
round:

    packet = coder.encode(rows, ...)            header, payload = ...receive
    transport.send(packet)                      rows = coder.decode(header, payload, ...)

With "aqsgd" the coder is a `DeltaCoder` (delta_coding.py) or, with `store.clusters`, a `ClusterCoder` (clusters.py);
otherwise a codec without memory encodes all rows. Nothing changes at either end before a packet is checked.

Shapes: B samples, S tokens with padding, H hidden size, T real tokens of a micro-batch, n of one sample.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipecomp.buffers.base import MessageStore
from pipecomp.codecs.codecs import Cast, Codec, Quantized, torch_dtype
from pipecomp.codecs.selection import LinkCodecs
from pipecomp.codecs.wire import Form, PacketHeader, PacketKind, Sample, packet_bytes
from pipecomp.config import Config
from pipecomp.errors import ConfigError, LinkError, NonFiniteError, WireError
from pipecomp.kernels import ops
from pipecomp.kernels.staging import Copy, HostStaging, Staging
from pipecomp.stages.link.clusters import ClusterCoder
from pipecomp.stages.link.crop_canvas import CropCanvas
from pipecomp.stages.link.delta_coding import CodingResult, DeltaCoder
from pipecomp.stages.link.layout import Layout, gather, scatter
from pipecomp.stages.link.packet import (
    EVALUATED,
    MAX_TENSOR_BYTES,
    DeferredHeader,
    LinkContext,
    Packet,
    PacketLimits,
    Position,
)
from pipecomp.stages.link.transport import MAX_PACKET_BYTES, ReceivedPacket, ReceiveStaging, Transport
from pipecomp.stats import LinkStats


class Endpoint:
    """One end of a link, see `LinkSender` and `LinkReceiver`.

    Args:
        index: Number of the link, counted from the first stage.
        config: The run's settings.
        transport: To the other end.
        store: Store of this end; None unless the method is "aqsgd".
        replica: Number of the pipeline.
        staging: Between the stage's device and the host; None if that is the host.
        pass_nonfinite: Whether gradients with NaN or Inf are sent as plain values, for loss scaling.
        canvas: Canvas of images moved by crops; None if cached activations have the shape of a sample's rows.
        carries_gradients: False if the stages before this link train nothing, see `SplitPlan.lowest_trained`.

    Attributes:
        limits: Limits of the peer's packets; None before they are set.
        changed: Entries put since the last check for drift, if `checks_drift`.
        drifted: Whether the last check for drift found a difference.
        may_decline: Whether either end may refuse to cache a first visit.
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
        carries_gradients: bool = True,
    ) -> None:
        a, clusters = config.activations, config.store.clusters
        if (a.method == "aqsgd") != (store is not None):
            raise ConfigError("activations.method", a.method, "'aqsgd' with a message store, the others without one")
        if clusters is not None and canvas is not None:
            raise ConfigError("store.clusters", clusters, "null for images that crops move, which come back")
        self.index, self.transport, self.store, self.canvas = index, transport, store, canvas
        self.carries_gradients = carries_gradients
        self.staging = staging or HostStaging()
        self.context = LinkContext(index, replica, transport.peer, config, self.staging)
        self.receive_staging = ReceiveStaging(transport, self.staging)
        self.stats = LinkStats()
        self.limits: PacketLimits | None = None
        self._dtype = torch.float32  # of the stages, for the limits
        self.changed: set[int] = set()
        self.checks_drift = config.store.drift_check is not None
        self.drifted = False
        self.may_decline = store is not None and config.store.on_write_error == "continue"
        # By micro-batch under way, the samples that its gradient packet decides: at the sender the first visits that
        # the other end may not have cached, at the receiver those that it has not cached.
        self._undecided: dict[Position, set[int]] = {}
        # At the receiver, the versions that the samples' gradients get, if gradients are cached.
        self._versions: dict[Position, list[int]] = {}
        self._pass_nonfinite = pass_nonfinite
        self._uncounted: deque[DeferredHeader] = deque()  # of packets that were sent before their bits were known
        self._norms: deque[Copy] = deque()  # of sampled activations and their errors
        self._clusters: ClusterCoder | None = None
        self.codecs = self._make_coders(config)

    def _make_coders(self, config: Config) -> LinkCodecs:
        self._config = config
        codecs = LinkCodecs(config.activations, self.index, config.store.clusters)
        self._activations = self._gradients = None
        if self.store is not None:
            rest = self.store, self.canvas, self.may_decline
            self._activations = DeltaCoder(self.context, PacketKind.ACTIVATION, codecs.activations, *rest)
            if codecs.gradients is not None and self.carries_gradients:
                self._gradients = DeltaCoder(self.context, PacketKind.GRADIENT, codecs.gradients, *rest)
            if self._clusters is not None:
                self._clusters.codecs, self._clusters.store = codecs, self.store
            elif codecs.clustered is not None:
                self._clusters = ClusterCoder(self.context, codecs, self.store)
        return codecs

    # -- settings

    def set_bits(self, config: Config) -> None:
        """Continue with this configuration's bits; both ends must do so between the same two packets."""
        self.codecs = self._make_coders(config)
        if self.limits is not None:
            self.set_limits(self.limits, self._dtype)

    def set_limits(self, limits: PacketLimits, dtype: torch.dtype) -> None:
        """Refuse larger packets of the peer from now on. dtype: of the stages."""
        self.limits, self._dtype = limits, dtype
        self.receive_staging.max_samples = limits.max_samples
        self.transport.limit(self.max_packet_bytes)

    def allow_evaluation(self, samples: int) -> None:
        """Accept evaluation micro-batches of so many samples, and of `EVALUATED` in any case."""
        if self.limits is not None:
            self.set_limits(self.limits._replace(evaluated=max(EVALUATED, samples)), self._dtype)

    def allow_documents(self, documents: int) -> None:
        """Accept packed micro-batches of so many samples, in training and evaluation; never fewer than before."""
        limits = self.limits
        if limits is not None and documents > limits.documents:
            changed = max(limits.changed, -(-limits.changed * documents // limits.samples))
            self.set_limits(limits._replace(documents=documents, changed=changed), self._dtype)

    @property
    def max_packet_bytes(self) -> int:
        """Length of the longest packet that the peer may send."""
        return MAX_PACKET_BYTES if self.limits is None else self.limits.max_bytes(self.codecs, self._dtype)

    @contextlib.contextmanager
    def accepting(self, packet_size: int) -> Iterator[None]:
        """Accept packets of so many bytes within this context; the last one must be received inside.

        Raises WireError if no packet may be that long.
        """
        if packet_size > MAX_PACKET_BYTES:
            text = f"announces a packet of {packet_size} bytes, allowed: {MAX_PACKET_BYTES}"
            raise WireError(self.context.peer_error(text))
        self.transport.limit(max(packet_size, self.max_packet_bytes))
        try:
            yield
        finally:
            self.transport.limit(self.max_packet_bytes)

    # -- the store

    def replace_store(self, store: MessageStore) -> None:
        """Continue with another view of the same entries, such as one that records accesses."""
        self.store = store
        self.codecs = self._make_coders(self._config)

    @property
    def caches_samples(self) -> bool:
        """True if the store's entries are samples, False if they are blocks of cluster centers."""
        return self._clusters is None

    def end_step(self) -> None:
        """Put what a step has changed besides samples; call it before the step is committed or compared."""
        if self._clusters is not None:
            put = self._clusters.end_step()
            if self.checks_drift:
                self.changed.update(put)

    def reload(self) -> None:
        """Continue with the store's contents, after they changed otherwise than by packets."""
        if self._clusters is not None:
            self._clusters.reload()

    # -- packets out

    def _encode_plain(
        self,
        kind: PacketKind,
        codec: Codec,
        x_TH: Tensor,
        samples: list[Sample],
        layout: Layout,
        at: Position,
    ) -> Packet:
        """Encode all rows by a codec without memory."""
        (rows, hidden), dtype = x_TH.shape, x_TH.dtype
        choosing = codec if isinstance(codec, Quantized) and codec.error is not None else None
        header = self.context.header(kind, codec, samples, at, layout, hidden=hidden, dtype=dtype)
        deferred = None if choosing is None else DeferredHeader(header, choosing)
        packet = Packet(self.context, header, codec.payload_bytes(rows, hidden), deferred)
        seed, bits = self.context.seed(kind, at), None
        if choosing is None:
            flags = codec.encode(x_TH, packet.payload, seed, packet.whole)
        else:
            visit = ops.EncodeItem(choosing.before(x_TH), None, choosing.options(seed))
            bits, flag = choosing.encode_fewest([visit], packet.payload)
            flags = [flag]
        packet.close(flags, at, bits)
        return packet

    def _send(self, packet: Packet, result: CodingResult | None = None) -> None:
        """Send a packet and count it. result: its effect on the store, if it has one."""
        self.transport.send(packet.buffer if self.staging.immediate else packet)
        if packet.deferred is None:
            self._count(packet.header, packet.size)
        elif packet.deferred.known:
            self._count(*packet.deferred.resolve())
        else:
            self._uncounted.append(packet.deferred)
        if result is not None:
            self._record(packet.header, result)

    def count_sent(self, *, wait: bool = False) -> None:
        """Count sent packets whose bits are known by now. wait: also wait for the bits of the others."""
        while self._uncounted and (wait or self._uncounted[0].known):
            self._count(*self._uncounted.popleft().resolve())

    # -- packets in

    def receive(self, kind: PacketKind, at: Position) -> ReceivedPacket:
        """Wait for the peer's next packet. Raises LinkError if it is not of this kind and position."""
        began = time.perf_counter()
        packet = self.transport.recv()
        if kind in (PacketKind.ACTIVATION, PacketKind.GRADIENT):  # reports compare it with the training time
            self.stats.wait_seconds += time.perf_counter() - began
        try:
            received = self.receive_staging.open(packet)
        except WireError as error:
            raise WireError(f"link {self.index}, from rank {self.transport.peer}: {error}") from error
        header = received.header
        if (header.kind, header.link, header.step, header.micro_batch) != (kind, self.index, at.step, at.micro_batch):
            expected = f"expected the {kind.name.lower()} of micro-batch {at.micro_batch}, step {at.step}"
            raise LinkError(self.context.peer_error(f"sent the {header.describe()}; {expected}"))
        return received

    def _receive_rows(self, kind: PacketKind, at: Position) -> tuple[PacketHeader, Tensor]:
        """Receive a packet of samples and check its size: its header, and its payload on the device."""
        received = self.receive(kind, at)
        header = received.header
        if not header.samples or not header.hidden:
            raise WireError(self.context.peer_error(f"sent the {header.describe()}: it is empty"))
        rows = header.tokens if self.canvas is None else self.canvas.lines
        if self.limits is not None:
            try:
                self.limits.check(header, rows)
            except WireError as error:
                raise WireError(self.context.peer_error(f"sent a packet that is too large: {error}")) from error
        if 4 * header.rows * rows * header.hidden > MAX_TENSOR_BYTES:
            unit = "packed samples" if header.packed else "samples"
            what = f"{header.rows} {unit} with {rows} rows of {header.hidden} values"
            limit = f"above the limit of {MAX_TENSOR_BYTES} bytes"
            raise WireError(self.context.peer_error(f"sent the {header.describe()}, of {what}: {limit}"))
        group_size = self._config.activations.group_size
        if header.group_size != (group_size or 0):
            text = f"uses group_size {header.group_size or None}, this rank {group_size}"
            raise LinkError(self.context.peer_error(text))
        return header, self.receive_staging.payload(received)

    def _decode_plain(self, codec: Codec, header: PacketHeader, payload: Tensor) -> Tensor:
        """Decode all rows by a codec without memory."""
        rows = sum(s.count for s in header.samples)
        return self.context.matching_codec(header, codec).decode(payload, rows, header.hidden)

    def _finish_rows(
        self, header: PacketHeader, payload: Tensor, x_TH: Tensor, layout: Layout, result: CodingResult | None
    ) -> Tensor:
        """Count a decoded packet; return its rows as [B, S, H] in the stages' dtype."""
        self._count(header, packet_bytes(len(header.samples), payload.numel()))
        if result is not None:
            self._record(header, result)
        return scatter(x_TH.to(torch_dtype(header.dtype)), layout)

    # -- counters

    def _count(self, header: PacketHeader, size: int) -> None:
        counters = {PacketKind.ACTIVATION: self.stats.forward, PacketKind.GRADIENT: self.stats.backward}
        raw = sum(s.count for s in header.samples) * header.hidden * torch_dtype(header.dtype).itemsize
        counters.get(header.kind, self.stats.evaluation).add(raw, size, header.quantized())

    def _record(self, header: PacketHeader, result: CodingResult) -> None:
        gradients = header.kind is PacketKind.GRADIENT
        self.stats.count_visits(len(header.samples), deltas=result.deltas, kept=result.kept, gradients=gradients)
        if self.checks_drift:
            self.changed.update(result.put)


class LinkSender(Endpoint):
    """Stage k's end of the link to stage k + 1: sends activations, receives their gradients."""

    next_version = 1  # of a cached activation; above the highest that either end still holds

    def send_activation(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool = True) -> None:
        """Send the real tokens of a micro-batch; return once the packet is queued.

        In evaluation, and if no gradients come back, then wait for room in the transport's queue: no packet of the peer
        slows the caller down.

        Args:
            x_BSH: Activations in the training dtype.
            layout: Layout of the samples.
            at: Position in training.
            training: False in evaluation.

        Raises:
            NonFiniteError: Values that cannot be quantized; nothing is stored or sent. On a GPU the next call raises.
        """
        x_TH = gather(x_BSH.detach(), layout).contiguous()
        dtype, result = x_TH.dtype, None
        if training and self.store is not None:
            packet, decoded, result = self._encode_cached(x_TH, layout, at)
            if at.micro_batch == 0:
                self._sample_errors(x_TH.split(layout.counts), decoded)
        else:
            kind, codec = PacketKind.ACTIVATION, self.codecs.activation(dtype)
            if not training:
                kind, codec = PacketKind.EVAL_ACTIVATION, self.codecs.evaluation(dtype)
            packet = self._encode_plain(kind, codec, x_TH, layout.samples(Form.PLAIN), layout, at)
        self._send(packet, result)
        # Where nothing waits for its micro-batches, they would fill the memory over a slow link.
        if not training or not self.carries_gradients:
            self.transport.wait_for_room()

    def _encode_cached(
        self, x_TH: Tensor, layout: Layout, at: Position
    ) -> tuple[Packet, Sequence[Tensor], CodingResult]:
        """Encode changes; the packet, each sample's values at the other end, and the effect on the store."""
        first = self.next_version
        if self._clusters is not None:
            self.next_version += 1
            packet, y_TH, result = self._clusters.encode(x_TH, layout, at, first)
            return packet, y_TH.split(layout.counts), result
        assert self._activations is not None
        self.next_version += len(layout.ids)
        versions, undecided = range(first, self.next_version), set[int]().union(*self._undecided.values())
        packet, decoded, result = self._activations.encode(x_TH, layout, versions, at, x_TH.dtype, undecided=undecided)
        if self.may_decline:
            self._undecided[at] = {s.id for s in packet.header.samples if s.form is Form.FULL}
        return packet, decoded, result

    def _sample_errors(self, x: Sequence[Tensor], decoded: Sequence[Tensor]) -> None:
        """Count the relative errors of what the other end computes with; on a GPU they are read a step later."""
        pairs = [(x_nH.float(), m_nH) for x_nH, m_nH in zip(x, decoded, strict=True) if x_nH.numel()]
        if pairs:
            norms = torch.stack([torch.stack([x_nH.norm(), (x_nH - m_nH).norm()]) for x_nH, m_nH in pairs])
            self._norms.append(self.staging.to_host(norms))
        while len(self._norms) > (0 if self.staging.immediate else 1):
            for norm, error in self._norms.popleft().wait().tolist():
                if norm > 0:
                    self.stats.error_sum += error / norm
                    self.stats.error_count += 1

    def recv_gradient(self, layout: Layout, at: Position, *, unit: float = 1.0) -> Tensor:
        """Receive the gradient of the activations that were sent at a position.

        Args:
            layout: As sent.
            at: Position in training.
            unit: As at the other end, see `LinkReceiver.send_gradient`.

        Returns:
            [B, S, H] in the training dtype, with zeros as padding.
        """
        header, payload = self._receive_rows(PacketKind.GRADIENT, at)
        if Layout.of_header(header, self.canvas) != layout:
            text = f"gradient for samples {[s.id for s in header.samples]}, not {layout.ids}"
            raise LinkError(self.context.error(at, text))
        first_visits = self._undecided.pop(at, set())
        if self.store is not None and self._clusters is None:
            not_kept = {s.id for s in header.samples if s.form is Form.NOT_KEPT}
            self.stats.unstored_samples += len(not_kept & first_visits)
            self.store.drop(not_kept)
        dtype, result = torch_dtype(header.dtype), None
        plain = self._pass_nonfinite and (header.method, header.payload_dtype) == (Cast.method, header.dtype)
        if self._gradients is not None and not plain:
            u_TH, result = self._gradients.decode(header, payload, layout, at)
            g_TH = u_TH / unit
        else:
            g_TH = self._decode_plain(Cast(dtype) if plain else self.codecs.gradient(dtype), header, payload)
        return self._finish_rows(header, payload, g_TH, layout, result)


class LinkReceiver(Endpoint):
    """Stage k + 1's end of the link from stage k: receives activations, sends their gradients."""

    def recv_activation(self, at: Position, *, training: bool = True) -> tuple[Tensor, Layout]:
        """Receive the activations of a micro-batch.

        Args:
            at: Position in training.
            training: False in evaluation.

        Returns:
            [B, S, H] in the training dtype, with zeros as padding, and their layout.

        Raises:
            BaseMismatchError: A delta builds on what this end does not hold.
        """
        header, payload = self._receive_rows(PacketKind.ACTIVATION if training else PacketKind.EVAL_ACTIVATION, at)
        layout, dtype, result = Layout.of_header(header, self.canvas), torch_dtype(header.dtype), None
        if training and self._clusters is not None:
            x_TH, result = self._clusters.decode(header, payload, at)
        elif training and self._activations is not None:
            x_TH, result = self._activations.decode(header, payload, layout, at)
            if result.dropped:
                self._undecided[at] = set(result.dropped)
            if self._gradients is not None:
                self._versions[at] = [s.version for s in header.samples]
        else:
            codec = self.codecs.activation(dtype) if training else self.codecs.evaluation(dtype)
            x_TH = self._decode_plain(codec, header, payload)
        return self._finish_rows(header, payload, x_TH, layout, result), layout

    def send_gradient(self, g_BSH: Tensor, layout: Layout, at: Position, *, unit: float = 1.0) -> None:
        """Send the gradient of the activations received at a position; return once the packet is queued.

        Args:
            g_BSH: Gradient in the training dtype.
            layout: Layout of the activations.
            at: Position in training.
            unit: Factor that makes gradients of different steps comparable, see `gradient_unit`. Cached gradients are
                multiplied by it, and divided at the other end.
        """
        g_TH = gather(g_BSH.detach(), layout).contiguous()
        not_kept = self._undecided.pop(at, set())
        samples = [s._replace(form=Form.NOT_KEPT) if s.id in not_kept else s for s in layout.samples(Form.PLAIN)]
        result = None
        try:
            if self._gradients is not None:
                u_TH, versions = g_TH.float() * unit, self._versions.pop(at)
                packet, _, result = self._gradients.encode(
                    u_TH, layout, versions, at, g_TH.dtype, settle=self._pass_nonfinite
                )
            else:
                codec = self.codecs.gradient(g_TH.dtype)
                packet = self._encode_plain(PacketKind.GRADIENT, codec, g_TH, samples, layout, at)
                if self._pass_nonfinite:  # raise here, not on the sending thread
                    packet.settle()
        except NonFiniteError:
            if not self._pass_nonfinite:
                raise
            # Plain values, so that loss scaling sees the overflow and skips the step.
            packet = self._encode_plain(PacketKind.GRADIENT, Cast(g_TH.dtype), g_TH, samples, layout, at)
        self._send(packet, result)
