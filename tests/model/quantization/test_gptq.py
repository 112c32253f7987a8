"""GPTQ, as AutoGPTQ and GPTQModel write it."""

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.quantization.forms import form_of
from tests.model.quantization.numbers import (
    DENSE_FAMILIES,
    MOE_FAMILIES,
    RANKS,
    codes_of,
    encoder,
    model_of,
    packed,
    scales_of,
    seeded,
    spread,
)
from tests.model.quantization.same_logits import load_from, require_same_logits


def matrices(bits=4, size=8, *, symmetric=False, version="gptq", shuffled=False, stored_zeros=None):
    """Words hold numbers of one column after the other; version 1 stores zeros less one.

    Args:
        stored_zeros: of all groups, in place of the right ones.
    """

    def matrix(name, shape):
        rows, columns = shape
        block = 1, size or columns
        grid = rows, -(-columns // block[1])
        codes, scale = codes_of(name, shape, bits), scales_of(name, grid, bits, torch.float16)
        half = torch.full(grid, 1 << (bits - 1))
        zeros = half if symmetric else codes_of(f"zeros of {name}", grid, bits)
        stored = (zeros - int(version == "gptq")) % (1 << bits)
        stored = stored if stored_zeros is None else torch.full(grid, stored_zeros)
        order = torch.arange(columns)
        if shuffled:
            order = torch.randperm(columns, generator=seeded(f"order of {name}"))
        tensors = {
            "qweight": packed(codes, bits).t().contiguous(),
            "qzeros": packed(stored.t(), bits),
            "scales": scale.t().contiguous(),
            "g_idx": (order // block[1]).int(),
        }
        values = (codes - spread(zeros, shape, block)[:, order]) * spread(scale, shape, block)[:, order]
        return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, values

    return matrix


def config_of(bits=4, size=8, **fields):
    """As in files: -1 is one group of all columns."""
    return {"quant_method": "gptq", "bits": bits, "group_size": size or -1, "sym": False, "desc_act": False, **fields}


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("family", [*DENSE_FAMILIES, *MOE_FAMILIES])
@pytest.mark.parametrize("shuffled", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_it_is_cut_joined_and_reordered(tmp_path, shuffled, family, size):
    """By ``desc_act``, a rank's columns are of all groups: two ranks gave nonsense."""
    form = form_of(config_of(desc_act=shuffled))
    require_same_logits(tmp_path, model_of(family), encoder(family, matrices(shuffled=shuffled)), form, size)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_bits_and_versions(tmp_path, bits, version):
    """Version 2 stores the zeros themselves: read as version 1, all tokens were "!". A zero of 0 less one overflows."""
    form = form_of(config_of(bits, 12, checkpoint_format=version))
    matrix = matrices(bits, 12, version=version)
    require_same_logits(tmp_path, model_of("smollm3"), encoder("smollm3", matrix), form, 1)


@pytest.mark.parametrize("zeros", [0, 7, 8, 15])
def test_zeros_of_a_symmetric_file_are_not_trusted(tmp_path, zeros):
    """Files say version 1, and hold the zeros of version 2."""
    form = form_of(config_of(sym=True))
    matrix = matrices(symmetric=True, stored_zeros=zeros)
    require_same_logits(tmp_path, model_of("smollm3"), encoder("smollm3", matrix), form, 1)


def test_one_group_of_all_columns(tmp_path):
    """``group_size`` -1: ``desc_act`` has no effect, and older files have no ``g_idx`` then."""
    form = form_of(config_of(4, None, desc_act=True, format="gptq"))

    def matrix(name, shape):
        tensors, values = matrices(4, None)(name, shape)
        del tensors[f"{name}.g_idx"]
        return tensors, values

    require_same_logits(tmp_path, model_of("smollm3"), encoder("smollm3", matrix), form, 2)


def test_modules_with_fields_of_their_own(tmp_path):
    """``dynamic``: the first pattern that a name begins with counts, and ``-:`` leaves modules plain."""
    forms = {"down_proj": matrices(8, 16), "up_proj": matrices(4, None, symmetric=True), "v_proj": matrices(4, 16)}

    def encode(name, values):
        if "k_proj" in name:
            return {}, values
        chosen = next((form for end, form in forms.items() if end in name), matrices(4, 8))
        return encoder("smollm3", chosen)(name, values)

    dynamic = {
        r"-:.*k_proj": {},
        r"+:.*\.down_proj$": {"bits": 8, "group_size": 16},
        r".*\.up_proj": {"sym": True, "group_size": -1},
        r".*proj": {"group_size": 8},
        r"model\.layers\.\d+\.self_attn\.v_proj": {"bits": 2},
    }
    forms["v_proj"] = matrices(4, 8)
    require_same_logits(tmp_path, model_of("smollm3"), encode, form_of(config_of(4, 32, dynamic=dynamic)), 2)


def load(folder, **fields):
    return load_from(folder, config_of(**fields), "model.layers.1.mlp.up_proj.weight", (32, 32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 8}, r"bits is 8, and model\.layers\.1\.mlp\.up_proj\.qweight has shape \(4, 32\)"),
        (
            {"size": 16},
            r"group_size is 16, and 'model\.layers\.1\.mlp\.up_proj\.scales' of 32 columns has shape \(4, 32\)",
        ),
        ({"dynamic": {"-:.*up": {}}}, r"dynamic has '-:\.\*up', and model\.layers\.1\.mlp\.up_proj is quantized"),
    ],
)
def test_what_contradicts(tmp_path, fields, message):
    """Read by either, it may be another model."""
    save_file(matrices()("model.layers.1.mlp.up_proj", (32, 32))[0], tmp_path / "model.safetensors")
    assert load(tmp_path).dense().shape == (32, 32)
    with pytest.raises(UserError, match=f"quantization_config: {message}"):
        load(tmp_path, **fields)


def test_zeros_of_a_file_that_is_not_symmetric(tmp_path):
    """``sym`` that is true or lost, over zeros of several values, was another model."""
    save_file(matrices()("model.layers.1.mlp.up_proj", (32, 32))[0], tmp_path / "model.safetensors")
    for symmetric in (True, None):
        with pytest.raises(
            UserError, match=r"sym is true, and model\.layers\.1\.mlp\.up_proj\.qzeros has zeros of several"
        ):
            load(tmp_path, sym=symmetric).dense()


@pytest.mark.parametrize(
    ("group", "message"),
    [(-2, "has -2 to 3, of 4 groups"), (4, "has 0 to 4, of 4 groups"), (None, "weights have no tensor")],
)
def test_groups_that_there_are_not(tmp_path, group, message):
    """A negative one was counted from the end; without any, by ``desc_act``, elements had scales of others."""
    name = "model.layers.1.mlp.up_proj"
    tensors, _ = matrices()(name, (32, 32))
    order = tensors.pop(f"{name}.g_idx")
    if group is not None:
        order[9] = group
        tensors[f"{name}.g_idx"] = order
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(tmp_path, desc_act=True)
