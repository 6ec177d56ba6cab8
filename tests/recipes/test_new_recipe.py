"""A new recipe takes the files that docs/architecture.md names and no more: added in a copy, run as its README says."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from pipecomp.distributed.local_launcher import free_port
from tests.package_copy import named_files
from tests.recipes.recipe_runs import LAUNCHER, ROOT, run

TRAIN = '''"""Train a causal language model on poems, which empty lines part, over pipeline stages. See README."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipecomp.errors import ConfigError
from pipecomp.recipes import language, run, text


def arguments() -> argparse.ArgumentParser:
    parser = run.arguments("verses", "Train on poems over compressed pipeline links.")
    text.add_arguments(parser)
    return parser


def poems(path: str) -> list[str]:
    return [" ".join(poem.split()) for poem in Path(path).read_text().split("\\n\\n") if poem.strip()]


def read(args: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    if args.dataset:
        raise ConfigError("--dataset", args.dataset, "nothing: poems are read from --train-file")
    training = [poem for path in args.train_file for poem in poems(path)]
    return training, poems(args.eval_file) if args.eval_file else None


if __name__ == "__main__":
    run.run(lambda args: language.fine_tune(args, read, documents=True), arguments())
'''
COMMAND = """deepspeed --num_accelerators 2 recipes/verses/train.py \\
    --deepspeed_config recipes/verses/ds_config_cpu.json --model tiny --tokenizer train:300 --block-size 16 \\
    --train-file poems.txt --eval-file held-out.txt --epochs 2 --seed 1 --metrics runs/verses.jsonl --save runs/verses
"""
ROW = "| [verses](verses/README.md) | poems | – | less than one |\n"
ENTRY = '    "verses": Recipe(arguments="--model gpt2 --tokenizer gpt2 --train-file a.txt --seed 1", before="gpt2"),\n'
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "pipecomp": {
        "activations": {"method": "aqsgd", "forward_bits": 2, "backward_bits": 4, "first_visit": 8},
        "store": {"path": "runs/messages"},
    },
}
CONFIGURATIONS = """
import sys
from benchmarks import recipes, runner
from pipecomp.config import Config

assert str(runner.ROOT) == sys.argv[1]
for method in recipes.METHODS:
    config = recipes.with_method(recipes.shipped("verses"), method)
    print(Config.from_dict(config["pipecomp"]).activations.method)
"""

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(300)]


def add_recipe(folder: Path) -> list[str]:
    """As a contributor would, in the page's order; the files."""
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=shutil.ignore_patterns("results", "__pycache__"))
    (folder / "recipes" / "verses").mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "README.md", folder / "recipes")
    config = json.dumps(CONFIG, indent=2)
    files = {
        "recipes/verses/train.py": TRAIN,
        "recipes/verses/ds_config.json": config,
        "recipes/verses/ds_config_cpu.json": config,
        "recipes/verses/README.md": f"# Poems\n\n```bash\n{COMMAND}```\n",
        "recipes/README.md": (folder / "recipes" / "README.md").read_text().replace("|\n\n", f"|\n{ROW}\n", 1),
        "benchmarks/recipes.py": (folder / "benchmarks" / "recipes.py")
        .read_text()
        .replace("\n}\n", f"\n{ENTRY}}}\n", 1),
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    return list(files)


def test_the_files_that_the_page_names_make_a_recipe(tmp_path: Path) -> None:
    assert add_recipe(tmp_path) == [name.replace("NAME", "verses") for name in named_files("a recipe")]

    # Lines that repeat, so that a few steps learn something.
    poems = [f"The {what} of link {n}\ncrosses the line\nonce and no more ." for n in range(36) for what in ("m", "g")]
    (tmp_path / "poems.txt").write_text("\n\n".join(poems[:60]))
    (tmp_path / "held-out.txt").write_text("\n\n".join(poems[60:]))
    page = (tmp_path / "recipes" / "verses" / "README.md").read_text()
    words = shlex.split(page.split("```bash\n")[1].split("```")[0].replace("\\\n", " "))
    assert words[0] == "deepspeed"
    (tmp_path / "runs").mkdir()
    found = run(tmp_path, LAUNCHER, f"--master_port={free_port()}", *words[1:])
    assert found.status == 0, found.output

    metrics = [json.loads(line) for line in (tmp_path / "runs" / "verses.jsonl").read_text().splitlines()]
    ends = [line["eval"] for line in metrics if "eval" in line]
    assert len(ends) == 2
    assert ends[1]["loss"] < ends[0]["loss"]
    assert ends[1]["perplexity"] == pytest.approx(math.exp(ends[1]["loss"]))
    (link,) = [line["links"] for line in metrics if "eval" in line][-1].values()
    assert 0 < link["forward_bytes_sent"] < link["forward_bytes_raw"] / 3
    assert (tmp_path / "runs" / "verses" / "config.json").is_file()
    assert (tmp_path / "runs" / "verses" / "tokenizer.json").is_file()

    (tmp_path / "configurations.py").write_text(CONFIGURATIONS)
    found = run(tmp_path, sys.executable, "configurations.py", str(tmp_path))
    assert found.output.split() == ["none", "aqsgd", "direct"], found.output
