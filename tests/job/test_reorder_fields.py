"""A job whose template's lines change their order."""

import pytest

from rosebatch.core.errors import UserError
from tests.helpers.json_lines import read_lines, write_lines

TEMPLATE = "Name: {name}\nKind: {kind}"
# Bytes are tokens, and blocks have 4: reordered, rows of a kind have their first six blocks in common.
ROWS = [{"name": f"name {i}", "kind": f"kind {i % 2}".ljust(9), "max_tokens": 1} for i in range(8)]


@pytest.fixture
def run(job, tmp_path):
    write_lines(tmp_path / "in.jsonl", ROWS)

    def run(**options):
        options = {"prompt_template": TEMPLATE, "keep_prompt": True, "columns": ()} | options
        return job.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)[0].report

    return run


def test_rows_share_their_beginnings(run, tmp_path):
    """Of each kind, all rows but the first took it from no cache: behind the names, nothing is alike."""
    assert run()["cached_tokens"] == 7 * 8
    assert [row["prompt"] for row in read_lines(tmp_path / "out.jsonl")][1] == "Name: name 1\nKind: kind 1   "
    assert run(reorder_fields=True)["cached_tokens"] == 6 * 24 + 8
    expected = [f"Kind: {row['kind']}\nName: {row['name']}" for row in ROWS]
    assert [row["prompt"] for row in read_lines(tmp_path / "out.jsonl")] == expected


def test_a_resumed_run_has_the_same_order(run, tmp_path):
    """Half of the results would be of other prompts."""
    run(reorder_fields=True)
    before = (tmp_path / "out.jsonl").read_bytes()
    assert not run(reorder_fields=True, resume=True)
    with pytest.raises(UserError, match=r"--prompt-template was Kind: .*, is Name: "):
        run(resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before
