"""Write a model folder again with quantized weights, by round to nearest, to measure what a form of weights costs.

``python -m benchmarks.quantize_folder --model FOLDER --form FORM --output FOLDER2``. The 16-bit matrices of layers
whose names end with ``proj`` are quantized, all other tensors stay. No data is used, and no error is made up for by
other weights, as GPTQ and AWQ do.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.options import options

_E4M3 = torch.float8_e4m3fn
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
# Halfway between the magnitudes of 4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Columns that share a scale, but for the last, which may be fewer.
_GROUP, _MXFP4_GROUP, _NVFP4_GROUP = 128, 32, 16
# No scale is zero.
_TINY = 1e-12

# What stands in the place of a matrix [out, in], by the end of its name.
Encode = Callable[[Tensor], dict[str, Tensor]]


def fp8_channel(weight: Tensor) -> dict[str, Tensor]:
    """fp8, a scale for each row."""
    scale = (_amax(weight) / _E4M3_MAX).bfloat16()
    return {"weight": _e4m3(weight / scale.float()), "weight_scale": scale}


def fp8_block(weight: Tensor) -> dict[str, Tensor]:
    """fp8, a scale for each block of 128 rows and columns."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % _GROUP, 0, -rows % _GROUP))
    blocks = padded.unflatten(0, (-1, _GROUP)).unflatten(2, (-1, _GROUP))
    scale = blocks.abs().amax((1, 3)).clamp(min=_TINY) / _E4M3_MAX
    each = scale.repeat_interleave(_GROUP, 0)[:rows].repeat_interleave(_GROUP, 1)[:, :columns]
    return {"weight": _e4m3(weight / each), "weight_scale_inv": scale}


def int8_channel(weight: Tensor) -> dict[str, Tensor]:
    """int8, a scale for each row."""
    scale = (_amax(weight) / 127.5).bfloat16()
    return {"weight": (weight / scale.float()).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}


def int4_group(weight: Tensor, size: int = _GROUP) -> dict[str, Tensor]:
    """int4, a scale for so many columns of a row."""
    scale = _amax_of_groups(weight, size).div(7.5).bfloat16()
    codes = (weight / _spread(scale, size, weight)).round().clamp(-8, 7) + 8
    return {"weight_packed": _packed(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def int4_group_asymmetric(weight: Tensor) -> dict[str, Tensor]:
    """int4, a scale and a zero for each 128 columns of a row."""
    groups = weight.split(_GROUP, 1)
    low = torch.cat([each.amin(1, keepdim=True).clamp(max=0) for each in groups], 1)
    high = torch.cat([each.amax(1, keepdim=True).clamp(min=0) for each in groups], 1)
    scale = ((high - low).clamp(min=_TINY) / 15).bfloat16()
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (weight / _spread(scale, _GROUP, weight) + _spread(zero, _GROUP, weight)).round().clamp(0, 15)
    return {
        "weight_packed": _packed(codes),
        "weight_scale": scale,
        # Zeros are packed along rows.
        "weight_zero_point": _packed(zero.T).T,
        "weight_shape": torch.tensor(weight.shape),
    }


def mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """4-bit floats, a power of two for each 32 columns (OCP Microscaling Formats v1.0: large values saturate)."""
    largest = _amax_of_groups(weight, _MXFP4_GROUP)
    # The largest 4-bit float is 1.5 times 2 to the power of 2.
    exponent = largest.log2().floor() - 2
    codes = _e2m1(weight / _spread(exponent.exp2(), _MXFP4_GROUP, weight))
    return {"weight_packed": codes, "weight_scale": (exponent + 127).to(torch.uint8)}


def nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """4-bit floats, an fp8 scale for each 16 columns, and one scale by which these are divided."""
    whole = _E4M3_MAX * _E2M1_MAX / weight.abs().max().clamp(min=_TINY)
    largest = _amax_of_groups(weight, _NVFP4_GROUP)
    # The least fp8 number is no scale of zero.
    scale = _e4m3((largest / _E2M1_MAX * whole).clamp(min=2**-9))
    codes = _e2m1(weight / (_spread(scale, _NVFP4_GROUP, weight) / whole))
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": whole.reshape(1)}


def _amax(values: Tensor) -> Tensor:
    return values.abs().amax(1, keepdim=True).clamp(min=_TINY)


def _amax_of_groups(weight: Tensor, size: int) -> Tensor:
    """``[out, in]`` -> ``[out, groups]`` of groups of so many columns."""
    return torch.cat([_amax(each) for each in weight.split(size, 1)], 1)


def _spread(each: Tensor, size: int, weight: Tensor) -> Tensor:
    """``[out, groups]`` of groups of so many columns -> fp32 ``[out, in]``."""
    return each.float().repeat_interleave(size, 1)[:, : weight.shape[1]]


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3)


def _e2m1(values: Tensor) -> Tensor:
    """``[out, in]`` -> ``[out, in / 2]`` uint8: the nearest 4-bit floats (of two the even), the first in low bits."""
    middles = torch.tensor(_E2M1_MIDDLES)
    below, above = (torch.bucketize(values.abs(), middles, right=right) for right in (False, True))
    codes = torch.where(below % 2 == 0, below, above) + 8 * (values < 0)
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def _packed(codes: Tensor) -> Tensor:
    """``[N, K]`` numbers of 4 bits -> ``[N, K / 8]`` int32, the first in the lowest bits."""
    filled = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    words = (filled << torch.arange(0, 32, 4)).sum(2)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors with one scheme for all layers."""
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    shared = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**shared, "format": form, "config_groups": {"group_0": scheme}}


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
_FP4 = {"num_bits": 4, "type": "float"}
# Each form's function, and its ``quantization_config``.
FORMS: dict[str, tuple[Encode, dict[str, Any]]] = {
    "fp8": (fp8_channel, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8-block": (
        fp8_block,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_GROUP, _GROUP]},
    ),
    "int8": (int8_channel, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "int4": (int4_group, _compressed("pack-quantized", **_INT4)),
    "int4-32": (partial(int4_group, size=32), _compressed("pack-quantized", **{**_INT4, "group_size": 32})),
    "int4-asymmetric": (int4_group_asymmetric, _compressed("pack-quantized", **_INT4, symmetric=False)),
    "mxfp4": (mxfp4, _compressed("mxfp4-pack-quantized", **_FP4, strategy="group", group_size=_MXFP4_GROUP)),
    "nvfp4": (nvfp4, _compressed("nvfp4-pack-quantized", **_FP4, strategy="tensor_group", group_size=_NVFP4_GROUP)),
}


def quantize(folder: Path, form: str, output: Path) -> None:
    """Write a model folder in one of ``FORMS``; everything but weights and config is copied.

    Args:
        folder: with 16-bit or 32-bit safetensors files.
        form: its name.
        output: the new folder.
    """
    output.mkdir(parents=True)
    encode, config = FORMS[form]
    files = sorted(folder.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    for path in files:
        tensors = _quantized(path, encode)
        save_file(tensors, output / path.name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    for path in folder.glob("[!.]*"):
        if path.is_file() and path not in files:
            shutil.copyfile(path, output / path.name)
    values = json.loads((folder / "config.json").read_text())
    (output / "config.json").write_text(json.dumps({**values, "quantization_config": config}, indent=2))
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (output / "model.safetensors.index.json").write_text(json.dumps(index))


def _quantized(path: Path, encode: Encode) -> dict[str, Tensor]:
    """The tensors of a file."""
    found: dict[str, Tensor] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            tensor, module = file.get_tensor(name), name.removesuffix(".weight")
            if tensor.ndim == 2 and ".layers." in name and module.endswith("proj"):
                found |= {f"{module}.{end}": each.contiguous() for end, each in encode(tensor.float()).items()}
            else:
                found[name] = tensor
    return found


def main(forms: Sequence[str] = tuple(FORMS)) -> None:
    """Write one folder."""
    given = options(__doc__, model=Path, form={"choices": forms, "required": True}, output=Path)
    quantize(given.model, given.form, given.output)


if __name__ == "__main__":
    main()
