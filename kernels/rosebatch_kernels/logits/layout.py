"""The bits of a mark: an int32 for each sequence and token of the vocabulary, 0 if the token occurs nowhere."""

# How often the token was generated: bits 0 to 23, so that fp32 holds every count exactly.
COUNT = 0xFFFFFF
# The token occurs in the prompt.
IN_PROMPT = 1 << 24
# The token ends the completion.
ENDS = 1 << 25
