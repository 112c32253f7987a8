"""Requests to the engine and its completions: token ids in, token ids out. Neither has rows or texts."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import eq
from typing import Any, NamedTuple, Protocol, Self, overload

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.core.images import PromptImage
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.sampling_params import GREEDY, SamplingParams
from rosebatch.core.scoring import Scoring


class Request(msgspec.Struct, frozen=True):
    """One prompt. A struct, because one is made for every row.

    Attributes:
        id: chosen by the caller, who finds the completions by it; unique among unfinished requests.
        prompt_token_ids: at least one token.
        sampling: ``n`` completions are generated.
        pooling: the hidden states of the prompt are pooled, and nothing is generated.
        scoring: given tokens get their log-probabilities, and nothing is generated. With neither, tokens are.
        images: in the order of the prompt.
        predicted: tokens that the answer may have, see ``rosebatch.engine.drafts``. They change the speed alone.
        adapter: the name of one that the engine has; empty for the model alone.
    """

    id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = GREEDY
    pooling: PoolingParams | None = None
    scoring: Scoring | None = None
    images: tuple[PromptImage, ...] = ()
    predicted: Sequence[int] = ()
    adapter: str = ""


class Logprobs(NamedTuple):
    """The log-probability of one token, and the likeliest tokens at its position with theirs, likeliest first.

    Attributes:
        rank: one more than the number of likelier tokens; 0 where nobody counted.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


# Of a token with its log-probability, or one of its likeliest tokens, in ``PackedLogprobs``.
LOGPROB_BYTES = 8
# Of a token's rank there.
RANK_BYTES = 4


class PackedLogprobs(Sequence[Logprobs]):
    """Log-probabilities of tokens in a tenth of the memory of their objects, which are made when they are read.

    They are numbers of fp32, and every token has equally many likeliest ones.
    """

    def __init__(self, logprobs: Iterable[Logprobs] = ()) -> None:
        self._ids = array("i")
        self._values = array("f")
        self._ranks = array("i")
        self._width = 1
        self.extend(logprobs)

    @classmethod
    def of(cls, ids: bytes, values: bytes, ranks: bytes, width: int) -> Self:
        """Of int32 ``ids [T, width]``, a token's own first, fp32 ``values`` of these, and int32 ``ranks [T]``."""
        packed = cls()
        packed._ids.frombytes(ids)
        packed._values.frombytes(values)
        packed._ranks.frombytes(ranks)
        packed._width = width
        return packed

    def extend(self, logprobs: Iterable[Logprobs]) -> None:
        """Append those of further tokens."""
        if isinstance(logprobs, PackedLogprobs):
            self._width = logprobs._width
            self._ids += logprobs._ids
            self._values += logprobs._values
            self._ranks += logprobs._ranks
            return
        for token_id, logprob, top, rank in logprobs:
            self._width = 1 + len(top)
            self._ranks.append(rank)
            self._ids.append(token_id)
            self._values.append(logprob)
            for other, value in top:
                self._ids.append(other)
                self._values.append(value)

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, at: int) -> Logprobs: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Logprobs]: ...

    def __getitem__(self, at: int | slice) -> Logprobs | Sequence[Logprobs]:
        if isinstance(at, slice):
            first, stop, step = at.indices(len(self))
            assert step == 1, "a slice is of successive tokens"
            own = slice(first * self._width, stop * self._width)
            ids, values, ranks = self._ids[own], self._values[own], self._ranks[first:stop]
            return PackedLogprobs.of(ids.tobytes(), values.tobytes(), ranks.tobytes(), self._width)
        number = range(len(self))[at]
        own = slice(number * self._width, (number + 1) * self._width)
        ids, values = self._ids[own], self._values[own]
        return Logprobs(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True)), self._ranks[number])

    def __iter__(self) -> Iterator[Logprobs]:
        ids, values, likeliest = iter(self._ids), iter(self._values), self._width - 1
        for rank in self._ranks:
            token_id, logprob = next(ids), next(values)
            top = tuple(zip(islice(ids, likeliest), islice(values, likeliest), strict=True))
            yield Logprobs(token_id, logprob, top, rank)

    def columns(self) -> tuple[list[int], list[float], int]:
        """Ids and values ``[T * width]``, each token's own before its likeliest, and the width."""
        return self._ids.tolist(), self._values.tolist(), self._width

    def total(self) -> float:
        """The sum over the tokens."""
        return sum(self._values[:: self._width])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class StopMatcher(Protocol):
    """Watches the generated tokens of one sequence for its stop strings."""

    def feed(self, token_id: int) -> bool:
        """Take the next generated token; True once a stop string has appeared."""
        ...


class Constraint(Protocol):
    """Keeps the tokens of one sequence to a grammar, or to a budget. Not thread-safe."""

    @property
    def error(self) -> str | None:
        """Why the completion ended before it matched; None if nothing went wrong."""
        ...

    @property
    def forces(self) -> bool:
        """Whether it may leave no choice for many tokens: steps wait to find out."""
        ...

    @classmethod
    def fill_all(cls, constraints: Sequence[Self], masks: Any) -> None:
        """Write which tokens may come next.

        Args:
            constraints: one for each of R sequences.
            masks: numpy ``[R, ceil(V / 32)]`` int32, written whole; token 0 is the lowest bit of the first word.
        """
        ...

    def feed(self, token_id: int) -> bool:
        """Take the next generated token; True if no token may follow it."""
        ...

    @classmethod
    def feed_all(cls, constraints: Sequence[Self], token_ids: Sequence[int]) -> list[bool]:
        """``feed`` for the next token of each of several sequences."""
        ...

    def follow(self, token_id: int) -> tuple[list[int], bool]:
        """Take the only token that may come, and those after it that are found as quickly.

        Each of them is the only one that its mask would allow.

        Returns:
            the tokens, and whether no token may follow them.
        """
        ...

    def rest(self) -> Sequence[int]:
        """The tokens up to the end, if at each of these places no other may come; else none."""
        ...

    def ahead(self, token_ids: Sequence[int]) -> "Sequence[Constraint]":
        """What follows each of these tokens, one after the other: none for those from the first on that may not come.

        None at all of a constraint that looks at tokens one at a time.
        """
        ...


def fill_rows(constraints: Mapping[int, Constraint], masks: Any) -> None:
    """Write the masks of these rows, those of a kind together; see ``Constraint.fill_all``."""
    for kind, rows in _by_kind(constraints).items():
        own = masks[rows]
        kind.fill_all([constraints[row] for row in rows], own)
        masks[rows] = own


def feed_rows(constraints: Mapping[int, Constraint], token_ids: Sequence[int]) -> list[bool]:
    """Take the next token of each row, those of a kind together; returns False for rows without a constraint.

    Args:
        constraints: by row, in the order of the rows.
        token_ids: of each row.
    """
    kinds = {type(each) for each in constraints.values()}
    if len(kinds) == 1 and len(constraints) == len(token_ids):
        # Nearly always, and quicker.
        return kinds.pop().feed_all([*constraints.values()], token_ids)
    ended = [False] * len(token_ids)
    for kind, rows in _by_kind(constraints).items():
        found = kind.feed_all([constraints[row] for row in rows], [token_ids[row] for row in rows])
        for row, is_last in zip(rows, found, strict=True):
            ended[row] = is_last
    return ended


def _by_kind(constraints: Mapping[int, Constraint]) -> dict[type[Constraint], list[int]]:
    by_kind: dict[type[Constraint], list[int]] = {}
    for row, each in constraints.items():
        by_kind.setdefault(type(each), []).append(row)
    return by_kind


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a request; times are seconds on the clock of ``time.perf_counter``.

    A struct, because one is made for every row: a frozen dataclass takes ten times as long.

    Attributes:
        request: the request as it was added.
        sample: which of the request's ``n`` completions this is, from 0.
        cached_tokens: prompt tokens that came from the prefix cache.
        arrival_time: when the request came.
        token_times: when each token was known to the host. Tokens of one decode window have the same time.
        prompt_logprobs: of the prompt's tokens from the second on; only the first sample has them. Where a request
            is scored: of its tokens from ``start`` on, then of its next ones.
        finish_reason: ``stop``, ``length``, ``error``, ``embedded``, ``classified``, or
            ``scored``.
        has_end_token: whether the last token ended it: an end token, or one of ``stop_token_ids``.
        pooled: the vector of the prompt, fp32, if its states are pooled; of tokens, the numbers of one after the other.
        error: why it cannot be used: it does not match its grammar, or its logits are not finite. None if it can.
    """

    request: Request
    sample: int
    token_ids: tuple[int, ...]
    finish_reason: str
    has_end_token: bool = False
    cached_tokens: int
    arrival_time: float
    finish_time: float
    token_times: Sequence[float] = ()
    logprobs: PackedLogprobs | tuple[()] = ()
    prompt_logprobs: PackedLogprobs | tuple[()] = ()
    pooled: "array[float] | None" = None
    error: RowError | None = None

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """Those that its text is of: not the end token, unless the request includes what stops it."""
        left_out = self.has_end_token and not self.request.sampling.include_stop_str_in_output
        return self.token_ids[:-1] if left_out else self.token_ids

    @property
    def first_token_time(self) -> float:
        """When the first token was known; without any, when the completion ended."""
        return self.token_times[0] if self.token_times else self.finish_time
