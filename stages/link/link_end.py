"""What both ends of a link share of the samples that come back: how they are coded, and what is kept of them."""

from __future__ import annotations

from typing import Any

from pipecomp.config import Config
from pipecomp.messages.link_codecs import LinkCodecs
from pipecomp.stages.link.clusters import Clusters, clusters_of
from pipecomp.stages.link.endpoint import Endpoint
from pipecomp.stages.link.visits import visits_of


class LinkEnd(Endpoint):
    """One end of a link; see LinkSender and LinkReceiver."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clusters: Clusters | None = None  # in the place of samples' cached activations
        self._code_visits()

    def _code_visits(self) -> None:
        self._activations, self._gradients = visits_of(self, self._codecs)
        self._clusters = clusters_of(self, self._codecs, self._clusters)

    @property
    def keeps_samples(self) -> bool:
        """Whether entries of the store are samples', and not blocks of cluster centers."""
        return self._clusters is None

    def take_bits(self, config: Config) -> None:
        """Go on with this configuration's bits; both ends must do so between the same two packets."""
        self._config, self._codecs = config, LinkCodecs(config.activations, self.index, config.store.clusters)
        self._code_visits()
        if self.bounds is not None:
            self.limit(self.bounds, self._bounded_dtype)

    def end_step(self) -> None:
        """Keep what a step has changed beside samples; before its end is committed, or compared with the peer."""
        if self._clusters is not None:
            self._clusters.end_step()

    def reload(self) -> None:
        """Go on with what the store holds, which has changed otherwise than by packets."""
        if self._clusters is not None:
            self._clusters.reload()
