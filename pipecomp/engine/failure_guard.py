"""The part of the engine that ends all ranks when one fails, each with an error that says which and why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pipecomp.cluster.failure import find_lost, linger, of_a_collective, report_lost, report_stopped
from pipecomp.cluster.heartbeat import Heartbeat
from pipecomp.engine.reduction import ReducingEngine
from pipecomp.errors import PeerLostError, PipecompError
from pipecomp.stages.link.links import Links

_FIND_LOST_S = 8.0  # for the other ranks to notice that one is gone
_LINGER_S = 5.0  # for them to ask which


class GuardedEngine(ReducingEngine):
    """Wraps what all ranks do together, so that the failure of one is known to all."""

    def __init__(self, **more: Any) -> None:
        self.links = Links()
        self.watch: Heartbeat | None = None
        self._watched = 0  # this engine's number there
        self._depth = 0
        super().__init__(**more)

    @contextlib.contextmanager
    def propagate_failure(self) -> Iterator[None]:
        """Whatever ends a step here, the neighbours learn of it, and the first lost rank is what is raised."""
        if self._depth:  # the outer one does it
            yield
            return
        self._depth = 1
        try:
            if self.watch is not None:
                self.watch.enter()
            yield
        except Exception as error:
            if self.watch is not None:
                self.watch.leave()  # what follows takes its time, but does not hang
            report_stopped(f"{type(error).__name__}: {error}")
            cause = self._first_cause(error)
            lost, reason = self.global_rank, f"rank {self.global_rank} stopped: {type(cause).__name__}: {cause}"
            if isinstance(cause, PeerLostError):
                lost, reason = cause.rank, str(cause)
            report_lost(lost, reason)
            self.links.abort(lost, reason)
            if self.watch is not None:
                self.watch.stopped(lost, reason)
            linger(lost, _LINGER_S)
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._depth = 0
            if self.watch is not None:
                self.watch.leave()

    def _first_cause(self, error: Exception) -> Exception:
        """A failed collective says little; the links, or the silence of a rank, tell who was lost."""
        if isinstance(error, PipecompError) or not of_a_collective(error):
            return error
        known = None if self.watch is None else self.watch.lost
        return self.links.failure(wait_s=1.0) or known or find_lost(_FIND_LOST_S) or error

    def close(self) -> None:
        """Finish the stores and end the connections in order; safe to call twice. Runs at exit by itself."""
        if self.watch is not None:
            self.watch.close(self._watched)
        self.links.close()
        if self._exchange is not None:
            self._exchange.close()
