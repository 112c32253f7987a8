"""The tensors of a model, and those of the safetensors files of a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import refusal, refused, shown
from rosebatch.model.adapters.adapter import EMBEDDINGS, HEAD, Adapter
from rosebatch.model.adapters.by_row import Added
from rosebatch.model.adapters.changes import Change, LowRank
from rosebatch.model.lazy_tensor import Cuts, LazyTensor, select
from rosebatch.model.weight_files import open_tensors, weight_files, weight_map
from rosebatch.ops.layout import Layout
from rosebatch.ops.weight import Weight

# Dtypes of plain values, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16")
# Names of other versions of transformers.
_FORMER_NAMES = {"lm_head.weight": "embed_out.weight"}
_NARROW_FLOATS = {"F8_E4M3", "F8_E5M2"}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
# What models compute themselves: rotary frequencies, masks; a tied head is looked at before.
_COMPUTED = ("inv_freq", "masked_bias", "attn.bias", "position_ids", "lm_head.weight")
# Tables of learned positions.
_OF_POSITIONS = ("wpe.weight", "position_embeddings.weight")
# What follows the name of a tensor, or of its module, where values are to be multiplied.
_SCALES = ("weight_scale", "weight_scale_inv", "scale_weight", "weight_scale_2", "input_scale")
# What quantizers store besides: how activations and K and V are rounded, and a shape that config.json says too.
_OF_NO_MATRIX = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale", "output_scale"),
    *("q_scale", "k_scale", "v_scale", "weight_shape"),
)
# Numbers of quantized matrices, in place of ``weight``.
_PACKED = ("qweight", "weight_packed", "weight_blocks")


class Take(NamedTuple):
    """A part of a tensor.

    Attributes:
        dim: the dimension that is cut.
        indices: in this dimension, ascending.
    """

    dim: int
    indices: range | np.ndarray

    @classmethod
    def of(cls, dim: int, indices: range | np.ndarray, size: int) -> "Take | None":
        """So many of ``size`` indices; None if that is all of them."""
        return None if len(indices) == size else cls(dim, indices)

    def runs(self) -> list[tuple[int, int]]:
        """The indices as slices, start and stop."""
        if isinstance(self.indices, range):
            return [(self.indices.start, self.indices.stop)]
        if not len(self.indices):
            return [(0, 0)]
        groups = np.split(self.indices, np.flatnonzero(np.diff(self.indices) != 1) + 1)
        return [(int(group[0]), int(group[-1]) + 1) for group in groups]


class Form(Protocol):
    """How a checkpoint's matrices are quantized."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """Of the numbers, as the config says; the first is that of random weights. Empty if they have no groups."""
        ...

    def find(self, weights: "Checkpoint", name: str, shape: tuple[int, ...]) -> Weight | None:
        """A matrix, unread; None if it is stored as plain floats, or not at all.

        Args:
            weights: of the model.
            name: transformers' name of the tensor of its values.
            shape: ``[out, in]`` or ``[E, out, in]``.

        Raises:
            UserError: config.json says otherwise than the tensors.
        """
        ...


# What a run makes of a matrix of floats: of its values ``[..., out, in]``, unread.
Rounding = Callable[[LazyTensor, torch.dtype], Weight]


class WeightSource(Protocol):
    """Tensors by transformers' names.

    Attributes:
        dtype: of the run.
        rounding: of the matrices of layers that are plain floats; None if they stay so.
    """

    dtype: torch.dtype
    rounding: Rounding | None

    def names(self) -> list[str]:
        """Those of the tensors that are stored, by their own names; none of random weights."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape of a tensor; None if there is none."""
        ...

    def find(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """A matrix that is stored in a form of its own, see ``Form.find``."""
        ...

    def change(self, name: str, shape: tuple[int, ...]) -> Change | None:
        """What an adapter makes of a matrix, see ``Adapter.change``: ``get`` gives it without. None if it stays."""
        ...

    def added(self, name: str, shape: tuple[int, ...]) -> tuple[Added | None, ...]:
        """What each of several adapters adds to the product with a matrix ``[out, in]``, by slot; empty without them.

        The numbers are on the run's device.
        """
        ...

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        fill: float | None = None,
        take: Take | None = None,
    ) -> Tensor:
        """The tensor, on the run's device.

        Args:
            name, shape: of the tensor.
            dtype: of the result; None for the dtype of the run.
            fill: the value of every element if the weights are random; None for random numbers.
            take: the part that is read; None for all.

        Raises:
            UserError: the tensor is missing, unreadable or has another shape.
        """
        ...


class Checkpoint(WeightSource, Protocol):
    """Tensors that are stored: what a ``Form`` reads."""

    def name_of(self, name: str) -> str:
        """The name of a tensor in the checkpoint."""
        ...

    def kind(self, name: str) -> str:
        """The dtype of a tensor, as safetensors names it.

        Raises:
            UserError: the tensor is missing or unreadable.
        """
        ...

    def stored(self, name: str, shape: tuple[int, ...], take: Take | None = None) -> Tensor:
        """The tensor as it is stored, on the run's device; see ``get``."""
        ...

    def on_host(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A small tensor of integers that says how others are read."""
        ...


def lazy_tensor(
    weights: WeightSource, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
) -> LazyTensor:
    """A tensor of the source, see ``WeightSource.get``, of which only the part that is left is read."""
    return _lazy(shape, lambda take: weights.get(name, shape, dtype=dtype, take=take))


def lazy_stored(weights: Checkpoint, name: str, shape: tuple[int, ...]) -> LazyTensor:
    """The same of the numbers as they are stored; narrow floats as bytes, which all operators know."""

    def read(take: Take | None) -> Tensor:
        found = weights.stored(name, shape, take)
        return found.view(torch.uint8) if found.itemsize == 1 else found

    return _lazy(shape, read)


def _lazy(shape: tuple[int, ...], read: Callable[[Take | None], Tensor]) -> LazyTensor:
    def part(cuts: Cuts) -> Tensor:
        if not cuts:
            return read(None)
        # The source cuts one dimension: the one of which the smallest share is wanted.
        dim = min(cuts, key=lambda dim: len(cuts[dim]) / shape[dim])
        ascending, places = np.unique(cuts[dim], return_inverse=True)
        return select(read(Take.of(dim, ascending, shape[dim])), {**cuts, dim: places})

    return LazyTensor(shape, part)


class SafetensorsWeights:
    """The tensors of a model folder, in one ``.safetensors`` file or several.

    Args:
        folder: of the model.
        dtype, device: of the run.
        form: of quantized matrices, by config.json.
        rounding: see ``WeightSource``.
        adapter: of the model, which changes some.
        by_row: adapters of which each row has one, or none; see ``rosebatch.model.adapters.by_row``.

    Raises:
        UserError: a file is missing or broken.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        form: Form | None = None,
        rounding: Rounding | None = None,
        adapter: Adapter | None = None,
        by_row: Sequence[Adapter] = (),
    ) -> None:
        self.folder = folder
        self.adapter = adapter
        self.by_row = by_row
        self.rounding = rounding
        self.dtype = dtype
        self.device = device
        self.form = form
        self._has_form = False
        # The file of each tensor, open.
        self._files: dict[str, tuple[Path, Any]] = {}
        self._asked: set[str] = set()
        # The same of the tensors of each of ``by_row``.
        self._added = [set[str]() for _ in by_row]
        index = weight_map(folder)
        found: dict[str, list[tuple[Path, Any]]] = {}
        for path in weight_files(folder):
            handle = open_tensors(path, "unreadable weights")
            for name in handle.keys():  # noqa: SIM118 (it is no dict)
                found.setdefault(name, []).append((path, handle))
        for name, files in found.items():
            # An index that names a file without the tensor says nothing.
            first, *others = [file for file in files if file[0].name == index.get(name)] or files
            if others:
                raise refusal(folder, f"tensor {name!r} is in {first[0].name} and in {others[0][0].name}")
            self._files[name] = first
        self._names = list(self._files)
        if adapter is not None:
            own = adapter.path, open_tensors(adapter.path, "an unreadable adapter")
            self._files |= dict.fromkeys(adapter.stored.values(), own)

    def names(self) -> list[str]:
        """See ``WeightSource``."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``WeightSource``."""
        name = self.name_of(name)
        if name not in self._files:
            return None
        path, handle = self._files[name]
        with refused(path, f"tensor {name!r} is unreadable"):
            return tuple(handle.get_slice(name).get_shape())

    def find(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """See ``WeightSource``."""
        found = None if self.form is None else self.form.find(self, name, shape)
        self._has_form |= found is not None
        return found

    def require_form(self) -> None:
        """Check, once a model is built, that some matrix was in the form that config.json names.

        Raises:
            UserError: all are plain.
        """
        if self.form is not None and self.form.layouts and not self._has_form:
            what = "quantization_config says that weights are quantized, but all are plain: take --quantization none"
            raise refusal(self.folder, what)

    def change(self, name: str, shape: tuple[int, ...]) -> Change | None:
        """See ``WeightSource``."""
        return None if self.adapter is None else _change_of(self.adapter, name, shape, self._asked)

    def added(self, name: str, shape: tuple[int, ...]) -> tuple[Added | None, ...]:
        """See ``WeightSource``."""
        if len(shape) != 2:
            return ()
        changes = [
            _change_of(adapter, name, shape, asked) for adapter, asked in zip(self.by_row, self._added, strict=True)
        ]
        return tuple([Added.of(change, self._placed) if isinstance(change, LowRank) else None for change in changes])

    def require_adapters(self) -> None:
        """Check, once a model is built, that each tensor of an adapter has its place in it.

        Raises:
            UserError: one has none.
        """
        merged = [] if self.adapter is None else [(self.adapter, self._asked)]
        for adapter, asked in (*merged, *zip(self.by_row, self._added, strict=True)):
            if left := [name for name in adapter.tensor_names if name not in asked]:
                more = f", nor have {len(left) - 1} others" if len(left) > 1 else ""
                raise refusal(adapter.path, f"tensor {left[0]!r} has no place in the model{more}")

    def kind(self, name: str) -> str:
        """See ``Checkpoint``."""
        name = self.name_of(name)
        if name not in self._files:
            raise self._missing(name)
        path, handle = self._files[name]
        with refused(path, f"tensor {name!r} is unreadable"):
            return str(handle.get_slice(name).get_dtype())

    def stored(self, name: str, shape: tuple[int, ...], take: Take | None = None) -> Tensor:
        """See ``Checkpoint``."""
        return self._placed(self._read(self.name_of(name), shape, take, plain=False, device=self.device), None)

    def on_host(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """See ``Checkpoint``."""
        host = torch.device("cpu")
        found: np.ndarray = self._read(self.name_of(name), shape, None, plain=False, device=host).numpy()
        return found

    def name_of(self, name: str) -> str:
        """See ``Checkpoint``. What an adapter holds whole comes before the model's own."""
        names = _names_of(name)
        found = next((other for other in names if other in self._files), name)
        if found not in self._files and name == HEAD and self.adapter is not None and self.adapter.unties:
            found = next((own for own in self._names if own.endswith(EMBEDDINGS)), name)
        self._asked.add(found)
        if self.adapter is not None:
            found = next((self.adapter.stored[other] for other in names if other in self.adapter.stored), found)
            self._asked.add(found)
        return found

    @property
    def unread(self) -> list[str]:
        """Names of tensors that nobody has asked for, but for those that change nothing."""
        known = _COMPUTED if self.form is None else _COMPUTED + _OF_NO_MATRIX
        return [name for name in self._names if name not in self._asked and not name.endswith(known)]

    def require_plain_matrices(self) -> None:
        """Check all of them: transformers loads integers and scaled floats without a word.

        Raises:
            UserError: see ``require_plain``.
        """
        for name in self._files:
            if name.endswith("weight") and len(self.shape(name) or ()) > 1:
                self.require_plain(name)

    def require_plain(self, name: str) -> None:
        """Check that a tensor's numbers are its values.

        Raises:
            UserError: they are integers, or to be multiplied.
        """
        path, handle = self._files[name]
        kind, module = handle.get_slice(name).get_dtype(), name.rpartition(".")[0]
        is_scaled = any(f"{module}.{scale}" in self._files for scale in _SCALES)
        if kind in FLOATS or (kind in _NARROW_FLOATS and not is_scaled and self.form is None):
            return
        why = "config.json has no quantization_config: use the 16-bit weights of the model"
        if self.form is not None:
            why = "there are no scales for it of the form that quantization_config names"
        raise refusal(path, f"tensor {name!r} holds {shown(kind)}, and {why}")

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        fill: float | None = None,
        take: Take | None = None,
    ) -> Tensor:
        """See ``WeightSource``.

        Checkpoints of a bare transformer lack the first part of each name. A table of learned positions may have more
        rows than ``shape``: a lower ``--max-model-len`` uses the first ones.
        """
        if len(shape) == 1 and (change := self.change(name, shape)) is not None:
            changed = change.made_of(LazyTensor.of(self._bias(name, shape)), dtype or self.dtype)
            return changed.part({} if take is None else {take.dim: take.indices})
        found = self._read(self.name_of(name), shape, take, plain=True, device=self.device)
        return self._placed(found, dtype or self.dtype)

    def _bias(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One that an adapter changes, float32: zeros where the model has none."""
        own = self.name_of(name)
        if own not in self._files:
            return torch.zeros(shape, device=self.device)
        return self._placed(self._read(own, shape, None, plain=True, device=self.device), torch.float32)

    def _placed(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """On the run's device: made narrower before, and wider there, so that no more than either moves.

        Where headers alone are looked at, a number that was read stays where it is.
        """
        device = None if self.device.type == "meta" else self.device
        if dtype is not None and dtype.itemsize > tensor.itemsize:
            tensor = tensor.to(device=device)
        return tensor.to(device=device, dtype=dtype)

    def _missing(self, name: str) -> UserError:
        """The error of a tensor that there is not; it says whether the matrix is there in another form."""
        module = name.removesuffix("weight")
        for other in map(self.name_of, (f"{module}{end}" for end in _PACKED)):
            if other in self._files:
                has = "has no quantization_config" if self.form is None else "has a quantization_config of another form"
                return refusal(self.folder, f"weights have {other!r} in place of {name!r}, and config.json {has}")
        return refusal(self.folder, f"weights have no tensor {name!r}")

    def _read(
        self, name: str, shape: tuple[int, ...], take: Take | None, *, plain: bool, device: torch.device
    ) -> Tensor:
        if name not in self._files:
            raise self._missing(name)
        path, handle = self._files[name]
        with refused(path, f"tensor {name!r} is unreadable"):
            if plain:
                self.require_plain(name)
            stored = handle.get_slice(name)
            found = tuple(stored.get_shape())
            # Only as much is read as is used, and nothing of a wrong shape.
            is_longer = name.endswith(_OF_POSITIONS) and len(found) == len(shape) and found[0] > shape[0]
            if (shape[0], *found[1:]) != shape if is_longer else found != shape:
                raise refusal(path, f"tensor {name!r} has shape {shown(found)}, config says {shape}")
            if device.type == "meta":
                # A value of its own is read: what is built depends on it. A scale is none, and meets numbers unread.
                is_number = plain and shape in ((), (1,))
                return _read(stored, handle, name, take) if is_number else _unread(stored, shape, take)
            tensor: Tensor = stored[: shape[0]] if is_longer else _read(stored, handle, name, take)
            return tensor


def _change_of(adapter: Adapter, name: str, shape: tuple[int, ...], asked: set[str]) -> Change | None:
    """What an adapter makes of a tensor of the model; ``asked`` gets the names of the tensors of that."""
    changes = (adapter.change(other, shape) for other in _names_of(name))
    found = next((change for change in changes if change is not None), None)
    asked.update(() if found is None else found.names)
    return found


def _names_of(name: str) -> tuple[str, ...]:
    """A tensor's names: other versions of transformers, and models of more than text, have prefixes."""
    bare = name.partition(".")[2]
    parts = (f"language_model.{name}", f"model.language_model.{bare}", f"model.text_model.{bare}")
    # As transformers saves Qianfan-OCR.
    saved = f"language_model.model.encoder.{bare}"
    return (name, bare, *parts, saved, _FORMER_NAMES.get(name, name))


def _unread(stored: Any, shape: tuple[int, ...], take: Take | None) -> Tensor:
    """A tensor of a file as its header describes it, without values."""
    if take is not None:
        shape = (*shape[: take.dim], len(take.indices), *shape[take.dim + 1 :])
    return torch.empty(shape, dtype=_DTYPES.get(stored.get_dtype(), torch.uint8), device="meta")


def _read(stored: Any, handle: Any, name: str, take: Take | None) -> Tensor:
    """A tensor of a file, or the part of it that is wanted: nothing else is read."""
    if take is None:
        tensor: Tensor = handle.get_tensor(name)
        return tensor
    before = (slice(None),) * take.dim
    parts: list[Tensor] = [stored[(*before, slice(start, stop))] for start, stop in take.runs()]
    return parts[0] if len(parts) == 1 else torch.cat(parts, take.dim)
