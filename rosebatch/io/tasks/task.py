"""What a job makes of each prompt: which fields a row may have, and which its result has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from rosebatch.core.errors import FlagError, RowError, UserError
from rosebatch.core.sampling_params import GREEDY
from rosebatch.io.columns import Columns
from rosebatch.io.fields import Message, prompt_options, to_struct
from rosebatch.io.images.messages import messages_with_images
from rosebatch.io.result_names import require_no_collision, reserved_names
from rosebatch.io.results import Result
from rosebatch.io.row_names import unclear_names
from rosebatch.io.rows import PROMPT_FIELDS, FailedRow, Row, require_prompt
from rosebatch.io.text_only import IN_ROWS, is_media, require_text

if TYPE_CHECKING:
    import pyarrow as pa

# The key of why no row may have images.
IMAGES = "images"


class PromptFields(msgspec.Struct):
    """The fields of a row that only has a prompt. All others are carried through to the result."""

    id: str | int | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    lora: str | None = None


@dataclass(frozen=True)
class Task:
    """What a job makes of each prompt. Unless a task overrides it, a row is a prompt to which nothing is generated.

    Workers get it pickled.

    Attributes:
        name: of its command.
        doing: the same as a progress bar shows it.
        counts: which tokens progress counts.
        samples: whether rows have sampling fields.
        reads_logits: whether it needs a model with an output projection.
        takes_images: whether chats of rows may have images. Whether the model sees them shows later.
        fields: of a row.
        prompt_fields: those of which it has one.
        result_fields: of a result, without the carried ones. They are in this order.
    """

    name: ClassVar[str]
    doing: ClassVar[str]
    counts: ClassVar[Literal["output", "prompt"]] = "prompt"
    samples: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False
    fields: ClassVar[type[PromptFields]] = PromptFields
    prompt_fields: ClassVar[Sequence[str]] = PROMPT_FIELDS
    result_fields: ClassVar[tuple[str, ...]]

    @property
    def request_fields(self) -> frozenset[str]:
        """Fields of a row that are for the task: its result does not take them over."""
        return _request_fields(self.fields)

    def types(self) -> Mapping[str, "pa.DataType"]:
        """The types of the result's fields in a table."""
        raise NotImplementedError

    def result(self, result: Result) -> dict[str, Any]:
        """The result's own fields in a line."""
        raise NotImplementedError

    def asks(self, line: Any) -> dict[str, Any]:
        """Fields of ``Row`` that follow from a line, without the prompt's.

        Args:
            line: the checked line, of type ``fields``.

        Raises:
            RowError: a value of the line is impossible.
        """
        return {"sampling": GREEDY}

    def require_prompt(self, line: Any, values: Mapping[str, Any]) -> None:
        """Check that a line, of type ``fields``, has a prompt; ``values`` are the line as it was decoded.

        Raises:
            RowError: it has none, or several.
        """
        require_prompt(line, values, self.prompt_fields)

    def opens_answer(self, line: Any) -> bool:
        """Whether the chat of a line, of type ``fields``, ends with the opening of an answer."""
        return bool(line.add_generation_prompt)

    def parse(
        self,
        values: dict[str, Any],
        *,
        index: int,
        where: str,
        defaults: Mapping[str, Any],
        keep_prompt: bool = False,
        result_column: str | None = None,
    ) -> Row | FailedRow:
        """Check one line; arguments as of ``rosebatch.io.rows.parse_row``."""
        metadata = self.carried(values, keep_prompt, result_column)
        try:
            require_text(values, IN_ROWS if self.takes_images else f"rows of {self.name} are texts")
            require_no_collision(values, result_column, self.result_fields)
            line = to_struct(values, self.fields)
            line.add_generation_prompt = self.opens_answer(line)
            self.require_prompt(line, values)
            chat = line.messages is not None
            messages, images = messages_with_images(values["messages"]) if chat else (None, ())
            known = {name: value for name, value in values.items() if name in self.request_fields}
            return Row(
                index=index,
                where=where,
                metadata=metadata,
                id=line.id,
                options=prompt_options(line, {"add_generation_prompt": False, **known} if chat else known, chat=chat),
                prompt=line.prompt,
                messages=messages,
                images=images,
                prompt_token_ids=line.prompt_token_ids,
                unclear=unclear_names(metadata, self.request_fields),
                lora=line.lora,
                **self.asks(line),
            )
        except RowError as error:
            return FailedRow(index=index, where=where, metadata=metadata, error=error)

    def carried(self, values: Mapping[str, Any], keep_prompt: bool, result_column: str | None) -> dict[str, Any]:
        """The fields of a row that its result takes over; arguments as of ``parse``."""
        dropped = reserved_names(result_column, self.result_fields)
        dropped = dropped if keep_prompt else dropped | self.request_fields
        return {name: value for name, value in values.items() if name not in dropped and not is_media(name, value)}

    def with_defaults(self, row: Row | FailedRow) -> Row | FailedRow:
        """The row, with the job's own parameters for what it leaves open. Requests of a batch come here too."""
        return row

    def require_able(
        self, refused: Mapping[str, str], prompt_names: Sequence[str], hidden_size: int | None, columns: Columns
    ) -> None:
        """Check that the model can do this.

        Args:
            refused: why it cannot do a task or a part of it, by name.
            prompt_names: of the texts that the model wants before what it embeds.
            hidden_size: numbers of its vectors; None if that is not known.
            columns: which fields of rows are their prompts.

        Raises:
            UserError: it cannot.
        """
        if why := refused.get(self.name):
            raise UserError(why)
        if columns.image_field is None:
            return
        flag = "--prompt" if columns.of_files else "--image-column"
        if not self.takes_images:
            raise FlagError(f"{flag} has no meaning for {self.name}: its rows are texts")
        if why := refused.get(IMAGES):
            raise UserError(f"{flag}: {why}")

    def require_applies(self, *, is_batch: bool, to_table: bool) -> None:
        """Check that the task's flags mean something for an OpenAI batch, or for an output that is a table.

        Raises:
            FlagError: one does not.
        """

    def description(self, pooling: Mapping[str, Any], refused: Mapping[str, str]) -> dict[str, Any]:
        """What report and manifest say of the task; ``pooling`` is the model's own, ``refused`` as of the above."""
        return {}


@cache
def _request_fields(fields: type[PromptFields]) -> frozenset[str]:
    return frozenset(fields.__struct_fields__) - {"id"}
