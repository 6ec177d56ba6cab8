"""Hugging Face checkpoints read tensor by tensor: safetensors or PyTorch, one file or many, folder or hub."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipecomp.errors import SplitError
from pipecomp.stages.partition.structure import Architecture

# In transformers' own order: a single file is preferred to an index beside it.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"attn\.masked_bias$")  # buffers that older versions saved


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """Tensors of a `from_pretrained` folder or hub name; each is read on its own, on request.

    Opened files stay open until the end of the context.

    Attributes:
        source: the folder or hub name.
        files: file of each tensor, by its name in the checkpoint, or in the model after `convert`.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._open: dict[str, Any] = {}
        self._made: dict[str, _Conversion] = {}
        for name in WEIGHT_FILES:
            path = find_file(source, name)
            if path is None:
                continue
            if name.endswith(".json"):
                self.files: dict[str, str] = dict(json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"])
            else:
                self.files = dict.fromkeys(self._file(name).keys(), name)
            self._on_disk = dict(self.files)
            return
        raise SplitError(f"{source}: no weights found, looked for {', '.join(WEIGHT_FILES)}")

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            if not isinstance(file, dict):
                file.__exit__(None, None, None)
        self._open.clear()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if name in self._made:
            return tuple(self._made[name].make(name, lambda raw: torch.empty(self._shape(raw), device="meta")).shape)
        return self._shape(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        file = self._file_of(name)
        return tuple(file[name].shape if isinstance(file, dict) else file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory of its own, in the checkpoint's dtype."""
        if name in self._made:
            return self._made[name].make(name, self._read).contiguous()
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        file = self._file_of(name)
        return file[name].clone() if isinstance(file, dict) else file.get_tensor(name)

    def dtype(self) -> torch.dtype:
        """Return the dtype of the first tensor of plain floats, the checkpoint's if the config has none."""
        for name in self._on_disk:
            file = self._file_of(name)
            if isinstance(file, dict):
                sample = file[name]
            else:
                part = file.get_slice(name)
                sample = part[0:0] if part.get_shape() else part[()]
            if sample.is_floating_point() and sample.element_size() > 1:  # not FP8
                return sample.dtype
        return torch.float32

    def convert(self, model: Any, names: Iterable[str]) -> None:
        """Take up the names and layouts of the model, as transformers does: experts on disk are joined, for example.

        Args:
            model: a model of transformers, on any device.
            names: names of its tensors. `files` has these in place of those on disk that they are made of.
        """
        from transformers import conversion_mapping, core_model_loading

        known = dict.fromkeys(names, True)
        conversions = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [one for one in conversions if isinstance(one, core_model_loading.WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, core_model_loading.WeightConverter)]
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        text_only = {raw: name for raw in self._on_disk if (name := _text_name(raw)) in known and raw not in known}
        if text_only:  # of a vision-language model, whose other tensors belong to no part of the text model
            self.files = {raw: file for raw, file in self.files.items() if raw in text_only or raw in known}
        for raw in sorted(self._on_disk, key=core_model_loading.dot_natural_key):
            if raw in text_only:
                self._made[text_only[raw]] = _Conversion(text_only[raw], None, model, [(raw, None)])
                self.files[text_only[raw]] = self.files.pop(raw)
                continue
            name, pattern = core_model_loading.rename_source_key(
                raw, renamings, converters, model.base_model_prefix, known
            )
            converter = of_pattern.get(pattern) if pattern is not None else None
            targets = [name]
            if converter is not None:
                targets = [name.replace(converter.target_patterns[0], other) for other in converter.target_patterns]
            targets = [target for target in targets if target in known]
            if not targets or (converter is None and (name == raw or raw in known)):
                continue
            conversion = self._made.get(targets[0]) or _Conversion(name, converter, model)
            conversion.sources.append((raw, pattern))
            if raw not in targets:
                self.files.pop(raw, None)
            for target in targets:
                self._made[target], self.files[target] = conversion, self._on_disk[raw]

    def match(
        self, names: Iterable[str], base: str, architecture: Architecture, ignored: Iterable[str]
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Match the model's names with the checkpoint's.

        Args:
            names: the model's.
            base: name of the base model (`transformer`), which names lack in the checkpoint of a base model.
            architecture: entry with the modules that checkpoints may lack (`optional`) or name differently (`renamed`).
            ignored: patterns of tensors that the model's class ignores.

        Returns:
            {model's name: checkpoint's name}, and the checkpoint's names that belong to another head.

        Raises:
            SplitError: the base model has no place for a tensor: the checkpoint is of another model or size.
        """
        known = set(names)
        patterns = [*IGNORED, *ignored]
        inner = tuple(f"{base}.{path}." for path in architecture.optional)
        is_bare = not any(raw.startswith(base + ".") for raw in self.files)
        found: dict[str, str] = {}
        others: list[str] = []
        for raw in self.files:
            name = raw
            for old, new in OLD_NAMES:
                name = name.replace(old, new)
            for old, new in architecture.renamed.items():
                name = new + name[len(old) :] if name.startswith(f"{old}.") else name
            match = next((n for n in (name, f"{base}.{name}") if n in known), None)
            full = f"{base}.{name}" if is_bare else name
            if match is not None:
                found[match] = raw
            elif not any(re.search(pattern, full) for pattern in patterns):
                if full.startswith(base + ".") and not full.startswith(inner):
                    raise SplitError(f"{raw} in {Path(self.source) / self.files[raw]}: the model has no such tensor")
                others.append(raw)
        return found, tuple(others)

    def _file_of(self, name: str) -> Any:
        file = self._file(self._on_disk[name])
        if name not in file.keys():  # noqa: SIM118 (safetensors' files are no dicts)
            raise SplitError(f"{name}: the index of {self.source} says {self._on_disk[name]}, which does not hold it")
        return file

    def _file(self, name: str) -> Any:
        """Open a safetensors file, or a PyTorch file as the dictionary of its memory-mapped tensors."""
        if name in self._open:
            return self._open[name]
        path = find_file(self.source, name)
        if path is None:
            raise SplitError(f"{self.source}: {name} is missing")
        try:
            if path.endswith(".safetensors"):
                from safetensors import safe_open

                # Not mmap: its tensors are views of the file, and change with it when training saves over its start.
                self._open[name] = safe_open(path, framework="pt", backend="pread")
            else:
                self._open[name] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # both libraries raise their own types, and plain RuntimeError
            raise SplitError(f"{path} cannot be read as a checkpoint: {error}") from error
        return self._open[name]


def _text_name(raw: str) -> str:
    """Return the name in the text model of a tensor of a vision-language model's checkpoint."""
    for before, after in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if raw.startswith(before):
            return after + raw.removeprefix(before)
    return raw.removeprefix("language_model.")


@dataclass
class _Conversion:
    """Tensors of a model that are made of others on disk. converter: of transformers; None if one is only renamed."""

    first: str
    converter: Any
    model: Any
    sources: list[tuple[str, str | None]] = field(default_factory=list)

    def make(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Make one of the model's tensors."""
        if self.converter is None:
            return read(self.sources[0][0])
        converter = copy.deepcopy(self.converter)
        for raw, pattern in self.sources:
            converter.add_tensor(self.first, raw, pattern, read(raw))
        made = converter.convert(self.first, model=self.model, config=self.model.config)
        if name not in made:
            raise SplitError(f"{name} cannot be made of {', '.join(raw for raw, _ in self.sources)}")
        return made[name][0] if isinstance(made[name], list) else made[name]


def find_file(source: str, name: str, *, cached: bool = False) -> str | None:
    """Return the path of a file in a folder, or of a hub repository, from its cache if possible.

    Args:
        source: folder or hub name.
        name: name of the file.
        cached: look in the cache only.

    Returns:
        None if there is no such file.

    Raises:
        OSError: the source is neither a folder nor a repository.
    """
    if Path(source).is_dir():
        path = Path(source) / name
        return str(path) if path.is_file() else None
    from transformers.utils import cached_file

    return cached_file(
        source,
        name,
        local_files_only=cached,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
