"""End tokens that the model cannot sample."""

import numpy as np
import torch
from msgspec.structs import replace

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.build import LoadedModel, build_engine
from rosebatch.engine.plan import SequenceSpec
from rosebatch.engine.sampling.logits import count_cells
from rosebatch.ops.select import select
from rosebatch.text.token_bans import BanConstraint, find_bans
from tests.engine.toy_model import CONFIG, CPU, VOCAB, ToyModel

# Some configs have -1 for none; some tokenizers have more tokens than the model.
ODD = (-1, VOCAB, VOCAB + 40, 10**9)


def test_rows_that_use_the_end_tokens():
    """A row with a least length or with bans ended the run with an IndexError."""
    switches = Switches.resolve({}, "cpu")
    ops = select(switches)
    limits = RunConfig(device="cpu", max_num_seqs=2, block_size=4, kv_cache_memory=1 << 20)
    config = replace(CONFIG, eos_token_ids=(*ODD, 7))
    engine = build_engine(LoadedModel(ToyModel(ops), config, ops, torch.float32, CPU), limits, switches).engine
    assert engine.eos_token_ids == {7}
    bans = find_bans(None, (), (7, 9), VOCAB, engine.eos_token_ids)
    sampling = SamplingParams(max_tokens=5, min_tokens=4)
    engine.add(Request(0, (3, 1, 4), sampling))
    engine.add(Request(1, (3, 1, 4), sampling), constraint=lambda: BanConstraint(bans, None))
    done = {completion.request.id: completion.token_ids for completion in engine.run([])}
    assert 4 <= len(done[0]) <= 5 and done[1][:4] == (9,) * 4


def test_marks_and_bans_of_such_ids():
    """Where another reader of them lets one through, neither may index with it."""
    spec = SequenceSpec(0, (1, 2), SamplingParams(), max_len=9, stop_ids=frozenset({*ODD, 7}))
    ids, values = count_cells(spec, [], VOCAB)
    assert sorted(ids.tolist()) == [1, 2, 7] and len(values) == 3
    bans = find_bans(None, (), (9,), VOCAB, frozenset({*ODD, 7}))
    assert np.flatnonzero(np.unpackbits(bans.ends.view(np.uint8), bitorder="little")).tolist() == [7]
