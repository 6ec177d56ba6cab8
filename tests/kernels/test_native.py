"""Loading and choosing backends, error messages, builds with and without a compiler."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecomp.errors import ConfigError, KernelError, ShapeError
from pipecomp.kernels import build, dispatch, ops
from pipecomp.kernels.native import library
from pipecomp.kernels.native.backend import NativeBackend
from pipecomp.kernels.reference import rows as reference
from pipecomp.kernels.reference.layout import QuantizerOptions
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]

BUILT = not isinstance(dispatch.load_native(), str)
needs_native = pytest.mark.skipif(not BUILT, reason="native kernels are not built")
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh_choice(monkeypatch):
    """Clear the cached choice before and after a test."""
    dispatch.automatic.cache_clear()
    yield monkeypatch
    dispatch.automatic.cache_clear()


@needs_native
def test_auto_chooses_native_for_cpu_tensors(fresh_choice):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.pick("auto", torch.zeros(1)) is dispatch.load_native()
    status = dispatch.status()[0]
    assert (status.device, status.backend) == ("cpu", "native")
    assert dispatch.load_native().isa in status.reason


def test_without_native_kernels_torch_runs_with_one_warning(fresh_choice):
    fresh_choice.setattr(dispatch, "load_native", lambda: "native kernels are not built")
    x = torch.randn(3, 10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (ops.quantize, ops.quantize, lambda *a: ops.pack_bits(x.int() & 1, 1)):
            call(x, 4)
    assert [w.category for w in caught] == [dispatch.SlowKernelsWarning]
    assert "native kernels are not built" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert dispatch.pick("auto", x) is dispatch.TORCH
    assert dispatch.status()[0] == ("cpu", "torch", "native kernels are not built")
    with pytest.raises(KernelError, match=r"native.*not built"):
        ops.quantize(x, 4, backend="native")
    assert ops.crc32(b"123456789" * 1000) == ops.crc32(torch.tensor(list(b"123456789" * 1000), dtype=torch.uint8))


def test_impossible_choices_are_errors():
    x = torch.randn(2, 8)
    with pytest.raises(ConfigError) as caught:
        ops.quantize(x, 4, backend="cuda")
    assert caught.value.key == "backend"
    with pytest.raises(KernelError, match="triton"):
        ops.quantize(x, 4, backend="triton")
    with pytest.raises(ShapeError, match="one device"):
        ops.delta_quantize_(x, x.to("meta"), 4)


@needs_native
def test_a_named_instruction_set_must_exist(monkeypatch):
    path = library.library_path()
    with pytest.raises(KernelError, match="avx1024"):
        NativeBackend(path, "avx1024")
    assert NativeBackend(path, "portable").isa == "portable"


def test_loading_errors_are_explained(tmp_path, monkeypatch):
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(KernelError, match=r"_native\.so does not load"):
        NativeBackend(broken)
    monkeypatch.setattr(library, "library_path", lambda: broken)
    assert "does not load" in dispatch.load_native.__wrapped__()
    monkeypatch.setattr(library, "library_path", lambda: None)
    assert "not built" in dispatch.load_native.__wrapped__()


@needs_native
def test_libraries_of_another_version_or_with_wrong_bytes_are_rejected(monkeypatch):
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    assert "another version" in dispatch.load_native.__wrapped__()
    monkeypatch.undo()
    backend = NativeBackend(library.library_path())
    dispatch.self_check(backend)
    honest = backend._quantize

    def off_by_one_bit(x, m, options, name):
        pair = honest(x, m, options, name)
        m.view(torch.int32)[0, 0] ^= 1
        return pair

    monkeypatch.setattr(backend, "_quantize", off_by_one_bit)
    with pytest.raises(KernelError, match="other bytes than the reference"):
        dispatch.self_check(backend)


def fails(error: Exception) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        raise error

    return run


def off_by_one_bit(a: torch.Tensor, m: torch.Tensor, options: QuantizerOptions) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = reference.delta_quantize_(a, m, options)
    scale.view(torch.int32)[1] ^= 1
    return codes, scale


@pytest.mark.parametrize(
    ("first_call", "why"),
    [
        (
            fails(RuntimeError("Failed to find C compiler.\nPlease specify one")),
            "RuntimeError: Failed to find C compiler.$",
        ),
        (fails(Exception()), "Exception: $"),  # Triton's own errors are none of Python's kinds
        (off_by_one_bit, "other bytes than the reference"),
    ],
    ids=["no compiler", "a bare error", "other bytes"],
)
def test_triton_is_checked_before_it_is_chosen(fresh_choice, first_call, why):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    fake = SimpleNamespace(delta_quantize_=reference.delta_quantize_)
    fresh_choice.setattr(triton.knobs.runtime, "interpret", True)  # then it takes tensors of any device
    fresh_choice.setitem(sys.modules, "pipecomp.kernels.triton", SimpleNamespace(BACKEND=fake))
    load = dispatch.load_triton.__wrapped__
    assert load("cpu") is fake
    fake.delta_quantize_ = first_call
    assert re.search(why, load("cpu"))
    fresh_choice.setattr(dispatch, "load_triton", lambda device: load("cpu"))
    with pytest.warns(dispatch.SlowKernelsWarning, match=why.rstrip("$")):
        assert dispatch.automatic("cuda") is dispatch.TORCH


@needs_native
def test_threads_follow_torch_and_calls_may_overlap():
    backend = NativeBackend(library.library_path())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert backend.threads == 1
        torch.set_num_threads(2)
        assert backend.threads == 2
    finally:
        torch.set_num_threads(before)
    options = QuantizerOptions(4, None, "max", "stochastic", 3)
    inputs = [torch.randn(400, 500) for _ in range(4)]
    results: list = [None] * 4

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = backend.quantize(inputs[i], options)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    for x, got in zip(inputs, results, strict=True):
        want = reference.quantize(x, options)
        assert torch.equal(got[0], want[0])


@needs_native
@pytest.mark.parametrize("block", [library.QuantizeArgs, library.DequantizeArgs])
def test_struct_packing_equals_setting_fields(block):
    names = [name for name, *_ in block._fields_]
    layout, filled = library.struct_of(block), (block * 2)()
    layout.pack_into(filled, layout.size, *range(1, len(names) + 1))
    assert layout.size == ctypes.sizeof(block)
    assert [getattr(filled[1], name) for name in names] == list(range(1, len(names) + 1))
    assert not any(bytes(filled[0]))


@needs_native
def test_a_forked_process_can_quantize():
    code = (
        "import os, torch\n"
        "from pipecomp.kernels import ops\n"
        "x = torch.randn(600, 500)\n"
        "want = ops.quantize(x, 4, backend='native')[0]\n"
        "pid = os.fork()\n"
        "same = torch.equal(ops.quantize(x, 4, backend='native')[0], want)\n"
        "if pid == 0: os._exit(0 if same else 1)\n"
        "assert same and os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, env=environment()
    )
    assert done.returncode == 0, done.stderr


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with the package importable from the source tree."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


def test_a_missing_compiler_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build.find_compiler() is None
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler found"):
        build.build(tmp_path / "x.so")
    (tmp_path / "g++").write_text("#!/bin/sh\necho 'native.cpp: no luck' >&2\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    with pytest.raises(RuntimeError, match="no luck"):
        build.build(tmp_path / "x.so")
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("compiler", ["missing", "failing"])
def test_the_extension_is_optional(compiler, tmp_path):
    """The build succeeds without the library if the compiler is absent or fails."""
    fake = tmp_path / "cxx"
    if compiler == "failing":
        fake.write_text("#!/bin/sh\nexit 1\n")
        fake.chmod(0o755)
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("kernels", "setup.py"):
        (tree / name).symlink_to(ROOT / name)
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path)]
    command = [sys.executable, "setup.py", "build_ext", *folders]
    env = environment(CXX=str(fake), PATH=str(tmp_path))
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "failed" in done.stdout + done.stderr
    assert not list((tmp_path / "lib").rglob("*.so"))


def test_a_prebuilt_library_is_used(tmp_path):
    built = tmp_path / "built.so"
    built.write_bytes(b"as it is")
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path]
    subprocess.run(command, cwd=ROOT, env=environment(BUILT_KERNELS=str(built)), check=True, timeout=HANG_S)
    (made,) = (tmp_path / "lib").rglob("_native*.so")
    assert made.read_bytes() == b"as it is"


def test_build_flags_forbid_contraction():
    for source in build.SOURCES:
        assert "-ffp-contract=off" in build.source_flags(source)
        assert not {"-ffast-math", "-Ofast", "-march=native"} & set(build.source_flags(source))
    assert {path.name for path in (ROOT / "kernels" / "native").glob("*.cpp")} == set(build.SOURCES)
    assert 'build["build"]' in (ROOT / "setup.py").read_text()
