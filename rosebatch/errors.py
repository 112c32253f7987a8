"""The mistakes of a user: those that end the job, and those that fail a single row."""


class UserError(Exception):
    """A mistake that ends the job: a missing file, an unreadable model, an impossible flag.

    The command line prints the message as one line on stderr. It says what is wrong and what mends it.
    """


class FlagError(UserError):
    """A flag that is impossible, alone or together with others. The exit code is then 2."""


class RowError(Exception):
    """A mistake in one row of the input. That row becomes an error row and the job continues.

    ``code`` is a stable snake_case word for programs, ``message`` is for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
