"""No two files import each other, by whatever way: one of them then cannot be read, moved or tested alone."""

import ast
from graphlib import TopologicalSorter

from tests.helpers.checkout import ROOT

FOLDERS = {"rosebatch": ROOT, "rosebatch_kernels": ROOT / "kernels", "benchmarks": ROOT}


def imported(path):
    """The names that a file imports, in functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def test_files_import_each_other_in_one_direction():
    """Two circles came with files that were cut in two, and the contracts between packages did not see them."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for package, root in FOLDERS.items()
        for path in (root / package).rglob("*.py")
    }
    graph = {name: {each for each in imported(path) if each in files and each != name} for name, path in files.items()}
    TopologicalSorter(graph).prepare()
