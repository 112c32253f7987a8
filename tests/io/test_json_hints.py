"""Lines that are no JSON: the parser's message gets the way out."""

import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.json_hints import hint
from rosebatch.io.unsupported_formats import require_no_csv

ONE_LINE = '; a row is one JSON object on a line, such as {"prompt": "…"}'
PYTHON = "; that is Python: json.dumps writes JSON"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"What is 2+2?", ONE_LINE),
        (b"// a comment", ONE_LINE),
        (b"{", "; a row is one JSON object on one line: jq -c . makes it one"),
        (b"{'prompt': 'a'}", PYTHON),
        (b'{"prompt": "a", "id": None}', PYTHON),
        (b'{"prompt": "a", "seed": [True]}', PYTHON),
        (b'{"prompt": "a", "temperature": NaN}', "; JSON has no NaN: write null, or leave the field out"),
        (b'{"x": [1, -Infinity]}', "; JSON has no Infinity: write null, or leave the field out"),
        (b'{"prompt": "caf\xe9"}', "; convert it, such as from Windows: iconv -f cp1252 -t utf-8"),
        # "Input data was truncated", said the parser.
        (b'{"prompt": "a\\uD83C"}', r"; \uD83C is half a character"),
        (b'{"prompt": "a\\ud83c\\udf39",}', ""),
        (b'{"prompt": "a",}', ""),
        (b'{"prompt": "a"},', "; there are no commas between lines"),
        (b'{"prompt": "NaN, None and \'x\'"', ""),
    ],
)
def test_the_way_out(line, told):
    """ "invalid character (byte 0)" told nobody what to write."""
    assert hint(line) == told


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_on_stdin(separator):
    """Every row failed as no JSON."""
    header = separator.join(["id", "prompt"]).encode() + b"\r\n"
    with pytest.raises(UserError, match=r"stdin: begins like CSV; if it is, give --input-format csv"):
        require_no_csv(header, {"prompt"})
    for other in (b'{"id":1,"prompt":"a"}\n', b"id,text\n", b""):
        require_no_csv(other, {"prompt"})
