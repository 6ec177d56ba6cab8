"""Checks of installed packages: their versions, conflicts between them, and whether they can be imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pipecomp.doctor.finding import OK, PROBLEM, WARNING, Finding

# Versions that the project's tests ran with.
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
# Packages whose requirements matter: transformers, or a run, imports them if they are installed.
_ALSO_IMPORTED = ("torchvision", "torchaudio", "peft", *TESTED)


def package_findings(*, gpu: bool) -> list[Finding]:
    """Check installed packages. gpu: True if torch sees a GPU, so that Triton is needed."""
    installed, required = _installed()
    own = required.get("pipecomp")
    if own is None:
        fact = "not installed but run from a folder: the versions of packages that it needs are unknown"
        findings = [Finding("pipecomp", WARNING, fact, "pip install -e . in that folder, or make setup")]
    else:
        findings = check_versions(own, installed, gpu=gpu)
    return [*findings, check_conflicts(installed, required), check_imports(try_imports(IMPORTED, gpu=gpu))]


def check_versions(requirements: Iterable[str], installed: Mapping[str, str], *, gpu: bool) -> list[Finding]:
    """Check pipecomp's requirements; of its extras only Triton, which only GPUs need.

    Args:
        requirements: As in a package's metadata.
        installed: Versions by normalized name.
        gpu: True if torch sees a GPU.
    """
    findings = []
    for requirement in _parse(requirements):
        name = canonicalize_name(requirement.name)
        for_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not (name == "triton" if for_extra else applies):
            continue
        version, allowed = installed.get(name), _versions(requirement)
        install = f"pip install '{requirement.name}{requirement.specifier}'"
        if version is None and for_extra:
            fact = f"not installed; {'the kernels for GPU tensors need it' if gpu else 'only GPUs need it'}"
            findings.append(Finding(name, WARNING if gpu else OK, fact, install if gpu else ""))
        elif version is None:
            findings.append(Finding(name, PROBLEM, f"not installed; pipecomp needs {allowed}", install))
        elif not requirement.specifier.contains(version, prereleases=True):
            verdict = WARNING if for_extra and not gpu else PROBLEM
            findings.append(Finding(name, verdict, f"{version}; pipecomp needs {allowed}", install))
        else:
            tested = TESTED.get(name)
            known = f", tested with {tested}" if tested and version.split("+")[0] != tested else ""
            findings.append(Finding(name, OK, f"{version} ({allowed} is needed{known})"))
    return findings


def check_conflicts(installed: Mapping[str, str], required: Mapping[str, Sequence[str]]) -> Finding:
    """Check other packages' requirements of those that pipecomp needs.

    torchvision, for example, requires one exact torch; with another one importing transformers fails. Requirements of a
    package that nothing here imports are only a warning.

    Args:
        installed: Versions by normalized name.
        required: Requirements of each installed package.
    """
    bad, advice, breaks = [], [], False
    for package, requirements in sorted(required.items()):
        if package == "pipecomp":
            continue
        for requirement in _parse(requirements):
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if name not in TESTED or name not in installed or not applies:
                continue
            if not requirement.specifier.contains(installed[name], prereleases=True):
                breaks |= canonicalize_name(package) in _ALSO_IMPORTED
                which = f"{package} {installed.get(package, '')}".strip()
                bad.append(f"{which} needs {name} {_versions(requirement)}, installed is {installed[name]}")
                advice.append(f"pip install -U {package}, or pip uninstall {package} if nothing needs it")
    if bad:
        verdict = PROBLEM if breaks else WARNING
        return Finding("packages together", verdict, "; ".join(bad), "; ".join(dict.fromkeys(advice)))
    return Finding("packages together", OK, "no known conflicts with packages that pipecomp needs")


def check_imports(errors: Mapping[str, str] | None) -> Finding:
    """Check that the packages can be imported. errors: by module; None if the imports took too long."""
    if errors is None:
        fact = f"importing the packages took over {_IMPORT_TIMEOUT_S:.0f} s, as it will in every run"
        return Finding("imports", WARNING, fact, "Check this machine's load and the disk that Python is on.")
    if errors:
        fact = "; ".join(f"import {name} fails: {error}" for name, error in errors.items())
        top = " ".join(dict.fromkeys(name.split(".")[0] for name in errors))
        return Finding("imports", PROBLEM, fact, f"pip install --force-reinstall {top}")
    return Finding("imports", OK, "all packages can be imported")


_IMPORT_SCRIPT = """
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
    """Import modules in another process, which may print, crash or hang; errors by module, None for a timeout."""
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not gpu:
        environ.setdefault("DS_ACCELERATOR", "cpu")
    command = [sys.executable, "-P", "-c", _IMPORT_SCRIPT, *modules]  # without the working directory, as in ranks
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
    """Return versions and requirements of all installed packages, by normalized name."""
    versions: dict[str, str] = {}
    requirements: dict[str, list[str]] = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        if name:  # a half-removed package has none
            key = str(canonicalize_name(name))
            # The first on sys.path is the one that is imported.
            versions.setdefault(key, package.version)
            requirements.setdefault(key, list(package.requires or ()))
    return versions, requirements


def _parse(requirements: Iterable[str]) -> list[Requirement]:
    parsed = []
    for text in requirements:
        try:
            parsed.append(Requirement(text))
        except InvalidRequirement:
            continue  # an old one of another package; pip ignores it, too
    return parsed


def _versions(requirement: Requirement) -> str:
    return ",".join(sorted(str(requirement.specifier).split(","), reverse=True)) or "any version"
