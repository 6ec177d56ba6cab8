"""Every few steps both ends of a link compare digests of the cached activations that changed since the last time.

A delta names the version that it builds on, so a wrong base is refused; but two ends could hold different values under
one version, if memory, a disk or arithmetic fails at one of them, and then nothing but the loss would tell. Here each
end hashes sample, version and the stored value's CRC-32, which packing has made anyway, of every one that it has
put since the last check: a digest of 16 bytes crosses the link each way. If they differ, both send the lines
themselves, and forget the samples that differ: next time they are sent as first visits.
"""

from __future__ import annotations

import hashlib
import logging
import struct

import numpy as np

from pipecomp.buffers.base import entry_name
from pipecomp.errors import DriftError, WireError
from pipecomp.stages.link.handshake import as_table, exchange_tables, recv_part, send_part
from pipecomp.stages.link.link_end import LinkEnd

_DIGEST = struct.Struct("<Q16s")  # samples, BLAKE2b of their lines
_PART, _TABLE_PART = 2, 3
_SHOWN = 8
_log = logging.getLogger("pipecomp")


def check_drift(end: LinkEnd, step: int) -> list[int]:
    """Compare this end with its peer after training step `step`; both must call it, before the step is committed.

    Returns the samples that differed, which both ends have forgotten. Raises DriftError if there were some at the last
    check too: then something is broken, and repairing it would hide that.
    """
    assert end.store is not None
    table = as_table(line for line in end.store.versions(sorted(end.changed)) if line is not None)
    end.changed.clear()
    mine = _DIGEST.pack(len(table), hashlib.blake2b(table.tobytes(), digest_size=16).digest())
    end.stats.drift_checks += 1
    end.stats.drift_check_bytes += send_part(end, step, _PART, mine)
    theirs = recv_part(end, step, _PART)
    if theirs == mine:
        end.drifted = False
        return []
    if len(theirs) != _DIGEST.size:
        raise WireError(end.peer(f"sent a digest of {len(theirs)} bytes"))
    other = exchange_tables(end, step, _TABLE_PART, table, rows=_DIGEST.unpack(theirs)[0])
    samples: list[int] = np.unique(np.setxor1d(table, other)["sample"]).tolist()
    shown = ", ".join(map(entry_name, samples[:_SHOWN])) + (
        f" and {len(samples) - _SHOWN} more" if samples[_SHOWN:] else ""
    )
    what = "samples" if end.keeps_samples else "blocks of cluster centers"
    where = f"link {end.index}, step {step}"
    found = f"{where}: this end and rank {end.transport.peer} hold different cached activations of {shown}"
    if end.drifted:
        raise DriftError(
            f"{found} ({what}), as they did at the last check: memory, a disk or a kernel is failing at one of them. "
            "`pipecomp doctor` checks kernels, `pipecomp store verify` the store"
        )
    next_time = "send them as first visits next time" if end.keeps_samples else "make them anew"
    _log.warning("%s (%s): both forget them, and %s", found, what, next_time)
    end.store.drop(samples)
    end.reload()
    end.drifted = True
    end.stats.drifts += 1
    end.stats.drift_samples += len(samples)
    return samples
