"""Report of `fault_run.py`: the end of every kind of fault, leaks, differences."""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

from tests.soak.leaks import Held, Sampler, slope
from tests.soak.restarts import OnDisk

MIB = 1 << 20
WARM_S = 60.0  # of a start: allocators, caches and the message stores fill up
LONG_S = 300.0  # a start that is long enough for a slope
LEAK_MIB_H, LEAK_FDS, LEAK_SUPERVISOR_MIB = 60.0, 8, 60.0
_WORDS = {
    "pause": "a rank stopped (SIGSTOP) for 1 to 6 s",
    "cut for a while": "a rank's links cut for 2 to 8 s",
    "value": "one end stores another activation or gradient than the other",
    "disk": "a store's disk refuses writes",
    "kill": "a rank killed (SIGKILL)",
    "stop": "a rank stopped for good",
    "cut for good": "a rank's links cut for good",
    "message": "a bit of a message flipped",
    "nan": "a NaN in activations or gradients",
    "stored byte": "a bit of a stored value flipped in the file",
}
SURVIVED = ("pause", "cut for a while", "value")
NOTICED = ("disk", "kill", "stop", "cut for good", "message", "nan")  # always; a byte of a file may never be read


class Event(NamedTuple):
    """A fault. at_s: since the beginning. went_on: the same processes trained on. seconds: until they did, or until all
    had ended. words: the errors printed. late: ranks that did not end by themselves."""

    at_s: int
    kind: str
    rank: int
    went_on: bool
    seconds: float
    words: str
    late: list[int]


class Life(NamedTuple):
    """One start, when it has ended. compared: samples that the ranks compared, and how many differed. drifts: ends that
    found a difference while training. dropped: samples that ends forgot at the start. disk: the stores after it."""

    steps: int
    compared: list[int]
    drifts: int
    dropped: int
    disk: OnDisk


def problems(events: list[Event], lives: list[Life], sampler: Sampler) -> list[str]:
    """Return the problems; empty if there are none."""
    wrong = [f"rank {rank} did not end after: {event.kind}" for event in events for rank in event.late]
    for event in events:
        flipped = "damaged" in event.words  # a bit that was flipped earlier was read only now
        if event.kind in (*SURVIVED, "nothing") and not event.went_on and not flipped:
            wrong.append(f"ended by what it should survive ({event.kind}): {event.words}")
        if event.kind in NOTICED and event.went_on:
            wrong.append(f"not noticed: {event.kind}")
    for number, life in enumerate(lives):
        if life.disk.unopened:
            wrong.append(f"after start {number}: {life.disk.unopened}")
        if life.disk.silent:
            wrong.append(f"after start {number}: {life.disk.silent} silent disagreements")
        if life.compared and life.compared[1]:
            wrong.append(f"start {number}: {life.compared[1]} samples differ after the ends had agreed")
    if lives and lives[-1].disk.differ:
        wrong.append(f"at the end: {lives[-1].disk.differ} samples differ on disk")
    injected = sum(event.kind == "value" for event in events)
    found = sum(life.drifts for life in lives)
    if found > 2 * injected:
        wrong.append(f"{found} ends drifted, {injected} values were changed")
    for name, samples in sampler.held.items():
        rss, fds, threads = growth(samples)
        if name == "supervisor":
            if samples[-1].rss - samples[min(20, len(samples) - 1)].rss > LEAK_SUPERVISOR_MIB * MIB:
                wrong.append(f"the supervisor's memory: {samples[0].rss} to {samples[-1].rss} bytes")
        elif rss is not None and rss > LEAK_MIB_H:
            wrong.append(f"{name}: {rss:.0f} MiB more in an hour")
        if fds > LEAK_FDS or threads > LEAK_FDS:
            wrong.append(f"{name}: {fds} descriptors and {threads} threads more")
    return wrong


def growth(samples: list[Held]) -> tuple[float | None, int, int]:
    """MiB in an hour (None for a short time), descriptors and threads at the end more than at first; warm all."""
    warm = [s for s in samples if s.at_s > samples[0].at_s + WARM_S]
    if len(warm) < 10:
        return None, 0, 0
    long = warm[-1].at_s - warm[0].at_s >= LONG_S
    line = slope([(s.at_s, s.rss / MIB) for s in warm]) if long else None
    last, first = warm[-5:], warm[:5]
    return (
        None if line is None else 3600 * line,
        min(s.fds for s in last) - max(s.fds for s in first),
        min(s.threads for s in last) - max(s.threads for s in first),
    )


def page(events: list[Event], lives: list[Life], sampler: Sampler, *, minutes: float, command: str) -> str:
    """All of it for people."""
    faults = "\n".join(_fault_row(kind, [e for e in events if e.kind == kind]) for kind in _WORDS)
    long = {n: s for n, s in sampler.held.items() if n == "supervisor" or s[-1].at_s - s[0].at_s > LONG_S + WARM_S}
    held = "\n".join(_held_row(name, samples) for name, samples in long.items())
    machine = sampler.machine
    everything = "\n".join(
        f"| {name} | {values[0]:,} | {max(values):,} | {values[-1]:,} |"
        for name, values in (
            ("processes below the supervisor, a server and a tracker among them", [m.processes for m in machine]),
            ("entries of /dev/shm, which others use too", [m.shared for m in machine]),
            ("bytes of the run's folder", [m.folder for m in machine]),
            ("free bytes of the disk, which others use too", [m.free for m in machine]),
        )
    )
    wrong = problems(events, lives, sampler)
    processor = platform.processor() or platform.machine()
    counted = [life.compared for life in lives if life.compared]
    return f"""# An hour under faults

`{command}`, on {os.cpu_count()} cores of an {processor} machine.

{minutes:g} minutes, {len(events)} faults, {len(lives)} starts, {max(life.steps for life in lives)} steps.

A GPT-2 of two stages with two replicas, AQ-SGD with 4 bits and gradients as changes in 4, LMDB stores,
`transport.timeout_s` 20, `store.drift_check` 5. In the first third only the first three faults are drawn.

| fault | times | went on | ended, started again | seconds until all had ended: median, most | one of the errors |
|---|---|---|---|---|---|
{faults}

A flipped bit in a file may hit a page that is free, or a value that is replaced before it is read. Seconds begin with
the fault, on a machine that others use too; silence counts after 15 s.

| comparison of both ends | |
|---|---|
| samples compared by the ranks after starts and at the end, of these different | {sum(c[0] for c in counted):,}, \
{sum(c[1] for c in counted)} |
| samples dropped when ends compared at a start, sent whole again | {sum(life.dropped for life in lives) // 2:,} |
| samples alike on disk after all ends of starts | {sum(life.disk.alike for life in lives):,} |
| with different versions, as a kill leaves them | {sum(life.disk.differ - life.disk.silent for life in lives):,} |
| with one version and different bytes (silent disagreements) | {sum(life.disk.silent for life in lives)} |
| ends that `store.drift_check` found to differ, values changed at one end | {sum(life.drifts for life in lives)}, \
{sum(e.kind == "value" for e in events)} |

| process | minutes | MiB after a minute, most, last | MiB an hour | descriptors: the same | threads: the same |
|---|---|---|---|---|---|
{held}

| | first | most | last |
|---|---|---|---|
{everything}

{"Nothing is wrong." if not wrong else "Wrong: " + "; ".join(wrong) + "."}
"""


def _fault_row(kind: str, events: list[Event]) -> str:
    ended = sorted(event.seconds for event in events if not event.went_on)
    times = f"{ended[len(ended) // 2]:.0f}, {ended[-1]:.0f}" if ended else "–"
    words = next((e.words for e in events if e.words), "–").split(" | ")[0].removeprefix("restarts: error: ")
    went_on = len(events) - len(ended)
    return f"| {_WORDS[kind]} | {len(events)} | {went_on} | {len(ended)} | {times} | {words[:160].replace('|', '/')} |"


def _held_row(name: str, samples: list[Held]) -> str:
    warm = [s for s in samples if s.at_s > samples[0].at_s + WARM_S] or samples
    line, _, _ = growth(samples)
    rss = [s.rss / MIB for s in warm]
    fds, threads = [s.fds for s in warm], [s.threads for s in warm]
    return (
        f"| {name} | {(samples[-1].at_s - samples[0].at_s) / 60:.0f} | {rss[0]:.0f}, {max(rss):.0f}, {rss[-1]:.0f} | "
        f"{'–' if line is None else format(line, '+.1f')} | {fds[0]}, {max(fds)}, {fds[-1]} | "
        f"{threads[0]}, {max(threads)}, {threads[-1]} |"
    )
