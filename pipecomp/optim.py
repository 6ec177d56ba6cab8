"""Adam whose data-parallel exchange is quantized: of gradients at first, uncompressed; then of the momentum, in b bits.

Adam is not linear in the gradient, so the error of a compressed gradient does not average out over steps. Once the
variance no longer changes, a step is linear in the momentum, and error-feedback residuals work (1-bit Adam,
arXiv:2102.02888). Shape suffix: d values of a bucket or of a flat parameter.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.allreduce.buckets import Bucket, Piece, pack, views, zeros_for
from pipecomp.allreduce.group import Group
from pipecomp.allreduce.options import Gradients
from pipecomp.errors import ConfigError, NonFiniteError, ShapeError

LARGEST = 2.0**60  # of a gradient: beyond it the square, and with it the variance, may leave float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EXCHANGE = ("freeze_step", "bits", "group_size")
_NONE, _USABLE, _BAD = 0, 1, 2  # what a rank has as a parameter's gradient


Listed = list[tuple[Tensor, dict[str, Any]]]  # all parameters, with their groups


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
            rank's own. Clip here, not before `step`: clipped rank by rank, gradients have another mean.

    Raises:
        ConfigError: for a wrong setting and, at the first step, if ranks differ in settings or parameters.
        ShapeError: for parameters of another dtype and sparse gradients.
        NonFiniteError: from `step`, for a momentum that cannot be quantized (above 2**100 times what is usual).
        PeerLostError: from `step`, for a rank that is gone.

    Example:
        >>> optimizer = QuantizedAdam(model.parameters(), lr=1e-4, freeze_step=500)
        >>> ddp.register_comm_hook(None, QuantizedAdam.keep_local)
    """

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
        self._settings = {"freeze_step": freeze_step, "bits": bits, "group_size": group_size}
        self._freeze_step, self._bits, self._adam_w = freeze_step, bits, adam_w
        if max_norm is not None and not max_norm > 0:
            raise ConfigError("max_norm", max_norm, "a number above 0, or None")
        self._max_norm = max_norm
        self._global_grad_norm: float | None = None  # before clipping; DeepSpeed looks for it by this name
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._tied = {id(p) for p in tied}
        strangers = self._tied - {id(p) for p, _ in self._all()}
        if strangers:
            raise ConfigError("tied", f"{len(strangers)} other tensors", "some of the optimizer's parameters")
        self._group = group if isinstance(group, Group) else Group(group)
        self._plain = State("none", group=self._group, seed=seed)
        self._squeeze = State("double_squeeze", group=self._group, seed=seed, bits=bits, group_size=group_size)
        self._frozen: list[list[int]] = []  # parameters by when they were frozen: what shares a bucket never changes
        self._checked = False
        self._skipped = 0
        self._flag_bytes = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; on all ranks alike."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_group(group)
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
        listed = self._all()
        if not self._checked:
            self._check_alike(listed)
        scale = getattr(self, "grad_scale", None)  # a GradScaler sets it for this call; ranks may have different ones
        unscale = None if scale is None else 1 / float(scale)
        active = self._agree(listed, unscale)
        for i in active:
            self._make_state(listed[i][0])
        warm = [i for i in active if not self.state[listed[i][0]]["frozen_at"]]
        # One after the other: both use the same group, whose messages are told apart by their order.
        gradients = self._average_gradients(listed, warm, unscale)
        if self._max_norm is not None:
            frozen = [listed[i][0] for i in sorted(set(active) - set(warm))]
            unscale = self._clip([listed[i][0] for i in warm], list(gradients.values()), frozen, unscale)
        momenta = self._average_momenta(listed, active, unscale)
        for i in warm:
            self._adam(*listed[i], gradients[i])
        for bucket, momentum_d in momenta:
            for piece, part in views(bucket, momentum_d):
                p = listed[piece.owner][0]
                self._momentum(p, piece).copy_(part.mul_(self.state[p]["unit"]))
        for i in sorted(set(active) - set(warm)):
            self._move(*listed[i])
        self._freeze(listed, warm)
        return loss

    def _all(self) -> Listed:
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _agree(self, listed: Listed, unscale: float | None) -> list[int]:
        """The parameters that this step changes: with a gradient on some rank, and usable gradients on all."""
        flags = torch.full((len(listed) + 1,), _NONE, dtype=torch.uint8)
        held = [i for i, (p, _) in enumerate(listed) if p.grad is not None and p.numel()]
        gradients = [cast(Tensor, listed[i][0].grad) for i in held]
        if any(g.layout != torch.strided for g in gradients):
            raise ShapeError("a sparse gradient: make the embedding with sparse=False")
        if held:
            norms = torch._foreach_norm(gradients, math.inf)
            largest = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).cpu()
            flags[held] = torch.where(largest * (unscale or 1) <= LARGEST, _USABLE, _BAD).to(torch.uint8)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf):
            flags[-1] = _BAD
        before = self._group.bytes_sent
        pending = self._group.gather(flags)
        flags = torch.stack(pending.wait()).amax(dim=0)
        pending.finish()
        self._flag_bytes += self._group.bytes_sent - before
        bad = int(flags.amax()) == _BAD
        if bad:
            self._skipped += 1
            if found_inf is None:
                warnings.warn("a gradient is NaN, Inf or above 2**60: this step is skipped on all ranks", stacklevel=5)
        usable = [i for i, flag in enumerate(flags[:-1].tolist()) if flag == _USABLE]
        return [i for i in usable if not bad or id(listed[i][0]) in self._tied]

    def _make_state(self, p: Tensor) -> None:
        if not self.state[p]:
            momentum, variance = (torch.zeros(p.shape, device=p.device) for _ in range(2))
            self.state[p] = {"step": 0, "frozen_at": 0, "unit": 1.0, "exp_avg": momentum, "exp_avg_sq": variance}

    def _pack(self, listed: Listed, chosen: list[int], *, by_dtype: bool) -> list[Bucket]:
        kinds: list[tuple[int, int, Hashable]] = []
        for i in chosen:
            p = listed[i][0]
            kinds.append((i, p.numel(), (p.device, p.dtype if by_dtype else None, i if id(p) in self._tied else None)))
        return pack(kinds)

    def _momentum(self, p: Tensor, piece: Piece) -> Tensor:
        return cast(Tensor, self.state[p]["exp_avg"]).view(-1)[piece.start : piece.end]

    def _average_gradients(self, listed: Listed, chosen: list[int], unscale: float | None) -> dict[int, Tensor]:
        """Flat means of the gradients, by parameter."""
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
            futures.append(self._plain.submit(values_d, f"gradients {number}", out=values_d))
        means: dict[int, list[Tensor]] = {i: [] for i in chosen}
        for bucket, future in zip(buckets, futures, strict=True):
            for piece, part in views(bucket, future.wait()):
                means[piece.owner].append(part)
        return {i: parts[0] if len(parts) == 1 else torch.cat(parts) for i, parts in means.items()}

    def _clip(
        self, warm: list[Tensor], means: list[Tensor], frozen: list[Tensor], unscale: float | None
    ) -> float | None:
        """Clip the mean gradients of `warm`; what this rank's gradients of `frozen` are to be multiplied by."""
        assert self._max_norm is not None
        held = [p for p in frozen if p.grad is not None]
        mean = self._norm(warm, means)
        own = self._norm(held, [cast(Tensor, p.grad) for p in held]) * (unscale or 1.0)
        self._global_grad_norm = math.hypot(mean, own)
        if (scale := self._max_norm / (mean + 1e-6)) < 1:
            torch._foreach_mul_(means, scale)
        scale = self._max_norm / (own + 1e-6)
        return scale * (unscale or 1.0) if scale < 1 else unscale

    def _norm(self, parameters: list[Tensor], gradients: list[Tensor]) -> float:
        """The L2 norm of these parameters' gradients, the same on all ranks for the same gradients."""
        return float(torch.stack(torch._foreach_norm(gradients)).double().norm()) if gradients else 0.0

    def _average_momenta(self, listed: Listed, active: list[int], unscale: float | None) -> list[tuple[Bucket, Tensor]]:
        """What the momenta become, in each parameter's unit, by bucket."""
        buckets = [bucket for chosen in self._frozen for bucket in self._pack(listed, chosen, by_dtype=False)]
        submitted, changed = [], set(active)
        for number, bucket in enumerate(buckets):
            if not any(piece.owner in changed for piece in bucket):
                continue
            values_d = zeros_for(bucket, listed[bucket[0].owner][0].device)
            for piece, part in views(bucket, values_d):
                p, options = listed[piece.owner]
                part.copy_(self._momentum(p, piece))
                if piece.owner in changed:
                    self._take_gradient(part, p, piece, options, unscale)
                part.div_(self.state[p]["unit"])
            submitted.append((bucket, self._squeeze.submit(values_d, f"momentum {number}", out=values_d)))
        momenta = [(bucket, future.wait()) for bucket, future in submitted]
        if any(bool(momentum_d.isnan().any()) for _, momentum_d in momenta):
            raise NonFiniteError("momentum too large to quantize; parameters and momentum are as before this step")
        return momenta

    def _take_gradient(
        self, momentum: Tensor, p: Tensor, piece: Piece, options: Mapping[str, Any], unscale: float | None
    ) -> None:
        """momentum ← β1·momentum + (1 − β1)·g for the values of a piece."""
        gradient = _gradient(p, piece)
        g = torch.zeros_like(momentum) if gradient is None else gradient.to(torch.float32)
        if unscale is not None:
            g = g * unscale
        if options["weight_decay"] and not self._adam_w:
            g = g.add(p.reshape(-1)[piece.start : piece.end], alpha=options["weight_decay"])
        momentum.lerp_(g, 1 - options["betas"][0])

    def _adam(self, p: Tensor, options: Mapping[str, Any], gradient_d: Tensor) -> None:
        """A step with an averaged gradient; operations and their order are torch's, for the same bits."""
        beta1, beta2 = options["betas"]
        g = gradient_d.view(p.shape).to(torch.float32)
        if options["weight_decay"] and not self._adam_w:
            g = g.add(p, alpha=options["weight_decay"])
        state = self.state[p]
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        self._move(p, options)

    def _move(self, p: Tensor, options: Mapping[str, Any]) -> None:
        """Count the step and change p by its momentum and variance."""
        state, (beta1, beta2), lr = self.state[p], options["betas"], float(options["lr"])
        state["step"] += 1
        x = p if p.dtype == torch.float32 else p.to(torch.float32)
        if options["weight_decay"] and self._adam_w:
            x.mul_(1 - lr * options["weight_decay"])
        corrected = (1 - beta2 ** (state["frozen_at"] or state["step"])) ** 0.5
        denominator = (state["exp_avg_sq"].sqrt() / corrected).add_(options["eps"])
        x.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1 ** state["step"]))
        if x is not p:
            p.copy_(x)

    def _freeze(self, listed: Listed, chosen: list[int]) -> None:
        """Freeze the variance of parameters that have had enough steps."""
        done = []
        for i in chosen:
            state = self.state[listed[i][0]]
            unit = _usual(state["exp_avg_sq"]) if state["step"] >= self._freeze_step else 0.0
            if unit:
                state["exp_avg_sq"].clamp_(min=(unit * 2.0**-self._bits) ** 2)
                state["frozen_at"], state["unit"] = state["step"], unit
                done.append(i)
        if done:
            self._frozen.append(done)

    def _check_alike(self, listed: Listed) -> None:
        """Ranks that differ would wait for each other's messages, or train different models."""
        contents = sum(_sum_of_bits(p) * (i + 1) for i, (p, _) in enumerate(listed))
        mine = {
            "params": len(listed),
            "values": sum(p.numel() for p, _ in listed),
            **self._settings,
            "steps so far": sum(state.get("step", 0) for state in self.state.values()),
            "contents of params": contents % 2**50,
        }
        rows = self._group.gather_numbers([float(value) for value in mine.values()])
        for rank, row in enumerate(rows):
            for (key, value), other in zip(mine.items(), row, strict=True):
                if value != other:
                    raise ConfigError(key, value, f"the same on all ranks (rank {rank} of the group has {other:.0f})")
        self._checked = True

    # -- what is known

    def stats(self) -> dict[str, Any]:
        """Add up what both exchanges count.

        Returns:
            As `pipecomp.allreduce.State.stats`, and `skipped_steps`. bytes_raw counts gradients in the parameters'
            dtype and momentum as float32. bytes_sent also has what says who has a gradient: a byte for each parameter,
            and one more, to each other rank in every step. relative_error is the momentum's, None before it is
            compressed.
        """
        plain, squeeze = self._plain.stats(), self._squeeze.stats()
        return {
            "calls": plain["calls"] + squeeze["calls"],
            "bytes_raw": plain["bytes_raw"] + squeeze["bytes_raw"],
            "bytes_sent": plain["bytes_sent"] + squeeze["bytes_sent"] + self._flag_bytes,
            "relative_error": squeeze["relative_error"],
            "seconds": {part: plain["seconds"][part] + squeeze["seconds"][part] for part in plain["seconds"]},
            "skipped_steps": self._skipped,
        }

    def state_dict(self) -> dict[str, Any]:
        """torch's, and under "exchange" which parameters are frozen and this rank's error-feedback residuals."""
        frozen = [list(chosen) for chosen in self._frozen]
        exchange = {**self._settings, "frozen": frozen, "memories": self._squeeze.state_dict()}
        return {**super().state_dict(), "exchange": exchange}

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
        for key, value in self._settings.items():
            if exchange[key] != value:
                raise ConfigError(f"exchange.{key}", exchange[key], f"{value}, as this optimizer has")
        memories, own = exchange["memories"], self._group
        if memories is None:
            memories = {**self._squeeze.state_dict(), "memory": {"worker": {}, "owner": {}}}
        if (memories["rank"], memories["ranks"]) != (own.rank, own.size):
            found = f"those of rank {memories['rank']} of {memories['ranks']}"
            raise ConfigError("exchange.memories", found, f"those of rank {own.rank} of {own.size}, or None")
        super().load_state_dict(state_dict)
        self._squeeze.load_state_dict(deepcopy(memories), self._all()[0][0].device)
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for (p, _), number in zip(self._all(), saved, strict=True):
            for name in ("exp_avg", "exp_avg_sq") if number in state_dict["state"] else ():
                # torch gives them the parameter's dtype
                self.state[p][name] = state_dict["state"][number][name].to(p.device, torch.float32, copy=True)
        self._frozen = [list(chosen) for chosen in exchange["frozen"]]
        self._checked = False

    def close(self) -> None:
        """End the threads that exchange; safe to call twice. Without, they end with the program."""
        self._plain.close()
        self._squeeze.close()


QuantizedAdam.keep_local.__annotations__.clear()  # DDP reads them, and refuses strings, which they are in this file


def _check_group(group: Mapping[str, Any]) -> None:
    """ConfigError for what Adam cannot take."""
    for key in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[key]) < math.inf:
            raise ConfigError(key, group[key], "a number of at least 0")
    betas = tuple(group["betas"])
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ConfigError("betas", group["betas"], "two numbers from 0 to below 1")
    for key in _EXCHANGE:
        if key in group:
            raise ConfigError(key, group[key], "an argument of the optimizer, not of a parameter group")


def _gradient(p: Tensor, piece: Piece) -> Tensor | None:
    return None if p.grad is None else p.grad.reshape(-1)[piece.start : piece.end]


def _usual(variance: Tensor) -> float:
    """The power of two next to the root mean variance of the values that had a gradient; 0 if none had.

    A power of two, of a sum in float64: ranks with other numbers of threads get the same.
    """
    mean = float(variance.sum(dtype=torch.float64)) / max(1, int(variance.count_nonzero()))
    return 2.0 ** round(math.log2(mean) / 2) if mean else 0.0


def _sum_of_bits(p: Tensor) -> int:
    """A number that depends on all values, the same on any device."""
    whole = torch.int32 if p.dtype == torch.float32 else torch.int16
    return int(p.detach().reshape(-1).view(whole).sum(dtype=torch.int64))
