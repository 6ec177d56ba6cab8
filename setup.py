"""Finds the packages, and adds the native kernels to the build: without a C++ compiler the package still installs."""

import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup

# Folders beside pipecomp/ that are imported as pipecomp.…; inside it stand symbolic links, where a checkout has such.
OUTSIDE = ("stages", "buffers", "kernels")

outside = [f"pipecomp.{name}" for name in OUTSIDE]
linked = [pattern for name in outside for pattern in (name, f"{name}.*")]
inside = find_packages(include=["pipecomp", "pipecomp.*"], exclude=linked)
below = [f"pipecomp.{name}.{inner}" for name in OUTSIDE for inner in find_packages(name)]
build = runpy.run_path(str(Path(__file__).parent / "kernels" / "build.py"), run_name="build")

setup(
    packages=[*inside, *outside, *below],
    package_dir={f"pipecomp.{name}": name for name in OUTSIDE},
    package_data={"pipecomp": ["py.typed"], "pipecomp.kernels": ["*.cpp", "*.h"]},
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
    ],
)
