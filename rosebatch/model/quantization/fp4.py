"""4-bit floats, two in a byte; NVFP4 has an fp8 scale for 16 columns, and one fp32 scale for all of them."""

from dataclasses import replace

from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.quantization.grouped import GroupedWeight, grouped
from rosebatch.model.quantization.packing import E2M1_KIND, unpacked
from rosebatch.model.quantization.stored import finite, shape_of, stored_as
from rosebatch.model.weights import Checkpoint

_GROUP = 16


def fp4(
    weights: Checkpoint, codes: str, scale: str, shape: tuple[int, ...], block: tuple[int, int] | None
) -> GroupedWeight:
    """A matrix, unread; other arguments as of ``nvfp4``.

    Args:
        weights, codes, scale, shape: see ``nvfp4``.
        block: see ``grouped``.
    """
    packed = stored_as(weights, codes, (*shape[:-1], -(-shape[-1] // 2)), "U8")
    return grouped(weights, unpacked(packed, 4, -1, shape[-1], 8), E2M1_KIND, scale, block)


def nvfp4(
    weights: Checkpoint,
    codes: str,
    scale: str,
    shape: tuple[int, ...],
    *,
    divisor: str | None = None,
    factor: str | None = None,
) -> GroupedWeight:
    """A matrix, unread.

    Args:
        weights: of the model.
        codes: name of the bytes of two codes, ``[..., out, in / 2]``.
        scale: name of the scales, ``[..., out, in / 16]``.
        shape: of the matrix.
        divisor, factor: name of the fp32 scale: scales are divided by it, or multiplied.
    """
    found = fp4(weights, codes, scale, shape, (1, _GROUP))
    name = divisor or factor
    assert name is not None, "the one or the other"
    of_all = stored_as(weights, name, shape_of(weights, name), "F32", "F16", "BF16")
    if of_all.shape not in ((), (1,)):
        raise UserError(f"tensor {weights.name_of(name)!r} has shape {shown(of_all.shape)}: one number is supported")

    def whole(scales: Tensor) -> Tensor:
        one = finite(weights, name, of_all.read().float())
        return finite(weights, name, scales * one if divisor is None else scales / one)

    return replace(found, scales=found.scales.map(whole))
