"""The device's state of each running sequence: the rows of an int32 matrix ``[fields, sequences]``."""

# The last token, its position, the position of the next token, and the position at which decoding ends: a sequence is
# decoded while position < limit.
TOKEN, POSITION, NEXT, LIMIT = range(4)
# Whether the model's end tokens end it, and whether its parameters change logits.
STOPS, ADJUSTS = range(4, 6)
# Sampling parameters; temperature, top-p and min-p are the bits of fp32 numbers, the seed is 64 bits in two rows.
TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED_LOW, SEED_HIGH = range(6, 12)
# Changes of logits: penalties, the bits of fp32 numbers, and the first position where an end token is allowed.
PRESENCE, FREQUENCY, REPETITION, MIN_POSITION = range(12, 16)
# Where the sequence's states lie, for a model with states.
STATE = 16
NUM_FIELDS = 17
