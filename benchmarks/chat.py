"""Fine-tune a small chat model with LoRA over two stages, with FP32 on the link and with the plan's compression.

    python -m benchmarks chat [--seeds 3] [--work FOLDER] [--out FOLDER] [--redraw]

The recipe chat_lora with its own configuration under DeepSpeed's launcher, two processes of one thread each. Its model
and chats are made first and kept in --work.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.page import Row, prose, share, spread, values
from benchmarks.recipes import RECIPES, launched, pretrained, shipped, with_method
from benchmarks.runner import ROOT, Runs, arguments, beside, digest

RECIPE = "chat_lora"
METHODS = ("FP32", "AQ-SGD")


def run(method: str, seed: int, work: Path) -> Row:
    """One training; losses and bytes."""
    pretrained(work, RECIPES[RECIPE].before)
    (work / "ds_config.json").write_text(json.dumps(with_method(shipped(RECIPE), method)))
    shutil.rmtree(work / "messages", ignore_errors=True)
    given = RECIPES[RECIPE].arguments.replace("--seed 1", f"--seed {seed}").split()
    seconds = launched(work, 2, RECIPE, "ds_config.json", *given, "--metrics", "metrics.jsonl", "--no-report")
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    end = [line for line in lines if "eval" in line][-1]
    weights = (work / RECIPES[RECIPE].before / "model" / "model.safetensors").read_bytes()
    row: Row = {"method": method, "seed": seed, "weights": hashlib.sha256(weights).hexdigest()[:12]}
    row |= {"train_loss": end["train_loss"], "eval_loss": end["eval"]["loss"], "steps": end["step"], "seconds": seconds}
    for way in ("forward", "backward"):
        for kind in ("raw", "sent"):
            row[f"{way}_{kind}"] = end["links"]["0->1"][f"{way}_bytes_{kind}"]
    return row


def results(rows: list[Row]) -> list[str]:
    """The page."""
    by_method = {method: [row for row in rows if row["method"] == method] for method in METHODS}
    both = {row["seed"] for row in by_method["AQ-SGD"]} & {row["seed"] for row in by_method["FP32"]}
    above = ""
    if both:
        losses = {(row["method"], row["seed"]): row for row in rows}
        gaps = {
            key: [100 * (losses["AQ-SGD", seed][key] / losses["FP32", seed][key] - 1) for seed in sorted(both)]
            for key in ("train_loss", "eval_loss")
        }
        above = f"""
            With the same seed AQ-SGD ends {spread(gaps["train_loss"], 2, "+")} % from FP32's training loss and
            {spread(gaps["eval_loss"], 2, "+")} % from its held-out loss.
        """
    text = f"""
        # A chat model with LoRA

        `python -m benchmarks chat`, on {page.machine(rows)}.

        The recipe [chat_lora](../../recipes/chat_lora/README.md): a Qwen3 of four blocks that answers in one word
        learns to answer in sentences, {rows[0]["steps"]} steps of 16 chats of different lengths, packed, with the loss
        on what the assistant says, over two stages. AQ-SGD has the recipe's constant error, which is also what
        `pipecomp plan` recommends where compute hides nothing. A seed sets adapters, order and rounding. Training
        loss: mean over the last of three epochs. Held out: chats about other facts, evaluated without compression.
        Bytes: of the whole run, first visits included, as shares of float32's. ± is the standard deviation over seeds.

        {above}
    """
    cells = {
        "method": lambda group: group[0]["method"],
        "runs": len,
        "training loss": lambda group: spread(values(group, "train_loss")),
        "held out": lambda group: spread(values(group, "eval_loss")),
        "forward bytes": lambda group: share(values(group, "forward_sent")[0], values(group, "forward_raw")[0]),
        "backward bytes": lambda group: share(values(group, "backward_sent")[0], values(group, "backward_raw")[0]),
    }
    return [*prose(text), *page.columns(cells, [group for group in by_method.values() if group])]


def main(argv: Sequence[str]) -> None:
    """See the top of the file."""
    work = (ROOT / "runs" / "chat", "where model and chats are made")
    given = arguments(argv, __doc__, seeds=(3, "adapters, orders and rounding, from 1"), work=work)
    setup = digest([RECIPES[RECIPE].arguments, shipped(RECIPE)])
    runs = Runs(given, "chat", setup, ("method", "seed"), exact=beside("FP32", "seed"))
    folder = given.work.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs.complete(
        run,
        [(method, seed) for seed in range(1, given.seeds + 1) for method in METHODS],
        folder,
        line=lambda row: f"{row['method']} train {row['train_loss']:.4f}, held out {row['eval_loss']:.4f}",
        page=results,
    )
