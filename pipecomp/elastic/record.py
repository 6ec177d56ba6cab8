"""Records: the state of one rank after a step, as the files that a checkpoint of that step has.

A record is a safetensors file. Its tensors are those of all files of the rank, its header has their other contents as
JSON, so that the bytes of another machine are never unpickled. Parameters have the names of the model, as in every
checkpoint: a checkpoint made of the records of all ranks can be loaded with other cuts.

    length of the header u64, header (JSON, spaces up to a multiple of 8), tensors: 8-byte values first, then 4, 2, 1
"""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipecomp.elastic.delta import BLOCK_BYTES
from pipecomp.errors import WireError
from pipecomp.utils.files import UNFINISHED, atomic_write
from pipecomp.utils.serialization import decode_tree, encode_tree

FORMAT = "pipecomp record 1"
SHARED = "shared"  # in rank 0's record: what the files of all stages have in common
MAX_HEADER_BYTES = 1 << 26
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_METADATA = "__metadata__"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_NAME = re.compile(r"step-(\d{1,18})-rank-(\d{1,9})\.safetensors")
_SESSION = re.compile(r"[0-9a-f]{1,32}")
# DeepSpeed's classes in the files of a checkpoint; instances have plain attributes.
_CLASSES = frozenset(
    {
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    }
)


@dataclass(frozen=True, kw_only=True)
class RecordInfo:
    """Place of a record.

    Attributes:
        session: Random name of the processes that wrote it, equal on all ranks. Only records of one session and step
            belong together.
        step: Optimizer steps before it.
        rank, world: The rank and the number of ranks in this session.
        stage, cuts: The rank's stage, and the blocks at which the model is cut.
        folder: Name of the checkpoint's folder.
        engine: Folder of the engine's part inside, "" for the checkpoint's folder itself.
    """

    session: str
    step: int
    rank: int
    world: int
    stage: int
    cuts: tuple[int, ...]
    folder: str
    engine: str = ""

    @property
    def file_name(self) -> str:
        """Name of the record's file."""
        return f"step-{self.step}-rank-{self.rank}.safetensors"


def parse_file_name(name: str) -> tuple[int, int] | None:
    """Return step and rank of a record's file name; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


@dataclass(frozen=True)
class RecordHeader:
    """A record without the values of its tensors.

    Attributes:
        info: Place of the record.
        text: The header of the file, with its length in front.
        spans: (begin, end, bytes of a value) of ranges of the data with values of equal size, in order.
        tensors: Names, dtypes and shapes; two records with equal ones can be compared byte by byte.
    """

    info: RecordInfo
    text: bytes
    spans: tuple[tuple[int, int, int], ...]
    tensors: str

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.spans[-1][1] if self.spans else 0

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, bytes of a value) of the blocks in which the data are sent."""
        for begin, end, itemsize in self.spans:
            for at in range(begin, end, BLOCK_BYTES):
                yield at, min(end, at + BLOCK_BYTES), itemsize

    @classmethod
    def parse(cls, text: bytes) -> RecordHeader:
        """Read a header. Raises WireError for anything that `StateRecord.take` cannot have made."""
        try:
            (length,) = _LENGTH.unpack_from(text)
            if len(text) != _LENGTH.size + length:
                raise ValueError(f"{len(text)} bytes")
            entries = json.loads(text[_LENGTH.size :])
            metadata = entries.pop(_METADATA)
            if metadata["format"] != FORMAT:
                raise ValueError(f"format {metadata['format']!r}")
            values = json.loads(metadata["info"])
            info = RecordInfo(**{**values, "cuts": tuple(values["cuts"])})
            _check_info(info)
            spans: list[tuple[int, int, int]] = []
            at = 0
            for entry in entries.values():
                begin, end = entry["data_offsets"]
                itemsize = _BY_NAME[entry["dtype"]].itemsize
                shape = [_natural(size) for size in entry["shape"]]
                size = itemsize * int(np.prod(shape, dtype=object)) if shape else itemsize
                if begin != at or end != begin + size or (spans and itemsize > spans[-1][2]):
                    raise ValueError(f"tensor at {begin}")
                at = end
                if size and spans and spans[-1][2] == itemsize:
                    spans[-1] = (spans[-1][0], end, itemsize)
                elif size:
                    spans.append((begin, end, itemsize))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
            raise WireError(f"the header of a record cannot be read: {type(error).__name__}: {error}") from error
        return cls(info, text, tuple(spans), json.dumps(list(entries.items())))


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a whole number is expected")
    return value


def check_place(session: Any, step: Any, rank: Any, world: Any) -> None:
    """Raise ValueError or TypeError for values that a record cannot have. They make up its file's name."""
    for value in (step, rank, world):
        _natural(value)
    name = f"step-{step}-rank-{rank}.safetensors"
    if not (rank < world and _SESSION.fullmatch(session) and parse_file_name(name) == (step, rank)):
        raise ValueError(f"step {step} of rank {rank} of {world}")


def _check_info(info: RecordInfo) -> None:
    """Raise ValueError for values of the wrong type, and names that leave the folder."""
    check_place(info.session, info.step, info.rank, info.world)
    for value in (info.stage, *info.cuts):
        _natural(value)
    for name in (info.folder, *([info.engine] if info.engine else [])):
        if not isinstance(name, str) or not is_file_name(name):
            raise ValueError(f"folder {name!r}")


def is_file_name(name: str) -> bool:
    """Return whether a string names something directly in a folder."""
    return bool(name) and PurePosixPath(name).name == name and name not in (".", "..") and "\x00" not in name


def check_plain(value: Any) -> None:
    """Raise TypeError for values that a record cannot have."""
    encode_tree(value, lambda leaf: None if isinstance(leaf, Tensor) else _encode_object(leaf, check_plain))


@dataclass(frozen=True)
class StateRecord:
    """A record in memory, or mapped from its file. data: uint8 [n]."""

    header: RecordHeader
    data: np.ndarray

    @property
    def info(self) -> RecordInfo:
        """Place of the record."""
        return self.header.info

    @classmethod
    def take(cls, info: RecordInfo, files: Mapping[str, Any]) -> StateRecord:
        """Copy the contents of a rank's files.

        Args:
            info: Place of the record.
            files: By path in the checkpoint's folder: plain containers with tensors, on any device; text for JSON
                files.

        Raises:
            TypeError: For an object of a class that a record cannot have.
        """
        tensors: list[Tensor] = []
        known: dict[Any, int] = {}

        def encode_leaf(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                same = (leaf.data_ptr(), leaf.device, leaf.dtype, tuple(leaf.shape), leaf.stride())
                if leaf.dtype not in _DTYPES:
                    raise TypeError(f"a record has no tensors of {leaf.dtype}")
                if leaf.numel() == 0 or same not in known:
                    known[same] = len(tensors)
                    tensors.append(leaf.detach())
                return {"tensor": known[same]}
            return _encode_object(leaf, lambda values: encode_tree(values, encode_leaf))

        state = json.dumps(encode_tree(dict(files), encode_leaf))
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        metadata = {"format": FORMAT, "info": json.dumps(asdict(info)), "state": state}
        entries: dict[str, Any] = {_METADATA: metadata}
        at = 0
        for i in order:
            end = at + tensors[i].nbytes
            shape = list(tensors[i].shape)
            entries[str(i)] = {"dtype": _DTYPES[tensors[i].dtype], "shape": shape, "data_offsets": [at, end]}
            at = end
        data = np.empty(at, dtype=np.uint8)
        for i in order:
            begin, end = entries[str(i)]["data_offsets"]
            if end > begin:
                target = torch.from_numpy(data[begin:end]).view(tensors[i].dtype).view(tensors[i].shape)
                target.copy_(tensors[i])
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return cls(RecordHeader.parse(_LENGTH.pack(len(text)) + text), data)

    @classmethod
    def open(cls, path: Path) -> StateRecord:
        """Map a record's file. Raises WireError for another file, OSError if it cannot be read."""
        with path.open("rb") as file:
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else MAX_HEADER_BYTES + 1
            if length > MAX_HEADER_BYTES:
                raise WireError(f"{path.name} is not a record")
            header = RecordHeader.parse(start + file.read(length))
        offset = len(header.text)
        if path.stat().st_size != offset + header.data_bytes:
            raise WireError(f"{path.name} has {path.stat().st_size} bytes, {offset + header.data_bytes} are listed")
        if header.data_bytes == 0:
            return cls(header, np.empty(0, dtype=np.uint8))
        return cls(header, np.memmap(path, dtype=np.uint8, mode="r", offset=offset))

    @cached_property
    def crc(self) -> int:
        """CRC-32 of the file."""
        return zlib.crc32(self.data, zlib.crc32(self.header.text))

    def write(self, folder: Path) -> None:
        """Write the record's file atomically into `folder`."""
        with atomic_write(folder / self.info.file_name) as part, part.open("wb") as file:
            file.write(self.header.text)
            file.write(self.data)

    @property
    def names(self) -> list[str]:
        """Paths of the files, without their contents; WireError as in `files`."""
        try:
            metadata = json.loads(self.header.text[_LENGTH.size :])[_METADATA]
            return list(decode_tree(json.loads(metadata["state"]), lambda kind, content: None))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise WireError(f"the contents of {self.info.file_name} cannot be read: {error}") from error

    def files(self) -> dict[str, Any]:
        """Return the contents of the files by path; tensors are views of `data`.

        Raises:
            WireError: For contents that `take` cannot have made, and paths outside of the checkpoint.
        """
        entries = json.loads(self.header.text[_LENGTH.size :])
        metadata = entries.pop(_METADATA)
        tensors: dict[int, Tensor] = {}

        def tensor(number: int) -> Tensor:
            if number not in tensors:
                entry = entries[str(number)]
                begin, end = entry["data_offsets"]
                dtype, shape = _BY_NAME[entry["dtype"]], tuple(entry["shape"])
                flat = torch.from_numpy(np.array(self.data[begin:end]))
                tensors[number] = flat.view(dtype).view(shape) if end > begin else torch.empty(shape, dtype=dtype)
            return tensors[number]

        def decode_leaf(kind: str, content: Any) -> Any:
            if kind == "tensor":
                return tensor(content)
            return _decode_object(kind, content, lambda tree: decode_tree(tree, decode_leaf))

        try:
            files = decode_tree(json.loads(metadata["state"]), decode_leaf)
            if not isinstance(files, dict):
                raise ValueError(f"{type(files).__name__} in place of files")
            for name in files:
                if not all(map(is_file_name, name.split("/"))):
                    raise ValueError(f"a file named {name!r}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise WireError(f"the contents of {self.info.file_name} cannot be read: {problem}") from error
        return files


def _encode_object(leaf: Any, encode: Any) -> Any:
    if leaf is None or isinstance(leaf, (str, bool, int, float)):
        return leaf
    if isinstance(leaf, np.generic):
        return leaf.item()
    if isinstance(leaf, torch.dtype):
        return {"dtype": str(leaf).removeprefix("torch.")}
    if isinstance(leaf, bytes):
        return {"bytes": leaf.hex()}
    if isinstance(leaf, (set, frozenset)):
        return {"set": encode(sorted(leaf, key=repr))}
    name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if name in _CLASSES:
        return {"object": [name, encode(vars(leaf))]}
    raise TypeError(f"a record has plain values only, not {name}")


def _decode_object(kind: str, content: Any, decode: Any) -> Any:
    if kind == "dtype":
        dtype = getattr(torch, content)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {content!r}")
        return dtype
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "set":
        return set(decode(content))
    if kind == "object":
        name, values = content
        if name not in _CLASSES:
            raise ValueError(f"an object of class {name!r}")
        module, _, attribute = name.rpartition(".")
        made = object.__new__(getattr(importlib.import_module(module), attribute))
        for key, value in decode(values).items():
            if not (isinstance(key, str) and key.isidentifier()) or key.startswith("__"):
                raise ValueError(f"an attribute {key!r}")
            object.__setattr__(made, key, value)
        return made
    raise ValueError(f"unknown kind {kind!r}")


class RecordWriter:
    """Writes a record that arrives block by block; the file appears when it is whole.

    Args:
        folder: Folder of the file.
        header: Header of the record.
    """

    def __init__(self, folder: Path, header: RecordHeader) -> None:
        self._path, self._header = folder / header.info.file_name, header
        self._part = self._path.with_name(self._path.name + UNFINISHED)
        self._file = self._part.open("wb")
        self._crc = 0
        self.write(header.text)

    def write(self, data: bytes | np.ndarray) -> None:
        """Append bytes."""
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)

    def finish(self, crc: int) -> None:
        """Put the file in its place. Raises WireError if its checksum differs from `crc`."""
        if self._crc != crc:
            self.abort()
            raise WireError(f"{self._path.name} was changed on the way: its checksum differs")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._path)

    def abort(self) -> None:
        """Remove what was written."""
        self._file.close()
        self._part.unlink(missing_ok=True)
