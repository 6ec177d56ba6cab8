"""scripts/page_commands.py finds the commands of pages, runs them as a reader does, and says which one fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import page_commands  # noqa: E402
from page_commands import Tour, blocks_of, versions_of  # noqa: E402

PAGE = """
```bash
cd examples && export COLOUR=red
echo $COLOUR \\
    blue >said
for i in 1 2; do
    echo $i >>said
done
```

```python
pass
```
"""


@pytest.fixture
def tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tour:
    monkeypatch.setattr(page_commands, "write_inputs", lambda folder: (folder / "text.txt").write_text("a text\n"))
    return Tour(tmp_path / "tour")


def run(tour: Tour, text: str) -> None:
    tour.run("page.md", blocks_of("page.md", text))


def test_every_page_of_running_is_taken():
    every = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "docs" / "running").glob("*.md")}
    pages = {page for page, text in every.items() if blocks_of(page, text)}
    assert set(page_commands.PAGES) == pages | {"README.md", "docs/using.md"}
    for page in page_commands.PAGES:
        found = blocks_of(page, (ROOT / page).read_text())
        assert found
        assert all(block.reason for block in found if block.mark), page
        assert all(block.commands() for block in found), page


def test_commands_and_their_lines():
    (block,) = blocks_of("page.md", PAGE)
    lines = PAGE.splitlines()
    found = block.commands()
    assert [line for line, _ in found] == [3, 4, 6]
    assert all(lines[line - 1] == command.splitlines()[0] for line, command in found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- maybe: later -->\n```bash\nls\n```\n", "page.md:3: got mark 'maybe'"),
        ("<!-- not run: no reason -->\n```python\npass\n```\n", "page.md:3: got mark 'not run'"),
        ("<!-- not run: far away -->\nText.\n```bash\nls\n```\n", "page.md: a mark is not directly before"),
    ],
)
def test_a_mark_that_has_no_effect(text, words):
    with pytest.raises(SystemExit, match=words):
        blocks_of("page.md", text)


def test_words_have_a_process_for_each_value():
    assert versions_of("x -e RANK=R --peers host1,host2 -p 29500 RANKS", 7) == [
        "x -e RANK=0 --peers 127.0.0.1,127.0.0.2 -p 7 RANKS",
        "x -e RANK=1 --peers 127.0.0.1,127.0.0.2 -p 7 RANKS",
    ]


def test_a_page_is_one_session(tour, capsys):
    run(tour, PAGE + "\n```\ntest \"$COLOUR\" = red\ntest \"$(tr '\\n' ' ' <said)\" = 'red blue 1 2 '\n```\n")
    assert capsys.readouterr().out.count("done in") == 5
    run(tour, '```\ntest -z "$COLOUR" && test -f text.txt && test -f Makefile\n```\n')


def test_both_machines_run_at_once(tour):
    run(tour, "```\ntouch R; timeout 60 sh -c 'until [ -f 0 ] && [ -f 1 ]; do sleep 0.05; done'\n```\n")


def test_blocks_that_are_not_run(tour, capsys, monkeypatch):
    monkeypatch.setattr(page_commands.shutil, "which", lambda name: None)
    marks = ("not run: needs the sea", "run elsewhere: by the wind", "needs: sails")
    run(tour, "".join(f"<!-- {mark} -->\n```\nfalse\n```\n" for mark in marks))
    said = capsys.readouterr().out
    assert all(words in said for words in (*marks[:2], "not run: needs sails"))


def test_an_alternative_begins_anew_and_runs_once(tour, capsys):
    text = (
        "```\ntest ! -e out && touch out\n```\n<!-- new folder: another way -->\n```\ntest ! -e out; touch out\n```\n"
    )
    run(tour, text)
    run(tour, text)
    assert capsys.readouterr().out.count("the same commands as in page.md") == 2


@pytest.mark.parametrize("command", ["echo why; false", "echo why; false | cat", "cat <<<why; nowhere"])
def test_a_command_that_fails(tour, command):
    with pytest.raises(SystemExit, match=r"page\.md:4: this command fails\n(.*\n)*why\n(.*\n)*exit status: 1"):
        run(tour, f"Text\n```\ntrue\n{command}\n```\n")
