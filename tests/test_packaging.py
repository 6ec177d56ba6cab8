"""pipecomp from a checkout without symbolic links, an archive, an sdist, a wheel. tests/soak installs all of them."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import tests.packaging as packaging
from pipecomp.distributed.installation import SourceFile, package_files

sys.path.insert(0, str(packaging.ROOT / "scripts"))
import check_wheels
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


class TestRelease:
    """The workflow that builds wheels, as far as it can be checked without running it."""

    def test_builds_wheels_for_both_processors_and_an_sdist(self):
        workflow = yaml.safe_load((packaging.ROOT / ".github" / "workflows" / "release.yml").read_text())
        assert workflow[True]["push"]["tags"] == ["v*"]  # YAML reads the key "on" as true
        jobs = workflow["jobs"]
        assert {name.endswith("arm") for name in jobs["wheels"]["strategy"]["matrix"]["os"]} == {True, False}
        assert jobs["publish"]["needs"] == ["wheels", "sdist"]
        commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        scripts = [word for line in commands for word in line.split() if word.startswith("scripts/")]
        assert scripts == ["scripts/check_wheels.py"]
        assert all((packaging.ROOT / script).is_file() for script in scripts)

    def test_wheels_are_those_of_every_python(self):
        project = tomllib.loads((packaging.ROOT / "pyproject.toml").read_text())
        built = re.findall(r"cp3(\d+)-", project["tool"]["cibuildwheel"]["build"])
        assert project["project"]["requires-python"] == f">=3.{built[0]}"
        assert list(map(int, built)) == list(range(int(built[0]), int(built[0]) + len(built)))

    def test_a_wheel_without_kernels_or_modules_is_refused(self, tmp_path):
        name = "pipecomp-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
        files = {file.path: file for file in package_files(native=False)}
        files["pipecomp/kernels/_native.so"] = SourceFile("pipecomp/kernels/_native.so", data=b"code")
        assert check_wheels.problems(self.wheel(tmp_path / name, files)) == []
        for left_out in ("pipecomp/kernels/_native.so", "pipecomp/errors.py", "pipecomp/recipe_files/README.md"):
            some = {path: file for path, file in files.items() if path != left_out}
            assert len(check_wheels.problems(self.wheel(tmp_path / name, some))) == 1, left_out
        (tmp_path / name).unlink()
        self.wheel(tmp_path / "pipecomp-0.1.0-cp311-cp311-linux_x86_64.whl", files)
        assert check_wheels.main([str(tmp_path)]) == 1, "other systems do not take it"

    @staticmethod
    def wheel(path: Path, files: dict[str, SourceFile]) -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            for file in files.values():
                archive.writestr(file.path, file.data if file.source is None else file.source.read_bytes())
        return path


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
