"""Log-probabilities of given tokens, in place of a completion."""

import msgspec


class Scoring(msgspec.Struct, frozen=True):
    """Which tokens of a request get their log-probability. Nothing is generated.

    Tokens before ``start`` are the context: the prefix cache may have them. The last token of a text is best the
    one of ``next_token_ids``, so that nothing is computed of it.

    Attributes:
        start: position of the prompt's first token that gets one, from 1 to the length of the prompt.
        next_token_ids: at least one; each gets the one that it would have after the prompt.
    """

    start: int
    next_token_ids: tuple[int, ...]
