"""A model folder of 2 layers with a tokenizer of bytes, made once, and the command line called in this process."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from rosebatch.cli import app
from tests.helpers.checkout import ROOT, environment
from tests.helpers.forked_jobs import fork_children, python
from tests.helpers.json_lines import write_lines
from tests.helpers.small_llama import save_llama, save_tokenizer
from tests.helpers.waiting import PATIENCE_SECONDS

# Typer makes commands anew at each call, and pydantic the readers of their flags: most of what a refused call takes.
# With --help-all, a command changes what it shows.
_COMMANDS = {command.callback.__name__ for command in app.app.registered_commands if command.callback}
_app_for, _kept_app_for = app._app_for, functools.cache(app._app_for)


def _app_once(args: list[str]) -> Any:
    return _app_for(args) if "--help-all" in args else _kept_app_for(frozenset(_COMMANDS.intersection(args)))


setattr(app, "_app_for", _app_once)  # noqa: B010
setattr(app, "get_group", functools.cache(app.get_group))  # noqa: B010
setattr(typer.main, "get_command", functools.cache(typer.main.get_command))  # noqa: B010


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and tokenizer of a small model."""
    folder = tmp_path_factory.mktemp("model")
    save_llama(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Calls the command line and gives its exit code, stdout and stderr. Its workers and ranks are forks."""
    fork_children(monkeypatch)

    def call(*args: Any) -> SimpleNamespace:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            app.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=exit_info.value.code, out=out, err=err)

    return call


@pytest.fixture
def generate(cli: Callable[..., Any], model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs ``generate --quiet`` on some lines with the small model. ``rows`` of the result are its stdout."""

    def call(lines: list[dict[str, Any]], *flags: Any) -> SimpleNamespace:
        source = write_lines(tmp_path / "in.jsonl", lines)
        result = cli("generate", source, "--model", model_folder, "--quiet", *flags)
        result.rows = [json.loads(line) for line in result.out.split("\n") if line]
        return result

    return call


@pytest.fixture(scope="session")
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a shell command in the repository's root. ``$PY`` is this Python, ``$FORK`` is a fork: see ``python``."""
    env = environment(PY=sys.executable)

    def run(command: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        if "$FORK" in command:
            variables["FORK"] = python()
        return subprocess.run(
            ["bash", "-c", command],
            env=env | {name: str(value) for name, value in variables.items()},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def toy_toml() -> Path:
    """The shape of a model with 2 layers."""
    return ROOT / "configs" / "models" / "tiny-llama.toml"


@pytest.fixture
def toy(
    cli: Callable[..., SimpleNamespace], toy_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SimpleNamespace]:
    """Runs ``generate --quiet`` with random weights in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: cli("generate", *args, "--model", toy_toml, "--load-format", "dummy", "--quiet")
