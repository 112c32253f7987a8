"""``rosebatch cache``: what it lists and what it deletes."""

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of two models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "rosebatch" / "gguf"
    for name, size in (("small-0123456789abcdef", 100), ("large-0123456789abcdef", 3 << 20)):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(bytes(size))
    return folder


def test_listing(cli, cache):
    """The folder, each model and the total; nothing is deleted."""
    result = cli("cache")
    assert (result.code, result.err) == (0, "")
    assert [line.split() for line in result.out.splitlines()] == [
        [str(cache)],
        ["large-0123456789abcdef", "3.0", "MiB"],
        ["small-0123456789abcdef", "0.0", "MiB"],
        ["total", "3.0", "MiB"],
    ]
    assert len(list(cache.iterdir())) == 2


def test_clearing(cli, cache):
    """Says how much; a second time there is nothing."""
    result = cli("cache", "--clear")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "3.0 MiB deleted"
    assert not list(cache.glob("*-*"))
    assert cli("cache", "--clear").out.splitlines()[-2:] == ["total         0.0 MiB", "0.0 MiB deleted"]


def test_a_cache_that_does_not_exist(cli, tmp_path, monkeypatch):
    """Before the first conversion: nothing is made, nothing fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = cli("cache")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [str(tmp_path / "rosebatch" / "gguf"), "total         0.0 MiB"]
    assert cli("cache", "--clear").code == 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_is_listed(cli):
    """From the top of the help."""
    assert "cache" in cli("--help").out


def test_the_command_starts_quickly(process):
    """It needs neither torch nor the converter: two seconds for a listing."""
    code = (
        "import sys; from rosebatch.model.gguf import cache; assert not {'torch', 'gguf', 'numpy'} & set(sys.modules)"
    )
    assert process(f'$PY -c "{code}"').returncode == 0
