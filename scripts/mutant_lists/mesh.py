"""Defects in pipecomp/mesh/: messages under TLS."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

LIMITS = ("tests/mesh/test_mesh.py::TestLimits",)
_INBOX = "pipecomp/mesh/inbox.py"

MUTANTS = (
    Mutant(
        "no limit for a packet over TLS",
        _INBOX,
        "if total > sink.most_bytes:",
        "if False:",
        LIMITS,
        "a rank takes memory for whatever another one announces",
    ),
    Mutant(
        "a message shorter than its receive",
        _INBOX,
        "if size != total:",
        "if size < total:",
        LIMITS,
        "a collective goes on with a buffer's old bytes behind the message",
    ),
    Mutant(
        "an early message shorter than its receive",
        _INBOX,
        "if len(transfer.view) != data.size:",
        "if len(transfer.view) < data.size:",
        LIMITS,
        "a collective goes on with a buffer's old bytes behind the message",
    ),
    Mutant(
        "a message that becomes shorter on the way",
        _INBOX,
        "if len(arriving.view) != header.total or",
        "if len(arriving.view) < header.total or",
        LIMITS,
        "a message ends before all of its bytes are there",
    ),
    Mutant(
        "a receive longer than the message for it",
        "pipecomp/mesh/outbox.py",
        "if lane.asked[0] != size:",
        "if lane.asked[0] < size:",
        LIMITS,
        "ranks that disagree on a message's length are not told which",
    ),
)
