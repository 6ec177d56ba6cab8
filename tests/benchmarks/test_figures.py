"""The figures of README.md and docs/ are those of the kept runs."""

from __future__ import annotations

import pytest

from benchmarks import figures
from benchmarks.__main__ import questions
from benchmarks.figures import Figure, Shown, number, problems


def test_documents_quote_the_runs():
    every = figures.figures()
    assert {figure.document for figure in every} == {"README.md", "docs/measured.md", "docs/configuration.md"}
    wrong = [problem for figure in every for problem in problems(figure, figures.text_of(figure.document))]
    assert wrong == []


@pytest.mark.parametrize(
    ("said", "value", "right"),
    [
        ("0.82", Shown(0.8154), True),
        ("0.82", Shown(0.83, 0.005), True),  # a page that shows 0.83 may have 0.825 behind it
        ("0.82", Shown(0.831), False),
        ("2", Shown(1.5, 0.05), True),
        ("2", Shown(1.4, 0.05), False),
        ("−0.3", Shown(-0.27), True),
        ("0.3", Shown(-0.27), False),
        ("+0.3", Shown(0.27), True),
        ("4,096", Shown(4096), True),
    ],
)
def test_a_figure_is_compared_as_it_is_rounded(said, value, right):
    figure = Figure("a.md", "ends {} % above", (value,))
    assert (problems(figure, f"It ends {said} % above FP32.") == []) == right


def test_a_sentence_that_is_gone_is_named():
    [problem] = problems(Figure("a.md", "ends {} % above", (Shown(1.0),)), "It ends 1 % below FP32.")
    assert problem == "a.md: no sentence 'ends {} % above'"


def test_cells_are_found_by_the_others_of_their_row():
    assert figures.at("first_visit", "training loss above FP32", "full", section="3 epochs") == number("0.0227")
    assert figures.at("first_visit", "training loss above FP32", "full", section="3 epochs", part=1).value == 0.0026
    with pytest.raises(figures.DataError, match=r"first_visit\.md: 4 rows"):
        figures.at("first_visit", "training loss above FP32", "full")


def test_no_cell_of_the_papers_is_empty():
    """Each table, figure and appendix has an outcome, if only that and why it was not run."""
    lines = (figures.ROOT / "docs/papers.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert len(rows) > 60
    assert {len(row) for row in rows} == {5}
    assert [row for row in rows if not all(row)] == []
    commands = {row[4].strip("`") for row in rows if row[4].startswith("`")}
    assert commands <= set(questions())
