"""Building of one stage without the others: only its own tensors are read, the rest of the model is never allocated."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from pipecomp.errors import SplitError, require
from pipecomp.stages.partition import adapters, quantization
from pipecomp.stages.partition.adapters import Adapter
from pipecomp.stages.partition.architectures import architecture_of, head_name
from pipecomp.stages.partition.checkpoints import Checkpoint, find_file
from pipecomp.stages.partition.discovery import text_part
from pipecomp.stages.partition.modules import Modules, ModuleStage, plan_modules
from pipecomp.stages.partition.planning import ModelParts, SplitPlan, aliases, plan_model
from pipecomp.stages.partition.precision import load_in_float32
from pipecomp.stages.partition.splitting import take_stage
from pipecomp.stages.partition.stage import Stage
from pipecomp.stages.partition.structure import replace_parameter, shallow_copy

_log = logging.getLogger(__name__)
# Arguments of from_pretrained that locate a model and are no settings of it.
_PLACES = {"revision", "code_revision", "subfolder", "cache_dir", "token", "proxies", "force_download"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a model's weights, made by `pretrained`.

    Attributes:
        config: the model's.
        model_class: Hugging Face's class.
        weights: a folder or hub name; None for random weights.
        model: a model in memory, whose modules the stages take over; the other fields only describe it.
        adapter: a LoRA adapter; the other weights are then frozen.
        quantizer: transformers' quantizer of the base model's weights, None for plain weights.
    """

    config: Any
    model_class: type
    weights: str | None = None
    model: Any = None
    adapter: Adapter | None = None
    quantizer: Any = None


def pretrained(
    path: str,
    *,
    model_class: str | type | None = None,
    lora: Any = None,
    quantization_config: Any = None,
    **settings: Any,
) -> Source:
    """Describe a `from_pretrained` folder or hub name, with another head or other settings than its config's.

    Args:
        path: path of the model, or the folder of a saved adapter that names its base model.
        model_class: a class or its name, also an Auto class; default: the first of `config.architectures`.
        lora: a `peft.LoraConfig`, or the folder of a saved adapter to continue with: then only the adapter is trained
            and saved.
        quantization_config: a `transformers.BitsAndBytesConfig`: the base model's linear layers are quantized to 4 or 8
            bits while they are read, those that transformers quantizes, with the same bits on a CPU. Such a model is
            trained with `lora`. A folder that bitsandbytes has quantized needs none.
        settings: override the config (num_labels, attn_implementation, dropouts, ...). A head for another number of
            classes is new.

    Returns:
        A model for `plan`, `build_stage` and `pipecomp.initialize`, in place of a path.

    Raises:
        SplitError: there is no model, its config lacks one of the settings, its class cannot be split, or its weights
            are quantized by another method.

    Example::

        source = pretrained("bert-base-cased", model_class="AutoModelForSequenceClassification", num_labels=3)
        stage = build_stage(source, plan(source, num_stages=2), index=0)
        four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        source = pretrained("meta-llama/Llama-3.1-8B", lora=LoraConfig(r=16), quantization_config=four_bits)
    """
    from transformers import AutoConfig

    for key in _PLACES & settings.keys():
        if settings.pop(key) not in (None, False, "", "main"):  # it would apply to the config alone, or is a secret
            raise SplitError(f"{key}: {adapters.SNAPSHOT}, or set HF_TOKEN and HF_HOME for all that is read")
    adapter = None if lora is None else adapters.as_adapter(lora)
    if adapter is None and (saved := adapters.from_folder(str(path))) is not None:
        adapter, path = saved
    if hub_unreachable(str(path)):
        settings = {"local_files_only": True, **settings}  # the cache, or an error at once
    try:
        config, unused = AutoConfig.from_pretrained(str(path), return_unused_kwargs=True, **settings)
    except (OSError, ValueError) as error:
        raise SplitError(f"{path}: no Hugging Face model there: {error}") from error
    if model_class is None:
        config = text_part(config)
    if unused:
        raise SplitError(f"{type(config).__name__} has no setting {', '.join(sorted(unused))}")
    found = _class_for(config, model_class)
    quantizer = quantization.quantizer_for(config, quantization_config)
    return Source(config=config, model_class=found, weights=str(path), adapter=adapter, quantizer=quantizer)


def resolve(source: Any) -> Source:
    """Make a Source of a model (a PeftModel too), a config, a folder or hub name, or a Source."""
    if isinstance(source, Source):
        return source
    if isinstance(source, nn.Module):
        source = adapters.without_peft(source)
        return Source(config=getattr(source, "config", None), model_class=type(source), model=source)
    if hasattr(source, "model_type"):
        source = text_part(source)
        return Source(config=source, model_class=_class_for(source, None))
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return pretrained(str(source))
    raise SplitError(f"model: got {type(source).__name__}, allowed: a Hugging Face model, config, folder or hub name")


def with_adapter(source: Any, rank: int, bits: int | None = None) -> Source:
    """Return the model of `resolve` without weights, with a new LoRA adapter in all linear layers, for planning.

    bits: bits of the base model's linear layers, 4 or 8; default: as they are.
    """
    found = resolve(source)
    quantizer = found.quantizer
    if bits is not None:
        quantizer = quantization.quantizer_for(found.config, quantization.standard_config(bits))
    adapter = adapters.new_adapter(rank)
    return Source(config=found.config, model_class=found.model_class, adapter=adapter, quantizer=quantizer)


def with_lora(model: Any, lora: Any, seed: int) -> Any:
    """Return a model with a new LoRA adapter: one in memory as peft's `get_peft_model`, any other as a Source.

    lora: a `peft.LoraConfig`. seed: of the adapter's values, for a Source. ConfigError names the key "peft_config".
    """
    import peft

    allowed = "a peft.LoraConfig"
    require(isinstance(lora, peft.PeftConfig), "peft_config", type(lora).__name__, allowed)
    source = resolve(model)
    known = source.adapter if source.model is None else adapters.adapter_of(source.model)
    hint = "The model has an adapter: continue with that one, or merge it and pass the merged model"
    require(known is None, "peft_config", lora, "None", hint)
    if source.model is not None:
        return peft.get_peft_model(model, lora)
    return replace(source, adapter=adapters.as_adapter(lora, seed=seed))


def check_trainable(source: Source) -> None:
    """Raise SplitError for quantized weights without an adapter: only norms and embeddings could be trained."""
    adapter = source.adapter if source.model is None else adapters.adapter_of(source.model)
    quantized = source.quantizer is not None and not quantization.dequantizes(source.quantizer)
    if source.model is not None:
        quantized = bool(quantization.quantized_modules(source.model))
    if quantized and adapter is None:
        raise SplitError(
            "model: its weights are quantized and cannot be trained, and it has no adapter: give "
            "pipecomp.stages.pretrained(..., lora=peft.LoraConfig(...)), or a PeftModel"
        )


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
            Modules, which are balanced by their parameters alone.
        num_stages: K, partitioned so that the most expensive stage is as cheap as possible, by the multiply-adds of the
            blocks and of a vocabulary-sized head, and a little for the embeddings.
        cuts: instead, the first block of each stage, with or without the number of blocks at the end.
        block_seconds: measured seconds of each block (forward and backward), which then decide the balance.
        tie: False gives up tied weights.

    Returns:
        The plan, the same on every rank.

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

            - A model in memory: the stage takes over its modules and parameters (see `split`); only tied weights and
              parameters of another dtype are copied. Drop the model afterwards to free the other stages' weights.
            - A folder or hub name: only the stage's own tensors are read. A head that the checkpoint lacks is
              initialized as Hugging Face does, and listed in `stage.newly_initialized`. The stage is in training mode.
            - A config: random weights as Hugging Face initializes them. Each depends on `seed` and its module's name
              alone, so they are the same for every number of stages; they are not those of the unsplit model built
              under that seed.
            - Modules: the stage takes over its blocks.
        plan: a plan from `plan`.
        index: 0 to K - 1.
        dtype: dtype of the parameters; default: the model's, else the config's, else the checkpoint's.
        tie: False gives up tied weights, as in a plan with `tie=False`.
        seed: seed of initialized weights.

    Returns:
        The stage, whose input is a micro-batch or the output of the stage before it.

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
            if old.is_floating_point() and old.dtype != wanted and not quantization.is_quantized(old):
                same = nn.Parameter(old.detach().to(wanted), requires_grad=old.requires_grad)
                for name in names:
                    replace_parameter(stage, name, same)
        return stage
    if found.weights is None:
        if found.adapter is not None:
            raise SplitError("lora: a model with random weights has nothing to adapt: give a folder or a hub name")
        if quantization.method_of(found.config) is not None:
            raise SplitError("quantization_config: random weights are not quantized: give a folder or a hub name")
        whole = skeleton(found, wanted)
        stage = take_stage(whole, plan, index)
        _initialize(stage, whole, {names[0] for names in aliases(stage)}, seed)
        return stage
    with Checkpoint(found.weights) as checkpoint:
        whole = skeleton(found, wanted or found.config.dtype or checkpoint.dtype())
        return _read_stage(whole, take_stage(whole, plan, index), checkpoint, found, seed)


def skeleton(source: Source, dtype: torch.dtype | str | None = None) -> Any:
    """Make the unsplit model on the meta device: names, shapes and settings, without memory."""
    config = copy.deepcopy(source.config)
    wanted = dtype or config.dtype or torch.float32
    quantizer = source.quantizer or quantization.quantizer_for(config)
    with torch.device("meta"):
        plain = quantization.plain_config(config)
        model = source.model_class._from_config(plain, dtype=wanted)  # type: ignore[attr-defined]
        load_in_float32(model, model.dtype)
        if quantizer is not None:
            quantization.convert(model, quantizer)
        if source.adapter is not None:
            model = adapters.attach(model, source.adapter, source.weights)
    generates = source.weights is not None and getattr(model, "generation_config", None) is not None
    if generates and find_file(str(source.weights), "generation_config.json") is not None:
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(str(source.weights))
    return model


def _class_for(config: Any, model_class: str | type | None) -> type:
    import transformers

    if model_class is None:
        known = architecture_of(config)
        model_class = (getattr(config, "architectures", None) or [known.default_head])[0]
    found = getattr(transformers, model_class, None) if isinstance(model_class, str) else model_class
    mapping = getattr(found, "_model_mapping", None)
    if mapping is not None:
        found = mapping.get(type(config), None)
    if not isinstance(found, type):
        heads = ", ".join(sorted(architecture_of(config).heads))
        raise SplitError(f"model_class: got {model_class!r}, allowed for {config.model_type}: {heads}")
    head_name(architecture_of(config, found), found)
    return found


def _read_stage(whole: Any, stage: Stage, checkpoint: Checkpoint, described: Source, seed: int) -> Stage:
    """Fill a stage on the meta device from a checkpoint, and its adapter's weights from their folder."""
    parts = ModelParts(whole)
    architecture, source, adapter = parts.architecture, checkpoint.source, described.adapter
    quantizer = described.quantizer
    base_names = {name: adapters.base_name(name) for name in whole.state_dict()}
    in_parts = quantization.parts_in_files(whole, quantizer)  # weights that several tensors on disk make up
    pieces = [adapters.base_name(piece) for names in in_parts.values() for piece in names.values()]
    ignored = getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or ()
    checkpoint.convert(whole, [*base_names.values(), *pieces])
    matched, others = checkpoint.match([*base_names.values(), *pieces], parts.base, architecture, ignored)
    found = {name: matched[plain] for name, plain in base_names.items() if plain in matched}
    serialized: dict[str, dict[str, str]] = {}
    for name, pieces_of in in_parts.items():
        on_disk = {part: adapters.base_name(piece) for part, piece in pieces_of.items()}
        serialized[name] = {part: matched[piece] for part, piece in on_disk.items() if piece in matched}
        if serialized[name]:
            found.setdefault(name, next(iter(serialized[name].values())))
    # By names in the base: a copy that peft trains beside a tied weight starts with that weight's value.
    tied_names: dict[str, list[str]] = {}
    for names in aliases(whole):
        for name in names:
            tied_names.setdefault(base_names[name], []).extend(names)
    adapted: dict[str, str] = {}
    tuned: dict[str, torch.Tensor] = {}
    if adapter is not None:
        adapted = adapters.saved_names(stage._model, adapter)
        tuned, embeddings = adapters.read_saved(adapter, whole, adapted, stage.state_dict())
        tuned |= adapters.draw_start(whole, adapter, adapted)
        # peft would put embeddings in the adapter's folder in the place of the base's.
        for name, value in embeddings.items():
            origin = next((found[n] for n in (name, *tied_names[adapters.base_name(name)]) if n in found), None)
            if origin is None or not torch.equal(checkpoint.read(origin).to(value.dtype), value):
                raise SplitError(
                    f"{name} in {adapter.weights}: allowed: the values of {source}, since it is neither "
                    "trained nor saved beside the adapter; save a base model that has these, and give its folder"
                )
    new: set[str] = set()
    for names in aliases(stage):
        name, like = names[0], stage.get_parameter(names[0])
        if name in tuned:
            _set_parameter(stage, names, nn.Parameter(tuned[name].to(like.dtype), requires_grad=like.requires_grad))
            continue
        # Note: the original comes before its copies, so that every stage reads the same tensor and tied copies start
        # equal; they stay equal because their gradients are summed (see PipelineStage.tied_parameters).
        tied = tied_names[base_names[name]]
        candidates = tied if stage.plan.tie else [name, *tied]
        origin = next((candidate for candidate in candidates if candidate in found), None)
        in_head = parts.part_of(name) == "head"
        if origin is None:
            # Only an adapter, or a head as a whole, may be missing.
            beside = any(other.rpartition(".")[0] == name.rpartition(".")[0] for other in found)
            optional = any(name.startswith(f"{parts.base}.{path}.") for path in architecture.optional)
            if name not in adapted and (beside or not (optional or in_head)):
                raise SplitError(f"{name} is missing in {source}")
            new.add(name)
            continue
        if quantization.is_quantized(like) or len(serialized.get(origin, ())) > 1:
            on_disk = serialized.get(origin, {})
            _set_parameter(stage, names, _read_quantized(checkpoint, on_disk, found[origin], stage, name, quantizer))
            continue
        saved, own = checkpoint.shape(found[origin]), tuple(whole.get_parameter(name).shape)
        if in_head and not architecture.heads[parts.head].per_token and saved != own and saved[1:] == own[1:]:
            new.add(name)  # a head for another number of classes
            continue
        tensor = _read_like(checkpoint, found[origin], like)
        copies = [other for other in names if other != origin and other in found] if stage.plan.tie else []
        for other in copies:
            if not torch.equal(_read_like(checkpoint, found[other], like), tensor):
                both = f"{found[origin]} and {found[other]} in {source}"
                raise SplitError(f"{both} are tied by the config but differ; tie=False loads both")
        _set_parameter(stage, names, nn.Parameter(tensor, requires_grad=like.requires_grad))
    _initialize(stage, whole, new, seed)
    stage.newly_initialized = tuple(sorted(new))
    lacking = sorted(new - set(adapted))
    if lacking:
        _log.warning(
            "%s lacks %s, newly initialized%s",
            source,
            ", ".join(f"{name} for these classes" if name in found else name for name in lacking),
            f"; it also holds another head's {', '.join(sorted(others))}" if others else "",
        )
    return stage


def _read_like(checkpoint: Checkpoint, raw: str, like: nn.Parameter) -> torch.Tensor:
    shape = checkpoint.shape(raw)
    if shape != tuple(like.shape):
        raise SplitError(
            f"{raw} in {checkpoint.source}/{checkpoint.files[raw]}: its shape is {shape}, the model's is "
            f"{tuple(like.shape)}"
        )
    return checkpoint.read(raw).to(like.dtype)


def _read_quantized(
    checkpoint: Checkpoint, parts: Mapping[str, str], raw: str, stage: Stage, name: str, quantizer: Any
) -> nn.Parameter:
    """Read one weight and quantize it, or restore it from its parts on disk; nothing else is in memory meanwhile."""
    like = stage.get_parameter(name)
    module = stage.get_submodule(name.rpartition(".")[0])
    where = f"{checkpoint.source}/{checkpoint.files[raw]}"
    if quantizer.pre_quantized:
        tensors = {part: checkpoint.read(other) for part, other in parts.items()}
        try:
            value = quantization.from_parts(stage._model, name, tensors, quantizer)
        except Exception as error:  # transformers and bitsandbytes raise types of their own
            given = ", ".join(parts.values())
            raise SplitError(f"{name}: {where} has {given}, which make no whole weight: {error}") from error
        if quantization.is_quantized(like) and not quantization.is_quantized(value):
            raise SplitError(f"{raw} in {where}: is not quantized, as the model's config says; its scales are missing")
        shape = quantization.shape_of(value)
        if shape != tuple(like.shape):
            raise SplitError(f"{raw} in {where}: its shape is {shape}, the model's is {tuple(like.shape)}")
        if not quantization.is_quantized(value):
            return nn.Parameter(value.to(like.dtype), requires_grad=like.requires_grad)
        return cast(nn.Parameter, value)
    shape = checkpoint.shape(raw)
    if (shape[::-1] if quantization.transposed(module) else shape) != tuple(like.shape):
        raise SplitError(f"{raw} in {where}: its shape is {shape}, the layer's is {tuple(like.shape)}")
    value = checkpoint.read(raw).to(stage.config.dtype)
    return cast(nn.Parameter, quantization.quantize(module, value))


def hub_unreachable(name: str) -> bool:
    """Return whether a name must be on the Hugging Face hub, whose address cannot be resolved.

    The hub's library would try for a minute. A local path or a proxy settles it.
    """
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


def _set_parameter(stage: Stage, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Set a parameter under all its names, in a stage made from a skeleton, whose modules have no other user."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        stage.get_submodule(module)._parameters[leaf] = parameter


def _initialize(stage: Stage, whole: Any, new: set[str], seed: int) -> None:
    """Initialize the parameters in `new`, and every buffer on the meta device, as Hugging Face or peft does.

    The generator is seeded by (seed, module name) for each module, and the global one is left unchanged. whole: the
    skeleton.
    """
    from transformers.initialization import guard_torch_init_functions

    originals = {name: names[0] for names in aliases(whole) for name in names if len(names) > 1}
    tied: list[tuple[str, nn.Parameter]] = []
    for names in aliases(stage):
        parameter = stage.get_parameter(names[0])
        if names[0] in new:
            # NaN marks a weight that no initializer writes; see below.
            empty = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            _set_parameter(stage, names, parameter)
            if stage.plan.tie and names[0] in originals:
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
    # Innermost first, as Hugging Face does: GPT-2's attention scales its projection's weights again.
    modules = [(name, module) for name, module in stage.named_modules() if name in todo and module is not stage]
    modules.sort(key=lambda item: -item[0].count("."))

    def initialize_module(name: str, module: Any) -> None:
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        if stage.adapter is not None and hasattr(module, "reset_lora_parameters"):  # a layer with LoRA weights
            module.reset_lora_parameters(stage.adapter.name, stage.adapter.config.init_lora_weights)
            adapters.reset_magnitude(module, stage.adapter.name)
        else:
            stage._model._init_weights(module)

    with torch.no_grad(), guard_torch_init_functions(), torch.random.fork_rng(devices=[]):
        # Note: a copy of a tied weight is initialized as part of the original's module, under that module's seed, so
        # that all stages draw the same values for it.
        for name, parameter in tied:
            owner, _, leaf = name.rpartition(".")
            alone = shallow_copy(whole.get_submodule(owner))
            alone._parameters[leaf] = parameter
            initialize_module(owner, alone)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        for name, module in modules:
            initialize_module(name, module)
    for name, parameter in stage.named_parameters():
        if name in new and bool(parameter.isnan().any()):
            raise SplitError(f"{name}: {type(stage._model).__name__} has no initialization for it")
        if hasattr(parameter, "_is_hf_initialized"):
            del parameter._is_hf_initialized
