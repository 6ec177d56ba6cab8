"""Packets of a link: the context that coders share, packets on their way out, and limits on packets that come in.

A coder opens a `Packet` for a header, lets kernels write its payload, and closes it; the transport then sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipecomp.codecs.codecs import Cast, Codec, Quantized, wire_dtype
from pipecomp.codecs.selection import LinkCodecs
from pipecomp.codecs.wire import (
    PacketHeader,
    PacketKind,
    Sample,
    packet_bytes,
    payload_view,
    write_checksum,
    write_header,
)
from pipecomp.config import Config
from pipecomp.errors import LinkError, NonFiniteError, WireError
from pipecomp.kernels import ops
from pipecomp.kernels.ops import FiniteFlag
from pipecomp.kernels.staging import Copy, Staging
from pipecomp.stages.link.layout import Layout

MAX_TENSOR_BYTES = 1 << 34  # of a decoded packet, padding included
EVALUATED = 64  # samples of an evaluation micro-batch that are always allowed: no configuration has their number
ROW_BYTES = 20  # of a sample in an inventory
_INVENTORY_BYTES = 1 << 12  # of a part of the handshake without its table


@dataclass(frozen=True, slots=True)
class Position:
    """Place of a packet in training: optimizer step and micro-batch within it."""

    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class LinkContext:
    """One end of a link as coders know it: its names in errors, the device, and settings that never change.

    Attributes:
        link: Number of the link, counted from the first stage.
        replica: Number of the pipeline.
        peer: Global rank at the other end.
        config: Only for settings other than bits, which may change during training.
        staging: Between the stage's device and the host.
    """

    link: int
    replica: int
    peer: int
    config: Config
    staging: Staging

    def seed(self, kind: PacketKind, at: Position, part: int = 0) -> int:
        """Return the seed of a packet's stochastic rounding, reproducible at both ends; 0 for nearest rounding."""
        if self.config.activations.rounding == "nearest":
            return 0
        direction = int(kind is PacketKind.GRADIENT)
        return ops.mix_seed(self.config.seed, self.replica, self.link, direction, at.step, at.micro_batch, part)

    def header(
        self,
        kind: PacketKind,
        codec: Codec,
        samples: Sequence[Sample],
        at: Position,
        layout: Layout,
        *,
        hidden: int,
        dtype: torch.dtype,
        first_bits: int = 0,
    ) -> PacketHeader:
        """Make the header of a packet of rows. layout: of the samples. dtype: of the stages."""
        return PacketHeader(
            kind=kind,
            method=codec.method,
            link=self.link,
            step=at.step,
            micro_batch=at.micro_batch,
            dtype=wire_dtype(dtype),
            payload_dtype=codec.payload_dtype,
            bits=codec.bits,
            first_bits=first_bits,
            tokens=layout.tokens,
            hidden=hidden,
            group_size=self.config.activations.group_size or 0,
            samples=tuple(samples),
            packed=layout.packed,
            **layout.digest._asdict(),
        )

    def matching_codec(self, header: PacketHeader, codec: Codec) -> Codec:
        """Return the codec of a received packet: `codec`, with the header's bits if they follow an error.

        Raises LinkError if the packet was not made by it.
        """
        expected: Codec = codec
        if isinstance(codec, Quantized) and codec.allows(header.bits):
            expected = codec.with_bits(header.bits)
        got = (header.method, header.bits, header.payload_dtype)
        if got != (expected.method, expected.bits, expected.payload_dtype):
            sent = f"{got[0].name.lower()} values of {got[1]} bits ({got[2].name.lower()})"
            bits, dtype = getattr(codec, "error", None) or codec.bits, codec.payload_dtype.name.lower()
            text = f"sent {sent}, this rank expects {codec.method.name.lower()} of {bits} ({dtype})"
            raise LinkError(self.peer_error(f"{text}: the ranks' configurations differ"))
        return expected

    def peer_error(self, text: str) -> str:
        """Begin an error with the link and the rank at its other end, which `text` is about."""
        return f"link {self.link}: rank {self.peer} {text}"

    def error(self, at: Position, text: str) -> str:
        """Begin an error with the link and the position in training."""
        return f"link {self.link}, step {at.step}, micro-batch {at.micro_batch}, {text}"


# Note: Deferred header
# If bits follow an error (`ConstantError`), the fewest bits that keep it are known only after the values are measured.
# The kernel that measures them encodes them as well. On a GPU the computing thread must not wait for it, so the chosen
# bits travel to the host like the payload, and whoever needs them first waits: the sending thread writes the header
# when the payload is there, and the endpoint counts the packet's traffic when its bits are known. Until then the
# packet's buffer has room for the most bits, and `Packet.size` is an upper bound.
class DeferredHeader:
    """Header and length of a packet whose bits the encoding kernel chooses.

    Args:
        header: With any bits.
        codec: Codec of all rows.
        changes: Whether all rows are changes of cached values.
        first: Whether all rows are first visits of samples: the chosen bits go into the header's `first_bits`.
        head_bytes: Bytes of the payload before the rows.
    """

    def __init__(
        self,
        header: PacketHeader,
        codec: Quantized,
        *,
        changes: bool = False,
        first: bool = False,
        head_bytes: int = 0,
    ) -> None:
        self.header = header
        self.bits: Copy | None = None  # int64 [1]
        self._codec, self._changes, self._head_bytes = codec, changes, head_bytes
        self._field = "first_bits" if first else "bits"
        self._resolved: tuple[PacketHeader, int] | None = None

    @property
    def known(self) -> bool:
        """True once `resolve` does not wait."""
        return self._resolved is not None

    def resolve(self) -> tuple[PacketHeader, int]:
        """Wait for the bits; return the header and the packet's bytes. Any thread may call it."""
        if self._resolved is None:
            assert self.bits is not None
            bits = int(self.bits.wait())
            header = replace(self.header, **{self._field: bits})  # type: ignore[arg-type]
            rows = sum(s.count for s in header.samples)
            codec = self._codec.with_bits(bits)
            payload = self._head_bytes + codec.payload_bytes(rows, header.hidden, changes=self._changes)
            self._resolved = header, packet_bytes(len(header.samples), payload)
        return self._resolved


class Packet:
    """A packet between the kernels that write it and the transport that sends it, a PendingPacket.

    Attributes:
        header: Its header; with any bits if it is deferred.
        deferred: See Note: Deferred header.
        payload: uint8 on the device, for the kernels to write; until `close`.
        whole: The packet, if the kernels can write its checksum, see `ops.encode_batch`; until `close`.
        buffer: The packet on the host; complete after `finish`.
        settle: Waits until all values are known to be encodable, else raises NonFiniteError. Set by `close`; stores
            hold on to it, so it refers to nothing else of the packet.
    """

    def __init__(
        self, context: LinkContext, header: PacketHeader, payload_bytes: int, deferred: DeferredHeader | None = None
    ) -> None:
        self.header, self.deferred = header, deferred
        self._context, samples = context, len(header.samples)
        checksum = context.config.transport.checksum
        self.buffer = context.staging.buffer(packet_bytes(samples, payload_bytes))
        if deferred is None:
            write_header(self.buffer, header, checksum=checksum)
        self._target = torch.from_numpy(payload_view(self.buffer, samples))
        self.payload = context.staging.place(self._target)
        on_host = self.payload is self._target
        self.whole = torch.from_numpy(self.buffer) if checksum and on_host and deferred is None else None

    def close(self, flags: Sequence[FiniteFlag], at: Position, bits: Tensor | None = None) -> None:
        """Start copying the written packet to the host; where stages compute on the host, finish it.

        Args:
            flags: Flags of all values being encodable.
            at: Position in training, for errors.
            bits: The chosen ones, int64 [1], of a deferred packet.

        Raises:
            NonFiniteError: On the host only; otherwise `settle` and `finish` raise it.
        """
        staging = self._context.staging
        if self.deferred is not None and bits is not None:
            self.deferred.bits = staging.to_host(bits)
        self._copy = staging.to_host(self.payload, self._target)
        del self.payload, self.whole, self._target  # a packet may wait long for a slow link: it keeps no device memory
        self._has_checksum = any(flag.has_checksum for flag in flags)
        values = "gradients" if self.header.kind is PacketKind.GRADIENT else "activations"
        copies = [(flag, staging.to_host(flag.flag)) for flag in flags]
        self.settle = partial(_check_flags, copies, self._context.error(at, values))
        if staging.immediate:
            self.finish()

    @property
    def size(self) -> int:
        return self.buffer.size

    def finish(self) -> np.ndarray:
        self.settle()
        self._copy.wait()
        if self.deferred is not None:
            header, size = self.deferred.resolve()
            self.buffer = self.buffer[:size]
            write_header(self.buffer, header, checksum=self._context.config.transport.checksum)
        if not self._has_checksum:
            write_checksum(self.buffer)
        return self.buffer


def _check_flags(flags: list[tuple[FiniteFlag, Copy]], where: str) -> None:
    for flag, copy in flags:
        try:
            flag.check(copy.wait())
        except NonFiniteError as error:
            raise NonFiniteError(f"{where}: {error}") from error


class PacketLimits(NamedTuple):
    """The largest packet of a link, from the model and the batch that the ranks have agreed on.

    A header is compared with them before memory is allocated: a few bytes that claim gigabytes are refused.

    Attributes:
        samples: Samples of a training micro-batch.
        rows: Rows of a sample, padding included.
        width: Values of a row, exactly.
        changed: Entries of the stores that one check for drift compares.
        evaluated: Samples of an evaluation micro-batch; those of a training micro-batch are always allowed.
        documents: Documents of a packed micro-batch in training, which has at most the tokens of `samples`; 0 for
            `samples`.
    """

    samples: int
    rows: int
    width: int
    changed: int = 0
    evaluated: int = EVALUATED
    documents: int = 0

    @property
    def max_samples(self) -> int:
        """Samples of a packet of any kind."""
        return max(self.samples, self.documents, self.evaluated)

    def allowed_samples(self, *, packed: bool, training: bool) -> int:
        """Return the samples that a micro-batch may have."""
        most = max(self.samples, self.documents) if packed else self.samples
        return most if training else max(most, self.evaluated)

    def check(self, header: PacketHeader, rows: int) -> None:
        """Raise WireError if a packet claims more. rows: of each sample or packed row, as claimed."""
        training = header.kind is not PacketKind.EVAL_ACTIVATION
        most = self.allowed_samples(packed=header.packed, training=training)
        limit, claimed, what = self.rows, rows, "rows of a sample"
        if header.packed:
            limit *= self.samples if training else max(self.samples, self.evaluated)
            claimed, what = rows * header.rows, "rows of all samples"
        for name, got, allowed, ok in (
            ("samples", len(header.samples), f"at most {most}", len(header.samples) <= most),
            (what, claimed, f"at most {limit}", claimed <= limit),
            ("values of a row", header.hidden, str(self.width), header.hidden == self.width),
        ):
            if not ok:
                raise WireError(f"the {header.describe()} has {got} {name}; the agreed model and batch: {allowed}")

    def max_bytes(self, codecs: LinkCodecs, dtype: torch.dtype) -> int:
        """Return the length of the longest packet. dtype: of the stages."""
        samples = max(self.samples, self.evaluated)
        # After an overflow in FP16, plain values replace quantized ones.
        every = [Cast(dtype), codecs.activation(dtype), codecs.gradient(dtype), codecs.evaluation(dtype)]
        every += [deltas.first_visit(dtype) for deltas in (codecs.activations, codecs.gradients) if deltas is not None]
        with_head = (codecs.gradients, codecs.clustered)
        head = max((codec.head_bytes(samples * self.rows) for codec in with_head if codec is not None), default=0)
        payload = head + samples * max(codec.payload_bytes(self.rows, self.width) for codec in every)
        return max(
            packet_bytes(self.max_samples, payload), packet_bytes(0, self.changed * ROW_BYTES + _INVENTORY_BYTES)
        )
