"""The command line of a script."""

import argparse
from typing import Any


def options(about: str | None, **flags: Any) -> argparse.Namespace:
    """The values of a script's flags.

    Args:
        about: the script's docstring, of which help shows the first line.
        flags: the default of each, which has its type; None is a text's. A type is of a required flag, a list of one
            that takes several values, False of a switch. A tuple has the choices, first the default. A dictionary has
            keywords of ``add_argument``. ``model`` is ``-m``, too.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0] if about else None)
    for name, value in flags.items():
        keywords: dict[str, Any]
        match value:
            case dict():
                keywords = value
            case bool():
                keywords = {"action": "store_true"}
            case type():
                keywords = {"type": value, "required": True}
            case list():
                keywords = {"type": type(value[0]), "nargs": "+", "default": value}
            case tuple():
                keywords = {"choices": value, "default": value[0]}
            case None:
                keywords = {}
            case _:
                keywords = {"type": type(value), "default": value}
        short = ["-m"] if name == "model" else []
        parser.add_argument(*short, f"--{name.replace('_', '-')}", **keywords)
    return parser.parse_args()
