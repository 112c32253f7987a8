"""The example input of the README and of ``make demo``."""

from pathlib import Path

from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import PromptRow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "prompts.jsonl"


def test_every_example_is_a_good_row():
    """The first thing that anyone tries must not fail."""
    rows = list(PromptReader(str(EXAMPLES), {}))
    assert len(rows) >= 5
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
