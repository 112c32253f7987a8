"""Rows wait here for their images: they are loaded and resized on threads, some rows ahead."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from rosebatch.core.errors import RowError, UserError, unexpected
from rosebatch.core.images import PromptImage
from rosebatch.core.token_ids import FEW, TokenIds
from rosebatch.core.words import counted
from rosebatch.host.memory import host_memory
from rosebatch.host.threads import DaemonPool, usable_cores, wait_for
from rosebatch.io.images.decode import require_pillow
from rosebatch.io.images.load import load_image
from rosebatch.io.images.policy import NO_MEDIA, MediaPolicy
from rosebatch.io.images.references import ImageReference
from rosebatch.io.rows import FailedRow
from rosebatch.job.memory_estimate import prompt_bytes
from rosebatch.job.prepared import DEFAULT_BYTES, END, End, Prepared
from rosebatch.job.report.stopwatch import Stopwatch
from rosebatch.model.vision.vision import Patches, Processor, Sight, Vision
from rosebatch.text.tokenizer import Tokenizer

# Where rows have their images.
_PLACES = "images are parts of messages; the library's prompts have multi_modal_data"
# Images of a row. Each may take seconds, and as much memory as the model lets it have.
_LIMIT = 32
_MORE = "--limit-images allows more (limit_images of the library)"
# Threads that load images, each with a process that decodes them: one a core, but not more than a large GPU waits for.
_MOST_THREADS = 16
# Images of a thread that are not loaded yet, before the row whose turn it is.
_AHEAD = 2
# What an image may take at most: 2 GiB where it is decoded, and its pixels and those of a few copies here.
_BYTES_OF_THREAD = 4 << 30


class _Loaded(NamedTuple):
    patches: Patches
    digest: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return self.patches.values.nbytes


class _Waiting(NamedTuple):
    """A row whose images are loaded; one without images waits for its turn."""

    row: Prepared | FailedRow
    images: Sequence[Future[_Loaded | RowError]] = ()

    @property
    def lacking(self) -> int:
        """Images that are not loaded."""
        return sum(not each.done() for each in self.images)

    @property
    def size(self) -> int:
        """Bytes of those that are."""
        done = [each.result() for each in self.images if each.done()]
        return sum(each.size for each in done if isinstance(each, _Loaded))


def with_images(
    items: Iterator[Prepared | FailedRow | None],
    sight: Sight,
    tokenizer: Tokenizer | None,
    media: MediaPolicy = NO_MEDIA,
    check: Callable[[], None] = lambda: None,
    seconds: defaultdict[str, float] | None = None,
    max_bytes: int = DEFAULT_BYTES,
    max_model_len: int = 1 << 20,
    limit: int | None = None,
    max_pixels: int | None = None,
) -> Iterator[Prepared | FailedRow | None]:
    """Load the images of each row, and give each the tokens that the model wants for it.

    Rows keep their order, whatever their images take. A row fails if its prompt has the token that stands for an image,
    and there is none: the model would be told of nothing.

    Args:
        items: prepared rows; None says that there is none at the moment, and is handed on.
        sight: how the model sees, or why it does not: then no row has images.
        tokenizer: of the model.
        media: where images may come from.
        check: called while waiting; what it raises ends the wait.
        seconds: time by kind of work is added there.
        max_bytes: of images that wait for their row's turn. Those of one row may be more.
        max_model_len: most tokens of prompt and completion together.
        limit: most images of a row; None for the default.
        max_pixels: of an image that is resized for the model; None for the model's own.
    """
    limit = _LIMIT if limit is None else limit
    if isinstance(sight, str):
        yield from items
        return
    vision = sight
    seconds = defaultdict(float) if seconds is None else seconds
    marks = _marks(vision, tokenizer)

    def encode(text: str) -> list[int]:
        assert tokenizer is not None, "rows with images need one"
        return tokenizer.backend.encode(text, add_special_tokens=False).ids

    threads = loading_threads()
    waiting: deque[_Waiting] = deque()
    processor: Processor | None = None
    ended = idle = False
    with DaemonPool(threads, "rosebatch-images") as pool:

        def begun(item: Prepared | FailedRow) -> _Waiting:
            nonlocal processor
            if not isinstance(item, Prepared):
                return _Waiting(item)
            try:
                if not item.row.images:
                    _require_no_marks(item, marks)
                    return _Waiting(item)
                _require_served(item, limit, list(marks.values()))
                if processor is None:
                    with Stopwatch(seconds, "loading images"):
                        require_pillow()
                        processor = vision.processor(max_pixels, encode)
            except RowError as error:
                return _Waiting(item.failed(error))
            except UserError as error:
                return _Waiting(item.failed(RowError("image_not_read", str(error))))
            except Exception as error:
                return _Waiting(item.failed(unexpected("loading the image processor", error)))
            alone = len(item.row.images) == 1
            return _Waiting(item, [pool.submit(_load, each, media, processor, alone) for each in item.row.images])

        while waiting or not ended:
            while not (ended or idle) and (
                not waiting
                or (
                    waiting[0].images
                    and sum(each.lacking for each in waiting) < _AHEAD * threads
                    and sum(each.size for each in waiting) < max_bytes
                )
            ):
                item = next(items, END)
                ended, idle = isinstance(item, End), item is None
                if item is not None and not isinstance(item, End):
                    waiting.append(begun(item))
                # A row that was handed out must not be here while the next one is parsed.
                del item
            idle = False
            if waiting:
                row, images = waiting.popleft()
                if isinstance(row, Prepared) and images:
                    with Stopwatch(seconds, "loading images"):
                        loaded = [wait_for(each, check) for each in images]
                    row = _with_images(row, loaded, vision, marks[vision.placeholder], max_model_len)
                    del loaded
                del images
                yield row
                del row
            elif not ended:
                yield None


def loading_threads() -> int:
    """Threads that load images."""
    return max(min(_MOST_THREADS, usable_cores(), host_memory().total // _BYTES_OF_THREAD), 1)


def _marks(vision: Vision, tokenizer: Tokenizer | None) -> dict[int, str]:
    """The tokens that stand for an image in a prompt, and what they are in a text; empty if the tokenizer lacks it."""
    if tokenizer is None:
        return {vision.placeholder: ""}
    found = {vision.placeholder: tokenizer.backend.id_to_token(vision.placeholder) or ""}
    for mark in (vision.in_text or ())[:1]:
        if (number := tokenizer.backend.token_to_id(mark)) is not None:
            found[number] = mark
    return found


def _require_no_marks(row: Prepared, marks: Mapping[int, str]) -> None:
    """Check that no prompt of a row without images has a token that stands for one.

    Raises:
        RowError: one has.
    """
    for prompt in row.prompts:
        ids = prompt.token_ids
        given: Any = np.frombuffer(ids, np.uint32) if isinstance(ids, TokenIds) and len(ids) > FEW else ids
        for mark, shown in marks.items():
            if mark in given:
                code = "invalid_prompt" if row.row.messages is None else "invalid_messages"
                has = f"the prompt has {shown or f'the token {mark}'}, which stands for an image"
                raise RowError(code, f"{has}, and the row has none: {_PLACES}")


def _require_served(row: Prepared, limit: int, marks: Sequence[str]) -> None:
    """Check what is known before images are loaded.

    Raises:
        RowError: there are too many, or something of the row does not go with them.
    """
    count = len(row.row.images)
    if count > limit:
        raise RowError("too_many_images", f"the row has {counted(count, 'image')}, more than {limit}: {_MORE}")
    if row.row.options.truncate_prompt_tokens:
        raise RowError("unsupported_field", "truncate_prompt_tokens: a prompt with images is not cut")
    for mark in filter(None, marks):
        if any(mark in text for text in _texts(row.row.messages or ())):
            raise RowError("invalid_messages", f"a text has {mark}, which stands for an image")


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            if isinstance(text := part.get("text"), str):
                yield text


def _load(reference: ImageReference, media: MediaPolicy, processor: Processor, alone: bool) -> _Loaded | RowError:
    """An image, or why there is none. What a wait for it raises is not of the row."""
    try:
        pixels = load_image(reference, media)
        patches = processor(pixels.rgb, alone=alone)
        shape = *patches.grid, len(patches.token_ids)
        return _Loaded(patches, sha256(b"%b %d %d %d" % (pixels.digest, *shape)).digest())
    except RowError as error:
        return error
    except ValueError as error:
        return RowError("invalid_image", f"{reference.where}: {error}")
    except Exception as error:
        return unexpected("loading an image", error)


def _with_images(
    row: Prepared, images: Sequence[_Loaded | RowError], vision: Vision, shown: str, max_model_len: int
) -> Prepared | FailedRow:
    """The row with its images in its prompt, and without what they were loaded from.

    Args:
        row: with a placeholder for each image.
        images: or why there is none.
        vision: how the model sees.
        shown: the token that stands for an image, as a text.
        max_model_len: most tokens of prompt and completion together.
    """
    loaded, placeholder = [], vision.placeholder
    for each in images:
        if isinstance(each, RowError):
            return row.failed(each)
        loaded.append(each)
    (prompt,) = row.prompts
    token_ids = np.array(prompt.token_ids, np.uint32)
    places = np.flatnonzero(token_ids == placeholder)
    if len(places) != len(loaded):
        if row.row.messages is None:
            told = f"the prompt has {shown} {counted(len(places), 'time')} for {counted(len(loaded), 'image')}"
            return row.failed(RowError("invalid_prompt", told))
        told = f"{counted(len(places), 'place')} for {counted(len(loaded), 'image')}"
        return row.failed(RowError("invalid_messages", f"the chat template has {told}"))
    parts: list[np.ndarray] = []
    prepared: list[PromptImage] = []
    done = offset = 0
    for place, (patches, digest) in zip(places.tolist(), loaded, strict=True):
        offset += place - done
        prepared.append(PromptImage(offset, patches.token_ids == placeholder, patches.grid, digest, patches.values))
        parts += (token_ids[done:place], patches.token_ids)
        done, offset = place + 1, offset + len(patches.token_ids)
    length = offset + len(token_ids) - done
    if vision.longest and length > vision.longest:
        told = f"all {length} tokens of the prompt see each other, and the model's window has {vision.longest}"
        return row.failed(RowError("image_too_large", told))
    if vision.both_ways == "prompt":
        prepared = [structs.replace(each, whole_prompt=length) for each in prepared]
    expanded = TokenIds("I", np.concatenate((*parts, token_ids[done:])).tobytes())
    size = row.size + sum(each.size for each in loaded)
    size -= sum(each.size for each in row.row.images)
    before, after = (prompt_bytes(prompt.sampling, len(ids), max_model_len) for ids in (token_ids, expanded))
    return structs.replace(
        row,
        row=structs.replace(row.row, images=()),
        prompts=(structs.replace(prompt, token_ids=expanded, images=tuple(prepared)),),
        size=size + after - before,
    )
