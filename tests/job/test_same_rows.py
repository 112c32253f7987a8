"""The same rows as JSONL, a JSON array, Parquet and Arrow are the same requests, and get the same answers."""

import json
import os
import re

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from rosebatch.io.columns import Columns
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.json_lines import write_lines
from tests.helpers.random_tables import random_table

# Shows all that a template sees.
_TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m | tojson }}"
    "{% if loop.last and m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for v in [s, t, key, items, type] %}{{ v | tojson if v is defined }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
# Rows of JSON that lack a field are told of these flags; a table has a column of that name.
_HINT = "; --prompt-column [^'\"]*"
_MORE = int(os.environ.get("ROSEBATCH_RANDOM_TABLES", "60"))


@pytest.fixture
def forms(tmp_path):
    """Writes a table in all forms; the files that can hold its types."""

    def write(found):
        table, rows, _ = found
        yield write_lines(tmp_path / "in.jsonl", rows)
        (tmp_path / "in.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1))
        yield tmp_path / "in.json"
        # PyArrow does not write views into Parquet.
        if "string_view" not in str(table.schema):
            pq.write_table(table, tmp_path / "in.parquet", row_group_size=3)
            yield tmp_path / "in.parquet"
        with pa.ipc.new_stream(tmp_path / "in.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        yield tmp_path / "in.arrow"

    return write


def request_of(row):
    """All of a row but the word for its place, with its keys in their order."""
    where = row.where.replace("line", "row")
    if isinstance(row, FailedRow):
        message = re.sub(_HINT, "", str(row.error).replace("line", "row"))
        return repr((row.index, where, row.error.code, message)), row.metadata
    return repr(replace(row, where=where, metadata={})), row.metadata


def answer_of(row):
    """The line of a result, with its keys in their order."""
    return re.sub(_HINT, "", msgspec.json.encode(row).decode()).replace('"message":"line ', '"message":"row ')


def check(job, forms, seed):
    found = random_table(seed)
    expected = None
    for path in forms(found):
        reader = PromptReader(str(path), {"max_tokens": 6}, columns=Columns.of(None, None, found.carried))
        requests = [(text, msgspec.json.encode(carried, enc_hook=str)) for text, carried in map(request_of, reader)]
        answers = [answer_of(row) for row in job.results(rows=reader, blocks=4000, max_model_len=9999)]
        expected = expected or (requests, answers)
        for one, other in zip((*requests, *answers), (*expected[0], *expected[1]), strict=True):
            assert one == other, f"seed {seed}, {path.name}"
    return len(expected[1]), sum('"error"' in answer for answer in expected[1])


@pytest.mark.parametrize("count", [10, pytest.param(_MORE, marks=pytest.mark.thorough)])
def test_random_files(job, forms, count):
    """Nulls, missing keys and types of columns changed what a row asks for."""
    job.tokenizer = Tokenizer(byte_backend(), _TEMPLATE, {"eos_token": "<eos>"})
    counts = [check(job, forms, seed) for seed in range(count)]
    rows, failed = map(sum, zip(*counts, strict=True))
    assert failed < rows / 2
