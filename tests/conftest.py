"""For all tests: one thread for each computation, and Triton's interpreter where there is no GPU.

Small products take twice the processor time on two threads, and numpy's fifty times it where other work runs: its
threads spin while they wait. OpenMP and OpenBLAS read their variables when torch and numpy load, and Triton reads its
own when it is imported, so all are set before anything else. Tests of several threads set their number.

What is there before the first test stays until the last: the garbage collector, which a bench calls between its
cases, need not look through it each time (0.2 s).
"""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A script's background jobs start with SIGINT ignored, and so would all processes of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Whether there is a GPU is asked of its driver's tools: forks could not use one that CUDA has looked for.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# As a run on a CPU has it, see rosebatch/launch/launch.py. MKL reads it at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")
# oneDNN compiles a product for each number of rows, in ten times the product's time, and forgets all but 1,024.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")

import pytest

# Asking torch takes the second that importing it takes, which nearly every test file takes anyway. A look at the device
# files would be quicker and wrong: under CUDA_VISIBLE_DEVICES="", or beside a build of PyTorch without CUDA.
import torch

from tests.helpers.forked_run import OF_ALL_FORKS, end_at_once, run_in_forks
from tests.helpers.forks import share_server
from tests.helpers.variants import runs_kernel_on, with_all_pairs

gc.disable()
torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.helpers.interpreter import speed_up
    from tests.helpers.memory_check import check_addresses

    speed_up()
    check_addresses()


def pytest_addoption(parser: pytest.Parser) -> None:
    """As ``make test`` calls it."""
    parser.addoption("--forks", type=int, default=0, help="run the tests in so many forks of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """The process that forks for the tests imports while they are collected."""
    if session.config.getoption("forks") and not session.config.option.collectonly:
        share_server()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Forks, unless there is nothing to run or to share."""
    forks, option = session.config.getoption("forks"), session.config.option
    if not forks or session.testsfailed or option.collectonly or not session.items:
        return None
    run_in_forks(session, min(forks, len(session.items)))
    return True


@pytest.fixture(scope="session")
def shared_folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all forks have, see ``make_once``."""
    folder = pytestconfig.stash.get(OF_ALL_FORKS, tmp_path_factory.getbasetemp()) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def transformers() -> Iterator[Any]:
    """The library without its messages: progress bars and advice would spoil the tests' output."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield transformers
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


# Folders in which a test runs with many parameters: models, dtypes, shapes, block sizes.
_MATRICES = {"kernels", "golden"}


def _is_divided(item: pytest.Item) -> bool:
    """Whether the fast tier takes the first variant of a test alone."""
    is_of_matrix = item.get_closest_marker("matrix") or item.path.parent.name in _MATRICES
    return bool(is_of_matrix and not item.get_closest_marker("whole"))


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """The fast tier makes none of the variants that it leaves to the other: two thirds of all tests."""
    yield
    if "not thorough" in metafunc.config.option.markexpr and _is_divided(metafunc.definition):
        del metafunc._calls[1:]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divide the matrices: every test runs in the fast tier, the whole of each matrix in the thorough one.

    The fast tier takes the first variant of a test there, and of tests marked ``matrix`` in other folders. Tests marked
    ``whole`` keep all of their variants.
    Where kernels run, each pair of two parameters' values is tried with each implementation. A GPU can try all
    products, which take an hour: those beyond the pairs are marked ``products``.
    """
    variants: dict[str, list[pytest.Item]] = {}
    of_kernels: dict[tuple[str, str, object], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (place := runs_kernel_on(item)):
            key = place, item.nodeid.partition("[")[0], item.callspec.params.get("implementation")
            of_kernels.setdefault(key, []).append(item)
        if _is_divided(item):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for members in variants.values():
        for item in members[1:]:
            item.add_marker("thorough")
    for (place, *_), functions in of_kernels.items():
        chosen = with_all_pairs([function.callspec.params for function in functions])
        for number, function in enumerate(functions):
            if number not in chosen:
                function.add_marker("gpu" if place == "cpu" else "products")


def pytest_collection_finish() -> None:
    """The tests alone are collected, and not as often as by default."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """What the interpreter frees at its end, it finds among the rest. Behind forks, nothing has to be freed."""
    gc.unfreeze()
    if config.getoption("forks") and (session := config.pluginmanager.get_plugin("session")):
        end_at_once(session.exitstatus)
