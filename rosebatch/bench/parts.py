"""The parts of a step by name: ranges around the operators of an engine, for a profiler to see.

The ranges are put around a built engine from outside and taken away again, so an engine without them pays nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any

from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import DecodeWindow, StepPlan
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.ops.ops import Linear, Ops

QKV, OUT, UP, DOWN = "qkv projection", "out projection", "gate, up projection", "down projection"
ATTENTION, KV, NORMS, ACTIVATIONS = "attention", "KV and rotary", "norms", "activations"
ROUTER, EXPERTS = "router", "experts"
LOGITS, SAMPLING, FEEDBACK, REST = "logits", "sampling", "feedback", "the rest"
DRAFTS = "drafts"
# Those of layers.
OF_LAYERS = (QKV, ATTENTION, KV, OUT, NORMS, ROUTER, EXPERTS, UP, ACTIVATIONS, DOWN)
PARTS = (*OF_LAYERS, LOGITS, SAMPLING)
PROMPT_STEP, DECODE_STEP = "prompt step", "decode step"
STEPS = (PROMPT_STEP, DECODE_STEP)

# Opens a range of this name, such as ``torch.profiler.record_function`` or ``torch.cuda.nvtx.range``.
Mark = Callable[[str], AbstractContextManager[Any]]

# The range of an MLP's first product includes its activation: one kernel may do both.
_OF_OPS = {
    "activated": UP,
    "gated": UP,
    "split_heads": KV,
    "kv_append": KV,
    "add": NORMS,
    "sigmoid_mul": ACTIVATIONS,
    **dict.fromkeys((field.name for field in fields(Ops) if field.name.endswith("_norm")), NORMS),
    **dict.fromkeys(("adjust", "mask_", "greedy", "sample", "sample_filtered"), SAMPLING),
}
_OF_LAYERS = {"qkv": QKV, "projection": QKV, "router": ROUTER, "routed": EXPERTS, "shared": EXPERTS}
_LAST_PRODUCTS = ("project", "project_to_clip")


def swap(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Give an attribute another value until the stack closes."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextmanager
def ranges(engine: Engine, mark: Mark) -> Iterator[None]:
    """Name the parts of all steps that the host launches inside the ``with``; ranges nest.

    Steps are ``PROMPT_STEP`` or ``DECODE_STEP``; a window of decode steps is one range. Parts are those of ``PARTS``.
    A replayed graph has no parts, because the host launches it as a whole.
    """
    runner: Any = engine.runner
    model = runner.model
    outs = {id(mixer.out) for layer in model.layers for mixer in _mixers(layer)}
    with ExitStack() as stack:
        ops = _named_ops(model.ops, outs, mark)
        swap(stack, model, "ops", ops)
        swap(stack, model, "layers", [_named_layer(layer, ops, mark) for layer in model.layers])
        swap(stack, model, "forward", _with_named_attention(model.forward, mark))
        swap(stack, model, "logits", _named(model.logits, LOGITS, mark))
        if isinstance(runner, TritonRunner):
            attention, samples = runner.steps.attention, runner.sampler
            swap(stack, runner.steps, "attention", replace(attention, ops=_named_ops(attention.ops, outs, mark)))
        else:
            samples = runner
        swap(stack, samples, "ops", _named_ops(samples.ops, outs, mark))
        swap(stack, runner, "launch", _named(runner.launch, _kind_of_step, mark))
        yield


def _mixers(layer: Any) -> Sequence[Any]:
    """What mixes tokens in a layer: the layer itself, its attention, or several side by side."""
    if hasattr(layer, "out"):
        return (layer,)
    return layer.mixers if hasattr(layer, "mixers") else (layer.attention,)


def _named(function: Callable[..., Any], name: str | Callable[..., str], mark: Mark) -> Callable[..., Any]:
    """The function in a range of this name, or of the name that its arguments give."""

    @wraps(function)
    def inside(*args: Any, **options: Any) -> Any:
        with mark(name if isinstance(name, str) else name(*args)):
            return function(*args, **options)

    return inside


def _named_ops(ops: Ops, outs: set[int], mark: Mark) -> Ops:
    """The operators in ranges; ``outs`` are the ids of the attention's output projections."""

    def last_product(projection: Any, x: Any) -> str:
        return OUT if id(projection) in outs else DOWN

    named: dict[str, Any] = {name: _named(getattr(ops, name), part, mark) for name, part in _OF_OPS.items()}
    named |= {name: _named(getattr(ops, name), last_product, mark) for name in _LAST_PRODUCTS}
    return replace(ops, **named)


def _named_layer(layer: Any, ops: Ops, mark: Mark) -> Any:
    """A layer, or one of its sub-layers, with these operators; products that are no operators are in ranges."""
    changed: dict[str, Any] = {}
    for field in fields(layer):
        value = getattr(layer, field.name)
        if field.name == "ops":
            changed["ops"] = ops
        elif field.name in _OF_LAYERS and value is not None:
            changed[field.name] = named = _named(value, _OF_LAYERS[field.name], mark)
            if isinstance(value, Linear):
                named.split = _named(value.split, _OF_LAYERS[field.name], mark)  # type: ignore[attr-defined]
        elif field.name == "mixers":
            changed[field.name] = tuple(_named_layer(each, ops, mark) for each in value)
        elif is_dataclass(value) and any(own.name in ("ops", "routed") for own in fields(value)):
            changed[field.name] = _named_layer(value, ops, mark)
    return replace(layer, **changed)


def _with_named_attention(forward: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    return lambda ids, positions, attention, *rest: forward(ids, positions, _named(attention, ATTENTION, mark), *rest)


def _kind_of_step(plan: StepPlan, masks: Any) -> str:
    return PROMPT_STEP if brings_prompts(plan) else DECODE_STEP


def brings_prompts(plan: StepPlan) -> bool:
    """Whether any sequence of the plan brings several tokens, as ``EngineStats`` counts prefill."""
    return not isinstance(plan, DecodeWindow) and any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
