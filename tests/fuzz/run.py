"""Fuzz a decoder for some time: with atheris where it is installed (pip install -e '.[fuzz]'), else with hypothesis.

    python tests/fuzz/run.py --target TARGET [--minutes 30] [--out FOLDER] [--engine atheris|hypothesis]

Targets: wire, value, config; of a mesh frames, notices of failures, and the keystore.

New inputs that reach new code go to `runs/fuzz/TARGET` (atheris only); the committed corpus is where it starts from.
A finding ends the run with status 1, or atheris's own, and its input in `runs/fuzz/`.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import sys
import time
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
ADDRESS_SPACE = 4 << 30  # bytes above what the libraries take themselves: more is an allocation beyond every limit
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20  # of one input; more is a hang


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("wire", "value", "config", "frames", "notices", "keystore"), required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="new inputs and findings")
    parser.add_argument("--engine", choices=("atheris", "hypothesis"), default=None)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # a script's own folder is there instead
    engine = options.engine or ("atheris" if importlib.util.find_spec("atheris") else "hypothesis")
    grown = options.out / options.target
    grown.mkdir(parents=True, exist_ok=True)
    print(f"{options.target}: {engine}, {options.minutes:g} minutes", flush=True)
    with_engine = _atheris if engine == "atheris" else _hypothesis
    with_engine(options.target, 60 * options.minutes, grown)


def limit_address_space() -> None:
    """Let an allocation far above any limit fail instead of taking the machine's memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, resource.RLIM_INFINITY))


def _atheris(target: str, seconds: float, grown: Path) -> None:
    import atheris

    # What is fuzzed is instrumented as it is imported; torch and numpy are imported before, as they are.
    import numpy  # noqa: F401
    import torch  # noqa: F401

    with atheris.instrument_imports(include=["pipecomp", "tests.fuzz"]):
        from tests.fuzz.targets import TARGETS
    limit_address_space()
    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds:.0f}",
        f"-timeout={TIMEOUT_S}",
        "-max_len=4096",
        "-rss_limit_mb=0",
        f"-artifact_prefix={grown.parent}/finding-{target}-",
        "-print_final_stats=1",
        str(grown),
        str(CORPUS / target),
    ]
    atheris.Setup(arguments, TARGETS[target])
    atheris.Fuzz()


def _hypothesis(target: str, seconds: float, grown: Path) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    from tests.fuzz.targets import TARGETS

    limit_address_space()
    seeds = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    run = TARGETS[target]
    counted = 0

    @settings(
        max_examples=5000,
        deadline=1000 * TIMEOUT_S,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(st.binary(max_size=4096) | mutated(seeds))
    def fuzz(data: bytes) -> None:
        nonlocal counted
        counted += 1
        (grown.parent / f"last-{target}").write_bytes(data)
        run(data)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fuzz()
    print(f"{target}: {counted} inputs, no finding")


def mutated(seeds: list[bytes]):
    """Inputs of the corpus with a few bytes changed, inserted or cut off."""
    from hypothesis import strategies as st

    changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 2), st.binary(max_size=9)), max_size=6)

    def apply(seed: bytes, wanted: list[tuple[int, int, bytes]]) -> bytes:
        for place, kind, new in wanted:
            at = place % (len(seed) + 1)
            seed = seed[:at] + new + seed[at + (len(new), 0, 1 << 20)[kind] :]
        return seed

    return st.builds(apply, st.sampled_from(seeds or [b""]), changes)


if __name__ == "__main__":
    main()
