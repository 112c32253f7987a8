"""The metadata of a GGUF file: read by key, and refused where nobody has read what describes the model."""

import sys
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from rosebatch.core.errors import printable
from rosebatch.host.model_files import refusal, shown
from rosebatch.model.family import integers

# They describe a file, not a model.
_OF_THE_FILE = ("GGUF.", "general.", "split.", "quantize.", "imatrix.")
# Next to the keys of its architecture, these describe a model.
_OF_A_MODEL = ("tokenizer.", "adapter.", "clip.", "diffusion.", "xielu.")
# Counts and remarks.
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
# Values with which llama.cpp computes as without the key.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count"), (0,)),
    **dict.fromkeys(("nextn_predict_layers", "n_deepstack_layers", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    # None, or that of the last token, as of all models here.
    "pooling_type": (0, 3),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (-1,),
}


class TokenType(IntEnum):
    """Of ``tokenizer.ggml.token_type``."""

    CONTROL = 3
    USER_DEFINED = 4


class Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The library reads nothing where a file has ended, for as many times as the file says."""

    data: Any

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.data, np.memmap):
            # Its slices are made in Python, three for each token.
            self.data = self.data.view(np.ndarray)
        found = super()._get(offset, dtype, count, *args, **kwargs)
        if len(found) < count:
            raise ValueError("the file ends too early")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY and int(self._get(orig_offs + 4, np.uint64)[0]) > len(self.data):
            raise ValueError("an array is longer than the file")
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            # Parts before the type: the length of the name, the name, and the number and sizes of dimensions.
            kind = int(field.parts[4][0])
            if not _is_readable(kind):
                kinds = {each.value: each.name for each in gguf.GGMLQuantizationType}
                raise ValueError(f"the tensor {shown(field.name)} is of type {kinds.get(kind, kind)}")
        super()._build_tensors(start_offs, fields)


@cache
def _is_readable(kind: int) -> bool:
    """Whether the library knows a type of tensors, and dequantizes it: it tries one block."""
    try:
        found = gguf.GGMLQuantizationType(kind)
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[found][1]), np.uint8), found)
    except (ValueError, NotImplementedError):
        return False
    return True


class Metadata:
    """The metadata of a file. Values are read on demand, because the token lists are long.

    A ``kind`` is a type of Python, such as ``float`` or ``list[str]``, or one of ``integers``. A value of another type
    raises UserError, which names the key.
    """

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self._path = path
        self._fields = reader.fields
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None, kind: Any = None) -> Any:
        """The value of a key, or the default, whose type it has if no other ``kind`` is given."""
        self._read.add(key)
        field = self._fields.get(key)
        if field is None:
            return default
        given = field.contents()
        if kind is None:
            kind = Any if default is None else integers() if type(default) is int else type(default)
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError as error:
            raise refusal(self._path, f"GGUF metadata {key!r} is {shown(given)}: {error}") from None

    def need(self, key: str, kind: Any) -> Any:
        """The value of a key, of a type; raises UserError if there is none."""
        if key not in self._fields:
            raise refusal(self._path, f"GGUF metadata {key!r} is missing")
        return self.get(key, kind=kind)

    def require(self, key: str, *neutral: Any) -> None:
        """Raise UserError if a key has another value than these."""
        given = self.get(key, neutral[0], Any)
        if given not in neutral:
            raise refusal(self._path, f"GGUF metadata {key!r} is {shown(given)}; supported is {shown(neutral[0])}")

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin so."""
        return [key for key in self._fields if key.startswith(prefix)]

    def require_understood(self, architecture: str, *, quiet: bool = False) -> None:
        """Check that everything that describes the model was read, or means nothing here.

        Other keys, which people add to files, are named on stderr, unless ``quiet``.

        Raises:
            UserError: a key was not.
        """
        self.require("general.type", "model")
        for name, neutral in _NEUTRAL.items():
            # What the architecture has read may be anything.
            if f"{architecture}.{name}" not in self._read:
                self.require(f"{architecture}.{name}", *neutral)
        self._read.update(f"{architecture}.{name}" for name in _HARMLESS)
        unread = [key for key in self._fields if key not in self._read and not key.startswith(_OF_THE_FILE)]
        for key in unread:
            if key.startswith((f"{architecture}.", *_OF_A_MODEL)):
                raise refusal(self._path, f"GGUF metadata {shown(key)} is not supported")
        if unread and not quiet and sys.stderr is not None:
            names = printable(", ".join(sorted(unread)))
            sys.stderr.write(f"rosebatch: warning: {self._path}: metadata that nothing here reads: {names}\n")
