"""The Python of the docs runs as it is printed."""

import re
from dataclasses import fields

import pytest

import rosebatch
from rosebatch.config.run import RunConfig
from rosebatch.core.sampling_params import SamplingParams
from tests.helpers.checkout import ROOT

BLOCKS = [
    (page, number, code)
    for page in ("README.md", "docs/library.md")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S))
]


@pytest.mark.parametrize(("page", "number", "code"), BLOCKS, ids=[f"{page}-{number}" for page, number, _ in BLOCKS])
def test_examples_run(page, number, code, tmp_path, monkeypatch):
    """A renamed parameter or result would leave the docs behind."""
    monkeypatch.chdir(tmp_path)
    if page != "README.md":
        # What stands there can be pasted anywhere.
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "The capital of France is", "max_tokens": 3}\n')
    exec(code, {})
    assert len(list(tmp_path.iterdir())) > 1 or "run_file" not in code


def test_the_rows_of_the_readme_are_rows(llm, tmp_path):
    """What a row looks like is shown by three lines, which are served."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r'```\n((?:{"[^\n]*\n){3})```', page)[1]
    (tmp_path / "prompts.jsonl").write_text(shown)
    target = tmp_path / "answers.jsonl"
    assert rosebatch.run_file(tmp_path / "prompts.jsonl", target, model=llm, sampling={"max_tokens": 4}).num_failed == 0


def test_every_public_name_is_on_the_page():
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    assert [name for name in rosebatch.__all__ if name != "__version__" and f"`{name}`" not in page] == []


def test_every_setting_is_on_the_page():
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    settings = RunConfig.__dataclass_fields__.keys() - {"model", "switches"}
    assert [name for name in sorted(settings) if f"`{name}`" not in page] == []
    assert [f.name for f in fields(SamplingParams) if f"{f.name}=" not in page] == []
