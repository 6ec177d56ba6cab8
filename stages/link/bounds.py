"""How large a packet of a link can be: it follows from the model and the batch that the ranks have agreed on.

What a packet says of itself is compared with that before memory is taken for it: a few bytes that announce gigabytes
are refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pipecomp.errors import WireError
from pipecomp.messages.codecs import Codec
from pipecomp.messages.link_codecs import LinkCodecs
from pipecomp.messages.wire import Header, Kind, packet_bytes

ROW_BYTES = 20  # of a sample in an inventory
EVALUATED = 64  # samples of a micro-batch in evaluation, whose size no configuration names, unless more are allowed
_INVENTORY_BYTES = 1 << 12  # of a part of the handshake beside its table


class Bounds(NamedTuple):
    """The most that a packet may hold.

    samples: of a training micro-batch. rows: of a sample, padding included. width: values of a row, exactly. changed:
    entries of the stores that both ends may compare in one check for drift. evaluated: samples of a micro-batch in
    evaluation; those of training may be evaluated too.
    """

    samples: int
    rows: int
    width: int
    changed: int = 0
    evaluated: int = EVALUATED

    @property
    def most_samples(self) -> int:
        """Of a packet of any kind; those of evaluation may have as many."""
        return max(self.samples, self.evaluated)

    def check(self, header: Header, rows: int) -> None:
        """WireError if a packet says that it holds more. rows: what it says of each sample."""
        most = self.most_samples if header.kind is Kind.EVAL_ACTIVATION else self.samples
        for what, got, allowed, ok in (
            ("samples", len(header.samples), f"at most {most}", len(header.samples) <= most),
            ("rows of a sample", rows, f"at most {self.rows}", rows <= self.rows),
            ("values of a row", header.hidden, str(self.width), header.hidden == self.width),
        ):
            if not ok:
                raise WireError(f"the {header.describe()} has {got} {what}; the agreed model and batch: {allowed}")

    def _bytes(self, codec: Codec) -> int:
        return codec.payload_bytes(self.rows, self.width)

    def most_bytes(self, codecs: LinkCodecs, dtype: torch.dtype) -> int:
        """Length of the longest packet. dtype: the stages' own."""
        samples = self.most_samples
        every = [codecs.activation(dtype), codecs.activations.first_visit(dtype)]
        every += [codecs.gradient(dtype), codecs.evaluation(dtype)]
        head = 0
        if codecs.gradients is not None:
            every.append(codecs.gradients.first_visit(dtype))
            head = codecs.gradients.head_bytes(samples * self.rows)
        if codecs.clustered is not None:
            head = codecs.clustered.head_bytes(samples * self.rows)
        # An overflow in FP16 sends plain values where quantized ones are usual.
        payload = head + samples * max(
            self.rows * self.width * dtype.itemsize, *(self._bytes(codec) for codec in every)
        )
        return max(packet_bytes(samples, payload), packet_bytes(0, self.changed * ROW_BYTES + _INVENTORY_BYTES))
