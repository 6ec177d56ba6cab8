"""The list of defects that tests must notice follows the code: every edit applies, and every test is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import import_graph as house
from scripts import mutants
from scripts.mutant_lists import LISTS, MUTANTS
from scripts.mutant_lists.mutant import Mutant
from scripts.mutants import BEGIN, END, PAGE, changed, line

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_edit_applies_and_is_a_program(mutant: Mutant) -> None:
    source = changed((ROOT / mutant.file).read_text(encoding="utf-8"), mutant)
    ast.parse(source)
    for test in mutant.tests:
        file, *node = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"def {name}(" in text or f"class {name}" in text for name in node), test


def test_a_defect_is_in_the_list_of_its_room() -> None:
    rooms = {str(path.relative_to(ROOT)): house.room(module) for module, path in house.modules().items()}
    for name, mutants_of_room in LISTS.items():
        assert {rooms[mutant.file].replace("/", "_") for mutant in mutants_of_room} == {name}


def test_a_text_that_is_gone_or_there_twice_is_an_error() -> None:
    mutant = MUTANTS[0]
    for source in ("", mutant.old * 2):
        with pytest.raises(ValueError, match=f"{mutant.name}: its text is"):
            changed(source, mutant)


def test_words_that_are_in_no_name_are_an_error(monkeypatch, capsys) -> None:
    monkeypatch.setattr(mutants, "run_tests", lambda copy, tests: pytest.fail("nothing was chosen"))
    with pytest.raises(SystemExit) as ended:
        mutants.main(["--only", "no such name"])
    assert ended.value.code == 2
    assert "no defect's name contains 'no such name'" in capsys.readouterr().err


def test_names_differ_and_the_page_has_them_all() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    for mutant in MUTANTS:
        assert any(line(mutant, known) in table for known in (True, None)), "make mutants writes the table anew"
