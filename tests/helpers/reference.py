"""What models of transformers, or ``PlainHP1``, generate by themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# A greedy token with a smaller margin may differ by rounding alone: such prompts are left out.
MARGIN = 1e-3


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    options: Callable[[int], dict[str, Any]] = lambda length: {},
) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy tokens of each prompt, and the scores ``[tokens, V]`` by which they were chosen, in fp32 on the CPU.

    Args:
        model: of transformers, or ``PlainHP1``.
        prompts: of any lengths.
        new_tokens: so many for each.
        options: length of a prompt -> further options of ``generate``.
    """
    tokens, scores = [[]] * len(prompts), [torch.empty(0)] * len(prompts)
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[row] for row in rows], device=model.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **options(length),
            )
        found = torch.stack(out.scores, 1).float().cpu()
        for place, row in enumerate(rows):
            tokens[row], scores[row] = out.sequences[place, length:].tolist(), found[place]
    return tokens, scores


def clear(tokens: Sequence[list[int]], scores: Sequence[Tensor], margin: float = MARGIN) -> dict[int, list[int]]:
    """The tokens by the number of the prompt, where no choice depends on rounding."""
    best = [each.topk(2, -1).values for each in scores]
    return {
        number: tokens[number] for number, values in enumerate(best) if (values[:, 0] - values[:, 1]).min() > margin
    }
