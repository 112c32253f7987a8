"""Which columns or fields of a row are its prompt and its id, and which its result takes over."""

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from rosebatch.core.errors import FlagError, RowError
from rosebatch.io import prompt_template
from rosebatch.io.image_column import with_image_column
from rosebatch.io.parsed_size import bounded_json
from rosebatch.io.result_names import is_of_a_result
from rosebatch.io.rows import OTHER_FORMS, PROMPT_FIELDS, REQUEST_FIELDS

# pandas makes floats of integers in columns with missing values.
INTEGERS = frozenset(
    {
        *("id", "max_tokens", "min_tokens", "top_k", "seed", "n", "best_of", "truncate_prompt_tokens"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "max_reasoning_tokens", "dimensions"),
        *("max_completion_tokens", "max_new_tokens", "max_output_tokens", "min_new_tokens", "n_predict"),
        *("num_return_sequences", "sampling_seed", "thinking_token_budget"),
    }
)
_SYSTEM_ROLES = ("system", "developer")
_JSON_IDS = {str, int, float, type(None)}
TEXT_FIELDS = frozenset(
    {"prompt", "suffix", "guided_grammar", "guided_regex", "regex", "reasoning_effort", "verbosity"}
)
# The field of the image where each file of the input is one. No flag can name it: its value is none of JSON.
FILE_IMAGE = ""
# Fields whose CSV cells are JSON. All others are texts.
_LISTS_OR_TEXTS = {"stop", "text_1", "text_2"}
_JSON = (REQUEST_FIELDS | {"dimensions", "continuations", "choices", "logprob_token_ids"} | _LISTS_OR_TEXTS) - (
    TEXT_FIELDS | {"id"}
)


@dataclass(frozen=True, slots=True)
class Columns:
    """What the names of columns mean; of JSONL rows, the names of fields.

    Attributes:
        prompt: a text is a prompt, a list of messages a chat, a list of integers token ids. Other fields of prompts
            then count for nothing. None: they have their own names.
        id: the id of a row; None: ``id``.
        carried: what results take over, if it is there; None: all that no row needs for itself, or all of a table.
        template: makes the prompt of columns, see ``rosebatch.io.prompt_template``.
        system: a message before chats that have none of its kind; a prompt that is a text becomes the user's message.
        keeps_prompt: whether results take over the prompt, also one that was made.
        image: an image or a list of them, see ``rosebatch.io.image_column``: they come before the prompt, which is a
            text, in a user's message. Results take them over only if ``carried`` names them.
        shared: the prompt of all rows. Without ``image``, the files of the input are the images.
    """

    prompt: str | None = None
    id: str | None = None
    carried: tuple[str, ...] | None = None
    template: str | None = None
    system: str | None = None
    keeps_prompt: bool = False
    image: str | None = None
    shared: str | None = None

    @classmethod
    def of(
        cls,
        prompt: str | None,
        id: str | None,
        carried: str | Sequence[str] | None,
        template: str | None = None,
        system: str | None = None,
        keeps_prompt: bool = False,
        image: str | None = None,
        shared: str | None = None,
    ) -> "Columns":
        """From flags or parameters.

        Args:
            prompt, id, image: names.
            carried: names, or one text with commas between them; empty for none.
            template, system, keeps_prompt, shared: as the attributes.

        Raises:
            FlagError: a name is empty, the template is none, or there are two kinds of prompts.
        """
        names = carried.split(",") if isinstance(carried, str) and carried else carried
        kept = None if names is None else tuple(dict.fromkeys(names))
        found = cls(prompt, id, kept, template, system, keeps_prompt, image, shared)
        for flag, name in (("--prompt-column", prompt), ("--id-column", id), ("--image-column", image)):
            if name == "":
                raise FlagError(f"{flag} needs a name")
        if found.carried is not None and "" in found.carried:
            raise FlagError("--columns needs names with commas between them")
        if prompt_template.names(template) and prompt is not None:
            raise FlagError("--prompt-template and --prompt-column exclude each other: name the column in the template")
        if shared is not None and (prompt is not None or template is not None):
            other = "--prompt-column" if template is None else "--prompt-template"
            raise FlagError(f"--prompt and {other} exclude each other: a row has one prompt")
        for flag, text in (("--system-prompt", system), ("--prompt", shared)):
            if text == "":
                raise FlagError(f"{flag} needs a text")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For a manifest, as JSON gives it back."""
        return {**asdict(self), "carried": None if self.carried is None else list(self.carried)}

    def require_in(
        self, names: Collection[str], path: str, prompts: Sequence[str] = PROMPT_FIELDS, way: str | None = None
    ) -> None:
        """Check that a table has the columns that were named, and one for prompts.

        Args:
            names: of its columns.
            path: for messages.
            prompts: the names of which a column of prompts has one, if no flag names it.
            way: out, where that is missing; None: what the names tell.

        Raises:
            FlagError: it lacks one.
        """
        separator = (
            "; columns are separated by commas, in a .tsv by tabs"
            if any({";", "|", "\t"} & set(name) for name in names)
            else ""
        )
        if next(iter(names), "").startswith("{"):
            separator = "; lines of JSON need --input-format jsonl"
        has = ", ".join(names) + separator
        named = (("--prompt-column", self.prompt), ("--id-column", self.id), ("--image-column", self.image))
        for flag, name in (*named, *(("--columns", each) for each in self.carried or ())):
            if name and name not in names:
                raise FlagError(f"{flag} {name}: {path} has no such column, but {has}")
        for name in prompt_template.names(self.template):
            if name not in names:
                spaced = "" if name == name.strip() else " with these spaces"
                raise FlagError(f"--prompt-template: {path} has no column {name}{spaced}, but {has}")
        if self.makes_prompt:
            if self.keeps_prompt and "prompt" in names:
                raise FlagError(f"--keep-prompt: {path} has a column prompt, which results keep: leave it out")
        elif self.prompt is None and not set(prompts).intersection(names):
            message = f"{path}: has none of the columns {', '.join(prompts)}, but {', '.join(names)}"
            ways = (way for name, way in OTHER_FORMS.items() if name in names)
            plain = f"--prompt-column NAME says which has the prompts{separator}"
            raise FlagError(f"{message}: {next(ways, way or plain)}")

    def may_have_prompt(self, names: Container[str], prompts: Sequence[str] = PROMPT_FIELDS) -> bool:
        """Whether a row with these fields may be served; ``prompts`` as of ``require_in``."""
        if self.image is not None and self.image not in names:
            return False
        if self.makes_prompt:
            return all(name in names for name in prompt_template.names(self.template))
        return any(name in names for name in (prompts if self.prompt is None else (self.prompt,)))

    def needs(self, name: str, asked: Container[str]) -> bool:
        """Whether a column of a table is read at all; ``asked`` as of ``request``."""
        return self.carried is None or name in self.named or name in asked

    @property
    def named(self) -> frozenset[str]:
        """The columns that a flag names."""
        read = (self.prompt, self.id, self.image_field, *prompt_template.names(self.template))
        return frozenset(filter(None, (*read, *(self.carried or ()))))

    def carries(self, name: str, *, is_table: bool) -> bool:
        """Whether a column may be carried, by its name."""
        if self.carried is not None:
            return name in self.carried
        return name != self.image_field and (is_table or name != self.prompt)

    @property
    def of_files(self) -> bool:
        """Whether each file of the input is an image, and so a row."""
        return self.shared is not None and self.image is None

    @property
    def image_field(self) -> str | None:
        """The column or field of images; None if there is none."""
        return FILE_IMAGE if self.of_files else self.image

    @property
    def makes_prompt(self) -> bool:
        """Whether prompts are in no column."""
        return self.template is not None or self.shared is not None

    def made_prompt(self, values: Mapping[str, Any]) -> str | None:
        """The prompt that a row gets; None if it has one itself.

        Raises:
            RowError: a column of the template is missing.
        """
        if self.shared is not None:
            return self.shared
        return None if self.template is None else prompt_template.fill(self.template, values)

    def request(
        self,
        values: Mapping[str, Any],
        asked: Container[str],
        made: str | None,
        *,
        is_table: bool,
        prompts: Sequence[str] = PROMPT_FIELDS,
    ) -> dict[str, Any]:
        """A row's fields by the names that all rows have. Those that it only carries are among them.

        Args:
            values: by the names of its columns.
            asked: the names of a request's fields.
            made: see ``made_prompt``.
            is_table: whether all columns are carried.
            prompts: the names of prompts' fields.

        Raises:
            RowError: it has no prompt in the column of prompts, or its prompt can have no system message or no image.
        """
        request = {
            name: value
            for name, value in values.items()
            if self.carries(name, is_table=is_table) or (name in asked and not is_of_a_result(name, value))
        }
        if self.id is not None:
            request["id"] = values.get(self.id)
        prompt = made if self.prompt is None else values.get(self.prompt)
        if self.prompt is not None and prompt is None:
            raise RowError("missing_prompt", f"{self.prompt}, which --prompt-column names, is missing")
        if prompt is not None:
            for name in prompts:
                request.pop(name, None)
            request[_prompt_field(prompt)] = prompt
        if (image := self.image_field) is not None:
            request = with_image_column(request, values.get(image), image)
        return request if self.system is None else _with_system(request, self.system)


def _with_system(request: dict[str, Any], system: str) -> dict[str, Any]:
    """A row's fields with a system message, unless its chat has one."""
    message = {"role": "system", "content": system}
    prompt, messages = request.get("prompt"), request.get("messages")
    if request.get("prompt_token_ids") is not None:
        raise RowError("invalid_field", "--system-prompt needs a prompt given as text or messages, not as token ids")
    if isinstance(prompt, str) and prompt and messages is None:
        return {**request, "prompt": None, "messages": [message, {"role": "user", "content": prompt}]}
    if not isinstance(messages, list) or not messages:
        return request
    has_one = any(isinstance(each, Mapping) and each.get("role") in _SYSTEM_ROLES for each in messages)
    return request if has_one else {**request, "messages": [message, *messages]}


def _prompt_field(prompt: Any) -> str:
    if not isinstance(prompt, list) or not prompt:
        return "prompt"
    return "messages" if isinstance(prompt[0], Mapping) else "prompt_token_ids"


def as_in_json(values: dict[str, Any]) -> dict[str, Any]:
    """A table's row as JSON would have it. If nothing differs, it is the same object.

    Floats in place of integers are integers. An id that is no text or number, such as a UUID or a date, is the text
    that results have for it. Keys of ``logit_bias`` are texts: a map may have numbers.
    """
    found: dict[str, Any] = {}
    if float in map(type, values.values()):
        found |= {name: integer(value) for name, value in values.items() if type(value) is float and name in INTEGERS}
    if type(id := values.get("id")) not in _JSON_IDS:
        found["id"] = written(id)
    bias = values.get("logit_bias")
    if isinstance(bias, dict) and not all(type(key) is str for key in bias):
        found["logit_bias"] = {str(key): value for key, value in bias.items()}
    return {**values, **found} if found else values


def written(value: Any) -> Any:
    """A value as a JSONL result has it: a UUID, decimal, date or time is a text."""
    return msgspec.to_builtins(value, enc_hook=str)


def integer(value: float) -> float | int | None:
    """A float of a table as the integer that it equals, if it does: 4.0 is 4, NaN is null."""
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else value


def from_text(values: dict[str, Any]) -> dict[str, Any]:
    """A CSV row as a request: cells of fields that are no texts hold JSON. What is no JSON stays a text.

    If nothing differs, it is the same object.

    Raises:
        RowError: the values of a cell would take far more memory than its text.
    """
    if _JSON.isdisjoint(values):
        return values
    return {name: parsed(name, value) for name, value in values.items()}


def parsed(name: str, value: Any) -> Any:
    """The value of a field that is given as a text: JSON, unless the field is a text itself or it is no JSON."""
    if name not in _JSON or not isinstance(value, str):
        return value
    if name in _LISTS_OR_TEXTS and not value.startswith("["):
        return value
    try:
        return bounded_json(_FLAGS.get(value, value))
    except (msgspec.DecodeError, RecursionError):
        return value
    except RowError as error:
        raise RowError(error.code, f"column {name}: {error.message}") from None


# As Python and spreadsheets write them.
_FLAGS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
