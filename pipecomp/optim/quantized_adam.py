"""Adam whose data-parallel exchange is quantized: of gradients at first, uncompressed; then of the momentum, in b bits.

Adam is not linear in the gradient, so the error of a compressed gradient does not average out over steps. Once the
variance no longer changes, a step is linear in the momentum, and error-feedback residuals work (1-bit Adam,
arXiv:2102.02888).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from pipecomp.allreduce.group import Group
from pipecomp.allreduce.options import Gradients
from pipecomp.errors import ConfigError, ShapeError
from pipecomp.optim.adam import Adam, Listed, check_options, new_moments
from pipecomp.optim.agreement import Agreement, check_alike
from pipecomp.optim.exchange import AdamExchange

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_EXCHANGE = ("freeze_step", "bits", "group_size")


class QuantizedAdam(torch.optim.Optimizer):
    """Train with Adam or AdamW over a data-parallel group; after `freeze_step` steps exchange the momentum in few bits.

    `step` averages over the group itself, so gradients must be local: use no DDP, or register `keep_local` as its hook.
    All ranks start with the same parameters and call `step` together; their parameters then stay the same, bit for bit.

    Steps 1 … T = freeze_step (arXiv:2102.02888, Algorithm 1): gradients are averaged uncompressed in the parameters'
    dtype, and the step is torch's Adam. Then, with the variance v of step T, on worker i:
        m_i = β1·m + (1 − β1)·g_i;    m ← double_squeeze(m_i);    p ← p − lr/(1 − β1^t) · m / (√(v/(1 − β2^T)) + eps)
    The variance keeps the bias correction that it had at step T; the momentum's goes on, as the momentum does (the
    paper leaves both out). Momentum, variance and error-feedback residuals are float32, whatever the parameters are.
    Not in the paper: where a value's root of the variance is below 2^-bits of what is usual in its parameter, it is
    raised to that when the variance is frozen, and parameters are exchanged in units of what is usual in each. Without,
    rounding errors move values that have hardly any gradient by more than 1 (unused rows of an embedding).

    - A parameter without gradient counts as zeros where another rank has one. Without gradient on all ranks, it and its
      count of steps do not change; what rounding left out of its momentum may still be made up for.
    - Steps are counted for each parameter. One that gets its first gradients late is exchanged uncompressed until it
      has had `freeze_step` steps itself, and one whose gradients were all zero until they no longer are.
    - NaN, Inf or a gradient above 2**60 on any rank: nothing changes on any rank, no step is counted, and `stats()` has
      one more in skipped_steps. A warning says so. torch.amp.GradScaler may be used as usual: no warning then. A tied
      parameter is left out exactly if its own gradient is bad, since other stages see only that.

    Args:
        params: parameters of float32, bfloat16 or float16, or groups of them, which may have their own lr, betas, eps
            and weight_decay.
        lr: learning rate.
        betas: decay of the momentum and of the variance.
        eps: added to the root of the variance.
        weight_decay: see adam_w.
        freeze_step: step at which the variance is frozen.
        bits: of a value of the momentum, 1 to 8.
        group_size: values that share a scale.
        group: a process group, None for all ranks; one rank without torch.distributed.
        seed: of the exchange's random numbers; double_squeeze rounds to nearest and draws none.
        tied: those of params that other pipeline stages hold too, their gradients summed over these stages before
            `step`; each has buckets of its own, so that the groups of all its stages get the same bits.
        adam_w: decoupled weight decay; otherwise it is added to the gradient.
        max_norm: clips gradients to this L2 norm; None for no limit. As long as gradients are exchanged it is their
            mean that is clipped, as by `clip_grad_norm_` in a single process; later, when only the momentum is, each
            rank's own, to as much more as it used to be longer than the mean. Clip here, not before `step`: clipped
            rank by rank, gradients have another mean.

    Raises:
        ConfigError: for a wrong setting and, at the first step, if ranks differ in settings or parameters.
        ShapeError: for parameters of another dtype and sparse gradients.
        NonFiniteError: from `step`, for a momentum that cannot be quantized (above 2**100 times what is usual).
        PeerLostError: from `step`, for a rank that is gone.

    Example:
        >>> optimizer = QuantizedAdam(model.parameters(), lr=1e-4, freeze_step=500)
        >>> ddp.register_comm_hook(None, QuantizedAdam.keep_local)
    """

    __module__ = "pipecomp.optim"  # where programs import it from, and where pickles look for it
    _step_supports_amp_scaling = True  # a GradScaler would skip `step` on one rank alone, and the others would wait

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        bits: int = 4,
        group_size: int = 128,
        group: Any = None,
        seed: int = 0,
        tied: Iterable[Tensor] = (),
        adam_w: bool = True,
        max_norm: float | None = None,
    ) -> None:
        Gradients(method="quantized_adam", bits=bits, group_size=group_size, freeze_step=freeze_step)  # checks them
        if max_norm is not None and not max_norm > 0:
            raise ConfigError("max_norm", max_norm, "a number above 0, or None")
        self._max_norm = max_norm
        self._longer: float | None = None  # how many times the mean's norm ranks' own are, of late
        self._global_grad_norm: float | None = None  # before clipping; DeepSpeed looks for it by this name
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        tied_ids = {id(p) for p in tied}
        strangers = tied_ids - {id(p) for p, _ in self._listed()}
        if strangers:
            raise ConfigError("tied", f"{len(strangers)} other tensors", "some of the optimizer's parameters")
        self._group = group if isinstance(group, Group) else Group(group)
        self._adam = Adam(adam_w)
        self._agreement = Agreement(self._group, tied_ids)
        self._exchange = AdamExchange(
            self._group, self._adam, tied_ids, freeze_step=freeze_step, bits=bits, group_size=group_size, seed=seed
        )
        self._checked = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; on all ranks alike."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_options(group)
        for key in _OF_EXCHANGE:
            if key in group:
                raise ConfigError(key, group[key], "an argument of the optimizer, not of a parameter group")
        for p in group["params"]:
            if p.dtype not in DTYPES:
                raise ShapeError(f"parameter of dtype {p.dtype}, allowed: {', '.join(map(str, DTYPES))}")
        self._checked = False

    @staticmethod
    def keep_local(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """For `ddp.register_comm_hook(None, QuantizedAdam.keep_local)`: DDP leaves each rank its own gradients."""
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        future.set_result(buffer)
        return future

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, on all ranks together.

        Args:
            closure: computes the loss and gradients, if they are not there already.

        Returns:
            What `closure` did; None without one.

        Raises:
            NonFiniteError, PeerLostError: see the class.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        listed = self._listed()
        if not self._checked:
            steps = sum(moments.get("step", 0) for moments in self.state.values())
            check_alike(self._group, listed, self._exchange.settings, steps)
            self._checked = True
        scale = getattr(self, "grad_scale", None)  # a GradScaler sets it for this call; ranks may have different ones
        unscale = None if scale is None else 1 / float(scale)
        changed = self._agreement.changed(listed, unscale, getattr(self, "found_inf", None))
        for p in (listed[i][0] for i in changed):
            if not self.state[p]:
                self.state[p] = new_moments(p)
        warm = [i for i in changed if not self.state[listed[i][0]]["frozen_at"]]
        # One after the other: both use the same group, whose messages are told apart by their order.
        means = self._exchange.average_gradients(listed, warm, unscale)
        if self._max_norm is not None:
            frozen = [listed[i][0] for i in changed if i not in means]
            unscale = self._clip([listed[i][0] for i in warm], list(means.values()), frozen, unscale)
        self._exchange.average_momenta(listed, self.state, changed, unscale)
        for i in changed:
            p, options = listed[i]
            if i in means:
                self._adam.update_moments(self.state[p], means[i], p, options)
            self._adam.move(p, self.state[p], options)
        self._exchange.freeze(listed, self.state, warm)
        return loss

    def _listed(self) -> Listed:
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _clip(
        self, warm: list[Tensor], means: list[Tensor], frozen: list[Tensor], unscale: float | None
    ) -> float | None:
        """Clip the mean gradients of `warm`; what this rank's gradients of `frozen` are to be multiplied by.

        The mean of those is not known. A rank's own gradient is longer than the mean, and is clipped to as much more
        than max_norm as ranks' own were longer in the last steps that had both. Clipped to max_norm, ranks' noise would
        shorten steps whose variance is that of means.
        """
        assert self._max_norm is not None
        mean = self._norm(warm, means)
        own = self._own_norm(frozen, unscale)
        if mean > 0:
            norms = self._agreement.numbers(self._own_norm(warm, unscale))
            longer = math.hypot(*norms) / math.sqrt(len(norms)) / mean
            if math.isfinite(longer):  # otherwise float32 does not hold a norm, and nothing would be clipped any more
                self._longer = longer if self._longer is None else 0.9 * self._longer + 0.1 * longer
        own /= self._longer or 1.0
        self._global_grad_norm = math.hypot(mean, own)
        if (scale := self._max_norm / (mean + 1e-6)) < 1:
            torch._foreach_mul_(means, scale)
        scale = self._max_norm / (own + 1e-6)
        return scale * (unscale or 1.0) if scale < 1 else unscale

    def _own_norm(self, parameters: list[Tensor], unscale: float | None) -> float:
        """The L2 norm of this rank's own gradients."""
        held = [p for p in parameters if p.grad is not None]
        return self._norm(held, [cast(Tensor, p.grad) for p in held]) * (unscale or 1.0)

    def _norm(self, parameters: list[Tensor], gradients: list[Tensor]) -> float:
        """The L2 norm of these parameters' gradients, the same on all ranks for the same gradients."""
        if not gradients:
            return 0.0
        return float(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)).double().norm())  # float16 ends soon

    # -- what is known

    def stats(self) -> dict[str, Any]:
        """Add up what both exchanges count.

        Returns:
            As `pipecomp.allreduce.State.stats`, and `skipped_steps`. bytes_raw counts gradients in the parameters'
            dtype and momentum as float32. bytes_sent also has what says who has a gradient: a byte for each parameter,
            and one more, to each other rank in every step. relative_error is the momentum's, None before it is
            compressed.
        """
        stats, agreement = self._exchange.stats(), self._agreement
        sent = stats["bytes_sent"] + agreement.bytes_sent
        return {**stats, "bytes_sent": sent, "skipped_steps": agreement.skipped_steps}

    def state_dict(self) -> dict[str, Any]:
        """torch's, and under "exchange" which parameters are frozen and this rank's error-feedback residuals."""
        return {**super().state_dict(), "exchange": {**self._exchange.state_dict(), "longer": self._longer}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what `state_dict` returned on the same rank; nothing of it is shared.

        Error-feedback residuals of another rank, or of another number of ranks, are refused: set
        ["exchange"]["memories"] to None, and they start empty.

        Args:
            state_dict: of an optimizer with the same settings and parameters.

        Raises:
            ConfigError: for such residuals, other settings, or another optimizer's state.
        """
        exchange = state_dict.get("exchange")
        if exchange is None:
            raise ConfigError("exchange", sorted(state_dict), "a state of QuantizedAdam")
        self._exchange.check_saved(exchange)
        super().load_state_dict(state_dict)
        self._exchange.load_state_dict(exchange, self._listed()[0][0].device)
        self._longer = exchange.get("longer")
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for (p, _), number in zip(self._listed(), saved, strict=True):
            for name in ("exp_avg", "exp_avg_sq") if number in state_dict["state"] else ():
                # torch gives them the parameter's dtype
                self.state[p][name] = state_dict["state"][number][name].to(p.device, torch.float32, copy=True)
        self._checked = False

    def close(self, *, failed: bool = False) -> None:
        """End the threads that exchange, see `State.close`; safe to call twice. Without, they end with the program."""
        self._exchange.close(failed=failed)


QuantizedAdam.keep_local.__annotations__.clear()  # DDP reads them, and refuses strings, which they are in this file
