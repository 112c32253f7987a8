"""The one table of tolerances, fresh random data, and the devices that kernels run on."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.variants import is_cut_off

# Relative and absolute error allowed against the same formula in float64 on the same (rounded) inputs. 16-bit results
# are rounded two or three times on the way (eps is 2^-10 for fp16 and 2^-7 for bf16), so 4 eps; fp32 adds up to
# 1000 terms one behind the other, so 64 eps. The absolute part is for results near zero after cancellation, of
# inputs of size 1. Copies and gathers do no arithmetic: they are compared exactly, never with this table.
_TOLERANCES = {
    torch.float32: {"rtol": 64 * 2.0**-23, "atol": 64 * 2.0**-23},
    torch.float16: {"rtol": 4 * 2.0**-10, "atol": 4 * 2.0**-10},
    torch.bfloat16: {"rtol": 4 * 2.0**-7, "atol": 4 * 2.0**-7},
}
DTYPES = list(_TOLERANCES)
_MAX_KEPT_BYTES = 2**30


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``dtype`` runs for each of the table."""
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(params=["reference", "kernel"])
def implementation(request: pytest.FixtureRequest) -> Any:
    """Either of the ``IMPLEMENTATIONS`` of the test's module."""
    return request.module.IMPLEMENTATIONS[request.param]


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def narrow(request: pytest.FixtureRequest) -> torch.dtype:
    """For kernels of 16-bit types alone."""
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Compare a result in its dtype with what float64 gives, by the table."""

    def check(actual: Tensor, exact: Tensor) -> None:
        assert exact.dtype == torch.float64
        assert actual.shape == exact.shape
        torch.testing.assert_close(actual.double().cpu(), exact.cpu(), **_TOLERANCES[actual.dtype])

    return check


@pytest.fixture
def randn(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Normal random numbers on the CPU, other ones in each test and call, the same in each run and on each device."""
    seed = sum(request.node.nodeid.encode()) + len(request.node.nodeid) * 65536
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return make


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a kernel runs: on the CPU in Triton's interpreter, on a GPU compiled.

    One process can do one of the two, so the CPU is left out where Triton compiles. The parameter ``implementation``
    set to "reference" means plain PyTorch, which is never left out.
    """
    params = request.node.callspec.params
    if request.param == "cpu" and params.get("implementation") != "reference":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton compiles for the GPU in this process; TRITON_INTERPRET=1 runs its kernels on the CPU")
        if is_cut_off(params):
            pytest.skip("the interpreter cuts bf16 numbers off instead of rounding them")
    return str(request.param)


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """PyTorch keeps the memory that a test took, where tests in other processes ran out of it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _MAX_KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """NaN in whatever is allocated without being filled, so that an element that nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def far_apart() -> Callable[[Tensor], Tensor]:
    """Values laid out with 2^30 elements between rows, so that the third begins where int32 offsets have ended.

    The memory between them is never touched, so that on a CPU it is not there at all.
    """

    def spread(values: Tensor) -> Tensor:
        assert len(values) >= 3 and values.is_contiguous()
        stride = 2**30 + 16
        elements = (len(values) - 1) * stride + values[0].numel()
        storage = torch.UntypedStorage(elements * values.itemsize, device=values.device)
        strides = (stride, *values.stride()[1:])
        apart = torch.empty(0, dtype=values.dtype, device=values.device).set_(storage, 0, values.shape, strides)
        return apart.copy_(values)

    return spread


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Elements are divided among threads, so where a thread begins inside a row depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
