"""Each prompt is embedded: its result is a vector."""

from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec.structs import replace

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.pooling_params import PLAIN, EncodingFormat, PoolingParams
from rosebatch.io.columns import Columns
from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.tasks.task import PromptFields, Task

if TYPE_CHECKING:
    import pyarrow as pa

# The key of the task's description.
DESCRIBED = "embedding"


class _Fields(PromptFields):
    dimensions: int | None = None
    prompt_name: str | None = None


@dataclass(frozen=True)
class Embed(Task):
    """See ``Task``.

    Attributes:
        pooling: for what a row and the model leave open.
        encoding_format: of vectors in JSONL.
    """

    name: ClassVar[str] = "embed"
    doing: ClassVar[str] = "embedding"
    takes_images: ClassVar[bool] = True
    fields: ClassVar[type[PromptFields]] = _Fields
    result_fields: ClassVar[tuple[str, ...]] = ("index", "embedding", "usage", "error")
    pooling: PoolingParams = field(default_factory=PoolingParams)
    encoding_format: EncodingFormat = "float"

    def types(self) -> Mapping[str, "pa.DataType"]:
        """See ``Task``."""
        import pyarrow as pa

        from rosebatch.io.parquet_types import RESULT_TYPES

        return {
            "index": pa.int64(),
            "embedding": pa.list_(pa.float32()),
            "usage": pa.struct([("prompt_tokens", pa.int64())]),
            "error": RESULT_TYPES["error"],
        }

    def result(self, result: Result) -> dict[str, Any]:
        """See ``Task``."""
        (embedding,) = result.pooled
        own = {"index": result.row.index, "embedding": encoded(embedding, self.encoding_format)}
        return {**own, "usage": {"prompt_tokens": result.prompt_tokens}}

    def asks(self, line: _Fields) -> dict[str, Any]:
        """See ``Task``."""
        return {**super().asks(line), "pooling": pooling_params(line.dimensions, line.prompt_name)}

    def with_defaults(self, row: Row | FailedRow) -> Row | FailedRow:
        """See ``Task``."""
        if isinstance(row, FailedRow) or row.pooling is None:
            return row
        return replace(row, pooling=row.pooling.over(self.pooling))

    def require_able(
        self, refused: Mapping[str, str], prompt_names: Sequence[str], hidden_size: int | None, columns: Columns
    ) -> None:
        """See ``Task``. A pooling that was named replaces one of the model's that is not served."""
        asked = self.pooling.pooling
        if asked is not None and asked in refused:
            raise FlagError(f"--pooling {asked}: {refused[asked]}")
        own = refused if asked is None else {name: why for name, why in refused.items() if name != self.name}
        super().require_able(own, prompt_names, hidden_size, columns)
        name, wanted = self.pooling.prompt_name, self.pooling.dimensions
        if name is not None and name not in prompt_names:
            has = f"only {', '.join(prompt_names)}" if prompt_names else "no prompts"
            raise FlagError(f"--prompt-name {name}: the model has {has}")
        if wanted is not None and hidden_size is not None and wanted > hidden_size:
            raise FlagError(f"--dimensions {wanted}: a vector of the model has {hidden_size} numbers")

    def require_applies(self, *, is_batch: bool, to_table: bool) -> None:
        """See ``Task``."""
        if self.encoding_format != "float" and (is_batch or to_table):
            what = "an OpenAI batch: its lines say it themselves" if is_batch else "a table: it holds numbers"
            raise FlagError(f"--encoding-format has no meaning for {what}")

    def description(self, pooling: Mapping[str, Any], refused: Mapping[str, str]) -> dict[str, Any]:
        """See ``Task``."""
        decided = self.pooling.over(PoolingParams(**pooling)).over(PLAIN)
        own = {name: getattr(decided, name) for name in ("pooling", "normalize", "dimensions", "prompt_name")}
        return {DESCRIBED: {**own, "encoding_format": self.encoding_format}}


_STATES = {
    "last": "state of the last token",
    "mean": "mean of all tokens",
    "max": "largest numbers of all tokens",
    "cls": "state of the first token",
}


def in_words(described: Mapping[str, Any]) -> str:
    """What the vectors of a run are, from the value of its task's description."""
    parts = [_STATES[described["pooling"]]]
    if described["dimensions"] is not None:
        parts.append(f"{described['dimensions']} dimensions")
    if described["prompt_name"] is not None:
        parts.append(f"prompt {described['prompt_name']}")
    return ", ".join([*parts, "normalised" if described["normalize"] else "not normalised"])


def pooling_params(dimensions: int | None, prompt_name: str | None = None) -> PoolingParams:
    """The parameters of a request.

    Raises:
        RowError: its dimensions are impossible.
    """
    try:
        return PoolingParams(dimensions=dimensions, prompt_name=prompt_name)
    except ValueError as error:
        raise RowError("invalid_dimensions", str(error)) from None


def encoded(embedding: "array[float]", encoding_format: EncodingFormat) -> list[float] | str:
    """Numbers of fp32, or their bytes, lowest first, as base64. A reader of either gets the same fp32 again."""
    if encoding_format == "float":
        return embedding.tolist()
    return b64encode(np.asarray(embedding, "<f4").tobytes()).decode()
