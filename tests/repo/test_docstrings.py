"""Docstrings name what is there: a rename left a dozen of them with the old names of parameters."""

import ast
import re

from tests.helpers.checkout import ROOT

FILES = [path for folder in ("rosebatch", "kernels", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


def named(docstring, head):
    """The names that a section describes."""
    section = re.search(rf"\n *{head}:\n((?: +.*\n?)+)", docstring + "\n")
    if section is None:
        return set()
    indent = re.match(" *", section[1])[0]
    lines = re.findall(rf"^{indent}([\w*][\w*, ]*):", section[1], re.MULTILINE)
    names = {name.strip().lstrip("*") for line in lines for name in line.split(",")}
    return {name for name in names if name.isidentifier()}


def parameters(function):
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {each.arg for each in every if each is not None}


def fields(kind):
    """Fields and properties of a class, and attributes that its methods set."""
    found = {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(kind) if isinstance(node, ast.Attribute)}
    return found | {node.name for node in ast.walk(kind) if isinstance(node, ast.FunctionDef)}


def test_parameters_and_fields_have_the_names_of_their_docstrings():
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            docstring = ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                bad = named(docstring, "Attributes")
                if bad:
                    bad -= fields(node)
                makers = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
                for maker in makers:
                    bad |= named(docstring, "Args") - parameters(maker)
            else:
                bad = named(docstring, "Args") - parameters(node)
            wrong += [f"{path.relative_to(ROOT)}: {node.name}: {name}" for name in sorted(bad)]
    assert wrong == []
