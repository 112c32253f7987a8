"""``python -m benchmarks.kernels.linear --whole``: which sizes it tries and takes, without a GPU."""

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.kernels import linear
from benchmarks.kernels.linear import Whole
from rosebatch_kernels.common.device import INTERPRETER
from rosebatch_kernels.linear.sizes import Program

PRODUCTS = {"plain": Whole(128, 48), "down": Whole(64, 48, "onto"), "gate, up": Whole(64, 96, "silu_mul")}
PROGRAMS = [Program(16, 16, 64, 1, 3, None), Program(16, 32, 64, 2, 4, None), Program(64, 16, 64, 4, 3, 255)]


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Whole numbers, whose sums are exact in any order, and times that go by the program's stages."""
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(linear, "_BYTES", 0)
    monkeypatch.setattr(
        linear, "randn", lambda *shape: torch.randint(-3, 4, shape, generator=generator).to(torch.float16)
    )
    monkeypatch.setattr(linear, "compile_for", lambda launch_all, shape: launch_all())
    monkeypatch.setattr(linear, "in_turns_us", lambda step, inputs, **options: 1.0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_sizes_with_other_bits_are_left_out(name, on_a_cpu, monkeypatch, capsys):
    """The fastest sizes would break what the switch promises; a residual that keeps growing would hide or fake that."""
    monkeypatch.setattr(linear, "_first_tries", lambda step, _: PROGRAMS)
    monkeypatch.setattr(linear, "_more_tries", lambda *_: [])
    whole, of = PRODUCTS[name], linear._Step.of

    def wrong(self, program):
        right = of(self, program)
        return right if program != PROGRAMS[1] else lambda weight: right(weight).add_(1)

    monkeypatch.setattr(linear._Step, "of", wrong)
    linear._sweep("model", {name: whole}, [1, 8], INTERPRETER)
    out, err = capsys.readouterr()
    for rows in (1, 8):
        lines = [line.split("µs  ")[1] for line in out.splitlines() if f"{name} T={rows} " in line]
        assert lines[:2] == [linear._words(PROGRAMS[0]), linear._words(PROGRAMS[2])]
        assert lines[2].endswith("in use") and lines[3:] == ["cuBLAS"]
    assert err.count("other bits") == 2


@pytest.mark.parametrize("rows", linear._WHOLE_ROWS)
def test_what_is_tried_fits(rows, on_a_cpu):
    """A program without room for its stages would only cost the time to compile it."""
    for products in linear._WHOLE.values():
        for whole in products.values():
            step = linear._Step(Whole(64, 64), rows, INTERPRETER)
            step.whole = whole
            tries = linear._first_tries(step, [])
            assert len(set(tries)) == len(tries) > 5
            more = linear._more_tries(step, [(2.0, tries[0]), (1.0, tries[-1])])
            assert more and not {*more} & {*tries} and {each.columns for each in more} == {tries[-1].columns}
            for program in (*tries, *more):
                assert program.rows >= min(rows, 64) and 3 <= program.stages <= 8
                tile = program.rows + program.columns * (2 if whole.follows == "silu_mul" else 1)
                assert 2 * program.depth * program.stages * tile <= INTERPRETER.shared_memory


def test_nothing_more_is_tried_where_nothing_was_right():
    assert linear._more_tries(None, []) == []
