"""Ends all ranks when one fails, each with an error that names the rank and the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from pipecomp.distributed.collectives import open_groups
from pipecomp.distributed.heartbeat import FailureReport, Heartbeat, is_collective_error
from pipecomp.distributed.preemption import wait_if_ending
from pipecomp.errors import LinkTimeoutError, OutputError, PeerLostError, PipecompError
from pipecomp.stages.link.links import Links

_CLOSED_S = 0.5  # for a connection to a killed rank to close
_FIND_LOST_S = 8.0  # for the other ranks to notice that one is gone
_SMALL_PACKET = 400  # characters of a heartbeat entry that fits into a packet of 576 bytes


class FailureGuard:
    """Wraps the calls that all ranks make together, so that all ranks learn of the failure of one.

    Args:
        rank: This rank.
        device: Its device.

    Attributes:
        failed: Whether an error has ended training, here or on another rank.
        groups: Process groups made for the engine.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._links = Links()
        self._heartbeat: Heartbeat | None = None
        self._engine = 0  # number of this engine in the heartbeat
        self._depth = 0
        self.failed = False
        self.groups: set[dist.ProcessGroup] = set()

    def missed(self, rank: int) -> PipecompError | None:
        """Return the heartbeat's reason why a rank will not answer, None if it has none."""
        return None if self._heartbeat is None else self._heartbeat.missed(rank)

    def watch(self, links: Links, heartbeat: Heartbeat) -> None:
        """Report to neighbours through `links`, and to all ranks through `heartbeat`."""
        self._links, self._heartbeat, self._engine = links, heartbeat, heartbeat.engine
        heartbeat.on_exit, heartbeat.on_report = self._exit, links.failed
        heartbeat.find_failure = partial(links.failure, _CLOSED_S)

    def _exit(self, report: FailureReport) -> None:
        """Report to the neighbors why this process ends, and finish the stores."""
        self._links.abort(report.rank, report.reason)
        self._links.close()

    @contextlib.contextmanager
    def propagate_failure(self) -> Iterator[None]:
        """Report an error of the body to all ranks. If a rank was lost, raise the error of the first lost rank instead.

        An OutputError is raised unchanged, without a report: all ranks raise it together, and training can continue.
        """
        if self._depth:  # the outermost one handles it
            yield
            return
        self._depth = 1
        computing = None
        try:
            if self._heartbeat is not None:
                self._heartbeat.enter()
            yield
            computing = _gpu_busy(self._device)
        except OutputError:
            raise
        except Exception as error:
            cause = self._report(error)
            if cause is not error:
                raise cause from error
            raise
        finally:
            self._depth = 0
            if self._heartbeat is not None:
                self._heartbeat.leave(computing)

    def report(self, error: BaseException) -> None:
        """Report an error that ends this rank's program outside of the engine, unless training has failed already."""
        if not self.failed and self._heartbeat is not None and self._engine == self._heartbeat.engine:
            self._report(error)

    def _report(self, error: BaseException) -> BaseException:
        """Report to all ranks that training ends here; returns the error to raise."""
        wait_if_ending()  # the error follows from it
        self.failed = True
        if self._heartbeat is not None:
            self._heartbeat.leave()  # the rest takes time, but cannot hang
            self._heartbeat.stop()
        cause = self._first_cause(error)
        if isinstance(cause, LinkTimeoutError) and cause.rank is not None and self._heartbeat is not None:
            cause.args = (f"{cause}{self._heartbeat.explain_silence(cause.rank)}",)
        lost, reason = self._rank, f"rank {self._rank} stopped: {type(cause).__name__}: {cause}"
        if isinstance(cause, LinkTimeoutError):  # large packets may not get through
            reason = reason[:_SMALL_PACKET]
        if isinstance(cause, PeerLostError):
            lost, reason = cause.rank, str(cause)
        if self._heartbeat is not None:
            self._heartbeat.stop(FailureReport(lost, reason))
        self._links.abort(lost, reason)
        if self._heartbeat is not None:
            if isinstance(cause, (LinkTimeoutError, PeerLostError)) and cause.rank not in (None, self._rank):
                cause.args = (". ".join(filter(None, (str(cause), self._heartbeat.describe(cause.rank)))),)
            self._heartbeat.linger(lost)
        return cause

    def _first_cause(self, error: BaseException) -> BaseException:
        """Find the rank that was lost first. A failed collective does not name it; links and silence do."""
        lost = None if self._heartbeat is None else self._heartbeat.lost
        if isinstance(error, PeerLostError):  # the peer may have ended because another rank was lost
            return lost or (self._heartbeat and self._heartbeat.find_report(error.rank, _FIND_LOST_S)) or error
        if isinstance(error, PipecompError) or not isinstance(error, Exception) or not is_collective_error(error):
            return error
        known = self._links.failure(wait_s=1.0) or lost
        if known is None and self._heartbeat is not None:
            known = self._heartbeat.find_lost(_FIND_LOST_S)
        return known or error

    def close(self) -> None:
        """Finish the stores and close the connections in order; may be called twice."""
        if self._heartbeat is not None:
            self._heartbeat.close(self._engine)
        self._links.close()
        self._links = Links()  # the heartbeat still counts closed engines

    def destroy_groups(self) -> None:
        """Destroy the engine's process groups; call `close` first. After a failure, keep them: they may be in use."""
        if not self.failed:
            for group in self.groups & open_groups():
                dist.destroy_process_group(group)
        self.groups = set()


def _gpu_busy(device: torch.device) -> Callable[[], bool] | None:
    """A function that returns whether a GPU still runs the work queued so far; None without a GPU.

    NCCL's collectives wait for other ranks on the GPU, and so does the host when it reads a loss.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        queued = torch.cuda.Event()
        queued.record(torch.cuda.current_stream(device))

    def busy() -> bool:
        try:
            with torch.cuda.device(device):
                return not queued.query()
        except RuntimeError:  # an earlier operation failed; reading a result raises its error
            return False

    return busy
