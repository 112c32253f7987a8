"""What the answers of several endpoints have in common."""

from typing import Any

from rosebatch.io.results import Answer, Choice, scored_tokens


def usage(answer: Answer) -> dict[str, Any]:
    """Tokens of an answer, as completions count them."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def additions(choice: Choice) -> dict[str, Any]:
    """Fields that the API does not have, under the names that other servers use."""
    found: dict[str, Any] = {} if choice.token_ids is None else {"token_ids": choice.token_ids}
    if choice.prompt_logprobs is not None and not (choice.echo and choice.logprobs is not None):
        found["prompt_logprobs"] = scored_tokens(choice.prompt_logprobs)
    return found
