"""The mistakes a user can make: those that end the job, and those that cost a single line."""


class UserError(Exception):
    """A mistake that ends the job: a missing file, an unreadable model, an impossible flag.

    Shown as one line on stderr. The message says what is wrong and what would mend it.
    """


class FlagError(UserError):
    """A flag that is impossible, alone or with the others."""


class RowError(Exception):
    """A mistake in one line of the input: that line becomes an error row, the job goes on.

    ``code`` is a stable snake_case word for programs, the message is for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
