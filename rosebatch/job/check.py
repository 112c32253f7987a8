"""What a file holds, and what running it would take."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TextIO

from msgspec import structs

from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import flag
from rosebatch.core.errors import FlagError, RowError, printable
from rosebatch.core.pooling_params import PLAIN_POOLING, ModelPooling
from rosebatch.core.request import Request
from rosebatch.core.words import counted
from rosebatch.engine.build import choose_block_size
from rosebatch.engine.cache.kv_cache import bytes_for_longest
from rosebatch.engine.cache.memory import batched_tokens, min_slots, num_snapshots
from rosebatch.engine.metrics.roofline import Floor, Rates, find_floor, measure_host_rates, measure_rates
from rosebatch.engine.scheduling.chunk_ends import ChunkEnds
from rosebatch.engine.scheduling.servable import require_servable
from rosebatch.host.threads import DaemonPool
from rosebatch.io.images.policy import NO_MEDIA, MediaPolicy
from rosebatch.io.reader import PromptReader
from rosebatch.io.row_adapters import NO_ADAPTERS, RowAdapters
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.sampling_fields import with_defaults
from rosebatch.io.tasks.registry import refusals
from rosebatch.job.await_grammars import with_grammars
from rosebatch.job.config import JobConfig
from rosebatch.job.images import with_images
from rosebatch.job.open_input import open_input, require_free_names
from rosebatch.job.prepare import prepare
from rosebatch.job.prepared import Prepared
from rosebatch.job.report.table import field_rows, print_table
from rosebatch.job.sampling_defaults import check_sampling
from rosebatch.launch.fit import gib
from rosebatch.launch.launch import default_sampling, grammar_limits, load_tokenizer
from rosebatch.launch.plan import LaunchPlan, plan_fitting
from rosebatch.model.vision.vision import TEXT_ALONE, Sight
from rosebatch.text.grammar.check import GrammarLimits
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer

_BAR = 40
# Tokens, beyond those of any prompt.
_ANY_LENGTH = 1 << 30
# Shares of the floor that runs reach (docs/performance.md): the best, and a first run of few rows, with its graphs.
_SHARES = {"cuda": (0.85, 0.25), "cpu": (0.7, 0.15)}
# Of the process and the model: from a warm cache, and from cold disks.
_START_SECONDS = {"cuda": (3, 15), "cpu": (1, 8)}


@dataclass(slots=True)
class Checked:
    """The rows of a file: how many can be served, the tokens of their prompts, and most tokens of their outputs.

    Attributes:
        beginning: id and text of the token that the tokenizer puts in front of each prompt; None if it puts none.
        doubled: prompts whose text begins with it too.
        image_lens: tokens of each image of a prompt.
    """

    beginning: tuple[int, str] | None = None

    num_good: int = 0
    image_lens: "array[int]" = field(default_factory=lambda: array("L"))
    prompt_lens: "array[int]" = field(default_factory=lambda: array("L"))
    output_lens: "array[int]" = field(default_factory=lambda: array("L"))
    errors: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    unclear: Counter[str] = field(default_factory=Counter)
    doubled: int = 0


def check_job(job: JobConfig, config: RunConfig, stream: TextIO) -> int:
    """Print the rows of a job that cannot be served, and what it would take.

    Args:
        job: input, columns, sampling defaults and task.
        config: how to load the model.
        stream: for people.

    Returns:
        the number of rows that cannot be served.

    Raises:
        UserError: the input or the model is missing or unreadable, or a flag is impossible. The model cannot do this.
    """
    plan, task = plan_fitting(job.limits(config), weights=False), job.task
    unread = plan.source.require_loadable()
    if job.sampling and not task.samples:
        given = ", ".join(map(flag, job.sampling))
        raise FlagError(f"--{task.name}: nothing is generated, so {given} have no meaning")
    check_sampling(job.sampling, None, grammar_limits(config))
    defaults = with_defaults(job.sampling, default_sampling(plan) if task.samples else {})
    reader = open_input(replace(job, sampling=defaults))
    require_free_names(reader)
    if not reader.is_batch:
        source = plan.source
        refused = refusals(source.name, source.pooling, has_head=source.has_head, no_images=plan.no_images)
        task.require_able(refused, sorted(source.prompts.by_name), source.vector_size, reader.columns)
    checked = check_file(reader, plan, stream)
    rates = measure_rates(plan.device.type) or measure_host_rates(plan.source.dtype)
    rows = _summary(checked, plan, choose_block_size(plan.config, plan.device), rates)
    if unread:
        rows.append(("not read", f"{counted(len(unread), 'tensor')} of the weights, such as {printable(unread[0])}"))
    title = f"{printable(job.input)}: {plan.source.name} by {plan.source.model_impl}, {plan.device.type}"
    title += f", with {names} by --lora" if (names := plan.source.adapter_names) else ""
    print_table(title, rows, stream)
    return checked.errors.total()


def check_file(reader: PromptReader, plan: LaunchPlan, stream: TextIO, *, strict: bool = False) -> Checked:
    """Check all rows of an input; writes a line to the stream for each that cannot be served.

    Args:
        reader: of the input.
        plan: of the run.
        stream: for people.
        strict: whether a field that is not understood is a mistake.
    """
    reader.looks_closely = True
    config = plan.source.config
    if plan.fit is not None:
        config = structs.replace(config, max_model_len=plan.fit.longest)
    return check_rows(
        reader,
        load_tokenizer(plan),
        config,
        lambda row: stream.write(printable(f"{row.where}: {row.error.code}: {row.error.message}") + "\n"),
        grammar_limits(plan.config),
        vector_size=plan.source.vector_size,
        pooling=plan.source.pooling,
        generates=plan.source.has_head,
        strict=strict,
        sight=plan.sight,
        adapters=plan.row_adapters,
        media=reader.media,
        limit_images=plan.config.limit_images,
        max_pixels=plan.config.max_pixels,
        # Whole prompts have room, whatever their length.
        most_tokens=batched_tokens(plan.config, plan.device.type) if plan.switches.chunked_prefill else _ANY_LENGTH,
    )


def check_rows(
    rows: Iterable[Row | FailedRow],
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    on_failure: Callable[[FailedRow], object],
    limits: GrammarLimits | None = None,
    *,
    vector_size: int | None = None,
    pooling: ModelPooling = PLAIN_POOLING,
    generates: bool = True,
    strict: bool = False,
    sight: Sight = TEXT_ALONE,
    adapters: RowAdapters = NO_ADAPTERS,
    media: MediaPolicy = NO_MEDIA,
    limit_images: int | None = None,
    max_pixels: int | None = None,
    most_tokens: int = _ANY_LENGTH,
) -> Checked:
    """Read and tokenize all rows.

    Args:
        rows: of the input.
        tokenizer: None for a model that works on token ids.
        config: of the model.
        on_failure: called with every row that cannot be served.
        limits: what compiling a grammar may take.
        vector_size: numbers of an embedding; None for those of a hidden state.
        pooling: the model's own.
        generates: whether the model has an output projection.
        strict: see ``check_file``.
        sight: how the model sees, or why it does not.
        adapters: of the run.
        media, limit_images, max_pixels: see ``rosebatch.job.images.with_images``.
        most_tokens: of a step. An image whose tokens see each other needs room in one.
    """
    checked = Checked(beginning=None if tokenizer is None else tokenizer.beginning)
    grammars = None if tokenizer is None else Grammars(tokenizer, config.vocab_size, config.eos_token_ids, limits)
    size = vector_size or config.hidden_size
    ends = ChunkEnds(whole_images=not isinstance(sight, str) and sight.both_ways != "")

    def require(request: Request) -> None:
        require_servable(request, config.num_token_ids, config.max_model_len, hidden_size=size, generates=generates)
        if request.pooling is not None:
            pooling.of(request.pooling)
        pooling.require_steps(request.pooling, request.prompt_token_ids)
        ends.require_room(request.images, len(request.prompt_token_ids), most_tokens)

    with DaemonPool(1, "rosebatch-text") as pool:
        limit = config.max_model_len
        prepared = prepare(rows, tokenizer, grammars, pool, max_model_len=limit, sight=sight, adapters=adapters)
        compiled = with_grammars(prepared, grammars, in_order=True)
        loaded = with_images(
            compiled, sight, tokenizer, media, max_model_len=limit, limit=limit_images, max_pixels=max_pixels
        )
        for item in loaded:
            assert item is not None, "a file always has a next row, or an end"
            _count(checked, item, config, on_failure, require, strict=strict)
    return checked


def _count(
    checked: Checked,
    item: Prepared | FailedRow,
    config: ModelConfig,
    on_failure: Callable[[FailedRow], object],
    require: Callable[[Request], None],
    *,
    strict: bool,
) -> None:
    failed = item if isinstance(item, FailedRow) else _refused(item, require, strict=strict)
    if isinstance(item, Prepared):
        checked.ignored.update(item.row.ignored)
        checked.unclear.update(item.row.unclear)
    if failed is not None:
        checked.errors[failed.error.code] += 1
        on_failure(failed)
    checked.num_good += failed is None
    if isinstance(item, FailedRow) or failed is not None:
        return
    for prompt in item.prompts:
        length, sampling = len(prompt.token_ids), prompt.sampling
        if checked.beginning is not None and list(prompt.token_ids[:2]) == [checked.beginning[0]] * 2:
            checked.doubled += 1
        checked.prompt_lens.append(length)
        checked.image_lens.extend(image.num_tokens for image in prompt.images)
        limit = min(sampling.max_tokens, config.max_model_len - length) if item.row.generates else 0
        checked.output_lens.append(sampling.n * limit)


def _refused(row: Prepared, require: Callable[[Request], None], *, strict: bool) -> FailedRow | None:
    """The row, if an engine would refuse a part of it."""
    if strict and row.row.unclear:
        what = ", ".join(row.row.unclear)
        return row.failed(RowError("unclear_field", f"not understood, and would change nothing: {what}"))
    try:
        for number, prompt in enumerate(row.prompts):
            require(Request(number, prompt.token_ids, prompt.sampling, row.row.pooling, prompt.scoring, prompt.images))
    except RowError as error:
        return row.failed(error)
    return None


def _summary(checked: Checked, plan: LaunchPlan, block_size: int, rates: Rates) -> list[tuple[str, str]]:
    """Label and value, for people.

    Args:
        checked: the rows.
        plan: model, dtype and limits of the run.
        block_size: of its KV cache.
        rates: of its device.
    """
    good, bad = checked.num_good, checked.errors.total()
    errors = ", ".join(f"{count} {code}" for code, count in checked.errors.items())
    lines = [("rows", f"{good} can be served, {bad} cannot" + (f" ({errors})" if errors else ""))]
    lines += field_rows(checked.ignored, checked.unclear)
    if not good:
        return lines
    if checked.doubled and checked.beginning is not None:
        mark = checked.beginning[1]
        lines.append(
            (
                "begin twice",
                f"{counted(checked.doubled, 'prompt')}: the tokenizer adds {mark} to a text that has it already",
            )
        )
    config, itemsize, slots = plan.source.config, plan.source.dtype.itemsize, min_slots(plan.config)
    kinds = {"prompt": checked.prompt_lens, "image": checked.image_lens, "output": checked.output_lens}
    for name, lens in kinds.items():
        if not any(lens):
            # Nothing is generated.
            continue
        limit = "at most " if name == "output" else ""
        ordered = sorted(lens)
        middle, late = (ordered[-(-len(ordered) * rank // 100) - 1] for rank in (50, 90))
        of = "an image" if name == "image" else "a prompt"
        spread = f"{ordered[0]} to {ordered[-1]} {of}, median {middle}, p90 {late}"
        lines.append((f"{name} tokens", f"{limit}{sum(lens)} ({spread})"))
    lines += [(f"prompts of {label} tokens", bar) for label, bar in _histogram(checked.prompt_lens)]
    totals = map(sum, zip(checked.prompt_lens, checked.output_lens, strict=True))
    chunk = batched_tokens(plan.config, plan.device.type)
    cache = bytes_for_longest(config, block_size, plan.source.dtype, totals, slots, chunk, plan.source.draft_planes)
    longest = "longest row" if min(slots, good) == 1 else f"{min(slots, good)} longest rows"
    if plan.fit is not None:
        lines.append(("memory", str(plan.fit)))
    if unread := plan.source.quantization.unread:
        lines.append(("not read", f"{', '.join(unread)} of quantization_config"))
    form = " in fp8" if config.kv_cache_dtype == "fp8" else ""
    if config.kv_planes:
        lines.append(("KV cache", f"at most {gib(cache)}{form} for the {longest} at once; less is enough"))
    if state := config.state_bytes(itemsize):
        told = f"{gib(min(slots, good) * state)} for {counted(min(slots, good), 'row')} at once"
        if plan.switches.chunked_prefill:
            told += f", {gib(num_snapshots(slots) * state)} for {num_snapshots(slots)} snapshots of shared beginnings"
        lines.append(("states", told))
    rates = rates.of(plan.config.tensor_parallel_size)
    prompts, outputs = checked.prompt_lens, checked.output_lens
    floor = find_floor(config, itemsize, prompts, outputs, max_num_seqs=slots, rates=rates, kept=plan.matrix_bytes)
    lines.append(("time", time_range(floor, plan.device.type)))
    return lines


def time_range(floor: Floor, device: str) -> str:
    """Between which times a run will start, and then be done.

    Of both, the first holds if answers end at once, and the run is among the fastest that were measured; the second if
    all reach their greatest length, and it is among the slowest.
    """
    (limit, minimum), (quick, slow) = _SHARES[device], _START_SECONDS[device]
    low, high = _seconds(floor.prefill_s / limit), _seconds(floor.seconds / minimum)
    ends = (
        f"{low} to {high}" if not floor.decode_s else f"{low} if answers end at once, {high} if all reach their limits"
    )
    return f"{quick} to {slow} s to start, then {ends}; the hardware's limit is {_seconds(floor.seconds)}"


def _seconds(seconds: float) -> str:
    return "under 0.1 s" if seconds < 0.1 else f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def _histogram(lens: Iterable[int]) -> list[tuple[str, str]]:
    """Ranges between powers of two, each with a bar."""
    counts = Counter(length.bit_length() for length in lens)
    limit = max(counts.values())
    rows = []
    for bits in range(min(counts), max(counts) + 1):
        bar = "#" * -(-counts[bits] * _BAR // limit)
        rows.append((f"{2 ** (bits - 1)}-{2**bits - 1}", f"{counts[bits]} {bar}".rstrip()))
    return rows
