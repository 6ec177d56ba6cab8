"""Quantized base weights: bitsandbytes' layers in a skeleton, and weights made from a checkpoint one by one.

transformers' quantizer classes choose the layers that are quantized, so that a stage has the same ones as the model of
`from_pretrained`, with the same bits. bitsandbytes is imported only for a quantized model.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import SplitError

# transformers converts weights of these methods to plain ones while it loads them.
_DEQUANTIZED = ("fp8", "mxfp4")
_BITSANDBYTES = "bitsandbytes"
_KEY = "quantization_config"
_REMEDY = (
    "give the model before quantization, with quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True) "
    "if it is too large"
)
_PARTS = {"Params4bit": ("weight",), "Int8Params": ("weight",)}  # bitsandbytes' classes of quantized parameters
_PIECE = 1 << 22  # values that are quantized at a time: temporary values take about 14 bytes each
_said: set[str] = set()  # messages that bitsandbytes repeats for each call


def _first_time(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    known = message in _said
    _said.add(message)
    return not known


# -- which models


def method_of(config: Any) -> str | None:
    """Return the method by which a Hugging Face config's weights are quantized; None if they are not."""
    section = getattr(config, _KEY, None)
    if section is None:
        return None
    values = section if isinstance(section, dict) else section.to_dict()
    method = values.get("quant_method")
    return str(getattr(method, "value", method))


def check_method(config: Any) -> None:
    """Raise SplitError for a config of weights that are quantized by a method that stages do not support."""
    method = method_of(config)
    if method not in (None, _BITSANDBYTES, *_DEQUANTIZED):
        raise SplitError(
            f"config.{_KEY}: got {method!r}, allowed: {_BITSANDBYTES!r} (4 or 8 bits), and "
            f"{' and '.join(map(repr, _DEQUANTIZED))}, which become plain weights; {_REMEDY}"
        )


def standard_config(bits: int | None, compute_dtype: str = "float32") -> Any:
    """Return a BitsAndBytesConfig as QLoRA's: NF4 with quantized scales, or 8 bits; None for no bits."""
    if bits is None:
        return None
    _require_bitsandbytes(f"weights of {bits} bits need")
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def plain_config(config: Any) -> Any:
    """Return a config of the same model with plain weights; the config itself if it has them."""
    if getattr(config, _KEY, None) is None:
        return config
    plain = copy.deepcopy(config)
    delattr(plain, _KEY)
    return plain


def quantizer_for(config: Any, given: Any = None) -> Any:
    """Make transformers' quantizer for a model.

    Args:
        config: The model's; it has a `quantization_config` if the weights on disk are quantized.
        given: A `transformers.BitsAndBytesConfig`, or its values as a dict, to quantize plain weights while they are
            read.

    Returns:
        An HfQuantizer; None for a model that stays as it is.

    Raises:
        SplitError: The method or an option is not supported, the model is quantized already, or bitsandbytes is not
            installed.
    """
    check_method(config)
    method = method_of(config)
    if given is None and method is None:
        return None
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    section: Any = getattr(config, _KEY, None) if given is None else given
    if given is not None:
        allowed = "a transformers.BitsAndBytesConfig with load_in_4bit or load_in_8bit"
        if isinstance(given, dict):
            given = section = BitsAndBytesConfig(**given)
        if not isinstance(given, BitsAndBytesConfig):
            raise SplitError(f"{_KEY}: got {type(given).__name__}, allowed: {allowed}")
        if not (given.load_in_4bit or given.load_in_8bit):
            raise SplitError(f"{_KEY}: got neither load_in_4bit nor load_in_8bit, allowed: one of them")
        if method is not None:
            raise SplitError(
                f"{_KEY}: got one for a model whose weights are quantized by {method!r} already, allowed: None, or a "
                "model before quantization"
            )
    if method in _DEQUANTIZED and given is None:
        values = section if isinstance(section, dict) else section.to_dict()
        return AutoHfQuantizer.from_config({**values, "dequantize": True}, pre_quantized=True)
    _require_bitsandbytes()
    quantizer = AutoHfQuantizer.from_config(section, pre_quantized=given is None)
    options = quantizer.quantization_config
    for key in ("llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload"):
        if getattr(options, key):
            raise SplitError(f"{_KEY}.{key}: got True, allowed: False; frozen weights have 8 bits on their device")
    quantizer.validate_environment(device_map=None)
    return quantizer


def _require_bitsandbytes(what: str = f"{_KEY} needs") -> None:
    for package in ("bitsandbytes", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise SplitError(f"{what} {package}, which is not installed: pip install 'pipecomp[qlora]'")


def dequantizes(quantizer: Any) -> bool:
    """Return whether a quantizer makes plain weights."""
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def convert(model: Any, quantizer: Any) -> None:
    """Give a model on the meta device the quantizer's layers in place of linear ones, as `from_pretrained` does.

    SplitError for a weight that is tied and would be quantized.
    """
    if dequantizes(quantizer):
        quantizer.remove_quantization_config(model)
        return
    from transformers.modeling_utils import local_torch_dtype

    with local_torch_dtype(model.config.dtype):  # of new biases
        quantizer.preprocess_model(model=model, dtype=model.config.dtype, device_map=None, checkpoint_files=[])
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    for name, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for tied in (name, other):
            if quantizer.param_needs_quantization(model, tied):
                raise SplitError(
                    f"{_KEY}.llm_int8_skip_modules: {tied} is tied to {other if tied == name else name} and cannot be "
                    f"quantized; allowed: None, or a list with {tied.rpartition('.')[0]!r}"
                )


# -- parameters


def is_quantized(parameter: Tensor) -> bool:
    """Return whether a parameter is bitsandbytes', in 4 or 8 bits, or will be once it is loaded."""
    return type(parameter).__name__ in _PARTS


def count_values(parameter: Tensor) -> int:
    """Return the number of weights that a parameter stands for; in 4 bits it has fewer elements."""
    return int(torch.Size(shape_of(parameter)).numel())


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the weight that a parameter stands for."""
    state = getattr(parameter, "quant_state", None)
    return tuple(parameter.shape if state is None else state.shape)


def stored_bytes(parameter: Tensor) -> float:
    """Return the bytes of a parameter with its scales, once it is loaded; also of one on the meta device."""
    values = count_values(parameter)
    kind = type(parameter).__name__
    if kind == "Int8Params":
        return values + 4 * parameter.shape[0]
    if kind != "Params4bit":
        return values * parameter.element_size()
    blocks = values / parameter.blocksize  # type: ignore[attr-defined]
    # A scale is a float32, or a byte with a float32 for 256 of them.
    scales = blocks * (1 + 4 / 256) if parameter.compress_statistics else 4 * blocks  # type: ignore[attr-defined]
    return values / 2 + scales


def quantized_modules(model: Any) -> dict[str, Any]:
    """Return the layers with a quantized weight, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if (weight := module._parameters.get("weight")) is not None and is_quantized(weight)
    }


def state_names(model: nn.Module) -> list[str]:
    """Return the names in a model's state_dict of the scales and tables of quantized weights."""
    inner = [f"{name}." for name in quantized_modules(model)]
    if not inner:
        return []
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    prefixes = tuple(inner)
    return [name for name in model.state_dict() if name not in own and name.startswith(prefixes)]


def state_tensors(model: Any) -> Iterator[Tensor]:
    """Yield the scales and tables of quantized weights, the tensors themselves."""
    for module in quantized_modules(model).values():
        weight: Any = module.weight
        if type(weight).__name__ == "Int8Params":
            state: Any = module.state
            yield weight.SCB if weight.SCB is not None else state.SCB
            continue
        state = weight.quant_state
        yield state.absmax
        if state.nested:
            yield from (state.state2.absmax, state.offset.view(1))


def compute_dtype(model: nn.Module, default: torch.dtype) -> torch.dtype:
    """Return the dtype of hidden states: that of the first weight that is neither quantized nor an adapter's."""
    layers = quantized_modules(model)  # bitsandbytes casts the bias of such a layer to its compute dtype
    for name, module in model.named_modules():
        if name not in layers and ".lora_" not in name:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_floating_point():
                    return parameter.dtype
    return default


def prepare_training(model: nn.Module) -> None:
    """Make bitsandbytes' 4-bit layers compute the same in training and evaluation, on any CPU.

    Note: [CPU format] On CPUs with AVX512-BF16 a layer in evaluation packs its weight for a kernel that rounds to
    bfloat16 and has no gradient, and never unpacks it for training: gradients would silently stop there.

    Raises:
        SplitError: A weight has been packed already, which has rounded its scales.
    """
    layers = quantized_modules(model)
    if layers:
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_first_time)
    for name, module in layers.items():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if hasattr(module.weight.quant_state, "packing_format_for_cpu"):  # set by packing, and kept by state_dict()
                raise SplitError(
                    f"{name}: bitsandbytes has packed this weight for evaluation on the CPU, with rounded scales: load "
                    "the model again, and split it before it is called in evaluation mode"
                )


@contextmanager
def without_quantized(model: Any, move: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In the body, hide quantized weights from casts and moves of the model; then move them to `move`'s device.

    Their bytes may be stored as a floating-point dtype, and scales must move with them.
    """
    modules = quantized_modules(model)
    if not modules:
        yield
        return
    weights = {name: module._parameters["weight"] for name, module in modules.items()}
    for module in modules.values():
        module._parameters["weight"] = None
    try:
        yield
    finally:
        device = move(torch.empty(0)).device
        for name, module in modules.items():
            weight: Any = weights[name]
            if weight.device != device and not weight.is_meta:
                state = getattr(module, "state", None)  # in 8 bits it has the scales after the first forward
                weight = weight.to(device)
                if state is not None and state.CB is not None:
                    state.CB, state.SCB, weight.CB = weight.data, state.SCB.to(device), None
                elif state is None:
                    module.quant_state, weight.module = weight.quant_state, module
            module._parameters["weight"] = weight


# -- reading


def parts_in_files(model: Any, quantizer: Any) -> dict[str, dict[str, str]]:
    """Return the names of the tensors in a checkpoint that make up each quantized weight on disk.

    model: the skeleton.

    Returns:
        {parameter: {name that the quantizer's operation expects: name in the checkpoint}}.
    """
    if quantizer is None or not quantizer.pre_quantized:
        return {}
    serialized: Mapping[str, list[str]] = quantizer.serialized_names
    found = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        module, _, leaf = name.rpartition(".")
        plain = dequantizes(quantizer)
        if leaf in serialized and (plain or quantizer.param_needs_quantization(model, name)):
            found[name] = {part: f"{module}.{part}" for part in serialized[leaf]}
    return found


def from_parts(model: Any, name: str, parts: dict[str, Tensor], quantizer: Any) -> Tensor:
    """Make a weight of the tensors that make it up on disk, by transformers' operation."""
    mode = "dequantize" if dequantizes(quantizer) else "deserialize"
    operation = quantizer.get_load_operations()[mode](quantizer)
    converted = operation.convert(dict(parts), model=model, full_layer_name=name)
    value: Any = next(iter(converted.values()))
    return value[0] if isinstance(value, list) else value


def transposed(module: Any) -> bool:
    """Return whether a quantized layer stands for a Conv1D, whose weight on disk is [in, out]."""
    return getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D"


def quantize(module: Any, value: Tensor) -> Tensor:
    """Quantize a plain weight for a layer of bitsandbytes.

    Note: [Pieces] bitsandbytes would quantize the weight as a whole, with 14 bytes of temporary tensors for each value.
    Blocks (in 8 bits rows) are independent, so pieces have the same bits.

    Args:
        module: The layer, whose weight is on the meta device.
        value: The weight as on disk.

    Returns:
        The parameter; a 4-bit layer has its `quant_state`.
    """
    from bitsandbytes import functional
    from bitsandbytes.nn import Int8Params, Params4bit

    like = module.weight
    value = (value.T if transposed(module) else value).contiguous()
    if isinstance(like, Int8Params):
        rows = max(1, _PIECE // value.shape[1])
        done = [functional.int8_vectorwise_quant(piece.to(torch.float16))[:2] for piece in value.split(rows)]
        codes, scales = (torch.cat(part) for part in zip(*done, strict=True))
        return Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
    options = {"blocksize": like.blocksize, "quant_type": like.quant_type}
    packed: list[Tensor] = []
    scales_of: list[Tensor] = []
    for piece in value.view(-1).split(_PIECE):
        codes, state = functional.quantize_4bit(piece, **options)
        packed.append(codes)
        scales_of.append(state.absmax)
    absmax, offset, nested = torch.cat(scales_of), None, None
    if like.compress_statistics:
        offset = absmax.mean()
        absmax, nested = functional.quantize_blockwise(absmax - offset, blocksize=256)
    state = functional.QuantState(
        absmax, value.shape, state.code, dtype=value.dtype, offset=offset, state2=nested, **options
    )
    data = torch.cat(packed).view(-1).view(like.quant_storage).unsqueeze(1)
    weight = Params4bit(
        data,
        requires_grad=False,
        quant_state=state,
        compress_statistics=like.compress_statistics,
        quant_storage=like.quant_storage,
        module=module,
        bnb_quantized=True,
        **options,
    )
    module.quant_state = state
    return weight
