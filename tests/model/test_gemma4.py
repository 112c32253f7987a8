"""Gemma 4's layers that share keys: of a prompt, only rows that are read go through them."""

import torch

from rosebatch.config.switches import Switches
from rosebatch.model.contract import LayerStates
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import build_model
from rosebatch.ops.select import select
from tests.engine.family_models import FAMILIES

IDS, WANTED = torch.arange(9), torch.tensor([3, 8], dtype=torch.int32)


def forward(asked=(), **options):
    """The result, the states of the layers asked for, and what layers that share keys got: q of all rows."""
    model = build_model(FAMILIES["gemma4_e"], select(Switches.resolve({}, "cpu")), RandomWeights(torch.float32, "cpu"))
    queries = []

    def attend(spec, qkv, wanted=None):
        assert len(qkv) == len(IDS)
        if spec.shares:
            queries.append(qkv)
        out = qkv[:, : spec.num_heads * spec.head_dim].tanh()
        return out if wanted is None else out[wanted]

    states = LayerStates(asked) if asked else None
    with torch.inference_mode():
        out = model.forward(IDS, IDS, attend, states=states, **options)
    return out, states and states.joined(), queries


def test_rows_that_nobody_reads_are_left_out():
    """Attention takes all rows: those of others would cost as much as theirs, or be read as another's."""
    whole, _, every = forward()
    found, _, queries = forward(wanted=WANTED)
    torch.testing.assert_close(found, whole[WANTED])
    others = torch.tensor([row not in WANTED for row in range(len(IDS))])
    assert len(queries) == len(every) == 2
    for few, all_rows in zip(queries, every, strict=True):
        torch.testing.assert_close(few[WANTED], all_rows[WANTED])
        assert not few[others].any() and all_rows[others].all()


def test_states_are_of_all_rows():
    """A head that drafts reads them for each token of a prompt."""
    whole, states, _ = forward((1, 3))
    found, same, _ = forward((1, 3), wanted=WANTED)
    torch.testing.assert_close(found, whole[WANTED])
    torch.testing.assert_close(same, states)
    assert states.shape == (9, 64)
