"""Numbers that stand in place of a token. Token ids begin at 0."""

# The sequence was not decoded in this step.
NO_TOKEN = -1
# The row of logits has a NaN, or its largest logit is infinite: no token follows from it.
NOT_FINITE = -2
# A draft was verified, and is not the token that was sampled in its place, or follows such a one.
WRONG_DRAFT = -3
