"""Adam whose data-parallel exchange is quantized: gradients at first, uncompressed; then the momentum, in b bits.

Adam is not linear in the gradient, so the error of a compressed gradient does not average out over steps. Once the
variance is frozen, a step is linear in the momentum, and error feedback works (1-bit Adam, arXiv:2102.02888).

`StepAgreement` finds the parameters that a step changes on all ranks, and `adam.py` updates each parameter.
Shape suffix: d values of a bucket or of a flat parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.allreduce.buckets import Bucket, BucketPiece, new_values, pack, views
from pipecomp.allreduce.group import Group
from pipecomp.config.gradients import Gradients
from pipecomp.errors import ConfigError, NonFiniteError, ShapeError, require
from pipecomp.kernels.staging import Staging
from pipecomp.optim.adam import Adam, Listed, Moments, check_options, freeze_variance, new_moments

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_GRADIENT = 2.0**60  # beyond it the square, and with it the variance, may exceed float32
_EXCHANGE_OPTIONS = ("freeze_step", "bits", "group_size")
_NONE, _USABLE, _BAD = 0, 1, 2  # states of a parameter's gradient on a rank


class QuantizedAdam(torch.optim.Optimizer):
    """Adam or AdamW over a data-parallel group, which exchanges the momentum in few bits after `freeze_step` steps.

    `step` averages over the group itself, so gradients must be local: use no DDP, or register `keep_local` as its hook.
    All ranks start with the same parameters and call `step` together; their parameters then stay equal, bit for bit.

    Steps 1 … T = freeze_step (arXiv:2102.02888, Algorithm 1): gradients are averaged uncompressed in the parameters'
    dtype, and the step is torch's Adam. Then, with the variance v of step T, on worker i:
        m_i = β1·m + (1 − β1)·g_i;    m ← double_squeeze(m_i);    p ← p − lr/(1 − β1^t) · m / (√(v/(1 − β2^T)) + eps)
    The variance keeps its bias correction of step T; the momentum's changes with each step (the paper omits both).
    Momentum, variance and error-feedback residuals are float32 for all dtypes of parameters.
    Not in the paper: when the variance is frozen, its square root is raised to at least 2^-bits of the parameter's
    typical value, and momenta are exchanged in units of that value. Otherwise rounding errors would move values with
    tiny gradients by more than 1 (unused rows of an embedding).

    - A parameter without gradient counts as zeros if another rank has one. Without gradient on all ranks, it and its
      number of steps do not change; its momentum's residual may still be sent.
    - Steps are counted for each parameter. A parameter with late first gradients is exchanged uncompressed until it has
      had `freeze_step` steps, and one whose gradients are all zero until they no longer are.
    - NaN, Inf or a gradient above 2**60 on any rank: nothing changes on any rank, no step is counted, `stats()` counts
    a
      skipped step, and a warning is issued. torch.amp.GradScaler works as usual, without the warning. A tied parameter
      is skipped only if its own gradient is bad, because other stages cannot see the others.

    Args:
        params: parameters of float32, bfloat16 or float16, or groups of them, which may have their own lr, betas, eps
            and weight_decay.
        lr: learning rate.
        betas: decay of the momentum and of the variance.
        eps: added to the root of the variance.
        weight_decay: see adam_w.
        freeze_step: step that freezes the variance.
        bits: bits per value of the momentum, 1 to 8.
        group_size: values that share a scale.
        group: a process group, None for all ranks; one rank without torch.distributed.
        seed: seed of the exchange's random numbers; double_squeeze rounds to nearest and draws none.
        tied: params that other pipeline stages share, with gradients summed over these stages before `step`; each has
            buckets of its own, so that the groups of all its stages get the same bits.
        adam_w: decoupled weight decay; otherwise it is added to the gradient.
        max_norm: L2 norm to clip gradients to; None for no limit. While gradients are exchanged, their mean is clipped,
            as by `clip_grad_norm_` in a single process; later each rank's own, to a limit scaled by the ratio of own
            norms to the mean's. Clip here, not before `step`: gradients clipped on each rank have another mean.

    Attributes:
        settings: freeze_step, bits and group_size by name, equal on all ranks and in saved states.
        momenta: state that averages the momenta, with this rank's error-feedback residuals.

    Raises:
        ConfigError: for a wrong setting and, at the first step, if ranks differ in settings or parameters.
        ShapeError: for parameters of another dtype and sparse gradients.
        NonFiniteError: from `step`, for a momentum that cannot be quantized (above 2**100 times the typical value).
        PeerLostError: from `step`, for a rank that is gone.

    Example:
        >>> optimizer = QuantizedAdam(model.parameters(), lr=1e-4, freeze_step=500)
        >>> ddp.register_comm_hook(None, QuantizedAdam.keep_local)
    """

    __module__ = "pipecomp.optim"  # the public path, also in pickles
    _step_supports_amp_scaling = True  # a GradScaler would skip `step` on one rank alone, and deadlock the others

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
        Gradients(method="quantized_adam", bits=bits, group_size=group_size, freeze_step=freeze_step)
        require(max_norm is None or max_norm > 0, "max_norm", max_norm, "a number above 0, or None")
        self._max_norm = max_norm
        self._longer: float | None = None  # ranks' own norms relative to the mean's, a running average
        self._global_grad_norm: float | None = None  # before clipping; DeepSpeed reads it by this name
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        tied_ids = {id(p) for p in tied}
        foreign = tied_ids - {id(p) for p, _ in self._listed()}
        if foreign:
            raise ConfigError("tied", f"{len(foreign)} other tensors", "some of the optimizer's parameters")
        self._group = group if isinstance(group, Group) else Group(group)
        self._adam = Adam(adam_w)
        self._agreement = StepAgreement(self._group, tied_ids)
        self.settings = {"freeze_step": freeze_step, "bits": bits, "group_size": group_size}
        self._tied = tied_ids
        self._gradients = State("none", group=self._group, seed=seed)
        self.momenta = State("double_squeeze", group=self._group, seed=seed, bits=bits, group_size=group_size)
        self._frozen: list[list[int]] = []  # parameters by the step of their freezing, so that buckets never change
        self._checked = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, on all ranks alike."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_options(group)
        for key in _EXCHANGE_OPTIONS:
            if key in group:
                raise ConfigError(key, group[key], "an argument of the optimizer, not of a parameter group")
        for p in group["params"]:
            if p.dtype not in DTYPES:
                raise ShapeError(f"parameter of dtype {p.dtype}, allowed: {', '.join(map(str, DTYPES))}")
        self._checked = False

    @staticmethod
    def keep_local(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """A hook for `ddp.register_comm_hook(None, QuantizedAdam.keep_local)` that leaves gradients local."""
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        future.set_result(buffer)
        return future

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, on all ranks together.

        Args:
            closure: computes the loss and gradients; None if gradients are computed already.

        Returns:
            The loss of `closure`; None without one.

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
            check_alike(self._group, listed, self.settings, steps)
            self._checked = True
        scale = getattr(self, "grad_scale", None)  # set by a GradScaler for this call; it may differ between ranks
        unscale = None if scale is None else 1 / float(scale)
        changed = self._agreement.changed(listed, unscale, getattr(self, "found_inf", None))
        for p in (listed[i][0] for i in changed):
            if not self.state[p]:
                self.state[p] = new_moments(p)
        warm = [i for i in changed if not self.state[listed[i][0]]["frozen_at"]]
        # In sequence: both use the same group, which matches messages by their order.
        means = self._average_gradients(listed, warm, unscale)
        if self._max_norm is not None:
            frozen = [listed[i][0] for i in changed if i not in means]
            unscale = self._clip([listed[i][0] for i in warm], list(means.values()), frozen, unscale)
        self._average_momenta(listed, changed, unscale)
        for i in changed:
            p, options = listed[i]
            if i in means:
                self._adam.update_moments(self.state[p], means[i], p, options)
            self._adam.move(p, self.state[p], options)
        self._freeze(listed, warm)
        return loss

    def _listed(self) -> Listed:
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _clip(
        self, warm: list[Tensor], means: list[Tensor], frozen: list[Tensor], unscale: float | None
    ) -> float | None:
        """Clip the mean gradients of `warm`; return the factor of this rank's gradients of `frozen`.

        Note:
            The mean gradient of frozen parameters is unknown. A rank's own gradient is longer than the mean because of
            its noise. If it were clipped to max_norm, the noise would shorten steps whose variance is that of means. So
            max_norm is scaled by the ratio of own norms to the mean's in recent steps that had both.
        """
        assert self._max_norm is not None
        mean = self._norm(warm, means)
        own = self._own_norm(frozen, unscale)
        if mean > 0:
            norms = self._agreement.numbers(self._own_norm(warm, unscale))
            longer = math.hypot(*norms) / math.sqrt(len(norms)) / mean
            if math.isfinite(longer):  # a norm beyond float32 would end clipping for good
                self._longer = longer if self._longer is None else 0.9 * self._longer + 0.1 * longer
        own /= self._longer or 1.0
        self._global_grad_norm = math.hypot(mean, own)
        if means and (scale := self._max_norm / (mean + 1e-6)) < 1:  # the norm may be that of other stages
            torch._foreach_mul_(means, scale)
        scale = self._max_norm / (own + 1e-6)
        return scale * (unscale or 1.0) if scale < 1 else unscale

    def _own_norm(self, parameters: list[Tensor], unscale: float | None) -> float:
        """Return the L2 norm of this rank's own gradients."""
        with_gradient = [p for p in parameters if p.grad is not None]
        return self._norm(with_gradient, [cast(Tensor, p.grad) for p in with_gradient]) * (unscale or 1.0)

    def _norm(self, parameters: list[Tensor], gradients: list[Tensor]) -> float:
        """Return the L2 norm of these parameters' gradients, the same on all ranks for the same gradients."""
        if not gradients:
            return 0.0
        return float(
            torch.stack(torch._foreach_norm(gradients, 2, torch.float32)).double().norm()
        )  # float16 overflows early

    # -- averages

    def _average_gradients(self, listed: Listed, chosen: list[int], unscale: float | None) -> dict[int, Tensor]:
        """Return flat means of the gradients times `unscale` (None for 1), by parameter."""
        buckets, futures = self._pack(listed, chosen, by_dtype=True), []
        for number, bucket in enumerate(buckets):
            p = listed[bucket[0].owner][0]
            # A scaled loss means that half precision cannot hold the unscaled gradients.
            values_d = new_values(bucket, p.device, p.dtype if unscale is None else torch.float32)
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

    def _average_momenta(self, listed: Listed, changed: list[int], unscale: float | None) -> None:
        """Update the momenta of frozen parameters with this rank's gradients and average them, in place.

        They are exchanged in units of each parameter; otherwise a group of values of two parameters would round away
        the smaller ones. An unchanged parameter that shares a bucket with a changed one is exchanged too, which sends
        its residual.

        changed: parameters that this step changes, frozen or not. Raises NonFiniteError for a momentum that cannot be
        quantized; nothing has been modified then.
        """
        buckets = [bucket for chosen in self._frozen for bucket in self._pack(listed, chosen, by_dtype=False)]
        submitted, active = [], set(changed)
        for number, bucket in enumerate(buckets):
            if not any(piece.owner in active for piece in bucket):
                continue
            values_d = new_values(bucket, listed[bucket[0].owner][0].device)
            for piece, part in views(bucket, values_d):
                p, options = listed[piece.owner]
                part.copy_(_momentum(self.state[p], piece))
                if piece.owner in active:
                    gradient, values = _gradient(p, piece), p.reshape(-1)[piece.start : piece.end]
                    g = torch.zeros_like(part) if gradient is None else gradient.to(torch.float32)
                    self._adam.update_momentum(part, g if unscale is None else g * unscale, values, options)
                part.div_(self.state[p]["unit"])
            submitted.append((bucket, self.momenta.submit(values_d, f"momentum {number}", out=values_d)))
        means = [(bucket, future.wait()) for bucket, future in submitted]
        if any(bool(momentum_d.isnan().any()) for _, momentum_d in means):
            raise NonFiniteError("momentum too large to quantize; parameters and momentum are as before this step")
        for bucket, momentum_d in means:
            for piece, part in views(bucket, momentum_d):
                moments = self.state[listed[piece.owner][0]]
                _momentum(moments, piece).copy_(part.mul_(moments["unit"]))

    def _freeze(self, listed: Listed, chosen: list[int]) -> None:
        """Freeze the variance of chosen parameters with enough steps; later steps exchange their momenta."""
        enough = [i for i in chosen if self.state[listed[i][0]]["step"] >= self.settings["freeze_step"]]
        done = [i for i in enough if freeze_variance(self.state[listed[i][0]], self.settings["bits"])]
        if done:
            self._frozen.append(done)

    def _pack(self, listed: Listed, chosen: list[int], *, by_dtype: bool) -> list[Bucket]:
        kinds: list[tuple[int, int, Hashable]] = []
        for i in chosen:
            p = listed[i][0]
            kinds.append((i, p.numel(), (p.device, p.dtype if by_dtype else None, i if id(p) in self._tied else None)))
        return pack(kinds)

    # -- statistics and state

    def stats(self) -> dict[str, Any]:
        """Return this rank's totals.

        Returns:
            The entries of `pipecomp.allreduce.State.stats`, and `skipped_steps`. bytes_raw counts gradients in the
            parameters' dtype and momenta as float32. bytes_sent includes one byte for each parameter, and one more, to
            each other rank in every step, which tell which ranks have gradients. relative_error is the momentum's; None
            before it is compressed.
        """
        plain, squeezed, agreement = self._gradients.stats(), self.momenta.stats(), self._agreement
        sums = {key: plain[key] + squeezed[key] for key in ("calls", "bytes_raw", "bytes_sent")}
        return {
            **sums,
            "bytes_sent": sums["bytes_sent"] + agreement.bytes_sent,
            "relative_error": squeezed["relative_error"],
            "seconds": {part: plain["seconds"][part] + squeezed["seconds"][part] for part in plain["seconds"]},
            "skipped_steps": agreement.skipped_steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state, and under "exchange" frozen parameters and this rank's error-feedback residuals."""
        frozen = [list(chosen) for chosen in self._frozen]
        exchange = {**self.settings, "frozen": frozen, "memories": self.momenta.state_dict(), "longer": self._longer}
        return {**super().state_dict(), "exchange": exchange}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a copy of a state of this rank.

        Args:
            state_dict: state of an optimizer with the same settings and parameters. Set ["exchange"]["memories"] to
                None to start with empty residuals on another rank, or with another number of ranks.

        Raises:
            ConfigError: for residuals of another rank, other settings, or another optimizer's state.
        """
        exchange = state_dict.get("exchange")
        if exchange is None:
            raise ConfigError("exchange", sorted(state_dict), "a state of QuantizedAdam")
        for key, value in self.settings.items():
            if exchange[key] != value:
                raise ConfigError(f"exchange.{key}", exchange[key], f"{value}, as this optimizer has")
        memories, own = exchange["memories"], self._group
        if memories is not None and (memories["rank"], memories["ranks"]) != (own.rank, own.size):
            saved = f"those of rank {memories['rank']} of {memories['ranks']}"
            raise ConfigError("exchange.memories", saved, f"those of rank {own.rank} of {own.size}, or None")
        super().load_state_dict(state_dict)
        if memories is None:
            self.momenta.forget()
        else:
            self.momenta.load_state_dict(memories, self._listed()[0][0].device)
        self._frozen = [list(chosen) for chosen in exchange["frozen"]]
        self._longer = exchange.get("longer")
        numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for (p, _), number in zip(self._listed(), numbers, strict=True):
            for name in ("exp_avg", "exp_avg_sq") if number in state_dict["state"] else ():
                # torch converts them to the parameter's dtype
                self.state[p][name] = state_dict["state"][number][name].to(p.device, torch.float32, copy=True)
        self._checked = False

    def close(self, *, failed: bool = False) -> None:
        """End the threads of the exchange, see `State.close`; safe to call twice. They also end with the program."""
        self._gradients.close(failed=failed)
        self.momenta.close(failed=failed)

    def use_staging(self, staging: Staging) -> None:
        """Copy between device and host with this staging."""
        self._gradients.staging = self.momenta.staging = staging


QuantizedAdam.keep_local.__annotations__.clear()  # DDP checks annotations, and refuses the strings of this file


# -- agreement on steps


class StepAgreement:
    """Determines the parameters that a step changes, the same on all ranks.

    Args:
        group: the ranks.
        tied: ids of the parameters that other pipeline stages share.

    Attributes:
        skipped_steps: steps with a bad gradient.
        bytes_sent: by this rank.
    """

    def __init__(self, group: Group, tied: Set[int]) -> None:
        self._group, self._tied = group, tied
        self.skipped_steps = 0
        self.bytes_sent = 0

    def changed(self, listed: Listed, unscale: float | None, found_inf: Tensor | None) -> list[int]:
        """Return the parameters with a gradient on some rank, and usable gradients on all.

        If a gradient is bad (NaN, Inf or too large), only tied parameters with usable gradients are returned, because
        the other stages that share them cannot see the bad one.

        Args:
            listed: the parameters.
            unscale: factor of their gradients; None for 1.
            found_inf: result of a GradScaler on this rank; None without one.

        Raises:
            ShapeError: for sparse gradients.
            PeerLostError: for a rank that is gone.
        """
        flags = torch.full((len(listed) + 1,), _NONE, dtype=torch.uint8)
        present = [i for i, (p, _) in enumerate(listed) if p.grad is not None and p.numel()]
        gradients = [cast(Tensor, listed[i][0].grad) for i in present]
        if any(g.layout != torch.strided for g in gradients):
            raise ShapeError("a sparse gradient: make the embedding with sparse=False")
        if present:
            norms = torch._foreach_norm(gradients, math.inf)
            largest = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).cpu()
            flags[present] = torch.where(largest * (unscale or 1) <= LARGEST_GRADIENT, _USABLE, _BAD).to(torch.uint8)
        if found_inf is not None and float(found_inf):
            flags[-1] = _BAD
        flags = self._largest(flags)
        bad = int(flags.amax()) == _BAD
        if bad:
            self.skipped_steps += 1
            if found_inf is None:  # the caller of `step`, which has two decorators
                warnings.warn(
                    "a gradient is NaN, Inf or above 2**60: all ranks of the group skip this step", stacklevel=5
                )
        usable = [i for i, flag in enumerate(flags[:-1].tolist()) if flag == _USABLE]
        return [i for i in usable if not bad or id(listed[i][0]) in self._tied]

    def numbers(self, own: float) -> list[float]:
        """Gather one number from each rank, in rank order."""
        with self._counted():
            rows = self._group.gather_numbers([own])
        return [number for (number,) in rows]

    def _largest(self, flags: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks."""
        with self._counted():
            pending = self._group.gather(flags)
            largest = torch.stack(pending.wait()).amax(dim=0)
            pending.finish()
        return largest

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the bytes that the body sends."""
        before = self._group.bytes_sent
        yield
        self.bytes_sent += self._group.bytes_sent - before


def check_alike(group: Group, listed: Listed, settings: Mapping[str, Any], steps: int) -> None:
    """Raise ConfigError if ranks differ in settings or parameters: they would deadlock, or train different models.

    Args:
        group: the ranks.
        listed: this rank's parameters.
        settings: numeric settings of its exchange, by name.
        steps: sum of its parameters' steps so far.
    """
    contents = sum(_sum_of_bits(p) * (i + 1) for i, (p, _) in enumerate(listed))
    own = {
        "params": len(listed),
        "values": sum(p.numel() for p, _ in listed),
        **settings,
        "steps so far": steps,
        "contents of params": contents % 2**50,
    }
    rows = group.gather_numbers([float(value) for value in own.values()])
    for rank, row in enumerate(rows):
        for (key, value), other in zip(own.items(), row, strict=True):
            if value != other:
                raise ConfigError(key, value, f"the same on all ranks (rank {rank} of the group has {other:.0f})")


def _sum_of_bits(p: Tensor) -> int:
    """Return a checksum of all values, the same on any device."""
    integer = torch.int32 if p.dtype == torch.float32 else torch.int16
    return int(p.detach().reshape(-1).view(integer).sum(dtype=torch.int64))


def _gradient(p: Tensor, piece: BucketPiece) -> Tensor | None:
    return None if p.grad is None else p.grad.reshape(-1)[piece.start : piece.end]


def _momentum(moments: Moments, piece: BucketPiece) -> Tensor:
    return cast(Tensor, moments["exp_avg"]).view(-1)[piece.start : piece.end]
