"""Records: exact differences, whole files, refusals of damaged ones, and checkpoints made of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipecomp.checkpoint import manifest
from pipecomp.config import Config
from pipecomp.elastic import record as record_module
from pipecomp.elastic.assembly import assemble, newest_complete
from pipecomp.elastic.delta import BLOCK_BYTES, OVERHEAD_BYTES, decode_block, encode_block
from pipecomp.elastic.index import INDEX, RecordFolder, find_records
from pipecomp.elastic.record import SHARED, RecordHeader, RecordInfo, RecordWriter, StateRecord
from pipecomp.elastic.schedule import LineShare, LossBound, RecordSchedule, steps_between
from pipecomp.elastic.second_home import choose_homes
from pipecomp.errors import CheckpointError, ConfigError, WireError

SESSION = "0123456789abcdef"


def info(step: int = 4, rank: int = 0, world: int = 3, **more: Any) -> RecordInfo:
    values = {"session": SESSION, "stage": rank, "cuts": (0, 1, 2, 4), "folder": f"global_step{step}"}
    return RecordInfo(step=step, rank=rank, world=world, **{**values, **more})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# -- differences


def versions(dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two versions of some values, the first with NaNs of several payloads, infinities and negative zeros."""
    draw = torch.Generator().manual_seed(count)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=draw)  # any bits: NaN payloads, too
    old = raw.view(dtype)
    new = old.clone().view(torch.uint8)
    new[::size] ^= 3
    new[: size * min(count, 9)] = torch.randint(0, 256, (size * min(count, 9),), dtype=torch.uint8, generator=draw)
    return old, new.view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 7, 40_001])
def test_a_block_is_restored_bit_for_bit(dtype: torch.dtype, count: int) -> None:
    old, new = (np.frombuffer(bits(x), dtype=np.uint8) for x in versions(dtype, count))
    for base in (old, None):
        data = encode_block(new, base, dtype.itemsize)
        assert len(data) <= new.size + OVERHEAD_BYTES
        assert decode_block(data, base, new.size, dtype.itemsize).tobytes() == new.tobytes()


def test_small_changes_take_few_bytes() -> None:
    old = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    new = old * (1 + 1e-5)
    same, close = (
        len(encode_block(np.frombuffer(bits(x), np.uint8), old.numpy().view(np.uint8), 4)) for x in (old, new)
    )
    assert same == 4 * 5
    assert close < 0.6 * old.nbytes


def test_foreign_blocks_are_refused() -> None:
    old, new = (np.frombuffer(bits(x), dtype=np.uint8) for x in versions(torch.float32, 3000))
    whole = encode_block(new, old, 4)
    bomb = b"".join(record_module.struct.pack("<BI", 2, len(x)) + x for x in [zlib.compress(bytes(1 << 26))] * 4)
    for data in (b"", whole[:-1], whole + b"x", b"\x07" + whole[1:], bytes(25), bomb):
        with pytest.raises(WireError):
            decode_block(data, old, new.size, 4)
    draw = random.Random(0)
    for _ in range(200):  # any change gives another block or an error, and never more memory
        changed = bytearray(whole)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        with contextlib.suppress(WireError):
            assert decode_block(bytes(changed), old, new.size, 4).size == new.size


# -- files


def contents(rank: int) -> dict[str, Any]:
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))
    return {
        f"layer_{rank:02d}-model_states.pt": {
            "weight": weight,
            "tied": weight,
            "half": torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(7),
        },
        f"mp_rank_{rank:02d}_model_states.pt": {
            "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]},
            "nan": float("nan"),
            "dtype": torch.bfloat16,
            "names": {"b", "a"},
            "digest": b"\x00\xff",
            "global_steps": 4,
        },
        **({SHARED: {"pipecomp": {"step": 4}}} if rank == 0 else {}),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b or (a != a and b != b)


def test_a_record_has_all_that_was_taken(tmp_path: Path) -> None:
    from safetensors import safe_open

    taken = StateRecord.take(info(), contents(0))
    taken.write(tmp_path)
    path = tmp_path / taken.info.file_name
    opened = StateRecord.open(path)
    assert opened.info == info()
    assert opened.crc == taken.crc == zlib.crc32(path.read_bytes())
    assert equal(opened.files(), contents(0))
    with safe_open(path, "pt") as file:  # any program can read it
        found = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a dict)
    assert any(equal(x, contents(0)["layer_00-model_states.pt"]["weight"]) for x in found)


def test_a_record_is_a_copy() -> None:
    files = contents(0)
    taken = StateRecord.take(info(), files)
    files["layer_00-model_states.pt"]["weight"].zero_()
    assert equal(taken.files(), contents(0))


def test_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"plain values only, not .*Random"):
        StateRecord.take(info(), {"a.pt": {"mine": random.Random(0)}})


def test_objects_of_deepspeed_come_back(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2**10, 2.0, 1000, 1.0, 2, False, dtype=torch.float16)
    files = {"a.pt": {"loss_scaler": scaler, "place": fragment_address(numel=3, start=4)}}
    found = StateRecord.take(info(), files).files()["a.pt"]
    assert type(found["loss_scaler"]) is DynamicLossScaler
    assert vars(found["loss_scaler"]) == vars(scaler)
    assert found["place"] == fragment_address(numel=3, start=4)


def changed_header(**changes: Any) -> bytes:
    """The header of a record with other values for its tensors' entries, its state or its place."""
    text = StateRecord.take(info(), contents(0)).header.text
    entries = json.loads(text[8:])
    metadata = entries["__metadata__"]
    metadata["info"] = json.dumps({**json.loads(metadata["info"]), **changes.pop("info", {})})
    metadata["state"] = changes.pop("state", metadata["state"])
    for entry in [entry for name, entry in entries.items() if name != "__metadata__"][:1]:
        entry |= changes
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "F31"},
        {"shape": [-1, 2]},
        {"shape": [1 << 70]},
        {"shape": ["2"]},
        {"data_offsets": [0, 1]},
        {"data_offsets": [8, 16]},
        {"info": {"folder": "../x"}},
        {"info": {"folder": "a/b"}},
        {"info": {"engine": ".."}},
        {"info": {"rank": 3}},
        {"info": {"step": -1}},
        {"info": {"step": "4"}},
        {"info": {"more": 1}},
        {"info": {"session": "../../x"}},
    ],
    ids=str,
)
def test_foreign_headers_are_refused(changes: dict[str, Any]) -> None:
    assert RecordHeader.parse(changed_header()).info == info()
    with pytest.raises(WireError):
        RecordHeader.parse(changed_header(**changes))


@pytest.mark.parametrize(
    "state",
    [
        {"dict": [["../x.pt", 1]]},
        {"dict": [["/etc/x", 1]]},
        {"dict": [["a.pt", {"object": ["os.system", {"dict": []}]}]]},
        {"dict": [["a.pt", {"tensor": 99}]]},
        {"dict": [["a.pt", {"dtype": "save"}]]},
        {"list": []},
        "text",
    ],
    ids=str,
)
def test_foreign_contents_are_refused(state: Any, tmp_path: Path) -> None:
    header = RecordHeader.parse(changed_header(state=json.dumps(state)))
    (tmp_path / "x.safetensors").write_bytes(header.text + bytes(header.data_bytes))
    with pytest.raises(WireError, match="cannot be read"):
        StateRecord.open(tmp_path / "x.safetensors").files()


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    taken = StateRecord.take(info(), contents(0))
    path = tmp_path / taken.info.file_name
    writer = RecordWriter(tmp_path, taken.header)
    writer.write(taken.data[:11])
    assert not path.exists()  # a kill here leaves a part, which the next start removes
    assert list(tmp_path.glob("*.part"))
    RecordFolder(tmp_path)
    assert not list(tmp_path.glob("*.part"))
    writer = RecordWriter(tmp_path, taken.header)
    writer.write(taken.data)
    with pytest.raises(WireError, match="checksum"):
        writer.finish(taken.crc ^ 1)
    assert list(tmp_path.iterdir()) == []
    writer = RecordWriter(tmp_path, taken.header)
    writer.write(taken.data)
    writer.finish(taken.crc)
    assert StateRecord.open(path).crc == taken.crc


# -- folders


def write_records(root: Path, steps: tuple[int, ...] = (2, 4), world: int = 3, **more: Any) -> None:
    """Each rank's record on its own machine and on the next one's."""
    for holder in range(world):
        folder = RecordFolder(root / f"machine-{holder}" / f"rank-{holder}")
        for step in steps:
            for rank in (holder, (holder - 1) % world):
                made = StateRecord.take(info(step, rank, world, **more), contents(rank))
                made.write(folder.path)
                folder.add(made)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_checkpoint_without_any_one_machine(lost: int, tmp_path: Path) -> None:
    write_records(tmp_path)
    shutil.rmtree(tmp_path / f"machine-{lost}")
    left = sorted(tmp_path.glob("machine-*"))
    folder = assemble(left, tmp_path / "out")
    assert folder == tmp_path / "out" / "global_step4"
    assert (tmp_path / "out" / "latest").read_text() == "global_step4"
    assert manifest.problem(folder) is None
    for rank in range(3):
        for name, content in contents(rank).items():
            if name == SHARED:
                continue
            common = contents(0)[SHARED] if name.startswith("mp_rank") else {}
            assert equal(torch.load(folder / name, weights_only=False), {**content, **common})
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert assemble(left, tmp_path / "out") == folder  # a finished one stays
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_two_machines_lost_are_named(tmp_path: Path) -> None:
    write_records(tmp_path)
    for machine in (0, 1):
        shutil.rmtree(tmp_path / f"machine-{machine}")
    with pytest.raises(CheckpointError, match="step 4: the record of rank 0 is missing; step 2"):
        newest_complete([tmp_path / "machine-2"])
    with pytest.raises(CheckpointError, match="there are no records"):
        newest_complete([tmp_path / "machine-0"])


def test_a_damaged_record_is_replaced_by_its_other_copy_or_an_older_step(tmp_path: Path) -> None:
    write_records(tmp_path)
    own = tmp_path / "machine-1" / "rank-1" / "step-4-rank-1.safetensors"
    data = bytearray(own.read_bytes())
    data[-1] ^= 1
    own.write_bytes(data)
    left = [tmp_path / f"machine-{machine}" for machine in range(3)]
    assert newest_complete(left).records[1] == tmp_path / "machine-2" / "rank-2" / own.name
    older = newest_complete(left[:2])  # machine 2, which has the other copy, is lost
    assert older.step == 2
    assert "step-4-rank-1.safetensors was changed" in older.lost[0]
    with pytest.raises(CheckpointError, match="no complete state of step 4"):
        newest_complete(left[:2], step=4)


def test_records_of_two_sessions_are_not_mixed(tmp_path: Path) -> None:
    write_records(tmp_path)
    for path in (tmp_path / "machine-0").rglob("*.safetensors"):
        path.unlink()
    other = StateRecord.take(info(6, 0, session="ab"), contents(0))
    folder = RecordFolder(tmp_path / "machine-0" / "rank-0")
    other.write(folder.path)
    folder.add(other)
    found = newest_complete(tmp_path.glob("machine-*"))
    assert (found.step, found.lost) == (4, ("step 6: the records of ranks 1 and 2 are missing",))


def test_steps_that_nobody_needs_are_deleted(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path / "rank-0")
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    for step in (2, 4, 6, 8):
        made = StateRecord.take(info(step), contents(0))
        made.write(folder.path)
        folder.add(made, str(checkpoint) if step == 2 else None)
    folder.keep([6, 8], SESSION, earlier=True)
    assert folder.steps_of(0, SESSION) == [2, 6, 8]
    assert sorted(os.listdir(folder.path)) == [INDEX, *(f"step-{step}-rank-0.safetensors" for step in (2, 6, 8))]
    checkpoint.rmdir()
    folder = RecordFolder(folder.path)  # as after a restart
    folder.keep([6, 8], SESSION, earlier=True)
    assert folder.steps_of(0, SESSION) == [6, 8]
    folder.keep([6, 8], "ab", earlier=True)
    assert folder.steps_of(0, SESSION) == [6, 8]  # until the new session has complete steps of its own
    folder.forget_from(8)
    assert [entry.step for entry in find_records([tmp_path])] == [6]
    folder.keep([], "ab", earlier=False)
    assert find_records([tmp_path]) == []


def test_a_foreign_index_names_no_other_file(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(
        json.dumps({"format": 1, "records": [[SESSION, 4, 0, 1, 3, 5, "../../etc/passwd", None]]})
    )
    assert find_records([tmp_path]) == []
    (tmp_path / INDEX).write_text("{")
    assert find_records([tmp_path]) == []


# -- schedule


def test_records_keep_to_their_share_of_the_line() -> None:
    assert steps_between(1.0, 10.0, 0.05) == 2
    assert steps_between(1.01, 10.0, 0.05) == 3
    assert steps_between(0.001, 10.0, 0.05) == 1
    planned = RecordSchedule.predict(2.1e6, 10e6, 10.0, 0.05)
    assert (planned.every_steps, planned.lost_steps) == (4, 7)
    assert str(planned) == "2.1 MB every 4 steps, at most 7 steps are lost with a machine"
    slow = RecordSchedule(size_bytes=1e6, every_steps=4, sending_steps=6)  # the next record is taken 6 steps later
    assert slow.lost_steps >= 12


def test_slices_wait_for_their_share() -> None:
    gave_way: list[float] = []
    share = LineShare(lambda: gave_way.append(share.line_s), 0.5)
    for _ in range(4):
        share.wait()
    share.left()
    assert len(gave_way) == 4
    assert share.waited_s >= 0.5 * share.line_s
    share.stopped = True
    share.wait()
    assert len(gave_way) == 4


def test_the_stated_bound_holds_and_seldom_changes() -> None:
    bound, draw = LossBound(), random.Random(0)
    changes = 0
    for _ in range(1000):  # steps of a few ms: each schedule is another one
        schedule = RecordSchedule(1e6, draw.randrange(42, 60), draw.randrange(1, 4))
        changes += bound.update(schedule)
        assert schedule.lost_steps <= bound.steps
    assert bound.steps == 100
    assert changes == 1
    seen = [bound.steps for _ in range(9) if bound.update(RecordSchedule(1e6, 7, 1)) or True]
    assert seen == [*[100] * 7, 10, 10], "it falls once all of the last 8 are below half"
    assert RecordSchedule(2.1e6, 7, 1).describe(10) == "2.1 MB every 7 steps, at most 10 steps are lost with a machine"


def test_second_homes_are_on_other_machines() -> None:
    one = [[0, 1, 2]]
    assert choose_homes("next", one, ["a", "b", "c"]) == [1, 2, 0]
    assert choose_homes("next", one, ["a", "a", "a"]) == [1, 2, 0]  # without another machine
    assert choose_homes("next", one, ["a", "a", "b"]) == [2, 2, 0]
    assert choose_homes(2, one, ["a", "b", "c"]) == [2, 2, 0]
    assert choose_homes("c", one, ["a", "b", "c"]) == [2, 2, 0]
    assert choose_homes("next", [[0, 2], [1, 3]], ["a", "b", "a", "b"]) == [1, 2, 3, 0]  # a replica on each machine
    several = [[0, 1, 2, 3]]
    assert choose_homes("next", several, ["a"] * 4, ["x", "x", "y", "y"]) == [2, 2, 0, 0]  # machines of one name
    for setting, world in (("next", 1), (3, 3), ("d", 3)):
        with pytest.raises(ConfigError, match=r"elastic\.second_home"):
            choose_homes(setting, [list(range(world))], ["a", "b", "c"][:world])


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"line_share": 0.1}, "line_share"),
        ({"second_home": "off", "path": "x"}, "path"),
        ({"second_home": "next", "every_steps": 2, "line_share": 0.1}, "line_share"),
        ({"second_home": "next", "every_steps": 0}, "every_steps"),
        ({"second_home": "next", "line_share": 0.6}, "line_share"),
        ({"second_home": -1}, "second_home"),
        ({"second_home": ""}, "second_home"),
    ],
    ids=str,
)
def test_settings_without_effect_are_refused(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"elastic\.{key}"):
        Config.from_dict({"elastic": section})


def test_a_run_without_second_home_compares_as_before() -> None:
    assert "elastic" not in Config().shared()
    assert Config.from_dict({"elastic": {"second_home": "next", "path": "x"}}).shared()["elastic"] == {
        "second_home": "next",
        "line_share": 0.05,
        "every_steps": "auto",
    }


assert BLOCK_BYTES % 8 == 0  # blocks hold whole values
