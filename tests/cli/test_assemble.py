"""`pipecomp assemble`: a checkpoint from the records of the machines that are left."""

from __future__ import annotations

import shutil
from pathlib import Path

from typer.testing import CliRunner

from pipecomp.cli import app
from tests.elastic.test_records import write_records


def test_a_checkpoint_is_made_or_the_reason_is_told(tmp_path: Path) -> None:
    write_records(tmp_path)
    shutil.rmtree(tmp_path / "machine-1")
    given = ["assemble", str(tmp_path / "machine-0"), str(tmp_path / "machine-2"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "global_step4" / "pipecomp-seal-0.json").is_file()
    assert done.output.replace("\n", "").endswith("out/global_step4")
    shutil.rmtree(tmp_path / "machine-2")
    assert CliRunner().invoke(app, given).exit_code == 1
    failed = CliRunner().invoke(app, [*given[:2], *given[3:]])
    assert failed.exit_code == 1
    assert "the record of rank 1 is missing" in " ".join(failed.output.split())
