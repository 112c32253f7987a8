"""Shards: every row is in one of them."""

from pathlib import Path

import pytest

from rosebatch.core.errors import FlagError
from rosebatch.job.shard import Shard, find_parts


@pytest.mark.parametrize("text", ["", "1", "0/8", "9/8", "1/0", "-1/8", "1/8/8", "1.0/8", " 1/8", "1/9999999"])
def test_no_shard(text):
    """An array's first number is often 0: nobody would serve the rows of the last shard."""
    with pytest.raises(FlagError, match=r"^--shard .*: must be I/N with I from 1 to N, such as 1/8$"):
        Shard.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [0, 1, 63, 64, 65, 128, 1000])
def test_every_row_is_in_one_shard(count, total):
    """A row in none would be missing, one in two would have two results; the progress must end at 100 %."""
    shards = [Shard.parse(f"{number}/{count}") for number in range(1, count + 1)]
    owners = [[shard for shard in shards if shard.has(index)] for index in range(total)]
    assert all(len(own) == 1 for own in owners)
    assert [shard.size(total) for shard in shards] == [sum(shard in own for own in owners) for shard in shards]
    for shard in shards:
        assert [*shard.rows(total)] == [index for index, own in enumerate(owners) if shard in own]


def test_neighbours_stay_together():
    """They often begin alike."""
    assert {Shard(2, 3).has(index) for index in range(64, 128)} == {True}


def test_parts_of_another_output_are_not_found(tmp_path):
    """Two jobs may write to one folder."""
    names = ["a.jsonl.1-of-2.part", "a.jsonl.2-of-2.part", "ba.jsonl.1-of-2.part", "a.jsonl.part", "a.jsonl.1-of-2"]
    for name in names:
        (tmp_path / name).touch()
    assert {*find_parts(tmp_path / "a.jsonl")} == {Shard(1, 2), Shard(2, 2)}
    assert find_parts(Path("/nowhere/at/all")) == {}
