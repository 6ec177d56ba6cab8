"""The section "store": cached activations of "aqsgd" at both ends of a link."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from pipecomp.config.checks import OneOf, Section
from pipecomp.errors import require

MAX_CLUSTERS = 1 << 16
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Store(Section):
    """Storage of the cached activations of "aqsgd" at both ends of a link.

    Attributes:
        backend: "lmdb" (on disk, survives restarts) or "memory".
        path: folder for "lmdb"; each rank writes to a subfolder.
        bits: 2, 4, 8, 16 or 32 bits per stored value (paper, H.5).
        max_bytes: budget per link end; None for no limit.
        prefetch: micro-batches whose cached activations are loaded ahead; 0 for none.
        drift_check: steps between comparisons of both ends' digests of changed activations; None for never.
        in_checkpoints: copy the store into every checkpoint, so that resumed training has the same losses; a checkpoint
            then needs as much space again.
        run: name of the run; a store of a run with another name is refused. None: a random name, which resuming from a
            checkpoint takes from there.
        overwrite: remove what another run has stored at `path` before this one begins.
        on_write_error: "stop", or "continue" without storing new samples while the disk refuses writes.
        pinned_bytes: limit of pinned host memory through which a rank's links, stores and compressed gradients reach
            its GPU; None for 256 MiB. torch pins more for batches and gloo's collectives. Refused on the CPU, where it
            has no effect.
        clusters: keep this many cluster centers of tokens' activations in place of all samples; None to keep samples
            (docs/algorithms.md, 1.8).
    """

    section: ClassVar[str] = "store"

    backend: Annotated[str, OneOf(("lmdb", "memory"))] = "lmdb"
    path: str = Field(default="messages", pattern=r"^[^\x00]+$", description="a folder name, without zero bytes")
    bits: int = Field(default=32, description="2, 4, 8, 16 or 32")
    max_bytes: int | None = Field(default=None, ge=1, description="null or a number of bytes above 0")
    prefetch: int = Field(default=2, ge=0, le=64)
    drift_check: int | None = Field(default=10, ge=1, description="null or a number of steps of at least 1")
    in_checkpoints: bool = False
    run: str | None = None
    overwrite: bool = False
    on_write_error: Annotated[str, OneOf(("stop", "continue"))] = "stop"
    pinned_bytes: int | None = Field(default=None, ge=1, description="null or a number of bytes above 0")
    clusters: int | None = Field(
        default=None, ge=2, le=MAX_CLUSTERS, description=f"null or a power of two from 2 to {MAX_CLUSTERS}"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(self.bits in (2, 4, 8, 16, 32), "bits", self.bits, "2, 4, 8, 16 or 32")
        ok = self.run is None or RUN_NAME.fullmatch(self.run) is not None
        require(ok, "run", self.run, "null or a name of letters, digits, '.', '_' and '-', at most 64")
        ok = self.clusters is None or self.clusters.bit_count() == 1
        hint = "A token's center is numbered in whole bits."
        require(ok, "clusters", self.clusters, f"null or a power of two from 2 to {MAX_CLUSTERS}", hint)
        return self

    def check_given(self) -> None:
        """Reject keys about files with the memory backend, and keys about samples with clusters."""
        if self.backend == "memory":
            keys = ("path", "run", "overwrite", "in_checkpoints", "on_write_error")
            self.refuse_given(keys, "only with backend 'lmdb', not 'memory'")
        if self.clusters is None:
            return
        hint = "The centers take little space."
        require(self.bits == 32, "store.bits", self.bits, "32 with store.clusters", hint)
        self.refuse_given(("max_bytes",), "not with store.clusters, whose size is fixed")
        self.refuse_given(("prefetch",), "not with store.clusters, whose centers are in memory")
        hint = "The centers move with every packet, so a lost write would make both ends differ."
        allowed = "'stop' with store.clusters"
        require(self.on_write_error == "stop", "store.on_write_error", self.on_write_error, allowed, hint)
