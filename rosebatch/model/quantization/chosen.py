"""What ``--quantization`` makes of a model's matrices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rosebatch.config.quantization import quantization_named
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError
from rosebatch.core.plain import dtype_name
from rosebatch.host.model_files import read_json, refusal
from rosebatch.model.quantization.dense import DenseWeight, values_of
from rosebatch.model.quantization.folder_config import quantization_of
from rosebatch.model.quantization.forms import form_of
from rosebatch.model.quantization.rounded import in_fp8, random_in
from rosebatch.model.quantization.unread_fields import unread_fields
from rosebatch.model.weights import Checkpoint, Form, Rounding
from rosebatch.ops.fp8 import BLOCKS
from rosebatch.ops.layout import FP8_ROWS, Layout, MatrixBytes
from rosebatch.ops.select import keeps, keeps_experts

_AT_LOAD = "fp8 at load"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a run keeps the matrices of layers.

    Attributes:
        name: of the form, for people; None for plain floats.
        form: of the checkpoint; None if it has plain floats.
        rounds: whether plain matrices become fp8.
        decodes: whether matrices are decoded whatever the device can multiply.
        unread: fields of the checkpoint's config that no form knows.
        stores_fp8: whether the checkpoint is meant for an fp8 KV cache.
    """

    name: str | None = None
    form: Form | None = None
    rounds: bool = False
    decodes: bool = False
    unread: tuple[str, ...] = ()
    stores_fp8: bool = False

    @property
    def identity(self) -> str | None:
        """What ``--resume`` compares and names: the flag's value, or the form that needs none."""
        return "fp8" if self.rounds else "none" if self.decodes else self.name

    @property
    def rounding(self) -> Rounding | None:
        """See ``WeightSource``."""
        return in_fp8 if self.rounds else None

    @property
    def input_group(self) -> int | None:
        """Columns of an input that share a scale where matrices are multiplied in fp8, 0 for all; None if none are."""
        for layout in self._layouts:
            if layout.is_fp8 and not layout.of_experts and layout.block in BLOCKS:
                return layout.block[1]
        return None

    def of_random(self, device: torch.device) -> Rounding | None:
        """What makes random weights of the same form on this device."""
        return self.rounding if self.form is None else random_in(self.form.layouts, device)

    @property
    def _layouts(self) -> list[Layout]:
        return [FP8_ROWS] if self.rounds else [] if self.form is None else [*self.form.layouts]

    def kept(self, switches: Switches, device: str, dtype: torch.dtype) -> MatrixBytes:
        """What the matrices take on a device; of several layouts the largest.

        Args:
            switches, device, dtype: of the run.
        """
        run, itemsize = (switches, device, dtype), dtype.itemsize
        layers = [each if keeps(each, *run) else None for each in self._layouts if not each.of_experts]
        experts = [each if keeps_experts(each, *run) else None for each in self._layouts]
        return MatrixBytes(
            layers=max((each.bytes if each else itemsize for each in layers), default=itemsize),
            experts=max((each.bytes if each else itemsize for each in experts), default=itemsize),
            fp8=bool(layers) and all(each is not None and each.is_fp8 for each in layers),
        )

    def described(self, switches: Switches, device: str, dtype: torch.dtype, *, has_experts: bool) -> str | None:
        """The form, and whether it is decoded."""
        if self.name is None:
            return None
        kept = self._which_stay(switches, device, dtype, has_experts)
        if kept and all(kept):
            return self.name
        return f"{self.name}, {'partly ' if any(kept) else ''}decoded to {dtype_name(dtype)}"

    def why_none_stays(self, switches: Switches, device: str, dtype: torch.dtype, *, has_experts: bool) -> str | None:
        """Why no matrix stays quantized with ``quantized_linear``; None if some do."""
        if self.name is None:
            return "the model's weights are not quantized"
        if self.decodes:
            return "--quantization none decodes all weights"
        found = self._which_stay(replace(switches, quantized_linear=True), device, dtype, has_experts)
        return None if any(found) else f"{self.name} is decoded to {dtype_name(dtype)} here"

    def _which_stay(self, switches: Switches, device: str, dtype: torch.dtype, has_experts: bool) -> list[bool]:
        """Whether matrices of each layout stay, and then experts."""
        kept = [keeps(each, switches, device, dtype) for each in self._layouts if not each.of_experts]
        return kept + [keeps_experts(each, switches, device, dtype) for each in self._layouts if has_experts]


@dataclass(frozen=True, slots=True)
class _Decoded:
    """See ``Form``: another one, whose matrices are floats in the dtype of the run."""

    form: Form
    layouts = ()

    def find(self, weights: Checkpoint, name: str, shape: tuple[int, ...]) -> DenseWeight | None:
        """See ``Form``."""
        found = self.form.find(weights, name, shape)
        return None if found is None else DenseWeight(values_of(found))


PLAIN = Quantization()


def read_quantization(folder: Path, asked: str = "auto") -> Quantization:
    """See ``choose_quantization``: of a model folder.

    Raises:
        FlagError: what is asked for contradicts the checkpoint.
        UserError: a file is broken, or the form is not served; the message names the field.
    """
    path = folder / "config.json"
    try:
        return choose_quantization(asked, quantization_of(folder, read_json(path)))
    except FlagError:
        raise
    except ValueError as error:
        raise refusal(path, error) from None


def choose_quantization(asked: str, config: Mapping[str, Any] | None) -> Quantization:
    """What a checkpoint becomes.

    Args:
        asked: ``--quantization``.
        config: ``quantization_config`` of the checkpoint; None if its weights are plain.

    Raises:
        FlagError: what is asked for contradicts the checkpoint.
        ValueError: the form is not served, see ``form_of``.
    """
    form, wanted = form_of(config), quantization_named(asked)
    if form is None or config is None:
        if wanted == "fp8":
            return Quantization(_AT_LOAD, rounds=True)
        if wanted not in ("auto", "none"):
            what = "the checkpoint is not quantized: fp8 rounds its weights at load, auto leaves them as they are"
            raise FlagError(f"--quantization {asked}: {what}")
        return PLAIN
    method, unread = config["quant_method"], unread_fields(config, form_of)
    layouts = " and ".join(dict.fromkeys(map(str, form.layouts)))
    name = layouts if layouts.startswith(method) else f"{method} {layouts}".rstrip()
    if wanted not in ("auto", "none", method):
        raise FlagError(f"--quantization {asked}: the checkpoint is {name}: leave it out, or take none for 16 bits")
    if wanted == "none":
        return Quantization(name, _Decoded(form), decodes=True, unread=unread)
    return Quantization(name, form, unread=unread, stores_fp8=_names_fp8_cache(config))


def _names_fp8_cache(config: Mapping[str, Any]) -> bool:
    """By compressed-tensors' field, which ModelOpt has too, or by ModelOpt's own."""
    scheme = config.get("kv_cache_scheme")
    named = isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return named or config.get("kv_cache_quant_algo") == "FP8"
