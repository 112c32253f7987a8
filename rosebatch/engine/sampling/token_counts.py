"""Token counts and biases of a sequence, by which ``adjust`` changes its next logits.

See ``rosebatch_kernels.logits``: an int32 for each token of the vocabulary.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rosebatch.engine.plan import SequenceSpec
from rosebatch_kernels.logits.layout import ENDS, IN_PROMPT


def count_cells(spec: SequenceSpec, output: Sequence[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and what to add to their counts, both int32; an id may occur several times.

    Args:
        spec: of the sequence.
        output: the tokens generated so far.
        vocab_size: number of counts.
    """
    counts = Counter(output)
    prompt = set(spec.prompt_token_ids)
    ends = [token_id for token_id in spec.stop_ids if 0 <= token_id < vocab_size]
    ids = [*counts, *prompt, *ends]
    values = [*counts.values(), *[IN_PROMPT] * len(prompt), *[ENDS] * len(ends)]
    return np.array(ids, np.int32), np.array(values, np.int32)


def bias_cells(spec: SequenceSpec) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32, and what to add to their logits, fp32."""
    ids = [token_id for token_id, _ in spec.sampling.logit_bias]
    values = [value for _, value in spec.sampling.logit_bias]
    return np.array(ids, np.int32), np.array(values, np.float32)
