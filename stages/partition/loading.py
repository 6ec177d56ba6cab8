"""Building one stage without the others: only its own tensors are read, the rest of the model is never allocated."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition import adapters
from pipecomp.stages.partition.adapters import Adapter
from pipecomp.stages.partition.architectures import Architecture, architecture_of, head_name
from pipecomp.stages.partition.checkpoints import Checkpoint, find_file, match_names
from pipecomp.stages.partition.modules import Modules, ModuleStage, plan_modules
from pipecomp.stages.partition.planning import SplitPlan, aliases, part_of, plan_model
from pipecomp.stages.partition.splitting import Stage, replace_parameter, shallow, take_stage

_log = logging.getLogger(__name__)
# What tells from_pretrained where to read a model, but is none of its settings.
_PLACES = {"revision", "code_revision", "subfolder", "cache_dir", "token", "proxies", "force_download"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model's weights come from; `pretrained` makes one.

    Attributes:
        config: the model's.
        model_class: Hugging Face's class.
        weights: a folder or hub name; None for random weights.
        model: a model in memory, whose modules the stages take; then the other fields only describe it.
        adapter: a LoRA adapter to put on the weights, which are frozen then.
    """

    config: Any
    model_class: type
    weights: str | None = None
    model: Any = None
    adapter: Adapter | None = None


def pretrained(path: str, *, model_class: str | type | None = None, lora: Any = None, **settings: Any) -> Source:
    """Name a `from_pretrained` folder or hub name, with another head or other settings than its config says.

    Args:
        path: the model's, or the folder of a saved adapter that says which model it is for.
        model_class: a class or its name, also an Auto class; default: the first of `config.architectures`.
        lora: a `peft.LoraConfig`, or the folder of a saved adapter to go on with: then only the adapter is trained and
            saved.
        settings: override the config (num_labels, attn_implementation, dropouts, ...). A head for another number of
            classes is new.

    Returns:
        What `plan`, `build_stage` and `pipecomp.initialize` take in place of a path.

    Raises:
        SplitError: there is no model, its config lacks one of the settings, or its class cannot be split.

    Example::

        source = pretrained("bert-base-cased", model_class="AutoModelForSequenceClassification", num_labels=3)
        stage = build_stage(source, plan(source, num_stages=2), index=0)
    """
    from transformers import AutoConfig

    for key in _PLACES & settings.keys():
        if settings.pop(key) not in (None, False, "", "main"):  # it would be the config's alone; and may be a secret
            raise SplitError(f"{key}: {adapters.SNAPSHOT}, or set HF_TOKEN and HF_HOME for all that is read")
    adapter = None if lora is None else adapters.as_adapter(lora)
    if adapter is None and (saved := adapters.from_folder(str(path))) is not None:
        adapter, path = saved
    if unreachable(str(path)):
        settings = {"local_files_only": True, **settings}  # what is cached, or an error at once
    try:
        config, unused = AutoConfig.from_pretrained(str(path), return_unused_kwargs=True, **settings)
    except (OSError, ValueError) as error:
        raise SplitError(f"{path}: no Hugging Face model there: {error}") from error
    if unused:
        raise SplitError(f"{type(config).__name__} has no setting {', '.join(sorted(unused))}")
    return Source(config=config, model_class=_class_for(config, model_class), weights=str(path), adapter=adapter)


def resolve(source: Any) -> Source:
    """Make a Source of what users give: a model (a PeftModel too), a config, a folder or hub name, or a Source."""
    if isinstance(source, Source):
        return source
    if isinstance(source, nn.Module):
        source = adapters.without_peft(source)
        return Source(config=getattr(source, "config", None), model_class=type(source), model=source)
    if hasattr(source, "model_type"):
        return Source(config=source, model_class=_class_for(source, None))
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return pretrained(str(source))
    raise SplitError(f"model: got {type(source).__name__}, allowed: a Hugging Face model, config, folder or hub name")


def plan(
    model_or_config_or_path: Any,
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
    block_seconds: Sequence[float] | None = None,
    *,
    tie: bool = True,
) -> SplitPlan:
    """Plan a partition without allocating the model.

    Args:
        model_or_config_or_path: a Hugging Face model, a config, a `from_pretrained` folder or hub name, a Source, or
            what `modules` made, which is balanced by its parameters alone.
        num_stages: K, partitioned so that the most expensive stage is as cheap as possible, by the multiply-adds of the
            blocks and of a vocabulary-sized head, and a little for the embeddings.
        cuts: instead, the first block of each stage, with or without the number of blocks at the end.
        block_seconds: measured seconds of each block (forward and backward), which then decide the balance.
        tie: False gives up tied weights.

    Returns:
        The plan, which every rank computes alike.

    Raises:
        SplitError: the architecture is unknown or the cuts are impossible.

    Example::

        plan("gpt2", num_stages=2).cuts  # (0, 9, 12)
    """
    if isinstance(model_or_config_or_path, Modules):
        if block_seconds is not None:
            raise SplitError("block_seconds: only for Hugging Face models")
        return plan_modules(model_or_config_or_path, num_stages, cuts)
    found = resolve(model_or_config_or_path)
    model = found.model if found.model is not None else skeleton(found)
    return plan_model(model, num_stages, cuts, block_seconds, tie=tie)


def build_stage(
    source: Any, plan: SplitPlan, index: int, *, dtype: torch.dtype | str | None = None, tie: bool = True, seed: int = 0
) -> Stage | ModuleStage:
    """Build stage `index` of a plan, on the CPU.

    Args:
        source: as for `plan`, and the same one.

            - A model in memory: the stage takes its modules and parameters (see `split`); copies are made of tied
              weights only, and of what has another dtype. Drop the model afterwards, and the other stages' weights are
              freed.
            - A folder or hub name: only the stage's own tensors are read. A head that the checkpoint lacks is
              initialized as Hugging Face does, and named in `stage.newly_initialized`. The stage is in training mode.
            - A config: random weights as Hugging Face initializes them. Each depends on `seed` and its module's name
              alone, so they are the same for every number of stages; they are not those of the unsplit model built
              under that seed.
            - What `modules` made: the stage takes its blocks.
        plan: of `plan`.
        index: 0 to K - 1.
        dtype: of the parameters; default: the model's, else the config's, else the checkpoint's.
        tie: False gives up tied weights, as with a plan made so.
        seed: of what is initialized.

    Returns:
        The stage, called with a micro-batch or with what the stage before it returned.

    Raises:
        SplitError: names tensor and file if one is missing, does not belong, or has another shape.
    """
    if plan.tie and not tie:
        plan = replace(plan, tied=(), tie=False)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if isinstance(source, Modules):
        blocks = ModuleStage(source, plan, index)  # the model's own, not copies
        return blocks if wanted is None else blocks.to(wanted)
    found = resolve(source)
    if found.model is not None:
        stage = take_stage(found.model, plan, index)
        for names in aliases(stage) if wanted is not None else ():
            old = stage.get_parameter(names[0])
            if old.is_floating_point() and old.dtype != wanted:
                cast = nn.Parameter(old.detach().to(wanted), requires_grad=old.requires_grad)
                for name in names:
                    replace_parameter(stage, name, cast)
        return stage
    if found.weights is None:
        if found.adapter is not None:
            raise SplitError("lora: a model with random weights has nothing to adapt: give a folder or a hub name")
        whole = skeleton(found, wanted)
        stage = take_stage(whole, plan, index)
        initialize(stage, whole, aliases(whole), {names[0] for names in aliases(stage)}, seed)
        return stage
    with Checkpoint(found.weights) as checkpoint:
        whole = skeleton(found, wanted or found.config.dtype or checkpoint.dtype())
        return _read_stage(whole, take_stage(whole, plan, index), checkpoint, found.adapter, seed)


def skeleton(source: Source, dtype: torch.dtype | str | None = None) -> Any:
    """Make the unsplit model on the meta device: names, shapes and settings, no memory."""
    config = copy.deepcopy(source.config)
    wanted = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        model = source.model_class._from_config(config, dtype=wanted)  # type: ignore[attr-defined]
        if source.adapter is not None:
            model = adapters.attach(model, source.adapter, source.weights)
    generates = source.weights is not None and getattr(model, "generation_config", None) is not None
    if generates and find_file(str(source.weights), "generation_config.json") is not None:
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(str(source.weights))
    return model


def _class_for(config: Any, model_class: str | type | None) -> type:
    import transformers

    architecture = architecture_of(config)
    if model_class is None:
        model_class = (getattr(config, "architectures", None) or [architecture.default_head])[0]
    found = getattr(transformers, model_class, None) if isinstance(model_class, str) else model_class
    mapping = getattr(found, "_model_mapping", None)
    if mapping is not None:
        found = mapping.get(type(config), None)
    if not isinstance(found, type):
        raise SplitError(
            f"model_class: got {model_class!r}, allowed for {config.model_type}: "
            f"{', '.join(sorted(architecture.heads))}"
        )
    head_name(architecture, found)
    return found


def _read_stage(whole: Any, stage: Stage, checkpoint: Checkpoint, adapter: Adapter | None, seed: int) -> Stage:
    """Fill a stage on the meta device from a checkpoint, and its adapter's weights from theirs."""
    architecture = architecture_of(whole.config)
    base = whole.base_model_prefix
    in_the_base = {name: adapters.name_in_the_base(name) for name in whole.state_dict()}
    matched, others = match_names(
        checkpoint.files,
        in_the_base.values(),
        source=checkpoint.source,
        base=base,
        optional=architecture.optional,
        ignored=getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or (),
        renamed=architecture.renamed,
    )
    found = {name: matched[plain] for name, plain in in_the_base.items() if plain in matched}
    adapted = {} if adapter is None else adapters.saved_names(stage._model, adapter)
    tuned = {} if adapter is None else adapters.read_weights(adapter, adapted, stage.state_dict())
    groups = aliases(whole)
    same: dict[str, list[str]] = {}  # by names in the base: what peft trains beside a tied weight begins as that
    for names in groups:
        for name in names:
            same.setdefault(in_the_base[name], []).extend(names)
    _check_base(adapter, whole, checkpoint, found, same)
    new: set[str] = set()
    for names in aliases(stage):
        like = stage.get_parameter(names[0])
        if names[0] in tuned:
            put(stage, names, nn.Parameter(tuned[names[0]].to(like.dtype), requires_grad=like.requires_grad))
            continue
        # The original before its copies, so that every stage reads the same tensor.
        tied = same[in_the_base[names[0]]]
        candidates = tied if stage.plan.tie else [names[0], *tied]
        origin = next((name for name in candidates if name in found), None)
        if origin is None:
            if names[0] not in adapted:
                _allow_new(whole, architecture, names[0], found, checkpoint)
            new.add(names[0])
            continue
        if _has_other_classes(whole, stage.plan, names[0], checkpoint.shape(found[origin])):
            new.add(names[0])
            continue
        tensor = _read(checkpoint, found[origin], like)
        for other in names if stage.plan.tie else ():
            if other != origin and other in found and not torch.equal(_read(checkpoint, found[other], like), tensor):
                raise SplitError(
                    f"{found[origin]} and {found[other]} in {checkpoint.source} are tied by the config but differ; "
                    "tie=False loads both"
                )
        put(stage, names, nn.Parameter(tensor, requires_grad=like.requires_grad))
    initialize(stage, whole, groups, new, seed)
    stage.newly_initialized = tuple(sorted(new))
    lacking = sorted(new - set(adapted))
    if lacking:
        _log.warning(
            "%s lacks %s, newly initialized%s",
            checkpoint.source,
            ", ".join(f"{name} for these classes" if name in found else name for name in lacking),
            f"; it also holds another head's {', '.join(sorted(others))}" if others else "",
        )
    return stage


def _check_base(
    adapter: Adapter | None, whole: Any, checkpoint: Checkpoint, found: dict[str, str], same: dict[str, list[str]]
) -> None:
    """Refuse other embeddings than the base's in an adapter's folder: peft would put them in their place."""
    if adapter is None:
        return
    for name, value in adapters.read_base(adapter, whole).items():
        names = [name, *same[adapters.name_in_the_base(name)]]
        origin = next((found[other] for other in names if other in found), None)
        if origin is None or not torch.equal(checkpoint.read(origin).to(value.dtype), value):
            raise SplitError(
                f"{name} in {adapter.weights}: allowed: the values of {checkpoint.source}, since it is neither trained "
                "nor saved beside the adapter; save a base model that has these, and give its folder"
            )


def _read(checkpoint: Checkpoint, raw: str, like: nn.Parameter) -> torch.Tensor:
    shape = checkpoint.shape(raw)
    if shape != tuple(like.shape):
        raise SplitError(
            f"{raw} in {checkpoint.source}/{checkpoint.files[raw]}: its shape is {shape}, the model's is "
            f"{tuple(like.shape)}"
        )
    return checkpoint.read(raw).to(like.dtype)


def _has_other_classes(whole: Any, plan: SplitPlan, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is of a head for classes, of which the checkpoint's has another number."""
    architecture, own = architecture_of(whole.config), tuple(whole.get_parameter(name).shape)
    in_head = part_of(architecture, whole.base_model_prefix, name) == "head"
    return in_head and not architecture.heads[plan.model_class].per_token and shape != own and shape[1:] == own[1:]


def _allow_new(whole: Any, architecture: Architecture, name: str, found: dict[str, str], source: Checkpoint) -> None:
    """Allow a head to be new as a whole; anything else that is missing is an error."""
    base = whole.base_model_prefix
    module = name.rpartition(".")[0]
    beside = [n for n in found if n.rpartition(".")[0] == module]
    optional = any(name.startswith(f"{base}.{path}.") for path in architecture.optional)
    if beside or not (optional or part_of(architecture, base, name) == "head"):
        raise SplitError(f"{name} is missing in {source.source}")


def unreachable(name: str) -> bool:
    """Tell whether a name must be on the hub, whose address cannot be looked up. A local path or a proxy settles it."""
    import huggingface_hub.constants as hub

    proxied = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if hub.HF_HUB_OFFLINE or proxied or Path(name).exists():
        return False
    host = hub.ENDPOINT.split("://")[-1].split("/")[0].split(":")[0]
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return True
    return False


def put(stage: Stage, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Set a parameter under all its names, in a stage made from a skeleton: its modules are nobody else's."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        stage.get_submodule(module)._parameters[leaf] = parameter


def initialize(stage: Stage, whole: Any, groups: list[list[str]], new: set[str], seed: int) -> None:
    """Give the parameters in `new`, and every buffer still on the meta device, the values Hugging Face gives them.

    whole, groups: the skeleton and its `aliases`. The generator is seeded by (seed, module name) for each module, and
    the global one left as it was.
    """
    from transformers.initialization import guard_torch_init_functions

    originals = {name: names[0] for names in groups for name in names if len(names) > 1} if stage.plan.tie else {}
    tied: list[tuple[str, nn.Parameter]] = []
    for names in aliases(stage):
        parameter = stage.get_parameter(names[0])
        if names[0] in new:
            # NaN, so that a weight which no initializer touches is noticed below.
            empty = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            put(stage, names, parameter)
            if names[0] in originals:
                tied.append((originals[names[0]], parameter))
        else:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    todo: set[str] = set()
    for module_name, module in stage.named_modules():
        for buffer_name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[buffer_name] = torch.empty_like(buffer, device="cpu")
                todo.add(module_name)
    for name in new:
        parts = name.split(".")[:-1]
        todo |= {".".join(parts[:length]) for length in range(len(parts) + 1)}
    # Innermost first, as Hugging Face does: GPT-2's attention scales its projection's weights once more.
    modules = [(name, module) for name, module in stage.named_modules() if name in todo and module is not stage]
    modules.sort(key=lambda item: -item[0].count("."))

    with torch.no_grad(), guard_torch_init_functions(), torch.random.fork_rng(devices=[]):
        for name, parameter in tied:  # each copy as the original's module would, and no other module after it
            owner, _, leaf = name.rpartition(".")
            alone = shallow(whole.get_submodule(owner))
            alone._parameters[leaf] = parameter
            _seeded(stage, owner, alone, seed)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        for name, module in modules:
            _seeded(stage, name, module, seed)
    for name, parameter in stage.named_parameters():
        if name in new and bool(parameter.isnan().any()):
            raise SplitError(f"{name}: {type(stage._model).__name__} does not say how to initialize it")
        if hasattr(parameter, "_is_hf_initialized"):
            del parameter._is_hf_initialized
    stage.check_what_it_receives()


def _seeded(stage: Stage, name: str, module: Any, seed: int) -> None:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
    if stage.adapter is not None and hasattr(module, "reset_lora_parameters"):  # a layer with LoRA weights
        module.reset_lora_parameters(stage.adapter.name, stage.adapter.config.init_lora_weights)
    else:
        stage._model._init_weights(module)
