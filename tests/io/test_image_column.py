"""Images in a column: what a row becomes, and what its result takes over."""

import base64
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError
from rosebatch.io.columns import Columns
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow
from tests.io.images.picture_files import picture, saved

FIRST, SECOND = saved("PNG"), saved("PNG", picture("RGB", (2, 1)))


def rows_of(path, **columns):
    reader = PromptReader(str(path), {}, columns=Columns.of(None, None, columns.pop("carried", None), **columns))
    return list(reader), reader


def table(tmp_path, images, **others):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"picture": images, **others}), path)
    return path


def sources(row):
    return [each.source for each in row.images]


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (pa.array([FIRST, SECOND]), [[FIRST], [SECOND]]),
        (pa.array([FIRST, SECOND], pa.binary_view()), [[FIRST], [SECOND]]),
        (pa.array(["a.png", "b.png"]), [["a.png"], ["b.png"]]),
        # As the Image feature of datasets writes it: the path is a name without a folder.
        (pa.array([{"bytes": FIRST, "path": "a.png"}, {"bytes": None, "path": "b.png"}]), [[FIRST], ["b.png"]]),
        (pa.array([[FIRST, SECOND], [FIRST]]), [[FIRST, SECOND], [FIRST]]),
        (pa.array([[{"bytes": SECOND, "path": None}], []]), [[SECOND], []]),
        (pa.array([["a.png", "b.png"], ["c.png"]]), [["a.png", "b.png"], ["c.png"]]),
        (pa.array([FIRST, FIRST]).dictionary_encode(), [[FIRST], [FIRST]]),
    ],
)
def test_columns_of_tables(tmp_path, images, expected):
    """Each form that data sets have is the images of a user's message, before its text."""
    rows, _ = rows_of(table(tmp_path, images, prompt=["x", "y"]), image="picture")
    assert [sources(row) for row in rows] == expected
    for row, text, found in zip(rows, "xy", expected, strict=True):
        (message,) = row.messages
        assert message["role"] == "user"
        # Without images it is a chat of text, as any other.
        parts = [*[{"type": "image"}] * len(found), {"type": "text", "text": text}]
        assert message["content"] == (parts if found else text)
        assert row.prompt is None


def test_a_column_of_any_name(tmp_path):
    """``image`` is what a row of text is refused for."""
    path = tmp_path / "rows.jsonl"
    lines = [{"image": "a.png", "q": "x", "note": 1}, {"image": ["a.png", base64.b64encode(FIRST).decode()], "q": "y"}]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    reader = PromptReader(str(path), {}, columns=Columns.of("q", None, None, system="s", image="image"))
    first, second = reader
    assert [sources(first), sources(second)] == [["a.png"], lines[1]["image"]]
    assert first.metadata == {"note": 1} and not first.unclear
    assert [each["role"] for each in first.messages] == ["system", "user"]
    (one, two), _ = rows_of(path, image="image", shared="Describe {it}.")
    assert one.messages[0]["content"][-1] == {"type": "text", "text": "Describe {it}."}
    assert two.metadata == {"q": "y"}


def test_results_leave_images_out(tmp_path):
    """A table of photos was written into its results, in base64."""
    path = table(tmp_path, pa.array([FIRST]), prompt=["x"], note=["n"])
    (row,), reader = rows_of(path, image="picture")
    assert row.metadata == {"prompt": "x", "note": "n"}
    assert reader.schema.names == ["prompt", "note"]
    (row,), reader = rows_of(path, image="picture", carried="picture")
    assert row.metadata == {"picture": FIRST}
    assert reader.schema.names == ["picture"]
    path = table(tmp_path, pa.array([FIRST]), note=["n"])
    (row,), reader = rows_of(path, image="picture", shared="Describe.", keeps_prompt=True)
    assert row.metadata == {"note": "n", "prompt": "Describe."}
    assert reader.schema.names == ["note", "prompt"]


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ({"prompt": "x"}, "missing_image", "picture, which --image-column names, is missing"),
        ({"prompt": "x", "picture": None}, "missing_image", "is missing"),
        ({"prompt": "x", "picture": 5}, "invalid_messages", "messages[0].content[0]: image must be a text"),
        ({"prompt": "x", "picture": ""}, "invalid_messages", "image must be a text"),
        ({"prompt": "x", "picture": {"url": "a"}}, "invalid_messages", "image must be a text"),
        ({"prompt": "x", "picture": ["a.png", []]}, "invalid_messages", "messages[0].content[1]: image must be"),
        ({"messages": [{"role": "user", "content": "x"}], "picture": "a"}, "invalid_field", "a prompt given as text"),
        ({"prompt_token_ids": [1], "picture": "a"}, "invalid_field", "a prompt given as text"),
        ({"prompt": "x", "image": "b.png", "picture": "a.png"}, "unsupported_field", "image: images of rows are parts"),
    ],
)
def test_rows_without_a_picture(tmp_path, line, code, told):
    """The text alone would be answered."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x", "picture": "a.png"}) + "\n" + json.dumps(line) + "\n")
    (good, bad), _ = rows_of(path, image="picture")
    assert sources(good) == ["a.png"]
    assert isinstance(bad, FailedRow) and bad.error.code == code and told in bad.error.message


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"image": ""}, "--image-column needs a name"),
        ({"image": "none"}, "--image-column none: .* has no such column"),
        ({"image": "picture", "shared": ""}, "--prompt needs a text"),
        ({"image": "picture", "shared": "x", "template": "{picture}"}, "--prompt and --prompt-template exclude"),
    ],
)
def test_wrong_flags(tmp_path, columns, told):
    """They end the job before it begins."""
    path = table(tmp_path, pa.array([FIRST]), prompt=["x"])
    with pytest.raises(FlagError, match=told):
        rows_of(path, **columns)


def test_a_name_that_no_line_has(tmp_path):
    """Each row failed with ``missing_image``, once the model was loaded."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x", "picture": "a.png"}\n{"prompt": "y"}\n')
    _, reader = rows_of(path, image="picture")
    reader.require_free_names()
    for shared in (None, "Describe."):
        _, reader = rows_of(path, image="image", shared=shared)
        with pytest.raises(FlagError, match=r"--image-column image: .* has no such column, but prompt, picture"):
            reader.require_free_names()


def test_questions_about_one_image_are_sorted_together(tmp_path):
    """With another image in between, the first was encoded twice."""
    images = [FIRST, SECOND, FIRST, SECOND]
    reader = PromptReader(
        str(table(tmp_path, pa.array(images), prompt=["a", "b", "c", "d"])), {}, columns=Columns(image="picture")
    )
    reader.sorts_within = 1 << 20
    numbers = [record.number for group in reader.records() for record in group]
    assert sorted(numbers[:2]) in ([0, 2], [1, 3])
