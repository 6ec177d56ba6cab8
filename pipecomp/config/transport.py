"""The section "transport": how bytes travel between stages."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from pipecomp.config.checks import OneOf, Section
from pipecomp.utils.activity import DATA_TIMEOUT_S


class TransportConfig(Section):
    """Transport of bytes between stages.

    Attributes:
        backend: "tls" encrypts all traffic between ranks and admits only machines with keys of this run; "gloo" sends
            plain TCP from host memory; "auto" is "tls" if PIPECOMP_KEYS names a folder of keys, else "gloo".
        checksum: protect every packet by a CRC-32.
        timeout_s: seconds of silence after which a peer counts as lost; three quarters of that in a collective over
            gloo.
        data_timeout_s: seconds after which a rank that waits for its own data ends the run, in a callback, at a disk or
            in reading the model three times as long; None for no limit.
        keys: this machine's folder of keys, for "tls"; None: PIPECOMP_KEYS.
        streams: TCP connections of a link that its packets are spread over, for long lines that one does not fill;
            "auto" measures at the start.
        trusted_network: allow "gloo" at an address that is reachable from the internet.
    """

    section: ClassVar[str] = "transport"

    backend: Annotated[str, OneOf(("auto", "gloo", "tls"))] = "auto"
    checksum: bool = True
    timeout_s: int | float = Field(default=120.0, ge=1, le=86400, description="seconds from 1 to 86400")
    data_timeout_s: int | float | None = Field(
        default=DATA_TIMEOUT_S, ge=1, le=86400, description="null or seconds from 1 to 86400"
    )
    streams: Annotated[int, Field(ge=1, le=8)] | Annotated[str, OneOf(("auto",))] = Field(
        default="auto", description="'auto' or a whole number from 1 to 8"
    )
    keys: str | None = Field(default=None, min_length=1, description="null or a folder")
    trusted_network: bool = False

    def check_given(self) -> None:
        """Reject keys that have no effect with the backend."""
        if self.backend == "tls":
            self.refuse_given(("trusted_network",), "only with backend 'gloo', not 'tls'")
        else:
            self.refuse_given(("keys",), f"only with backend 'tls', not {self.backend!r}")
