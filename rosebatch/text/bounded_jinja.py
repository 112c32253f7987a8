"""Chat templates that take no more memory than a prompt may need, and end. A template is a program of others.

Jinja's sandbox bounds ``range`` alone. Here what may grow by a number or a product is estimated before it is computed,
and what grows by its parts is measured. Steps are counted: rounds of loops, calls, filters, slices, ``in``, and what
these read. Comparisons are not: each takes 0.3 µs more then, and templates have many.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, reduce, wraps
from types import FunctionType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rosebatch.core.plain import TEXT
from rosebatch.text.template_values import kept_texts, plain_values

# Characters of a text, or of all texts of a list. The longest prompt of a row has less.
MAX_CHARACTERS = 1 << 26
# Rounds of all loops, calls, filters. Each takes some microseconds. A chat of a thousand messages needs some thousands.
MAX_STEPS = 1 << 20
# Characters, or elements of a list, that a step has time to read or write.
_A_STEP = 4096
_MAX_BITS = 1 << 16
# Of an element of a list, in characters.
_ELEMENT = 8
_OF_DICTS = frozenset(dir(dict))
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")


@cache
def bounded_renderer() -> Callable[..., Any]:
    """The library's ``render_jinja_template``, with templates that are bounded.

    These raise TemplateRuntimeError where they would make more than ``MAX_CHARACTERS`` or take more than ``MAX_STEPS``.
    """
    # Here and not above: the import takes 0.4 s.
    from transformers.utils import chat_template_utils as library

    environment = library._compile_jinja_template("").environment
    environment.__class__ = _Environment
    environment.finalize = _shown
    environment.concat = _concat
    # It makes as much text as it is asked for.
    del environment.globals["lipsum"]
    for name, growth in _FILTERS.items():
        environment.filters[name] = _bounded_filter(environment.filters[name], growth)
    environment.filters |= {"sum of": _sum, "joined as texts": _joined_texts, "rounds of": _rounds, "as read": _read}

    environment.filters["tojson"] = kept_texts(environment.filters["tojson"])

    @lru_cache
    def compiled(source: str) -> Template:
        tree = _Rewriter().visit(environment.parse(source))
        template: Template = Template.from_code(environment, environment.compile(tree), environment.globals)
        # Each rendering copies these: that of Jinja's own mapping takes 4 µs.
        template.globals = dict(template.globals)
        return template

    render = library.render_jinja_template
    # A copy: other users of the library have templates of their own.
    return FunctionType(
        render.__code__,
        {**vars(library), **plain_values(vars(library)), "_compile_jinja_template": compiled},
        None,
        render.__defaults__,
    )


class _Pieces(list[str]):
    """What a macro or a block has written."""

    size = 0

    def append(self, piece: str) -> None:
        self.size = _checked(self.size + len(piece) + 1)
        super().append(piece)

    def extend(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            self.append(piece)


class _CodeGenerator(CodeGenerator):
    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.pieces()")


class _Rewriter(NodeTransformer):
    """Filters in place of what may grow or go on. Their names have spaces, so no template has them."""

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:  # noqa: N802
        # a + b + c is one sum: nearly all operators of templates are this one.
        terms, left = [self.visit(node.right)], node.left
        while isinstance(left, nodes.Add):
            terms.append(self.visit(left.right))
            left = left.left
        return _filtered(nodes.Tuple([self.visit(left), *reversed(terms)], "load"), "sum of")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load"), "joined as texts")

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        if node.node is not None:
            node.node = _filtered(node.node, "as read")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "as read")
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:  # noqa: N802
        self.generic_visit(node)
        if node.op in ("in", "notin") and not isinstance(node.expr, nodes.Literal):
            node.expr = _filtered(node.expr, "as read")
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "rounds of")
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


class _Context(Context):
    steps = 0


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%"))
    code_generator_class = _CodeGenerator
    context_class = _Context
    pieces = _Pieces

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * right)
        elif isinstance(left, str):
            _checked(_percent(left, right))
        return self.binop_table[operator](left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The same for what nearly all are, without an error on the way.
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _read(__context, getattr(__obj, "__self__", None))
        if isinstance(__obj, LoopContext):
            args = (_rounds(__context, *args),)
        method = getattr(__obj, "__wrapped__", __obj)
        growth = _METHODS.get(getattr(method, "__name__", ""))
        if growth is not None and isinstance(owner := getattr(method, "__self__", None), str | bytes | int):
            _checked(growth(owner, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)


def _checked(size: int) -> int:
    if size > MAX_CHARACTERS:
        raise TemplateRuntimeError(f"it makes more than {MAX_CHARACTERS} characters")
    return size


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateRuntimeError(f"it makes a number of more than {_MAX_BITS} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(right, int):
        _checked(_size(left) * right)
    elif isinstance(left, int):
        _checked(_size(right) * left)


def _size(value: Any) -> int:
    """Characters of a text, or of all texts in a list or an object."""
    # First what nearly all are: to ask for a Mapping takes half a microsecond.
    if type(value) is dict:
        value = [*value, *value.values()]
    elif isinstance(value, str | bytes):
        return len(value)
    elif isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    elif not isinstance(value, list | tuple):
        return _ELEMENT
    total = 0
    for item in value:
        total += (len(item) if type(item) is str else _size(item)) + _ELEMENT
        if total > MAX_CHARACTERS:
            _checked(total)
    return total


def _shown(value: Any) -> Any:
    if not isinstance(value, str):
        _size(value)
    return value


def _concat(pieces: Iterable[str]) -> str:
    if not isinstance(pieces, _Pieces):
        size, written = 0, []
        for piece in pieces:
            size += len(piece) + 1
            if size > MAX_CHARACTERS:
                _checked(size)
            written.append(piece)
        pieces = written
    return "".join(pieces)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    total = 0
    for value in values:
        # An empty text takes its place too.
        total = _checked(total + (len(value) + 1 if type(value) is str else _size(value) + 1))
        yield value


@pass_context
def _sum(context: Context, terms: Sequence[Any]) -> Any:
    if TEXT.issuperset(map(type, terms)):
        if (size := sum(map(len, terms))) >= _A_STEP:
            _take(context, _checked(size) // _A_STEP)
        return "".join(terms)
    return reduce(_plus, terms)


def _plus(left: Any, right: Any) -> Any:
    if type(left) is not int:
        _checked(_size(left) + _size(right))
    return left + right


@pass_context
def _joined_texts(context: Context, parts: Sequence[Any]) -> str:
    join = markup_join if context.eval_ctx.autoescape else str_join
    text: str = _read(context, join(list(_counted(parts))))
    return text


@pass_context
def _read(context: Context, value: Any) -> Any:
    _take(context, 1 + (len(value) // _A_STEP if isinstance(value, str | list | tuple) else 0))
    return value


@pass_context
def _rounds(context: Context, values: Any) -> Any:
    if not hasattr(values, "__len__"):
        return _each(context, values)
    _take(context, len(values))
    return values


def _each(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _take(context, 1)
        yield value


def _take(context: Any, steps: int) -> None:
    context.steps += steps
    if context.steps > MAX_STEPS:
        raise TemplateRuntimeError(f"it takes more than {MAX_STEPS} steps")


def _bounded_filter(function: Callable[..., Any], growth: Callable[..., int]) -> Callable[..., Any]:
    # Jinja hands some filters its own object first.
    skipped = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        own, (value, *rest) = args[:skipped], args[skipped:]
        if hasattr(value, "__next__"):
            value = list(_counted(value))
        _checked(growth(value, *rest, **kwargs))
        return function(*own, value, *rest, **kwargs)

    return bounded


def _numbers(values: Iterable[Any]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))


def _whole(value: Any, *args: Any, **kwargs: Any) -> int:
    return _size(value)


def _elements(value: Any, *args: Any, **kwargs: Any) -> int:
    """Each character of a text becomes an element."""
    return _size(value) * (_ELEMENT if isinstance(value, str) else 1)


def _by_width(value: Any, *args: Any, **kwargs: Any) -> int:
    return _size(value) + _numbers((*args, *kwargs.values()))


def _by_places(value: Any, *args: Any, **kwargs: Any) -> int:
    """Each line, tab or element may take as much as an argument says."""
    size = _size(value)
    places = 1 + (value.count("\n") + value.count("\t") if isinstance(value, str) else size)
    texts = (each for each in (*args, *kwargs.values()) if isinstance(each, str))
    return size + places * max(_numbers((*args, *kwargs.values())), *map(len, texts), 0)


def _by_characters(value: Any, *args: Any, **kwargs: Any) -> int:
    """Each character may become as much as an argument is."""
    return _size(value) * (1 + sum(_size(each) for each in (*args, *kwargs.values()) if not isinstance(each, int)))


def _rounded(value: Any, *args: Any, **kwargs: Any) -> int:
    _check_bits(_numbers((*args, *kwargs.values())))
    return 0


def _replaced(value: Any, old: Any = "", new: Any = "", *args: Any, **kwargs: Any) -> int:
    text, new = str(value), str(kwargs.get("new", new))
    return len(text) + text.count(str(kwargs.get("old", old))) * len(new)


def _joined(values: Any, d: Any = "", *args: Any, **kwargs: Any) -> int:
    return _size(values) + _size(d) * (len(values) if hasattr(values, "__len__") else 1)


def _joined_by(separator: str, values: Any = ()) -> int:
    return _joined(values, separator)


def _percent(text: str, values: Any) -> int:
    fields = _PERCENT.findall(text)
    width = sum(int(number) for field in fields for number in field if number.isdigit())
    if any("*" in field for field in fields):
        width += _numbers(values if isinstance(values, tuple) else (values,))
    return len(text) + width + _size(values) * (len(fields) if isinstance(values, Mapping) else 1)


def _formatted(text: Any, *args: Any, **kwargs: Any) -> int:
    return _percent(str(text), kwargs or args)


def _braces(text: str, *args: Any, **kwargs: Any) -> int:
    values = [*args, *kwargs.values()]
    # The argument of format_map.
    values += [each for value in args if isinstance(value, Mapping) for each in value.values()]
    width = count = 0
    for _, field, form, _ in string.Formatter().parse(text):
        count += field is not None
        width += sum(map(int, re.findall(r"\d+", form or "")))
        if "{" in (form or ""):
            width += _numbers(values)
    return len(text) + width + count * _size(values)


_METHODS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _by_width),
    "expandtabs": _by_places,
    "translate": _by_characters,
    "replace": _replaced,
    "join": _joined_by,
    "format": _braces,
    "format_map": _braces,
}
_FILTERS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("sort", "unique", "reverse", "sum", "groupby", "string", "pprint", "xmlattr"), _whole),
    "list": _elements,
    **dict.fromkeys(("center", "batch", "slice"), _by_width),
    **dict.fromkeys(("indent", "tojson"), _by_places),
    "wordwrap": _by_characters,
    "round": _rounded,
    "replace": _replaced,
    "join": _joined,
    "format": _formatted,
}
