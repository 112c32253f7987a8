"""The toy model of the benches."""

from tests.bench.conftest import toy as toy
