"""pipecomp from a checkout without symbolic links, an archive, an sdist, a wheel. tests/soak installs all of them."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

import tests.packaging as packaging

sys.path.insert(0, str(packaging.ROOT / "scripts"))
import import_graph as house

pytestmark = pytest.mark.timeout(packaging.HANGS_S)

IN_SDIST = """
LICENSE Makefile README.md CHANGELOG.md CONTRIBUTING.md MANIFEST.in pyproject.toml setup.py .pre-commit-config.yaml
benchmarks/README.md benchmarks/throughput.py benchmarks/kernel_limits.cpp benchmarks/results/throughput.md
docs/reliability.md examples/README.md examples/bert_cola.py examples/supervised.sh kernels/native/interface.cpp
kernels/native/shared.h kernels/native/simd.h pipecomp/py.typed recipes/README.md recipes/gpt2_wikitext2/train.py
recipes/gpt2_wikitext2/ds_config.json scripts/import_graph.py scripts/setup.sh stages/partition/splitting.py
tests/conftest.py tests/golden/golden.json tests/golden/old_run.tar.xz tests/fuzz/corpus/config/00.json
"""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packaging.committed(tmp_path_factory.mktemp("origin"))


@pytest.fixture(scope="module")
def sdist(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packaging.unpacked_sdist(origin, tmp_path_factory.mktemp("sdist"))


def python_files(tree: Path) -> set[str]:
    return {file.relative_to(tree).as_posix() for file in tree.rglob("*.py")}


@pytest.mark.parametrize("made", [packaging.clone_without_links, packaging.unpacked_archive])
def test_a_tree_without_symbolic_links_works(origin, tmp_path, made):
    tree = made(origin, tmp_path)
    assert not any((tree / "pipecomp" / name).is_dir() for name in house.OUTSIDE)
    packaging.works(tree)


@pytest.mark.soak
def test_an_editable_install_of_a_checkout_without_symbolic_links(origin, tmp_path):
    tree, empty = packaging.clone_without_links(origin, tmp_path), packaging.Empty(tmp_path)
    empty.install("-e", tree, **packaging.NO_COMPILER)
    empty.works(tree)


class TestSdist:
    def test_works(self, sdist):
        packaging.works(sdist)

    def test_has_what_its_tests_and_pages_need(self, sdist, origin):
        assert not [name for name in IN_SDIST.split() if not (sdist / name).is_file()]
        linked = tuple(f"pipecomp/{name}/" for name in house.OUTSIDE)
        assert python_files(sdist) == {name for name in python_files(origin) if not name.startswith(linked)}

    def test_has_neither_records_nor_what_was_built(self, sdist):
        found = [file.name for file in sdist.rglob("*") if file.suffix in (".jsonl", ".so", ".pyc")]
        assert sorted(found) == ["throughput.jsonl", "trust.jsonl"]  # which tests read


PAGE = (
    "pipecomp/report/page.css",
    "pipecomp/report/page.js",
    "pipecomp/report/page.html.j2",
)  # what reports are made of beside modules


@pytest.mark.soak
def test_a_wheel_holds_every_module(sdist, tmp_path):
    path = packaging.wheel(sdist, tmp_path, **packaging.NO_COMPILER)
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    wanted = set()
    for module, file in house.modules().items():
        folder = module.replace(".", "/")
        wanted.add(f"{folder}/__init__.py" if file.stem == "__init__" else f"{folder}.py")
    sources = [file.name for file in (packaging.ROOT / "kernels" / "native").iterdir() if file.suffix in (".cpp", ".h")]
    packaged = {name for name in names if ".dist-info/" not in name}
    recipes = {
        f"pipecomp/recipe_files/{file.relative_to(packaging.ROOT / 'recipes').as_posix()}"
        for file in (packaging.ROOT / "recipes").rglob("*")
        if file.suffix in (".py", ".json", ".md")
    }
    kernels = {f"pipecomp/kernels/native/{name}" for name in sources}
    assert packaged == wanted | kernels | recipes | {"pipecomp/py.typed", *PAGE}
    packaging.works(tmp_path / "site")
    command = [sys.executable, "-P", "-m", "pipecomp.cli", "init", "llama_lora", "laid-out"]
    packaging.run(*command, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert (tmp_path / "laid-out" / "gpt2_wikitext2" / "train.py").is_file()
