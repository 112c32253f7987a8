"""Which requests an engine can serve. No torch."""

import math
from collections.abc import Sequence

import numpy as np

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import NO_CONTINUATIONS, cannot_generate
from rosebatch.core.request import Request
from rosebatch.core.token_ids import FEW, TokenIds
from rosebatch.core.words import counted
from rosebatch.engine.pooling.outputs import require_output


def require_servable(
    request: Request, vocab_size: int, max_model_len: int, *, hidden_size: int | None = None, generates: bool = True
) -> None:
    """Check a request; see ``Engine`` for the limits.

    Raises:
        RowError: the prompt is empty, or too long for the model or the cache. A token id is outside the vocabulary. The
            model cannot generate. See also ``require_output``.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise RowError("empty_prompt", "the prompt has no tokens")
    if request.pooling is not None:
        if len(prompt) > max_model_len:
            raise _too_long(request, max_model_len)
        require_output(request.pooling, hidden_size)
    elif not generates:
        raise cannot_generate() if request.scoring is None else RowError("embeds_only", NO_CONTINUATIONS)
    elif len(prompt) >= max_model_len + (request.scoring is not None):
        raise _too_long(request, max_model_len)
    if _largest(prompt) >= vocab_size:
        raise RowError("invalid_token_id", f"prompt token ids must be in [0, {vocab_size})")
    if request.scoring is not None and _largest(request.scoring.next_token_ids) >= vocab_size:
        raise RowError("invalid_token_id", f"token ids of continuations must be in [0, {vocab_size})")
    bias = request.sampling.logit_bias
    if bias and any(not 0 <= token_id < vocab_size for token_id, _ in bias):
        raise RowError("invalid_token_id", f"token ids of logit_bias must be in [0, {vocab_size})")


def prompt_too_long(has: str, max_model_len: int, *, is_pooled: bool) -> RowError:
    """The error of a prompt with more tokens than the model or the cache has room for; ``has`` says how many."""
    generated = "" if is_pooled else "with at least one to generate, "
    return RowError("prompt_too_long", f"the prompt has {has}; {generated}{max_model_len} are allowed")


def _too_long(request: Request, max_model_len: int) -> RowError:
    """The same of a request, with what of it can be made smaller."""
    has = counted(len(request.prompt_token_ids), "token")
    if request.images:
        of_images = sum(image.num_tokens for image in request.images)
        has = f"{has}, {of_images} of images, which --max-pixels lowers unless all images become one size"
    return prompt_too_long(has, max_model_len, is_pooled=request.pooling is not None or request.scoring is not None)


def _largest(token_ids: Sequence[int]) -> float:
    """The largest token id; infinity if one is negative or has more than 32 bits."""
    if type(token_ids) is not TokenIds and len(token_ids) <= FEW:
        return max(token_ids) if min(token_ids) >= 0 else math.inf
    if (known := getattr(token_ids, "largest", None)) is not None:
        return known  # type: ignore[no-any-return]
    try:
        ids = np.frombuffer(TokenIds.of(token_ids), np.uint32)
        # NumPy's ``max`` takes three times as long for a prompt.
        return int(ids[ids.argmax()])
    except OverflowError:
        return math.inf
