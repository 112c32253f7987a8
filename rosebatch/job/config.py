"""What a job is asked to do with its files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.config.run import Flag, InputFormat, RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.core.plain import is_text

if TYPE_CHECKING:
    from rosebatch.io.tasks.task import Task

FILES = "Input and output"
# What a shell makes of a variable that is not set would be the working directory, or stdout.
_PATHS = ("input", "output", "errors", "media_root")
# A shell passes any bytes on.
_TEXTS = (
    *("result_column", "prompt_column", "id_column", "columns", "prompt_template", "system_prompt"),
    *("media_root", "media_domains"),
)


def _generate() -> "Task":
    # Only now: the command line makes flags of the config, and no task.
    from rosebatch.io.tasks.generate import GENERATE

    return GENERATE


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """One job over files, apart from the model (see ``rosebatch.config.run.RunConfig``).

    Attributes:
        input: path, URL, folder or glob; ``-`` for stdin.
        sampling: fields of a row, for the rows that do not say themselves.
        settings: files that some of these values come from. No result may replace one.
        task: what becomes of the rows.
    """

    input: str
    input_format: Annotated[InputFormat, Flag("Default: by extension or first line.", FILES, rare=True)] = "auto"
    output: Annotated[
        str | None,
        Flag(
            "JSONL or CSV (also .gz, .zst, …), Parquet or Arrow file, or FOLDER/ of Parquet.",
            FILES,
            ("--output", "-o"),
            metavar="PATH",
        ),
    ] = None
    errors: Annotated[
        str | None,
        Flag("JSONL file for failed rows. Default for OpenAI batches: OUTPUT.errors.jsonl.", FILES, rare=True),
    ] = None
    rows_per_file: Annotated[
        int | None, Flag("Max rows in each file of a folder. Default: 1000000.", FILES, minimum=1, rare=True)
    ] = None
    result_column: Annotated[
        str | None, Flag("Put all result fields into one field of this name.", FILES, metavar="NAME", rare=True)
    ] = None
    prompt_column: Annotated[
        str | None, Flag("Column or field of prompts: texts, or lists of messages.", FILES, metavar="NAME", rare=True)
    ] = None
    id_column: Annotated[str | None, Flag("Column or field of ids. Default: id.", FILES, metavar="NAME", rare=True)] = (
        None
    )
    columns: Annotated[
        str | None, Flag("Columns or fields that results keep. Default: all.", FILES, metavar="A,B,C", rare=True)
    ] = None
    prompt_template: Annotated[
        str | None, Flag("Makes prompts of columns, such as 'Summarize: {article}'.", FILES, rare=True)
    ] = None
    reorder_fields: Annotated[
        bool, Flag("The template's labelled lines with the fewest distinct values go first.", FILES, rare=True)
    ] = False
    system_prompt: Annotated[
        str | None, Flag("System message of chats without one; texts become chats.", FILES, rare=True)
    ] = None
    keep_prompt: Annotated[bool, Flag("Results keep the prompt.", FILES, rare=True)] = False
    max_row_bytes: Annotated[
        str | int,
        Flag("Max size of a row before it is parsed. Default: 32MiB.", FILES, metavar="SIZE", rare=True),
    ] = "32MiB"
    media_root: Annotated[
        str | None, Flag("Rows may name images below this folder.", FILES, metavar="FOLDER", rare=True)
    ] = None
    media_domains: Annotated[
        str | None, Flag("Rows may name images of these hosts.", FILES, metavar="A,B", rare=True)
    ] = None
    echo_model: Annotated[
        bool, Flag("Answers of an OpenAI batch repeat the request's model name.", FILES, rare=True)
    ] = False
    return_token_ids: Annotated[bool, Flag("Add token_ids to the results.", FILES, rare=True)] = False
    resume: Annotated[bool, Flag("Continue a killed run; leave a finished one.", FILES)] = False
    force_resume: Annotated[bool, Flag("Continue it even if input, model or flags have changed.", FILES, rare=True)] = (
        False
    )
    strict: Annotated[bool, Flag("Stop before the run if any row is bad.", FILES)] = False
    shard: Annotated[
        str | None,
        Flag("Serve one part of the rows, such as 1/8; 'rosebatch merge' joins them.", FILES, metavar="I/N", rare=True),
    ] = None
    report: Annotated[tuple[Path, ...], Flag("Report as .html or .json. Repeatable.", FILES, metavar="FILE")] = ()
    seed: Annotated[int | None, Flag("Base seed: samples do not depend on line numbers.", FILES)] = None
    quiet: Annotated[bool, Flag("No progress or report on stderr.", FILES, ("--quiet", "-q"))] = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[Path, ...] = ()
    task: "Task" = field(default_factory=_generate)

    def limits(self, config: RunConfig) -> RunConfig:
        """How to load a model for the job: without room for images, if its task has none."""
        return config if self.task.takes_images else replace(config, limit_images=0)

    def __post_init__(self) -> None:
        if in_bytes(self.max_row_bytes, "max_row_bytes") < 1:
            raise FlagError(f"--max-row-bytes must be >= 1, got {self.max_row_bytes}")
        for name in _PATHS:
            if getattr(self, name) == "":
                flag = "INPUT" if name == "input" else f"--{name.replace('_', '-')}"
                raise FlagError(f"{flag} is empty: name a {'folder' if name == 'media_root' else 'file'}")
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not is_text(value):
                raise FlagError(f"--{name.replace('_', '-')} must be text, got {value!r}, which is no Unicode")
