"""Package list and the optional extension of native kernels: without a C++ compiler the package still installs."""

import os
import runpy
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Folders beside pipecomp/ that are imported as pipecomp.…; a checkout has symbolic links to them inside pipecomp/.
OUTSIDE = ("stages", "buffers", "kernels")

outside = [f"pipecomp.{name}" for name in OUTSIDE]
linked = [pattern for name in outside for pattern in (name, f"{name}.*")]
inside = find_packages(include=["pipecomp", "pipecomp.*"], exclude=linked)
below = [f"pipecomp.{name}.{inner}" for name in OUTSIDE for inner in find_packages(name)]

# Recipes for `pipecomp init`: no modules, files to copy.
RECIPES = "pipecomp.recipe_files"

KERNELS = Path("kernels")
build = runpy.run_path(str(Path(__file__).parent / KERNELS / "build.py"), run_name="build")


class BuildKernels(build_ext):
    """Compiles the kernels as `python -m pipecomp.kernels.build` does, all sources at the same time.

    Or takes the library named by BUILT_KERNELS, which scripts/setup.sh compiles while packages are installed.
    """

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        if built := os.environ.get("BUILT_KERNELS"):
            shutil.copyfile(built, output)
            return
        try:
            build["build"](output)
        except RuntimeError as error:
            raise CompileError(str(error)) from error


setup(
    packages=[*inside, *outside, *below, RECIPES],
    package_dir={f"pipecomp.{name}": name for name in OUTSIDE} | {RECIPES: "recipes"},
    package_data={
        "pipecomp": ["py.typed"],
        "pipecomp.kernels.native": ["*.cpp", "*.h"],
        "pipecomp.report": ["*.css", "*.js", "*.j2"],
        RECIPES: ["*.md", "*/*.py", "*/*.json", "*/*.md"],
    },
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "pipecomp.kernels._native",
            sources=[str(KERNELS / "native" / source) for source in build["SOURCES"]],
            depends=[str(path) for path in sorted((KERNELS / "native").glob("*.h"))],
            language="c++",
            optional=True,
        )
    ],
)
