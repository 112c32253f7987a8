"""Jobs that become slow once they have some rows: whoever acts in their middle has time for it on any machine."""

import time
from contextlib import suppress
from pathlib import Path

from rosebatch.engine.engine import Engine

# A job of the tests has hundreds of steps.
_SECONDS = 0.1
_STEP = Engine.step
# Python runs this at its start. Ray's own processes need not import the engine.
_CODE = """
import sys

if any(part.startswith("rosebatch") or part.endswith("default_worker.py") for part in sys.orig_argv):
    from tests.helpers import slow_steps

    slow_steps.begin({part!r}, {gate!r})
"""


def count_lines(path: Path) -> int:
    """0 where no file is: the job may rename it at any moment."""
    with suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


def part_of(target: Path) -> Path:
    """The part file of an output."""
    return target.with_name(f"{target.name}.part")


def slow_steps(folder: Path, target: Path, rows: int = 1, code: str = "") -> Path:
    """Let processes with a folder in ``PYTHONPATH`` be slow once the part file has more lines than that.

    Args:
        folder: gets the module that Python runs at its start.
        target: the output.
        rows: lines of the part file, of which the first is the manifest.
        code: more of that module.

    Returns:
        the file that holds the number of rows. Without it, nothing is slow any more.
    """
    gate = folder / "slow_above"
    gate.write_text(str(rows))
    (folder / "sitecustomize.py").write_text(code + _CODE.format(part=str(part_of(target)), gate=str(gate)))
    return gate


def begin(part: str, gate: str) -> None:
    """In a process of the job, which may be a fork of one that is slow already."""

    def slow(self: Engine) -> object:
        with suppress(OSError, ValueError):
            if count_lines(Path(part)) > int(Path(gate).read_text()):
                time.sleep(_SECONDS)
        return _STEP(self)

    Engine.step = slow
