"""The mistakes a user can make: those that end the job, and those that cost a single line. And signals."""

import signal


class UserError(Exception):
    """A mistake that ends the job: a missing file, an unreadable model, an impossible flag.

    Shown as one line on stderr. The message says what is wrong and what would mend it.
    """


class FlagError(UserError, ValueError):
    """A flag or parameter that is impossible, alone or with the others."""


class InterruptionError(Exception):
    """A signal ended the run; ``exit_code`` is what shells give for it.

    Args:
        number: of the signal.
        kept: where the results so far are, for people.
    """

    def __init__(self, number: int, kept: str = "") -> None:
        name = signal.Signals(number).name
        super().__init__(f"ended by {name}{kept}")
        self.number = number
        self.exit_code = 128 + number


class RowError(Exception):
    """A mistake in one line of the input: that line becomes an error row, the job goes on.

    ``code`` is a stable snake_case word for programs, the message is for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
