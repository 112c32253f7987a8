"""Heads that do not fit, or that hold more than is read, are refused before anything is computed."""

import json

import pytest
import torch
from msgspec.structs import replace

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import UserError
from rosebatch.model.dry_load import HEADERS
from rosebatch.model.eagle3.config import find_eagle3
from rosebatch.model.source import ModelSource, find_model
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.select import select
from tests.helpers.eagle3_heads import DRAFTED, HEAD_DIM, HIDDEN, VOCAB, save_head, save_target
from tests.helpers.hub_cache import add_snapshot, without_network
from tests.helpers.shared_folder import make_once

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(shared_folder):
    return make_once(shared_folder / "eagle3-refused-target", lambda folder: save_target(folder) and None)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vocab_size": VOCAB + 1}, f"a head for a model with {VOCAB + 1} tokens, and --model has {VOCAB}"),
        ({"hidden_size": 48}, f"a head for a model with hidden size 48, and that of --model is {HIDDEN}"),
        ({"target_hidden_size": 80}, f"a head for a model with hidden size 80, and that of --model is {HIDDEN}"),
        ({"draft_vocab_size": VOCAB + 1}, f"draft_vocab_size {VOCAB + 1} is more than vocab_size {VOCAB}"),
        ({"draft_vocab_size": "all"}, "draft_vocab_size must be a whole number > 0, got 'all'"),
        ({"num_hidden_layers": 2}, "a head for drafts has one layer, num_hidden_layers is 2"),
        ({"architectures": ["LlamaForCausalLM"]}, "a head for drafts is one of EAGLE-3, .*'LlamaForCausalLM'"),
        ({"architectures": None}, "a head for drafts is one of EAGLE-3, .* this one has None"),
        ({"sliding_window": 512}, "sliding_window 512 is not supported in a head for drafts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* is not supported in a head"),
        ({"norm_before_fc": True}, "norm_before_fc True is not supported"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4]},
            r"the states before layers \[2, 4\] of a model that has 8",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, r"before layers \[2, 4, 8\] of a model that has 8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a", 4, 5]}}, r"before layers \['a', 5, 6\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        ({"eagle_config": 3}, "eagle_config is no object"),
    ],
)
def test_configs_that_are_refused(values, reason, target, tmp_path):
    """Heads of other kinds, or for other models, would draft nonsense without a word."""
    save_head(tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(UserError, match=reason):
        source_of(target, tmp_path / "head")


def test_a_head_in_place_of_a_model(tmp_path):
    """transformers tried to load it, and listed its tensors over a screen."""
    save_head(tmp_path / "head")
    with pytest.raises(UserError, match=f"holds a head for drafts alone: .* --speculative-model {tmp_path / 'head'}$"):
        find_model(RunConfig(model=str(tmp_path / "head")), CPU)


def test_a_model_with_too_few_layers(target, tmp_path):
    """Of six layers, the middle one is the high one too: the head takes three."""
    save_head(tmp_path / "head")
    config = replace(find_model(RunConfig(model=str(target)), CPU).config, num_layers=6)
    with pytest.raises(UserError, match=r"takes the states before layers \[2, 3, 3\] of a model that has 6"):
        find_eagle3(str(tmp_path / "head"), config, quiet=True, weights=True)


IDS = torch.arange(DRAFTED)
OFFSETS = torch.full((DRAFTED,), VOCAB - DRAFTED)


def source_of(target, head):
    return find_model(RunConfig(model=str(target), speculative_model=str(head), dtype="float32"), CPU)


NO_PLACE = "a head for drafts has no place for tensor"
OF_HEADERS = [
    ({"midlayer.self_attn.q_norm.weight": torch.ones(HEAD_DIM)}, {}, f"{NO_PLACE} 'midlayer.self_attn.q_norm.weight'"),
    ({"layers.1.input_layernorm.weight": torch.ones(HIDDEN)}, {}, f"{NO_PLACE} 'layers.1.input_layernorm.weight'"),
    ({"midlayer.hidden_norm.weight": None}, {}, "weights have no tensor 'model.midlayer.hidden_norm.weight'"),
    ({"fc.weight": torch.ones(HIDDEN, HIDDEN)}, {}, r"'fc.weight' has shape \(64, 64\), config says \(64, 192\)"),
    ({"lm_head.weight": None}, {}, f"weights have no tensor 'lm_head.weight', for {DRAFTED} of {VOCAB} tokens"),
    ({"d2t": None}, {}, f"weights have no tensor 'd2t', for {DRAFTED} of {VOCAB} tokens"),
    ({"t2d": torch.ones(VOCAB - 1, dtype=torch.bool)}, {}, rf"'t2d' has shape \({VOCAB - 1},\)"),
    ({}, {"hidden_size": 48, "target_hidden_size": HIDDEN}, "'embed_tokens.weight': the head has 48 .* for 64"),
]
OF_VALUES = [
    ({"midlayer.mlp.up_proj.bias": torch.ones(88)}, "mlp.up_proj.bias: the weights have it"),
    ({"d2t": OFFSETS + 1}, f"tensor 'd2t' does not lead to {DRAFTED} of {VOCAB} tokens"),
    ({"d2t": -IDS}, f"tensor 'd2t' does not lead to {DRAFTED} of {VOCAB} tokens"),
    ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "tensors 'd2t' and 't2d' disagree"),
]


@pytest.mark.parametrize(("tensors", "options", "reason"), OF_HEADERS)
def test_weights_that_are_refused_by_their_headers(tensors, options, reason, target, tmp_path):
    """A tensor that nobody reads is of a head that computes something else."""
    save_head(tmp_path / "head", tensors, **options)
    source = source_of(target, tmp_path / "head")
    for load in (built, ModelSource.require_loadable):
        with pytest.raises(UserError, match=reason):
            load(source)


@pytest.mark.parametrize(("tensors", "reason"), OF_VALUES)
def test_weights_that_are_refused_by_their_values(tensors, reason, target, tmp_path):
    """A table of tokens that is broken drafted tokens that the model does not have."""
    save_head(tmp_path / "head", tensors)
    with pytest.raises(UserError, match=reason):
        built(source_of(target, tmp_path / "head"))


def built(source):
    ops = select(Switches.resolve({}, "cpu"))
    return source.build_head(source.build(ops, CPU), ops, CPU)


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        ({}, {}),
        ({"t2d": None}, {}),
        ({"lm_head.weight": None}, {"draft_vocab_size": None}),
        ({"lm_head.weight": None}, {"draft_vocab_size": None, "tie_word_embeddings": True, "own_embedding": True}),
        ({"fc.bias": torch.ones(HIDDEN)}, {"bias": True}),
        ({}, {"hidden_size": 48, "target_hidden_size": HIDDEN, "own_embedding": True}),
        ({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(12)}, {}),
    ],
)
def test_forms_that_are_served(tensors, options, target, tmp_path):
    """Heads share what they lack with the model, and may be narrower than it."""
    save_head(tmp_path / "head", tensors, **options)
    source = source_of(target, tmp_path / "head")
    source.require_loadable()
    head = built(source)
    size = source.head.shape.hidden_size
    tokens, before = torch.tensor([3, 5]), head.combine(torch.randn(2, 3 * HIDDEN))
    assert before.shape == (2, size)
    q, _, _ = head.project(tokens, before, torch.tensor([4, 200]))
    guesses, hidden = head.finish(before, q.flatten(1))
    assert hidden.shape == (2, size) and guesses.max() < VOCAB


def test_planned_weights_are_those_of_the_files(target, tmp_path):
    """Before a head is downloaded, its memory is planned by its shape; afterwards by its tensors."""
    save_head(tmp_path / "head", {"d2t": None, "t2d": None}, draft_vocab_size=None)
    source = source_of(target, tmp_path / "head")
    weights = SafetensorsWeights(tmp_path / "head", torch.float32, HEADERS)
    stored = source.head.num_weights
    norms = 4 * HIDDEN
    assert stored == sum(weights.get(name, weights.shape(name)).numel() for name in weights.names())
    (tmp_path / "head" / "model.safetensors").unlink()
    assert source.head.num_weights == stored - norms


def test_a_pickled_head(target, tmp_path):
    """transformers' ``save_pretrained``, which was the way out for models, knows no such class."""
    save_head(tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"pytorch_model.bin is not read, for it may run code; docs/speculation.md says"
    ):
        source_of(target, tmp_path / "head")


def test_heads_of_the_hub(target, tmp_path, monkeypatch):
    """Without a tokenizer, which no head has, a cached one was looked for on the network in each run."""
    cache = without_network(monkeypatch, tmp_path / "cache")
    save_head(tmp_path / "head")
    files = {each.name: each.read_bytes() for each in (tmp_path / "head").iterdir()}
    folder = add_snapshot(cache, files, name="org/head")
    assert source_of(target, "org/head").head.folder == folder
    add_snapshot(cache, {"config.json": files["config.json"]}, name="org/pickled")
    with pytest.raises(UserError, match=r"^--speculative-model org/pickled: .*; docs/speculation.md says how pytorch"):
        source_of(target, "org/pickled")


PUBLISHED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}


def test_the_published_config(target, tmp_path):
    """Positions turn as in the head's training, by Llama's first base, and reach as far as the model's."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    model = find_model(RunConfig(model=str(target)), CPU).config
    model = replace(model, vocab_size=128256, hidden_size=4096, num_layers=32, max_model_len=131072)
    head = find_eagle3(str(tmp_path), model, quiet=True, weights=True)
    assert (head.layers, head.draft_vocab_size, head.target_size) == ((2, 16, 29), 32000, 4096)
    assert (head.shape.rope.theta, head.shape.rope.scaling, head.shape.max_model_len) == (10000.0, "default", 131072)
    assert head.planes == ((8, 128, 2, None), (1, 4096, 1, None)) and not head.fc_bias and not head.norms_residual


def test_a_head_that_is_not_there(target, tmp_path):
    with pytest.raises(UserError, match=r"--speculative-model .*/nowhere: no such folder; give a folder or"):
        source_of(target, tmp_path / "nowhere")
