"""Faults that a rank of `fault_run.py` does to itself when it is ordered to: a file with the fault's name says so."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipecomp.buffers.base import GRADIENT

ORDERED = ("value", "message", "nan", "disk")


def order(folder: Path, rank: int, fault: str) -> None:
    """Let a rank do this to itself after its next step."""
    new = folder / f"order-{rank}.new"
    new.write_text(fault)
    new.rename(folder / f"order-{rank}")


class Faults:
    """Looks for orders after every step."""

    def __init__(self, folder: Path, note: Callable[..., None]) -> None:
        self._order = folder / f"order-{os.environ['RANK']}"
        self._order.unlink(missing_ok=True)
        self._note, self._draw = note, random.Random()
        self._drifts = 0

    def after_step(self, engine: Any) -> None:
        """Do what is ordered; say how often ends were found to differ."""
        drifts = sum(end.stats.drifts for end in engine.links)
        if drifts != self._drifts:
            self._note("drifts", drifts - self._drifts)
            self._drifts = drifts
        if self._order.exists():
            fault = self._order.read_text()
            self._order.unlink()
            getattr(self, fault)(engine)
            self._note("fault", fault)

    def value(self, engine: Any) -> None:
        """The next activation, or gradient, that is stored here is not the one that the other end stores."""
        store = next(iter(engine.links)).store
        put_many = store.put_many
        wanted = self._draw.choice((0, GRADIENT))

        def faulty(puts: Any, settled: Any = None) -> None:
            if puts[0][0] & GRADIENT == wanted:
                del store.put_many
                (sample, version, m_nH), *others = puts
                m_nH = m_nH.clone()
                m_nH[0, 0] += 1e-3
                puts = [(sample, version, m_nH), *others]
            put_many(puts, settled)

        store.put_many = faulty

    def message(self, engine: Any) -> None:
        """One bit of the next message that is sent from here is another one."""
        transport = next(iter(engine.links)).transport
        send = transport.send

        def faulty(message: Any, *args: Any, **more: Any) -> Any:
            del transport.send
            message = message.copy()
            message[self._draw.randrange(message.size)] ^= 1 << self._draw.randrange(8)
            return send(message, *args, **more)

        transport.send = faulty

    def nan(self, engine: Any) -> None:
        """The next activations, or on a last stage gradients, that are sent from here have a NaN."""
        end, name = (
            (engine.links.to_next, "send_activation")
            if engine.links.to_next is not None
            else (engine.links.to_previous, "send_gradient")
        )
        send = getattr(end, name)

        def faulty(x_BSH: Any, *args: Any, **more: Any) -> Any:
            delattr(end, name)
            x_BSH = x_BSH.detach().clone()
            x_BSH.view(-1)[0] = float("nan")
            return send(x_BSH, *args, **more)

        setattr(end, name, faulty)

    def disk(self, engine: Any) -> None:
        """The message store's disk refuses writes from now on."""
        from pipecomp.errors import StoreError

        environment = engine.links.environment

        def full(changes: Any) -> None:
            try:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise StoreError(f"{environment.path}: cannot write: {error}") from error

        environment.file.write = full
