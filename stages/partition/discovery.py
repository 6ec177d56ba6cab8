"""Structure of models without an entry, observed on a small copy; and the cache of what small copies have shown.

A declaration of transformers (`base_model_pp_plan`) names the list of blocks; without one it is the list whose length
is the number of layers. What runs before the first block belongs to the first stage, and after the last to the last.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pipecomp.errors import SplitError
from pipecomp.stages.partition import losses
from pipecomp.stages.partition.quantization import plain_config
from pipecomp.stages.partition.small_copy import TOKENS, small_configs
from pipecomp.stages.partition.structure import Architecture, Head, NoEmbeddings
from pipecomp.utils.files import atomic_write_text

MOST_PARAMETERS = 150_000_000
_SOURCES = ("discovery", "equality", "losses", "planning", "small_copy", "splitting", "structure")
_HEADS = {
    "causal": (losses.causal_lm, ("ForCausalLM", "LMHeadModel", "LMHead")),
    "classes": (losses.classification, ("ForSequenceClassification",)),
    "masked": (losses.masked_lm, ("ForMaskedLM",)),
}
_REGISTER = "pipecomp.stages.register(Architecture(model_type=..., ...)) adds an entry, see its documentation"
_known: dict[str, Any] = {}


def discover(config: Any, model_class: type | None) -> Architecture:
    """Return the structure of a model without an entry. SplitError if it has none that can be cut."""
    found = model_class or class_of(config)
    name, kind = _head_of(found)
    try:
        small = SmallCopy(config, found)
    except Exception as error:  # raised by the model's code
        raise SplitError(_unknown(config, f"no small copy of it runs on tokens alone: {_first_line(error)}")) from error
    seen = small.cached("structure", lambda: _observe(small))
    if "error" in seen:
        raise SplitError(_unknown(config, seen["error"]))
    loss, _ = _HEADS[seen.get("loss", kind)]
    head = Head(
        loss=loss,
        per_token=kind != "classes",
        pools_last_token=kind == "classes" and seen["pools"],
        reads_first_token=kind == "classes" and not seen["pools"],
    )
    return Architecture(
        model_type=str(config.model_type),
        heads={name: head},
        default_head=name,
        blocks=seen["blocks"],
        before=dict.fromkeys(seen["before"], NoEmbeddings),
        after=tuple(seen["after"]),
        shared=tuple(seen["shared"]),
        optional=tuple(path for path in seen["after"] if path == "pooler"),
        block_returns_tuple=seen["returns"],
        extra_inputs=tuple(seen["extra_inputs"]),
        forward_options=seen["options"],
        draws_outside=seen["draws"],
        lanes=seen["lanes"],
    )


def class_of(config: Any) -> type:
    """Return the class that a config names, else transformers' for causal language models or for classification."""
    import transformers
    from transformers.models.auto import modeling_auto

    model_type = str(getattr(config, "model_type", None))
    named = next(iter(getattr(config, "architectures", None) or ()), None)
    names = [
        named if named is not None and head_kind(named) is not None else None,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type),
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type),
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type),
        named,
    ]
    for name in names:
        found = getattr(transformers, name, None) if name else None
        if isinstance(found, type):
            return found
    raise SplitError(f"model_type {model_type!r} cannot be split: transformers has no model of it. {_REGISTER}")


def text_part(config: Any) -> Any:
    """Return the config of a vision-language model's text model, if that is a model of its own; others unchanged.

    The first class that the config names decides, if it is for text.
    """
    named = next(iter(getattr(config, "architectures", None) or ()), None)
    if not hasattr(config, "get_text_config") or (named is not None and head_kind(named) is not None):
        return config
    try:
        inner = config.get_text_config()
    except ValueError:  # several of them
        return config
    return inner if inner is not config and _is_causal(inner) else config


def _is_causal(config: Any) -> bool:
    from transformers.models.auto import modeling_auto

    return config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _head_of(model_class: type) -> tuple[str, str]:
    """Return the name of transformers' class among a class's bases, and its kind of head."""
    for base in model_class.__mro__:
        kind = head_kind(base.__name__)
        if kind is not None:
            return base.__name__, kind
    raise SplitError(
        f"{model_class.__name__} cannot be split; allowed: models for causal or masked language modeling "
        f"(…ForCausalLM, …ForMaskedLM) and for sequence classification. {_REGISTER}"
    )


def head_kind(name: str) -> str | None:
    """Return the kind of head of a model class by its name, None if stages have no loss for it."""
    from transformers.models.auto import modeling_auto

    for kind, (_, endings) in _HEADS.items():
        if name.endswith(endings):
            return kind
    causal = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    return "causal" if name in causal and not name.endswith("ForConditionalGeneration") else None


def _unknown(config: Any, why: str) -> str:
    return f"model_type {config.model_type!r} has no entry, and {why}. {_REGISTER}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


class SmallCopy:
    """A small copy of a model's configuration, and the key of what it shows.

    Attributes:
        config: configuration of the copy.
        model_class: class of the model.
        key: digest of the configuration, the class's code, the versions, and pipecomp's own code.
    """

    def __init__(self, config: Any, model_class: type) -> None:
        self.model_class = model_class
        made = small_configs(plain_config(config))
        self.config = made[0]
        settings = [
            {key: value for key, value in one.to_dict().items() if key != "transformers_version"} for one in made
        ]
        attention = getattr(self.config, "_attn_implementation", None)
        described = json.dumps([settings, attention, model_class.__qualname__, *_versions(model_class)], default=str)
        self.key = hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
        chosen = self.cached("size", lambda: self._choose(made))
        if "error" in chosen:
            raise SplitError(chosen["error"])
        self.config = made[chosen["size"]]

    def _choose(self, made: list[Any]) -> dict[str, Any]:
        """Return the number of the first configuration that a model of at most MOST_PARAMETERS accepts."""
        error = ""
        for number, config in enumerate(made):
            self.config = config
            try:
                with torch.device("meta"):
                    count = sum(p.numel() for p in self._build(config).parameters())
                if count > MOST_PARAMETERS:
                    error = error or f"it has {count / 1e6:.0f} million parameters"
                    continue
                with torch.no_grad():
                    _forward_options(self.build(), self.tokens())
            except Exception as failed:  # raised by the model's code
                error = error or _first_line(failed)
                continue
            return {"size": number}
        return {"error": error}

    def build(self, seed: int = 0) -> Any:
        """Build the copy with random weights in float32, every one of which differs from 0 and 1; in training mode."""
        torch.manual_seed(seed)
        model = self._build(self.config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
        return model.train()

    def _build(self, config: Any) -> Any:
        build: Any = self.model_class
        return build._from_config(config, dtype=torch.float32)

    def tokens(self) -> Tensor:
        """Return random token ids [2, TOKENS], none of them special."""
        vocabulary = int(text_config(self.config).vocab_size)
        return torch.randint(min(4, vocabulary - 1), vocabulary, (2, TOKENS))

    def cached(self, what: str, compute: Callable[[], dict[str, Any]], more: str = "") -> dict[str, Any]:
        """Return what is known under the key, or compute it on the CPU, alone with the random generator."""
        name = hashlib.blake2b(f"{self.key} {what} {more}".encode(), digest_size=16).hexdigest()
        if name in _known:
            return _known[name]
        path = cache_folder() / f"{self.config.model_type}-{what}-{name}.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            with alone():
                found = compute()
            with suppress(OSError):  # a home that cannot be written to
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write_text(path, json.dumps(found))
        _known[name] = found
        return found


def cache_folder() -> Path:
    """Return the folder for what small copies have shown, in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipecomp" / "architectures"


@lru_cache
def _own_code() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _versions(model_class: type) -> list[str]:
    import transformers

    try:
        code = hashlib.blake2b(Path(inspect.getfile(model_class)).read_bytes(), digest_size=16).hexdigest()
    except (OSError, TypeError):  # defined in a shell
        code = ""
    return [transformers.__version__, torch.__version__, code, _own_code()]


@contextmanager
def alone() -> Iterator[None]:
    """Run on the CPU in float32 with gradients, whatever the caller has set; the random generator is left as it was."""
    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    with (
        _disable_current_modes(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        _quiet(),
    ):
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(default)


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def text_config(config: Any) -> Any:
    """Return the part of a config that describes the blocks."""
    return config.get_text_config(decoder=True)


# -- observation


def _observe(small: SmallCopy) -> dict[str, Any]:
    """Run a small copy and return its structure, or {"error": reason}."""
    try:
        model = small.build()
        base = model.base_model
        if base is model:
            return {"error": f"{type(model).__name__} has no base model named {model.base_model_prefix!r}"}
        ids_BS = small.tokens()
        options = _forward_options(model, ids_BS)
        path = _find_blocks(model, base, ids_BS, options)
        _, loss = _head_of(small.model_class)
        if loss == "causal" and not _shifts_labels(model, ids_BS, options):
            loss = "masked"
    except SplitError as error:
        return {"error": str(error)}
    except Exception as error:  # raised by the model's code
        return {"error": f"a small copy of it does not run on tokens alone: {_first_line(error)}"}
    blocks: Any = base.get_submodule(path)
    units, loose = _outside(base, path)
    watch = _Watch(model, blocks, units)
    with watch.running():
        model(input_ids=ids_BS, **options)
    # A frozen table (sinusoids) may be read by the blocks, and costs no gradients on every stage.
    trained = {name: unit for name, unit in units.items() if any(p.requires_grad for p in unit.parameters())}
    before = [name for name in trained if watch.phases[name] <= {"before"}]
    after = [name for name in trained if watch.phases[name] == {"after"}]
    shared = [name for name in units if name not in (*before, *after) and _has_parameters(units[name])]
    parameters = inspect.signature(base.forward).parameters
    return {
        "blocks": path,
        "loss": loss,
        "lanes": watch.lanes,
        "before": before,
        "after": after,
        "shared": [*shared, *loose],
        "returns": watch.returns,
        "draws": watch.draws,
        "pools": isinstance(getattr(model, "score", None), nn.Linear),
        "extra_inputs": [key for key in ("token_type_ids",) if key in parameters],
        "options": options,
    }


def _forward_options(model: Any, ids_BS: Tensor) -> dict[str, Any]:
    """Return the options that the model's forward accepts: no cache, and outputs with names."""
    for options in ({"use_cache": False, "return_dict": True}, {"return_dict": True}):
        try:
            model(input_ids=ids_BS, **options)
            return options
        except TypeError:  # an argument that it does not know
            continue
    model(input_ids=ids_BS)
    return {}


def _shifts_labels(model: Any, ids_BS: Tensor, options: dict[str, Any]) -> bool:
    """Return whether a language model's loss shifts the labels itself; decoders of BART's kind do not."""
    output = model(input_ids=ids_BS, labels=ids_BS, **options)
    unshifted = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), ids_BS.flatten())
    return not torch.equal(unshifted, output.loss)


def _find_blocks(model: Any, base: nn.Module, ids_BS: Tensor, options: dict[str, Any]) -> str:
    """Return the path of the list of blocks."""
    count = getattr(text_config(model.config), "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and not any(part.isdigit() for part in name.split("."))
    }
    called = _called_in_order(model, lists, ids_BS, options)
    declared = getattr(model.config, "base_model_pp_plan", None) or {}
    for names in (
        [name for name in called if name in declared and len(lists[name]) == count],
        [name for name in called if len(lists[name]) == count],
        called,
    ):
        if len(names) == 1:
            return names[0]
        if names:
            raise SplitError(f"its blocks are not one list: {', '.join(names)} are called one after another")
    has = ", ".join(f"{name} ({len(module)})" for name, module in lists.items()) or "none"
    raise SplitError(f"no list of its {count} blocks is called one block after another; lists of modules: {has}")


def _called_in_order(model: Any, lists: dict[str, nn.ModuleList], ids_BS: Tensor, options: dict[str, Any]) -> list[str]:
    """Return the lists whose modules are called once each, one after another."""
    calls: dict[str, list[int]] = {name: [] for name in lists}
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name, i=i: calls[name].append(i))
        for name, modules in lists.items()
        for i, module in enumerate(modules)
    ]
    try:
        model(input_ids=ids_BS, **options)
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, modules in lists.items() if calls[name] == list(range(len(modules))) and len(modules) > 1]


def _outside(base: nn.Module, blocks: str) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the outermost modules beside the path of the blocks, by path, and parameters on the path itself."""
    units: dict[str, nn.Module] = {}
    loose: list[str] = []
    owner, prefix = base, ""
    for name in blocks.split("."):
        loose += [prefix + key for key in owner._parameters if owner._parameters[key] is not None]
        for key, child in owner._modules.items():
            if child is not None and key != name:
                units[prefix + key] = child
        inner = owner._modules[name]
        assert inner is not None, "the path of the list of blocks"
        owner, prefix = inner, f"{prefix}{name}."
    return units, loose


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class _Watch:
    """Phases in which modules outside of the blocks run, and what blocks return.

    Attributes:
        phases: phase of each module: "before" the blocks, "between" or "after" them.
        returns: False if a block returns hidden states, else the length of its tuple.
        draws: whether random numbers are drawn before or after the blocks.
        lanes: as `Architecture.lanes`.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], units: dict[str, nn.Module]) -> None:
        self._model, self._blocks, self._units = model, list(blocks), units
        self.phases: dict[str, set[str]] = {name: set() for name in units}
        self.returns: bool | int = False
        self.draws = False
        self.lanes = 1
        self._phase, self._state = "before", torch.get_rng_state()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch one forward of the model."""
        hooks = [
            self._blocks[0].register_forward_pre_hook(self._enter),
            self._blocks[-1].register_forward_hook(self._leave),
        ]
        for name, unit in self._units.items():
            for module in unit.modules():  # a method of it may be called, rather than itself
                hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.phases[name].add(self._phase)))
        self._state = torch.get_rng_state()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._note_draws()

    def _enter(self, *_: Any) -> None:
        self._note_draws()
        self._phase = "between"

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.returns = False if isinstance(output, Tensor) else len(output)
        hidden = output if isinstance(output, Tensor) else output[0]
        self.lanes = hidden.shape[2] if isinstance(hidden, Tensor) and hidden.dim() == 4 else 1
        self._phase, self._state = "after", torch.get_rng_state()

    def _note_draws(self) -> None:
        self.draws = self.draws or not torch.equal(self._state, torch.get_rng_state())
