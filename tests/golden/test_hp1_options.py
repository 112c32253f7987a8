"""HP1 with every option of the article, against ``PlainHP1`` in float64, on random tiny checkpoints."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.core.errors import UserError
from tests.helpers.plain_hp1 import Forms, PlainHP1
from tests.helpers.reference import clear, generate
from tests.helpers.running import greedy

SIZES = {
    "vocab_size": 89,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CHANNELS = ("each", "one", "mixed")
FORMS = [Forms(*forms) for forms in product(CHANNELS, CHANNELS, ("sigma", "sigma-layer", "taps", "taps-layer"))]
BOUNDS = [(0.0, 1.0), (-0.3, 0.2), (0.05, 0.4), (-0.4, -0.1)]
GATES = [
    {"fir_k": taps, "relu_pre": relu_pre, "clip_min": minimum, "clip_max": limit}
    for taps, relu_pre, (minimum, limit) in product((1, 2, 3, 4, 5, 8), (True, False), BOUNDS)
]
# A sixteenth of the pairs: each form meets three gates, and each two settings meet with each two of their values.
CASES = [
    (form, gate) for (i, form), (j, gate) in product(enumerate(FORMS), enumerate(GATES)) if (i + j + j // 8) % 16 == 0
]
PARTS = 27
NEW_TOKENS = 6
# Lengths within the longest filter and past it.
LENGTHS = (1, 2, 3, 5, 8, 13, 30)
MARGIN = 1e-4


def prompts(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(SIZES["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_option(part, make_engine, tmp_path):
    """A form of a weight or a setting that is read wrongly, or not at all, would be another model without a word."""
    compared = 0
    for number in range(part, len(CASES), PARTS):
        forms, gate = CASES[number]
        folder = tmp_path / str(number)
        folder.mkdir()
        PlainHP1.random({**SIZES, **gate}, number, forms).save_pretrained(folder)
        plain = PlainHP1.from_pretrained(folder, torch.float64)
        given = prompts(number)
        # In float64; rounding to fp32 may not decide.
        expected = clear(*generate(plain, given, NEW_TOKENS), MARGIN)
        limits = {"chunk": 7, "block_size": 2} if number % 2 else {}
        found = greedy(make_engine(folder, **limits), given, NEW_TOKENS)
        assert {i: found[i] for i in expected} == expected, (forms, gate)
        compared += len(expected)
    assert compared > len(LENGTHS) * len(CASES) / PARTS * 0.9


def saved(tmp_path, forms=None, changed=None, **gate):
    """The folder of a random model with some tensors changed; None leaves one out."""
    PlainHP1.random({**SIZES, **gate}, 1, forms).save_pretrained(tmp_path)
    weights = {**load_file(tmp_path / "model.safetensors"), **(changed or {})}
    save_file({n: w for n, w in weights.items() if w is not None}, tmp_path / "model.safetensors")
    return tmp_path


def test_numbers_in_place_of_vectors(make_engine, greedy_tokens, tmp_path):
    """A clip with one number for all channels is the one whose vectors repeat it: q with k as a vector, as well."""
    prefix, folders = "model.layers.1.", [tmp_path / name for name in ("one", "each")]
    sizes = {"pre_mlp_layernorm": SIZES["hidden_size"], "self_attn.q_norm": SIZES["head_dim"]}
    tokens = []
    for folder in folders:
        folder.mkdir()
        changed = {"model.layers.1.self_attn.k_norm.gamma": torch.linspace(0.5, 1.5, SIZES["head_dim"])}
        for (name, size), part in product(sizes.items(), ("alpha", "gamma")):
            number = torch.tensor(0.75)
            changed[f"{prefix}{name}.{part}"] = number if folder.name == "one" else number.repeat(size)
        tokens.append(greedy_tokens(make_engine(saved(folder, changed=changed)), prompts(0)))
    assert tokens[0] == tokens[1]


def test_taps_that_are_the_mean(make_engine, tmp_path):
    """Sigma is a short form of taps that are all alike, so both checkpoints have the same gate."""
    sigma = torch.tensor([0.3, 0.9, 1.5, 0.6])
    gates = []
    for name, tensor in (("sigma", sigma), ("taps", (sigma / 5)[:, None].repeat(1, 5))):
        folder = tmp_path / name
        folder.mkdir()
        changed = {"model.layers.0.self_attn.sigma": None, f"model.layers.0.self_attn.{name}": tensor}
        gates.append(make_engine(saved(folder, changed=changed, fir_k=5)).runner.model.layers[0].attention.gate)
    assert torch.equal(gates[0].taps, gates[1].taps)
    assert gates[0].taps.shape == (4, 5)


@pytest.mark.parametrize(
    ("tensor", "shape", "wanted"),
    [
        ("taps", (4, 3), "(4, 5)"),
        ("taps", (3,), "(5,)"),
        ("taps", (), "(5,)"),
        ("taps", (2, 5), "(4, 5)"),
        ("gamma", (2,), "(4,)"),
        ("q_norm.gamma", (4,), "(8,)"),
        ("q_norm.alpha", (1, 8), "(8,)"),
    ],
)
@pytest.mark.whole
def test_shapes_that_fit_nothing(tensor, shape, wanted, make_engine, tmp_path):
    """Repeated or cut off, they would make another model: the message names the tensor and both shapes."""
    changed = {f"model.layers.0.self_attn.{tensor}": torch.ones(shape)}
    with pytest.raises(UserError) as refusal:
        make_engine(saved(tmp_path, Forms(filter="taps"), changed, fir_k=5))
    said = str(refusal.value)
    assert f"'model.layers.0.self_attn.{tensor}' has shape {shape}, config says {wanted}" in said


@pytest.mark.parametrize("taps", [0, 9, -1])
def test_filters_that_no_kernel_takes(taps, make_engine, tmp_path):
    """The state of a longer filter would not fit a thread's registers."""
    with pytest.raises(UserError, match=rf"fir_k must be in \[1, 8\], got {taps}"):
        make_engine(saved(tmp_path, fir_k=taps))
