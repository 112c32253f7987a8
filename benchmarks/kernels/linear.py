"""Products of a decode step against cuBLAS: ``python -m benchmarks.kernels.linear``.

With ``--whole MODEL``, other sizes of programs that read all columns of a weight in order, as ``--batch-invariant`` has
them: of each product and number of rows the fastest three, those in use, and cuBLAS without memory for parts. Only
sizes with the bits of cuBLAS's product of 512 rows count.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.table import bench, implementations, in_turns_us
from rosebatch.engine.triton_runner.warm_up import compile_for
from rosebatch.ops.device import keep_products_whole
from rosebatch_kernels.common.device import Device, device_of
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.linear import kernel
from rosebatch_kernels.linear.sizes import SIZES, Program, fixed
from rosebatch_kernels.mlp import kernel as mlp

# (in, out, activation) of GPT-2 and Qwen3-0.6B; "parts" for products that are added to the residual.
_SHAPES = {
    "GPT-2 qkv": (768, 2304, None),
    "GPT-2 out": (768, 768, "parts"),
    "GPT-2 up": (768, 3072, "gelu_tanh"),
    "GPT-2 down": (3072, 768, "parts"),
    "Qwen3 qkv": (1024, 4096, None),
    "Qwen3 out": (2048, 1024, "parts"),
    "Qwen3 gate, up": (1024, 6144, "silu_mul"),
    "Qwen3 down": (3072, 1024, "parts"),
}
_ROWS = (1, 32, 64)
# Bytes of all layers' weights: more than the cache holds.
_BYTES = 2**28


class Whole(NamedTuple):
    """A product in one part.

    Attributes:
        size_in, size_out: of the weight.
        follows: what happens to it.
    """

    size_in: int
    size_out: int
    follows: str = ""


_RESIDUAL, _GATE = "onto", "silu_mul"
_WHOLE = {
    "qwen3-0.6b": {
        "qkv": Whole(1024, 4096),
        "out": Whole(2048, 1024, _RESIDUAL),
        "gate, up": Whole(1024, 6144, _GATE),
        "down": Whole(3072, 1024, _RESIDUAL),
    },
    "llama-8b": {
        "qkv": Whole(4096, 6144),
        "out": Whole(4096, 4096, _RESIDUAL),
        "gate, up": Whole(4096, 28672, _GATE),
        "down": Whole(14336, 4096, _RESIDUAL),
    },
}
_WHOLE_ROWS = (1, 8, 16, 32, 64, 128, 256)
_MANY_ROWS = 512
_COLUMNS, _DEPTHS, _WARPS, _STAGES = (16, 32, 64, 128), (64, 128, 256), (1, 2, 4), range(3, 9)
# Rows and warps of Hopper's own instruction.
_HOPPER_ROWS, _HOPPER_WARPS = 64, 4
# Fewer leave most multiprocessors idle.
_FEWEST_PROGRAMS = 24
# Of a thread, for sums: with more, the compiler spills.
_SUMS = 128
_SHOWN = 3


def main() -> None:
    """Write one line for each shape, number of rows and implementation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", choices=_WHOLE, nargs="+", default=())
    parser.add_argument("--rows", type=int, nargs="+", default=_WHOLE_ROWS)
    options = parser.parse_args()
    if options.whole:
        keep_products_whole()
        for model in options.whole:
            _sweep(model, _WHOLE[model], options.rows, device_of(torch.device("cuda")))
        return
    for name, (size_in, size_out, activation) in _SHAPES.items():
        count = max(1, _BYTES // (size_in * size_out * 2))
        weights = [randn(size_out, size_in) * size_in**-0.5 for _ in range(count)]
        for rows in _ROWS:
            _product(f"{name} T={rows}", randn(rows, size_in), weights, activation)


def _product(name: str, x: Tensor, weights: list[Tensor], activation: str | None) -> None:
    of_parts = activation == "parts"
    inputs = [(x, weight) if of_parts else (x, weight, None, activation) for weight in weights]
    for implementation, module in implementations("linear").items():
        bench(
            f"{name:<24} {activation or '':<10} {implementation}",
            # cuBLAS adds up its parts itself.
            module.parts if of_parts and implementation == "kernel" else module.linear,
            inputs,
            calls=len(weights),
            moved=weights[0].nbytes + x.nbytes,
            flops=2 * len(x) * weights[0].numel(),
        )


class _Step:
    """A product of so many rows, with weights that take turns.

    The sums of the first weight are zero but for rounding: what is left of them is the order of the additions.
    """

    def __init__(self, whole: Whole, rows: int, device: Device) -> None:
        self.whole, self.device = whole, device
        half = randn(_MANY_ROWS, whole.size_in // 2)
        self._many = torch.cat([half, -half], 1)
        self.x = self._many[:rows]
        count = max(2, _BYTES // (2 * whole.size_in * whole.size_out))
        others = (randn(whole.size_out, whole.size_in) * whole.size_in**-0.5 for _ in range(count - 1))
        self.weights = [randn(whole.size_out, whole.size_in // 2).repeat(1, 2), *others]
        self._expected = self._by_cublas(self._many)(self.weights[0])[:rows]

    def of(self, program: Program) -> Callable[[Tensor], Tensor]:
        """The product by our kernel with these sizes, as a function of the weight."""
        options: dict[str, Any] = {"sizes": fixed(program), "device": self.device}
        if self.whole.follows == _RESIDUAL:
            onto = self._zeros(self.x)
            return lambda weight: kernel.add_(self.x, weight, onto, **options)
        return lambda weight: kernel.linear(self.x, weight, None, self.whole.follows or None, **options)

    def of_cublas(self) -> Callable[[Tensor], Tensor]:
        """The same by cuBLAS, and a kernel for the gate."""
        return self._by_cublas(self.x)

    def has_bits(self, step: Callable[[Tensor], Tensor]) -> bool:
        """Whether a step gives the rows the bits that they have among many."""
        return torch.equal(step(self.weights[0]), self._expected)

    def time(self, step: Callable[[Tensor], Tensor]) -> float:
        """Microseconds."""
        return in_turns_us(step, [(weight,) for weight in self.weights], repeats=5, calls=len(self.weights))

    def _by_cublas(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        if self.whole.follows == _RESIDUAL:
            onto = self._zeros(x)
            return lambda weight: onto.addmm_(x, weight.t())
        if self.whole.follows == _GATE:
            options: dict[str, Any] = {"sizes": mlp.SIZES.of(self.device), "device": self.device}
            return lambda weight: mlp.silu_mul(functional.linear(x, weight), **options)
        return lambda weight: functional.linear(x, weight)

    def _zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.whole.size_out)


def _sweep(model: str, products: dict[str, Whole], rows: Iterable[int], device: Device) -> None:
    """Stages are the most that fit at first, then the fastest program is tried with others."""
    steps = {(name, count): _Step(whole, count, device) for name, whole in products.items() for count in rows}
    found: dict[tuple[str, int], list[tuple[float, Program]]] = {each: [] for each in steps}
    for tries in (_first_tries, _more_tries):
        chosen = {each: tries(step, found[each]) for each, step in steps.items()}

        def launch_all(chosen: dict[tuple[str, int], list[Program]] = chosen) -> None:
            for each, programs in chosen.items():
                for program in programs:
                    steps[each].of(program)(steps[each].weights[0])

        compile_for(launch_all, ("products in one part", model, chosen))
        for each, programs in chosen.items():
            found[each] += _timed(f"{each[0]} T={each[1]}", steps[each], programs)
    for each, step in steps.items():
        _write(f"{model} {each[0]} T={each[1]}", step, found[each])


def _timed(name: str, step: _Step, programs: Iterable[Program]) -> Iterator[tuple[float, Program]]:
    for program in programs:
        try:
            # A fresh residual for the bits.
            if not step.has_bits(step.of(program)):
                sys.stderr.write(f"{name} {_words(program)}: other bits\n")
                continue
            yield step.time(step.of(program)), program
        except Exception as error:  # A candidate may need more of a multiprocessor than there is.
            sys.stderr.write(f"{name} {_words(program)}: {str(error).splitlines()[-1][:80]}\n")


def _write(name: str, step: _Step, found: list[tuple[float, Program]]) -> None:
    in_use = _in_use(step)
    lines = [(us, _words(program)) for us, program in sorted(found, key=lambda pair: pair[0])[:_SHOWN]]
    lines += [(us, f"{_words(program)}, in use") for us, program in _timed(name, step, [in_use])]
    lines.append((step.time(step.of_cublas()), "cuBLAS"))
    for microseconds, words in lines:
        sys.stdout.write(f"{name:<28}{microseconds:>8.2f} µs  {words}\n")
    sys.stdout.flush()


def _in_use(step: _Step) -> Program:
    sizes = SIZES.of(step.device).invariant()
    programs = {_RESIDUAL: sizes.onto, _GATE: sizes.gated}.get(step.whole.follows, sizes.whole)
    return value_at(programs, len(step.x))


def _words(program: Program) -> str:
    words = f"{program.columns} x {program.depth}, {program.rows} rows, {program.warps} warps, {program.stages} stages"
    return f"{words}, {program.registers or 'fewest'} registers"


def _first_tries(step: _Step, _: object) -> list[Program]:
    """All tiles that promise something, with as many stages as fit."""
    size_in, size_out, follows = step.whole
    rows, halves = max(16, next_power_of_2(len(step.x))), 2 if follows == _GATE else 1
    tries = []
    heights = {min(rows, 2 * _HOPPER_ROWS), _HOPPER_ROWS}
    for height, columns, depth, warps in product(sorted(heights), _COLUMNS, _DEPTHS, _WARPS):
        if (height > rows or height > _HOPPER_ROWS) and warps != _HOPPER_WARPS:
            continue
        programs = cdiv(size_out // halves, columns) * cdiv(rows, height)
        sums = height * columns * halves // (32 * warps)
        stages = _most_stages(Program(height, columns, depth, warps, 0, None), halves, step.device)
        if programs >= _FEWEST_PROGRAMS and sums <= _SUMS and stages in _STAGES and depth <= size_in:
            tries.append(Program(height, columns, depth, warps, stages, 255 if height >= _HOPPER_ROWS else None))
    return tries


def _more_tries(step: _Step, found: list[tuple[float, Program]]) -> list[Program]:
    """The fastest program with other stages, and with the other limit of registers."""
    if not found:
        return []
    fastest = min(found, key=lambda pair: pair[0])[1]
    most = _most_stages(fastest, 2 if step.whole.follows == _GATE else 1, step.device)
    other = fastest._replace(registers=None if fastest.registers else 255)
    return [other, *(fastest._replace(stages=each) for each in _STAGES if each <= most and each != fastest.stages)]


def _most_stages(program: Program, halves: int, device: Device) -> int:
    """Stages whose tiles of x and of the weight, 16 bits each, fit the shared memory."""
    stage = 2 * program.depth * (program.rows + halves * program.columns)
    return min(device.shared_memory // stage, _STAGES[-1])


if __name__ == "__main__":
    main()
