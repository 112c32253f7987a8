"""What a mark holds: the int32 number of one token of one sequence, 0 for a token that is nowhere."""

# How often it was generated: bits 0 to 23, so that every count is a number that fp32 has.
COUNT = 0xFFFFFF
# It stands in the prompt.
IN_PROMPT = 1 << 24
# It ends the completion.
ENDS = 1 << 25
