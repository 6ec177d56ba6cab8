"""The kernels' own tests on a build with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import pytest

from pipecomp.kernels.build import find_compiler
from tests.kernels import sanitize

pytestmark = pytest.mark.soak


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_kernels_do_nothing_undefined() -> None:
    assert sanitize.main() == 0
