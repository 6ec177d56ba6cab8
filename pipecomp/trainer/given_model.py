"""The model that a script gave, after stages were made of it and trained.

transformers.Trainer trains a script's model in place, and the script saves, merges or calls it afterwards. A stage
trains the blocks that it took of the model, and their neighbours keep the weights that they began with: in no process
is the model the trained one. So from the first training on it raises an error wherever a script would take it for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipecomp.errors import PipecompError, SplitError
from pipecomp.stages.partition.adapters import without_peft
from pipecomp.stages.partition.planning import SplitPlan

_WHOLE = ("generate", "merge_and_unload", "merge_adapter", "push_to_hub", "save_pretrained", "state_dict")
_HIDDEN = "_pipecomp_hidden"  # what `hide` put on a model: its stages' cuts, a hook, its precision before


def precision(model: Any) -> dict[str, torch.dtype]:
    """Each parameter's dtype; empty for a folder's name."""
    return {name: p.dtype for name, p in model.named_parameters()} if isinstance(model, nn.Module) else {}


def hide(model: Any, cuts: Sequence[int], before: dict[str, torch.dtype]) -> None:
    """Let a model in memory raise an error when it is called or saved.

    Args:
        model: What the script gave; of a folder's name there is nothing to hide.
        cuts: Of the stages that were made of it.
        before: Its `precision` before they were.
    """
    if not isinstance(model, nn.Module):
        return
    show(model)
    kind = type(model).__name__

    def refuse(*_: Any, **__: Any) -> Any:
        raise PipecompError(
            f"{kind}: each process has trained a stage of this model, so here it is not the trained one: "
            "trainer.save_model(folder) writes it, and from_pretrained reads it from there; trainer.predict uses it"
        )

    hook = model.register_forward_pre_hook(refuse)
    for name in _WHOLE:
        if hasattr(model, name):
            model.__dict__[name] = refuse
    model.__dict__[_HIDDEN] = (tuple(cuts), hook, before)


def show(model: Any) -> None:
    """Undo `hide`, so that stages can be made of the model: it is of the class that it was."""
    found = getattr(model, "__dict__", {}).pop(_HIDDEN, None)
    if found is not None:
        found[1].remove()
        for name in _WHOLE:
            model.__dict__.pop(name, None)


def check_hooks(model: Any, plan: SplitPlan) -> None:
    """Raise SplitError for a hook on the gradient of a weight that stages share: the others' copies of it have none."""
    if not isinstance(model, nn.Module):
        return
    held = dict(without_peft(model).named_parameters(remove_duplicate=False))
    for name in [name for group in plan.tied for name in group.parameters]:
        if held[name]._backward_hooks:
            raise SplitError(
                f"{name}: a hook on its gradient would change the first stage's part of it alone, since "
                f"{plan.model_class} ties it across stages: untie it, or change gradients in on_pre_optimizer_step"
            )


def check_again(model: Any, cuts: Sequence[int]) -> None:
    """Raise SplitError for a model whose stages were trained and cannot be trained once more.

    Each process has trained other blocks of it, with BF16 or FP16 in that precision: other stages would mix trained
    blocks with others, and the processes would not agree on the model's precision.
    """
    found = getattr(model, "__dict__", {}).get(_HIDDEN)
    if found is None:
        return
    instead = "give the folder that the first trainer's save_model has written"
    if found[0] != tuple(cuts):
        raise SplitError(
            f"model: stages with the cuts {list(found[0])} were made of it and trained, so it cannot be cut at "
            f"{list(cuts)}: {instead}"
        )
    changed = [(name, dtype) for name, dtype in precision(model).items() if found[2].get(name, dtype) != dtype]
    for name, dtype in changed[:1]:
        raise SplitError(
            f"model: each process has trained a stage of it, this one in {dtype} ({name} was {found[2][name]}), and "
            f"has the other stages' blocks as they were: {instead}"
        )
