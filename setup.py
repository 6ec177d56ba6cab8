"""Adds the native kernels to the build. They are optional: without a C++ compiler the package still installs."""

import runpy
from pathlib import Path

from setuptools import Extension, setup

build = runpy.run_path(str(Path(__file__).parent / "kernels" / "build.py"), run_name="build")

setup(
    ext_modules=[
        Extension(
            "pipecomp.kernels._native",
            sources=[f"kernels/{build['SOURCE']}"],
            depends=[str(path) for path in sorted(Path("kernels").glob("native*.h"))],
            language="c++",
            extra_compile_args=list(build["COMPILE_FLAGS"]),
            extra_link_args=list(build["LINK_FLAGS"]),
            optional=True,
        )
    ]
)
