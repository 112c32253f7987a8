"""Makes a trace for ``rosebatch bench --trace``: bursts of arrivals, heavy-tailed lengths, shared prefixes.

    python examples/make_trace.py --requests 1000 --rate 8 > trace.jsonl
    rosebatch bench --model Qwen/Qwen3-0.6B --trace trace.jsonl --scale 1 --scale 2 --report trace.html

- Arrivals: the wait before a request is drawn from a gamma distribution of shape 0.5 (coefficient of variation 1.4), so
  requests come in bursts. On average ``--rate`` come in a second.
- Lengths: log-normal. Prompts have a median of 350 tokens (sigma 1.0, at most 4,096), answers one of 120 (sigma 0.8, at
  most 1,024).
- Prefixes: seven requests of ten begin with one of four system prompts of 64 to 512 tokens, mostly the shortest.

``trace.jsonl`` next to this file has 40 requests for small models, made with ``--longest 480``: prompts are cut to
three quarters of that, answers to one.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator

BLOCK = 16
SYSTEM_PROMPTS = (64, 128, 256, 512)
SHARE, WEIGHTS = 0.7, (8, 4, 2, 1)


def length(numbers: random.Random, median: int, sigma: float, most: int) -> int:
    """A log-normal length of at least one token."""
    return max(1, min(most, round(numbers.lognormvariate(math.log(median), sigma))))


def requests(count: int, rate: float, longest: int, seed: int) -> Iterator[dict[str, object]]:
    """The lines of a trace. Times are seconds, blocks have 16 tokens."""
    numbers = random.Random(seed)
    at, next_block = 0.0, sum(SYSTEM_PROMPTS) // BLOCK
    first_blocks = [sum(SYSTEM_PROMPTS[:i]) // BLOCK for i in range(len(SYSTEM_PROMPTS))]
    for _ in range(count):
        input_length, output_length = length(numbers, 350, 1.0, 4096), length(numbers, 120, 0.8, 1024)
        blocks = []
        if numbers.random() < SHARE:
            (which,) = numbers.choices(range(len(SYSTEM_PROMPTS)), WEIGHTS)
            blocks = list(range(first_blocks[which], first_blocks[which] + SYSTEM_PROMPTS[which] // BLOCK))
            input_length += SYSTEM_PROMPTS[which]
        input_length, output_length = min(input_length, 3 * longest // 4), min(output_length, longest // 4)
        blocks = blocks[: -(-input_length // BLOCK)]
        own = -(-input_length // BLOCK) - len(blocks)
        blocks += range(next_block, next_block + own)
        next_block += own
        yield {
            "timestamp": round(at, 4),
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": blocks,
        }
        at += numbers.gammavariate(0.5, 2 / rate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--longest", type=int, default=6144, help="tokens of prompt and answer")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for line in requests(given.requests, given.rate, given.longest, given.seed):
        sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")
