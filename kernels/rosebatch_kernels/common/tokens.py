"""Numbers that stand in place of a token. Token ids begin at 0."""

# The sequence was not decoded in this step.
NO_TOKEN = -1
# The row of logits has a NaN, or its largest logit is infinite: no token follows from it.
NOT_FINITE = -2
