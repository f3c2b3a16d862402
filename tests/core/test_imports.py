"""The modules of core import one another without a cycle, imports inside functions included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from nearkin import core

ROOT = Path(core.__file__).parent
MODULES = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}


def imports_of(path):
    """The modules of core that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "nearkin.core":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nearkin.core."):
            yield node.module.split(".")[2]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[2] for alias in node.names if alias.name.startswith("nearkin.core."))


def test_core_has_no_import_cycle():
    graph = {name: set(imports_of(ROOT / f"{name}.py")) for name in MODULES}
    assert sum(map(len, graph.values())) > len(MODULES), "the imports were not read"
    assert set().union(*graph.values()) <= MODULES
    order = list(TopologicalSorter(graph).static_order())  # a CycleError names the modules of a cycle
    assert set(order) == MODULES and order.index("checks") < order.index("distances") < order.index("relations")
