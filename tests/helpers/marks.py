"""What tests need of the machine."""

import importlib.util
import os

import pytest

from rosebatch.model.source import DEMO_INSTALL, DEMO_PACKAGE

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU in this process"
)
needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec(DEMO_PACKAGE) is None, reason=f"the demo model is not installed: {DEMO_INSTALL}"
)
# The interpreter computes with numpy, which warns of the NaN in rows that nobody reads.
ON_TRITON_RUNNER = [needs_interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
