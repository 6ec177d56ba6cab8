"""Adam whose data-parallel exchange is quantized: of gradients at first, uncompressed; then of the momentum, in b bits.

Adam is not linear in the gradient, so a compressed gradient's error does not average out over steps. Once the variance
no longer changes, a step is linear in the momentum, and error memories work (arXiv:2102.02888, 1-bit Adam).
Shape suffixes: d values of a bucket or of a flat parameter.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pipecomp.allreduce import State
from pipecomp.allreduce.group import Group
from pipecomp.errors import ConfigError, NonFiniteError, ShapeError
from pipecomp.gradient_config import Gradients

BUCKET = 2**22  # values
LARGEST = 2.0**60  # of a gradient: beyond it the square, and with it the variance, may leave float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EXCHANGE = ("freeze_step", "bits", "group_size")


class Piece(NamedTuple):
    """Values [start, end) of the flat parameter number `index`."""

    index: int
    start: int
    end: int


Bucket = tuple[Piece, ...]
Listed = list[tuple[Tensor, dict[str, Any]]]  # parameters with their groups


def pack(parameters: Iterable[tuple[int, int, Hashable]]) -> list[Bucket]:
    """Buckets of at most 2**22 values for parameters (index, values, kind), in their order; kinds are not mixed."""
    made: list[list[Piece]] = []
    open_bucket: dict[Hashable, tuple[list[Piece], int]] = {}
    for index, count, kind in parameters:
        start = 0
        while start < count:
            pieces, room = open_bucket.get(kind, ([], 0))
            if not room:
                pieces, room = [], BUCKET
                made.append(pieces)
            end = min(count, start + room)
            pieces.append(Piece(index, start, end))
            open_bucket[kind] = (pieces, room - (end - start))
            start = end
    return [tuple(pieces) for pieces in made]


def parts_of(bucket: Bucket, values_d: Tensor) -> list[tuple[Piece, Tensor]]:
    """A bucket's values by piece, as views."""
    return list(zip(bucket, values_d.split([piece.end - piece.start for piece in bucket]), strict=True))


def empty_for(bucket: Bucket, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros for a bucket's values."""
    return torch.zeros(sum(piece.end - piece.start for piece in bucket), dtype=dtype, device=like.device)


class QuantizedAdam(torch.optim.Optimizer):
    """Adam or AdamW over a data-parallel group; after `freeze_step` steps it exchanges the momentum in `bits` bits.

    `step` averages over the group itself, so gradients must be local: use no DDP, or register `keep_local` as its hook.
    All ranks start with the same parameters and call `step` together; their parameters then stay the same, bit for bit.

    Steps 1 … freeze_step (arXiv:2102.02888, Algorithm 1, lines 1-3): gradients are averaged uncompressed in the
    parameters' dtype, and the step is torch's Adam. Then, with v the variance of step T = freeze_step, on worker i:
        m_i = β1·m + (1 − β1)·g_i;    m ← double_squeeze(m_i);    p ← p − lr/(1 − β1^t) · m / (√(v/(1 − β2^T)) + eps)
    The variance keeps the bias correction of step T; the momentum's goes on, as the momentum does. (The paper leaves
    both out: they are 1 for its T.) Momentum, variance and error memories are float32, whatever the parameters are.

    params: parameters of float32, bfloat16 or float16, or groups of them, which may have their own lr, betas, eps and
    weight_decay. adam_w: decoupled weight decay; otherwise it is added to the gradient. bits: 1 to 8. group_size:
    values that share a scale. group: a process group, None for all ranks; one rank without torch.distributed. tied:
    those of the params that other pipeline stages hold too, their gradients summed over these stages before `step`.
    Each has buckets of its own, so that the groups of all its stages get the same bits. seed: of the exchange's random
    numbers; nearest rounding, which double_squeeze uses, draws none.

    - A parameter without gradient counts as zeros where another rank has one. Without gradient on all ranks, it and its
      count of steps do not change (its momentum may, by a rounding error that is made up for later).
    - The count of steps is each parameter's own. One that gets its first gradients late, or only zeros, stays
      uncompressed until it has had `freeze_step` steps.
    - A single value that had no gradient before the freeze takes the mean variance of its parameter's other values.
    - NaN, Inf or a gradient above 2**60 on any rank: nothing changes on any rank, no step is counted, and `stats()`
      counts a skipped one, as torch.amp.GradScaler skips steps. A warning says so, except with a GradScaler, which may
      be used as usual. A tied parameter is skipped exactly if its own gradient is bad, because other stages see only
      that.

    Raises ConfigError for a wrong setting, and at the first step if ranks differ in settings or parameters; ShapeError
    for parameters of another dtype and sparse gradients; NonFiniteError if the momentum itself exceeds 2**100;
    PeerLostError from `step` for a rank that is gone.
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
        group_size: int = 512,
        group: Any = None,
        seed: int = 0,
        tied: Iterable[Tensor] = (),
        adam_w: bool = True,
    ) -> None:
        self._options = Gradients(method="quantized_adam", bits=bits, group_size=group_size, freeze_step=freeze_step)
        self._freeze_step, self._adam_w = freeze_step, adam_w
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
        self._control_bytes = 0

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
        """One step, on all ranks together; what `closure` returned, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        listed = self._all()
        if not self._checked:
            self._check_alike(listed)
        active = self._agree(listed)
        self._prepare(listed, active)
        # One after the other: both use the same group, whose messages are told apart by their order.
        gradients = self._average_gradients(listed, [i for i in active if not self.state[listed[i][0]]["frozen_at"]])
        momenta = self._average_momenta(listed, active)
        for i, gradient_d in gradients.items():
            p, options = listed[i]
            self._adam(p, gradient_d.view(p.shape), options)
        for bucket, momentum_d in momenta:
            for piece, part in parts_of(bucket, momentum_d):
                self._flat(listed[piece.index][0], "exp_avg")[piece.start : piece.end] = part
        frozen = [i for i in sorted(active) if i not in gradients]
        for i in frozen:
            p, options = listed[i]
            self.state[p]["step"] += 1
            self._move(p, options, since=self.state[p]["frozen_at"])
        self._freeze(listed, list(gradients))
        return loss

    def _all(self) -> Listed:
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _flat(self, p: Tensor, name: str) -> Tensor:
        return cast(Tensor, self.state[p][name]).view(-1)

    def _agree(self, listed: Listed) -> set[int]:
        """The parameters that this step changes: with a gradient on some rank, and usable gradients on all."""
        flags = torch.zeros(len(listed), dtype=torch.uint8)
        held = [i for i, (p, _) in enumerate(listed) if p.grad is not None]
        for i in held:
            if listed[i][0].grad.layout != torch.strided:  # type: ignore[union-attr]
                raise ShapeError("a sparse gradient: give the embedding sparse=False")
        flags[held] = 1
        sized = [i for i in held if listed[i][0].numel()]
        if sized:
            norms = torch._foreach_norm([listed[i][0].grad for i in sized], math.inf)  # type: ignore[misc]
            largest = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).cpu()
            flags[sized] += ~(largest * self._unscale() <= LARGEST)
        found_inf = getattr(self, "found_inf", None)
        bad_here = found_inf is not None and bool(found_inf)
        before = self._group.bytes_sent
        pending = self._group.gather(torch.cat([flags, torch.tensor([2 * bad_here], dtype=torch.uint8)]))
        *most, bad = torch.stack(pending.wait()).amax(dim=0).tolist()
        pending.finish()
        self._control_bytes += self._group.bytes_sent - before
        bad = max([bad, *most]) > 1
        if bad:
            self._skipped += 1
            if found_inf is None:
                warnings.warn("a gradient is NaN, Inf or above 2**60: this step is skipped on all ranks", stacklevel=3)
        return {
            i
            for i, (flag, (p, _)) in enumerate(zip(most, listed, strict=True))
            if flag == 1 and (id(p) in self._tied or not bad)
        }

    def _unscale(self) -> float:
        """What a GradScaler multiplied the gradients by, inverted; ranks may have different scales."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else 1.0 / float(scale)

    def _prepare(self, listed: Listed, active: set[int]) -> None:
        for i in active:
            p = listed[i][0]
            if not self.state[p]:
                zeros = [torch.zeros(p.shape, device=p.device) for _ in range(2)]
                self.state[p] = {"step": 0, "frozen_at": 0, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def _buckets(self, listed: Listed, chosen: list[int], *, mixed: bool) -> list[Bucket]:
        """Buckets of one device and, unless mixed, one dtype."""
        kinds = []
        for i in sorted(chosen):
            p = listed[i][0]
            kinds.append((i, p.numel(), (p.device, None if mixed else p.dtype, i if id(p) in self._tied else None)))
        return pack(kinds)

    def _gradient(self, p: Tensor, piece: Piece) -> Tensor | None:
        return None if p.grad is None else p.grad.reshape(-1)[piece.start : piece.end]

    def _average_gradients(self, listed: Listed, chosen: list[int]) -> dict[int, Tensor]:
        """Flat means of the gradients, by parameter."""
        unscale, submitted = self._unscale(), []
        buckets = self._buckets(listed, chosen, mixed=False)
        for number, bucket in enumerate(buckets):
            p = listed[bucket[0].index][0]
            # A loss is scaled because half precision cannot hold the gradients themselves.
            dtype = torch.float32 if unscale != 1 else p.dtype
            values_d = empty_for(bucket, p, dtype)
            for piece, part in parts_of(bucket, values_d):
                gradient = self._gradient(listed[piece.index][0], piece)
                if gradient is not None:
                    part.copy_(gradient)
            if unscale != 1:
                values_d.mul_(unscale)
            submitted.append(self._plain.submit(values_d, f"gradient {number}", out=values_d))
        means: dict[int, list[Tensor]] = {i: [] for i in chosen}
        for bucket, future in zip(buckets, submitted, strict=True):
            for piece, part in parts_of(bucket, future.wait()):
                means[piece.index].append(part)
        return {i: torch.cat(p) if len(p) != 1 else p[0] for i, p in means.items()}

    def _average_momenta(
        self, listed: Listed, active: set[int]
    ) -> list[tuple[Bucket, Tensor]]:
        """What the momenta become, by bucket."""
        unscale, submitted = self._unscale(), []
        buckets = [b for indices in self._frozen for b in self._buckets(listed, indices, mixed=True)]
        for number, bucket in enumerate(buckets):
            if not any(piece.index in active for piece in bucket):
                continue
            values_d = empty_for(bucket, listed[bucket[0].index][0], torch.float32)
            for piece, part in parts_of(bucket, values_d):
                p, options = listed[piece.index]
                part.copy_(self._flat(p, "exp_avg")[piece.start : piece.end])
                if piece.index in active:
                    self._take_gradient(part, p, piece, options, unscale)
            submitted.append((bucket, self._squeeze.submit(values_d, f"momentum {number}", out=values_d)))
        found = [(bucket, future.wait()) for bucket, future in submitted]
        if any(bool(momentum_d.isnan().any()) for _, momentum_d in found):
            raise NonFiniteError("momentum above 2**100; parameters and momentum are as they were before this step")
        return found

    def _take_gradient(
        self, momentum: Tensor, p: Tensor, piece: Piece, options: Mapping[str, Any], unscale: float
    ) -> None:
        """momentum ← β1·momentum + (1 − β1)·g, of one piece."""
        gradient = self._gradient(p, piece)
        g = torch.zeros_like(momentum) if gradient is None else gradient.to(torch.float32)
        if unscale != 1:
            g = g * unscale
        if options["weight_decay"] and not self._adam_w:
            g = g.add(p.reshape(-1)[piece.start : piece.end], alpha=options["weight_decay"])
        momentum.lerp_(g, 1 - options["betas"][0])

    def _adam(self, p: Tensor, gradient: Tensor, options: Mapping[str, Any]) -> None:
        """Adam's step with an averaged gradient; operations and order are torch's, for the same bits."""
        beta1, beta2 = options["betas"]
        g = gradient.to(torch.float32)
        if options["weight_decay"] and not self._adam_w:
            g = g.add(p, alpha=options["weight_decay"])
        state = self.state[p]
        state["step"] += 1
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        self._move(p, options, since=state["step"])

    def _move(self, p: Tensor, options: Mapping[str, Any], *, since: int) -> None:
        """Change p by its momentum and variance; since: the step of which the variance is."""
        state, (beta1, beta2), lr = self.state[p], options["betas"], float(options["lr"])
        x = p if p.dtype == torch.float32 else p.to(torch.float32)
        if options["weight_decay"] and self._adam_w:
            x.mul_(1 - lr * options["weight_decay"])
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2**since) ** 0.5).add_(options["eps"])
        x.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1 ** state["step"]))
        if x is not p:
            p.copy_(x)

    def _freeze(self, listed: Listed, chosen: list[int]) -> None:
        """Freeze the variance of parameters that have had enough steps."""
        done = []
        for i in sorted(chosen):
            state = self.state[listed[i][0]]
            if state["step"] >= self._freeze_step and bool(state["exp_avg_sq"].any()):
                state["frozen_at"] = state["step"]
                _fill_unseen(state["exp_avg_sq"])
                done.append(i)
        if done:
            self._frozen.append(done)

    def _check_alike(self, listed: Listed) -> None:
        """Ranks that differ would wait for each other's messages, or train different models."""
        total = sum(_bits_sum(p) * (i + 1) for i, (p, _) in enumerate(listed))
        mine = {
            "parameters": len(listed),
            "values": sum(p.numel() for p, _ in listed),
            "freeze_step": self._freeze_step,
            "bits": self._options.bits,
            "group_size": self._options.group_size,
            "steps so far": sum(state["step"] for state in self.state.values()),
            "contents of the parameters": total % 2**50,
        }
        rows = self._group.gather_numbers([float(cast(int, value)) for value in mine.values()])
        for rank, row in enumerate(rows):
            for (key, value), other in zip(mine.items(), row, strict=True):
                if value != other:
                    raise ConfigError(key, value, f"the same on all ranks (rank {rank} of the group has {other:g})")
        self._checked = True

    # -- what is known

    def stats(self) -> dict[str, Any]:
        """Counters of both exchanges added up, as `State.stats`, and `skipped_steps`.

        bytes_raw counts gradients in the parameters' dtype and momentum as float32; bytes_sent also has a byte for each
        parameter, rank and step, which says who has a gradient. relative_error is of the momentum, None before it.
        """
        plain, squeeze = self._plain.stats(), self._squeeze.stats()
        return {
            "calls": plain["calls"] + squeeze["calls"],
            "bytes_raw": plain["bytes_raw"] + squeeze["bytes_raw"],
            "bytes_sent": plain["bytes_sent"] + squeeze["bytes_sent"] + self._control_bytes,
            "relative_error": squeeze["relative_error"],
            "seconds": {part: plain["seconds"][part] + squeeze["seconds"][part] for part in plain["seconds"]},
            "skipped_steps": self._skipped,
        }

    def state_dict(self) -> dict[str, Any]:
        """torch's, and under "exchange" which parameters are frozen and this rank's error memories."""
        exchange = {**self._settings(), "frozen": [list(indices) for indices in self._frozen]}
        return {**super().state_dict(), "exchange": {**exchange, "memories": self._squeeze.state_dict()}}

    def _settings(self) -> dict[str, Any]:
        return {key: getattr(self._options, key) for key in _EXCHANGE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what `state_dict` returned on the same rank.

        Of another rank, or another number of ranks, error memories are refused: set ["exchange"]["memories"] to None,
        and they start empty. Raises ConfigError for that, for other settings, and for another optimizer's state.
        """
        exchange = state_dict.get("exchange")
        if exchange is None:
            raise ConfigError("exchange", sorted(state_dict), "a state of QuantizedAdam")
        for key, value in self._settings().items():
            if exchange[key] != value:
                raise ConfigError(f"exchange.{key}", exchange[key], f"{value}, as this optimizer has")
        memories, own = exchange["memories"], self._group
        if memories is not None and (memories["rank"], memories["ranks"]) != (own.rank, own.size):
            found = f"those of rank {memories['rank']} of {memories['ranks']}"
            raise ConfigError("exchange.memories", found, f"those of rank {own.rank} of {own.size}, or None")
        if memories is None:
            memories = {**self._squeeze.state_dict(), "memory": {"worker": {}, "owner": {}}}
        self._squeeze.load_state_dict(deepcopy(memories), self._all()[0][0].device)
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for (p, _), index in zip(self._all(), saved, strict=True):
            for name in ("exp_avg", "exp_avg_sq") if index in state_dict["state"] else ():
                # torch made it the parameter's dtype, or kept the very tensor that the other optimizer changes
                self.state[p][name] = state_dict["state"][index][name].to(p.device, torch.float32, copy=True)
        self._frozen = [list(indices) for indices in exchange["frozen"]]
        self._checked = False


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
            raise ConfigError(key, group[key], "the optimizer's own argument, not one of a parameter group")


def _fill_unseen(variance: Tensor) -> None:
    """Give values whose variance is 0 the mean of the others.

    Quantized momentum is not exactly 0 even where all gradients were: divided by eps alone it would be a huge step.
    """
    unseen = variance == 0
    variance.masked_fill_(unseen, float(variance.sum()) / max(1, int((~unseen).sum())))


def _bits_sum(p: Tensor) -> int:
    """A number that depends on the bits of all values, the same on any device."""
    whole = torch.int32 if p.dtype == torch.float32 else torch.int16
    return int(p.detach().reshape(-1).view(whole).sum(dtype=torch.int64))
