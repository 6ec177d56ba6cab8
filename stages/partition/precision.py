"""Parts of a half-precision model that stay in float32, as in transformers.

These are the parameters and buffers that the model's class names in `_keep_in_fp32_modules_strict` (in fp16 also in
`_keep_in_fp32_modules`), such as a router; norms with running statistics, which torch cannot compute otherwise; and
what a half-precision model in memory has in float32, except for adapters, whose float32 copies the optimizer keeps.
Buffers of other names keep their dtype, which for rotary frequencies is float32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipecomp.stages.partition.quantization import is_quantized

HALF = (torch.bfloat16, torch.float16)
_HOOKS = "_pipecomp_float32_hooks"  # of a module, by `cast_around`


def named_by_class(model: nn.Module, dtype: torch.dtype, names: str | Sequence[str] = "auto") -> list[str]:
    """List parameters and buffers that stay in float32 by their names.

    Args:
        model: A Hugging Face model, which may be on the meta device, or another module, which names none itself.
        dtype: Dtype of the other weights; float32 keeps nothing.
        names: Parts of names, in which * stands for any characters; "auto" for those that the model's class names.
    """
    if dtype not in HALF:
        return []
    if isinstance(names, str):
        lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == torch.float16 else [])]
        names = sorted({name for key in lists for name in getattr(model, key, None) or ()})
    if not names:
        return []
    pattern = re.compile("|".join(name.replace("*", ".*") for name in names))
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_floating_point() and pattern.search(name)]


def load_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a skeleton on the meta device float32 for what its class names, so that it is read without rounding."""
    for name in named_by_class(model, dtype):
        owner, _, leaf = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), leaf)
        tensor.data = tensor.data.to(torch.float32)


def float32_parameters(model: nn.Module, named: Sequence[str]) -> list[nn.Parameter]:
    """List the parameters that stay in float32. named: by `named_by_class`."""
    own = [(name, p) for name, p in model.named_parameters() if p.is_floating_point() and not is_quantized(p)]
    kept = {id(p) for module in model.modules() if _has_statistics(module) for p in module.parameters(recurse=False)}
    kept |= {id(model.get_parameter(name)) for name in named if name in dict(own)}
    sizes = {half: sum(p.numel() for _, p in own if (p.dtype in HALF) == half) for half in (True, False)}
    if sizes[True] > sizes[False]:  # otherwise the model is in float32, and a part of it was cast
        kept |= {id(p) for name, p in own if p.dtype == torch.float32 and ".lora_" not in name}
    return [p for _, p in own if id(p) in kept]


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None


def cast_around(model: nn.Module, kept: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
    """Let the modules that own these parameters compute in float32, and return hidden states in the model's dtype.

    A module of torch does not cast its input, so that this does: it returns the dtype that it is given. One of
    transformers casts its input itself and may return float32, which the next layer does not take: a result of the
    input's shape is cast, others, such as a router's scores, stay in float32.
    """
    ids = {id(p) for p in kept}
    for module in model.modules():
        for handle in module.__dict__.pop(_HOOKS, ()):  # of an engine before, with another dtype
            handle.remove()
        if not any(id(p) in ids for p in module.parameters(recurse=False)):
            continue
        if type(module).__module__.startswith("torch.nn."):
            given: list[torch.dtype | None] = []
            before = module.register_forward_pre_hook(partial(_cast_input, dtype, given))
            hooks = [before, module.register_forward_hook(partial(_restore_dtype, given))]
        else:
            hooks = [module.register_forward_hook(partial(_cast_hidden, dtype))]
        module.__dict__[_HOOKS] = hooks


def _cast_input(dtype: torch.dtype, given: list[torch.dtype | None], module: nn.Module, args: Any) -> Any:
    """Cast to float32, and note the dtype that the module is to return; None for float32."""
    x = args[0] if args else None
    given[:] = [None]
    if isinstance(x, Tensor) and (x.dtype in HALF or not x.is_floating_point()):  # an embedding's input are numbers
        given[:] = [x.dtype if x.dtype in HALF else dtype]
    return tuple(x.float() if isinstance(x, Tensor) and x.dtype in HALF else x for x in args)


def _restore_dtype(given: list[torch.dtype | None], module: nn.Module, args: Any, output: Any) -> Any:
    return output.to(given[0]) if given[0] is not None and isinstance(output, Tensor) else output


def _cast_hidden(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    x = args[0] if args else None
    if isinstance(output, Tensor) and output.dtype == torch.float32 and isinstance(x, Tensor):
        return output.to(dtype) if x.dtype in HALF and x.shape == output.shape else output
    return output
