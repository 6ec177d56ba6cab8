"""All stages of a pipeline in one process, one after another: the numbers of the engine without its processes.

Links, codecs, message stores, splitting, data order and configuration are the product's own; what the engine leaves to
DeepSpeed (accumulation, clipping, AdamW, learning rates, BF16 with float32 master weights) is done here in the same
order, so that losses are equal bit for bit. tests/benchmarks/test_inprocess.py holds the two together.

Shapes: B samples, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from benchmarks.boundaries import Boundary, Coded, Coders, Packets
from benchmarks.runner import weights_digest
from pipecomp.buffers import open_environment
from pipecomp.config import Config
from pipecomp.data import MicroBatch, Sampler, ShardedSampler, TrainLoader
from pipecomp.errors import ConfigError
from pipecomp.stages import Modules, ModuleStage, Stage, build_stage, default_loss, plan
from pipecomp.stages.link.endpoint import LinkReceiver, LinkSender, Position
from pipecomp.stages.link.layout import Layout
from pipecomp.stages.link.transport import loopback_pair

KEYS = {
    "train_batch_size": "samples of one optimizer step",
    "train_micro_batch_size_per_gpu": "samples of one micro-batch",
    "optimizer": "AdamW or SGD",
    "scheduler": "one of DeepSpeed's",
    "gradient_clipping": "the largest norm, 1.0 if not given",
    "bf16": "BF16 weights and activations",
    "data_types": "grad_accum_dtype with bf16",
    "zero_optimization": "stage 0 or 1, which are the same without data parallelism",
    "steps_per_print": "no effect on training",
    "pipecomp": "as for pipecomp.initialize",
}


class _Float32:
    """Gradients of one stage in float32, and the weights' update."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.masters = parameters

    def accumulate(self) -> None:
        """autograd has added this micro-batch's gradients to the earlier ones."""

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def square(self, counted: list[nn.Parameter]) -> Tensor:
        """Sum of squares of the gradients of `counted`."""
        return torch.stack(torch._foreach_norm([self.gradient(p) for p in counted])).double().square().sum()

    def clip(self, norm: Tensor, limit: float) -> None:
        scale = float(limit / (norm + 1e-6))
        if scale < 1:
            torch._foreach_mul_([self.gradient(p) for p in self._parameters], scale)

    def reduced(self) -> None:
        """One replica: the mean over replicas is the gradient itself."""

    def before_update(self) -> None:
        """The optimizer reads `.grad` itself."""

    def after_update(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _BFloat16:
    """The same with BF16 weights, float32 master weights, and gradients summed in `dtype`."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        self._parameters = parameters
        flat = _flatten_dense_tensors([p.detach() for p in parameters])
        self._master = flat.float().requires_grad_(True)
        self.masters = [self._master]
        self._sum = torch.zeros_like(flat, dtype=dtype)
        views = _unflatten_dense_tensors(self._sum, parameters)
        self._sums = dict(zip(map(id, parameters), views, strict=True))

    def accumulate(self) -> None:
        for parameter in self._parameters:
            assert parameter.grad is not None
            self.gradient(parameter).add_(parameter.grad.to(self._sum.dtype))
            parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        return self._sums[id(parameter)]

    def square(self, counted: list[nn.Parameter]) -> Tensor:
        return torch.stack([self.gradient(p).float().norm(2.0) for p in counted]).pow(2.0).sum()

    def clip(self, norm: Tensor, limit: float) -> None:
        scale = limit / (norm + 1e-6)
        if scale < 1:
            for total in self._sums.values():
                total.mul_(scale)

    def reduced(self) -> None:
        self._sum.copy_(self._sum.to(torch.bfloat16))  # the dtype in which DeepSpeed reduces, also over one replica

    def before_update(self) -> None:
        self._master.grad = self._sum.float()

    def after_update(self) -> None:
        self._master.grad = None
        self._sum.zero_()
        for parameter, master in zip(
            self._parameters, _unflatten_dense_tensors(self._master.detach(), self._parameters), strict=True
        ):
            parameter.data.copy_(master)


class InProcessPipeline:
    """`train_batch` and `eval_batch` like the engine's, for one replica and a message store in memory."""

    def __init__(
        self,
        model: Any,
        num_stages: int,
        config: dict[str, Any],
        training_data: Any,
        *,
        collate_fn: Callable[[list], Any] | None = None,
        cuts: Sequence[int] | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        lr_scheduler: Callable[[Any], Any] | None = None,
        sampler: Sampler | None = None,
        rival: Callable[[], Coders] | None = None,
    ) -> None:
        """model: a Hugging Face model, left as it is, or what `stages.modules` made, which is trained itself.
        num_stages: K ≥ 1. cuts, loss_fn, lr_scheduler, config: what `pipecomp.initialize` takes. sampler: the order of
        training, in place of the engine's. rival: makes the ends of every link of another method, beside activations
        of method "none". Of a model with adapters only they are trained, as by the engine.

        Raises ConfigError for a setting that has no meaning here, and this project's other errors.
        """
        for key in config:
            if key not in KEYS:
                raise ConfigError(key, config[key], f"in one process only {', '.join(KEYS)}")
        settings = Config.from_dict(config.get("pipecomp", {}))
        if settings.activations.method == "aqsgd" and settings.store.backend != "memory":
            raise ConfigError("store.backend", settings.store.backend, "'memory' in one process")
        if rival is not None and settings.activations.method != "none":
            raise ConfigError("activations.method", settings.activations.method, "'none' with a rival's links")
        if num_stages == 1 and settings.activations.method != "none":
            raise ConfigError("activations.method", settings.activations.method, "'none' with one stage")
        own = model if isinstance(model, Modules) else copy.deepcopy(model)
        self.weights = weights_digest(own.model if isinstance(own, Modules) else own)  # that training starts from
        split_plan = plan(own, num_stages, cuts, tie=settings.tie)
        self.stages = [build_stage(own, split_plan, index) for index in range(num_stages)]
        self._loss = loss_fn or default_loss(self.stages[-1].config)
        micro_batch = int(config["train_micro_batch_size_per_gpu"])
        self.micro_batches = int(config["train_batch_size"]) // micro_batch
        self._sampler: Sampler = sampler or ShardedSampler(len(training_data), micro_batch, seed=settings.seed)
        self._batches = iter(TrainLoader(training_data, self._sampler, collate_fn))
        self.global_steps = 0
        self._evaluations = 0
        self._connect(settings, rival)
        self._make_updates(config, lr_scheduler)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every sample is seen once."""
        return self._sampler.per_epoch // self.micro_batches

    def _connect(self, settings: Config, rival: Callable[[], Coders] | None) -> None:
        store, activations = settings.store, settings.activations
        self._environments = []
        if activations.method == "aqsgd":
            self._environments = [
                open_environment(
                    store.backend,
                    store.path,
                    index,
                    bits=store.bits,
                    group_size=activations.group_size,
                    max_bytes=store.max_bytes,
                    on_write_error=store.on_write_error,
                )
                for index in range(len(self.stages))
            ]
        self.links: list[Boundary] = []
        for index in range(len(self.stages) - 1):
            if rival is not None:
                self.links.append(Coded(rival))
                continue
            near, far = loopback_pair((index, index + 1))
            stores = [e.link(f"link-{index}", {}) for e in self._environments[index : index + 2]] or [None, None]
            canvas = self.stages[index].crossing(index).canvas
            sender = LinkSender(index, settings, near, stores[0], canvas=canvas)
            receiver = LinkReceiver(index, settings, far, stores[1], canvas=canvas)
            self.links.append(Packets(sender, receiver))

    def _make_updates(self, config: dict[str, Any], lr_scheduler: Callable[[Any], Any] | None) -> None:
        chosen = config.get("optimizer", {})
        if chosen.get("type") not in ("AdamW", "SGD"):
            raise ConfigError("optimizer.type", chosen.get("type"), "'AdamW' or 'SGD' in one process")
        if config.get("zero_optimization", {}).get("stage", 0) > 1:
            raise ConfigError("zero_optimization.stage", config["zero_optimization"]["stage"], "0 or 1")
        self._limit = float(config.get("gradient_clipping", 1.0))
        half = bool(config.get("bf16", {}).get("enabled"))
        summed = torch.float32 if config.get("data_types", {}).get("grad_accum_dtype") == "fp32" else torch.bfloat16
        self._replicated = {
            id(parameter)
            for stage in self.stages
            for group, parameter in zip(stage.tied_groups, stage.tied_parameters().values(), strict=True)
            if group.stages[0] != stage.index
        }
        self._updates: list[_Float32 | _BFloat16] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        for stage in self.stages:
            if half:
                stage.to(torch.bfloat16)
            parameters = _trained(stage)
            update = _BFloat16(parameters, summed) if half else _Float32(parameters)
            values = {key: value for key, value in chosen.get("params", {}).items() if key != "torch_adam"}
            optimizer = getattr(torch.optim, chosen["type"])(update.masters, **values)
            self._updates.append(update)
            self._optimizers.append(optimizer)
            if lr_scheduler is not None:
                self._schedulers.append(lr_scheduler(optimizer))
            elif "scheduler" in config:
                from deepspeed.runtime import lr_schedules

                import pipecomp.engine  # noqa: F401 (says which accelerator, before deepspeed)

                schedule = getattr(lr_schedules, config["scheduler"]["type"])
                self._schedulers.append(schedule(optimizer, **config["scheduler"].get("params", {})))

    def train_batch(self) -> Tensor:
        """One optimizer step; the mean loss of its micro-batches, float32."""
        total: Tensor | None = None
        for stage in self.stages:
            stage.train()
        for micro_batch in range(self.micro_batches):
            loss = self._train_micro_batch(next(self._batches), Position(self.global_steps, micro_batch))
            total = torch.zeros_like(loss) + loss if total is None else total + loss
        self._step()
        for link in self.links:
            link.end_step()
        for environment in self._environments:
            environment.commit()
        self.global_steps += 1
        assert total is not None
        return (total / self.micro_batches).float()

    def _train_micro_batch(self, batch: MicroBatch, at: Position) -> Tensor:
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        layouts: list[Layout] = []  # what crosses each link
        for hidden_BSH, layout in self._forward(batch, at, outputs):
            hidden_BSH.requires_grad_(True)
            inputs.append(hidden_BSH)
            layouts.append(layout)
        loss = self._loss(outputs[-1], batch.labels)
        (loss / self.micro_batches).backward()
        self._updates[-1].accumulate()
        for index in reversed(range(len(self.links))):
            grad_BSH = inputs[index].grad
            assert grad_BSH is not None
            outputs[index].backward(self.links[index].backward(grad_BSH, layouts[index], at))
            self._updates[index].accumulate()
        return loss.detach()

    def _forward(
        self, batch: MicroBatch, at: Position, outputs: list[Tensor], *, training: bool = True
    ) -> Iterator[tuple[Tensor, Layout]]:
        """Run all stages, appending what each returns; yields what arrives at each link before it is used."""
        layout = self.stages[0].layout(batch.ids, batch.inputs)
        given: Any = batch.inputs
        for stage, link in zip(self.stages, [*self.links, None], strict=True):
            returned = stage(given)
            if link is None:
                outputs.append(returned)
                return
            outputs.append(returned["hidden_states"])
            hidden_BSH, arrived = link.forward(outputs[-1], layout, at, training=training)
            yield hidden_BSH, arrived
            layout = self.stages[stage.index + 1].next_layout(arrived)
            given = {"hidden_states": hidden_BSH, "attention_mask": arrived.mask_BS(hidden_BSH.device)}

    def _step(self) -> None:
        tied: dict[str, list[Tensor]] = {}
        for stage, update in zip(self.stages, self._updates, strict=True):
            for name, parameter in stage.tied_parameters().items():
                if not parameter.requires_grad:
                    continue
                tied.setdefault(name, []).append(update.gradient(parameter))
        for grads in tied.values():
            total = torch.stack(grads).sum(0) if len(grads) > 2 else grads[0] + grads[1]
            for grad in grads:
                grad.copy_(total)
        for update in self._updates:
            update.reduced()
        if self._limit > 0:
            squares = [u.square(self._counted(s)) for s, u in zip(self.stages, self._updates, strict=True)]
            norm = torch.stack(squares).sum().sqrt()
            for update in self._updates:
                update.clip(norm, self._limit)
        for update, optimizer in zip(self._updates, self._optimizers, strict=True):
            update.before_update()
            optimizer.step()
            update.after_update()
        for scheduler in self._schedulers:
            scheduler.step()

    def _counted(self, stage: Stage | ModuleStage) -> list[nn.Parameter]:
        return [p for p in _trained(stage) if id(p) not in self._replicated]

    @torch.no_grad()
    def eval_batch(
        self, batches: Iterable[MicroBatch], *, on_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None
    ) -> Any:
        """Mean loss of the batches, which are of equal size; the message stores are not touched.

        on_logits: as for the engine: the result is the list of what it returned.
        """
        measures: list[Tensor] = []
        measure: Any = on_logits or self._loss
        for stage in self.stages:
            stage.eval()
        for number, batch in enumerate(batches):
            outputs: list[Tensor] = []
            for _ in self._forward(batch, Position(self._evaluations, number), outputs, training=False):
                pass
            measures.append(measure(outputs[-1], batch.labels))
        self._evaluations += 1
        return measures if on_logits is not None else torch.stack(measures).sum() / len(measures)

    def comm_stats(self) -> dict[str, Any]:
        """The links' counters as in the engine's `comm_stats`, by "k->k+1", at the sending end."""
        return {f"{index}->{index + 1}": link.stats.as_dict() for index, link in enumerate(self.links)}

    def same_messages(self) -> bool:
        """Return True if both ends of every link hold the same messages."""
        return all(link.same_messages() for link in self.links)

    def store_bytes(self) -> int:
        """Bytes of all stored messages, both ends of all links."""
        held = sum(link.held_bytes() for link in self.links)
        return held + sum(environment.size_bytes() for environment in self._environments)

    def close(self) -> None:
        """Free the stores; safe to call twice."""
        for environment in self._environments:
            environment.close()


def _trained(stage: Stage | ModuleStage) -> list[nn.Parameter]:
    return [p for p in stage.parameters() if p.requires_grad]
