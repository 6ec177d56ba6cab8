"""Steps between records: as few as the share of the line allows."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pipecomp.utils.units import format_size

BURST = 4  # times the average share, while a record is sent
_MAX_PAUSE_S = 2.0
_MARGIN = 1.25
_BOUNDED = 8  # schedules that a stated bound holds for
_RATIO = 0.84  # of a difference after lossless compression, as a small GPT-2 with Adam has it


def steps_between(line_s: float, step_s: float, share: float) -> int:
    """Return the fewest steps in which a record of `line_s` seconds takes at most `share` of the line."""
    return max(1, math.ceil(line_s / (share * step_s) - 1e-9)) if step_s > 0 else 1


@dataclass(frozen=True)
class RecordSchedule:
    """Records of a run.

    Attributes:
        size_bytes: Bytes of a record on the line, for the rank that sends most.
        every_steps: Steps between two records.
        sending_steps: Steps until a record is on its second home.
    """

    size_bytes: float
    every_steps: int
    sending_steps: int

    @property
    def lost_steps(self) -> int:
        """Most steps that are lost with a machine; a quarter more than expected, since steps and lines vary."""
        late = max(0, self.sending_steps - self.every_steps)  # the next record waits for the one before it
        return math.ceil(_MARGIN * (self.every_steps + late + self.sending_steps))

    @classmethod
    def predict(cls, size_bytes: float, bits_per_s: float, step_s: float, share: float) -> RecordSchedule:
        """Predict the schedule for a line.

        Args:
            size_bytes: Bytes of a record on the line.
            bits_per_s: Rate of the line.
            step_s: Seconds of a step.
            share: Share of the line that records take on average.
        """
        line_s = 8 * size_bytes / bits_per_s
        sending_s = line_s / min(1.0, BURST * share)
        return cls(size_bytes, steps_between(line_s, step_s, share), math.ceil(sending_s / step_s))

    def __str__(self) -> str:
        return self.describe(self.lost_steps)

    def describe(self, lost_steps: int) -> str:
        """Describe the schedule, with a bound on the steps that are lost."""
        every = "every step" if self.every_steps == 1 else f"every {self.every_steps} steps"
        lost = "1 step is lost" if lost_steps == 1 else f"{lost_steps} steps are lost"
        return f"{format_size(self.size_bytes)} {every}, at most {lost} with a machine"


class LossBound:
    """A bound on the steps that are lost with a machine, in numbers so round that it seldom changes.

    It is at least the largest of the last schedules, and falls when all of them are below half of it.

    Attributes:
        steps: The bound, of the series 1, 2, 5, 10, 20, 50…; 0 before the first schedule.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._last: deque[int] = deque(maxlen=_BOUNDED)

    def update(self, schedule: RecordSchedule) -> bool:
        """Include a schedule; returns whether the bound has changed."""
        self._last.append(schedule.lost_steps)
        largest, before = max(self._last), self.steps
        if largest > before or (len(self._last) == _BOUNDED and 2 * largest < before):
            power = 10 ** (len(str(largest)) - 1)
            self.steps = next(power * each for each in (1, 2, 5, 10) if power * each >= largest)
        return self.steps != before


def record_bytes(trained: int, *, half: bool = False, replicas: int = 1) -> float:
    """Predict the bytes of a record on the line, of the first replica.

    Args:
        trained: Values that the stage trains with Adam.
        half: Whether weights are in half precision, beside masters that ZeRO shares out among replicas.
        replicas: Number of replicas.
    """
    states = 12  # bytes of master or weight, and of both moments
    return _RATIO * trained * (2 + states / replicas if half else states)


def seconds_between(size_bytes: float, bits_per_s: float, share: float) -> float:
    """Return the seconds in which a share of the line sends a record, whatever a step takes."""
    return 8 * size_bytes / (bits_per_s * share)


class LineShare:
    """Paces slices of a record, so that they take part of the line even while a record is sent.

    Args:
        give_way: Returns when no packet of the pipeline is being sent.
        share: Largest part of the line for the time of sending, at most 1.

    Attributes:
        line_s: Seconds in which slices were leaving.
        waited_s: Seconds in which they waited.
        stopped: Set it to wait no longer.
    """

    def __init__(self, give_way: Callable[[], None], share: float) -> None:
        self._give_way, self._share = give_way, min(1.0, share)
        self.line_s = self.waited_s = 0.0
        self.stopped = False
        self._began: float | None = None  # when the slice that is leaving began to
        self._pause_s = 0.0

    def wait(self) -> None:
        """Return when the next slice may be sent; called before each one, after the one before it has left."""
        self.left()
        began = time.monotonic()
        while not self.stopped and (rest_s := began + self._pause_s - time.monotonic()) > 0:
            time.sleep(min(rest_s, 0.05))
        self._pause_s = 0.0
        if not self.stopped:
            self._give_way()
        self._began = time.monotonic()
        self.waited_s += self._began - began

    def left(self) -> None:
        """Note that the last slice has left."""
        if self._began is not None:
            sent_s, self._began = time.monotonic() - self._began, None
            self.line_s += sent_s
            self._pause_s = min(_MAX_PAUSE_S, self._pause_s + sent_s * (1 / self._share - 1))
