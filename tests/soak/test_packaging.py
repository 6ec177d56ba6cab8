"""Installed with pip into an empty environment, from every kind of source, and with the native kernels compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tests.packaging as packaging

sys.path.insert(0, str(packaging.ROOT / "scripts"))
import check_wheels

pytestmark = [pytest.mark.soak, pytest.mark.timeout(packaging.HANGS_S * 3)]

WITH_LINKS = "with links"
SOURCES = {
    WITH_LINKS: lambda origin, _: origin,
    "without links": packaging.clone_without_links,
    "archive": packaging.unpacked_archive,
    "sdist": packaging.unpacked_sdist,
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return SOURCES[request.param](packaging.committed(tmp_path), tmp_path)


def test_an_editable_install(source, tmp_path):
    empty = packaging.Empty(tmp_path)
    empty.install("-e", source, **packaging.NO_COMPILER)
    empty.works(source)


def test_an_ordinary_install(source, tmp_path):
    empty = packaging.Empty(tmp_path)
    empty.install(source, **packaging.NO_COMPILER)
    empty.works(empty.folder)


@pytest.mark.parametrize("source", [WITH_LINKS], indirect=True)
class TestCompiled:
    """As a user's pip does it; once each, as it takes a minute of one core."""

    def test_a_wheel(self, source, tmp_path):
        empty = packaging.Empty(tmp_path)
        wheel = packaging.wheel(source, tmp_path)
        assert check_wheels.problems(wheel, platform="linux") == []
        empty.install(wheel)
        empty.works(empty.folder, "native")

    def test_an_editable_install(self, source, tmp_path):
        empty = packaging.Empty(tmp_path)
        empty.install("-e", source)
        empty.works(source, "native")
