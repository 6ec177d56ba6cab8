"""What replicas have in common between averagings: weights, the same bits on all, and the outer momentum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from pipecomp.allreduce.local_options import Outer
from pipecomp.local_steps.row_rates import rates_of_rows

_HALF = (torch.float16, torch.bfloat16)


class CommonWeights:
    """The last common point of a replica's weights, by name, which an outer optimizer moves.

    It is float32 where weights are half precision, else in their dtype, and on their device. The first one is what the
    weights are when this is made: the same on all replicas.

    Args:
        weights: The replica's own weights, by name.
        outer: The outer optimizer.
        replicas: How many there are.
    """

    def __init__(self, weights: Mapping[str, Tensor], outer: Outer, replicas: int) -> None:
        self._weights, self._averages, self._replicas = weights, outer.averages_alike, replicas
        self._common = {
            name: w.detach().to(torch.float32 if w.dtype in _HALF else w.dtype, copy=True)
            for name, w in weights.items()
        }
        lr, nesterov = 1.0 if outer.lr is None else outer.lr, outer.optimizer == "nesterov"
        self._sgd = torch.optim.SGD(self._common.values(), lr=lr, momentum=outer.momentum, nesterov=nesterov)

    def moved(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tell how far the replica's weights are from the common ones, which is the outer gradient; new tensors."""
        found = {}
        for name in names:
            common, own = self._common[name], self._weights[name].detach()
            # Weights of half precision started from the rounded ones: the difference to these is no movement.
            found[name] = common - own if own.dtype == common.dtype else common.to(own.dtype) - own.to(common.dtype)
        return found

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        """Take an outer step.

        Where replicas have moved in different directions, their mean is shorter than what each has moved: by √R if it
        was all noise, not at all if they agree. With `sums` each row of a weight moves about 1.4 times as far as a
        replica's own.

        Args:
            gradients: The replicas' mean of some weights, the same on all.
            sums: By name, their mean of what `sums_of_rows` returns of the own ones; empty for an outer rate that is
                given.
        """
        for name, gradient in gradients.items():
            if name in sums:
                rates = rates_of_rows(gradient, sums[name], self._replicas)
                shape = (-1, *(1,) * (gradient.dim() - 1)) if gradient.dim() else ()
                gradient = gradient * rates.to(gradient.dtype).view(shape)
            self._common[name].grad = gradient
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step_alike(self) -> None:
        """Take an outer step where all replicas have the same weights already."""
        if self._averages:
            for name, common in self._common.items():
                common.copy_(self._weights[name])
        else:
            self.step(self.moved(self._common), {})
            self.hand_out(self._common)

    @torch.no_grad()
    def hand_out(self, names: Iterable[str], keep: float = 0.0) -> None:
        """Give the replica the common weights, beside the share `keep` of its own."""
        for name in names:
            own, common = self._weights[name], self._common[name]
            if keep:
                common = torch.lerp(common, own.to(common.dtype), keep)
            own.copy_(common)

    @torch.no_grad()
    def hand_out_since(self, before: Mapping[str, Tensor]) -> None:
        """Give the replica the common weights and, on top, how far it has come since its own were `before`."""
        for name, then in before.items():
            own = self._weights[name]
            own.copy_(self._common[name] + (own - then))

    def before(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tell where replicas were on average that have moved so far from the common weights; new tensors."""
        return {name: self._common[name] - gradient for name, gradient in gradients.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the weights be the common ones inside."""
        own = {name: w.data for name, w in self._weights.items()}
        for name, w in self._weights.items():
            w.data = self._common[name].to(w.dtype)
        try:
            yield
        finally:
            for name, w in self._weights.items():
                w.data = own[name]

    def momentum(self) -> dict[str, Tensor]:
        """Return the outer optimizer's momentum by name, of weights that have had an outer step."""
        found = {name: self._sgd.state[common].get("momentum_buffer") for name, common in self._common.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def beyond_weights(self) -> dict[str, Tensor]:
        """Return those common weights that a file of the model's own, half precision, does not hold exactly."""
        return {name: common for name, common in self._common.items() if self._weights[name].dtype != common.dtype}

    @torch.no_grad()
    def go_on(self, beyond: Mapping[str, Tensor], momentum: Mapping[str, Tensor]) -> None:
        """Go on, before the first step, with what `beyond_weights` and `momentum` returned."""
        for name, common in self._common.items():
            if name in beyond:
                common.copy_(beyond[name])
            if name in momentum:
                self._sgd.state[common]["momentum_buffer"] = momentum[name].to(common, copy=True)
