"""A model with an adapter computes what one with the merged weights does, to the bit."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.core.errors import UserError
from rosebatch.model.adapters.adapter import read_adapter
from rosebatch.model.dry_load import HEADERS, require_loadable
from rosebatch.model.hf.config import parse_model_config
from rosebatch.model.quantization.forms import form_of, load_weight
from rosebatch.model.quantization.rounded import in_fp8
from rosebatch.model.weights import SafetensorsWeights, Take
from tests.engine.family_models import FAMILIES
from tests.model.adapters.written import ALPHA, RANK, embedding_pair, experts_pair, numbers, pair, write_adapter
from tests.model.quantization.numbers import RANKS
from tests.model.quantization.same_logits import CPU, all_logits, write_both

# One is fused, one has [in, out], one keeps [E, in, out], others have experts, a gate of them or layers with a state.
CASES = ["smollm3", "phi3", "gpt2", "gpt_oss", "qwen3_moe", "mixtral", "qwen3_next", "falcon_h1", "gemma4_moe"]
CASES += ["lfm2_moe", "kimi_linear"]
# Whatever is no product with a weight.
PLAIN = ("norm", "wpe", "conv1d", "conv.conv", "bias", "sinks", "A_log")
GPT2 = parse_model_config(
    {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 40,
    },
    "gpt2",
)


def write_models(folder, family):
    """A base model, an adapter of all its products and the embedding, and a model with the values of both."""
    tensors = {}

    def encode(name, values):
        base = (values * 64).round() / 64
        if any(part in name for part in PLAIN):
            return {name: base}, base
        module = name.removesuffix(".weight")
        if values.ndim == 3:
            # transformers nests the wrappers of a module's parameters.
            owner = f"{module.rpartition('.')[0]}{'.base_layer' if 'gate_up' in name else ''}"
            turned = family == "gpt_oss"
            count, *sizes = values.shape
            found, added = experts_pair(owner, count, *(sizes[::-1] if turned else sizes))
        elif module.endswith(("embed_tokens", "wte")):
            turned, (found, added) = False, embedding_pair(module, *values.shape)
        else:
            turned = family == "gpt2" and "lm_head" not in name
            found, added = pair(module, *(values.shape[::-1] if turned else values.shape))
        tensors.update(found)
        return {name: base}, base + (added.mT if turned else added)

    config = GPT2 if family == "gpt2" else FAMILIES[family]
    config = msgspec.structs.replace(config, tie_word_embeddings=False)
    base, whole = write_both(folder, config, encode)
    return config, base, whole, write_adapter(folder / "adapter", tensors)


def source(folder, adapter, dtype=torch.float32, device=CPU, **options):
    """The weights of a folder with an adapter."""
    return SafetensorsWeights(folder, dtype, device, adapter=read_adapter("a", adapter), **options)


@pytest.mark.parametrize("rounding", [None, in_fp8])
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("family", CASES)
def test_every_product_of_a_family(tmp_path, family, size, rounding):
    """Each rank reads its rows or columns of W, B and A; some orders of rows are attention's own."""
    config, base, whole, adapter = write_models(tmp_path, family)
    headers = source(base, adapter, device=HEADERS)
    require_loadable(config, headers)
    headers.require_adapters()
    weights = source(base, adapter, rounding=rounding)
    found = all_logits(config, weights, size)
    weights.require_adapters()
    assert weights.unread == []
    expected = all_logits(config, SafetensorsWeights(whole, torch.float32, CPU, rounding=rounding), size)
    assert all(torch.equal(each, same) for each, same in zip(found, expected, strict=True))
    plain = all_logits(config, SafetensorsWeights(base, torch.float32, CPU, rounding=rounding), size)
    assert not any(torch.allclose(each, other, atol=0.1) for each, other in zip(found, plain, strict=True))


def store_apart(folder):
    """Experts of a folder as most files have them: a tensor for each, where transformers has one of all in memory."""
    apart = {}
    for name, values in load_file(folder / "model.safetensors").items():
        own, _, parameter = name.rpartition(".")
        if not own.endswith("mlp.experts"):
            apart[name] = values
            continue
        for expert, matrix in enumerate(values):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if "gate" in parameter else [("down", matrix)]
            apart |= {f"{own}.{expert}.{part}_proj.weight": each.contiguous() for part, each in parts}
    save_file(apart, folder / "model.safetensors")


@pytest.mark.parametrize("rounding", [None, in_fp8])
def test_experts_that_are_stored_apart(tmp_path, rounding):
    """PEFT trains transformers' tensor of all experts."""
    config, base, whole, adapter = write_models(tmp_path, "qwen3_moe")
    store_apart(base)
    found = all_logits(config, source(base, adapter, rounding=rounding), 2)
    expected = all_logits(config, SafetensorsWeights(whole, torch.float32, CPU, rounding=rounding), 2)
    assert all(torch.equal(each, same) for each, same in zip(found, expected, strict=True))


def test_they_are_rounded_once(tmp_path):
    """Experts were in the dtype of the run before the adapter came."""
    config, base, whole, adapter = write_models(tmp_path, "qwen3_moe")
    write_adapter(adapter, adapter_tensors(adapter), lora_alpha=ALPHA / 64)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, whole))
    for name, values in before.items():
        added = (after[name] - values) / 64
        if "experts" in name:
            # Less than half of the last bit of bf16.
            values += 1 + 2**-9
        after[name] = values + added
    save_file(before, base / "model.safetensors")
    save_file(after, whole / "model.safetensors")
    store_apart(base)
    (found,) = all_logits(config, source(base, adapter, torch.bfloat16), 1)
    (expected,) = all_logits(config, SafetensorsWeights(whole, torch.bfloat16, CPU), 1)
    assert torch.equal(found, expected)


def adapter_tensors(folder):
    """Those of an adapter, without PEFT's prefix."""
    stored = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): values for name, values in stored.items()}


# One matrix


@pytest.fixture
def one(tmp_path):
    """Loads ``a.proj`` [6, 4] of ones with an adapter of these tensors."""

    def load(tensors, dtype=torch.float32, base=None, name="a.proj", **fields):
        base = {"a.proj.weight": torch.ones(6, 4)} if base is None else base
        save_file(base, tmp_path / "model.safetensors")
        weights = source(tmp_path, write_adapter(tmp_path / "adapter", tensors, **fields), dtype)
        found = load_weight(weights, f"{name}.weight", (6, 4))
        return weights, found

    return load


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, ALPHA / 4),
        ({"r": 99}, ALPHA / 4),
        ({"use_rslora": True}, ALPHA / 2),
        ({"alpha_pattern": {"proj": 12}}, 3.0),
        ({"alpha_pattern": {"roj": 12, r"a\.p.*": 16, "proj": 12}}, 4.0),
        ({"alpha_pattern": {"proj": 12}, "use_rslora": True}, 6.0),
        ({"rank_pattern": {"proj": 4}, "r": 2}, ALPHA / 4),
    ],
)
def test_scales(one, fields, scale):
    """The rank is the tensors'; of the patterns the first counts that matches whole parts of the name."""
    tensors, added = pair("a.proj", 6, 4, rank=4)
    _, weight = one(tensors, **fields)
    assert torch.equal(weight.dense(), 1 + added * 4 / ALPHA * scale)


def test_it_is_rounded_once(one):
    """A W that was rounded to 1 before gave 1."""
    values = {"a.proj.weight": torch.full((6, 4), 1 + 2**-9)}
    tensors = {"a.proj.lora_A.weight": torch.full((1, 4), 3 * 2**-10), "a.proj.lora_B.weight": torch.ones(6, 1)}
    _, weight = one(tensors, torch.bfloat16, values, lora_alpha=1)
    assert torch.equal(weight.dense(), torch.full((6, 4), 1 + 2**-7, dtype=torch.bfloat16))


@pytest.mark.parametrize("dimension", ["rows", "columns"])
def test_a_part_of_dora(one, dimension):
    """The norm is that of a row of the whole matrix, whichever columns a rank has."""
    tensors, added = pair("a.proj", 6, 4)
    magnitude = 1 + torch.arange(6.0)
    _, weight = one({**tensors, "a.proj.lora_magnitude_vector": magnitude}, use_dora=True)
    merged = 1 + added.double()
    expected = (magnitude[:, None] * merged / merged.norm(dim=1, keepdim=True)).float()
    torch.testing.assert_close(weight.dense(), expected)
    part = weight.rows(range(2, 5)) if dimension == "rows" else weight.columns(range(1, 3))
    own = expected[2:5] if dimension == "rows" else expected[:, 1:3]
    torch.testing.assert_close(part.dense(), own)


def test_rows_of_tokens(one):
    """They take the place of the model's; each rank has some of them."""
    rows = numbers("rows", 3, 4)
    fields = {"trainable_token_indices": {"other": [9], "proj": [5, 0, 2]}}
    _, weight = one({"a.proj.token_adapter.trainable_tokens_delta": rows}, **fields)
    expected = torch.ones(6, 4)
    expected[[5, 0, 2]] = rows
    assert torch.equal(weight.dense(), expected)
    assert torch.equal(weight.rows(range(2, 6)).columns(range(1, 3)).dense(), expected[2:6, 1:3])


def test_what_is_stored_whole(one):
    """modules_to_save, trained biases, and the copy that PEFT keeps of a layer's own weight."""
    tensors, added = pair("a.proj", 6, 4)
    own = {"a.proj.base_layer.weight": numbers("w", 6, 4), "a.proj.base_layer.bias": numbers("b", 6)}
    norm = {"norm.weight": numbers("norm", 5)}
    base = {"a.proj.weight": torch.ones(6, 4), "a.proj.bias": torch.ones(6), "norm.weight": torch.ones(5)}
    weights, weight = one({**tensors, **own, **norm}, base=base)
    assert torch.equal(weight.dense(), own["a.proj.base_layer.weight"] + added)
    assert torch.equal(weights.get("a.proj.bias", (6,)), own["a.proj.base_layer.bias"])
    assert torch.equal(weights.get("norm.weight", (5,)), norm["norm.weight"])
    weights.require_adapters()
    assert weights.unread == []


def test_a_bias_of_b(one):
    """It has the scale of the product."""
    tensors, _ = pair("a.proj", 6, 4)
    own = numbers("own", 6)
    base = {"a.proj.weight": torch.ones(6, 4), "a.proj.bias": torch.ones(6)}
    weights, _ = one({**tensors, "a.proj.lora_B.bias": own}, base=base, lora_bias=True)
    assert torch.equal(weights.get("a.proj.bias", (6,)), 1 + ALPHA / RANK * own)
    part = weights.get("a.proj.bias", (6,), take=Take(0, range(2, 5)))
    assert torch.equal(part, 1 + ALPHA / RANK * own[2:5])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["smollm3", "granite-biases", "phi3"])
def test_biases_of_b(tmp_path, family, size):
    """A model without biases gets them; of projections that are one product, each may have one or not."""
    config = msgspec.structs.replace(FAMILIES[family], tie_word_embeddings=False)
    fused = family == "phi3"
    parts = (
        ("self_attn.qkv", "self_attn.o", "mlp.gate_up")
        if fused
        else ("self_attn.k", "self_attn.o", "mlp.up", "mlp.down")
    )
    exact = write_both(tmp_path, config, lambda name, values: ({name: (values * 64).round() / 64}, values))[0]
    values = load_file(exact / "model.safetensors")
    tensors = {}
    for module in (f"model.layers.{layer}.{part}_proj" for layer in range(2) for part in parts):
        tensors |= pair(module, *values[f"{module}.weight"].shape)[0]
        tensors[f"{module}.lora_B.bias"] = numbers(f"{module} bias", len(values[f"{module}.weight"]))
    adapter = write_adapter(tmp_path / "adapter", tensors, lora_bias=True)
    headers = source(exact, adapter, device=HEADERS)
    require_loadable(config, headers)
    headers.require_adapters()
    found = all_logits(config, source(exact, adapter), size)
    # The same by a model that has all biases.
    biased = msgspec.structs.replace(config, qkv_bias=True, out_bias=True, mlp_bias=True)
    for module in [name.removesuffix(".weight") for name in values if name.endswith("proj.weight")]:
        before, after = values.get(f"{module}.bias", torch.zeros(len(values[f"{module}.weight"]))), 0
        if f"{module}.lora_B.bias" in tensors:
            after = ALPHA / RANK * tensors[f"{module}.lora_B.bias"]
            values[f"{module}.weight"] += pair(module, *values[f"{module}.weight"].shape)[1]
        values[f"{module}.bias"] = before + after
    save_file(values, exact / "model.safetensors")
    expected = all_logits(biased, SafetensorsWeights(exact, torch.float32, CPU), size)
    assert all(torch.equal(each, same) for each, same in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("model.layers.0.q", "model.layers.0.q"),
        ("model.layers.0.q", "model.language_model.layers.0.q"),
        ("model.layers.0.q", "language_model.model.layers.0.q"),
        ("model.layers.0.q", "layers.0.q"),
    ],
)
def test_names_of_wholes(one, asked, stored):
    """Adapters name modules as the class has them that was trained: one of images too, or a bare transformer."""
    tensors, added = pair(stored, 6, 4)
    _, weight = one(tensors, base={f"{asked}.weight": torch.ones(6, 4)}, name=asked)
    assert torch.equal(weight.dense(), 1 + added)


# A head that is the embedding


@pytest.mark.parametrize("stored", ["embedding", "both"])
@pytest.mark.parametrize("changed", ["embedding", "saved embedding", "head", "saved head", "both", "tokens"])
def test_tied_models(tmp_path, changed, stored):
    """PEFT trains one of the two, and the other stays; rows of tokens are those of both."""
    config = msgspec.structs.replace(FAMILIES["smollm3"], tie_word_embeddings=True)
    size, hidden = config.vocab_size, config.hidden_size
    base, whole = write_both(tmp_path, config, lambda name, values: ({name: values}, values))
    values = load_file(base / "model.safetensors")
    embedding, head = values["model.embed_tokens.weight"], values["model.embed_tokens.weight"].clone()
    if stored == "both":
        save_file({**values, "lm_head.weight": head.clone()}, base / "model.safetensors")
    tensors, fields = {}, {}
    if changed in ("embedding", "both"):
        tensors, added = embedding_pair("model.embed_tokens", size, hidden)
        embedding = embedding + added
    if changed in ("head", "both"):
        own, added = pair("lm_head", size, hidden)
        tensors, head = {**tensors, **own}, head + added
    if changed.startswith("saved"):
        own = numbers("saved", size, hidden)
        name = "lm_head.weight" if "head" in changed else "model.embed_tokens.weight"
        tensors, embedding, head = {name: own}, *((embedding, own) if "head" in changed else (own, head))
    if changed == "tokens":
        tensors = {"model.embed_tokens.token_adapter.trainable_tokens_delta": numbers("rows", 2, hidden)}
        embedding[[7, 3]] = head[[7, 3]] = numbers("rows", 2, hidden)
        fields = {"trainable_token_indices": [7, 3]}
    adapter = read_adapter("a", write_adapter(tmp_path / "adapter", tensors, **fields)).of_tied()
    assert adapter.unties == (changed != "tokens")
    save_file({**values, "model.embed_tokens.weight": embedding, "lm_head.weight": head}, whole / "model.safetensors")
    untied = msgspec.structs.replace(config, tie_word_embeddings=not adapter.unties)
    weights = SafetensorsWeights(base, torch.float32, CPU, adapter=adapter)
    (found,) = all_logits(untied, weights, 1)
    weights.require_adapters()
    own = msgspec.structs.replace(config, tie_word_embeddings=False)
    (expected,) = all_logits(own, SafetensorsWeights(whole, torch.float32, CPU), 1)
    assert torch.equal(found, expected)


# What has no place


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.other_proj", "'base_model.model.model.layers.0.self_attn.other_proj.lora_A.weight'"),
        ("model.layers.9.self_attn.q_proj", r"layers\.9.* has no place in the model, nor have 1 others"),
        ("model.layers.0.self_attn.qkv_proj", "qkv_proj"),
        ("model.layers.0.input_layernorm", "input_layernorm"),
    ],
)
@pytest.mark.parametrize("device", [CPU, HEADERS])
def test_a_tensor_without_a_place(tmp_path, name, message, device):
    """The base answered, without a word."""
    config = FAMILIES["smollm3"]
    base, _ = write_both(tmp_path, config, lambda name, values: ({name: values}, values))
    tensors = pair(name, 32, 32)[0] | pair("model.layers.0.self_attn.q_proj", *q_shape(base))[0]
    weights = source(base, write_adapter(tmp_path / "adapter", tensors), device=device)
    with pytest.raises(UserError, match=message):
        require_loadable(config, weights)
        weights.require_adapters()


def q_shape(base):
    """Of a product of the base model."""
    return load_file(base / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].shape


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        (pair("a.proj", 8, 4)[0], {}, r"a\.proj\.lora_A\.weight is for a tensor \(8, 4\), the model's is \(6, 4\)"),
        (pair("a.proj", 4, 6)[0], {}, r"is for a tensor \(4, 6\)"),
        ({"a.proj.weight": torch.zeros(8, 4)}, {}, r"a\.proj\.weight' has shape \(8, 4\), config says \(6, 4\)"),
        (
            {"a.proj.token_adapter.trainable_tokens_delta": torch.zeros(1, 4)},
            {"trainable_token_indices": [6]},
            "trainable_token_indices names 6, the model has 6 tokens",
        ),
        (
            {**pair("a.proj", 6, 4)[0], "a.proj.token_adapter.trainable_tokens_delta": torch.zeros(1, 4)},
            {"trainable_token_indices": [1]},
            "change the same tensor",
        ),
    ],
)
def test_another_models_adapter(one, tensors, fields, message):
    """One line names the tensor: PyTorch's said which sizes cannot be multiplied."""
    with pytest.raises(UserError, match=message):
        one(tensors, **fields)[1].dense()


def test_a_quantized_base(tmp_path):
    """Its numbers would stay as they are, without the adapter."""
    form = form_of({"quant_method": "fp8", "weight_block_size": [2, 2]})
    stored = {"a.proj.weight": torch.ones(6, 4).to(torch.float8_e4m3fn), "a.proj.weight_scale_inv": torch.ones(3, 2)}
    save_file(stored, tmp_path / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", pair("a.proj", 6, 4)[0])
    with pytest.raises(UserError, match=r"a\.proj\.lora_A\.weight: the model's matrix is quantized: take --quant"):
        load_weight(source(tmp_path, adapter, form=form), "a.proj.weight", (6, 4))
