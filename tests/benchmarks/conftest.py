"""The toy model of the benches."""

from tests.bench.conftest import one_thread as one_thread
from tests.bench.conftest import toy as toy
