"""Where the examples are, and what their scripts are run with."""

from tests.helpers.checkout import ROOT, environment

FOLDER = ROOT / "examples"
EVALUATE = FOLDER / "evaluate"
TINY = ROOT / "configs" / "models" / "tiny-llama.toml"
ENVIRONMENT = environment()
