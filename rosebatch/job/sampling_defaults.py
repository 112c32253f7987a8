"""Sampling defaults for all rows of a job, checked before it runs."""

from collections.abc import Mapping
from typing import Any

from rosebatch.core.errors import FlagError, RowError
from rosebatch.io.fields import SAMPLING_FIELDS
from rosebatch.io.sampling_fields import sampling_params
from rosebatch.text.grammar.check import GrammarLimits, check_grammar


def check_sampling(given: Mapping[str, Any], seed: int | None, limits: GrammarLimits | None = None) -> None:
    """Check the defaults for all rows now: a bad one is one error, not one a row.

    Args:
        given: fields of a row.
        seed: of the job.
        limits: what compiling a grammar may take.

    Raises:
        FlagError: a value is impossible.
    """
    unknown = given.keys() - SAMPLING_FIELDS
    if unknown:
        raise FlagError(f"{min(unknown)} is no sampling field of a row")
    try:
        params = sampling_params(given if seed is None else {**given, "seed": seed})
        if params.grammar is not None:
            check_grammar(params.grammar, limits)
    except RowError as error:
        raise FlagError(error.message) from None
    except UnicodeEncodeError:
        raise FlagError("a regex, grammar, schema or choice has characters that are no Unicode") from None
