"""How large a packet of a link can be: it follows from the model and the batch that the ranks have agreed on.

What a packet says of itself is compared with that before memory is taken for it: a few bytes that announce gigabytes
are refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pipecomp.codecs.codecs import Cast
from pipecomp.codecs.link_codecs import LinkCodecs
from pipecomp.codecs.wire import Header, Kind, packet_bytes
from pipecomp.errors import WireError

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

    def most_bytes(self, codecs: LinkCodecs, dtype: torch.dtype) -> int:
        """Length of the longest packet. dtype: the stages' own."""
        samples = self.most_samples
        # An overflow in FP16 sends plain values where quantized ones are usual.
        every = [Cast(dtype), codecs.activation(dtype), codecs.gradient(dtype), codecs.evaluation(dtype)]
        every += [visits.first_visit(dtype) for visits in (codecs.activations, codecs.gradients) if visits is not None]
        with_head = (codecs.gradients, codecs.clustered)
        head = max((codec.head_bytes(samples * self.rows) for codec in with_head if codec is not None), default=0)
        payload = head + samples * max(codec.payload_bytes(self.rows, self.width) for codec in every)
        return max(packet_bytes(samples, payload), packet_bytes(0, self.changed * ROW_BYTES + _INVENTORY_BYTES))
