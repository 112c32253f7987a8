"""Rows with different adapters: each gets what a model with its adapter merged computes."""

from functools import partial

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.config.switches import Switches
from rosebatch.core.errors import UserError
from rosebatch.model.adapters.adapter import read_adapter, require_by_row
from rosebatch.model.adapters.by_row import by_row
from rosebatch.model.dry_load import HEADERS, require_loadable
from rosebatch.model.quantization.forms import load_matrix
from rosebatch.model.quantization.rounded import in_fp8
from rosebatch.model.source import ModelSource
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.adapters import AdapterRows, Stack, StackedRows
from rosebatch_kernels.adapters import reference
from tests.engine.family_models import FAMILIES
from tests.model.adapters.test_merged import GPT2, PLAIN
from tests.model.adapters.written import ALPHA, embedding_pair, experts_pair, numbers, pair, write_adapter
from tests.model.quantization.same_logits import CPU, OPS, all_logits, write_both

# One is fused, one has [in, out], others have a gate in q, or layers with a state.
CASES = ["smollm3", "phi3", "gpt2", "qwen3_next", "falcon_h1", "gemma4"]
NEITHER = (*PLAIN, "embed_tokens", "wte", "lm_head", "mlp.gate.", "experts", "shared_expert_gate")
RANKS = {"one": 2, "two": 3}


def adapted(name, module, out, width):
    """A and B of an adapter's own for a module, and what they add; the second leaves some modules as they are."""
    rank = RANKS[name]
    if name == "two" and module.endswith(("k_proj", "up_proj", "c_attn")):
        return {}, 0
    a, b = numbers(f"{name} {module} a", rank, width), numbers(f"{name} {module} b", out, rank)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, ALPHA / rank * b @ a


def write_models(folder, family):
    """A base model, adapters of its products, and a model with the values of each of them."""
    config = msgspec.structs.replace(GPT2 if family == "gpt2" else FAMILIES[family], tie_word_embeddings=False)
    base, _ = write_both(folder, config, lambda name, values: ({name: (values * 64).round() / 64}, values))
    values, adapters, merged = load_file(base / "model.safetensors"), [], []
    for adapter in RANKS:
        tensors, own = {}, dict(values)
        for name, matrix in values.items():
            if matrix.ndim != 2 or any(part in name for part in NEITHER):
                continue
            turned = family == "gpt2"
            found, added = adapted(adapter, name.removesuffix(".weight"), *(matrix.T.shape if turned else matrix.shape))
            tensors |= found
            own[name] = matrix + (added.T if turned and found else added)
        adapters.append(read_adapter(adapter, write_adapter(folder / adapter, tensors, r=RANKS[adapter])))
        (folder / f"merged {adapter}").mkdir()
        save_file(
            {name: each.contiguous() for name, each in own.items()}, folder / f"merged {adapter}/model.safetensors"
        )
        merged.append(folder / f"merged {adapter}")
    return config, base, adapters, merged


def logits_of(config, weights, size, slot, *, stacked=False):
    """Those of nine rows of one adapter, by products or by stacks, as on a GPU."""
    if stacked:
        rows = StackedRows(len(RANKS), Switches.resolve({}, "cpu"))
        rows.add_, rows.gated = reference.add_, reference.gated
        rows.sort = partial(reference.sort_rows, count=len(RANKS))
        rows.set(*[torch.full((9,), slot, dtype=torch.int32)] * (slot > 0))
    else:
        rows = AdapterRows()
        assert rows.set([(slot, 4), (slot, 5)], CPU) == (slot > 0)
    return all_logits(config, weights, size, by_row(OPS, rows))[0]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", CASES)
def test_every_product_of_a_family(tmp_path, family, size):
    """Projections that are one product have ranks of their own; a rank has its rows of B, or its columns of A."""
    config, base, adapters, merged = write_models(tmp_path, family)
    headers = SafetensorsWeights(base, torch.float32, HEADERS, by_row=adapters)
    require_loadable(config, headers)
    headers.require_adapters()
    weights = SafetensorsWeights(base, torch.float32, CPU, by_row=adapters)
    alone = logits_of(config, weights, size, 0)
    weights.require_adapters()
    assert weights.unread == []
    assert torch.equal(alone, all_logits(config, SafetensorsWeights(base, torch.float32, CPU), size)[0])
    for slot, folder in enumerate(merged, 1):
        expected = all_logits(config, SafetensorsWeights(folder, torch.float32, CPU), size)[0]
        torch.testing.assert_close(logits_of(config, weights, size, slot), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(alone, expected, atol=0.1)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", CASES)
def test_stacks_of_a_family(tmp_path, family, size):
    """Outputs of one product have the ranks of their own projection, wherever they stand in it."""
    config, base, adapters, merged = write_models(tmp_path, family)
    weights = SafetensorsWeights(base, torch.float32, CPU, by_row=adapters)
    assert torch.equal(logits_of(config, weights, size, 0, stacked=True), logits_of(config, weights, size, 0))
    for slot, folder in enumerate(merged, 1):
        expected = all_logits(config, SafetensorsWeights(folder, torch.float32, CPU), size)[0]
        found = logits_of(config, weights, size, slot, stacked=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("family", CASES)
def test_memory_of_stacks(tmp_path, family, monkeypatch, slots):
    """What the plan counts is no less than what they take: K and V would have no room."""
    config, base, adapters, _ = write_models(tmp_path, family)
    source, made = ModelSource("m", config, base, "auto", torch.float32, adapters=tuple(adapters)), []

    def noted(a, b, parts):
        made.append(a.nbytes + b.nbytes)
        return make_stack(a, b, parts)

    make_stack = Stack.of
    monkeypatch.setattr(Stack, "of", noted)
    weights = SafetensorsWeights(base, torch.float32, CPU, by_row=adapters)
    all_logits(config, weights, 1, by_row(OPS, StackedRows(slots, Switches.resolve({}, "cpu"))))
    assert 0 < sum(made) <= slots * source.adapter_slot_bytes < 1.5 * sum(made)


@pytest.mark.parametrize("size", [1, 2])
def test_a_rounded_base(tmp_path, size):
    """Its numbers stay as the run has them: an adapter that is merged would be rounded with them."""
    config, base, adapters, _ = write_models(tmp_path, "smollm3")
    plain, rounding = (SafetensorsWeights(base, torch.float32, CPU, None, each) for each in (None, in_fp8))
    values = load_file(base / "model.safetensors")
    for name, matrix in values.items():
        if "proj" in name:
            values[name] = load_matrix(rounding, name, tuple(matrix.shape)).dense()
    (tmp_path / "decoded").mkdir()
    save_file(values, tmp_path / "decoded" / "model.safetensors")
    decoded = SafetensorsWeights(tmp_path / "decoded", torch.float32, CPU, by_row=adapters)
    adapted = SafetensorsWeights(base, torch.float32, CPU, None, in_fp8, by_row=adapters)
    assert not torch.equal(logits_of(config, adapted, size, 0), all_logits(config, plain, size)[0])
    for slot in (0, 1, 2):
        assert torch.equal(logits_of(config, adapted, size, slot), logits_of(config, decoded, size, slot))


# What each row cannot have of its own


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        ({"model.norm.weight": torch.ones(4)}, {}, r"modules_to_save \('base_model\.model\.model\.norm\.weight'\)"),
        ({"a.q_proj.bias": torch.ones(4)}, {}, r"bias \('base_model\.model\.a\.q_proj\.bias'\)"),
        (pair("lm_head", 6, 4)[0], {}, "an adapter of the embedding or the head"),
        (embedding_pair("model.embed_tokens", 6, 4)[0], {}, "an adapter of the embedding or the head"),
        (experts_pair("mlp.experts", 2, 6, 4)[0], {}, "an adapter of experts"),
        ({**pair("a.q_proj", 6, 4)[0], "a.q_proj.lora_B.bias": torch.ones(6)}, {}, "lora_bias"),
        ({**pair("a.q_proj", 6, 4)[0], "a.q_proj.lora_magnitude_vector": torch.ones(6)}, {}, "use_dora"),
        (
            {"a.token_adapter.trainable_tokens_delta": torch.ones(1, 4)},
            {"trainable_token_indices": [1]},
            "trainable_token_indices",
        ),
    ],
)
def test_what_is_merged_alone(tmp_path, tensors, fields, message):
    """Rows would get the model without it."""
    adapter = read_adapter("a", write_adapter(tmp_path, tensors, **fields))
    with pytest.raises(UserError, match=f"{message}.* for one --lora alone, which is merged: give its rows"):
        require_by_row(adapter)


@pytest.mark.parametrize("device", [CPU, HEADERS])
@pytest.mark.parametrize("module", ["mlp.gate", "mlp.experts.0.up_proj"])
def test_products_that_others_are_made_of(tmp_path, device, module):
    """A router and experts are read as values: what an adapter adds to them was dropped."""
    config = FAMILIES["qwen3_moe"]
    base, _ = write_both(tmp_path, config, lambda name, values: ({name: values}, values))
    values = load_file(base / "model.safetensors")
    name = next(name for name in values if name.endswith("mlp.gate.weight")).removesuffix("mlp.gate.weight") + module
    if "experts" in module:
        prefix = name.removesuffix(".0.up_proj")
        gate_up, down = (values.pop(f"{prefix}.{part}") for part in ("gate_up_proj", "down_proj"))
        for expert in range(len(down)):
            gate, up = gate_up[expert].chunk(2)
            parts = {"gate": gate, "up": up, "down": down[expert]}
            values |= {f"{prefix}.{expert}.{part}_proj.weight": each.contiguous() for part, each in parts.items()}
        save_file(values, base / "model.safetensors")
    folder = write_adapter(tmp_path / "a", pair(name, *values[f"{name}.weight"].shape)[0])
    weights = SafetensorsWeights(base, torch.float32, device, by_row=[read_adapter(each, folder) for each in "ab"])
    with pytest.raises(UserError, match=rf"{name}\.lora_A\.weight: of several adapters, only products of layers"):
        require_loadable(config, weights)


def test_each_adapter_needs_its_places(tmp_path):
    """The second one's names were those of the first, which had them asked for."""
    config = FAMILIES["smollm3"]
    base, _ = write_both(tmp_path, config, lambda name, values: ({name: values}, values))
    name = "model.layers.0.self_attn.q_proj"
    shape = load_file(base / "model.safetensors")[f"{name}.weight"].shape
    own, other = pair(name, *shape)[0], pair("model.layers.9.self_attn.q_proj", *shape)[0]
    adapters = [
        read_adapter("a", write_adapter(tmp_path / "a", own)),
        read_adapter("b", write_adapter(tmp_path / "b", {**own, **other})),
    ]
    weights = SafetensorsWeights(base, torch.float32, HEADERS, by_row=adapters)
    require_loadable(config, weights)
    with pytest.raises(UserError, match=r"/b/adapter_model.*layers\.9.* has no place in the model, nor have 1 others"):
        weights.require_adapters()


# Rows of a step


def test_rows_of_adapters(tmp_path):
    """Chunks of one adapter need not be neighbours, and rows of none stay as they are, to the bit."""
    _, base, adapters, _ = write_models(tmp_path, "smollm3")
    weights, rows = SafetensorsWeights(base, torch.float32, CPU, by_row=adapters), AdapterRows()
    name = "model.layers.0.mlp.down_proj.weight"
    shape = weights.shape(name)
    linear = by_row(OPS, rows).linear(load_matrix(weights, name, shape), None)
    x = numbers("x", 9, shape[1])
    expected = {slot: linear(x) for slot in (0, 1, 2) if (rows.set([(slot, 9)], CPU), True)}
    slots = [1, 0, 0, 2, 1, 1, 0, 2, 1]
    rows.set([(1, 1), (0, 2), (2, 1), (1, 2), (0, 1), (2, 1), (1, 1)], CPU)
    assert torch.equal(linear(x), torch.stack([expected[slot][row] for row, slot in enumerate(slots)]))
