"""Files that some ranks' machines lack, from the others: over TLS and gloo, interrupted, damaged, hostile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pipecomp.distributed import file_transfer, rendezvous
from pipecomp.distributed.file_transfer import is_inside, list_files, missing_files, parse_list, share_files
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import DataError, PipecompError
from tests.limits import HANG_S
from tests.tls.meshes import keys_for

DIGEST = "0" * 64
LARGE = bytes(range(256)) * (20 << 12) + b"end"  # 20 MiB and a piece: more than a window


@pytest.mark.parametrize(
    ("path", "inside"),
    [("a", True), ("./a/b", True), ("..", False), ("../a", False), ("a/../../b", False), ("/a", False), (".", False)],
)
def test_only_paths_of_the_working_directory(path, inside):
    assert is_inside(path) is inside


@pytest.mark.parametrize(
    "given",
    [
        *(None, [], {}, "x", [[]], [["a", 1]], [["a", "1", DIGEST]], [["a", -1, DIGEST]], [["a", 1, "x"]]),
        *([[name, 1, DIGEST]] for name in ("../a", "/a", "a//b", "a/../b", "./a", "a\0", "a.part", "x" * 2000)),
        [["a", 1, DIGEST], ["a", 2, DIGEST]],
        [["", 1, DIGEST], ["a", 2, DIGEST]],
        [["a", 1, DIGEST]] * (file_transfer.MOST_FILES + 1),
    ],
)
def test_a_hostile_list_is_refused(given):
    with pytest.raises(DataError, match="the list of the files in model"):
        parse_list("model", given)


def test_a_list_is_that_of_the_folder(tmp_path):
    (tmp_path / "inner").mkdir()
    for name in ("inner/b", "a"):
        (tmp_path / name).write_text(name)
    found = list_files(tmp_path)
    assert [(file.name, file.size) for file in found] == [("a", 1), ("inner/b", 7)]
    assert parse_list("x", [list(file) for file in found]) == found
    assert parse_list("x", [list(file) for file in list_files(tmp_path / "a")])[0].name == ""
    part = tmp_path.with_name(f"{tmp_path.name}-copy.part")
    part.mkdir()
    (part / "a").write_text("a")
    assert missing_files(tmp_path.with_name(f"{tmp_path.name}-copy"), found) == [1]


def work(rank: int, world: int, note: Any, folder: str, keys: str | None, case: str) -> Any:
    """Rank 0 has all files; returns what this rank has afterwards, and the error."""
    if keys is not None:
        os.environ[rendezvous.KEYS] = f"{keys}/rank-{rank}"
    rendezvous.start_processes(3)
    os.environ["LOCAL_RANK"] = "0"
    own = Path(folder, str(rank))
    os.chdir(own)
    if case == "damaged" and rank == 0:
        file_transfer.hash_file = lambda path: DIGEST  # type: ignore[assignment]
    if case == "full" and rank == 1:
        file_transfer.shutil.disk_usage = lambda path: SimpleNamespace(free=5)  # type: ignore[assignment]
    if case == "unwritable" and rank == 1:
        whole = file_transfer._Incoming.read

        def fails(self: Any) -> Any:
            for number, data in enumerate(whole(self)):
                if number == 3:
                    raise OSError(28, "No space left on device")
                yield data

        file_transfer._Incoming.read = fails  # type: ignore[method-assign]
    error, said = None, []
    try:
        share_files(
            rendezvous.all_ranks(), ["model", "text.txt", "../outside", "name-of-the-hub"],
            take=rank != 2 or case == "all", say=said.append,
        )  # fmt: skip
    except PipecompError as raised:
        error = f"{type(raised).__name__}: {raised}"
    files = sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file())
    same = all(
        (own / name).read_bytes() == Path(folder, "0", name).read_bytes() for name in files if "part" not in name
    )
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    if keys is not None:
        from pipecomp.tls.process_group import current_mesh

        current_mesh().close()  # type: ignore[union-attr]
    return files, same, error, said


def share(tmp_path: Path, case: str, *, tls: bool) -> dict[int, Any]:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir(exist_ok=True)
    model = tmp_path / "0" / "model"
    (model / "inner").mkdir(parents=True, exist_ok=True)
    (model / "inner" / "config").write_bytes(b"")
    (model / "weights").write_bytes(LARGE)
    (tmp_path / "0" / "text.txt").write_bytes(b"text" * 1000)
    (tmp_path / "outside").write_bytes(b"x")
    if tls:
        (tmp_path / "keys").mkdir(exist_ok=True)
        keys_for(tmp_path / "keys", 3)
    return run_ranks(3, work, str(tmp_path), str(tmp_path / "keys") if tls else None, case, timeout_s=HANG_S)


ALL = ["model/inner/config", "model/weights", "text.txt"]


@pytest.mark.ranks
@pytest.mark.parametrize("tls", [True, False])
def test_machines_get_what_they_lack(tmp_path, tls):
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "text.txt").write_bytes(b"text" * 1000)
    (tmp_path / "1" / "model.part").mkdir(parents=True)
    (tmp_path / "1" / "model.part" / "weights").write_bytes(LARGE)  # of an interrupted copy
    found = share(tmp_path, "all", tls=tls)
    assert [found[rank][:3] for rank in range(3)] == [(ALL, True, None)] * 3
    assert "copying model (2 files, 0 B) from rank 0 to rank 1, 2" in found[0][3]
    assert "copying text.txt (1 file, 4.0 kB) from rank 0 to rank 1" in found[0][3]


@pytest.mark.ranks
def test_a_machine_takes_nothing_unasked(tmp_path):
    found = share(tmp_path, "one", tls=False)
    assert (found[1][0], found[2][0]) == (ALL, [])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("damaged", "OutputError: model cannot be copied to rank 1: inner/config arrived damaged"),
        ("unwritable", "OutputError: model cannot be copied to rank 1: No space left on device"),
        ("full", "DataError: 21.0 MB are needed for model, text.txt, and 5 B are free"),
    ],
)
def test_a_copy_that_fails(tmp_path, case, message):
    found = share(tmp_path, case, tls=True)
    assert found[1][2] == message
    assert message.partition(": ")[2] in found[0][2]
    assert "rank 1" in found[2][2]
    assert not (tmp_path / "1" / "model").exists()
