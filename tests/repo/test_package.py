"""The packages that users install hold all they need."""

import os
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.helpers.checkout import ROOT

pytestmark = pytest.mark.thorough


def build(target, folder):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


def test_the_wheel_works_elsewhere(tmp_path):
    """Scenarios, types and kernels are in it; nothing is taken from a checkout."""
    wheel, site = build("wheel", tmp_path / "dist"), tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert (site / "rosebatch" / "py.typed").is_file()
    command = [sys.executable, "-m", "rosebatch", "bench", "--scenario", "balanced_b32", "--num-prompts", "2"]
    command += ["--input-len", "8", "--output-len", "4", "--repeats", "1", "--device", "cpu", "--load-format", "dummy"]
    command += ["--model", str(site / "rosebatch" / "configs" / "models" / "tiny-llama.toml")]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    (fit,) = done.stderr.splitlines()
    assert fit.startswith("rosebatch: tiny-llama fits: ")
    assert "scenario: balanced_b32" in done.stdout
    code = "import rosebatch, rosebatch_kernels; print(rosebatch.__file__, rosebatch_kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.count(str(site)) == 2


def test_the_source_distribution_is_whole(tmp_path):
    """Whoever packages it can run the tests and read the docs."""
    with tarfile.open(build("sdist", tmp_path / "dist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = (
        "tests/repo/test_package.py",
        "docs/architecture.md",
        "configs/bench/suite.toml",
        "CHANGELOG.md",
        "Makefile",
    )
    for each in files:
        assert each in names
    assert not any(name.startswith(".") and not name.startswith((".ci", ".gitignore")) for name in names)
