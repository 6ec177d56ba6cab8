"""What both ends of a link share of the samples that come back: how they are coded, and what is kept of them."""

from __future__ import annotations

from typing import Any

from pipecomp.codecs.wire import Kind
from pipecomp.stages.link.clusters import Clusters
from pipecomp.stages.link.endpoint import Endpoint, Position
from pipecomp.stages.link.visits import Visits


class LinkEnd(Endpoint):
    """One end of a link; see LinkSender and LinkReceiver."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._activations = Visits(self, Kind.ACTIVATION)
        self._gradients = None if self.codecs.gradients is None else Visits(self, Kind.GRADIENT)
        # Of micro-batches whose gradients the receiver is to send, where these are kept.
        self._versions: dict[Position, list[int]] = {}
        # In the place of samples' cached activations.
        self._clusters = None if self.codecs.clustered is None else Clusters(self)

    @property
    def keeps_samples(self) -> bool:
        """Whether entries of the store are samples', and not blocks of cluster centers."""
        return self._clusters is None

    def end_step(self) -> None:
        """Keep what a step has changed beside samples; before its end is committed, or compared with the peer."""
        if self._clusters is not None:
            self._clusters.end_step()

    def reload(self) -> None:
        """Go on with what the store holds, which has changed otherwise than by packets."""
        if self._clusters is not None:
            self._clusters.reload()
