"""Folders that the library datasets saved to disk."""

import json

import fsspec
import pyarrow as pa
import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.reader import PromptReader

NAMES = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """A data set whose state has its files in another order than their names."""
    root = str(tmp_path / "saved") if request.param == "local" else f"memory://{tmp_path.name}"
    for name in NAMES:
        table = pa.table({"prompt": [name], "label": pa.array(["x"]).dictionary_encode()})
        with (
            fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    write(root, "state.json", {"_data_files": [{"filename": name} for name in NAMES], "_fingerprint": "a"})
    write(root, "dataset_info.json", {"features": {}})
    return root


def write(root, name, content):
    with fsspec.open(f"{root}/{name}", "w", auto_mkdir=True) as file:
        json.dump(content, file)


def test_rows_are_in_the_order_of_the_state(folder):
    """The folder was refused because of its files of JSON."""
    reader = PromptReader(folder, {})
    assert [row.metadata for row in reader] == [{"prompt": name, "label": "x"} for name in NAMES]
    assert (reader.kind, reader.schema.names) == ("arrow", ["prompt", "label"])


def test_rows_in_a_file_named_state(tmp_path):
    """Outside of a saved data set they were left out without a word."""
    write(tmp_path, "state.json", [{"prompt": "a"}])
    write(tmp_path, "b.json", [{"prompt": "b"}])
    assert [row.prompt for row in PromptReader(str(tmp_path), {})] == ["b", "a"]


def test_several_splits(folder):
    """Which one is meant is the user's choice."""
    write(f"{folder}/..", "dataset_dict.json", {"splits": ["train", "test"]})
    with pytest.raises(UserError, match=r"has the splits train, test; name one of them, such as .*/train$"):
        PromptReader(f"{folder}/..", {})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]},
            r"save it again after flatten_indices\(\)",
        ),
        ({"_data_files": "x"}, "its state.json or dataset_dict.json is damaged"),
        ({"_data_files": [{"filename": "none.arrow"}]}, "none.arrow"),
    ],
)
def test_a_data_set_that_cannot_be_read(folder, state, message):
    """Rows would be others than the library gives, or a KeyError ended the run."""
    write(folder, "state.json", state)
    with pytest.raises(UserError, match=message):
        PromptReader(folder, {})
