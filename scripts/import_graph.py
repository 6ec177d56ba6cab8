"""The package as rooms (folders, and the modules at its root) and arrows (imports), read from the sources.

python scripts/import_graph.py              rooms, levels, arrows, cycles
python scripts/import_graph.py --mermaid    a drawing of them; docs/architecture.md has a more readable one
python scripts/import_graph.py --modules    the same counted by single modules
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("stages", "buffers", "kernels")  # folders beside pipecomp/ that are imported as pipecomp.…

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package; a package's name is that of its __init__."""
    places = [(ROOT / "pipecomp", "pipecomp"), *((ROOT / name, f"pipecomp.{name}") for name in OUTSIDE)]
    paths = {}
    for folder, package in places:
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).with_suffix("").parts
            if package == "pipecomp" and inner[0] in OUTSIDE:
                continue  # the links
            parts = [package, *inner]
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imported(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    out: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            out |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return out


def room(module: str) -> str:
    """The folder of a module; a module at the root is a room of its own."""
    parts = module.split(".")[1:]
    if not parts:
        return "pipecomp"
    if parts[0] == "stages" and len(parts) > 1:
        return "/".join(parts[:2])
    return parts[0]


def graph(*, by_module: bool = False) -> Graph:
    """Room (or module) -> those that it imports. A package's face only hands names on, and counts as its folder."""
    files = modules()
    faces = {"pipecomp", "pipecomp.stages"}
    out: Graph = {}
    for name, path in files.items():
        if name in faces:
            continue
        own = name if by_module else room(name)
        targets = out.setdefault(own, set())
        for target in imported(path):
            if target in files:
                targets |= {own_name for own_name in _behind(target, files, faces, by_module)}
        targets.discard(own)
    return out


def _behind(target: str, files: dict[str, Path], faces: set[str], by_module: bool) -> set[str]:
    if target == "pipecomp":
        return set()
    if target in faces:
        return set() if by_module else {room(t) for t in imported(files[target]) if t in files and t not in faces}
    return {target if by_module else room(target)}


def levels(arrows: Graph) -> dict[str, int]:
    """Each room's level: one above the highest of what it imports. Rooms on a cycle have that of their cycle."""
    group = {r: frozenset(c) for c in components(arrows) for r in c}
    by_cycle: dict[frozenset[str], int] = {}

    def level(c: frozenset[str]) -> int:
        if c not in by_cycle:
            below = {group[t] for r in c for t in arrows[r]} - {c}
            by_cycle[c] = 1 + max((level(b) for b in below), default=0)
        return by_cycle[c]

    return {r: level(group[r]) for r in arrows}


def components(arrows: Graph) -> list[set[str]]:
    """Groups of rooms that reach each other; those of more than one are cycles."""
    reached = {r: _reach(arrows, r) for r in arrows}
    return [c for c in {frozenset({r} | {t for t in reached[r] if r in reached[t]}) for r in arrows}]  # type: ignore[misc]


def _reach(arrows: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in arrows[waiting.pop()] - reached:
            reached.add(target)
            waiting.append(target)
    return reached


def cycles(arrows: Graph) -> list[list[str]]:
    """Rooms that import each other in a circle."""
    return sorted(sorted(c) for c in components(arrows) if len(c) > 1)


def direct(arrows: Graph) -> Graph:
    """Without arrows that a longer way makes plain."""
    return {r: {t for t in ts if not any(t in _reach(arrows, other) for other in ts - {t})} for r, ts in arrows.items()}


def mermaid(arrows: Graph) -> str:
    """A flow chart for Markdown, importers above; only arrows that no longer way stands for."""
    names = {r: r.replace("/", "_") for r in arrows}
    lines = ["flowchart TD"]
    lines += [f'    {names[r]}["{r}"]' for r in sorted(arrows, key=lambda r: (-levels(arrows)[r], r))]
    lines += [f"    {names[r]} --> {names[t]}" for r, ts in sorted(direct(arrows).items()) for t in sorted(ts)]
    return "\n".join(lines)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mermaid", action="store_true")
    parser.add_argument("--modules", action="store_true")
    args = parser.parse_args()
    arrows = graph(by_module=args.modules)
    if args.mermaid:
        print(mermaid(arrows))
        return
    by_level: dict[int, list[str]] = {}
    for name, level in levels(arrows).items():
        by_level.setdefault(level, []).append(name)
    cycles_in = cycles(arrows)
    count = sum(map(len, arrows.values()))
    print(f"{len(arrows)} rooms on {len(by_level)} levels, {count} arrows, {len(cycles_in)} cycles")
    for level in sorted(by_level, reverse=True):
        print(f"{level:3}  {'  '.join(sorted(by_level[level]))}")
    for cycle in cycles_in:
        print("cycle:", " ".join(cycle))
        for a in cycle:
            print("  ", a, "->", " ".join(sorted(set(cycle) & arrows[a])))


if __name__ == "__main__":
    main()
