"""Ends all ranks when one fails, each with an error that says which and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from pipecomp.distributed.failure import find_lost, linger, of_a_collective, report_lost, report_stopped
from pipecomp.distributed.heartbeat import Heartbeat
from pipecomp.errors import OutputError, PeerLostError, PipecompError
from pipecomp.stages.link.links import Links

_FIND_LOST_S = 8.0  # for the other ranks to notice that one is gone


class FailureGuard:
    """Wraps what all ranks do together, so that the failure of one is known to all.

    rank: this one. device: on which it computes. `watch` gives it links and heartbeat once they are there; before that
    it tells by the store alone.

    Attributes:
        failed: Whether training has ended by an error, here or on another rank.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._links = Links()
        self._heartbeat: Heartbeat | None = None
        self._engine = 0  # this engine's number there
        self._depth = 0
        self.failed = False

    def missed(self, rank: int) -> PipecompError | None:
        """Why a rank will not answer, as far as the heartbeat knows."""
        return None if self._heartbeat is None else self._heartbeat.missed(rank)

    def watch(self, links: Links, heartbeat: Heartbeat) -> None:
        """Tell neighbours through these links, and all ranks through this heartbeat."""
        self._links, self._heartbeat, self._engine = links, heartbeat, heartbeat.engine
        heartbeat.on_exit, heartbeat.on_told = links.close, links.failed

    @contextlib.contextmanager
    def propagate_failure(self) -> Iterator[None]:
        """Whatever ends a step here, the neighbours learn of it, and the first lost rank is what is raised."""
        if self._depth:  # the outer one does it
            yield
            return
        self._depth = 1
        computing = None
        try:
            if self._heartbeat is not None:
                self._heartbeat.enter()
            yield
            computing = _computing(self._device)
        except OutputError:  # all ranks have it, at the same place, and nothing else is wrong
            raise
        except Exception as error:
            cause = self._tell(error)
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._depth = 0
            if self._heartbeat is not None:
                self._heartbeat.leave(computing)

    def _tell(self, error: Exception) -> Exception:
        """Tell all ranks that this one's training ends; returns what to raise."""
        self.failed = True
        if self._heartbeat is not None:
            self._heartbeat.leave()  # what follows takes its time, but does not hang
        report_stopped(f"{type(error).__name__}: {error}")
        cause = self._first_cause(error)
        lost, reason = self._rank, f"rank {self._rank} stopped: {type(cause).__name__}: {cause}"
        if isinstance(cause, PeerLostError):
            lost, reason = cause.rank, str(cause)
        report_lost(lost, reason)
        self._links.abort(lost, reason)
        if self._heartbeat is not None:
            self._heartbeat.stopped(lost, reason)
        linger(lost)
        return cause

    def _first_cause(self, error: Exception) -> Exception:
        """Find out who was lost: a failed collective says little; the links, or the silence of a rank, tell."""
        lost = None if self._heartbeat is None else self._heartbeat.lost
        if isinstance(error, PeerLostError):  # whom it waited for may have ended because another rank was lost
            return lost or error
        if isinstance(error, PipecompError) or not of_a_collective(error):
            return error
        signs = () if self._heartbeat is None else (self._heartbeat.last_sign,)
        return self._links.failure(wait_s=1.0) or lost or find_lost(_FIND_LOST_S, *signs) or error

    def close(self) -> None:
        """End in order: finish the stores, end the connections; safe to call twice."""
        if self._heartbeat is not None:
            self._heartbeat.close(self._engine)
        self._links.close()
        self._links = Links()  # until the program ends it is known where engines are closed


def _computing(device: torch.device) -> Callable[[], bool] | None:
    """Whether a GPU still does what it has been given so far; None on the host, which has done it.

    NCCL's collectives wait for other ranks on the GPU: who then reads a loss waits as long.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        given = torch.cuda.Event()
        given.record(torch.cuda.current_stream(device))

    def computing() -> bool:
        try:
            with torch.cuda.device(device):
                return not given.query()
        except RuntimeError:  # of something before it on the GPU; whoever reads a result gets it
            return False

    return computing
