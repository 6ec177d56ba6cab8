"""Options of TrainingArguments that change a stage's modules: NEFTune, Liger kernels, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.utils import is_liger_kernel_available

from pipecomp.config.checks import require_choice
from pipecomp.errors import ConfigError, require
from pipecomp.stages.partition.stage import Stage
from pipecomp.trainer import arguments


def check(args: Any) -> None:
    """Raise ConfigError if this machine cannot run Liger's kernels or does not know the compiler."""
    if args.use_liger_kernel:
        hint = "Install liger-kernel 0.3.0 or newer."
        require(is_liger_kernel_available(), "use_liger_kernel", True, "False without liger-kernel", hint)
        on_gpu = torch.cuda.is_available() and not args.use_cpu
        require(on_gpu, "use_liger_kernel", True, "False on a CPU: its kernels run on a GPU")
    wanted = arguments.compilation(args)
    if wanted is not None:
        from torch._dynamo import list_backends  # here: takes seconds

        backends = tuple(sorted({*list_backends(exclude_tags=()), "inductor"}))
        require_choice("torch_compile_backend", wanted["backend"], backends)


def apply(stage: Any, args: Any) -> Callable[[], None]:
    """Apply the options to a stage of this rank.

    Args:
        stage: The stage.
        args: TrainingArguments.

    Returns:
        A function that removes noise and compiled code again: a script's model shares modules with its stages.

    Raises:
        ConfigError: If the model has no embedding for noise, or Liger has no kernels for it.
    """
    alpha, wanted = args.neftune_noise_alpha, arguments.compilation(args)
    if alpha is None and wanted is None and not args.use_liger_kernel:
        return lambda: None
    require(isinstance(stage, Stage), "torch_compile, use_liger_kernel, neftune_noise_alpha", True, "not set",
            "They change Hugging Face models, not plain modules.")  # fmt: skip
    undo: list[Callable[[], None]] = []
    if args.use_liger_kernel:
        _patch_by_liger(stage, dict(args.liger_kernel_config or {}))
    if alpha is not None and stage.is_first:
        undo.append(_add_noise(stage, alpha))
    if wanted is not None:
        for block in stage.blocks:
            block.compile(**wanted)
            undo.append(partial(setattr, block, "_compiled_call_impl", None))

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove


def _add_noise(stage: Any, alpha: float) -> Callable[[], None]:
    """Add uniform noise to the embeddings in training (arXiv:2310.05914) by transformers' own hook."""
    try:
        embedding = stage.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    if embedding is None:
        raise ConfigError("neftune_noise_alpha", alpha, f"not set: {stage.plan.model_class} names no input embedding")
    embedding.neftune_noise_alpha = alpha
    handle = embedding.register_forward_hook(neftune_post_forward_hook)

    def remove() -> None:
        handle.remove()
        del embedding.neftune_noise_alpha

    return remove


def _patch_by_liger(stage: Any, options: dict[str, Any]) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    known, kind = MODEL_TYPE_TO_APPLY_LIGER_FN, stage.config.model_type
    require(
        kind in known, "use_liger_kernel", True, f"False for {kind}: Liger has kernels for {', '.join(sorted(known))}"
    )
    own_loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # the pipeline computes it from logits
    _apply_liger_kernel_to_instance(model=stage.compact_model(), **options, **own_loss)
