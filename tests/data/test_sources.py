"""Files, folders and data sets as records and text, and errors for what is neither."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from pipecomp.data import sources
from pipecomp.data.sources import find_sources, read_text
from pipecomp.distributed import heartbeat
from pipecomp.errors import PipecompError, StalledError
from pipecomp.utils import activity

ODD = "a\rb\x0c\x0bc\u2028d\u0085e  f\t\n\n  g\r\n h "


def put(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def rows(path: str) -> list[dict]:
    return [record.values for source in find_sources(path) for record in source.records()]


def error(path) -> str:
    def read() -> None:
        for source in find_sources(path):
            list(source.text() if source.kind == "plain text" else source.records())

    with pytest.raises(PipecompError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a", "n": 1}\n{"text": "b\\n  c", "n": 2}\n'),
        ("a.ndjson", '\ufeff{"text": "a", "n": 1}\r\n\r\n{"text": "b\\n  c",\r"n": 2}'),
        ("a.json", '{"text": "a", "n": 1}\n{"text": "b\\n  c", "n": 2}\n'),
        ("array.json", '[{"text": "a", "n": 1},\n\n {"text": "b\\n  c", "n": 2}\n]\n'),
        ("array.jsonl", '[{"text": "a", "n": 1}, {"text": "b\\n  c", "n": 2}]'),
        ("columns.json", '{"text": ["a", "b\\n  c"], "n": [1, 2]}'),
        ("pretty.json", '{\n  "text": ["a", "b\\n  c"],\n  "n": [1, 2]\n}\n'),
    ],
)
def test_json_has_the_same_rows_in_all_forms(tmp_path, name, content):
    assert rows(put(tmp_path, name, content)) == [{"text": "a", "n": 1}, {"text": "b\n  c", "n": 2}]


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_csv_keeps_what_is_quoted(tmp_path, name, mark, encoding):
    content = f'text{mark}n\r\n"a ""b"", {ODD}"{mark}1\r\nplain{mark}2\n'
    assert rows(put(tmp_path, name, content.encode(encoding))) == [
        {"text": f'a "b", {ODD}', "n": "1"},
        {"text": "plain", "n": "2"},
    ]


def test_parquet_arrow_and_data_sets_have_the_same_rows(tmp_path):
    from datasets import Dataset, DatasetDict

    wanted = [{"text": ODD, "m": [{"role": "user", "content": "x"}]}, {"text": "b", "m": []}]
    data = Dataset.from_list(wanted)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "splits")
    for source in (str(tmp_path / "a.parquet"), str(tmp_path / "saved"), str(tmp_path / "splits"), data):
        assert rows(source) == wanted


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_plain_text_is_kept_byte_for_byte(tmp_path, encoding):
    content = ODD + "größe 日本語 👩‍👩‍👧\n" * 200_000
    path = put(tmp_path, "a.txt", content.encode(encoding))
    [source] = find_sources(path)
    assert "".join(source.text()) == content == read_text(path)
    assert "\n".join(source.lines()) == content.replace("\r\n", "\n").removesuffix("\n")


def test_a_folder_has_its_files_in_the_order_of_their_paths(tmp_path):
    for name in ("b/2.txt", "b/10.jsonl", "a.csv", ".hidden/c.txt", "README.md", "dataset_info.json"):
        put(tmp_path, name, "x")
    found = [Path(source.name).relative_to(tmp_path).as_posix() for source in find_sources(tmp_path)]
    assert found == ["a.csv", "b/10.jsonl", "b/2.txt"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text" "b"}\n', ["a.jsonl, line 2", "not JSON"]),
        ("a.json", '[{"text": "a"},\n{"text": "b"}\n{"text": "c"}]', ["line 3", "not JSON"]),
        ("a.json", '[{"text": "a"},\n{"text": b}]', ["line 2", "not JSON"]),
        ("a.json", '[{"text": "a"}', ["line 1", "not JSON"]),
        ("a.json", '{"a": [1, 2], "b": [1]}', ["different lengths"]),
        ("a.jsonl", '{"text": "a"}\n7\n', ["line 2", "int"]),
        ("a.jsonl", '{"text": "a"}\n{"text": "a\\ud83d"}\n', ["line 2", "surrogate"]),
        ("a.jsonl", '{"text": "größe"}\n'.encode("latin-1"), ["line 1", "UTF-8", "byte 12", "iconv"]),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), ["UTF-16", "iconv"]),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16-le"), ["UTF-16", "iconv"]),
        ("a.txt", "größe".encode("latin-1"), ["byte 2", "0xf6", "iconv"]),
        ("a.txt", b"a" * 2_000_000 + b"\xff", ["byte 2000000"]),
        ("a.txt", "some words".encode("utf-16-be"), ["UTF-16", "byte order mark", "iconv"]),
        ("a.txt", "some words".encode("utf-32"), ["UTF-32", "iconv"]),
        ("a.txt", b"a" * 2_000_000 + b"\0", ["byte 2000000", "NUL"]),
        ("a.txt", b"PK\x03\x04", ["zip"]),
        ("a.jsonl", b"\x1f\x8b\x08", ["gzip", "gunzip"]),
        ("a.txt", b"PAR1", ["Parquet", ".parquet"]),
        ("a.parquet", "a,b", ["Parquet"]),
        ("a.pdf", b"%PDF-1.7", ["PDF"]),
        ("a.txt", b"x" * 257 + b"ustar", ["tar"]),
        ("a.txt", "", ["empty"]),
        ("a.csv", "text,n\na,1,2\n", ["line 2", "3 fields", "text, n"]),
        ("a.csv", "text,text\na,1\n", ["line 1", "twice"]),
        ("a.csv", "text,n\na\rb,1\n", ["line 2", "carriage return"]),
        ("a.csv", 'text,n\n"a"b,1\n', ["line 2", "not CSV"]),
    ],
)
def test_a_wrong_file_has_one_line_with_its_place_and_remedy(tmp_path, name, content, parts):
    message = error(put(tmp_path, name, content))
    assert str(tmp_path / name) in message
    for part in parts:
        assert part in message


def test_what_can_be_read_once_only_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/stdin", "/dev/null"):
        assert "once" in error(path)


def test_a_dead_disk_ends_the_reading_and_slow_tokenization_does_not(tmp_path, monkeypatch):
    def pieces(name):
        yield from "ab"
        threading.Event().wait()

    monkeypatch.setattr(sources, "_decoded", pieces)
    monkeypatch.setattr(heartbeat, "DEFAULT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(activity.limits, "data_s", 0.5)
    rank = heartbeat.Heartbeat(0, 1, torch.distributed.HashStore())
    [source] = find_sources(put(tmp_path, "a.txt", "ab"))
    used = []

    def tokenize() -> None:
        for piece in source.text():
            used.append(piece)
            time.sleep(1.0)

    try:
        with pytest.raises(StalledError, match=r"reads .*a\.txt since 0 s at .*Look at its disk"):
            tokenize()
    finally:
        rank.end()
    assert used == ["a", "b"]


@pytest.mark.parametrize("text", ['["' + 1000 * "a" + '"]', '"' + 1000 * "a" + '"\n'])
def test_a_large_row_on_a_slow_disk_is_read(tmp_path, monkeypatch, text):
    class Slow(sources._WatchedFile):
        def readinto(self, buffer):
            time.sleep(0.1)
            return super().readinto(buffer)

    monkeypatch.setattr(sources, "_PIECE", 64)
    monkeypatch.setattr(sources, "_WatchedFile", Slow)
    monkeypatch.setattr(heartbeat, "DEFAULT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(activity.limits, "data_s", 1.0)
    rank = heartbeat.Heartbeat(0, 1, torch.distributed.HashStore())
    try:
        [source] = find_sources(put(tmp_path, "a.jsonl", text))
        assert [record.values for record in source.records()] == [{"text": 1000 * "a"}]
    finally:
        rank.end()


def test_folders_and_names_that_are_nothing(tmp_path):
    put(tmp_path, "code/a.py", "x")
    assert ".py" in error(tmp_path / "code")
    assert "no such file" in error(str(tmp_path / "none.jsonl"))
    assert "no such file" in error("./none")


def test_streams_are_refused(tmp_path):
    from datasets import Dataset

    assert "stream" in error(Dataset.from_list([{"text": "a"}]).to_iterable_dataset())


def test_damaged_parquet(tmp_path):
    from datasets import Dataset

    Dataset.from_list([{"text": "a"}]).to_parquet(tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    assert "damaged" in error(put(tmp_path, "b.parquet", content[: len(content) // 2]))


def test_a_row_names_its_line(tmp_path):
    path = put(tmp_path, "a.jsonl", "\n".join(json.dumps({"text": str(i)}) for i in range(3)))
    [source] = find_sources(path)
    assert [record.where for record in source.records()] == [f"{path}, line {i}" for i in (1, 2, 3)]
