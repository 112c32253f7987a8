"""A command whose results go to one place."""

from typing import Any

from typer.core import TyperCommand

from rosebatch.core.errors import FlagError

_PLACES = ("output", "errors")


class Command(TyperCommand):
    """Refuses two places for results. Of other flags the last value counts: scripts append what shall win."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of a command line.

        Raises:
            FlagError: a place was given twice.
        """
        given = [parameter.name for parameter in self.make_parser(ctx).parse_args(args=list(args))[2]]
        for name in _PLACES:
            if given.count(name) > 1:
                raise FlagError(f"--{name} names one place, and is given {given.count(name)} times")
        return super().parse_args(ctx, args)
