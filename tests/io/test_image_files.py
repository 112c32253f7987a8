"""Images as an input: which files are rows, what may be read, and what their fingerprint is."""

import os
import pickle
from pathlib import Path

import pytest

from rosebatch.core.errors import FlagError, RowError, UserError
from rosebatch.io.columns import Columns
from rosebatch.io.images.load import load_image
from rosebatch.io.reader import PromptReader
from tests.io.images.picture_files import picture, saved

ASKED = Columns(shared="Describe {it}.")


@pytest.fixture
def scans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "scans"
    folder.mkdir()
    for name in ("b.PNG", "a 1.jpeg", "c:d.webp"):
        (folder / name).write_bytes(saved("PNG"))
    for name in (".hidden.png", "_unfinished.png", "notes.txt", "index.jsonl"):
        (folder / name).write_bytes(b"x")
    return folder


def read(source, **options):
    return PromptReader(str(source), {}, columns=ASKED, **options)


def ids(reader):
    return [row.id for row in reader]


def test_a_folder(scans):
    """Its images are rows, by their names; the path as it was given is the id, and each result has it."""
    for source in ("scans", "scans/"):
        reader = read(source)
        rows = list(reader)
        assert [row.id for row in rows] == ["scans/a 1.jpeg", "scans/b.PNG", "scans/c:d.webp"]
        assert [row.where for row in rows] == [row.id for row in rows]
        assert reader.count() == 3 and not reader.is_empty and reader.kind == "auto" and reader.can_move
        assert reader.require_free_names() == [] and reader.schema is None
    assert rows[0].messages == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Describe {it}."}]}
    ]
    assert rows[0].metadata == {"id": "scans/a 1.jpeg"}
    assert not rows[0].unclear
    # It is sent to a process that reads, and so are the options of images.
    assert ids(pickle.loads(pickle.dumps(reader))) == ids(reader)
    for row in rows:
        assert load_image(row.images[0], reader.media).rgb.shape == (7, 9, 3)


@pytest.mark.parametrize("carried", ["none", "image"])
def test_columns_that_files_do_not_have(scans, carried):
    """Results lost their ids without a word, or told where the file is on this machine."""
    columns = Columns.of(None, None, f"{carried},id", shared="Describe.")
    reader = PromptReader("scans", {}, columns=columns)
    assert reader.require_free_names() == [carried]
    assert [row.metadata for row in reader] == [{"id": row.id} for row in reader]
    with pytest.raises(FlagError, match="scans: --result-column id: the input has a field of this name"):
        read("scans", result_column="id").require_free_names()


def test_other_names_of_jpegs(tmp_path):
    """Windows and browsers save such: they were left out in silence."""
    for name in ("a.jfif", "b.JPE", "c.pjpeg", "d.apng"):
        (tmp_path / name).write_bytes(saved("PNG"))
    assert [Path(each).name for each in ids(read(tmp_path))] == ["a.jfif", "b.JPE", "c.pjpeg", "d.apng"]


def test_globs_and_single_files(scans):
    """All that a glob matches is a row; the folder before its first mark may be read."""
    assert ids(read("scans/[ab]*[gG]")) == ["scans/a 1.jpeg", "scans/b.PNG"]
    assert ids(read("scans/*.txt")) == ["scans/notes.txt"]
    assert ids(read(scans / "b.PNG")) == [str(scans / "b.PNG")]
    assert ids(read("**/*.PNG")) == ["scans/b.PNG"]
    assert read("s*/b.PNG").media.root == scans.parent
    assert read("scans/b.PNG").media.root == scans


def test_links(scans, tmp_path):
    """A link in a folder that leads out of it showed what the folder's owner may not read. One that is named may."""
    outside = tmp_path / "outside.png"
    outside.write_bytes(saved("PNG"))
    (scans / "d.png").symlink_to(outside)
    (scans / "e.png").symlink_to("b.PNG")
    (scans / "f.png").symlink_to("/dev/zero")
    (scans / "g.png").symlink_to("nowhere")
    os.mkfifo(scans / "h.png")
    with pytest.raises(RowError, match="the path leads out of the folder of INPUT"):
        load_image(next(row for row in read("scans") if row.id == "scans/d.png").images[0], read("scans").media)
    for source in ("scans", "scans/?.png"):
        reader = read(source)
        found = {}
        for row in reader:
            try:
                load_image(row.images[0], reader.media)
            except RowError as error:
                found[row.id] = error.code
        expected = {"d": "image_not_allowed", "f": "image_not_allowed", "g": "image_not_read", "h": "image_not_allowed"}
        assert found == {f"scans/{name}.png": code for name, code in expected.items()}
    reader = read("scans/d.png")
    (row,) = reader
    assert load_image(row.images[0], reader.media).rgb.shape == (7, 9, 3)


def test_the_fingerprint_is_of_names_and_sizes(scans):
    """A resumed run compares it. All photos would be read before the first is served."""
    reader = read("scans")
    before = reader.digest()
    reader.require_unchanged()
    content = (scans / "b.PNG").read_bytes()
    (scans / "b.PNG").write_bytes(bytes(len(content)))
    assert read("scans").digest() == before
    reader.require_unchanged()
    (scans / "b.PNG").write_bytes(content + b"0")
    with pytest.raises(UserError, match="changed during the run"):
        reader.require_unchanged()
    (scans / "b.PNG").write_bytes(content)
    (scans / "z.png").write_bytes(content)
    assert read("scans").digest() != before
    (scans / "z.png").unlink()
    (scans / "b.PNG").rename(scans / "a.PNG")
    assert read("scans").digest() != before


def test_a_name_that_is_no_text(scans):
    """It cannot be a result's id as it is; the file is read all the same."""
    name = b"\xff.png"
    Path(os.fsdecode(os.fsencode(scans) + b"/" + name)).write_bytes(saved("PNG", picture("RGB", (2, 1))))
    reader = read("scans")
    *_, row = reader
    assert row.id == "scans/\\xff.png"
    assert load_image(row.images[0], reader.media).rgb.shape == (1, 2, 3)


@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        ("-", FlagError, "--prompt asks about images in files of this machine"),
        ("s3://bucket/*.png", FlagError, "--image-column NAME says which images rows have"),
        ("scans/index.jsonl", FlagError, "--prompt asks about images, and this has rows"),
        ("scans/*", FlagError, "index.jsonl: --prompt asks about images"),
        ("scans/none*.png", UserError, "no such file or folder"),
        ("none", UserError, "no such file or folder"),
        ("x" * 300, UserError, "File name too long"),
        ("empty", UserError, "no images found; a folder needs files that end in .jpg"),
        ("outer", UserError, r"inner/ would not be read; give a pattern such as 'outer/\*\*/\*\.png'"),
        ("unread", UserError, "photo.HEIC would not be read; convert them to .png, or give"),
        ("grey", UserError, "scan.pgm would not be read; convert them to .png, or give"),
    ],
)
def test_what_is_no_input_of_images(scans, source, error, told):
    """Files that are left out in silence are rows without an answer."""
    (scans.parent / "empty").mkdir()
    (scans.parent / "outer/inner").mkdir(parents=True)
    for name in ("unread", "grey"):
        (scans.parent / name).mkdir()
    for name in ("outer/a.png", "outer/inner/b.png", "unread/a.png", "unread/photo.HEIC", "grey/scan.pgm"):
        (scans.parent / name).write_bytes(b"x")
    with pytest.raises(error, match=told):
        read(source)
