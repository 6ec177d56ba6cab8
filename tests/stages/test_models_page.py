"""docs/models.md, which scripts/models_page.py writes, says what the code does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import models_page

WANTED = {
    *("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3", "mistral"),
    *("mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmo2", "smollm3", "granite", "granitemoe", "falcon"),
    *("gpt_neox", "opt", "bloom", "starcoder2", "cohere", "glm4", "nemotron", "exaone4", "stablelm"),
}


class TestPage:
    """docs/models.md, which scripts/models_page.py writes."""

    TEXT = models_page.PAGE.read_text(encoding="utf-8") if models_page.PAGE.exists() else ""

    def rows(self, part: str) -> list[list[str]]:
        text = self.TEXT.split(f"## {part}\n")[1].split("\n## ")[0]
        return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines()[3:] if line]

    def test_every_class_has_a_row(self) -> None:
        equal, refused = self.rows("Equal at every cut"), self.rows("Refused")
        found = {(row[0], cell) for row in equal for cell in row[1:3] if cell} | {(row[0], row[1]) for row in refused}
        assert found == {(model_type, name) for model_type, name, _ in models_page.classes()}
        assert {row[0] for row in equal if row[1]} >= WANTED
        assert f"**{len(equal)} model types are equal" in self.TEXT
        assert len([row for row in equal if row[1]]) >= 100

    @pytest.mark.parametrize(
        ("model_type", "kind"),
        [
            ("gemma", 0),
            ("gpt_neox", 0),
            ("phi3", 0),
            ("olmo2", 0),
            ("electra", 1),
            ("rwkv", 0),
            ("xlnet", 0),
            ("t5", 1),
        ],
    )
    def test_rows_say_what_the_code_does(self, model_type: str, kind: int) -> None:
        (given,) = (one for one in models_page.classes() if one[0] == model_type and one[2] == models_page.KINDS[kind])
        row = models_page.examine(*given)
        pattern = rf"\| {model_type} \| .*`{row.model_class}`" if row.reason is None else re.escape(f"| {row.reason} |")
        assert re.search(pattern, self.TEXT)
        if row.reason is None:
            assert [model_type, given[1]] in [[one[0], one[1 + kind]] for one in self.rows("Equal at every cut")]

    @pytest.mark.soak
    def test_every_row_says_what_the_code_does(self) -> None:
        assert models_page.page([models_page.examine(*given) for given in models_page.classes()]) == self.TEXT
