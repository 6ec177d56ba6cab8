"""Compare pipelines with unsplit training, under all conditions of tests/trust, and draw docs/trust.md.

    python scripts/trust.py                      # in this environment
    python scripts/trust.py --redraw             # only the page, from what was recorded
    python scripts/trust.py --versions "deepspeed==0.19.7 transformers==5.22.2"

Other versions are installed into a virtual environment of their own in a temporary folder, over the packages of this
one. A row that is recorded for the same versions is not run again, unless --again is given. Exit status 1: a row is
further from unsplit training than the limit, other than those of `KNOWN`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.trust.conditions import FACTORS, KNOWN, STEPS, Row, all_rows  # noqa: E402
from tests.trust.training import LIMIT, Found, compare  # noqa: E402

PAGE, RECORDS = ROOT / "docs" / "trust.md", ROOT / "docs" / "trust.jsonl"
# For DeepSpeed and the ranks: one thread, the same arithmetic everywhere, and no GPU.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
PACKAGES = ("deepspeed", "transformers", "torch")
Versions = tuple[str, ...]


def versions_here() -> Versions:
    """Return the versions of the packages that a result depends on."""
    return tuple(importlib.metadata.version(name) for name in PACKAGES)


# -- records


def recorded() -> dict[Versions, dict[Row, Found]]:
    """Return the records by versions; the first ones are the page's own."""
    results: dict[Versions, dict[Row, Found]] = {}
    for line in RECORDS.read_text().splitlines() if RECORDS.exists() else []:
        record = json.loads(line)
        row, versions = Row(**record.pop("row")), tuple(record.pop("versions"))
        results.setdefault(versions, {})[row] = Found(row=row, **record)
    return results


def write_record(versions: Versions, record: Found) -> None:
    """Add a line."""
    with RECORDS.open("a") as file:
        file.write(json.dumps({"versions": versions, **dataclasses.asdict(record)}) + "\n")


# -- the page

HEAD = """# Pipelines against unsplit training

{count} small models with random weights train for {steps} steps in float32, once as a pipeline (`pipecomp.initialize`,
one process per stage and replica, nothing compressed) and once unsplit in one process: Hugging Face's model with its
own loss, torch's optimizer and `clip_grad_norm_`, without DeepSpeed and pipecomp. Both start from the same weights and
see the same samples; the unsplit gradient is the mean over micro-batches and replicas.

The difference is the largest ‖p − q‖ / ‖q‖ of all parameters after the last step, in double precision, p on any rank of
the pipeline and q unsplit. **It must be at most {limit:g}**, as must the relative difference of every step's loss.
Parameters move by {moved:.1g} of their norm (median), so {seen} conditions notice updates that are wrong by a
thousandth; a factor common to all gradients shows only without clipping.

```bash
make trust                                      # all conditions, with what is installed
make trust VERSIONS="transformers==5.22.2"      # with other versions, in an environment of their own
python scripts/trust.py --redraw                # this page, from docs/trust.jsonl
```

`--again` repeats recorded rows. DeepSpeed and transformers have changed gradients silently before: a new release is
trusted when all rows hold. pipecomp requires DeepSpeed 0.19.8.

**Conditions** (`tests/trust/conditions.py`) vary model, stages, replicas, micro-batches, padding, tied weights,
clipping, activation checkpointing, ZeRO, optimizer and learning-rate schedule; every pair of values occurs. SGD has lr
0.1 and momentum 0.9; AdamW has lr 0.01, weight decay 0.01 and **eps 0.01**, because with 1e−8 it takes full steps of
the sign of rounding noise where the true gradient is 0. The clipping norm of 0.1 is below every step's. With left
padding, the label of a causal model's first real token is −100.
"""


def draw() -> str:
    """The page, from the records."""
    every = recorded()
    versions, result = next(iter(every.items()))
    rows = all_rows()
    moved = sorted(result[row].moved for row in rows if row in result)
    facts = {"steps": STEPS, "limit": LIMIT, "count": len(rows), "moved": moved[len(moved) // 2]}
    lines = [HEAD.format(**facts, seen=sum(1e-3 * m > LIMIT for m in moved)), "## Versions", ""]
    lines += ["| " + " | ".join(PACKAGES) + " | rows that hold | largest difference |", "|---|---|---|---|---|"]
    lines += [_summary(of, [results[row] for row in rows if row in results]) for of, results in every.items()]
    missing = sum(row not in result for row in rows)
    lines += ["", f"{missing} rows are not recorded yet; `make trust` runs them."] if missing else []
    lines += ["", *(_failures(of, results, rows) for of, results in every.items() if _failures(of, results, rows))]
    lines += [_unused(result), "", "## Where a pipeline differs", ""]
    for row, why in KNOWN.items():
        measured = _number(result[row]) if row in result else "not recorded yet"
        lines.append(f"- {row.model}, {row.stages} stages, padding {row.padding}: {measured}. {why}")
    lines += [
        "",
        "## Models",
        "",
        "Largest differences, " + ", ".join(map(" ".join, zip(PACKAGES, versions, strict=True))) + ":",
        "",
    ]
    for model in FACTORS["model"]:
        of_model = [result[row] for row in rows if row.model == model and row in result and row not in KNOWN]
        if of_model:
            lines.append(f"- {model}: {_number(max(of_model, key=lambda f: f.difference))}")
    return "\n".join(lines) + "\n"


def _number(result: Found) -> str:
    return result.error or (f"{result.difference:.1e}" if result.difference else "0")


def _summary(versions: Versions, result: list[Found]) -> str:
    held = sum(f.holds for f in result)
    largest = max((f.difference for f in result if not f.error), default=math.nan)
    number = "–" if math.isnan(largest) else f"{largest:.1e}"
    return "| " + " | ".join([*versions, f"{held} of {len(result)}", number]) + " |"


def _failures(versions: Versions, result: dict[Row, Found], rows: list[Row]) -> str:
    failed = [result[row] for row in rows if row in result and not result[row].holds]
    errors = Counter(f.error for f in failed if f.error)
    lines = [f"- {count} rows: `{error}`" for error, count in errors.items()]
    lines += [f"- {f.row}: {_number(f)}" for f in failed if not f.error]
    named = ", ".join(map(" ".join, zip(PACKAGES, versions, strict=True)))
    return "\n".join([f"With {named}, these do not hold:", "", *lines, ""]) if lines else ""


def _unused(result: dict[Row, Found]) -> str:
    largest = max(f.unused for f in result.values())
    return (
        "Not compared are parameters that no loss depends on, such as a second bias of RoBERTa's head without tied\n"
        f"weights: torch's AdamW leaves them alone, DeepSpeed lets them decay (by up to {largest:.1e})."
    )


# -- running


def run(again: bool, only: str) -> bool:
    """Run what is not recorded, record it and draw the page. Whether all rows are as they should be."""
    versions = versions_here()
    known = {} if again else recorded().get(versions, {})
    rows = [row for row in (*all_rows(), *KNOWN) if row not in known and only in str(row)]
    results = dict(known)
    for result in compare(rows):
        write_record(versions, result)
        results[result.row] = result
        mark = "" if result.holds else "  <- differs" + (", as is known" if result.row in KNOWN else "")
        print(f"{_number(result):>8} {result.row}{mark}", flush=True)
    PAGE.write_text(draw())
    wrong = [row for row, result in results.items() if result.holds == (row in KNOWN)]
    print(
        f"{len(results) - len(wrong)} of {len(results)} rows are as they should be; {PAGE.relative_to(ROOT)} is drawn"
    )
    return not wrong


def installed(versions: list[str], folder: str) -> str:
    """The Python of a virtual environment where these are installed over the packages of this environment."""
    venv.create(folder, with_pip=True)
    python = str(Path(folder, "bin", "python"))
    where = sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder})
    Path(where, "packages-of-the-other-environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    constraints = Path(folder, "constraints.txt")
    constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    install = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-build-isolation"]
    environment = {**os.environ, **ENVIRONMENT, "DS_BUILD_OPS": "0"}
    subprocess.run([*install, "-c", str(constraints), *versions], env=environment, check=True)
    return python


def run_with(versions: list[str], arguments: list[str]) -> int:
    """Run this script with other versions."""
    with tempfile.TemporaryDirectory(prefix="pipecomp-trust-") as folder:
        python = installed(versions, folder)
        return subprocess.run([python, __file__, *arguments], check=False).returncode


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default="", help="what to install for the comparison, as pip takes it")
    parser.add_argument("--again", action="store_true", help="run rows that are recorded too")
    parser.add_argument("--only", default="", metavar="WORDS", help="rows that contain this, such as stages=2")
    parser.add_argument("--redraw", action="store_true", help="draw the page from the records and run nothing")
    given = parser.parse_args()
    if given.redraw:
        PAGE.write_text(draw())
        return 0
    if given.versions:
        return run_with(given.versions.split(), [*(["--again"] if given.again else []), "--only", given.only])
    os.environ |= ENVIRONMENT
    from pipecomp.distributed.local_launcher import preload_large_packages

    preload_large_packages()
    return 0 if run(given.again, given.only) else 1


if __name__ == "__main__":
    sys.exit(main())
