"""One link: codec, message store and transport joined, in the two forms its two ends have.

The upstream end (stage k) sends activations and receives their gradients, the downstream end (stage k + 1) the other
way round. With "aqsgd" both hold, for every sample they have seen, the same message m (arXiv:2206.01299, Algorithm 1):

    first visit   m ← a                     sent whole, or quantized if `first_visit` says so
    later         m ← m + deq(Q(a − m))     sent as Q(a − m)

The sender's store decides which it is. Every message says what it is, which version of m it builds on and which it
makes, so a delta can never be applied to another base. Nothing is changed at either end before a message is checked.

Shapes: B samples, S tokens with padding, H hidden size, T real tokens of a micro-batch, n of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipecomp.buffers.base import Message, MessageStore
from pipecomp.codecs import Cast, Codec, Quantized, TopK, torch_dtype, wire_dtype
from pipecomp.config import Config
from pipecomp.errors import BaseMismatchError, ConfigError, LinkError, NonFiniteError, WireError
from pipecomp.kernels import ops
from pipecomp.stages.boundary import Layout, gather, scatter
from pipecomp.stages.transport import Transport
from pipecomp.stats import LinkStats
from pipecomp.wire import Form, Header, Kind, Sample, decode, encode

_FORWARD, _BACKWARD = 0, 1  # which direction a random draw is for


@dataclass(frozen=True, slots=True)
class Position:
    """Where in training a message belongs: optimizer step and micro-batch within it."""

    step: int
    micro_batch: int


class Upstream(Protocol):
    """The end that sends activations."""

    def send_activation(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool = True) -> None: ...
    def recv_gradient(self, layout: Layout, at: Position) -> Tensor: ...


class Downstream(Protocol):
    """The end that receives activations."""

    def recv_activation(self, at: Position, *, training: bool = True) -> tuple[Tensor, Layout]: ...
    def send_gradient(self, g_BSH: Tensor, layout: Layout, at: Position) -> None: ...


class _End:
    """What both ends share. index: the link's number, counted from the first stage. replica: which pipeline."""

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
    ) -> None:
        a = config.activations
        if (a.method == "aqsgd") != (store is not None):
            raise ConfigError("activations.method", a.method, "'aqsgd' with a message store, the others without one")
        self.index, self.transport, self.store = index, transport, store
        self.device = device or torch.device("cpu")
        self.stats = LinkStats()
        self._method = a.method
        self._eval = a.eval
        self._checksum = config.transport.checksum
        self._seed, self._replica = config.seed, replica
        self._pass_nonfinite = pass_nonfinite
        how = (a.rounding, a.scale, a.group_size)
        self._group_size = a.group_size
        self._forward = Quantized(a.forward_bits, *how)
        self._first = None if a.first_visit == "full" else Quantized(int(a.first_visit), *how)
        self._backward: Codec = Quantized(a.backward_bits, *how)
        if a.backward_top_k is not None:
            self._backward = TopK(a.backward_bits, a.backward_top_k, *how)

    # -- sending and receiving whole messages

    def _codec(self, kind: Kind, dtype: torch.dtype) -> Codec:
        """The codec of a message without a store."""
        method = self._method
        if kind is Kind.EVAL_ACTIVATION:
            method = "none" if self._eval == "full" else self._eval
        if method == "fp16":
            return Cast(torch.float16)
        if method == "bf16":
            return Cast(torch.bfloat16)
        if method == "none":
            return Cast(dtype)
        return self._backward if kind is Kind.GRADIENT else self._forward

    def _draw(self, direction: int, at: Position, part: int = 0) -> int:
        return ops.mix_seed(self._seed, self._replica, self.index, direction, at.step, at.micro_batch, part)

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
            first_bits=self._first.bits if self._first is not None and kind is Kind.ACTIVATION else 0,
            tokens=layout.tokens,
            hidden=x.shape[-1],
            group_size=self._group_size or 0,
            samples=tuple(samples),
        )

    def _send(self, header: Header, parts: list[np.ndarray]) -> int:
        message = encode(header, parts, checksum=self._checksum)
        self.transport.send(message)
        return message.size

    def _recv(self, kind: Kind, at: Position) -> tuple[Header, np.ndarray, int]:
        before = self.transport.traffic().wait_seconds
        message = self.transport.recv()
        self.stats.wait_seconds += self.transport.traffic().wait_seconds - before
        try:
            header, payload = decode(message)
        except WireError as error:
            raise WireError(f"link {self.index}, from rank {self.transport.peer}: {error}") from error
        expected = (kind, self.index, at.step, at.micro_batch)
        if (header.kind, header.link, header.step, header.micro_batch) != expected:
            raise LinkError(
                f"link {self.index}: rank {self.transport.peer} sent the {header.describe()}; expected the "
                f"{kind.name.lower()} of micro-batch {at.micro_batch}, step {at.step}"
            )
        if header.group_size != (self._group_size or 0):
            raise LinkError(
                f"link {self.index}: rank {self.transport.peer} uses group_size {header.group_size or None}, "
                f"this rank {self._group_size}"
            )
        return header, payload, message.size

    def _check_codec(self, header: Header, codec: Codec) -> None:
        got = (header.method, header.bits, header.payload_dtype)
        if got != (codec.method, codec.bits, codec.payload_dtype):
            raise LinkError(
                f"link {self.index}: rank {self.transport.peer} sent {got[0].name.lower()} values of {got[1]} bits "
                f"({got[2].name.lower()}), this rank expects {codec.method.name.lower()} of {codec.bits} "
                f"({codec.payload_dtype.name.lower()}): the ranks' configurations differ"
            )

    def _where(self, at: Position, what: str) -> str:
        return f"link {self.index}, step {at.step}, micro-batch {at.micro_batch}, {what}"


def _plain(layout: Layout) -> list[Sample]:
    rows = zip(layout.ids, layout.starts, layout.counts, strict=True)
    return [Sample(i, Form.PLAIN, start, count) for i, start, count in rows]


class UpstreamEnd(_End):
    """Stage k's end of the link to stage k + 1."""

    _next_version = 1

    def resume_versions(self, highest: int) -> None:
        """Number messages from above `highest`, the highest version that either end still holds."""
        self._next_version = highest + 1

    def send_activation(self, x_BSH: Tensor, layout: Layout, at: Position, *, training: bool = True) -> None:
        """Send the real tokens of x [B, S, H]; returns once the message is queued.

        Raises NonFiniteError for values that cannot be quantized, before any message is changed.
        """
        x_TH = gather(x_BSH.detach(), layout)
        raw = x_TH.numel() * x_TH.element_size()
        if not training:
            codec = self._codec(Kind.EVAL_ACTIVATION, x_TH.dtype)
            header = self._header(Kind.EVAL_ACTIVATION, codec, x_TH, _plain(layout), layout, at)
            self.stats.evaluation.add(raw, self._send(header, codec.encode(x_TH, self._draw(_FORWARD, at))))
            return
        try:
            if self.store is not None:
                header, parts = self._encode_deltas(x_TH, layout, at)
            else:
                codec = self._codec(Kind.ACTIVATION, x_TH.dtype)
                header = self._header(Kind.ACTIVATION, codec, x_TH, _plain(layout), layout, at)
                parts = codec.encode(x_TH, self._draw(_FORWARD, at))
        except NonFiniteError as error:
            raise NonFiniteError(self._where(at, f"activations: {error}")) from error
        self.stats.forward.add(raw, self._send(header, parts))

    def _encode_deltas(self, x_TH: Tensor, layout: Layout, at: Position) -> tuple[Header, list[np.ndarray]]:
        assert self.store is not None
        samples: list[Sample] = []
        parts: list[np.ndarray] = []
        updates: list[tuple[int, int, Tensor]] = []
        repeated = len(set(layout.ids)) < len(layout.ids)
        held = [] if repeated else self.store.get(layout.ids)
        for i, (sample, rows) in enumerate(zip(layout.ids, layout.rows(), strict=True)):
            x_nH = x_TH[rows]
            message = self.store.get([sample])[0] if repeated else held[i]
            if message is not None and message.m_nH.shape != x_nH.shape:
                message = None  # the sample changed its length: a first visit again
            version = self._next_version
            self._next_version += 1
            seed = self._draw(_FORWARD, at, i)
            form, base = (Form.FULL, 0) if message is None else (Form.DELTA, message.version)
            samples.append(Sample(sample, form, layout.starts[i], layout.counts[i], base, version))
            m_nH, encoded = self._encode_sample(x_nH, message, seed)
            parts += encoded
            if repeated:
                self.store.put(sample, version, m_nH)
            else:
                updates.append((sample, version, m_nH))
            if form is Form.FULL:
                self.stats.full_samples += 1
            else:
                self.stats.delta_samples += 1
            if at.micro_batch == 0 and x_nH.numel():
                self._sample_error(x_nH, m_nH)
        for update in updates:  # after all of the micro-batch could be quantized
            self.store.put(*update)
        return self._header(Kind.ACTIVATION, self._forward, x_TH, samples, layout, at), parts

    def _encode_sample(self, x_nH: Tensor, message: Message | None, seed: int) -> tuple[Tensor, list[np.ndarray]]:
        """What both ends hold afterwards, and the payload that says so."""
        if message is not None:
            m_nH = message.m_nH.to(x_nH.device)
            return m_nH, self._forward.encode_delta_(x_nH, m_nH, seed)
        if self._first is None:
            if not bool(torch.isfinite(x_nH).all()):
                raise NonFiniteError("NaN or Inf")
            return x_nH.to(torch.float32, copy=True), Cast(x_nH.dtype).encode(x_nH)
        parts = self._first.encode(x_nH, seed)
        m_nH = self._first.decode(np.concatenate(parts), x_nH.shape[0], x_nH.shape[1], x_nH.device)
        return m_nH, parts

    def _sample_error(self, x_nH: Tensor, m_nH: Tensor) -> None:
        norm = float(x_nH.float().norm())
        if norm > 0:
            self.stats.error_sum += float((x_nH.float() - m_nH).norm()) / norm
            self.stats.error_count += 1

    def recv_gradient(self, layout: Layout, at: Position) -> Tensor:
        """The gradient [B, S, H] of what was sent at `at`, in the training dtype; zeros at padding."""
        header, payload, size = self._recv(Kind.GRADIENT, at)
        if Layout.of_header(header) != layout:
            raise LinkError(self._where(at, f"gradient for samples {[s.id for s in header.samples]}, not {layout.ids}"))
        dtype = torch_dtype(header.dtype)
        codec = self._codec(Kind.GRADIENT, dtype)
        if self._pass_nonfinite and header.method is Cast.method:
            codec = Cast(dtype)
        self._check_codec(header, codec)
        g_TH = codec.decode(payload, layout.total, header.hidden, self.device).to(dtype)
        self.stats.backward.add(g_TH.numel() * g_TH.element_size(), size)
        return scatter(g_TH, layout)


class DownstreamEnd(_End):
    """Stage k + 1's end of the link from stage k."""

    def recv_activation(self, at: Position, *, training: bool = True) -> tuple[Tensor, Layout]:
        """The activations [B, S, H] at `at` in the training dtype, zeros at padding, and their layout.

        Raises BaseMismatchError if a delta builds on a message that this end does not hold.
        """
        kind = Kind.ACTIVATION if training else Kind.EVAL_ACTIVATION
        header, payload, size = self._recv(kind, at)
        layout = Layout.of_header(header)
        dtype = torch_dtype(header.dtype)
        if training and self.store is not None:
            self._check_codec(header, self._forward)
            x_TH = self._decode_deltas(header, payload, layout, at).to(dtype)
        else:
            codec = self._codec(kind, dtype)
            self._check_codec(header, codec)
            x_TH = codec.decode(payload, layout.total, header.hidden, self.device).to(dtype)
        counters = self.stats.forward if training else self.stats.evaluation
        counters.add(x_TH.numel() * x_TH.element_size(), size)
        return scatter(x_TH, layout), layout

    def _decode_deltas(self, header: Header, payload: np.ndarray, layout: Layout, at: Position) -> Tensor:
        assert self.store is not None
        if header.first_bits != (self._first.bits if self._first is not None else 0):
            got = header.first_bits or "full"
            raise LinkError(self._where(at, f"first visits at {got} bits: the ranks' configurations differ"))
        sizes = [self._sample_bytes(s, header) for s in header.samples]
        if sum(sizes) != payload.size:
            raise WireError(self._where(at, f"payload of {payload.size} bytes where its samples need {sum(sizes)}"))
        x_TH = torch.empty(layout.total, header.hidden, device=self.device)
        updates = []
        repeated = len(set(layout.ids)) < len(layout.ids)
        held = [] if repeated else self.store.get(layout.ids)
        start = 0
        for i, (sample, rows) in enumerate(zip(header.samples, layout.rows(), strict=True)):
            data = payload[start : start + sizes[i]]
            start += sizes[i]
            if sample.form is Form.DELTA:
                message = self.store.get([sample.id])[0] if repeated else held[i]
                m_nH = self._checked_base(sample, message, header.hidden, at)
                self._forward.decode_delta_(data, m_nH)
                self.stats.delta_samples += 1
            elif sample.form is Form.FULL:
                codec: Codec = self._first or Cast(torch_dtype(header.dtype))
                m_nH = codec.decode(data, sample.count, header.hidden, self.device).to(torch.float32)
                self.stats.full_samples += 1
            else:
                raise LinkError(self._where(at, f"sample {sample.id} came without a message version"))
            x_TH[rows] = m_nH
            if repeated:
                self.store.put(sample.id, sample.version, m_nH)
            else:
                updates.append((sample.id, sample.version, m_nH))
        for update in updates:
            self.store.put(*update)
        return x_TH

    def _sample_bytes(self, sample: Sample, header: Header) -> int:
        if sample.form is Form.DELTA:
            return self._forward.payload_bytes(sample.count, header.hidden)
        codec: Codec = self._first or Cast(torch_dtype(header.dtype))
        return codec.payload_bytes(sample.count, header.hidden)

    def _checked_base(self, sample: Sample, message: Message | None, hidden: int, at: Position) -> Tensor:
        if message is None or message.version != sample.base:
            holds = "holds none" if message is None else f"holds version {message.version}"
            raise BaseMismatchError(
                self._where(at, f"sample {sample.id}: delta on message version {sample.base}, this end {holds}")
            )
        if tuple(message.m_nH.shape) != (sample.count, hidden):
            raise BaseMismatchError(
                self._where(
                    at,
                    f"sample {sample.id}: delta of shape {(sample.count, hidden)} on a message of "
                    f"{tuple(message.m_nH.shape)}",
                )
            )
        return message.m_nH.to(self.device)

    def send_gradient(self, g_BSH: Tensor, layout: Layout, at: Position) -> None:
        """Send the gradient [B, S, H] of the activations received at `at`; returns once the message is queued."""
        g_TH = gather(g_BSH.detach(), layout)
        codec = self._codec(Kind.GRADIENT, g_TH.dtype)
        try:
            parts = codec.encode(g_TH, self._draw(_BACKWARD, at))
        except NonFiniteError as error:
            if not self._pass_nonfinite:
                raise NonFiniteError(self._where(at, f"gradients: {error}")) from error
            codec = Cast(g_TH.dtype)  # so that loss scaling sees the overflow and skips the step
            parts = codec.encode(g_TH)
        header = self._header(Kind.GRADIENT, codec, g_TH, _plain(layout), layout, at)
        self.stats.backward.add(g_TH.numel() * g_TH.element_size(), self._send(header, parts))
