"""Memory and time of tokenizing one line of many megabytes, as plain text, JSON lines, JSON and CSV.

    python benchmarks/data_memory.py --tokenizer FOLDER --text FILE [--megabytes 100] [--kinds txt jsonl json csv]

The text of FILE, its line ends made spaces, is repeated up to the size. Each kind has a process of its own. Memory is
the process's peak beyond what the imports and the tokenizer take, divided by the file's size.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER")
    parser.add_argument("--text", required=True, metavar="FILE")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", default=["txt", "jsonl", "json", "csv"])
    parser.add_argument("--file", help=argparse.SUPPRESS)  # in a process that measures
    args = parser.parse_args()
    if args.file:
        print(json.dumps(measure(args.file, args.tokenizer)))
        return
    with tempfile.TemporaryDirectory() as folder:
        text = " ".join(Path(args.text).read_text(encoding="utf-8").split("\n"))
        text = (text * (args.megabytes * 10**6 // len(text.encode()) + 1)).encode()[: args.megabytes * 10**6].decode()
        for kind in args.kinds:
            path = Path(folder, f"line.{kind}")
            write(path, text)
            command = [sys.executable, __file__, "--tokenizer", args.tokenizer, "--text", args.text, "--file", path]
            made = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            size = path.stat().st_size
            print(
                f"{kind:5} {size / 1e6:.0f} MB: {made['tokens']:,} tokens, {made['bytes'] / size:.2f} bytes of memory "
                f"a byte, {made['seconds']:.0f} s",
                flush=True,
            )
            path.unlink()


def write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file).writerows([["text"], [text]])
        elif path.suffix == ".jsonl":
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        elif path.suffix == ".json":
            json.dump([{"text": text}], file, ensure_ascii=False)
        else:
            file.write(text)


def measure(path: str, tokenizer: str) -> dict[str, float]:
    import datasets  # noqa: F401  (the reader's and the writer's libraries)
    import pyarrow.parquet  # noqa: F401

    from pipecomp.data import DataOptions, load_data
    from pipecomp.recipes.text import load_tokenizer

    own = load_tokenizer(tokenizer, [])
    own("a")
    before, begun = peak(), time.monotonic()
    data = load_data(path, own, DataOptions(max_length=1024), cache=Path(path).parent / "cache", say=lambda line: None)
    return {"bytes": peak() - before, "tokens": data.tokens.tokens, "seconds": time.monotonic() - begun}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
