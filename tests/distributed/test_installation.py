"""This installation as files for another machine."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipecomp.distributed import installation
from pipecomp.distributed.installation import (
    DigestCache,
    Installation,
    SourceFile,
    distribution_files,
    needed_distributions,
    own_requirements,
    package_files,
)
from pipecomp.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import import_graph as house


def test_every_module_goes_along():
    found = {file.path for file in package_files(native=False)}
    wanted = set()
    for module, path in house.modules().items():
        name = module.replace(".", "/")
        wanted.add(f"{name}/__init__.py" if path.name == "__init__.py" else f"{name}.py")
    assert wanted <= found
    assert {"pipecomp/py.typed", "pipecomp/kernels/native/portable.cpp", "pipecomp/report/page.css"} <= found
    assert "pipecomp/recipe_files/gpt2_wikitext2/train.py" in found
    assert not [path for path in found if "__pycache__" in path or path.endswith(".so")]
    assert len(found) == len(package_files(native=False)), "each once"


def test_it_is_a_package_as_pip_installs_one(tmp_path):
    for file in package_files(native=False):
        path = tmp_path / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data if file.source is None else file.source.read_bytes())
    [found] = importlib.metadata.distributions(path=[str(tmp_path)], name="pipecomp")
    import pipecomp

    assert found.version == pipecomp.__version__
    assert found.requires
    assert [point.value for point in found.entry_points] == ["pipecomp.cli:app"]
    assert all(Path(str(file.locate())).is_file() for file in found.files or [])


def test_kernels_go_along_once(monkeypatch, tmp_path):
    (tmp_path / "kernels").mkdir()
    for name in ("_native.so", "_native.cpython-311-x86_64-linux-gnu.so"):
        (tmp_path / "kernels" / name).write_bytes(b"code")
    monkeypatch.setattr(installation, "_FOLDER", tmp_path)
    assert [file.path for file in package_files(native=True) if file.path.endswith(".so")] == [
        "pipecomp/kernels/_native.cpython-311-x86_64-linux-gnu.so"
    ]


def test_the_packages_that_it_needs_with_theirs():
    found = needed_distributions()
    assert {"torch", "deepspeed", "transformers", "numpy", "huggingface-hub", "peft"} <= set(found)
    assert not {"pytest", "ruff", "mypy"} & set(found), "for development"
    assert Installation(distributions={"numpy": found["numpy"]}).pins == {"numpy": found["numpy"].version}
    assert any(text.startswith("peft") and "extra == 'lora'" in text for text in own_requirements())


def test_a_package_that_is_missing_here(monkeypatch):
    monkeypatch.setattr(installation, "own_requirements", lambda: ["no-such-package>=1"])
    with pytest.raises(ConfigError, match="packages: got 'no-such-package', allowed: an installed package"):
        needed_distributions()


def test_files_of_packages_without_scripts_and_bytecode():
    found = distribution_files([importlib.metadata.distribution("rich")])
    paths = [file.path for file in found]
    assert "rich/__init__.py" in paths
    assert not [path for path in paths if ".." in path or path.endswith(".pyc")]


@pytest.mark.parametrize(
    ("url", "files", "message"),
    [
        ('{"url": "file:///x", "dir_info": {"editable": true}}', [], "an ordinary installation here"),
        (None, None, "a package that lists its files"),
    ],
)
def test_packages_that_cannot_be_copied(url, files, message):
    package = SimpleNamespace(metadata={"Name": "mine"}, read_text=lambda name: url, files=files)
    with pytest.raises(ConfigError, match=f"packages: got 'mine', allowed: {message}.*--packages index"):
        distribution_files([package])


def test_digests_of_large_files_are_kept(tmp_path, monkeypatch):
    (tmp_path / "large").write_bytes(b"x" * (1 << 20))
    cache = tmp_path / "cache" / "digests.json"
    first = SourceFile("large", tmp_path / "large")
    DigestCache(cache).fill([first])
    monkeypatch.setattr(installation, "hash_file", lambda path: pytest.fail("it is read again"))
    again = SourceFile("large", tmp_path / "large")
    DigestCache(cache).fill([again])
    assert again.digest == first.digest
    monkeypatch.undo()
    (tmp_path / "large").write_bytes(b"y" * (1 << 20))
    changed = SourceFile("large", tmp_path / "large")
    DigestCache(cache).fill([changed])
    assert changed.digest != first.digest
    cache.write_text(json.dumps(["damaged"]))
    DigestCache(cache).fill([SourceFile("large", tmp_path / "large")])
