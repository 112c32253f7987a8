"""Try every causal language model of the installed transformers with a tiny random checkpoint, and count.

Usage: ``python -m benchmarks.fallback_families [MODEL_TYPE ...]``; see ``tests/helpers/tiny_families.py``.
"""

import multiprocessing
import sys
from collections import Counter
from typing import Any

import torch

from tests.helpers.tiny_families import try_family

_SECONDS = 120


def _run(model_type: str, pipe: Any) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        pipe.send(try_family(model_type))
    except BaseException as error:
        pipe.send(("failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))


def _alone(model_type: str) -> tuple[str, str]:
    """In a process of its own: a family may crash or hang."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        found: tuple[str, str] = ours.recv() if ours.poll(_SECONDS) else ("failed", "takes too long")
    except EOFError:
        found = ("failed", "the process ended")
    process.kill()
    process.join()
    return found


def main() -> None:
    """Print a line for each family and the counts."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    counts: Counter[str] = Counter()
    for model_type in sys.argv[1:] or sorted(NAMES):
        state, reason = _alone(model_type)
        counts[state] += 1
        sys.stdout.write(f"{state:8} {model_type:24} {reason}\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"transformers {transformers.__version__}: {', '.join(f'{n} {s}' for s, n in counts.most_common())}\n"
    )


if __name__ == "__main__":
    main()
