"""Bytecode made by processes beside the first import."""

import os
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace

import pytest

from rosebatch.host import bytecode, first_bytecode


@pytest.fixture
def package(tmp_path):
    """A folder of nine modules, of which one is broken and one belongs to what no start imports."""
    folder = tmp_path / "torch"
    for name in ("__init__", "a", "b", "inner/c", "inner/d", "inner/deep/e", "_inductor/unused"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text("x = 1\n")
    (folder / "broken.py").write_text("x = = 1\n")
    (folder / "data.txt").write_text("x = 1\n")
    return folder


def compiled(package):
    """Names of the modules that have bytecode."""
    files = package.rglob("*.py")
    return {str(file.relative_to(package)) for file in files if Path(cache_from_source(str(file))).exists()}


WHOLE = {"__init__.py", "a.py", "b.py", "inner/c.py", "inner/d.py", "inner/deep/e.py"}


def test_shares_make_up_the_whole(package):
    """A file in two shares is compiled twice, one in none by the import that waits for it."""
    found = []
    for own in range(3):
        before = compiled(package)
        first_bytecode.compile_files(own, 3, [str(package)])
        found.append(compiled(package) - before)
    assert set().union(*found) == WHOLE
    assert sum(map(len, found)) == len(WHOLE)
    assert all(found)


def test_bytecode_that_is_there_stays(package):
    """The import may have been there before."""
    first_bytecode.compile_files(0, 1, [str(package)])
    file = Path(cache_from_source(str(package / "a.py")))
    os.utime(file, (1, 1))
    first_bytecode.compile_files(0, 1, [str(package)])
    assert file.stat().st_mtime == 1


@pytest.fixture
def compile_beside(package, monkeypatch):
    """Compiles that package into a folder, with so many cores."""

    def call(folder, cores):
        folder.mkdir(parents=True)
        specs = {"torch": SimpleNamespace(submodule_search_locations=[str(package)])}
        monkeypatch.setattr(first_bytecode, "find_spec", specs.get)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        return first_bytecode.compile_beside(folder)

    return call


@pytest.mark.parametrize(("cores", "count"), [(1, 0), (2, 1), (4, 3), (64, 8), (None, 0)])
def test_processes_for_the_cores_that_are_free(package, compile_beside, tmp_path, cores, count):
    """The import needs one of them. Bytecode goes to the cache alone."""
    processes = compile_beside(tmp_path / "cache", cores)
    assert [process.wait() for process in processes] == [0] * count
    assert compiled(package) == set()
    beside = tmp_path / "cache" / package.relative_to("/")
    made = {file.name.partition(".")[0] for file in beside.rglob("*.pyc")}
    assert made == ({"__init__", "a", "b", "c", "d", "e"} if count else set())


def test_a_cache_that_is_still_filled_is_deleted(package, compile_beside, tmp_path, monkeypatch):
    """Processes that outlived the command before made the folder anew, in part."""
    for number in range(300):
        (package / f"more{number}.py").write_text("x = 1\n" * 200)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = bytecode.bytecode_folder()
    processes = compile_beside(folder, 3)
    assert bytecode.clear_bytecode() > 0
    assert [process.wait() for process in processes] == [0, 0]
    assert not folder.exists()
