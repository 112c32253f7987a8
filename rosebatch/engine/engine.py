"""The engine: requests of token ids in, completions of token ids out."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from rosebatch.engine.plan import StepPlan, StepResult
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.stats import EngineStats
from rosebatch.errors import RowError
from rosebatch.request import Completion, Constraint, Request, Sequence, StopMatcher


class StepRunner(Protocol):
    """Carries out plans: the runner, or a fake in tests."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin to compute the plan's chunks, behind what was launched before; a function that waits for the result."""
        ...


class Engine:
    """Schedules, runs and commits steps until every request is a completion.

    With ``lookahead`` the next plan is launched before the results of the last are read, so that the device never waits
    for Python.

    Args:
        scheduler: plans the steps.
        runner: carries them out.
        vocab_size: token ids are below this.
        max_model_len: most tokens of prompt and completion together.
        eos_token_ids: the model's end tokens.
        lookahead: plans that may be under way while the next is made; needs a scheduler with a decode window.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        lookahead: int = 0,
    ) -> None:
        assert not lookahead or scheduler.decode_window, "mixed steps need the tokens of the step before"
        self.lookahead = lookahead
        self.scheduler = scheduler
        self.runner = runner
        self.vocab_size = vocab_size
        # A sequence that cannot fit the cache alone could never finish.
        self.max_model_len = min(max_model_len, scheduler.pool.num_blocks * scheduler.pool.block_size)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stats = EngineStats()
        self._launched: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is still under way."""
        return self.scheduler.has_unfinished

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting or running, and their forks."""
        return self.scheduler.num_unfinished

    def add(
        self,
        request: Request,
        *,
        stop_matcher: Callable[[], StopMatcher] | None = None,
        constraint: Callable[[], Constraint] | None = None,
    ) -> None:
        """Queue a request: each of its ``n`` completions is a sequence of its own.

        Args:
            request: what is asked for.
            stop_matcher: makes one for each completion.
            constraint: likewise.

        Raises:
            RowError: see ``require_servable``.
        """
        self.require_servable(request)
        first, *forks = (
            Sequence.start(
                request.sample(number),
                max_model_len=self.max_model_len,
                eos_token_ids=self.eos_token_ids,
                stop_matcher=None if stop_matcher is None else stop_matcher(),
                constraint=None if constraint is None else constraint(),
            )
            for number in range(request.sampling.n)
        )
        first.forks = forks
        self.scheduler.add(first)

    def require_servable(self, request: Request) -> None:
        """Check a request; see the function of this name."""
        require_servable(request, self.vocab_size, self.max_model_len)

    def step(self) -> list[Completion]:
        """Launch a plan and commit the oldest one that is due; the completions that it finished."""
        launched = self._launch_next()
        if launched and len(self._launched) <= self.lookahead:
            return []
        assert self._launched, "a step must make progress"
        finished = self._commit_oldest()
        while self._launched and not self.has_unfinished:
            # Launched before it was known that nothing was left to do.
            finished += self._commit_oldest()
        if self.lookahead and not self._launched:
            # Nothing could be planned before this was known: the device should not wait for the caller as well.
            self._launch_next()
        return [_completion(sequence) for sequence in finished]

    def _launch_next(self) -> bool:
        """Launch what can be planned; whether anything could."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launched.append((plan, self.runner.launch(plan)))
        return plan is not None

    def _commit_oldest(self) -> list[Sequence]:
        plan, wait = self._launched.popleft()
        result = wait()
        pool = self.scheduler.pool
        live = len(self.scheduler.running)
        self.stats.record(plan, result, blocks_used=pool.num_blocks - pool.num_free, live=live)
        return self.scheduler.commit(plan, result)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Queue all requests and yield completions as they finish."""
        for request in requests:
            self.add(request)
        while self.has_unfinished:
            yield from self.step()


def require_servable(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Check a request.

    Raises:
        RowError: the prompt is empty or too long for the model or the cache, or a token id is outside the vocabulary.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise RowError("empty_prompt", "the prompt has no tokens")
    if len(prompt) >= max_model_len:
        raise RowError(
            "prompt_too_long",
            f"the prompt has {len(prompt)} tokens; with at least one to generate, {max_model_len} are allowed",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RowError("invalid_token_id", f"prompt token ids must be in [0, {vocab_size})")
    if any(not 0 <= token_id < vocab_size for token_id, _ in request.sampling.logit_bias):
        raise RowError("invalid_token_id", f"token ids of logit_bias must be in [0, {vocab_size})")


def _completion(sequence: Sequence) -> Completion:
    assert sequence.finish_reason and sequence.first_token_time and sequence.finish_time
    return Completion(
        request=sequence.request,
        token_ids=tuple(sequence.output_token_ids),
        finish_reason=sequence.finish_reason,
        cached_tokens=sequence.num_cached_tokens or 0,
        arrival_time=sequence.arrival_time,
        first_token_time=sequence.first_token_time,
        finish_time=sequence.finish_time,
        logprobs=tuple(sequence.logprobs),
        prompt_logprobs=tuple(sequence.prompt_logprobs),
        error=None if sequence.constraint is None else sequence.constraint.error,
    )
