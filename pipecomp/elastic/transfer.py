"""Threads that send and receive records, block by block.

message: kind u8, 3 bytes zero, payload bytes u32, base step i64 (-1 for none), number u64; payload
BEGIN    the record's header, compressed; number: its length
BLOCK    see `elastic.delta`
END      no payload; number: CRC-32 of the record
CANCEL   no payload: the run ends
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pipecomp.allreduce.group import Group
from pipecomp.elastic.delta import BLOCK_BYTES, OVERHEAD_BYTES, decode_block, encode_block, inflate
from pipecomp.elastic.index import RecordFolder
from pipecomp.elastic.record import MAX_HEADER_BYTES, RecordHeader, RecordWriter, StateRecord
from pipecomp.elastic.schedule import LineShare
from pipecomp.errors import WireError, write_error

NO_BASE = -1
_PREFIX = struct.Struct("<BxxxIqQ")
_BEGIN, _BLOCK, _END, _CANCEL = range(1, 5)
_LIMITS = {_BEGIN: MAX_HEADER_BYTES, _BLOCK: BLOCK_BYTES + OVERHEAD_BYTES, _END: 0, _CANCEL: 0}
_QUEUED = 1  # records that wait, in memory, while one is being sent


@dataclass(frozen=True, kw_only=True)
class HomePlan:
    """The second home of each rank's records.

    Attributes:
        rank, stage, cuts: This rank, its stage, and the blocks at which the model is cut.
        homes: Second home of each rank.
        limits: Largest data of each rank's record, in bytes.
        timeout_s: Silence of a rank after which it is lost.
        stall_s: Longest wait at the end of the run while nothing moves.
    """

    rank: int
    stage: int
    cuts: tuple[int, ...]
    homes: Sequence[int]
    limits: Sequence[int]
    timeout_s: float
    stall_s: float = 120.0

    @property
    def sources(self) -> list[int]:
        """The ranks whose second home this rank is."""
        return [source for source, home in enumerate(self.homes) if home == self.rank]


class RecordJob(NamedTuple):
    """A record to send, or to receive. base: step of the record that both ends have."""

    step: int
    session: str
    checkpoint: str | None
    base: int
    record: StateRecord | None

    def without_record(self) -> RecordJob:
        """Return the job of the rank that receives."""
        return self._replace(record=None)


class _CancelledError(Exception):
    """The run ends before the record has arrived."""


class RecordWorker(ABC):
    """A thread that handles jobs in order.

    Attributes:
        peer: Rank at the other end.
        failure: Why it handles no more jobs; None while it does.
        problem: Why a record is missing; the next one may succeed.
        checkpoints: Folders of checkpoints whose records are queued or being handled, by step.
    """

    def __init__(self, group: Group, folder: RecordFolder, peer: int, name: str) -> None:
        self.group, self.folder, self.peer = group, folder, peer
        self.failure: str | None = None
        self.problem: str | None = None
        self.checkpoints: dict[int, str] = {}
        self._jobs: queue.Queue[RecordJob | None] = queue.Queue()
        self._ending = False
        self._received_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"pipecomp-{name}-{peer}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while records are queued or being handled."""
        return self.failure is None and self._jobs.unfinished_tasks > 0

    def put(self, job: RecordJob) -> None:
        """Queue a job, after waiting for room."""
        if job.checkpoint is not None:
            self.checkpoints[job.step] = job.checkpoint
        self.wait_for_room()
        self._jobs.put(job)

    def wait_for_room(self) -> None:
        """Wait until a job can be queued; called before a record is made, which takes memory."""
        while self.failure is None and self._jobs.unfinished_tasks > _QUEUED:
            time.sleep(0.01)

    def end(self, *, failed: bool) -> None:
        """Let the thread end after the jobs that are queued."""
        if failed:
            self.failure = self.failure or "the run has failed"
        if not self._ending:
            self._ending = True
            self._jobs.put(None)

    def join(self, stall_s: float) -> None:
        """Wait for the thread's end, as long as bytes move: at most `stall_s` seconds without any."""
        before, since = -1, time.monotonic()
        while self._thread.is_alive() and time.monotonic() - since < stall_s:
            self._thread.join(0.02)
            if self.moved_bytes != before:
                before, since = self.moved_bytes, time.monotonic()

    @property
    def moved_bytes(self) -> int:
        """Bytes that were sent or received so far."""
        return self.group.bytes_sent + self._received_bytes

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            try:
                if self.failure is None:
                    self.handle(job)
            except _CancelledError:
                pass
            except Exception as error:
                self.failure = self.failure or f"{type(error).__name__}: {error}"
            finally:
                del job  # the record's memory
                self._jobs.task_done()
        self._jobs.task_done()

    @abstractmethod
    def handle(self, job: RecordJob) -> None:
        """Handle a job. Any error ends the worker's use."""

    def list(self, record: StateRecord) -> None:
        """List a record that has been written."""
        step = record.info.step
        self.folder.add(record, self.checkpoints.get(step))
        self.checkpoints = {later: folder for later, folder in self.checkpoints.items() if later >= step}


class RecordSender(RecordWorker):
    """Writes and sends this rank's records.

    Attributes:
        last: Bytes of the last record on the line, seconds in which it was leaving, and all seconds; None before.
        records, sent_bytes, raw_bytes: Totals.
    """

    def __init__(self, group: Group, folder: RecordFolder, share: LineShare, peer: int) -> None:
        self.share = share
        self.last: list[float] | None = None
        self.records = self.sent_bytes = self.raw_bytes = 0
        super().__init__(group, folder, peer, "send-record")

    def end(self, *, failed: bool) -> None:
        """Let the thread end; records that no checkpoint needs are cancelled."""
        self.share.stopped = True
        super().end(failed=failed)

    def handle(self, job: RecordJob) -> None:
        """Write and send a record."""
        record = job.record
        assert record is not None
        began, line_s, before = time.monotonic(), self.share.line_s, self.sent_bytes
        base = self._base(job, record.header)  # before it is overwritten by another record of the same step
        try:
            record.write(self.folder.path)
            self.list(record)
        except OSError as error:  # the second home has it nevertheless
            self.problem = f"its record of step {job.step} is not written: {write_error(error, str(self.folder.path))}"
        self._send(_BEGIN, zlib.compress(record.header.text), job, number=len(record.header.text))
        for begin, end, itemsize in record.header.blocks():
            if self._ending and job.step not in self.checkpoints:
                self._send(_CANCEL, b"", job)
                raise _CancelledError
            old = None if base is None else base.data[begin:end]
            self._send(_BLOCK, encode_block(record.data[begin:end], old, itemsize), job, based=base is not None)
        self._send(_END, b"", job, number=record.crc)
        self.records += 1
        self.raw_bytes += record.header.data_bytes
        self.last = [self.sent_bytes - before, self.share.line_s - line_s, time.monotonic() - began]

    def _base(self, job: RecordJob, header: RecordHeader) -> StateRecord | None:
        base = None if job.base == NO_BASE else self.folder.open(job.base, header.info.rank)
        return base if base is not None and base.header.tensors == header.tensors else None

    def _send(self, kind: int, payload: bytes, job: RecordJob, *, number: int = 0, based: bool = False) -> None:
        if self.failure is not None:
            raise _CancelledError
        prefix = _PREFIX.pack(kind, len(payload), job.base if based else NO_BASE, number)
        for data in filter(None, (prefix, payload)):
            tensor = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
            pending = self.group.exchange([torch.empty(0, dtype=torch.uint8), tensor], [0, 0])
            pending.finish()
            self.group.wait_until_sent()
            self.share.left()
            self.sent_bytes += len(data)


class _Message(NamedTuple):
    kind: int
    base: int
    number: int
    payload: memoryview


class RecordReceiver(RecordWorker):
    """Takes the records of one rank. Memory is allocated only for a header or a block."""

    def __init__(self, group: Group, folder: RecordFolder, plan: HomePlan, source: int) -> None:
        self._plan = plan
        super().__init__(group, folder, source, "receive-record")

    def handle(self, job: RecordJob) -> None:
        """Receive and write a record; one that cannot be used is discarded, and the next one will be whole."""
        message = self._receive(_BEGIN, _CANCEL)
        if message.kind == _CANCEL:
            return
        if not 0 < message.number <= MAX_HEADER_BYTES:
            raise WireError(f"rank {self.peer} sent a record with a header of {message.number} bytes")
        header = RecordHeader.parse(inflate(message.payload, message.number))
        self._check(header, job)
        writer: RecordWriter | None = None
        base: StateRecord | None = None
        try:
            writer = RecordWriter(self.folder.path, header)
        except OSError as error:
            self._discard(job, error)
        for begin, end, itemsize in header.blocks():
            message = self._receive(_BLOCK, _CANCEL)
            if message.kind == _CANCEL:
                if writer is not None:
                    writer.abort()
                return
            if writer is None:
                continue  # the sender cannot be stopped before the end of its record
            try:
                if message.base != NO_BASE and base is None:
                    base = self._base(message.base, header)
                old = base.data[begin:end] if base is not None and message.base != NO_BASE else None
                writer.write(decode_block(message.payload, old, end - begin, itemsize))
            except (OSError, WireError) as error:
                with contextlib.suppress(OSError):
                    writer.abort()
                writer = None
                self._discard(job, error)
        message = self._receive(_END, _CANCEL)
        if writer is None:
            return
        if message.kind == _CANCEL:
            writer.abort()
            return
        try:
            writer.finish(message.number)
            self.list(StateRecord.open(self.folder.path / header.info.file_name))
        except (OSError, WireError) as error:
            self._discard(job, error)

    def _check(self, header: RecordHeader, job: RecordJob) -> None:
        """Raise WireError for a record that is not the expected one."""
        info, limit = header.info, self._plan.limits[self.peer]
        expected = (job.session, job.step, self.peer, len(self._plan.homes))
        if (info.session, info.step, info.rank, info.world) != expected:
            raise WireError(f"rank {self.peer} sent the record of rank {info.rank}, step {info.step}")
        if header.data_bytes > limit:
            raise WireError(f"rank {self.peer} announces a record of {header.data_bytes} bytes, allowed: {limit}")

    def _base(self, step: int, header: RecordHeader) -> StateRecord:
        base = self.folder.open(step, self.peer)
        if base is None or base.header.tensors != header.tensors:
            self.folder.forget(step, self.peer)  # the next record will be whole
            raise WireError(f"the record of step {step}, on which it is based, is missing or damaged")
        return base

    def _discard(self, job: RecordJob, error: Exception) -> None:
        text = write_error(error, str(self.folder.path)) if isinstance(error, OSError) else str(error)
        self.problem = f"the record of rank {self.peer} of step {job.step} is discarded: {text}"

    def _receive(self, *kinds: int) -> _Message:
        prefix = self._bytes(_PREFIX.size)
        kind, size, base, number = _PREFIX.unpack(prefix)
        if kind not in kinds or size > _LIMITS[kind]:
            raise WireError(f"rank {self.peer} sent a message of kind {kind} with {size} bytes in a record")
        return _Message(kind, base, number, self._bytes(size) if size else memoryview(b""))

    def _bytes(self, size: int) -> memoryview:
        if self.failure is not None:
            raise _CancelledError
        empty = torch.empty(0, dtype=torch.uint8)
        pending = self.group.exchange([empty, empty], [size, 0])
        data, _ = pending.wait()
        self._received_bytes += size
        return memoryview(data.numpy())
