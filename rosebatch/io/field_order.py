"""The order of a template's fields in which rows share the longest beginnings.

Source: Liu et al. 2024, Optimizing LLM Queries in Relational Data Analytics Workloads (arXiv 2403.05821). There, each
row has an order of its own. Here all have the same, so that a model sees one form of prompt.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any

from rosebatch.core.errors import FlagError, RowError
from rosebatch.io.prompt_template import fill, parts


def reordered(template: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """The template with labelled lines that are neighbours in another order: the fewest distinct values first.

    A labelled line has text before its first field, such as ``Color: {color}``. All other lines stay in their places,
    and no line moves past them. Lines with equally many values keep their order.

    Args:
        template: see ``rosebatch.io.prompt_template``.
        rows: values by the names of their columns. A line that cannot be made of a row is not counted there.

    Raises:
        FlagError: no two labelled lines are neighbours.
    """
    lines = template.split("\n")
    labelled = [list(found) for is_one, found in groupby(range(len(lines)), lambda n: _is_labelled(lines[n])) if is_one]
    movable = [places for places in labelled if len(places) > 1]
    if not movable:
        raise FlagError(
            "--reorder-fields: --prompt-template needs lines below each other that have text before their field, "
            "such as 'Color: {color}'"
        )
    # Hashes: the values themselves may be long.
    seen: dict[int, set[int]] = {place: set() for places in movable for place in places}
    for values in rows:
        for place, found in seen.items():
            with suppress(RowError):
                found.add(hash(fill(lines[place], values)))
    for places in movable:
        in_order = sorted(places, key=lambda place: len(seen[place]))
        lines[places[0] : places[-1] + 1] = [lines[place] for place in in_order]
    return "\n".join(lines)


def _is_labelled(line: str) -> bool:
    try:
        return parts(line)[0][0].strip() != ""
    except FlagError:
        # No field, or a part of one whose name has a line break.
        return False
