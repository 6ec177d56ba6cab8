"""Fixtures of meshes."""

from __future__ import annotations

import pytest

from tests.tls.meshes import close_all, keys_for, meet_all


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Keys of three ranks."""
    return keys_for(tmp_path_factory.mktemp("keys"), 3)


@pytest.fixture
def two(folders):
    """Two ranks of a mesh."""
    meshes = meet_all(folders[:2])
    yield meshes
    close_all(meshes)
