"""A LoRA adapter: what it makes of the tensors of its model, as PEFT saved it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import read_json, refusal, refused, shown
from rosebatch.model.adapters.changes import AddedBias, Change, LowRank, TokenRows
from rosebatch.model.adapters.fields import AdapterFields
from rosebatch.model.adapters.folder import ADAPTER_CONFIG, ADAPTER_FILE
from rosebatch.model.weight_files import open_tensors

# PEFT's wrappers around the model, and around modules.
_WRAPPERS = re.compile(r"^(base_model\.model\.|base_model\.)?")
_WRAPPED = ".base_layer"
# A tensor of a linear, of an embedding, or of an embedding's rows.
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_magnitude_vector(\.weight)?"
    r"|lora_embedding_A|lora_embedding_B|token_adapter\.trainable_tokens_delta)"
)
_LORA = re.compile(r"\.(lora_|token_adapter|trainable_tokens)")
_EXPERTS = ".experts"
# Of q, k and v, which are one product: its B has a block for each, and zeros beside it.
_MOST_PROJECTIONS = 3
# The ends of names of matrices of the vocabulary.
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


@dataclass(frozen=True, slots=True)
class OfExperts:
    """A and B of a parameter that holds a matrix for each of E experts. Their shapes say which parameter it is.

    Attributes:
        names: see ``Change``.
        module: whose parameter it is.
        a: ``[E · r, in]``, an expert after the other.
        b: ``[out, r · E]``, all experts of a rank side by side.
    """

    names: tuple[str, ...]
    module: str
    a: Tensor
    b: Tensor

    def change(self, fields: AdapterFields, parameter: str, shape: tuple[int, ...]) -> LowRank | None:
        """What becomes of a parameter ``[E, out, in]``; None if this is of another one."""
        count, out, width = shape
        if (len(self.b), self.a.shape[1]) != (out, width) or len(self.a) % count:
            return None
        rank = len(self.a) // count
        a, b = self.a.view(count, rank, width), self.b.view(out, rank, count).permute(2, 0, 1)
        return LowRank(self.names, a, b, fields.scale(f"{self.module}.{parameter}", rank))


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in a folder.

    Attributes:
        name: by which it is asked for.
        folder: with its two files.
        fields: of its config.
        changes: by the model's names of tensors.
        experts: by the model's names of modules.
        stored: names of the model's tensors that the adapter holds whole -> names in its file.
        unties: whether a head that was the embedding is another matrix.
    """

    name: str
    folder: Path
    fields: AdapterFields
    changes: Mapping[str, Sequence[Change]]
    experts: Mapping[str, Sequence[OfExperts]]
    stored: Mapping[str, str]
    unties: bool = False

    @property
    def path(self) -> Path:
        """The file of its tensors."""
        return self.folder / ADAPTER_FILE

    @property
    def files(self) -> list[Path]:
        """Those that are read."""
        return [self.folder / ADAPTER_CONFIG, self.path]

    @property
    def tensor_names(self) -> list[str]:
        """Those of all its tensors, in its file."""
        groups: Iterable[Sequence[Change | OfExperts]] = (*self.changes.values(), *self.experts.values())
        return [*self.stored.values(), *(name for group in groups for each in group for name in each.names)]

    def by_row_numbers(self, reads: Callable[[str], int]) -> int:
        """Numbers of all A and B where rows choose adapters, at most; ``reads``: how often a model reads a matrix."""
        return sum(reads(name) * (each.a.numel() + _MOST_PROJECTIONS * each.b.numel()) for name, each in self.pairs)

    @property
    def pairs(self) -> list[tuple[str, LowRank]]:
        """A and B of matrices, by the model's names of these."""
        named = [(name, each) for name, group in self.changes.items() for each in group]
        return [(name, each) for name, each in named if isinstance(each, LowRank)]

    def change(self, name: str, shape: tuple[int, ...]) -> Change | None:
        """What becomes of a tensor; None if it stays as it is.

        Args:
            name: of the model's tensor.
            shape: of it; of a matrix ``[out, in]`` or ``[E, out, in]``.

        Raises:
            UserError: the adapter is for another shape.
        """
        found: Sequence[Change] = self.changes.get(name, ())
        module, _, parameter = name.rpartition(".")
        if module in self.experts and len(shape) == 3:
            ours = (each.change(self.fields, parameter, shape) for each in self.experts[module])
            found = [each for each in ours if each is not None]
        if not found:
            return None
        first, *others = found
        if others:
            raise refusal(self.path, f"{others[0].names[0]} and {first.names[0]} change the same tensor")
        # A dimension of which it knows nothing is 0.
        own = tuple(size or whole for size, whole in zip(first.shape, shape, strict=False))
        if len(first.shape) != len(shape) or own != shape:
            raise refusal(self.path, f"{first.names[0]} is for a tensor {shown(first.shape)}, the model's is {shape}")
        if isinstance(first, TokenRows) and max(first.ids) >= shape[0]:
            what = f"trainable_token_indices names {max(first.ids)}, the model has {shape[0]} tokens"
            raise refusal(self.folder / ADAPTER_CONFIG, what)
        return first

    def of_tied(self) -> "Adapter":
        """The same for a model whose head is its embedding: rows of tokens are those of both, all else is of one."""
        rows = [each for own in self.changes.values() for each in own if isinstance(each, TokenRows)]
        of_one = {*self.stored, *(name for name, own in self.changes.items() if [*own] != rows)}
        changes = {**self.changes, HEAD: [*self.changes.get(HEAD, ()), *rows]}
        return replace(self, changes=changes, unties=any(name.endswith((HEAD, *EMBEDDINGS)) for name in of_one))


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read what an adapter says. Tensors stay in their file until they are used.

    Args:
        name: see ``Adapter``.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        UserError: a file is missing or broken, or PEFT would compute what is not served; the message names the field.
    """
    config, path = folder / ADAPTER_CONFIG, folder / ADAPTER_FILE
    values = read_json(config)
    try:
        fields = AdapterFields.of(values)
    except ValueError as error:
        raise refusal(config, error) from None
    if not path.exists() and (folder / "adapter_model.bin").exists():
        what = "adapter_model.bin is not read, for it may run code: save_pretrained of PEFT writes .safetensors"
        raise refusal(folder, what)
    handle = open_tensors(path, "an unreadable adapter")
    names = list(handle.keys())
    if not names:
        raise refusal(path, "it has no tensors")
    modules: dict[str, dict[str, str]] = {}
    stored: dict[str, str] = {}
    for full in names:
        own = _WRAPPERS.sub("", full)
        if match := _PART.fullmatch(own):
            modules.setdefault(match["module"], {})[match["part"].removesuffix(".weight")] = full
        elif _LORA.search(own):
            raise refusal(path, f"tensor {shown(full)} is of no form that is served")
        else:
            module, _, end = own.rpartition(".")
            stored[f"{module.removesuffix(_WRAPPED)}.{end}" if module else own] = full
    changes: dict[str, list[Change]] = {}
    experts: dict[str, list[OfExperts]] = {}
    with refused(path, "an unreadable adapter"):
        for module, parts in modules.items():
            for place, change in _changes(path, handle, fields, module, parts):
                if isinstance(change, OfExperts):
                    experts.setdefault(place, []).append(change)
                else:
                    changes.setdefault(place, []).append(change)
    return Adapter(name, folder, fields, changes, experts, stored)


def require_by_row(adapter: Adapter) -> None:
    """Check that an adapter adds to products of layers alone: that is what each row can have of its own.

    Raises:
        UserError: it changes something else, too; the message names the field that says so, or the module.
    """

    def refuse(what: str, name: str) -> NoReturn:
        alone = "is served for one --lora alone, which is merged: give its rows a run of their own"
        raise refusal(adapter.path, f"{what} ({shown(name)}) {alone}")

    for each in adapter.experts.values():
        refuse("an adapter of experts", each[0].names[0])
    for name, changes in adapter.changes.items():
        for change in changes:
            if isinstance(change, TokenRows):
                refuse("trainable_token_indices", change.names[0])
            elif isinstance(change, AddedBias):
                refuse("lora_bias", change.names[0])
            elif isinstance(change, LowRank) and change.magnitude is not None:
                refuse("use_dora", change.names[-1])
            elif isinstance(change, LowRank) and (change.turned or name.endswith((HEAD, *EMBEDDINGS))):
                refuse("an adapter of the embedding or the head", change.names[0])
    for name, full in adapter.stored.items():
        refuse("bias" if name.endswith(".bias") else "modules_to_save", full)


def _changes(
    path: Path, handle: Any, fields: AdapterFields, module: str, parts: Mapping[str, str]
) -> Iterator[tuple[str, Change | OfExperts]]:
    """What a module's tensors change, by the model's names of tensors; of experts, by that of the module."""

    def refuse(what: str) -> UserError:
        return refusal(path, f"{module}: {what}")

    def get(*ends: str, dims: int) -> list[Tensor]:
        if missing := [end for end in ends if end not in parts]:
            raise refuse(f"there is no {missing[0]} to {next(iter(parts))}")
        found: list[Tensor] = [handle.get_tensor(parts[end]) for end in ends]
        for end, tensor in zip(ends, found, strict=True):
            if tensor.ndim != dims or not tensor.is_floating_point() or not tensor.numel():
                raise refuse(
                    f"{end} is {shown(tuple(tensor.shape))} of {tensor.dtype}, not {dims} dimensions of floats"
                )
        return found

    base = module
    while base.endswith(_WRAPPED):
        base = base.removesuffix(_WRAPPED)
    own = dict(parts)
    if "token_adapter.trainable_tokens_delta" in own:
        ids, (rows,) = fields.tokens_of(base), get("token_adapter.trainable_tokens_delta", dims=2)
        if len(ids) != len(rows) or len(set(ids)) != len(ids) or min(ids) < 0:
            raise refuse(f"{len(rows)} rows, and trainable_token_indices names {shown(list(ids))}")
        yield f"{base}.weight", TokenRows((own.pop("token_adapter.trainable_tokens_delta"),), tuple(ids), rows)
    if not own:
        return
    turned = "lora_embedding_A" in own or "lora_embedding_B" in own
    ends = ("lora_embedding_A", "lora_embedding_B") if turned else ("lora_A", "lora_B")
    a, b = get(*ends, dims=2)
    if a.shape[0] != b.shape[1]:
        raise refuse(f"{ends[0]} has rank {a.shape[0]}, {ends[1]} {b.shape[1]}")
    used = tuple(own[end] for end in ends)
    if base.endswith(_EXPERTS):
        if len(own) > len(ends):
            raise refuse(f"{shown(sorted(own)[-1])} is not served for experts")
        yield base, OfExperts(used, base, a, b)
        return
    scale, magnitude = fields.scale(base, a.shape[0]), None
    if "lora_magnitude_vector" in own:
        used += (own["lora_magnitude_vector"],)
        (magnitude,) = get("lora_magnitude_vector", dims=handle.get_tensor(used[-1]).ndim)
        magnitude = magnitude.flatten()
        if magnitude.shape != b.shape[:1]:
            raise refuse(f"lora_magnitude_vector has {len(magnitude)} numbers for {len(b)} outputs")
    yield f"{base}.weight", LowRank(used, a, b, scale, magnitude, turned)
    if "lora_B.bias" in own:
        (bias,) = get("lora_B.bias", dims=1)
        yield f"{base}.bias", AddedBias((own["lora_B.bias"],), bias, scale)
