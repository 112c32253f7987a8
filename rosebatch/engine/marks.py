"""What the tokens of a sequence mean for its next logits: the marks and the bias that ``adjust`` reads.

See ``rosebatch_kernels.logits``: a mark is an int32 for each token of the vocabulary.
"""

from collections import Counter

import numpy as np

from rosebatch.request import Sequence
from rosebatch_kernels.logits.layout import ENDS, IN_PROMPT


def mark_cells(sequence: Sequence, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and what to add to their marks, which are 0 before; int32, an id may occur several times."""
    counts = Counter(sequence.output_token_ids)
    prompt = set(sequence.request.prompt_token_ids)
    ends = [token_id for token_id in sequence.stop_ids if token_id < vocab_size]
    ids = [*counts, *prompt, *ends]
    values = [*counts.values(), *[IN_PROMPT] * len(prompt), *[ENDS] * len(ends)]
    return np.array(ids, np.int32), np.array(values, np.int32)


def bias_cells(sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32, and what to add to their logits, fp32."""
    ids = [token_id for token_id, _ in sequence.sampling.logit_bias]
    values = [value for _, value in sequence.sampling.logit_bias]
    return np.array(ids, np.int32), np.array(values, np.float32)
