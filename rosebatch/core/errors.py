"""The mistakes of a user: those that end the job, and those that fail a single row. And signals."""

import re
import signal
from typing import Any

_LOGIN = re.compile(r"(:///?)[^\s/]*@")
# Signatures of presigned URLs are in the query. Punctuation after it belongs to the sentence.
_QUERY = re.compile(r"(://(?:(?!://)[^\s?])*\?)\S*[^\s:;,.)'\"]")


def printable(text: str) -> str:
    """One line that is safe to print: no logins or queries of URLs, and no control characters.

    Also escapes what has no UTF-8, as file names may hold.
    """
    text = " ".join(filter(None, map(str.strip, text.splitlines())))
    if "://" in text:
        text = _QUERY.sub(r"\1…", _LOGIN.sub(r"\1", text))
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def is_failure(error: BaseException) -> bool:
    """Whether something failed, and nobody asked the process to stop. A panic of a library in Rust is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class UserError(Exception):
    """A mistake that ends the job: a missing file, an unreadable model, an impossible flag.

    The command line prints the message as one line on stderr. It says what is wrong and what mends it. Secrets of URLs
    and control characters are not in it, whoever made the message.

    Attributes:
        exit_code: of the command: 2 if the command or its input is wrong, 1 if rows were served before that showed.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class FlagError(UserError, ValueError):
    """A flag or parameter that is impossible, alone or together with others."""


class FailedRunError(UserError):
    """The run failed on the way, and neither the command nor its input is wrong."""

    exit_code = 1


class ChangedInputError(FailedRunError):
    """The input has changed since the run began. What the run has written is of the old contents, and stays.

    Args:
        path: of the input or a file of it.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: changed during the run, which needs the old contents: put them back")


class LostProcessError(FailedRunError):
    """A process that the run cannot go on without is gone. What the run has written stays."""


class InterruptionError(Exception):
    """A signal ended the run.

    Args:
        number: of the signal.
        kept: where the results so far are; appended to the message.

    Attributes:
        exit_code: the code that shells report for the signal, 128 + its number.
    """

    def __init__(self, number: int, kept: str = "") -> None:
        name = signal.Signals(number).name
        super().__init__(printable(f"ended by {name}{kept}"))
        self.number = number
        self.exit_code = 128 + number


# Characters of a row error's message: it may quote a value of any size.
_LONGEST_MESSAGE = 1000


class RowError(Exception):
    """A mistake in one row of the input. That row becomes an error row and the job continues.

    ``code`` is a stable snake_case word for programs, ``message`` is for people.
    """

    def __init__(self, code: str, message: str) -> None:
        if len(message) > _LONGEST_MESSAGE:
            message = message[:_LONGEST_MESSAGE] + " ..."
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would call the class with the message alone.
        return type(self), (self.code, ""), {"args": self.args, "code": self.code, "message": self.message}


def unexpected(what: str, error: BaseException) -> RowError:
    """What fails a row where our own code, or a library's, raises what it never should.

    Args:
        what: was being done, such as ``reading the row``.
        error: what came of it.
    """
    text = str(error).partition("\n")[0]
    return RowError("unexpected_error", f"{what} failed: {type(error).__name__}{f': {text}' if text else ''}")
