"""ModelOpt, by NVIDIA: fp8 and 4-bit floats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rosebatch.core.errors import UserError
from rosebatch.model.quantization.fields import Fields
from rosebatch.model.quantization.fp4 import nvfp4
from rosebatch.model.quantization.grouped import GroupedWeight, scaled
from rosebatch.model.quantization.listed import by_glob, require_unlisted
from rosebatch.model.quantization.stored import POWERS
from rosebatch.model.weights import Checkpoint
from rosebatch.ops.layout import Layout

_SERVED = {
    "FP8": Layout(8, True, (0, 0)),
    "FP8_PER_CHANNEL_PER_TOKEN": Layout(8, True, (1, 0)),
    "NVFP4": Layout(4, True, (1, 16)),
    "W4A16_NVFP4": Layout(4, True, (1, 16)),
    "MXFP8": Layout(8, True, (1, 32)),
}
_MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """See ``Form``. What quantizes activations is not used: these stay in the dtype of the run."""

    ignored: tuple[str, ...]
    layouts: Sequence[Layout]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config``, or the fields of ``hf_quant_config.json``.

        Raises:
            ValueError: a field has a value that is not served.
        """
        fields = Fields(config)
        layers = fields.objects("quantized_layers").values() if fields.get("quant_algo") == _MIXED else [fields]
        if fields.get("quant_algo") is None and fields.get("kv_cache_quant_algo"):
            # Scales of a KV cache alone: weights are plain.
            layers = []
        layouts = dict.fromkeys(_SERVED[each.choice("quant_algo", list(_SERVED))] for each in layers)
        return cls(fields.names("exclude_modules", "ignore"), tuple(layouts))

    def find(self, weights: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        scale, whole = f"{name}_scale", f"{name}_scale_2"
        if weights.shape(scale) is None or weights.shape(name) is None:
            return None
        module = weights.name_of(name).removesuffix(".weight")
        require_unlisted("exclude_modules", self.ignored, module, by_glob)
        if weights.shape(f"{name.removesuffix('weight')}pre_quant_scale") is not None:
            raise UserError(f"{module}.pre_quant_scale is not supported")
        if weights.kind(name) == "U8":
            self._require_named(4, 16, module)
            return nvfp4(weights, name, scale, shape, factor=whole)
        self._require_named(8, 32 if weights.kind(scale) in POWERS else 0, module)
        return scaled(weights, name, scale, shape)

    def _require_named(self, bits: int, columns: int, module: str) -> None:
        """Check that the config has such numbers: memory is planned by it."""
        if all((layout.bits, layout.block[1]) != (bits, columns) for layout in self.layouts):
            groups = f" in groups of {columns}" if columns else ""
            raise UserError(
                f"quantization_config: quant_algo is another than of {module}, which has {bits} bits{groups}"
            )
