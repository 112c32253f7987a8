"""Each prompt is completed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rosebatch.io.result_names import RESULT_FIELDS
from rosebatch.io.results import Result, completion_fields
from rosebatch.io.rows import REQUEST_FIELDS, carried_fields, parse_row
from rosebatch.io.tasks.task import Task

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Generate(Task):
    """See ``Task``."""

    name: ClassVar[str] = "generate"
    doing: ClassVar[str] = "generating"
    counts: ClassVar[Literal["output", "prompt"]] = "output"
    samples: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True
    takes_images: ClassVar[bool] = True
    result_fields: ClassVar[tuple[str, ...]] = RESULT_FIELDS

    @property
    def request_fields(self) -> frozenset[str]:
        """See ``Task``."""
        return REQUEST_FIELDS

    def types(self) -> Mapping[str, "pa.DataType"]:
        """See ``Task``."""
        from rosebatch.io.parquet_types import RESULT_TYPES

        return RESULT_TYPES

    def result(self, result: Result) -> dict[str, Any]:
        """See ``Task``."""
        return completion_fields(result)

    # Not a method that calls it: another call with keywords takes 0.4 µs a row.
    parse = staticmethod(parse_row)

    def carried(self, values: Mapping[str, Any], keep_prompt: bool, result_column: str | None) -> dict[str, Any]:
        """See ``Task``."""
        return carried_fields(values, keep_prompt, result_column)


GENERATE = Generate()
