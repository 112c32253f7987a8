"""A compiled grammar, and what follows it through one completion."""

import copy
import functools
import os
import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from rosebatch.text.grammar.filling import Filling, executor
from rosebatch.text.grammar.mask_layout import MaskLayout
from rosebatch.text.grammar.source import compile_matcher, new_matcher, one_line, without_excerpts, without_forcing

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# Another matcher is compiled for every this many completions, up to one for each core; none of a slow grammar.
_COMPLETIONS_A_MATCHER = 16
_MAX_MATCHERS = os.cpu_count() or 1
_SLOW_SECONDS = 0.05
# From so many completions on, other threads save more time than it takes to begin them.
_MANY = 32
# Tokens of a run that must come: each rest of it is encoded once.
_LONGEST_RUN = 32

# Of ``ru_maxrss``: macOS counts bytes, Linux KiB.
_PEAK_UNIT = 1 if os.uname().sysname == "Darwin" else 1024


class TokenConstraint:
    """Follows a grammar through one completion (see ``rosebatch.core.request.Constraint``).

    Attributes:
        error: why the completion ended before it matched: the grammar took too much time or memory, or did not allow
            a generated token. None if nothing went wrong, also if max_tokens or a stop string ended the completion.
    """

    forces = True

    def __init__(self, grammar: "Grammar", layout: MaskLayout) -> None:
        self._grammar = grammar
        self._layout = layout
        self._matcher = grammar.matcher()
        self._renewal = grammar.renewal
        self._alone = False
        self._forces = True
        self._token_ids: list[int] = []
        # Of fewer tokens, others may still come later.
        self._looks_from = 0
        self._ended = False
        # The mask of the next token, and its row there, if it is being made.
        self._filling: Filling | None = None
        self._row = 0
        self.error: str | None = None

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write which tokens may come next: at least one.

        All end tokens of the model are allowed if the grammar can end here. Only they are if nothing else can follow.

        Args:
            mask: [ceil(vocab_size / 32)] int32, overwritten. Token 0 is the lowest bit of the first word.
        """
        self._wait()
        words = None if self._ended else self._allowed()
        if words is None:
            none = np.zeros(self._layout.num_tokenizer_words, np.int32)
            self._layout.write(mask[None], none[None], [0])
        else:
            self._layout.write(mask[None], words[None], [0] if self._matcher.is_accepting() else [])

    @classmethod
    def fill_all(cls, constraints: Sequence["TokenConstraint"], masks: NDArray[np.int32]) -> None:
        """``fill`` for several completions of one model, on all cores.

        Args:
            constraints: R of them.
            masks: [R, ceil(vocab_size / 32)] int32, overwritten.
        """
        layout = constraints[0]._layout
        if constraints[0]._grammar.look_at_memory():
            for constraint in constraints:
                constraint._renew()
        words = cls._fill_words(constraints)
        for row, token_id in layout.forced(words):
            if not constraints[row]._takes(token_id):
                words[row] = constraints[row]._unforced()
        ended = [row for row, constraint in enumerate(constraints) if constraint._ended]
        ending = [(row, constraints[row]) for row in layout.ending(words)]
        layout.write(masks, words, [*ended, *(row for row, each in ending if each._matcher.is_accepting())])
        for row, constraint in ending:
            if constraint._matcher.is_error():
                constraint.fill(masks[row])

    @classmethod
    def _fill_words(cls, constraints: Sequence["TokenConstraint"]) -> NDArray[np.int32]:
        """Masks as llguidance makes them, ``[R, num_tokenizer_words]``; none of an ended completion has a bit."""
        new = [each for each in constraints if each._filling is None and not each._ended]
        if new:
            cls._start_filling(new)
        filling = constraints[0]._filling
        if filling is not None and len(filling.words) == len(constraints):
            rows = [each._row for each in constraints if each._filling is filling]
            if rows == [*range(len(constraints))]:
                # Nearly always.
                filling.wait()
                return filling.words
        words = np.zeros((len(constraints), constraints[0]._layout.num_tokenizer_words), np.int32)
        for filling in {each._filling for each in constraints if each._filling is not None}:
            filling.wait()
            rows = [row for row, each in enumerate(constraints) if each._filling is filling]
            words[rows] = filling.words[[constraints[row]._row for row in rows]]
        return words

    @staticmethod
    def _start_filling(constraints: Sequence["TokenConstraint"]) -> Filling:
        filling = Filling([each._matcher for each in constraints], constraints[0]._layout.num_tokenizer_words)
        for row, each in enumerate(constraints):
            each._filling, each._row = filling, row
        return filling

    def feed(self, token_id: int) -> bool:
        """Add the next generated token. True if nothing may follow it, or if the grammar does not allow it."""
        if self._ended:
            return True
        self._move()
        if token_id in self._layout.eos_token_ids:
            # One of ``ahead`` may have failed: this one then fails for the same reason.
            if not self._matcher.is_accepting() and self._allowed() is not None:
                self._fail("an end token came too early")
            self._ended = True
        elif not 0 <= token_id < self._layout.known:
            self._fail(f"the tokenizer has no token {token_id}")
        else:
            self._token_ids.append(token_id)
            self._end_if_due(followed=self._matcher.consume_token(token_id))
        return self._ended

    @classmethod
    def feed_all(cls, constraints: Sequence["TokenConstraint"], token_ids: Sequence[int]) -> list[bool]:
        """``feed`` for several completions, on all cores; these then begin with the masks of what follows."""
        if len(constraints) < _MANY:
            return [each.feed(token_id) for each, token_id in zip(constraints, token_ids, strict=True)]
        layout = constraints[0]._layout
        ends, known = layout.eos_token_ids, layout.known
        together, pairs = [], []
        for each, token_id in zip(constraints, token_ids, strict=True):
            if each._ended or token_id in ends or not 0 <= token_id < known:
                each.feed(token_id)
                continue
            each._move()
            each._token_ids.append(token_id)
            together.append(each)
            pairs.append((each._matcher, token_id))
        for each, followed in zip(together, executor().consume_token_par(pairs), strict=True):
            if followed:
                # A call would take as long again.
                each._ended = each._matcher.is_stopped()
            else:
                each._end_if_due(followed=False)
        # Choices are looked at for the rest of their text before.
        open_ones = [each for each in together if not each._ended and not each._grammar.is_choice]
        if len(open_ones) >= _MANY:
            cls._start_filling(open_ones).begin()
        return [each._ended for each in constraints]

    def follow(self, token_id: int) -> tuple[list[int], bool]:
        """See ``Constraint``: all tokens that encoding gives for the text that must come."""
        run = self._run()
        if len(run) < 2 or run[0] != token_id:
            return [token_id], self.feed(token_id)
        self._move()
        self._token_ids += run
        self._end_if_due(followed=self._matcher.consume_tokens(run))
        return run, self._ended

    def rest(self) -> list[int]:
        """The tokens up to the end, if at each of these places no other may come; else none.

        Only of a choice: other grammars seldom end where text must come, and a look takes as long as a mask. So each
        place is looked at once.
        """
        if self._ended or not self._grammar.is_choice or len(self._token_ids) < self._looks_from:
            return []
        self._wait()
        matcher, found = self._matcher.deep_copy(), list[int]()
        while not matcher.is_stopped():
            words = np.frombuffer(matcher.compute_bitmask(), "<u4", count=self._layout.num_tokenizer_words)
            token_id = _only(words)
            if token_id is None or matcher.is_accepting() or token_id in self._layout.eos_token_ids:
                break
            if token_id >= self._layout.known or not matcher.consume_token(token_id):
                break
            found.append(token_id)
        else:
            return found
        self._looks_from = len(self._token_ids) + len(found) + 1
        return []

    def ahead(self, token_ids: Sequence[int]) -> "list[TokenConstraint]":
        """What follows each of these tokens: none for those from the first on that the grammar does not allow.

        None either from where ``_unforced`` is due, or once the grammar was started over: all that follows depends on
        it, and a copy would keep it to itself.
        """
        found = list[TokenConstraint]()
        last = self
        self._wait()
        if self._is_followed_alone():
            return found
        for token_id in token_ids:
            if last._ended or token_id in self._layout.eos_token_ids or not last._takes(token_id):
                break
            last = last._copy()
            last.feed(token_id)
            if last._is_followed_alone():
                break
            found.append(last)
        return found

    def _wait(self) -> None:
        """Wait until no other thread uses the matcher."""
        if self._filling is not None:
            self._filling.wait()

    def _move(self) -> None:
        """The mask of the next token will be another one."""
        self._wait()
        self._filling = None

    def _end_if_due(self, *, followed: bool) -> None:
        """Whether the completion ends with the last of its tokens, which the matcher has followed or not."""
        if followed or self._start_over():
            self._ended = self._matcher.is_stopped()
        else:
            self._fail(self._matcher.get_error())

    def _run(self) -> list[int]:
        """The tokens that encoding gives for the text that must come, if masks would name them one after the other."""
        self._wait()
        matcher = self._matcher
        if self._ended or matcher.is_error():
            return []
        run = list(self._grammar.alike(matcher.compute_ff_tokens()))
        return run[: matcher.validate_tokens(run)]

    def _encoded(self) -> int | None:
        """The first token that encoding gives for the text that must come, alone in the mask; None for no such text."""
        matcher = self._matcher
        if self._ended or matcher.is_error() or matcher.is_accepting():
            return None
        found = matcher.compute_ff_tokens()
        return found[0] if found else None

    def _is_followed_alone(self) -> bool:
        """Whether wrong drafts would spend its own states, or that token only has the name that the text spells."""
        token_id = self._encoded()
        return self._alone or (token_id is not None and not self._takes(token_id))

    def _copy(self) -> "TokenConstraint":
        """One that goes its own way from here on."""
        copied = copy.copy(self)
        copied._matcher, copied._token_ids = self._matcher.deep_copy(), [*self._token_ids]
        return copied

    def _allowed(self) -> NDArray[np.int32] | None:
        """One bit for each token; None if the grammar cannot be followed further."""
        words = self._words()
        if self._matcher.is_error() and self._start_over():
            words = self._words()
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
            return None
        forced = self._layout.forced(words[None])
        return words if not forced or self._takes(forced[0][1]) else self._unforced()

    def _words(self) -> NDArray[np.int32]:
        return np.frombuffer(self._matcher.compute_bitmask(), "<i4", count=self._layout.num_tokenizer_words)

    def _takes(self, token_id: int) -> bool:
        """Whether the grammar means this token, and not the text that it spells."""
        if token_id in self._layout.eos_token_ids:
            return self._matcher.is_accepting()
        return token_id < self._layout.known and self._matcher.validate_tokens([token_id]) == 1

    def _unforced(self) -> NDArray[np.int32]:
        """The mask where any tokens may spell the text that must come, for the rest of the completion.

        llguidance forces the tokens that encoding gives, and encoding takes the name of an added token for that token.
        """
        self._forces = False
        self._follow_again()
        return self._words()

    def _renew(self) -> None:
        """Follow the tokens so far again with a new matcher, if those of all grammars have grown too large."""
        if self._renewal == self._grammar.renewal or self._ended:
            return
        self._renewal = self._grammar.renewal
        self._follow_again()

    def _follow_again(self) -> bool:
        self._filling = None
        self._matcher = self._grammar.matcher(forces=self._forces)
        return self._matcher.consume_tokens(self._token_ids)

    def _start_over(self) -> bool:
        """Follow the tokens so far again, with a matcher of its own; False if that fails too.

        Completions share the states of a matcher. Some grammars reach the limit of states after some hundred rows, and
        then every row would fail, whatever its tokens are.
        """
        if self._alone:
            return False
        self._alone, self._filling = True, None
        self._matcher = self._grammar.replace_matcher(forces=self._forces)
        return self._matcher.consume_tokens(self._token_ids)

    def _fail(self, reason: str) -> None:
        self._ended, self._filling = True, None
        self.error = one_line(
            without_excerpts(reason).replace("NoExtensionBias", "the model has no token that may follow")
        )


def _only(words: NDArray[np.uint32]) -> int | None:
    """The only token of a mask; None if it has none or several."""
    places = np.flatnonzero(words)
    if len(places) != 1:
        return None
    word = int(words[places[0]])
    return None if word & (word - 1) else 32 * int(places[0]) + word.bit_length() - 1


@functools.lru_cache(maxsize=4096)
def _alike(tokens: "LLTokenizer", layout: MaskLayout, run: tuple[int, ...]) -> tuple[int, ...]:
    """The first of these tokens that end nothing, if each rest of them is encoded as it is behind the others.

    Masks are of rests, so they might name other tokens. Then it is the first one alone.
    """
    usual = [token_id < layout.known and token_id not in layout.eos_token_ids for token_id in run]
    run = run[: usual.index(False) if False in usual else len(run)]
    rests = [list(run[place:]) for place in range(len(run))]
    return run if all(tokens.tokenize_bytes(tokens.decode_bytes(rest)) == rest for rest in rests) else run[:1]


class Grammar:
    """A compiled grammar.

    Args:
        tokens: of the tokenizer.
        layout: the layout of the masks.
        serialized: the grammar in llguidance's format.
        renewals: of all grammars.
        memory, is_choice: see below.

    Attributes:
        memory: bytes that it takes, as far as that is known before a completion follows it.
        is_choice: whether it is a list of texts.

    Raises:
        ValueError: the grammar does not compile, or nothing matches it.
    """

    def __init__(
        self,
        tokens: "LLTokenizer",
        layout: MaskLayout,
        serialized: str,
        renewals: "Renewals",
        memory: int,
        *,
        is_choice: bool,
    ) -> None:
        self.memory = memory
        self.is_choice = is_choice
        self._tokens = tokens
        self._layout = layout
        self._serialized = serialized
        self._renewals = renewals
        started = time.perf_counter()
        # By whether they force the tokens of text that must come.
        self._matchers: dict[bool, list[LLMatcher]] = {True: [compile_matcher(tokens, serialized)], False: []}
        self._slow = time.perf_counter() - started > _SLOW_SECONDS
        self._started = 0

    @property
    def renewal(self) -> int:
        """Counts up when completions should follow the grammar with new matchers."""
        return self._renewals.count

    def start(self) -> "TokenConstraint":
        """Start to follow the grammar through one completion.

        Copies of a matcher share states under a lock. So completions are spread over several matchers, up to one for
        each core, if there are enough completions to be worth compiling more.
        """
        return TokenConstraint(self, self._layout)

    def matcher(self, *, forces: bool = True) -> "LLMatcher":
        """A matcher for one completion, at the beginning.

        Args:
            forces: whether text that must come is made of the tokens that encoding gives, or of any.
        """
        self._renewals.used(self)
        wanted = 1 if self._slow else min(_MAX_MATCHERS, 1 + self._started // _COMPLETIONS_A_MATCHER)
        matchers = self._matchers[forces]
        if len(matchers) < wanted:
            matchers.append(self._new_matcher(forces))
        matcher = matchers[self._started % len(matchers)]
        self._started += 1
        return matcher.deep_copy()

    def _new_matcher(self, forces: bool) -> "LLMatcher":
        return new_matcher(self._tokens, self._serialized if forces else without_forcing(self._serialized))

    def alike(self, run: list[int]) -> Sequence[int]:
        """See ``_alike``."""
        return _alike(self._tokens, self._layout, tuple(run[:_LONGEST_RUN]))

    def look_at_memory(self) -> bool:
        """Find out whether matchers should be renewed, or some were."""
        self._renewals.look()
        return self._renewals.count > 0

    def forget_matchers(self) -> None:
        """Free the states that completions have found, as far as no completion follows them any more."""
        for matchers in self._matchers.values():
            matchers.clear()

    def replace_matcher(self, *, forces: bool) -> "LLMatcher":
        """A new matcher that shares no states with earlier ones. Later completions start from new matchers too."""
        self._matchers[forces].clear()
        return self._new_matcher(forces)


class Renewals:
    """Counts how often all matchers had to be made anew, because the states that they find take too much memory.

    llguidance does not state the size of a matcher. So the peak memory of the process decides. A new matcher allows the
    same tokens as the one before it.

    Args:
        memory: bytes that the peak may grow by, from the first look on.
    """

    def __init__(self, memory: int) -> None:
        self.count = 0
        self._memory = memory
        self._limit: int | None = None
        # Those without a completion now are still remembered, with all of their states.
        self._used: WeakSet[Grammar] = WeakSet()

    def used(self, grammar: Grammar) -> None:
        """Completions follow this grammar from now on."""
        self._used.add(grammar)

    def look(self) -> None:
        """Compare the peak with what it may be."""
        peak = _peak_memory()
        if self._limit is None:
            self._limit = peak + self._memory
        elif peak > self._limit:
            self.count += 1
            for grammar in self._used:
                grammar.forget_matchers()
            self._used.clear()
            # The memory that is freed now is used again. If the peak still grows, something else may be the reason.
            self._limit = peak + self._memory // 4


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT
