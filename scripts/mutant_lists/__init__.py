"""Small defects that a test must notice, in one list for each room of the product (docs/architecture.md).

Each is an edit of the product, the tests closest to it, and why it matters. A list is found by its file's name: its
room's, with "_" for "/".
"""

import importlib
import itertools
import pkgutil

from scripts.mutant_lists.mutant import Mutant

_names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "mutant")
LISTS: dict[str, tuple[Mutant, ...]] = {
    name: importlib.import_module(f"scripts.mutant_lists.{name}").MUTANTS for name in _names
}
MUTANTS = tuple(itertools.chain.from_iterable(LISTS.values()))
