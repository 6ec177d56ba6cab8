"""Optimizer and schedule of a stage, made from TrainingArguments by transformers.Trainer's own functions."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, get_scheduler
from transformers.trainer_optimizer import is_optimizer_factory

from pipecomp.config import Config
from pipecomp.errors import ConfigError, require
from pipecomp.stages.partition.adapters import without_peft

_LOW_RANK = ("galore", "apollo")  # starts of names in `optim`
_log = logging.getLogger(__name__)
_HINT_FLAT = "DeepSpeed flattens the parameters there: train in float32 without ZeRO."


def _name(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))


def check_optim(args: Any, *, flat: bool | None = None) -> None:
    """Check that the optimizer of `args.optim` is installed and can train a stage.

    Args:
        args: TrainingArguments.
        flat: Whether DeepSpeed flattens the parameters (bf16, fp16, ZeRO); None if it is not known yet.

    Raises:
        ConfigError: If it is not installed, steps during the backward pass, or projects matrices that are flattened.
    """
    name, low_rank = _name(args), _name(args).startswith(_LOW_RANK)
    hint = "It steps during the backward pass, which DeepSpeed's engine runs."
    require(not name.endswith(("lomo", "_layerwise")), "optim", name, "an optimizer with a step of its own", hint)
    require(not low_rank or args.optim_target_modules, "optim_target_modules", None, f"names of modules for {name!r}")
    require(low_rank or not args.optim_target_modules, "optim_target_modules", args.optim_target_modules, "not set",
            f"{name!r} treats all modules alike.")  # fmt: skip
    require(not (low_rank and flat), "optim", name, "one that does not project matrices", _HINT_FLAT)
    if flat and "8bit" in name and dist.get_rank() == 0:
        _log.warning(
            "optim %r: all states have 8 bits, those of embeddings and small parameters too. %s", name, _HINT_FLAT
        )
        return
    if not low_rank:
        _class_and_options(Trainer.get_optimizer_cls_and_kwargs, args, None)
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise ConfigError("optim", name, "an optimizer that is installed", str(error)) from error
    except ValueError:
        pass  # it asks for the model


def _class_and_options(find: Callable[..., Any], args: Any, stage: Any) -> tuple[Any, dict[str, Any]]:
    """Call Trainer's function of that name. Raises ConfigError for a missing package or wrong optim_args."""
    try:
        kind, options = find(args) if stage is None else find(args, stage)
    except ImportError as error:
        raise ConfigError("optim", _name(args), "an optimizer that is installed", str(error)) from error
    except (ValueError, TypeError, NotImplementedError) as error:
        setting = f"{_name(args)} with optim_args {args.optim_args!r}" if args.optim_args else _name(args)
        raise ConfigError("optim", setting, "an optimizer that transformers can make", str(error)) from error
    return kind, dict(options)


def decaying_parameters(stage: nn.Module) -> list[str]:
    """Return the names of the parameters with weight decay, by Trainer's rule: all but biases and norms."""
    names: list[str] = Trainer.get_decay_parameter_names(None, stage)  # type: ignore[arg-type]  # uses no self
    return names


def parameter_groups(args: Any, stage: nn.Module, decaying: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Return Trainer's parameter groups of a stage. decaying: default `decaying_parameters`."""
    names = set(decaying_parameters(stage) if decaying is None else decaying)
    named = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
    candidates = (
        {"params": [p for name, p in named if name in names], "weight_decay": args.weight_decay},
        {"params": [p for name, p in named if name not in names], "weight_decay": 0.0},
    )
    return [group for group in candidates if group["params"]]


@dataclass(frozen=True, kw_only=True)
class OptimizerFactories:
    """The user's choice of optimizer and schedule, arguments of `PipelineTrainer`.

    Attributes:
        optimizer: Makes an optimizer from parameter groups; None for `class_and_options` or `args.optim`.
        scheduler: Makes a schedule from that optimizer; None for the schedule of the arguments.
        class_and_options: Trainer's optimizer_cls_and_kwargs, or None.
        original: An optimizer of the script's model, of which each stage gets a copy for its parameters, or None.
        names: Names of `original`'s parameters, by their identity.
    """

    optimizer: Callable[[list], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    class_and_options: tuple[Any, dict[str, Any]] | None = None
    original: torch.optim.Optimizer | None = None
    names: dict[int, tuple[str, ...]] | None = None

    @classmethod
    def of(
        cls, given: tuple[Any, Any], class_and_options: tuple[Any, dict[str, Any]] | None, model: Any, settings: Config
    ) -> OptimizerFactories:
        """Check `optimizers` and `optimizer_cls_and_kwargs` of `PipelineTrainer`. Raises ConfigError."""
        make, schedule = given
        names: dict[int, tuple[str, ...]] = {}
        original = make if isinstance(make, torch.optim.Optimizer) else None
        if class_and_options is not None:
            require(make is None, "optimizer_cls_and_kwargs", class_and_options, "None together with optimizers[0]")
        chosen = class_and_options or make
        if chosen is not None and settings.gradients.exchanges_in_optimizer:
            name = "optimizers[0]" if class_and_options is None else "optimizer_cls_and_kwargs"
            allowed = f"None: {settings.gradients.method!r} is the optimizer"
            raise ConfigError(name, chosen, allowed)
        if original is not None:
            names = _names_of(original, model)
        elif make is not None and not callable(make):
            allowed = "None, a callable that takes parameter groups, or an optimizer of the model"
            raise ConfigError("optimizers[0]", type(make).__name__, allowed)
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            allowed = "None, a callable that takes the optimizer, or a schedule of optimizers[0]"
            require(schedule.optimizer is original, "optimizers[1]", type(schedule).__name__, allowed)
        elif schedule is not None and not callable(schedule):
            allowed = "None, or a callable that takes the optimizer"
            raise ConfigError("optimizers[1]", type(schedule).__name__, allowed)
        return cls(
            optimizer=None if original is not None else make,
            scheduler=schedule,
            class_and_options=class_and_options,
            original=original,
            names=names,
        )

    def make_optimizer(
        self, args: Any, stage: Any, decaying: Iterable[str], find: Callable[..., Any]
    ) -> tuple[Any, Callable[[list], Any]]:
        """Make the optimizer of a stage.

        Args:
            args: TrainingArguments.
            stage: The stage.
            decaying: Names of the parameters with weight decay.
            find: Trainer's get_optimizer_cls_and_kwargs.

        Returns:
            The optimizer, and a function that makes another one of its kind for other parameters.

        Raises:
            ConfigError: If it cannot be made.
        """
        groups = parameter_groups(args, stage, decaying)
        if self.original is not None:
            return self._copy_of_original(stage)
        if self.optimizer is not None:
            return self.optimizer(groups), self.optimizer
        kind, options = self.class_and_options or _class_and_options(find, args, stage)
        if is_optimizer_factory(kind):
            optimizer = kind()(stage, **options)
            return optimizer, again(optimizer)
        options = dict(options)
        groups = options.pop("params", groups)  # of an optimizer that treats some modules in another way
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        optimizer = kind([group for group in groups if group["params"]], **options)
        if type(optimizer).__module__.startswith("bitsandbytes"):
            _set_managers(optimizer, stage if options.get("optim_bits") == 8 else nn.Identity())
        return optimizer, lambda parameters: kind(parameters, **options)

    def _copy_of_original(self, stage: Any) -> tuple[Any, Callable[[list], Any]]:
        assert self.original is not None
        assert self.names is not None
        own = dict(stage.named_parameters(remove_duplicate=False))
        groups, places = [], []
        for place, group in enumerate(self.original.param_groups):
            found = [own[name] for p in group["params"] for name in self.names[id(p)] if name in own]
            params = [p for p in dict.fromkeys(found) if p.requires_grad]
            if params:
                groups.append({**group, "params": params})
                places.append(place)
        optimizer = clone(self.original, groups)
        optimizer.pipecomp_places = places  # of its groups among the original's, for the copy of a schedule
        return optimizer, again(self.original)

    def make_scheduler(self, args: Any, optimizer: Any, max_steps: int) -> Any:
        """Make the user's schedule, or the one that `args` names."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.LRScheduler):
            return _copy_of_schedule(self.scheduler, optimizer)
        if self.scheduler is not None:
            return self.scheduler(optimizer)
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(max_steps),
            num_training_steps=max_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )


class StageOptimizer:
    """A stage's optimizer in the form that `pipecomp.initialize` takes: parameter groups, and a function of them.

    Args:
        args: TrainingArguments.
        create: Makes the optimizer of the stage that is being built, and a function that makes another one of its kind
            for other parameters; None for the latter if it is unknown.
        settings: The "pipecomp" section.
    """

    def __init__(
        self, args: Any, create: Callable[[], tuple[Any, Callable[[list], Any] | None]], settings: Config
    ) -> None:
        self._args, self._create, self._settings = args, create, settings
        self._made: Any = None
        self._again: Callable[[list], Any] = lambda parameters: torch.optim.AdamW(parameters, lr=args.learning_rate)

    def groups(self, stage: Any) -> list[dict[str, Any]]:
        """Make the stage's optimizer and return its parameter groups; none if the stage trains nothing."""
        own = {id(p) for p in stage.parameters() if p.requires_grad}
        if not own:
            return []
        self._made, known = self._create()
        kind = type(self._made).__name__
        groups: list[dict[str, Any]] = getattr(self._made, "param_groups", [])
        foreign = any(id(p) not in own for group in groups for p in group["params"])
        allowed = "an optimizer of the trained parameters of trainer.model, which is this process's stage"
        require(groups and not foreign, "create_optimizer", kind, allowed)
        has_modes = callable(getattr(self._made, "train", None)) and callable(getattr(self._made, "eval", None))
        local = self._settings.gradients.local is not None
        allowed = "an optimizer with the same weights in training and evaluation, with local steps"
        require(not (has_modes and local), "optim", kind, allowed)
        require(not (has_modes and self._args.load_best_model_at_end), "load_best_model_at_end", True,
                f"False with {kind}, whose weights for evaluation depend on its state")  # fmt: skip
        self._again = known or again(self._made)
        return groups

    def make(self, parameters: list[Any]) -> Any:
        """Return the stage's optimizer for its groups, and a new one of the same kind for other parameters."""
        flat = [p for each in parameters for p in (each["params"] if isinstance(each, dict) else [each])]
        own = () if self._made is None else (p for group in self._made.param_groups for p in group["params"])
        if not {id(p) for p in own} & {id(p) for p in flat}:
            return self._again(parameters)
        self._made.param_groups[:] = parameters  # which the engine may have split by precision
        return self._made


def clone(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """Return an optimizer of the same class and settings, without states, for other parameter groups."""
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if not callable(getattr(type(optimizer), name, None)):  # a schedule wraps the original's own `step`
            made.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
    made.__dict__.update(state=defaultdict(dict), param_groups=groups)
    return made


def again(optimizer: Any) -> Callable[[list], Any]:
    """Return a function that makes another optimizer of the same class and defaults from parameters."""
    return lambda parameters: clone(optimizer, [{**optimizer.defaults, "params": parameters}])


def _names_of(optimizer: torch.optim.Optimizer, model: Any) -> dict[int, tuple[str, ...]]:
    """Name the optimizer's parameters as stages do. Raises ConfigError unless it is a new one of the model's."""
    kind = type(optimizer).__name__
    allowed = "an optimizer of the parameters of the model in memory, or a function of parameter groups"
    require(isinstance(model, nn.Module), "optimizers[0]", kind, allowed)
    require(not optimizer.state, "optimizers[0]", f"{kind} with states", f"{allowed}, before its first step")
    names: dict[int, tuple[str, ...]] = {}
    for name, p in without_peft(model).named_parameters(remove_duplicate=False):
        names[id(p)] = (*names.get(id(p), ()), name)
    known = all(id(p) in names for group in optimizer.param_groups for p in group["params"])
    require(known, "optimizers[0]", kind, allowed, "Some of its parameters are not the model's.")
    return names


def _copy_of_schedule(schedule: Any, optimizer: Any) -> Any:
    """Copy a schedule of the whole model's optimizer for a stage's, with the values of the stage's groups."""
    made, count = copy.copy(schedule), len(schedule.optimizer.param_groups)
    made.optimizer = optimizer
    for key, value in vars(schedule).items():
        if isinstance(value, list) and len(value) == count:
            setattr(made, key, [value[place] for place in optimizer.pipecomp_places])
    return made


def _set_managers(optimizer: Any, stage: nn.Module) -> None:
    """Give an optimizer of bitsandbytes managers of its own, and embeddings of an 8-bit one states of 32 bits.

    Note: bitsandbytes keeps exceptions, by place in the parameter groups, and paged memory in global managers, which
    later optimizers of the process would share and which would keep the model. Trainer makes the same exceptions.
    """
    manager = object.__new__(type(optimizer.mng))
    vars(manager).update({name: copy.copy(value) for name, value in vars(optimizer.mng).items()})
    for module in stage.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    pages = object.__new__(type(optimizer.page_mng))
    pages.initialize()
    optimizer.mng, optimizer.page_mng = manager, pages
