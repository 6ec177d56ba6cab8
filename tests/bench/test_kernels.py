"""Timing of kernels, and their settings."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from pipecomp.bench import kernels


def test_the_gpu_is_kept_busy_until_the_host_has_asked_for_all(monkeypatch):
    """Without that, what is timed on a fast GPU is the host."""
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, other):
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"sleep {cycles >= 10**6}"))
    flush = SimpleNamespace(zero_=lambda: order.append("flush"))
    assert kernels.device_seconds(flush, lambda: order.append("call")) == 0.003
    assert order == ["flush", "sleep True", "record", "call", "record", "wait"]
