"""torch's object collectives without pickle: what they send is JSON, so that nothing received can run code.

all_gather_object, broadcast_object_list and their like turn objects into bytes through two names of torch's module.
With these in their place that holds for every backend, and for who else calls them: DeepSpeed, transformers.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from torch.distributed import distributed_c10d

from pipecomp.plain_objects import decode, encode


def exchange_objects_as_json() -> None:
    """Let torch's object collectives send JSON from now on; all ranks must."""
    distributed_c10d._pickler = _Writer  # type: ignore[assignment]
    distributed_c10d._unpickler = _Reader  # type: ignore[assignment]


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(encode(value))


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def load(self) -> Any:
        return decode(self._file.read())
