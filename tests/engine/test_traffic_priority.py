"""What replicas exchange waits while a packet of the pipeline is leaving, and no longer than it may."""

from __future__ import annotations

import threading
import time

from pipecomp.engine import local_steps
from pipecomp.engine.local_steps import TrafficPriority


class Line:
    """A transport that sends until it is told that it has."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.over = threading.Event()

    def sending(self) -> bool:
        self.asked.set()
        return not self.over.is_set()


def test_a_message_waits_until_every_packet_has_left(monkeypatch):
    monkeypatch.setattr(local_steps, "MAX_WAIT_S", 1e6)
    lines = [Line(), Line()]
    gate = TrafficPriority(lines)
    waiting = threading.Thread(target=gate.wait)
    waiting.start()
    for line in lines:
        assert line.asked.wait(60), "not asked"
        assert waiting.is_alive(), "a packet was leaving"
        line.over.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert gate.waited_s > 0


def test_a_link_that_is_never_free_does_not_hold_it_up_for_ever(monkeypatch):
    monkeypatch.setattr(local_steps, "MAX_WAIT_S", 0.05)
    gate = TrafficPriority([Line()])
    began = time.monotonic()
    gate.wait()
    assert time.monotonic() - began >= 0.05


def test_nothing_waits_without_packets():
    gate = TrafficPriority([])
    gate.wait()
    assert gate.waited_s < local_steps.MAX_WAIT_S
