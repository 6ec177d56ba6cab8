"""Error-feedback residuals: what compression left out, kept for the next time.

A bucket's memory belongs to its parameters, not to its number: DDP cuts its buckets anew after the first step, and
after a restart. `slices` says which parameters (numbered in the order in which they were first seen) make up a bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipecomp.errors import ConfigError, ShapeError

Slices = tuple[tuple[int, int], ...]  # (parameter's number, its values)


class Residuals:
    """Of one rank: for each key a flat float32 tensor of the worker, and one of the chunks that it owns."""

    def __init__(self) -> None:
        self._worker: dict[str, tuple[Slices, Tensor]] = {}
        self._owner: dict[tuple[str, Slices], Tensor] = {}
        self._loaded: dict[int, Tensor] = {}
        self._scratch: dict[torch.device, Tensor] = {}

    def worker(self, key: str, slices: Slices | None, d: int, device: torch.device) -> Tensor:
        """What this rank has not sent yet of the bucket, float32 [d]; zeros at first. Change it in place."""
        wanted = slices or ((-1, d),)
        if key in self._worker:
            found, memory_d = self._worker[key]
            if found == wanted:
                return memory_d
            if slices is None:
                raise ShapeError(
                    f"key {key!r}: {d} values now, {memory_d.numel()} before; give every tensor a key of its own"
                )
        memory_d = torch.zeros(d, device=device)
        if slices is not None:
            pieces = self._by_parameter()
            for (number, _), target in zip(slices, memory_d.split([count for _, count in slices]), strict=True):
                if number in pieces:
                    target.copy_(pieces[number])
        self._worker[key] = (wanted, memory_d)
        return memory_d

    def owner(self, key: str, slices: Slices | None, d: int) -> Tensor:
        """What the owner of chunks has not sent yet, float32 [d] on the CPU; zeros at first. Change it in place."""
        place = (key, slices or ((-1, d),))
        if place not in self._owner:
            self._owner[place] = torch.zeros(d)
        return self._owner[place]

    def plus(self, x_d: Tensor, e_d: Tensor) -> Tensor:
        """x + e, float32 [d], in a buffer that the next call uses again: fresh pages cost more than the addition."""
        scratch = self._scratch.get(x_d.device)
        if scratch is None or scratch.numel() < x_d.numel():
            scratch = self._scratch[x_d.device] = torch.empty(x_d.numel(), device=x_d.device)
        return torch.add(e_d, x_d, out=scratch[: x_d.numel()])

    def _by_parameter(self) -> dict[int, Tensor]:
        pieces = dict(self._loaded)
        for slices, memory_d in self._worker.values():
            pieces |= {
                number: piece
                for (number, _), piece in zip(slices, memory_d.split([count for _, count in slices]), strict=True)
            }
        return pieces

    def forget_owners(self) -> None:
        """Begin anew with what owners have not sent: their chunks are others from here on."""
        self._owner.clear()

    def norm(self) -> float:
        """‖e‖₂ over all of the worker's memories."""
        return float(sum(float(m.double().square().sum()) for _, m in self._worker.values()) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, for `torch.save`."""
        return {
            "worker": {key: (slices, memory_d.cpu().clone()) for key, (slices, memory_d) in self._worker.items()},
            "owner": {place: memory_d.clone() for place, memory_d in self._owner.items()},
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on with what `state_dict` returned."""
        try:
            worker, owner = state["worker"], state["owner"]
        except (KeyError, TypeError) as error:
            raise ConfigError("state", sorted(state) if isinstance(state, dict) else state, "worker, owner") from error
        self._worker = {key: (slices, memory_d.to(device)) for key, (slices, memory_d) in worker.items()}
        self._loaded = {}
        self._loaded = self._by_parameter()
        self._owner = dict(owner)
