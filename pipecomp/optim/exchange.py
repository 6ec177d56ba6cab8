"""What ranks average: gradients, uncompressed, then the momenta of parameters whose variance is frozen, in few bits.

Shape suffix: d values of a bucket or of a flat parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.allreduce.buckets import Bucket, Piece, pack, views, zeros_for
from pipecomp.allreduce.group import Group
from pipecomp.errors import ConfigError, NonFiniteError
from pipecomp.kernels.staging import Staging
from pipecomp.optim.adam import Adam, Listed, Moments, freeze_variance


class AdamExchange:
    """Average gradients and momenta over a group's ranks, in buckets.

    Args:
        group: the ranks.
        adam: how a gradient becomes part of a momentum.
        tied: ids of the parameters that get buckets of their own.
        freeze_step: step at which the variance is frozen.
        bits: of a value of the momentum.
        group_size: values that share a scale.
        seed: of random numbers.

    Attributes:
        settings: freeze_step, bits and group_size by name: what ranks and saved states must have alike.
        momenta: what exchanges the momenta, with this rank's error-feedback residuals.
    """

    def __init__(
        self,
        group: Group,
        adam: Adam,
        tied: Set[int],
        *,
        freeze_step: int,
        bits: int,
        group_size: int,
        seed: int,
    ) -> None:
        self.settings = {"freeze_step": freeze_step, "bits": bits, "group_size": group_size}
        self._group, self._adam, self._tied = group, adam, tied
        self._freeze_step, self._bits = freeze_step, bits
        self._gradients = State("none", group=group, seed=seed)
        self.momenta = State("double_squeeze", group=group, seed=seed, bits=bits, group_size=group_size)
        self._frozen: list[list[int]] = []  # parameters by when they were frozen: what shares a bucket never changes

    def use_staging(self, staging: Staging) -> None:
        """Copy between device and host with this one, both kinds of averages."""
        self._gradients.staging = self.momenta.staging = staging

    # -- a step

    def average_gradients(self, listed: Listed, chosen: list[int], unscale: float | None) -> dict[int, Tensor]:
        """Flat means of the gradients, by parameter; `unscale` times what they are, None for 1."""
        buckets, futures = self._pack(listed, chosen, by_dtype=True), []
        for number, bucket in enumerate(buckets):
            p = listed[bucket[0].owner][0]
            # A loss is scaled where half precision cannot hold the gradients themselves.
            values_d = zeros_for(bucket, p.device, p.dtype if unscale is None else torch.float32)
            for piece, part in views(bucket, values_d):
                gradient = _gradient(listed[piece.owner][0], piece)
                if gradient is not None:
                    part.copy_(gradient)
            if unscale is not None:
                values_d.mul_(unscale)
            futures.append(self._gradients.submit(values_d, f"gradients {number}", out=values_d))
        means: dict[int, list[Tensor]] = {i: [] for i in chosen}
        for bucket, future in zip(buckets, futures, strict=True):
            for piece, part in views(bucket, future.wait()):
                means[piece.owner].append(part)
        return {i: parts[0] if len(parts) == 1 else torch.cat(parts) for i, parts in means.items()}

    def average_momenta(
        self, listed: Listed, kept: Mapping[Tensor, Moments], changed: list[int], unscale: float | None
    ) -> None:
        """Update the momenta of frozen parameters with this rank's gradients and average them, in place.

        They are exchanged in each parameter's unit, without which a group of values that holds those of two parameters
        would round away the smaller ones. A parameter that does not change but shares a bucket with one that does is
        exchanged too: what rounding left out of its momentum is made up for.

        Args:
            listed: all parameters.
            kept: what is kept of them.
            changed: those that this step changes, frozen or not.
            unscale: what gradients are multiplied by, None for 1.

        Raises:
            NonFiniteError: for a momentum that cannot be quantized; all are then as they were.
        """
        buckets = [bucket for chosen in self._frozen for bucket in self._pack(listed, chosen, by_dtype=False)]
        submitted, active = [], set(changed)
        for number, bucket in enumerate(buckets):
            if not any(piece.owner in active for piece in bucket):
                continue
            values_d = zeros_for(bucket, listed[bucket[0].owner][0].device)
            for piece, part in views(bucket, values_d):
                p, options = listed[piece.owner]
                part.copy_(_momentum(kept[p], piece))
                if piece.owner in active:
                    gradient, values = _gradient(p, piece), p.reshape(-1)[piece.start : piece.end]
                    g = torch.zeros_like(part) if gradient is None else gradient.to(torch.float32)
                    self._adam.update_momentum(part, g if unscale is None else g * unscale, values, options)
                part.div_(kept[p]["unit"])
            submitted.append((bucket, self.momenta.submit(values_d, f"momentum {number}", out=values_d)))
        means = [(bucket, future.wait()) for bucket, future in submitted]
        if any(bool(momentum_d.isnan().any()) for _, momentum_d in means):
            raise NonFiniteError("momentum too large to quantize; parameters and momentum are as before this step")
        for bucket, momentum_d in means:
            for piece, part in views(bucket, momentum_d):
                moments = kept[listed[piece.owner][0]]
                _momentum(moments, piece).copy_(part.mul_(moments["unit"]))

    def freeze(self, listed: Listed, kept: Mapping[Tensor, Moments], chosen: list[int]) -> None:
        """Freeze the variance of those chosen that have had enough steps: next time their momenta are exchanged."""
        enough = [i for i in chosen if kept[listed[i][0]]["step"] >= self._freeze_step]
        done = [i for i in enough if freeze_variance(kept[listed[i][0]], self._bits)]
        if done:
            self._frozen.append(done)

    def _pack(self, listed: Listed, chosen: list[int], *, by_dtype: bool) -> list[Bucket]:
        kinds: list[tuple[int, int, Hashable]] = []
        for i in chosen:
            p = listed[i][0]
            kinds.append((i, p.numel(), (p.device, p.dtype if by_dtype else None, i if id(p) in self._tied else None)))
        return pack(kinds)

    # -- what is known

    def stats(self) -> dict[str, Any]:
        """Add up what both kinds of averages count, as `State.stats`; relative_error is the momentum's."""
        plain, squeezed = self._gradients.stats(), self.momenta.stats()
        return {
            "calls": plain["calls"] + squeezed["calls"],
            "bytes_raw": plain["bytes_raw"] + squeezed["bytes_raw"],
            "bytes_sent": plain["bytes_sent"] + squeezed["bytes_sent"],
            "relative_error": squeezed["relative_error"],
            "seconds": {part: plain["seconds"][part] + squeezed["seconds"][part] for part in plain["seconds"]},
        }

    def state_dict(self) -> dict[str, Any]:
        """Settings, which parameters are frozen, and this rank's error-feedback residuals."""
        frozen = [list(chosen) for chosen in self._frozen]
        return {**self.settings, "frozen": frozen, "memories": self.momenta.state_dict()}

    def check_saved(self, state: Mapping[str, Any]) -> None:
        """ConfigError for what `load_state_dict` cannot take: other settings, another rank's residuals."""
        for key, value in self.settings.items():
            if state[key] != value:
                raise ConfigError(f"exchange.{key}", state[key], f"{value}, as this optimizer has")
        memories, own = state["memories"], self._group
        if memories is not None and (memories["rank"], memories["ranks"]) != (own.rank, own.size):
            found = f"those of rank {memories['rank']} of {memories['ranks']}"
            raise ConfigError("exchange.memories", found, f"those of rank {own.rank} of {own.size}, or None")

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on with what `state_dict` returned; residuals that are None start empty. device: of the parameters."""
        if state["memories"] is None:
            self.momenta.forget()
        else:
            self.momenta.load_state_dict(state["memories"], device)
        self._frozen = [list(chosen) for chosen in state["frozen"]]

    def close(self, *, failed: bool = False) -> None:
        """End the threads that exchange, see `State.close`; safe to call twice."""
        self._gradients.close(failed=failed)
        self.momenta.close(failed=failed)


def _gradient(p: Tensor, piece: Piece) -> Tensor | None:
    return None if p.grad is None else p.grad.reshape(-1)[piece.start : piece.end]


def _momentum(moments: Moments, piece: Piece) -> Tensor:
    return cast(Tensor, moments["exp_avg"]).view(-1)[piece.start : piece.end]
