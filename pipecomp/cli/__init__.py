"""The `pipecomp` command."""

from pipecomp.cli.commands import app

__all__ = ["app"]
