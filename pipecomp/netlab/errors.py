"""What can go wrong in a network lab itself."""

from __future__ import annotations

from pipecomp.errors import PipecompError


class NetlabError(PipecompError, RuntimeError):
    """The lab cannot be made or used on this machine; the message says what is missing and what works without it."""
