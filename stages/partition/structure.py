"""Structure of a model that is cut: paths of blocks, embeddings and head, and the modules in place of removed ones.

Paths are relative to the base model (`transformer` in GPT2LMHeadModel, `model` in LlamaForCausalLM, `bert`, ...).
Modules of the top model outside its base model are the head, and belong to the last stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import SplitError
from pipecomp.stages.partition.losses import LossFn


def _reads_nothing(config: Any) -> tuple[str, ...]:  # no lambda: a stage can be pickled
    return ()


@dataclass(frozen=True, kw_only=True)
class Head:
    """Computation of the last stage after the blocks.

    Attributes:
        loss: makes the loss function from the config.
        per_token: the head multiplies every token (a vocabulary), which counts for the balance of the stages.
        pools_last_token: the model finds the last real token by `pad_token_id` in input_ids; the last stage, which has
            no input_ids, applies `score` and takes the position from the attention mask.
        reads_first_token: the model computes classes from the first place of a batch, which must not be padding.
        reads: returns, for a config, the paths of modules among the architecture's `before` that the head reads too
            (the word embeddings, as its output matrix); the last stage has a copy of them, tied to the first's.
    """

    loss: Callable[[Any], LossFn]
    per_token: bool = False
    pools_last_token: bool = False
    reads_first_token: bool = False
    reads: Callable[[Any], tuple[str, ...]] = _reads_nothing


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Structure of the models of one `config.model_type`. Paths are relative to the base model.

    Attributes:
        model_type: the config's.
        heads: the model classes that can be cut, by class name.
        default_head: the class for a config that names none.
        blocks: path of the list of blocks.
        before: modules of the first stage alone (except those that a head reads), each with its replacement on later
            stages: a class without arguments; None leaves the place empty.
        after: modules of the last stage alone.
        shared: modules of every stage; their gradients are summed over the stages.
        optional: those of `after` that a checkpoint of the plain encoder lacks, and that are then new, like a head.
        block_returns_tuple: whether a block returns `(hidden_states, ...)` rather than `hidden_states`; the tuple's
            length if it is not 2.
        extra_inputs: inputs that only the embeddings use.
        forward_options: passed to every forward call.
        renamed: the model's names of modules that checkpoints name differently, by the latter.
        draws_outside: whether random numbers are drawn outside of the blocks, base model only.
        lanes: hidden states are [B, S, H] between blocks if it is 1, else [B, S, lanes, H].
    """

    model_type: str
    heads: Mapping[str, Head]
    default_head: str
    blocks: str
    before: Mapping[str, type[nn.Module] | None]
    after: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    block_returns_tuple: bool | int = False
    extra_inputs: tuple[str, ...] = ()
    forward_options: Mapping[str, Any] = field(default_factory=lambda: {"use_cache": False, "return_dict": True})
    renamed: Mapping[str, str] = field(default_factory=dict)
    draws_outside: bool = True
    lanes: int = 1


class SkippedBlock(nn.Module):
    """Identity in the place of another stage's block.

    The list of blocks keeps its length, so each own block keeps its index: in its parameters' names, and wherever the
    model's loop uses it (`layer_types[i]`, DeBERTa's convolution after block 0).

    Note: [Code outside of the blocks]
        A model may compute in its own forward, before the first block, what belongs to the first stage alone (Gemma's
        factor sqrt(H), a dropout), and after the last block what belongs to the last. Each stage calls that forward. So
        the block in the first place of a later stage drops what it is called with and returns what the stage has
        received; and the one after an earlier stage's own blocks keeps what these return, the stage's output. Random
        numbers that the code before or after draws are given back.

    Attributes:
        returns_tuple, lanes: as in Architecture.
        received: the stage's input, for the first place of a later stage; else None.
        keeps: whether it is the one after the stage's own blocks.
        draws_outside: as `Architecture.draws_outside`.
        kept: the hidden states that it was called with, if it keeps them.
        generators: states of the random generators: to restore at its call, or of its call if it keeps the output.
    """

    def __init__(self, architecture: Architecture, like: nn.Module | None = None) -> None:
        """like: the block, whose plain attributes (`attention_type`) the model's loop may read."""
        super().__init__()
        self.returns_tuple, self.draws_outside = architecture.block_returns_tuple, architecture.draws_outside
        self.lanes = architecture.lanes
        copy_plain_attributes(like, self)
        self.keeps = False
        self.received: Tensor | None = None
        self.kept: Tensor | None = None
        self.generators: GeneratorStates | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states, as a block does."""
        if self.received is not None:
            hidden_states = self.received if self.lanes == 1 else self.received.unflatten(-1, (self.lanes, -1))
            if self.generators is not None:
                self.generators.restore()
        if self.keeps:
            self.kept = hidden_states if self.lanes == 1 else hidden_states.flatten(2)
            self.generators = GeneratorStates(hidden_states.device) if self.draws_outside and self.training else None
        if not self.returns_tuple:
            return hidden_states
        return (hidden_states, *[None] * (1 if self.returns_tuple is True else self.returns_tuple - 1))


class GeneratorStates:
    """States of torch's random generators: of the CPU, and of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._cpu)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)


def copy_plain_attributes(module: nn.Module | None, other: nn.Module) -> None:
    """Set a module's numbers and strings, those of properties too, on another module, unless it has them."""
    if module is None:
        return
    computed = [name for name in dir(type(module)) if isinstance(getattr(type(module), name), property)]
    for name in (*vars(module), *computed):
        value = None if name.startswith("_") else getattr(module, name, None)
        if isinstance(value, (bool, int, float, str)) and not hasattr(other, name):
            setattr(other, name, value)


class NoPositions(nn.Module):
    """Replaces GPT-2's `wpe` past the first stage, whose output the model adds."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return a scalar whose addition changes nothing."""
        # x + (-0.0) is x for every x, -0.0 included; without dimensions it leaves the dtype of x alone.
        return torch.full((), -0.0, device=position_ids.device)


class PassedEmbeddings(nn.Module):
    """Replaces the `embeddings` module of BERT and similar encoders past the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Identity()  # get_input_embeddings(), which activation checkpointing calls

    def forward(self, *, inputs_embeds: Tensor, **kwargs: Any) -> Tensor:
        """Return the embeddings unchanged."""
        return inputs_embeds


class NoEmbeddings(nn.Module):
    """Replaces any module before the blocks past the first stage; what it returns has only the right shape and dtype.

    The first block's place drops it, see [Code outside of the blocks].
    """

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Identity()  # get_input_embeddings(), which activation checkpointing calls
        self._width: int | None = None
        self._skipped: tuple[SkippedBlock, ...] = ()  # in a tuple, as it is no part of this module

    def stand_for(self, module: nn.Module | None, first: SkippedBlock) -> None:
        """Take over a module's plain attributes. first: the stage's first block, which has what it receives."""
        copy_plain_attributes(module, self)
        if isinstance(module, nn.Embedding):
            self._width = module.embedding_dim
        self._skipped = (first,)

    @property
    def weight(self) -> Tensor:
        """A tensor of the embeddings' dtype and device, which some models ask them for."""
        received = self._skipped[0].received
        return torch.empty(0) if received is None else received

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the embeddings that it is called with, or zeros for tokens or positions."""
        received = self.weight
        if self._width is not None:
            return received.new_zeros(()).expand(*received.shape[:-1], self._width)
        given = [kwargs.get("inputs_embeds"), *args, *kwargs.values()]
        return next((x for x in given if isinstance(x, Tensor) and x.is_floating_point()), received)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module and its tables, but not its contents, so that the copy's tables can change alone.

    The copy runs its own forward: a compiled forward, which belongs to the original, is dropped, and a forward that was
    set on the original as a method is bound to the copy. SplitError for a forward that may refer to the original.
    """
    other = module.__class__.__new__(module.__class__)
    other.__dict__ = {
        key: copy.copy(value) if key.startswith("_") and isinstance(value, (dict, set)) else value
        for key, value in module.__dict__.items()
    }
    other.__dict__["_compiled_call_impl"] = None
    forward = module.__dict__.get("forward")
    if forward is not None:
        if getattr(forward, "__self__", None) is not module or not hasattr(forward, "__func__"):
            raise SplitError(
                f"{type(module).__name__}.forward was replaced by {forward!r}, which may run the whole model on every "
                "stage: split the model before it is changed, or set the forward on it with types.MethodType"
            )
        other.__dict__["forward"] = MethodType(forward.__func__, other)
    return other


def _copy_path(top: nn.Module, path: Sequence[str]) -> nn.Module | None:
    """Copy the modules on a path, so that its end can be replaced in this model alone; None if it ends early."""
    for name in path:
        inner = top._modules.get(name)
        if inner is None:
            return None
        top._modules[name] = top = shallow_copy(inner)
    return top


def replace_module(top: nn.Module, path: str, module: nn.Module | None) -> None:
    """Replace the module at `path`, if the model has one there."""
    *parents, leaf = path.split(".")
    owner = _copy_path(top, parents)
    if owner is not None and owner._modules.get(leaf) is not None:
        owner._modules[leaf] = module


def module_at(top: nn.Module, path: str) -> nn.Module | None:
    """Return the module at `path`, None if the model has none there."""
    for name in path.split("."):
        inner = top._modules.get(name)
        if inner is None:
            return None
        top = inner
    return top


def replace_parameter(top: nn.Module, path: str, parameter: nn.Parameter) -> None:
    """Replace the parameter at `path`; the model that its module comes from keeps its own."""
    *parents, leaf = path.split(".")
    owner = _copy_path(top, parents)
    assert owner is not None, "the path of a parameter that the model has"
    owner._parameters[leaf] = parameter
