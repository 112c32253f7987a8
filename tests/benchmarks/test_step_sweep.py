"""Sizes of kernels' programs, changed for a while."""

from unittest.mock import Mock

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")
from benchmarks import step_sweep
from benchmarks.step_sweep import changed, parse_change
from rosebatch.core.errors import FlagError
from rosebatch_kernels.common.device import INTERPRETER
from rosebatch_kernels.common.sizes import Program
from rosebatch_kernels.linear import sizes as linear
from rosebatch_kernels.linear.streamed import StreamedLinear
from rosebatch_kernels.paged_attention import sizes as attention
from tests.engine.small_models import device_engine, plain_engine


def test_a_change_reaches_engines_that_are_launched():
    """One that goes by its own copy would be timed as if nothing had changed."""
    text = "linear.part_depth=64 + linear.part_columns=32+decode.group=(64, 4, 2)+linear.onto=(32, 16, 256, 2, 6, None)"
    change = parse_change(text)
    before = linear.SIZES, attention.SIZES
    with changed(change):
        weight = torch.empty(8, 8, dtype=torch.float16)
        found = StreamedLinear(weight, None, INTERPRETER)._sizes
        assert (found.part_depth, found.part_columns) == (64, ((0, 32),))
        assert linear.program_of_parts(32, 1024, 2048, sizes=found)[1][:3] == (64, 32, 64)
        assert found.onto == ((0, linear.Program(32, 16, 256, 2, 6, None)),)
        assert attention.SIZES.measured.decode.group == Program(64, 4, 2)
    assert before == (linear.SIZES, attention.SIZES)


def test_sizes_come_back_after_an_error():
    before = linear.SIZES
    with pytest.raises(ZeroDivisionError), changed(parse_change("linear.part_depth=64")):
        raise ZeroDivisionError
    assert linear.SIZES is before


@pytest.mark.parametrize(
    "text", ["linear.size=3", "product.rows=3", "linear.programs=many", "rows=3", "linear.programs"]
)
def test_changes_that_mean_nothing(text):
    with pytest.raises(FlagError, match="--change"):
        parse_change(text)


def prompts_of(**sizes):
    """The prompts of each run of a timed engine."""
    engine = plain_engine("llama")
    engine.run = Mock(side_effect=engine.run)
    step_sweep.time_steps(engine, steps=4, repeats=1, **sizes)
    return [[request.prompt_token_ids for request in call.args[0]] for call in engine.run.call_args_list]


def test_rows_share_the_prefix_alone():
    """Rows that were alike would share all of their keys."""
    runs = prompts_of(rows=2, prompt_len=[3], shared_prefix_len=4)
    first, second = runs[-1]
    assert first[:4] == second[:4] == (1, 1, 1, 1)
    assert len(first) == len(second) == 7
    assert first[4:] != second[4:]
    assert runs[0] == [first, second]


@pytest.mark.thorough
def test_each_change_is_a_line(capsys):
    """Between two lines without a change, which tell the noise."""
    sizes = {"rows": 1, "prompt_len": [3], "steps": 2, "repeats": 1}
    step_sweep.run(lambda: device_engine("llama"), ["norm.tile=64", "decode.splits=1"], **sizes)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ms  ")[1] for line in lines] == ["no change", "norm.tile=64", "decode.splits=1", "no change"]
    assert all(line.startswith("step ") and "  prompts " in line for line in lines)


def test_rows_take_the_lengths_in_turn():
    assert list(map(len, prompts_of(rows=3, prompt_len=[2, 5])[-1])) == [2, 5, 2]


def test_a_change_that_breaks_a_row_is_no_figure():
    """More splits than there is memory for once made rows end early, and their steps looked fast."""
    engine = plain_engine("llama")
    real = engine.run
    engine.run = lambda requests: [replace(each, token_ids=each.token_ids[:2]) for each in real(requests)]
    with pytest.raises(AssertionError, match="breaks"):
        step_sweep.time_steps(engine, rows=2, prompt_len=[3], steps=4, repeats=1)
