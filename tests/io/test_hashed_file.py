"""An input that changes while it is read: no row of other contents, whatever its format."""

import csv
import gzip
import hashlib
import io
import json
import os
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import ChangedInputError
from rosebatch.host.file_state import FileState
from rosebatch.io import hashed_file
from rosebatch.io.hashed_file import HashedFile
from rosebatch.io.reader import PromptReader
from tests.helpers.json_lines import write_lines

# Far more than is read at once, and no compression makes less of it.
ROWS = [{"prompt": f"{number} {os.urandom(1000).hex()}"} for number in range(1000)]
OLD, NEW = b"old contents", b"new contents"


def write_table(path, rows, write):
    write(pa.Table.from_pylist(rows), path)


def write_csv(path, rows):
    with path.open("w") as file:
        table = csv.DictWriter(file, ["prompt"])
        table.writeheader()
        table.writerows(rows)


WRITE = {
    "in.jsonl": write_lines,
    "in.jsonl.gz": lambda path, rows: path.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), 1)
    ),
    "in.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "in.csv": write_csv,
    "in.parquet": lambda path, rows: write_table(path, rows, lambda *given: pq.write_table(*given, row_group_size=300)),
    "in.arrow": lambda path, rows: write_table(
        path, rows, lambda *given: feather.write_feather(*given, chunksize=100, compression="uncompressed")
    ),
}


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("sorts_within", [0, 1 << 18])
@pytest.mark.parametrize("name", WRITE)
def test_a_file_that_is_written_over(tmp_path, name, sorts_within, is_cut):
    """Later rows were of the new contents, and stayed in the part file: --resume with the old ones took them over."""
    path = tmp_path / name
    WRITE[name](path, ROWS)
    reader = PromptReader(str(path), {})
    reader.digest()
    reader.sorts_within = sorts_within
    groups = reader.records()
    seen = [reader.parser.parse(row) for row in next(groups)]
    if is_cut:
        os.truncate(path, 1000)
    else:
        WRITE[name](path, [{"prompt": row["prompt"].replace("1", "2")} for row in ROWS])
    # The system's clock may have stood still meanwhile.
    os.utime(path, (1, 1))
    with pytest.raises(ChangedInputError, match=f"^{path}: changed during the run, which needs the old contents"):
        for group in groups:
            seen += map(reader.parser.parse, group)
    assert 0 < len(seen) < len(ROWS)
    assert [row.prompt for row in seen] == [ROWS[row.index]["prompt"] for row in seen]


@pytest.mark.parametrize("sorts_within", [0, 1 << 30])
def test_the_same_contents_at_another_time(tmp_path, monkeypatch, sorts_within):
    """A link to the input, or a copy in its place, is no change; it is hashed once, not for each row."""
    path = write_lines(tmp_path / "in.jsonl", ROWS)
    reader = PromptReader(str(path), {})
    reader.digest()
    reader.sorts_within = sorts_within
    groups = reader.records()
    numbers = [row.number for row in next(groups)]
    digest = Mock(side_effect=hashed_file._digest)
    monkeypatch.setattr(hashed_file, "_digest", digest)
    path.rename(tmp_path / "old.jsonl")
    os.utime(tmp_path / "old.jsonl", (1, 1))
    write_lines(path, ROWS)
    numbers += [row.number for group in groups for row in group]
    assert sorted(numbers) == list(range(len(ROWS)))
    assert digest.call_count == 1
    reader.require_unchanged()


class Torn(io.FileIO):
    """A file that has other contents the first times it is read, and the old ones before and after."""

    left = 2

    def readinto(self, buffer):
        if not self.left:
            return super().readinto(buffer)
        self.left -= 1
        write_at_another_time(self.name, NEW)
        size = super().readinto(buffer)
        write_at_another_time(self.name, OLD)
        return size


def write_at_another_time(path, content):
    """Write over a file. The system's clock may stand still meanwhile."""
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before, before + 1))


def test_contents_that_come_back(tmp_path):
    """A copy over the input empties it for a moment: rows of that moment were error rows."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(OLD)
    hashed = HashedFile(str(path), FileState.of(path), hashlib.sha256(OLD).hexdigest())
    with hashed.open(Torn(path), 5) as file:
        assert file.read(100) == OLD
    with hashed.open(Torn(path), 5) as file:
        file.seek(4)
        assert file.read(3) == OLD[4:7]


def test_a_row_that_is_read_again_while_contents_come_back(tmp_path, monkeypatch):
    """The same, where rows wait without their contents."""
    path = write_lines(tmp_path / "in.jsonl", ROWS[:3])
    content, pread = path.read_bytes(), os.pread
    reader = PromptReader(str(path), {})
    reader.digest()
    reader.sorts_within = 1 << 20

    def torn(*given):
        write_at_another_time(path, b"")
        text = pread(*given)
        write_at_another_time(path, content)
        monkeypatch.setattr(os, "pread", pread)
        return text

    groups = reader.records()
    monkeypatch.setattr(os, "pread", torn)
    assert [reader.parser.parse(row).prompt for group in groups for row in group] == [row["prompt"] for row in ROWS[:3]]
