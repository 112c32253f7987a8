"""From a scenario to the token ids and output lengths of one run."""

import random
from dataclasses import dataclass

import msgspec

from rosebatch.bench.scenario import Length, Range, Sampling, Scenario
from rosebatch.core.errors import UserError
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one run, for any engine: ``output_lens[i]`` tokens after ``prompts[i]``."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its output together."""
        return max(n + o for n, o in zip(self.prompt_lens, self.output_lens, strict=True))

    def requests(self, sampling: Sampling) -> list[Request]:
        """The requests for our engine. Each row has its own random numbers."""
        values = msgspec.structs.asdict(sampling)
        return [
            Request(index, tuple(prompt), SamplingParams(**values, max_tokens=length, seed=index, ignore_eos=True))
            for index, (prompt, length) in enumerate(zip(self.prompts, self.output_lens, strict=True))
        ]


def make_workload(scenario: Scenario, vocab_size: int, run: int = 0) -> Workload:
    """The workload of one run. Lengths are the same in every run, token ids are not.

    With the same ids a prefix cache would make the second run faster than any first one.

    Args:
        vocab_size: of the model, see ``token_range``.
        run: 0 is the warm-up.
    """
    numbers = random.Random(scenario.seed)
    input_lens = _draw(scenario.input_len, scenario.num_prompts, numbers)
    output_lens = _draw(scenario.output_len, scenario.num_prompts, numbers)
    if run:
        numbers = random.Random(f"{scenario.seed} {run}")
    ids = token_range(vocab_size)
    prefix = [numbers.choice(ids) for _ in range(scenario.shared_prefix_len)]
    prompts = [prefix + [numbers.choice(ids) for _ in range(length)] for length in input_lens]
    return Workload(prompts, output_lens)


def token_range(vocab_size: int) -> range:
    """Token ids away from the special tokens at both ends; all ids of a small vocabulary."""
    return range(100, vocab_size - 300) or range(vocab_size)


def require_fits(workload: Workload, limit: int) -> None:
    """Check that no sequence is longer than ``limit`` tokens.

    Raises:
        UserError: one is.
    """
    if workload.longest > limit:
        raise UserError(
            f"prompt and output have {workload.longest} tokens, but the engine holds at most {limit}: "
            "choose shorter prompts and outputs, or another model"
        )


def _draw(length: Length, count: int, numbers: random.Random) -> list[int]:
    if isinstance(length, Range):
        return [numbers.randint(length.low, length.high) for _ in range(count)]
    lengths = (length,) if isinstance(length, int) else length
    return [lengths[i % len(lengths)] for i in range(count)]
