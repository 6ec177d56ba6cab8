"""Every public name, code block and command of the pages works as it is written there."""

from __future__ import annotations

import difflib
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

import tests.page_blocks as page_blocks
import tests.pages as pages
from pipecomp.config import Config
from pipecomp.distributed.local_launcher import run_ranks
from tests.pages import PAGES, ROOT, Block
from tests.test_pages import PAGES as FOR_CONTRIBUTORS  # they name modules too, which test_pages.py looks for

HANGS_S = 600
SHELL = ("", "bash", "sh")
pytestmark = pytest.mark.timeout(HANGS_S)


def test_blocks_are_of_languages_that_a_test_takes():
    taken = {*SHELL, "python", "json", "diff", "mermaid"}
    assert not [block for block in pages.blocks() if block.language not in taken]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FOR_CONTRIBUTORS])
def test_public_names(page):
    import pipecomp

    for name in sorted(set(re.findall(r"(?<!-m )(?<![\w/.])pipecomp((?:\.[A-Za-z_]\w*)+)", pages.text_of(page)))):
        found: Any = pipecomp
        for part in name[1:].split("."):
            found = getattr(found, part)


@pytest.mark.parametrize("page", PAGES)
def test_commands(page, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for words in pages.commands(page):
        try:
            pages.check(words)
        except AssertionError as error:
            pytest.fail(f"{' '.join(words)}\n{error}")


class TestPython:
    def test_every_block_is_run(self):
        """Each by one entry of page_blocks.BLOCKS, and each entry has a block."""
        taken = [key for block in pages.blocks("python") for key in keys_of(block)]
        assert sorted(taken) == sorted(page_blocks.BLOCKS)
        assert len(taken) == len(pages.blocks("python"))

    @pytest.mark.ranks
    @pytest.mark.parametrize("key", page_blocks.BLOCKS, ids=" ".join)
    def test_runs(self, key, tmp_path):
        (block,) = (block for block in pages.blocks("python") if key in keys_of(block))
        if "peft" in block.text:
            pytest.importorskip("peft")
        world = page_blocks.BLOCKS[key].ranks
        run_ranks(world, page_blocks.run, key, block.text, str(tmp_path), timeout_s=HANGS_S)


def keys_of(block: Block) -> list[tuple[str, str]]:
    return [key for key in page_blocks.BLOCKS if key[0] == block.page and key[1] in block.text]


class TestJson:
    def test_every_block_is_a_configuration_a_section_or_metrics(self):
        kinds = ('"pipecomp": ', '"activations": ', '{"step": ', '{\n  "train_micro_batch_size_per_gpu": ')
        assert all(block.text.startswith(kinds) for block in blocks())

    def test_parts_of_a_section_are_taken(self):
        parts = [block.text for block in blocks() if block.text.startswith('"activations": ')]
        assert len(parts) == 3
        for text in parts:
            Config.from_dict(json.loads("{" + text + "}"))

    def test_a_section_has_all_keys_and_their_defaults(self):
        (block,) = (block for block in blocks() if block.text.startswith('"pipecomp": '))
        section = json.loads("{" + block.text + "}")["pipecomp"]
        assert Config.from_dict(section).activations.method == section["activations"].pop("method") == "aqsgd"
        for name, values in section.items():
            default = getattr(Config.from_dict({"activations": {"method": "aqsgd"}}), name)
            for key, value in values.items() if isinstance(values, dict) else ():
                assert getattr(default, key) == value, f"{name}.{key}"
            assert isinstance(values, dict) or default == values, name

    @pytest.mark.parametrize("number", range(3))
    def test_metrics_are_what_recipes_write(self, number, tmp_path):
        from pipecomp.recipes.report import Report, Traffic

        block = [block for block in blocks() if block.text.startswith('{"step": ')][number]
        shown = json.loads(re.sub(r'("(?:links|groups)": )…', r"\1{}", block.text).replace("…", "0"))
        links = {f"{d}_bytes_{kind}" for d in ("forward", "backward", "evaluation") for kind in ("raw", "sent")}
        assert all(set(counts) == links for counts in shown["links"].values())
        traffic = Traffic(shown["links"], shown["groups"])
        mean = {way: shown.get(f"{way}_bits") for way in ("forward", "backward")}
        codes = {
            way: {"code_bits": 10 * (bits or 0), "values_quantized": 10 * bool(bits)} for way, bits in mean.items()
        }
        with Report(str(tmp_path / "metrics.jsonl"), None, silent=False) as report:
            report.start(
                SimpleNamespace(model="m"), SimpleNamespace(steps=99, micro_batch=1, accumulation=1, replicas=1),
                Config.from_dict({}), 1, 1, 1,
            )  # fmt: skip
            loss = shown.get("loss", shown.get("train_loss"))
            report.step(
                shown["step"],
                shown["epoch"],
                loss=loss,
                lr=shown.get("lr", 0.0),
                per_s=shown.get("tokens_per_s", 1.0),
                traffic=traffic,
                stats=[{"replica": 0, "links": {"0->1": codes}}],
            )
            report.epoch(shown["step"], shown["epoch"], shown.get("eval", {"loss": 1.0}), traffic)
        step, epoch = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        assert shown == (epoch if "eval" in shown else step)

    def test_measures_are_those_of_the_recipes(self):
        shown = [re.search(r'"eval": ({[^}]*})', block.text) for block in blocks()]
        measures = [set(json.loads(match[1])) for match in shown if match]
        assert measures
        source = "".join(path.read_text() for path in (ROOT / "pipecomp" / "recipes").glob("*.py"))
        for name in set().union(*measures):
            assert f'"{name}"' in source, name


def blocks() -> list[Block]:
    return pages.blocks("json")


def test_a_diff_changes_what_the_script_has():
    (block,) = pages.blocks("diff")
    script = (ROOT / "examples" / "text_classification.py").read_text()
    lines = [line for line in block.text.splitlines() if "…" not in line]
    assert all(line[1:] in script.splitlines() for line in lines if line[0] in " -"), lines
    names: dict[str, Any] = {}
    exec("\n".join(line[1:] for line in lines if line.startswith("+from")), names)
    changed = difflib.get_close_matches("PipelineTrainer", names)
    assert changed == ["PipelineTrainer"]
    assert any(line == "+    trainer = PipelineTrainer(" for line in lines)
