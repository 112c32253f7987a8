"""bitsandbytes: blocks of a flattened matrix, and integers of a byte."""

import json

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
    scales_of,
    seeded,
)
from tests.model.quantization.same_logits import load_from, require_same_logits

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NESTED, OFFSET = 16, 0.0625


def table(name):
    """Any sixteen numbers, as bitsandbytes' tables of nf4 and fp4 are."""
    return torch.randn(16, generator=seeded(name))


def matrices(kind="nf4", *, nested=False, block=64):
    """The first of two codes is in the high half of a byte; a block of 64 ends within a row."""

    def matrix(name, shape):
        count = shape[0] * shape[1]
        blocks = -(-count // block)
        codes, largest = codes_of(name, (count,), 4), scales_of(name, (blocks,), 3)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
        padded = torch.cat((codes, codes.new_zeros(count % 2)))
        tensors = {
            "": (padded[::2] * 16 + padded[1::2]).to(torch.uint8).unsqueeze(1),
            ".absmax": largest,
            ".quant_map": table(kind),
        }
        if nested:
            state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": OFFSET}
            bytes_, tables = codes_of(f"scales of {name}", (blocks,), 8), torch.randn(256, generator=seeded("nested"))
            of_blocks = scales_of(f"nested {name}", (-(-blocks // NESTED),), 3)
            tensors |= {".absmax": bytes_.to(torch.uint8), ".nested_absmax": of_blocks, ".nested_quant_map": tables}
            largest = tables[bytes_] * of_blocks.repeat_interleave(NESTED)[:blocks] + OFFSET
        text = json.dumps(state).encode()
        tensors[f".quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        values = table(kind)[codes] * largest.repeat_interleave(block)[:count]
        return {f"{name}.weight{key}": tensor for key, tensor in tensors.items()}, values.view(shape)

    return matrix


def bytes_of_rows(name, shape):
    """Scales are the largest values of rows."""
    numbers = (codes_of(name, shape, 8) - 128).to(torch.int8)
    largest = 127 * 2.0 ** torch.randint(-12, -8, (shape[0],), generator=seeded(f"scales of {name}"))
    tensors = {"weight": numbers, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, numbers * (largest / 127).unsqueeze(1)


FORMS = {"nested": matrices(nested=True), "int8": bytes_of_rows}


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("family", [*DENSE_FAMILIES, *MOE_FAMILIES])
@pytest.mark.parametrize("form", ["nested", pytest.param("int8", marks=pytest.mark.thorough)])
def test_it_is_cut_joined_and_reordered(tmp_path, form, family, size):
    """Blocks run from row to row: a rank's part is cut from the whole."""
    require_same_logits(tmp_path, model_of(family), encoder(family, FORMS[form]), form_of(CONFIG), size)


@pytest.mark.parametrize(
    "matrix", [matrices(), matrices("fp4", block=128), matrices("fp4", nested=True), bytes_of_rows]
)
def test_each_form(tmp_path, matrix):
    """The state's name has the kind of the codes."""
    require_same_logits(tmp_path, model_of("phi3"), encoder("phi3", matrix), form_of(CONFIG), 2)


def load(folder, shape=(32, 32)):
    return load_from(folder, CONFIG, "m.weight", shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (3, 43), (64, 1)])
def test_odd_widths(tmp_path, shape, nested):
    """The last block and the last byte are not full."""
    tensors, values = matrices(nested=nested)("m", shape)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path, shape).dense(), values)


def test_a_large_matrix_is_decoded_in_parts(tmp_path, monkeypatch):
    """fp32 values and scales of all of it would need eight times its memory."""
    monkeypatch.setattr("rosebatch.model.quantization.formats.bitsandbytes.AT_ONCE", 300)
    tensors, values = matrices(nested=True)("m", (37, 41))
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path, (37, 41)).dense(), values)


def test_bytes_that_are_stored_as_floats(tmp_path):
    """``bnb_4bit_quant_storage``: the bytes are those of bf16 numbers."""
    tensors, values = matrices()("m", (32, 32))
    tensors["m.weight"] = tensors["m.weight"].flatten().view(torch.bfloat16).unsqueeze(1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).dense(), values)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"shape": [16, 64]}, r"'m\.weight' has shape \(16, 64\), config says \(32, 32\)"),
        ({"blocksize": 0}, r"bitsandbytes__nf4' is unreadable: .*>= 1"),
        ({"blocksize": 128}, r"'m\.weight\.absmax' has shape \(16,\), config says \(8,\)"),
        ({"blocksize": None}, r"bitsandbytes__nf4' is unreadable: .*blocksize"),
        ({"nested_offset": None}, "nested_blocksize and nested_offset need each other"),
        ({"nested_blocksize": 8}, r"'m\.weight\.nested_absmax' has shape \(1,\), config says \(2,\)"),
    ],
)
def test_states_that_contradict_the_tensors(tmp_path, state, message):
    """Scales of other blocks would be another model."""
    tensors, _ = matrices(nested=True)("m", (32, 32))
    key = "m.weight.quant_state.bitsandbytes__nf4"
    fields = json.loads(bytes(tensors[key].tolist())) | state
    tensors[key] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(tmp_path).dense()


def test_integers_in_the_order_of_tiles(tmp_path):
    """``weight_format`` other than 0: numbers are elsewhere in the matrix."""
    tensors, _ = bytes_of_rows("m", (32, 32))
    save_file({**tensors, "m.weight_format": torch.tensor(2, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'m\.weight_format' is not 0"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_an_order_that_is_no_integer(tmp_path, dtype):
    """NumPy has neither dtype: it was a traceback."""
    tensors, _ = bytes_of_rows("m", (32, 32))
    save_file({**tensors, "m.weight_format": torch.tensor(0, dtype=dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'m\.weight_format' holds .*: U8 or I8 or I32 or I64 is supported"):
        load(tmp_path)


@pytest.mark.parametrize("end", ["", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"])
def test_what_is_missing(tmp_path, end):
    """It is one line that names the tensor."""
    tensors, _ = matrices(nested=True)("m", (32, 32))
    del tensors[f"m.weight{end}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"no tensor 'm\.weight{end}'"):
        load(tmp_path).dense()
