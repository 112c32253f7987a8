"""The toy model of the benches."""

from tests.bench.conftest import on_one_thread as on_one_thread
from tests.bench.conftest import toy as toy
