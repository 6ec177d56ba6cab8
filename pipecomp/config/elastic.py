"""The section "elastic": a second home for the state that each rank trains."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from pipecomp.config.checks import OneOf, Section


class Elastic(Section):
    """Copies of each rank's training state on another machine.

    Attributes:
        second_home: "off"; "next": the rank of the next stage on another machine, after the last stage the first; a
            rank, or the name of a host, that holds the states of all others.
        path: folder of the records, on every machine; each rank writes to a subfolder.
        line_share: largest share of the line to the second home that records take, on average.
        every_steps: steps between records; "auto" keeps to `line_share`.
    """

    section: ClassVar[str] = "elastic"

    second_home: Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)] = Field(
        default="off", description="'off', 'next', a rank, or the name of a host"
    )
    path: str = Field(default="second-home", pattern=r"^[^\x00]+$", description="a folder name, without zero bytes")
    line_share: float = Field(default=0.05, gt=0, le=0.5, description="a number above 0, at most 0.5")
    every_steps: Annotated[int, Field(ge=1)] | Annotated[str, OneOf(("auto",))] = Field(
        default="auto", description="'auto' or a whole number of at least 1"
    )

    @property
    def active(self) -> bool:
        """True if states are copied."""
        return self.second_home != "off"

    def check_given(self) -> None:
        """Reject keys that have no effect."""
        if not self.active:
            self.refuse_given(("path", "line_share", "every_steps"), "only with a second_home other than 'off'")
        if self.every_steps != "auto":
            self.refuse_given(("line_share",), "only with every_steps 'auto'")
