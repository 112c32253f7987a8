"""Whatever happens to the bytes of a part file, a resumed run ends like one without a break, or refuses."""

import json
import random
from dataclasses import dataclass

import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.output import FileOutput
from rosebatch.io.part_file import PartFile
from rosebatch.io.part_lines import encode_row
from rosebatch.io.placement import Placement, write_jsonl

ROWS = 60
MANIFEST = {"created": 1_700_000_000, "input": "9f86d081", "sampling": {"temperature": 1.0}}


def compute(index):
    """What a model would: the row depends on nothing but its index."""
    rng = random.Random(index)
    row = {"id": f"id {index}", "index": index, "text": "é\n]," * rng.randrange(9), "n": [rng.random()]}
    return ({**row, "error": {"code": "x"}}, True) if rng.random() < 0.1 else (row, False)


@dataclass
class Run:
    """A run over some rows with an output and a file of error rows."""

    path: object

    def outputs(self):
        return [p.read_bytes() for p in (self.path, self.errors) if p.exists()]

    @property
    def part_path(self):
        return self.path.with_name(self.path.name + ".part")

    @property
    def errors(self):
        return self.path.with_name("errors.jsonl")

    def open(self, part):
        return FileOutput(part, Placement(self.path, write_jsonl, errors=self.errors))

    def leave(self):
        """Ends in the middle: rows in the order in which they finished, some of them missing."""
        output = self.open(PartFile.create(self.part_path, lambda: MANIFEST))
        order = sorted(range(ROWS), key=lambda index: index + random.Random(index).uniform(0, 20))
        for index in order[: ROWS - 10]:
            row, failed = compute(index)
            output.add(index, row, failed=failed)
        output.flush()
        output.close()
        return self.part_path.read_bytes()

    def resume(self, content):
        """Goes on with these bytes; returns the outputs, or None if it refuses."""
        for each in self.path.parent.iterdir():
            each.unlink()
        self.part_path.write_bytes(content)
        try:
            part = PartFile.reopen(self.part_path)
        except UserError as error:
            assert self.part_path.read_bytes() == content, "a refusal changes nothing"
            assert "delete it" in str(error)
            return None
        if part is None:
            part = PartFile.create(self.part_path, lambda: MANIFEST)
        assert part.manifest == MANIFEST
        output = self.open(part)
        for index in range(ROWS):
            if index not in output:
                row, failed = compute(index)
                output.add(index, row, failed=failed)
        assert (output.num_rows, output.num_failed) == (ROWS, sum(compute(index)[1] for index in range(ROWS)))
        output.finish()
        return self.outputs()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "out.jsonl")


@pytest.fixture
def left(run):
    return run.leave()


@pytest.fixture
def whole(run, left):
    """The outputs without damage, as they are written from the rows."""
    good, bad = ([compute(i)[0] for i in range(ROWS) if compute(i)[1] == failed] for failed in (False, True))
    found = run.resume(left)
    assert [[json.loads(line) for line in content.splitlines()] for content in found] == [good, bad]
    return found


def samples(few, many):
    """The counts of the fast tier and of the thorough one."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.thorough)])


@samples(150, 1000)
def test_flipped_bits(run, left, whole, count):
    """Of 6,000 flips, 5,434 were accepted and changed the output, 64 lost rows, 18 added some."""
    rng, refused, end = random.Random(0), 0, left.index(b"\n") + 1
    for _ in range(count):
        at, content = rng.randrange(len(left)), bytearray(left)
        content[at] ^= 1 << rng.randrange(8)
        found = run.resume(bytes(content))
        assert found in (None, whole)
        assert (found is None) == (at < end), "only a damaged first line ends the run"
        refused += found is None
    assert 0 < refused < count / 10


@samples(20, 500)
def test_duplicated_lines(run, left, whole, count):
    """A line that was there twice lost other rows in 492 of 500 cases."""
    rng, lines = random.Random(1), left.splitlines(keepends=True)
    for _ in range(count):
        line = rng.randrange(1, len(lines))
        found = lines.copy()
        found.insert(rng.randint(1, len(lines)), lines[line])
        assert run.resume(b"".join(found)) == whole


@samples(20, 500)
def test_swapped_lines(run, left, whole, count):
    """The order of rows in the file means nothing; a manifest that is not first ends the run."""
    rng, lines = random.Random(2), left.splitlines(keepends=True)
    for _ in range(count):
        one, other = rng.sample(range(len(lines)), 2)
        found = lines.copy()
        found[one], found[other] = found[other], found[one]
        assert run.resume(b"".join(found)) == (whole if one and other else None)


@pytest.mark.parametrize("with_end", [False, True])
@samples(20, 250)
def test_zeroed_lines(run, left, whole, count, with_end):
    """A block that never reached the disk reads as zeros."""
    rng, lines = random.Random(3), left.splitlines(keepends=True)
    for _ in range(count):
        line = rng.randrange(len(lines))
        found = lines.copy()
        found[line] = bytes(len(lines[line])) if with_end else bytes(len(lines[line]) - 1) + b"\n"
        assert run.resume(b"".join(found)) == (whole if line else None)


def test_lines_of_another_run(run, left, whole, tmp_path):
    """After a power cut a block may hold what a deleted part file had there: its rows are of another run."""
    lines = left.splitlines(keepends=True)
    other = Run(tmp_path / "other.jsonl")
    part = PartFile.create(other.part_path, lambda: {**MANIFEST, "created": 1})
    row = {"text": "of another run"}
    part.append_lines(range(ROWS), [encode_row(index, row, part.begin(), failed=False) for index in range(ROWS)], ())
    part.sync()
    part.close()
    foreign = other.part_path.read_bytes().splitlines(keepends=True)
    assert run.resume(b"".join([lines[0], *foreign[1:20], *lines[20:]])) == whole


def test_damaged_lines_are_counted(run, left):
    """The user must hear of a disk that fails. A torn last line is what every crash leaves: not worth a word."""
    lines = left.splitlines(keepends=True)
    for damaged in (3, 8, 9):
        lines[damaged] = lines[damaged].replace(b"index", b"indey")
    run.part_path.write_bytes(b"".join(lines) + b"[7,0,{")
    part = PartFile.reopen(run.part_path)
    assert (part.num_damaged, part.num_rows) == (3, len(lines) - 4)
    part.close()


def test_damage_during_the_run(run, left, whole):
    """A line that goes bad after it was counted must not be left out of the output, nor hang the search for it."""
    run.path.unlink()
    run.part_path.write_bytes(left)
    output = run.open(PartFile.reopen(run.part_path))
    content = left.replace(b'"id 7"', b'"id 8"')
    assert content != left
    run.part_path.write_bytes(content)
    with pytest.raises(UserError, match="lines were damaged during the run; rerun with --resume to compute them again"):
        output.finish()
    output.close()
    assert not run.path.exists()
    assert run.resume(content) == whole
