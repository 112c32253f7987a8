"""What an engine has done, and what it has before it: enough to tell how long that will take."""

from typing import NamedTuple


class Outlook(NamedTuple):
    """Counts of a moment; those of several engines can be added.

    Attributes:
        requests, sequences: unfinished ones.
        begun: sequences whose prompts are computed.
        prompt_left: tokens of prompts that are not.
        generated: tokens of unfinished sequences so far.
        room: tokens that they may still get.
        finished: sequences that have finished since the counts began.
        stopped: those of them that ended before they had to.
        prompt_tokens, output_tokens: computed and generated since then, also for unfinished sequences.
        prefill_seconds, decode_seconds: that the device took for them.
    """

    requests: int = 0
    sequences: int = 0
    begun: int = 0
    prompt_left: int = 0
    generated: int = 0
    room: int = 0
    finished: int = 0
    stopped: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def plus(self, other: "Outlook", sign: int = 1) -> "Outlook":
        """The sums; with -1, the differences."""
        return Outlook._make(one + sign * more for one, more in zip(self, other, strict=True))

    @property
    def done(self) -> "Outlook":
        """What was counted since the counts began, without what is under way."""
        return self._replace(requests=0, sequences=0, begun=0, prompt_left=0, generated=0, room=0)
