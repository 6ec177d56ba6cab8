"""Plain objects that all ranks exchange through torch's collectives, as JSON (see pipecomp/plain_objects.py)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipecomp.cluster.plain_collectives import exchange_objects_as_json


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Give each rank's value, by rank, on every rank; all ranks must call this."""
    exchange_objects_as_json()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def broadcast(value: Any, src: int = 0, group: Any = None) -> Any:
    """Give rank `src`'s value on every rank; all ranks must call this, and the others' values do not matter."""
    exchange_objects_as_json()
    box = [value]
    dist.broadcast_object_list(box, src=src, group=group)
    return box[0]
