"""A model folder may hold anything: it runs, or one line says what is wrong with which file. Nobody is asked."""

import json
import resource
import shutil

import pytest

from tests.model.odd_folders import CONFIGS, cases, outcome, write_good

CASES = list(cases())
# Bytes that no folder of a few kilobytes may take.
_MEMORY = 300 << 20

pytestmark = pytest.mark.usefixtures("cache", "hub", "nobody_to_ask")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A good folder of each kind."""
    root = tmp_path_factory.mktemp("good")
    for kind in CONFIGS:
        write_good(kind, root / kind)
    return root


@pytest.mark.parametrize("kind", CONFIGS)
def test_good_folders_run(good, kind):
    """Otherwise each odd one would be refused for another reason than its own."""
    assert outcome(good / kind, generation_config="auto") is None


def complaint(case, good, folder):
    """What is wrong with how a case is treated."""
    shutil.copytree(good / case.kind, folder)
    case.change(folder / case.file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        line = outcome(folder, generation_config="auto")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        shutil.rmtree(folder)
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > _MEMORY:
        return "takes too much memory"
    if line is None:
        return None
    if str(folder) not in line:
        return f"does not name the file: {line}"
    if not line.isprintable() or len(line) - len(str(folder)) > 300:
        return f"not one short line: {line!r}"
    return None


def test_there_are_enough_cases():
    """And each has a name of its own."""
    assert len(CASES) >= 130
    assert len({(case.name, case.kind, case.file) for case in CASES}) == len(CASES)


@pytest.mark.thorough
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 8))])
def test_odd_folders(good, tmp_path, part, capfd):
    """Tracebacks, "unexpected", hangs on pipes, gigabytes for a number in a config."""
    found = {}
    for case in CASES[part::8]:
        wrong = complaint(case, good, tmp_path / "model")
        if wrong:
            found[f"{case.kind} {case.file} {case.name}"] = wrong
    assert not found, json.dumps(found, indent=1)
    assert "panicked" not in capfd.readouterr().err
