"""Installed packages: their versions, whether they fit each other, and whether they can be imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding

# Versions that the project's own tests ran with.
TESTED = {
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "transformers": "5.24.0",
    "datasets": "5.2.0",
    "accelerate": "1.15.0",
    "lmdb": "3.0.0",
    "numpy": "2.4.6",
    "safetensors": "0.8.0",
    "triton": "3.9.0",
}
IMPORTED = ("lmdb", "transformers.modeling_utils", "deepspeed", "accelerate", "datasets")
_IMPORT_TIMEOUT_S = 240.0
# Whose own requirements matter: transformers, or a run, imports them where they are installed.
_IMPORTED_TOO = ("torchvision", "torchaudio", "peft", *TESTED)


class PackageConflict(NamedTuple):
    """Two packages that do not work together in these versions, whatever their own requirements say."""

    first: str
    first_versions: str
    second: str
    second_versions: str
    meaning: str
    advice: str


KNOWN_BAD = (
    PackageConflict(
        "deepspeed", "<=0.18.6", "torch", ">=2.10", "importing DeepSpeed fails", "pip install 'deepspeed>=0.19.8,<0.20'"
    ),
    PackageConflict(
        "transformers",
        "<=5.10",
        "kernels",
        ">=0.15",
        "importing parts of transformers fails",
        "pip uninstall kernels (pipecomp does not use it), or pip install -U transformers",
    ),
    PackageConflict("torch", "<2.3", "numpy", ">=2", "torch cannot exchange arrays with NumPy", "pip install -U torch"),
)


def package_findings(*, gpu: bool) -> list[Finding]:
    """All checks of installed packages. gpu: whether torch sees one, so that Triton is needed."""
    installed, required = _installed()
    own = required.get("pipecomp")
    if own is None:
        found = "not installed but run from a folder: nothing says which versions of other packages it needs"
        findings = [Finding("pipecomp", WARNING, found, "pip install -e . in that folder, or make setup")]
    else:
        findings = check_versions(own, installed, gpu=gpu)
    return [*findings, check_pairs(installed, required), check_imports(try_imports(IMPORTED, gpu=gpu))]


def check_versions(requirements: Iterable[str], installed: Mapping[str, str], *, gpu: bool) -> list[Finding]:
    """Each requirement of pipecomp against what is installed; of its extras only Triton, and only GPUs need that.

    requirements: as in a package's metadata. installed: versions by normalized name.
    """
    findings = []
    for wanted in _parse(requirements):
        name = canonicalize_name(wanted.name)
        for_extra = wanted.marker is not None and "extra" in str(wanted.marker)
        if not (name == "triton" if for_extra else _applies(wanted)):
            continue
        version, allowed = installed.get(name), _versions(wanted)
        install = f"pip install '{wanted.name}{wanted.specifier}'"
        if version is None and for_extra:
            found = f"not installed; {'the kernels for GPU tensors need it' if gpu else 'only GPUs need it'}"
            findings.append(Finding(name, WARNING if gpu else OK, found, install if gpu else ""))
        elif version is None:
            findings.append(Finding(name, PROBLEM, f"not installed; pipecomp needs {allowed}", install))
        elif not _fits(wanted.specifier, version):
            verdict = WARNING if for_extra and not gpu else PROBLEM
            findings.append(Finding(name, verdict, f"{version}; pipecomp needs {allowed}", install))
        else:
            tested = TESTED.get(name)
            known = f", tested with {tested}" if tested and version.split("+")[0] != tested else ""
            findings.append(Finding(name, OK, f"{version} ({allowed} is needed{known})"))
    return findings


def check_pairs(installed: Mapping[str, str], required: Mapping[str, Sequence[str]]) -> Finding:
    """Whether packages fit each other: the table of known-bad pairs, and what other packages ask of pipecomp's own.

    required: each installed package's requirements. torchvision, for one, asks for one exact torch; with another one
    importing transformers fails. What nothing here imports is a warning only.
    """
    bad, advice, breaks = [], [], False
    for pair in KNOWN_BAD:
        first, second = installed.get(pair.first), installed.get(pair.second)
        if first is None or second is None:
            continue
        if _fits(SpecifierSet(pair.first_versions), first) and _fits(SpecifierSet(pair.second_versions), second):
            breaks = True
            bad.append(f"{pair.first} {first} with {pair.second} {second}: {pair.meaning}")
            advice.append(pair.advice)
    for package, requirements in sorted(required.items()):
        if package == "pipecomp":
            continue
        for wanted in _parse(requirements):
            name = canonicalize_name(wanted.name)
            if name not in TESTED or name not in installed or not _applies(wanted):
                continue
            if not _fits(wanted.specifier, installed[name]):
                breaks |= canonicalize_name(package) in _IMPORTED_TOO
                which = f"{package} {installed.get(package, '')}".strip()
                bad.append(f"{which} needs {name} {_versions(wanted)}, here is {installed[name]}")
                advice.append(f"pip install -U {package}, or pip uninstall {package} if nothing needs it")
    if bad:
        verdict = PROBLEM if breaks else WARNING
        return Finding("packages together", verdict, "; ".join(bad), "; ".join(dict.fromkeys(advice)))
    return Finding("packages together", OK, "no installed package is known to break one that pipecomp needs")


def check_imports(errors: Mapping[str, str] | None) -> Finding:
    """errors: what importing a module raised, by name; None if it took too long."""
    if errors is None:
        return Finding(
            "imports",
            WARNING,
            f"importing the packages took over {_IMPORT_TIMEOUT_S:.0f} s, which every run spends",
            "Check this machine's load and the disk that Python is on.",
        )
    if errors:
        found = "; ".join(f"import {name} fails: {error}" for name, error in errors.items())
        top = " ".join(dict.fromkeys(name.split(".")[0] for name in errors))
        return Finding("imports", PROBLEM, found, f"pip install --force-reinstall {top}")
    return Finding("imports", OK, "all packages can be imported")


_TRY = """
import importlib, json, sys
errors = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        errors[name] = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]
print()
print(json.dumps(errors))
"""


def try_imports(modules: Sequence[str], *, gpu: bool) -> dict[str, str] | None:
    """Import in another process, which may print, crash or hang; what failed, None for too long."""
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not gpu:
        environ.setdefault("DS_ACCELERATOR", "cpu")
    command = [sys.executable, "-P", "-c", _TRY, *modules]  # without the working directory, as of ranks
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {" or ".join(modules): f"Python ended with status {done.returncode}. {last}"}
    return json.loads(done.stdout.splitlines()[-1])


def _installed() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Version and requirements of every installed package, by normalized name."""
    versions: dict[str, str] = {}
    requirements: dict[str, list[str]] = {}
    for found in importlib.metadata.distributions():
        name = found.metadata["Name"]
        if name:  # a half-removed package has none
            key = str(canonicalize_name(name))
            # The first on sys.path is the one that is imported.
            versions.setdefault(key, found.version)
            requirements.setdefault(key, list(found.requires or ()))
    return versions, requirements


def _parse(requirements: Iterable[str]) -> list[Requirement]:
    parsed = []
    for text in requirements:
        try:
            parsed.append(Requirement(text))
        except InvalidRequirement:
            continue  # of some other package, and old; pip ignores it too
    return parsed


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _versions(requirement: Requirement) -> str:
    return ",".join(sorted(str(requirement.specifier).split(","), reverse=True)) or "any version"


def _fits(allowed: SpecifierSet, version: str) -> bool:
    return allowed.contains(version, prereleases=True)
