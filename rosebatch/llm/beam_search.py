"""Beam search: the likeliest completions of each prompt. Names and meanings are those of vLLM's library.

All beams of all prompts grow by one token a step, in one batch. Beams of a prompt begin alike: the prefix cache has
what a step shares with the one before.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rosebatch.core.sampling_params import MAX_LOGPROBS, SamplingParams
from rosebatch.core.words import quoted
from rosebatch.job.report.progress import Progress
from rosebatch.llm.on_error import checked
from rosebatch.llm.outputs import Logprob, RequestOutput

# To this power, a million tokens are a float.
_LARGEST_PENALTY = 50
# Errors of beams that cannot go on: one is as long as the model allows, or has the token that stands for an image.
_ENDS = ("prompt_too_long", "invalid_prompt")


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What is searched for.

    The score of a beam is its log-probability, divided by its number of tokens to the power of ``length_penalty``.
    Tokens of the prompt count as well, an end token at the end does not.

    Attributes:
        beam_width: beams that go on after each step, and sequences that are returned; at most 10.
        max_tokens: most tokens of a sequence after the prompt.
        ignore_eos: go on after the end token.
        temperature: above 0, a token that is sampled counts among the likeliest ones of each beam.
        length_penalty: the greater, the more long sequences are favored; 0 compares log-probabilities as they are.
        include_stop_str_in_output: changes nothing, as in vLLM's library: the end token always stays.

    Raises:
        ValueError: a value outside its range, named in the message.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, is_right, rule in (
            ("beam_width", 1 <= self.beam_width <= MAX_LOGPROBS // 2, f"in [1, {MAX_LOGPROBS // 2}]"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("temperature", 0 <= self.temperature < math.inf, ">= 0"),
            (
                "length_penalty",
                abs(self.length_penalty) <= _LARGEST_PENALTY,
                f"in [-{_LARGEST_PENALTY}, {_LARGEST_PENALTY}]",
            ),
        ):
            if not is_right:
                raise ValueError(f"{name} must be {rule}, got {quoted(getattr(self, name))}")


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    """A prompt and what was found after it.

    Attributes:
        tokens: of the prompt and after it, the end token included.
        logprobs: for each token after the prompt, the likeliest ones at its place, by token id.
        cum_logprob: the sum over the tokens after the prompt.
        text: of all tokens, special ones included.
        finish_reason: ``stop`` after the end token, else ``length``.
        stop_reason: the end token; None for anything else.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str = "length"
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of a prompt, the best first: as many as the beam is wide, if there are so many."""

    sequences: list[BeamSearchSequence]


def beam_search(
    generate: Callable[..., list[RequestOutput]],
    prompts: Sequence[Any],
    params: BeamSearchParams,
    tokenizer: Any,
    at_once: int,
    progress: Progress,
) -> list[BeamSearchOutput]:
    """Search for the best sequences of each prompt; see ``LLM.beam_search``.

    Args:
        generate: ``LLM.generate``.
        prompts: as it takes them.
        params: of all prompts.
        tokenizer: of transformers: has the end token, and makes texts.
        at_once: so many prompts are searched together.
        progress: is told of prompts that are done.

    Raises:
        ValueError: a prompt cannot be served. It is named by its place, from 0.
        TypeError: the parameters are of another kind.
    """
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"beam_search takes BeamSearchParams, got {type(params).__name__}")
    # Twice the width: if a token of each beam is the end token, enough others are left.
    sampling = SamplingParams(max_tokens=1, logprobs=2 * params.beam_width, temperature=params.temperature)
    best = []
    for first in range(0, len(prompts), at_once or 1):
        found = generate(prompts[first : first + at_once], sampling, on_error="return")
        searches = []
        for place, output in enumerate(found, first):
            checked(output, "raise", place)
            prompt = prompts[place]
            lora = prompt.get("lora") if isinstance(prompt, Mapping) else None
            searches.append(_Search(place, output.prompt_token_ids, params, tokenizer.eos_token_id, lora))
            searches[-1].grow([output])
        while growing := [search for search in searches if not search.is_over]:
            progress.tick()
            beams = [
                {"prompt_token_ids": beam.tokens, "lora": search.lora} for search in growing for beam in search.beams
            ]
            outputs = iter(generate(beams, sampling, on_error="return"))
            for search in growing:
                search.grow([next(outputs) for _ in search.beams])
        progress.advance(len(searches))
        best += [search.best for search in searches]
    for sequence in chain.from_iterable(best):
        sequence.text = tokenizer.decode(sequence.tokens)
    return list(map(BeamSearchOutput, best))


class _Search:
    """The beams of one prompt.

    Args:
        place: of the prompt.
        prompt: its tokens.
        params: what is searched for.
        end: the end token, if there is one.
        lora: the prompt's adapter; None for the model as the run has it.
    """

    def __init__(
        self, place: int, prompt: list[int], params: BeamSearchParams, end: int | None, lora: str | None
    ) -> None:
        self.lora = lora
        self.beams = [BeamSearchSequence(tokens=prompt)]
        self._finished: list[BeamSearchSequence] = []
        self._longest = len(prompt) + params.max_tokens
        self._place = place
        self._params = params
        self._end = end

    @property
    def best(self) -> list[BeamSearchSequence]:
        """The best of all sequences, the best first."""
        return self._best([*self._finished, *self.beams])

    @property
    def is_over(self) -> bool:
        """Whether no beam can grow, or become better than all those that would be returned."""
        if not self.beams or len(self.beams[0].tokens) >= self._longest:
            return True
        if len(self._finished) < self._params.beam_width:
            return False
        lengths = len(self.beams[0].tokens), self._longest
        # Log-probabilities only fall.
        highest = max(self._score(beam.cum_logprob, length) for beam in self.beams for length in lengths)
        return highest <= self._score_of(self._finished[-1])

    def grow(self, outputs: Sequence[RequestOutput]) -> None:
        """Give each beam one more token, and keep the best.

        Args:
            outputs: the next token of each beam, with the likeliest ones.

        Raises:
            ValueError: one failed, and not because its beam cannot go on.
        """
        grown: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            if output.error is not None:
                if output.error_code not in _ENDS:
                    checked(output, "raise", self._place)
                self._finished.append(beam)
                continue
            assert output.outputs[0].logprobs is not None, "they were asked for"
            likeliest = output.outputs[0].logprobs[0]
            for token, each in likeliest.items():
                ends = token == self._end and not self._params.ignore_eos
                longer = BeamSearchSequence(
                    tokens=[*beam.tokens, token],
                    logprobs=[*beam.logprobs, likeliest],
                    cum_logprob=beam.cum_logprob + each.logprob,
                    finish_reason="stop" if ends else "length",
                    stop_reason=token if ends else None,
                )
                (self._finished if ends else grown).append(longer)
        self.beams, self._finished = self._best(grown), self._best(self._finished)

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score_of, reverse=True)[: self._params.beam_width]

    def _score_of(self, sequence: BeamSearchSequence) -> float:
        return self._score(sequence.cum_logprob, len(sequence.tokens) - (sequence.tokens[-1] == self._end))

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._params.length_penalty)
