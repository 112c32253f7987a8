"""compressed-tensors, as llm-compressor writes them."""

from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.quantization.forms import form_of
from tests.model.quantization.numbers import (
    DENSE_FAMILIES,
    E2M1,
    MOE_FAMILIES,
    codes_of,
    encoder,
    exponents,
    model_of,
    mxfp8,
    packed,
    scales_of,
    seeded,
    spread,
)
from tests.model.quantization.same_logits import load_from, require_same_logits

FP8 = torch.float8_e4m3fn


def config_of(targets=("Linear",), ignore=("lm_head",), **weights):
    """``quantization_config`` of one scheme."""
    return with_groups({"group_0": {"targets": list(targets), "weights": weights}}, ignore)


def with_groups(groups, ignore=("lm_head",)):
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": list(ignore)}


def group_of(bits, size=None, kind="int", **fields):
    strategy = "channel" if size is None else "group"
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": size, **fields}


def floats(block, strategy):
    """fp8 with bf16 scales for a matrix, a row or a block."""

    def matrix(name, shape):
        high, wide = (block[0] or shape[0]), (block[1] or shape[1])
        grid = -(-shape[0] // high), -(-shape[1] // wide)
        scale = scales_of(name, grid, 8, torch.bfloat16)
        numbers = (torch.randn(shape, generator=seeded(name)) * 99).to(FP8)
        stored = scale.reshape(1) if strategy == "tensor" else scale
        return {f"{name}.weight": numbers, f"{name}.weight_scale": stored}, numbers.float() * spread(
            scale, shape, (high, wide)
        )

    structure = [high or 0 for high in block] if strategy == "block" else None
    return matrix, {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": structure}


def integers(bits=8, size=None, *, symmetric=True):
    """Integers of a byte each: W8A8, and W4AFP8, which has 4 bits of each."""

    def matrix(name, shape):
        grid = shape[0], -(-shape[1] // (size or shape[1]))
        scale, half = scales_of(name, grid, bits, torch.bfloat16), 1 << (bits - 1)
        numbers, zeros = codes_of(name, shape, bits) - half, codes_of(f"zeros of {name}", grid, bits) - half
        tensors = {f"{name}.weight": numbers.to(torch.int8), f"{name}.weight_scale": scale}
        block = 1, size or shape[1]
        if symmetric:
            return tensors, numbers * spread(scale, shape, block)
        tensors[f"{name}.weight_zero_point"] = zeros.to(torch.int8)
        return tensors, (numbers - spread(zeros, shape, block)) * spread(scale, shape, block)

    return matrix, group_of(bits, size, symmetric=symmetric)


def words(bits, size=None, *, symmetric=True, shuffled=False):
    """Integers in words of 32 bits; zeros are packed along the rows."""

    def matrix(name, shape):
        rows, columns = shape
        block = 1, size or columns
        grid = rows, -(-columns // block[1])
        scale, codes = scales_of(name, grid, bits, torch.bfloat16), codes_of(name, shape, bits)
        zeros = codes_of(f"zeros of {name}", grid, bits)
        tensors = {
            f"{name}.weight_packed": packed(codes, bits),
            f"{name}.weight_scale": scale,
            f"{name}.weight_shape": torch.tensor(shape),
        }
        each, zero = spread(scale, shape, block), 1 << (bits - 1)
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = packed(zeros.t(), bits).t().contiguous()
            zero = spread(zeros, shape, block)
        if shuffled:
            # Elements of a group are anywhere in a row.
            order = torch.randperm(columns, generator=seeded(f"order of {name}"))
            tensors[f"{name}.weight_g_idx"] = (order // block[1]).int()
            each, zero = each[:, order], zero[:, order]
        return tensors, (codes - zero) * each

    return matrix, group_of(bits, size, symmetric=symmetric, actorder="group" if shuffled else None)


def nvfp4(name, shape):
    """Values are divided by the scale of all."""
    scale = (torch.rand((shape[0], shape[1] // 16), generator=seeded(f"scale {name}")) * 100 + 1).to(FP8)
    whole, codes = 2.0 ** (10 + codes_of(f"whole {name}", (1,), 2)), codes_of(name, shape, 4)
    tensors = {
        f"{name}.weight_packed": packed(codes, 4, 8),
        f"{name}.weight_scale": scale,
        f"{name}.weight_global_scale": whole,
        f"{name}.input_global_scale": torch.ones(1),
    }
    return tensors, E2M1[codes] * spread(scale.float() / whole, shape, (1, 16))


def mxfp4(name, shape):
    stored, scale = exponents(name, shape)
    codes = codes_of(name, shape, 4)
    return {f"{name}.weight_packed": packed(codes, 4, 8), f"{name}.weight_scale": stored}, E2M1[codes] * scale


FORMS = {
    "fp8-tensor": floats((None, None), "tensor"),
    "fp8-channel": floats((1, None), "channel"),
    "fp8-block": floats((7, 10), "block"),
    "int8": integers(),
    "int8-zeros": integers(symmetric=False),
    "w4afp8": integers(4, 8),
    "packed-4": words(4, 8),
    "packed-4-zeros": words(4, 8, symmetric=False),
    "packed-4-order": words(4, 8, symmetric=False, shuffled=True),
    "nvfp4": (nvfp4, {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": (mxfp4, group_of(4, 32, "float")),
    "mxfp8": (mxfp8, group_of(8, 32, "float")),
}
FAST = {"fp8-block", "packed-4-order", "nvfp4"}


def tiered(form, family, size):
    """The fast tier has all families of some forms, and one of each other, on two ranks: see ``RANKS``."""
    is_fast = size == 2 and (form in FAST or family == "phi3")
    return pytest.param(form, family, size, marks=() if is_fast else pytest.mark.thorough)


@pytest.mark.parametrize(
    ("form", "family", "size"), [tiered(*case) for case in product(FORMS, DENSE_FAMILIES + MOE_FAMILIES, [1, 2])]
)
def test_a_form_is_cut_joined_and_reordered(tmp_path, form, family, size):
    """q, k and v have scales of their own; ranks and reordered rows took those of other rows."""
    matrix, weights = FORMS[form]
    form = form_of(config_of(**weights))
    require_same_logits(tmp_path, model_of(family), encoder(family, matrix), form, size)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_any_bits(tmp_path, bits, symmetric):
    """Fields of 3, 5, 6 and 7 bits cross words; a zero in the wrong range takes the upper half of each group."""
    matrix, weights = words(bits, 12, symmetric=symmetric)
    require_same_logits(tmp_path, model_of("smollm3"), encoder("smollm3", matrix), form_of(config_of(**weights)), 1)


def load(folder, config, name="m", shape=(32, 32), dtype=torch.float32):
    return load_from(folder, config, f"{name}.weight", shape, dtype)


def test_zeros_of_a_symmetric_scheme(tmp_path):
    """Old files have them, a byte each, for integers that are packed or not."""
    for (matrix, weights), zero in ((integers(), 3), (words(4, 8), 3)):
        tensors, values = matrix("m", (32, 32))
        zeros = torch.full_like(tensors["m.weight_scale"], zero).to(torch.int8)
        save_file({**tensors, "m.weight_zero_point": zeros}, tmp_path / "model.safetensors")
        moved = values - zero * spread(tensors["m.weight_scale"], (32, 32), (1, 32 // zeros.shape[1]))
        assert torch.allclose(load(tmp_path, config_of(**weights)).dense(), moved, atol=1e-6)


def test_zeros_that_are_missing(tmp_path):
    """Half of the range in their place would be another model."""
    for matrix, weights in (integers(symmetric=False), words(4, 8, symmetric=False)):
        tensors, _ = matrix("m", (32, 32))
        del tensors["m.weight_zero_point"]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"no tensor 'm\.weight_zero_point'"):
            load(tmp_path, config_of(**weights))


def test_groups_of_mixed_precision(tmp_path):
    """A name comes before a pattern, and a pattern before a class, whatever their order in the file."""
    four, eight, fp8 = words(4, 8), words(8, 16), floats((1, None), "channel")
    forms = {"model.layers.0.self_attn.o_proj": fp8, "down_proj": eight}

    def matrix(name, shape):
        chosen = forms.get(name) or next((form for end, form in forms.items() if name.endswith(end)), four)
        return chosen[0](name, shape)

    groups = {
        "group_0": {"targets": ["Linear"], "weights": four[1]},
        "group_1": {"targets": [r"re:.*down_proj$", r"re:.*o_proj"], "weights": eight[1], "format": "pack-quantized"},
        "group_2": {
            "targets": ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"],
            "weights": fp8[1],
        },
        "attention": {"targets": ["SmolLM3Attention"], "input_activations": fp8[1], "weights": None},
    }
    forms["model.layers.1.self_attn.o_proj"] = fp8
    form = form_of({**with_groups(groups), "format": "mixed-precision"})
    require_same_logits(tmp_path, model_of("smollm3"), encoder("smollm3", matrix), form, 2)


def test_an_ignored_module_between_quantized_ones(tmp_path):
    """q and v are quantized, k is plain: the list names it, and its values are joined with theirs."""
    matrix, weights = words(4, 8)
    ignored = [f"model.layers.{layer}.self_attn.k_proj" for layer in (0, 1)]

    def encode(name, values):
        return ({}, values) if "k_proj" in name else encoder("smollm3", matrix)(name, values)

    require_same_logits(tmp_path, model_of("smollm3"), encode, form_of(config_of(ignore=ignored, **weights)), 2)


def test_an_ignored_parent_or_wrapper_says_nothing_of_its_children(tmp_path):
    """``experts.0`` was taken for a part of the names of experts; entries of wrapped layers end in ``.linear``."""
    matrix, weights = words(4, 8)
    tensors, values = matrix("model.layers.0.mlp.experts.0.up_proj", (32, 32))
    save_file(tensors, tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.0"
    ignore = [name, "experts.0", f"{name}.up_proj.linear", "up_proj", r"re:up_proj"]
    assert torch.equal(load(tmp_path, config_of(ignore=ignore, **weights), f"{name}.up_proj").dense(), values)
    with pytest.raises(
        UserError, match=r"ignore has 're:\.\*up_proj', and model\.layers\.0\.mlp\.experts\.0\.up_proj is"
    ):
        load(tmp_path, config_of(ignore=[r"re:.*up_proj"], **weights), f"{name}.up_proj")
    with pytest.raises(UserError, match=r"no group of config_groups has model\.layers"):
        load(tmp_path, config_of(targets=["re:up_proj"], **weights), f"{name}.up_proj")


def test_names_of_a_model_of_more_than_text(tmp_path):
    """Targets may be named as in the checkpoint, or as in the language model alone."""
    matrix, weights = words(4, 8)
    tensors, values = matrix("model.language_model.layers.0.mlp.up_proj", (32, 32))
    save_file(tensors, tmp_path / "model.safetensors")
    for target in ("model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", "re:model.*up_proj"):
        config = config_of([target], [r"re:.*vision.*", "model.visual.blocks.0.up_proj"], **weights)
        assert torch.equal(load(tmp_path, config, "model.layers.0.mlp.up_proj").dense(), values)
    with pytest.raises(UserError, match=r"ignore has 'model\.language_model\.layers\.0\.mlp\.up_proj', and"):
        ignored = ["model.language_model.layers.0.mlp.up_proj"]
        load(tmp_path, config_of(ignore=ignored, **weights), "model.layers.0.mlp.up_proj")


def test_a_block_of_experts_in_one_tensor_ends_with_the_expert(tmp_path):
    """576 rows an expert in blocks of 128: of the flattened rows, blocks straddled experts."""
    numbers, scale = torch.randn(3, 20, 24).to(FP8), torch.rand(3, 3, 3)
    save_file({"m.weight": numbers, "m.weight_scale": scale}, tmp_path / "model.safetensors")
    expected = torch.stack([n.float() * spread(s, (20, 24), (8, 8)) for n, s in zip(numbers, scale, strict=True)])
    config = config_of(num_bits=8, type="float", strategy="block", block_structure="8x8")
    found = load(tmp_path, config, shape=(3, 20, 24))
    assert torch.equal(found.dense(), expected)
    assert torch.equal(found.rows(range(5, 19)).columns(range(3, 20)).dense(), expected[:, 5:19, 3:20])


def test_experts_of_several_schemes(tmp_path):
    """One has one scale, the next one for each row: values are stacked, because scales cannot be."""
    tensors, values, found = {}, [], []
    for name, forms in (("a", floats((None, None), "tensor")), ("b", floats((1, None), "channel"))):
        matrix, weights = forms
        own, dense = matrix(name, (32, 24))
        tensors |= own
        values.append(dense)
        save_file(tensors, tmp_path / "model.safetensors")
        found.append(load(tmp_path, config_of(**weights), name, (32, 24)))
    assert torch.equal(found[0].stack(found[1:]).dense(), torch.stack(values))
    assert torch.equal(found[1].stack(found[:1]).dense(), torch.stack(values[::-1]))


@pytest.mark.parametrize("whole", [0.1, 134400.0])
def test_nvfp4_scales_are_multiplied_in_fp32(tmp_path, whole):
    """448 by 448 by 6 before the division is no number in fp16; nor is the scale of a matrix of values below 0.04."""
    codes, scale = torch.full((32, 32), 7), torch.full((32, 2), 448.0).to(FP8)
    tensors = {"m.weight_packed": packed(codes, 4, 8), "m.weight_scale": scale}
    save_file({**tensors, "m.weight_global_scale": torch.tensor([whole])}, tmp_path / "model.safetensors")
    dense = load(tmp_path, config_of(**FORMS["nvfp4"][1]), dtype=torch.float16).dense()
    assert dense.dtype == torch.float16
    assert torch.equal(dense, torch.full((32, 32), 6 * 448 / whole, dtype=torch.float16))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no tensor 'm\.weight_global_scale'"):
        load(tmp_path, config_of(**FORMS["nvfp4"][1]))


def test_a_scale_of_all_beside_powers_of_two(tmp_path):
    """It was dropped: whether scales are powers of two does not say whether all are divided."""
    codes, scale = codes_of("m", (32, 32), 4), torch.full((32, 2), 2.0).to(torch.float8_e8m0fnu)
    tensors = {"m.weight_packed": packed(codes, 4, 8), "m.weight_scale": scale, "m.weight_global_scale": torch.ones(1)}
    save_file({**tensors, "m.weight_global_scale": torch.tensor([4.0])}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path, config_of(**FORMS["nvfp4"][1])).dense(), E2M1[codes] / 2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (group_of(8, 8), r"num_bits is 8, and m\.weight_packed has shape \(32, 4\)"),
        (
            group_of(4, 16),
            r"groups of \(1, 16\) need scales of shape \(32, 2\), and tensor 'm\.weight_scale' has \(32, 4\)",
        ),
        (
            group_of(4),
            r"groups of \(1, 32\) need scales of shape \(32, 1\), and tensor 'm\.weight_scale' has \(32, 4\)",
        ),
        (group_of(4, 8, actorder="group"), r"no tensor 'm\.weight_g_idx'"),
    ],
)
def test_what_contradicts(tmp_path, weights, message):
    """Read by either, it may be another model."""
    save_file(words(4, 8)[0]("m", (32, 32))[0], tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(tmp_path, config_of(**weights))


@pytest.mark.parametrize(
    ("matrix", "weights", "message"),
    [
        (floats((1, None), "channel")[0], group_of(4, kind="float"), "num_bits is 4, and m holds numbers of 8 bits"),
        (nvfp4, group_of(4, 16), "type is int, and m holds floats of 4 bits"),
        (nvfp4, group_of(4, 32, "float"), "group_size is not 16, and m is NVFP4"),
    ],
)
def test_fields_that_memory_is_planned_by(tmp_path, matrix, weights, message):
    """The tensors were read all the same, and the plan was of smaller matrices, or of some that a GPU keeps."""
    save_file(matrix("m", (32, 32))[0], tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"quantization_config: {message}"):
        load(tmp_path, config_of(**weights))


@pytest.mark.parametrize("of_group", [True, False])
def test_integers_of_a_byte_each_are_planned_as_such(of_group):
    """W4AFP8: memory and the fit line were those of 4 bits that a GPU keeps, and it decodes them to 16."""
    group = {"targets": ["Linear"], "weights": group_of(4, 128)}
    outer = "mixed-precision" if of_group else "int-quantized"
    config = {**with_groups({"group_0": {**group, "format": "int-quantized" if of_group else None}}), "format": outer}
    assert list(map(str, form_of(config).layouts)) == ["int8, groups of 128"]
    packed_config = {**with_groups({"group_0": group}), "format": "pack-quantized"}
    assert list(map(str, form_of(packed_config).layouts)) == ["int4, groups of 128"]
