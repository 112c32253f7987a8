"""A model that fails every row would fill the output with errors: such a job is given up."""

from rosebatch.core.errors import UserError
from rosebatch.job.report.tally import Tally

# Rows without finite logits, and no answer, before a job is given up.
MAX_NOT_FINITE = 64
_CODE = "non_finite_logits"


def require_finite(tally: Tally, num_rows: int, at_least: int = 1) -> None:
    """Check that some row has an answer, unless most failed for other reasons than their logits.

    Args:
        tally: of the job.
        num_rows: results so far.
        at_least: rows without finite logits before the check counts.

    Raises:
        UserError: all rows so far have failed, and most because their logits are not finite.
    """
    failed = tally.errors[_CODE]
    if tally.failed == num_rows and failed >= at_least and 2 * failed > num_rows:
        raise UserError(
            f"all {num_rows} rows so far failed: the model's logits are not finite. Its weights may be damaged, or"
            f" its dtype too narrow: try --dtype bfloat16 or float32"
        )
