"""Reading a checkpoint that another cut, or another number of replicas, has written: values by parameter name.

DeepSpeed numbers optimizer states and cuts ZeRO's by ranks, so its files fit one cut only. What a description beside
them adds is which parameter each number is, under the name that it has in every cut; then any rank can pick its own
parameters out of all stages' files. Files are mapped, not read: a rank copies its own share.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipecomp.checkpoint.deepspeed_names import (
    BASE_OPTIMIZER_STATE,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from pipecomp.errors import ConfigError, SplitError, require
from pipecomp.stages.partition.modules import ModuleStage
from pipecomp.stages.partition.planning import aliases
from pipecomp.stages.partition.splitting import Stage

Names = dict[str, str]  # a stage's own name of a parameter -> the name that it has in every cut
MASTER = "float32 master"  # among the states that ZeRO keeps of a parameter


@dataclass(frozen=True, kw_only=True)
class Description:
    """What wrote a checkpoint. Plain values; every stage's file has all of it.

    cuts, model_class, tie: of the plan. replicas: R. micro_batch: samples. precision: fp32, bf16 or fp16. zero: ZeRO's
    stage. parameters: for each stage and each parameter group of its optimizer the names, in the optimizer's order.
    """

    cuts: list[int]
    model_class: str
    tie: bool
    replicas: int
    micro_batch: int
    precision: str
    zero: int
    parameters: list[list[Names]]

    def fits(self, own: Description) -> bool:
        """Whether DeepSpeed can load the files into a pipeline like `own`: ZeRO's are cut by replicas too."""
        return self.cuts == own.cuts and (self.replicas == own.replicas or not self.zero)

    def check(self, own: Description, *, with_optimizer: bool) -> None:
        """Raise ConfigError or SplitError for another model, and with the optimizer what `check_optimizer` does."""
        if (self.model_class, self.cuts[-1]) != (own.model_class, own.cuts[-1]):
            raise SplitError(
                f"the checkpoint is of {self.model_class} with {self.cuts[-1]} blocks, the model is {own.model_class} "
                f"with {own.cuts[-1]}"
            )
        allowed = f"{self.tie!r}, as the checkpoint has, where the pipeline is cut otherwise"
        require(self.tie == own.tie, "pipecomp.tie", own.tie, allowed)
        if with_optimizer:
            self.check_optimizer(own)

    def check_optimizer(self, own: Description) -> None:
        """Raise ConfigError if the optimizer's states are in the form of another precision or ZeRO stage."""
        for key, theirs, mine in (
            ("precision", self.precision, own.precision),
            ("zero_optimization.stage", self.zero, own.zero),
        ):
            require(theirs == mine, key, mine, f"{theirs!r}, as the checkpoint has, to go on with its optimizer states")


def names_in_every_cut(stage: Stage | ModuleStage) -> Names:
    """For all names of a stage's parameters: the original's for a tied weight, else the first of its names."""
    tied = {group.parameters[group.stages.index(stage.index)]: group.name for group in stage.tied_groups}
    found: Names = {}
    for names in aliases(stage):
        found |= dict.fromkeys(names, next((tied[name] for name in names if name in tied), names[0]))
    return found


def grouped_names(stage: Stage | ModuleStage, groups: Iterable[Iterable[Any]]) -> list[Names]:
    """List the names of a stage's parameters by the optimizer's groups."""
    everywhere = names_in_every_cut(stage)
    own = {id(p): name for name, p in stage.named_parameters()}
    return [{own[id(p)]: everywhere[own[id(p)]] for p in group} for group in groups]


class SavedPipeline:
    """The files of one checkpoint folder, by stage.

    Raises ConfigError where a file is missing: all stages' files have to be where this rank can read them.
    """

    def __init__(self, folder: Path, description: Description) -> None:
        self.folder, self.description = folder, description
        self._files: dict[str, Any] = {}

    @property
    def stages(self) -> range:
        """The stages' numbers."""
        return range(len(self.description.cuts) - 1)

    def require_files(self, *, with_optimizer: bool) -> None:
        """Raise ConfigError if the files of a stage are missing here, or are in a form that cannot be cut anew."""
        for index in self.stages:
            self._weights_of(index)
            if not with_optimizer:
                continue
            if not isinstance(self._base(index), dict):
                raise ConfigError(
                    "zero_optimization.elastic_checkpoint", True, "false for a checkpoint that is cut otherwise"
                )
            for replica in range(self.description.replicas if self.description.zero else 0):
                self.zero_file(index, replica)

    @cached_property
    def state(self) -> dict[str, Any]:
        """What stage 0's file holds beside weights and optimizer states: steps, schedule, the user's state."""
        return dict(self._stage(0))

    def weights(self, stage: Stage | ModuleStage, *, of: Iterable[int] | None = None) -> dict[str, Tensor]:
        """Find the entries of `stage`'s state_dict; of frozen parameters only what was saved. They are views of files.

        of: the stages whose files are looked into, default all.

        Raises SplitError naming a tensor that no stage has saved, or that has another shape.
        """
        files = [self._weights_of(index) for index in (self.stages if of is None else of)]
        wanted, found = stage.state_dict(), {}
        for name, own in wanted.items():
            value = next((file[name] for file in files if name in file), None)
            if value is not None:
                if value.shape != own.shape:
                    raise SplitError(f"{name}: {tuple(value.shape)} in {self.folder}, {tuple(own.shape)} in the model")
                found[name] = value
        trained = {name for name, p in stage.named_parameters(remove_duplicate=False) if p.requires_grad}
        missing = sorted(trained - set(found))
        if missing:
            raise SplitError(f"{missing[0]}: no stage of {self.folder} has it")
        return found

    def options(self, names: Iterable[str]) -> dict[str, Any] | None:
        """Find the optimizer's options of a group with these parameters; None for none. ConfigError for several."""
        wanted = set(names)
        found: list[dict[str, Any]] = []
        for stage, groups in enumerate(self.description.parameters):
            for number, held in enumerate(groups):
                options = {k: v for k, v in self._base(stage)["param_groups"][number].items() if k != "params"}
                if wanted & set(held.values()) and options not in found:
                    found.append(options)
        if len(found) > 1:
            raise ConfigError("parameter_groups", len(found), "the same groups of parameters as in the checkpoint")
        return copy.deepcopy(found[0]) if found else None

    def optimizer_state(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Read what the optimizer kept of each parameter, by name; copies, tensors flat with ZeRO, else in shape."""
        wanted = set(names)
        out: dict[str, dict[str, Any]] = {}
        for index in self.stages:
            for group, held in enumerate(self.description.parameters[index]):
                chosen = {own: name for own, name in held.items() if name in wanted and name not in out}
                if not chosen:
                    continue
                if self.description.zero:
                    out |= self._joined(index, group, chosen)
                    continue
                base = self._base(index)
                for number, own in zip(base["param_groups"][group]["params"], held, strict=True):
                    if own in chosen:
                        out[chosen[own]] = _copied(base["state"].get(number, {}))
        return out

    def zero_file(self, stage: int, replica: int) -> dict[str, Any]:
        """Open the state of ZeRO's optimizer on one rank."""
        prefix = "bf16_" if self.description.precision == "bf16" else ""
        return self._open(f"{prefix}zero_pp_rank_{replica}_mp_rank_{stage:02d}_optim_states.pt")[OPTIMIZER_STATE_DICT]

    def _weights_of(self, index: int) -> dict[str, Tensor]:
        return self._open(f"layer_{index:02d}-model_states.pt")

    def _stage(self, index: int) -> dict[str, Any]:
        return self._open(f"mp_rank_{index:02d}_model_states.pt")

    def _base(self, stage: int) -> dict[str, Any]:
        """Open the state of torch's optimizer; with ZeRO the first replica's."""
        if self.description.zero:
            return self.zero_file(stage, 0)[BASE_OPTIMIZER_STATE]
        return self._stage(stage)["optimizer"]

    def _joined(self, stage: int, group: int, chosen: Names) -> dict[str, dict[str, Any]]:
        """Put the states of some parameters together from the pieces that ZeRO's ranks have."""
        pieces: dict[str, dict[str, list[Tensor]]] = {name: {} for name in chosen.values()}
        whole: dict[str, Any] = {}
        for replica in range(self.description.replicas):
            file = self.zero_file(stage, replica)
            master = file[SINGLE_PARTITION_OF_FP32_GROUPS][group]
            base = file[BASE_OPTIMIZER_STATE]
            state = base["state"].get(base["param_groups"][group]["params"][0], {})
            cut = {k: v for k, v in state.items() if torch.is_tensor(v) and v.dim() == 1}
            whole |= {k: v for k, v in state.items() if k not in cut}
            for full_name, place in file[PARAM_SLICE_MAPPINGS][group].items():
                own = full_name.split(".", 1)[1]  # DeepSpeed puts the layer's number, which is the stage's, before it
                if own in chosen:
                    for key, flat in {MASTER: master, **cut}.items():
                        piece = flat.reshape(-1)[place.start : place.start + place.numel]
                        pieces[chosen[own]].setdefault(key, []).append(piece)
        return {
            name: {**_copied(whole), **{key: torch.cat(parts) for key, parts in of.items()}}
            for name, of in pieces.items()
        }

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path = self.folder / name
            if not path.is_file():
                raise ConfigError(
                    "load_dir", str(self.folder), f"a folder with all stages' files on this machine; {name} is missing"
                )
            # As DeepSpeed reads its own files: they hold more than tensors. Mapped, so that only own parts are read.
            self._files[name] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        return self._files[name]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else copy.deepcopy(value) for key, value in state.items()}
