"""LoRA adapters of `peft`: detection on a model, attachment to one that is not loaded, and export as peft's folder.

A model with adapters is cut like any other: peft has put them inside the modules of the blocks. Only they are trained
and saved. peft is imported only if there are adapters.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pipecomp.errors import SplitError
from pipecomp.stages.partition.checkpoints import find_file
from pipecomp.stages.partition.quantization import is_quantized, plain_config
from pipecomp.utils.files import atomic_write

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's own, before the names in WEIGHTS_FILE
# Values of init_lora_weights that change the base model's weights, and do so again when a saved adapter is loaded. The
# result of some depends on samples or random numbers and cannot be reproduced: such a folder fits no base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_NOT_REPRODUCIBLE = ("pissa_niter", "corda", "lora_ga")
_CONVERT = "convert it with peft's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
SNAPSHOT = "allowed: none; give the folder of a download of it (huggingface_hub.snapshot_download)"
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter.

    config: peft's LoraConfig. name: peft's name of it. weights: the folder where it is saved, None for a new one.
    seed: seed of a new one's values, which are then those that peft draws for the unsplit model; None if they may
    depend on the layers' names.
    """

    config: Any
    name: str = "default"
    weights: str | None = None
    seed: int | None = None


# Of torch, which hold the model, with what to pass instead.
_WRAPPED_BY_TORCH = {
    "OptimizedModule": "the model before torch.compile; PipelineTrainer compiles its blocks with torch_compile=True",
    "DataParallel": "the model inside (model.module); processes / stages is the number of replicas",
    "DistributedDataParallel": "the model inside (model.module); processes / stages is the number of replicas",
}


def without_peft(model: Any) -> Any:
    """Return the Hugging Face model of a PeftModel, with its adapters; any other model unchanged.

    SplitError for a method other than LoRA: its prompts and the like would stay behind in the PeftModel; and for a
    wrapper of torch around the model.
    """
    wrapper = type(model).__name__
    if wrapper in _WRAPPED_BY_TORCH:
        raise SplitError(f"model: got {wrapper}, allowed: {_WRAPPED_BY_TORCH[wrapper]}")
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        _check_config(config)
    return model.get_base_model()


def is_method_of_peft(name: str) -> bool:
    """Return whether a PeftModel with LoRA has a method of this name, once peft is imported."""
    peft = sys.modules.get("peft")
    return peft is not None and (hasattr(peft.PeftModel, name) or hasattr(peft.LoraModel, name))


def adapter_of(model: Any) -> Adapter | None:
    """Return the adapter of a model, None if it has none. SplitError for several, or for a method other than LoRA."""
    found = getattr(model, "peft_config", None)
    if not found:
        return None
    if len(found) > 1:
        raise SplitError(f"adapters {', '.join(sorted(found))}: a model that is split may have one")
    ((name, config),) = found.items()
    _check_config(config)
    _check_ties(config)
    if _starts_with(config, _NOT_REPRODUCIBLE):
        raise SplitError(
            f"init_lora_weights: got {config.init_lora_weights!r}. A saved adapter cannot reproduce its change of the "
            f"base model: {_CONVERT}, or start with 'pissa' or 'olora'"
        )
    return Adapter(config=config, name=name)


def check_saved(model: Any) -> None:
    """Raise SplitError if the adapter's folder would lack a parameter that training changes, or new embeddings."""
    adapter = adapter_of(model)
    if adapter is None:
        return
    names = saved_names(model, adapter)
    saved = {id(value) for name, value in model.state_dict(keep_vars=True).items() if name in names}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in saved:
            remedy = "name its module in LoraConfig.modules_to_save, or freeze it"
            raise SplitError(f"{name}: is trained but not saved with the adapter: {remedy}")
    config = adapter.config
    base = getattr(config, "base_model_name_or_path", None)
    own = getattr(getattr(model, "config", None), "vocab_size", None)
    try:
        file = find_file(base, "config.json", cached=True) if base else None
    except OSError:  # neither a folder (any more) nor a valid name on the hub
        return
    rows = json.loads(Path(file).read_text(encoding="utf-8")).get("vocab_size") if file else None
    if not rows or not own or own <= rows:
        return
    tokens = getattr(config, "trainable_token_indices", None) or ()
    trained = set(itertools.chain.from_iterable(tokens.values()) if isinstance(tokens, dict) else tokens)
    has_rows = set(range(rows, own)) <= trained  # in the layers to which peft has added tokens
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is None or id(layer.weight) in saved or (has_rows and hasattr(layer, "token_adapter")):
            continue
        raise SplitError(
            f"model: got a vocabulary of {own}, and {base}, the adapter's base, has {rows}: the new embeddings are not "
            "saved. Save the resized model and put the adapter on it, or name both layers in modules_to_save"
        )


def _check_config(config: Any, *, values: bool = False) -> None:
    """Raise SplitError for unsupported options; values: also for those that need a model in memory."""
    kind = str(getattr(getattr(config, "peft_type", None), "value", None))
    if kind != "LORA":
        raise SplitError(f"adapter: got {type(config).__name__} of type {kind}, allowed: a peft.LoraConfig")
    if getattr(config, "layer_replication", None):
        raise SplitError("LoraConfig.layer_replication: a model whose blocks are repeated cannot be split")
    tokens = getattr(config, "alora_invocation_tokens", None)
    if tokens:
        raise SplitError(f"LoraConfig.alora_invocation_tokens: got {tokens!r}, allowed: None; stages see no tokens")
    for key in ("trainable_token_indices", "monteclora_config") if values else ():
        value = getattr(config, key, None)
        if value:
            raise SplitError(f"LoraConfig.{key}: got {value!r}, allowed: None; or give a PeftModel in memory")


def _check_ties(config: Any) -> None:
    """Raise SplitError for LoRA weights that peft has tied: each stage would train its own."""
    tied = getattr(config, "target_modules_to_tie", None)
    if tied:
        layers, allowed = ", ".join(sorted(tied)), "False, or no embeddings among target_modules"
        raise SplitError(f"LoraConfig.ensure_weight_tying: ties {layers} across stages; allowed: {allowed}")


def _starts_with(config: Any, values: tuple[str, ...]) -> bool:
    """Return whether init_lora_weights begins with one of these; peft ignores case."""
    return str(getattr(config, "init_lora_weights", True)).lower().startswith(values)


def from_folder(path: str) -> tuple[Adapter, str] | None:
    """Read a saved adapter, to be trained on, and its base model's location; None if `path` is no adapter folder."""
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    if revision not in (None, "main"):
        raise SplitError(f"{file}: revision: got {revision!r}, {SNAPSHOT}, as base_model_name_or_path")
    if not base:
        raise SplitError(f"{file} does not name the base model: give its folder or hub name and lora={path!r}")
    return _read(path), str(base)


def as_adapter(lora: Any, *, seed: int | None = None) -> Adapter:
    """Make an adapter of a LoraConfig, or of a folder that peft or pipecomp has saved. seed: see `Adapter`."""
    if isinstance(lora, str) or hasattr(lora, "__fspath__"):
        return _read(str(lora))
    _check_config(lora, values=True)
    if getattr(lora, "init_lora_weights", None) not in (True, "gaussian"):
        options = "init_lora_weights other than True and 'gaussian'"
        raise SplitError(f"lora: {options}, starts from the weights of the base model: give a PeftModel in memory")
    return Adapter(config=lora, seed=seed)


def new_adapter(rank: int) -> Adapter:
    """Make a LoRA adapter of all linear layers."""
    return Adapter(config=_peft().LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def _read(path: str) -> Adapter:
    """Read a saved adapter. SplitError if the folder has none, or one for changed base weights."""
    config_class = _peft().PeftConfig
    if not (Path(path) / WEIGHTS_FILE).is_file():
        raise SplitError(f"{path}: no adapter there, looked for {CONFIG_FILE} and {WEIGHTS_FILE}")
    config = config_class.from_pretrained(path)
    config.inference_mode = False  # peft saves True
    _check_config(config, values=True)
    if _starts_with(config, _CHANGES_BASE):
        raise SplitError(
            f"{Path(path) / CONFIG_FILE}: init_lora_weights: got {config.init_lora_weights!r}. The adapter fits only "
            f"base weights that peft changes: give a PeftModel in memory, or {_CONVERT}"
        )
    return Adapter(config=config, weights=str(path))


def attach(model: Any, adapter: Adapter, base: str | None = None) -> Any:
    """Add the adapter to the model and freeze the rest, as peft does; on the meta device without values.

    base: the model's folder or hub name, for the adapter's configuration; default: the one in it.
    """
    config = copy.deepcopy(adapter.config)  # peft writes into it
    if _starts_with(config, _CHANGES_BASE):
        config.init_lora_weights = True  # of the same shapes; LoftQ would need a GPU
    model.name_or_path = base or config.base_model_name_or_path or ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads names that transformers has deprecated
        warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)  # peft sets it by itself for each Conv1D
        adapted = _peft().get_peft_model(model, config, adapter_name=adapter.name).get_base_model()
    _check_ties(config)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and is_quantized(parameter):
            module = name.partition(".modules_to_save.")[0]
            raise SplitError(
                f"LoraConfig.modules_to_save: {module} is quantized and cannot be trained; allowed: layers that are "
                "not quantized, or name it in BitsAndBytesConfig.llm_int8_skip_modules"
            )
    return adapted


def draw_start(whole: Any, adapter: Adapter, names: Collection[str]) -> dict[str, Tensor]:
    """Draw a new adapter's values as peft does for the unsplit model after `torch.manual_seed(adapter.seed)`.

    whole: the skeleton, with the adapter. names: those to return, of `saved_names`.
    """
    if adapter.seed is None or adapter.weights is not None:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = copy.deepcopy(adapter.config)
    config.use_dora = False  # its magnitudes are not drawn
    with torch.device("meta"):
        base = type(whole)._from_config(plain_config(whole.config), dtype=whole.dtype)
    drawn: dict[Any, dict[str, Tensor]] = {}

    def keep(layer: Any, *_: Any, **__: Any) -> None:
        own = {name: value.detach() for name, value in layer.named_parameters() if not value.is_meta}
        drawn[layer] = {name: value.to(whole.dtype) for name, value in own.items()}

    # Note: peft draws a layer's weights on the CPU, and then moves them to the base layer's device, "meta", by this.
    with (
        torch.random.fork_rng(devices=[]),
        mock.patch.object(BaseTunerLayer, "_move_adapter_to_device_of_base_layer", keep),
    ):
        torch.manual_seed(adapter.seed)
        adapted = attach(base, replace(adapter, config=config))
    found = {f"{path}.{name}": x for path, layer in adapted.named_modules() for name, x in drawn.get(layer, {}).items()}
    return {name: value for name, value in found.items() if name in names}


@contextmanager
def disabled(model: Any) -> Iterator[None]:
    """In the body, let a model or stage compute without its adapter, as peft's `disable_adapter` does."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers = [layer for layer in model.modules() if isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def reset_magnitude(module: Any, name: str) -> None:
    """Set DoRA's magnitudes of a layer, if it has any, to the norms of its weights, as peft does for a new adapter."""
    magnitudes = getattr(module, "lora_magnitude_vector", None) or {}
    if name not in magnitudes:
        return
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(module.get_base_layer())
    norms = magnitudes[name].get_weight_norm(weight, weight.new_zeros(()), scaling=1)
    magnitudes[name].weight.data.copy_(norms)


def base_name(name: str) -> str:
    """Return a parameter's name in the base model's checkpoint, without the modules that peft puts around it."""
    return _WRAPPERS.sub("", name)


def saved_names(model: Any, adapter: Adapter) -> dict[str, str]:
    """Map the adapter's names in a model's state_dict to their names in an adapter folder."""
    # Without the embeddings, which peft would save too, but which never change here.
    return {own: saved for saved, own in _folder_names(model, adapter, save_embedding_layers=False).items()}


def _folder_names(model: Any, adapter: Adapter, **options: Any) -> dict[str, str]:
    """Map the names in an adapter folder to those in a model's state_dict; some occur twice."""
    peft = _peft()
    names = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # peft chooses by names alone, so names can stand in for the values.
        chosen = peft.get_peft_model_state_dict(
            model, state_dict={name: name for name in names}, adapter_name=adapter.name, **options
        )
    return {PREFIX + saved: own for saved, own in chosen.items()}


def read_saved(
    adapter: Adapter, whole: Any, names: Mapping[str, str], like: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read a saved adapter's parameters, and embeddings of the base model that peft has saved beside them.

    Args:
        adapter: an adapter with the folder; a new one has nothing to read.
        whole: the skeleton of the model.
        names: those that the stage needs, of `saved_names`.
        like: tensors of these names, with their shapes.

    Returns:
        Both by the names in the model's state_dict.

    Raises:
        SplitError: names a tensor that is missing, has another shape, or does not belong to the model.
    """
    tuned: dict[str, Tensor] = {}
    if adapter.weights is None:
        return tuned, {}
    from safetensors import safe_open

    path = f"{adapter.weights}/{WEIGHTS_FILE}"
    known = _folder_names(whole, adapter, save_embedding_layers=True)
    adapted = saved_names(whole, adapter)
    with safe_open(path, framework="pt", backend="pread") as file:
        available = dict.fromkeys(file.keys())
        for own, saved in names.items():
            if saved not in available:
                raise SplitError(f"{path} has no {saved}, for the model's {own}")
            tuned[own] = file.get_tensor(saved)
            if tuned[own].shape != like[own].shape:
                shapes = f"its shape is {tuple(tuned[own].shape)}, the model's is {tuple(like[own].shape)}"
                raise SplitError(f"{saved} in {path}: {shapes}")
        for saved in available:
            if saved not in known:
                raise SplitError(f"{saved} in {path}: the model has no such tensor")
        base = {known[saved]: file.get_tensor(saved) for saved in available if known[saved] not in adapted}
    return tuned, base


def write(folder: Path, adapter: Adapter, tensors: Mapping[str, Tensor]) -> Path:
    """Write peft's adapter folder from all tensors of the adapter, by `saved_names`; returns the file of weights."""
    from safetensors.torch import save_file

    config = copy.deepcopy(adapter.config)
    config.inference_mode = True  # as peft saves it
    with atomic_write(folder / WEIGHTS_FILE) as part:
        save_file(dict(tensors), str(part), metadata={"format": "pt"})
        config.save_pretrained(str(folder))
    return folder / WEIGHTS_FILE


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise SplitError("LoRA needs peft: install pipecomp[lora]") from error
    return peft
