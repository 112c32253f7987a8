"""Which drafts a run has, and whether it takes tokens that grammars force without a step of their own."""

import torch

from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.engine.drafts.asked_head import AskedHead
from rosebatch.engine.drafts.drafter import Drafter
from rosebatch.engine.drafts.window_drafter import BYTES_A_SECOND, StepCost, WindowDrafter
from rosebatch.engine.metrics.roofline import decode_bytes, weight_bytes
from rosebatch.engine.plan import POOL_TOKENS
from rosebatch.engine.scheduling.answer_pool import AnswerPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import StepPlanner
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.engine.triton_runner.prefix_groups import MIN_ROWS
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.engine.triton_runner.state import MOST_TOKENS
from rosebatch.model.contract import Model
from rosebatch.model.fallback.load import Fallback
from rosebatch.ops.layout import MatrixBytes
from rosebatch.ops.select import has_invariant_products

# Tokens of a step that take about as long as one; and drafts of a sequence on a CPU.
_FREE_TOKENS = {"cuda": 192, "cpu": 16}
_DRAFTS = 15
# Seconds of a step with grammars, on an H200: the host's for the result of a row, and the device's for launches.
_HOST_OF_A_ROW, _LAUNCHES = 40e-6, 1.5e-3
# That a row of a step takes beside its keys, for each token id: a step of 128 rows of Qwen3-0.6B against one of 32.
_BYTES_OF_A_LOGIT = 48
# Of a step that reads little more than the weights.
_FEW_ROWS = 16


def windows_may_draft(model: Model, config: ModelConfig, limits: RunConfig) -> bool:
    """Whether windows of decode steps may have drafts, if the mixers of the model verify them."""
    # Further tokens of a step reach further experts, and read them.
    return limits.speculative == "auto" and not (config.experts or isinstance(model, Fallback))


def choose_drafts(
    scheduler: Scheduler,
    runner: TorchRunner | TritonRunner,
    config: ModelConfig,
    limits: RunConfig,
    dtype: torch.dtype,
    kept: MatrixBytes | None,
    *,
    invariant: bool,
) -> Drafter | WindowDrafter | None:
    """What drafts, if anything does. The scheduler learns which tokens grammars may force.

    Args:
        scheduler: of the run.
        runner: of the run.
        config: of the model.
        limits: the engine's.
        dtype: of activations.
        kept: what the matrices of layers take; None: they are plain.
        invariant: whether completions do not depend on the batch.
    """
    if limits.speculative == "off" or isinstance(runner.model, Fallback):
        return None
    if isinstance(runner, TritonRunner):
        return _of_windows(scheduler.planner, runner, config, limits, dtype, kept) if runner.verifies else None
    # Where a token's bits depend on the tokens of its step, answers would depend on drafts.
    is_exact = invariant and runner.cache.device.type == "cpu" and has_invariant_products(dtype)
    return _of_steps(scheduler.planner, runner, config, dtype, kept) if is_exact else None


def _of_windows(
    planner: StepPlanner,
    runner: TritonRunner,
    config: ModelConfig,
    limits: RunConfig,
    dtype: torch.dtype,
    kept: MatrixBytes | None,
) -> WindowDrafter | None:
    ranks = limits.tensor_parallel_size
    planner.forces = config.num_token_ids
    # Each forced token takes a row of a step: with as many sequences as rows, none is spared.
    forced = _forced_rows(decode_bytes(config, dtype.itemsize, _FEW_ROWS, kept) // ranks)
    planner.forces_up_to = min(forced, planner.max_num_seqs // 2)
    if not windows_may_draft(runner.model, config, limits):
        return None
    cache = runner.cache
    token = cache.nbytes // max(sum(cache.num_blocks) * cache.block_size, 1)
    weights, row = weight_bytes(config, dtype.itemsize, kept) // ranks, _BYTES_OF_A_LOGIT * config.num_token_ids
    cost = StepCost(weights, row, token, _FREE_TOKENS["cuda"])
    planner.answers = AnswerPool(POOL_TOKENS)
    sharing_rows = None if runner.prefix_groups is None else MIN_ROWS
    return WindowDrafter(cost, planner.max_num_seqs, MOST_TOKENS, sharing_rows)


def _of_steps(
    planner: StepPlanner, runner: TorchRunner, config: ModelConfig, dtype: torch.dtype, kept: MatrixBytes | None
) -> Drafter | None:
    planner.forces = config.num_token_ids
    if runner.states is not None:
        # Tokens cannot be taken back from them.
        return None
    head = None
    if runner.drafts is not None:
        # Both read their weights.
        share = runner.drafts.head.draft_weights * dtype.itemsize / weight_bytes(config, dtype.itemsize, kept)
        head = AskedHead(runner.drafts.propose, share)
    planner.answers = AnswerPool(POOL_TOKENS)
    return Drafter(free_tokens=_FREE_TOKENS["cpu"], most=_DRAFTS, head=head)


def _forced_rows(read: int) -> int:
    """Rows whose grammars keep the host busy for half as long as the device takes for a step.

    Then a third of the tokens has to be forced, or the device waits for longer than it is spared.
    """
    return max(int((_LAUNCHES + read / BYTES_A_SECOND) / _HOST_OF_A_ROW / 2), 1)
