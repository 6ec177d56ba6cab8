"""The examination: all checks of this machine, and of the links between ranks if there are several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pipecomp.distributed.consistency import versions
from pipecomp.distributed.launch_env import Launch, read_launch
from pipecomp.distributed.local_launcher import RankFailedError, run_ranks
from pipecomp.distributed.rendezvous import warn_if_slow
from pipecomp.doctor.finding import PROBLEM, WARNING, Finding, has_problem
from pipecomp.doctor.machine import (
    GPU_SHARING,
    MOUNT_SHM,
    LoaderSize,
    compute_findings,
    limit_findings,
    network_findings,
)
from pipecomp.doctor.packages import package_findings
from pipecomp.doctor.ranks import RankSession, RendezvousError, check_rank_0, check_rendezvous
from pipecomp.doctor.storage import storage_findings
from pipecomp.errors import ConfigError
from pipecomp.netlab.software import VARIABLE as SOFTWARE_LAB
from pipecomp.netlab.software import ThrottleSettings

_MACHINE_LIMIT_S = 300.0
_LOCAL_RANKS, _LOCAL_LIMIT_S = 2, 120.0


def examine(
    report: Callable[[list[Finding]], None],
    *,
    store: Path,
    ranks: bool | None = None,
    environ: Mapping[str, str] = os.environ,
    limit_s: float = 30.0,
    loader: LoaderSize | None = None,
) -> bool:
    r"""Check this machine and the links between ranks, and report.

    Under a launcher every rank must call it. Rank 0 reports for all; every rank reports for itself if they cannot
    rendezvous.

    Args:
        report: Receives the findings.
        store: Folder of the message store, which need not exist.
        ranks: True to measure between ranks: the launcher's, or two on this machine without one. None: only under a
            launcher.
        environ: Environment variables, as set by launchers.
        limit_s: Timeout of the rendezvous.
        loader: Size of each rank's data loader, to compare with the shared memory.

    Returns:
        True if any finding is a problem.

    Example::

        examine(lambda findings: print(*findings, sep="\n"), store=Path("messages"))
    """
    try:
        launch = read_launch(environ)
    except ConfigError as error:
        advice = "Start with torchrun or deepspeed, or unset the variable."
        findings = [Finding("launcher", PROBLEM, str(error), advice), *machine_findings(Launch(), store, loader)]
    else:
        if launch.started and ranks is not False:
            return _examine_ranks(report, launch, store, limit_s, loader)
        findings = machine_findings(launch, store, loader)
        if ranks:
            findings += _examine_local_ranks()
    report(findings)
    return has_problem(findings)


def machine_findings(launch: Launch, store: Path, loader: LoaderSize | None = None) -> list[Finding]:
    """Make all checks of this machine, without other ranks."""
    gpu = torch.cuda.is_available()
    return [
        *package_findings(gpu=gpu),
        *compute_findings(launch),
        *network_findings(launch),
        *storage_findings(store),
        *limit_findings(0 if loader is None else loader.shared_bytes(launch.local_world or 1)),
    ]


def _examine_ranks(
    report: Callable[[list[Finding]], None], launch: Launch, store: Path, limit_s: float, loader: LoaderSize | None
) -> bool:
    try:
        session = RankSession(launch, versions(), limit_s=limit_s)
    except RendezvousError as error:
        own = machine_findings(launch, store, loader) if launch.local_rank == 0 else []
        report([*own, check_rendezvous(launch, error, limit_s)])
        return True
    # Links come first: the machines' own checks would disturb their measurement.
    with warn_if_slow("measures the links between ranks, for 3 minutes at most"):
        between = session.measure() + check_software_lab(os.environ)
    own = machine_findings(launch, store, loader) if launch.local_rank == 0 else []
    if session.rank_0_lost:
        report([*own, check_rank_0(launch)])
        return True
    # The session has compared the GPUs themselves; their number adds nothing.
    own = [finding for finding in own if finding.check != GPU_SHARING]
    findings = session.collect(own, _MACHINE_LIMIT_S) + session.route_findings() + between
    if session.rank == 0:
        report(findings)
    return session.finish(findings, 2 * _MACHINE_LIMIT_S)


def check_software_lab(environ: Mapping[str, str]) -> list[Finding]:
    """Check whether a software lab throttles training only, and not these measurements."""
    text = environ.get(SOFTWARE_LAB)
    if text is None:
        return []
    lab = ThrottleSettings.read(text)
    slowed = "rates and delays" if any(rate is not None for rate in (*lab.up, *lab.down)) else "delays"
    fact = f"pipecomp netlab simulates {slowed} for training only: the figures above are this machine's own"
    return [Finding("netlab", WARNING, fact, "comm_stats() of a training run shows its links.")]


def _examine_local_ranks() -> list[Finding]:
    try:
        findings = run_ranks(_LOCAL_RANKS, _measure_local_rank, timeout_s=_LOCAL_LIMIT_S)[0]
    except ConfigError as error:
        advice = {"TMPDIR": "export TMPDIR=/tmp", "ulimit -n": "ulimit -n 65536"}.get(error.key, MOUNT_SHM)
        return [Finding("ranks", PROBLEM, str(error), advice)]
    except RankFailedError as error:
        advice = "Two ranks on this machine could not communicate over the loopback interface: see the lines above."
        return [Finding("ranks", PROBLEM, str(error).strip().splitlines()[-1], advice)]
    return [Finding(*values) for values in findings]


def _measure_local_rank(rank: int, world: int, note: Callable[[Any], None]) -> list[Finding]:
    session = RankSession(read_launch(os.environ), versions(), limit_s=30.0)
    findings = session.measure()
    session.finish(findings, _LOCAL_LIMIT_S)
    return findings
