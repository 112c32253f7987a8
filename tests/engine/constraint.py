"""A grammar of numbers, for models without a tokenizer."""

import numpy as np


class EveryThird:
    """Allows tokens that, added to the last one, leave 1 when divided by three; complete after nine.

    What may come next depends on the token before, and no two in a row are of one kind: a mask that was made too early
    allows none of those that are right.
    """

    error, forces = None, True

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.tokens = []

    @property
    def last(self):
        """The token before, 0 for none."""
        return self.tokens[-1] if self.tokens else 0

    @classmethod
    def fill_all(cls, constraints, masks):
        for mask, constraint in zip(masks, constraints, strict=True):
            allowed = (np.arange(32 * len(mask)) + constraint.last) % 3 == 1
            mask[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    def feed(self, token_id):
        assert (token_id + self.last) % 3 == 1, "a token that was not allowed"
        self.tokens.append(token_id)
        return len(self.tokens) == 9

    @classmethod
    def feed_all(cls, constraints, token_ids):
        return [each.feed(token_id) for each, token_id in zip(constraints, token_ids, strict=True)]

    def follow(self, token_id):
        return [token_id], self.feed(token_id)

    def rest(self):
        return ()

    def ahead(self, token_ids):
        found, last = [], self
        for token_id in token_ids:
            if len(last.tokens) == 9 or (token_id + last.last) % 3 != 1:
                break
            last, before = EveryThird(self.vocab_size), last
            last.tokens = [*before.tokens, token_id]
            found.append(last)
        return found
