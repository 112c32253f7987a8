"""The example inputs of the README and of ``make demo``."""

from pathlib import Path

import pytest

from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import PromptRow

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = FOLDER / "prompts.jsonl"


@pytest.mark.parametrize(("name", "is_batch"), [("prompts.jsonl", False), ("openai_batch.jsonl", True)])
def test_every_example_is_a_good_row(name, is_batch):
    """The first thing that anyone tries must not fail."""
    reader = PromptReader(str(FOLDER / name), {})
    assert reader.is_batch is is_batch
    rows = list(reader)
    assert len(rows) >= 3
    assert [row for row in rows if not isinstance(row, PromptRow)] == []


def test_the_examples_show_each_kind_of_row():
    """A chat, a plain prompt, a stop string, sampling of its own, and a field that is carried."""
    rows = list(PromptReader(str(EXAMPLES), {}))
    assert any(row.messages for row in rows)
    assert any(row.prompt for row in rows)
    assert any(row.sampling.stop for row in rows)
    assert any(row.has_seed and not row.sampling.greedy for row in rows)
    assert any(set(row.metadata) - {"id"} for row in rows)
    assert len({row.metadata["id"] for row in rows}) == len(rows)
