"""``rosebatch check``, once its flags are parsed."""

import sys
from typing import Any

from rosebatch.cli.common import run_config, sampling_defaults
from rosebatch.cli.interrupts import Interrupts
from rosebatch.config.run import InputFormat
from rosebatch.config.switches import flag
from rosebatch.core.errors import FlagError, printable
from rosebatch.engine.load import choose_block_size
from rosebatch.engine.metrics.roofline import measure_host_rates, measure_rates
from rosebatch.io.columns import Columns
from rosebatch.io.fields import with_defaults
from rosebatch.io.reader import PromptReader
from rosebatch.io.tasks.task import Task
from rosebatch.job.check import check_file, summary
from rosebatch.job.run import check_sampling
from rosebatch.launch.launch import default_sampling, grammar_limits, plan_launch
from rosebatch.report.table import print_table


def check(
    source: str,
    input_format: InputFormat,
    result_column: str | None,
    columns: Columns,
    run: dict[str, Any],
    sampling: dict[str, Any],
    task: Task,
) -> int:
    """Print bad rows and what the run would take; returns the number of rows that cannot be served."""
    with Interrupts().watch():
        return _check(source, input_format, result_column, columns, run, sampling, task)


def _check(
    source: str,
    input_format: InputFormat,
    result_column: str | None,
    columns: Columns,
    run: dict[str, Any],
    sampling: dict[str, Any],
    task: Task,
) -> int:
    config = run_config(run)
    plan = plan_launch(config)
    defaults = sampling_defaults(sampling)
    if defaults and not task.samples:
        raise FlagError(f"--{task.name}: nothing is generated, so {', '.join(map(flag, defaults))} have no meaning")
    check_sampling(defaults, None, grammar_limits(config))
    defaults = with_defaults(defaults, default_sampling(plan) if task.samples else {})
    reader = PromptReader(source, defaults, input_format, result_column, columns, task)
    checked = check_file(reader, plan, sys.stdout)
    rates = measure_rates(plan.device.type) or measure_host_rates(plan.source.dtype)
    rows = summary(checked, plan, choose_block_size(plan.config, plan.device), rates)
    title = f"{printable(source)}: {plan.source.name} by {plan.source.model_impl}, {plan.device.type}"
    print_table(title, rows, sys.stdout)
    return checked.errors.total()
