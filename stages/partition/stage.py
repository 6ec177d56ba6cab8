"""What every stage has, whatever it is made of: its place in the pipeline, its blocks, and the weights it shares."""

from __future__ import annotations

from torch import Tensor, nn

from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.partition.planning import SplitPlan, TiedGroup


class PipelineStage(nn.Module):
    """One stage of a partitioned model: `Stage` of a Hugging Face model, `ModuleStage` of plain modules.

    Attributes:
        plan: the partition that it is part of.
        index, num_stages: its place.
        lo, hi: its blocks are lo to hi - 1.
    """

    plan: SplitPlan

    def __init__(self, plan: SplitPlan, index: int) -> None:
        super().__init__()
        self.plan, self.index, self.num_stages = plan, index, plan.num_stages
        self.lo, self.hi = plan.cuts[index], plan.cuts[index + 1]

    def trained_labels(self, layout: Layout, labels: Tensor) -> Tensor:
        """Give the labels that the last stage trains on, of those in the batch."""
        return labels

    def check_labels(self, layout: Layout, labels: Tensor) -> None:
        """Raise DataError for a label that the model's own loss cannot take; labels: those of `trained_labels`."""

    @property
    def is_first(self) -> bool:
        """Whether it is called with the batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the model's output."""
        return self.index == self.num_stages - 1

    @property
    def tied_groups(self) -> tuple[TiedGroup, ...]:
        """The plan's groups that this stage is part of."""
        return tuple(group for group in self.plan.tied if self.index in group.stages)

    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """Find this stage's copy of each tied weight, by the group's name; none with one stage or `tie=False`."""
        return {
            group.name: self.get_parameter(group.parameters[group.stages.index(self.index)])
            for group in self.tied_groups
        }
