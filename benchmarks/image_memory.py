"""Host memory of a job whose rows have many pages, over a fake model: what is loaded, held and decoded.

``python -m benchmarks.image_memory [--rows 500] [--pages 20] [--width 640] [--height 896] [--bound 256]
[--threads 16]``: JPEG files below ``--media-root``, patches of Qwen3-VL. ``--max-inflight-bytes`` has so many MiB, and
images are loaded on so many threads, at most. The last line is JSON in MiB: what the pixels of a row take, and those of
all rows; at most, of the process that serves, without what was there before, and of those that decode, with the memory
that they share with it.
"""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.options import options
from tests.job.image_memory import peak_of_pages

_CHANNELS = 3


def main() -> None:
    """Run the job once."""
    given = options(__doc__, rows=500, pages=20, width=640, height=896, bound=256, threads=16)
    with tempfile.TemporaryDirectory() as name:
        size, bound = (given.width, given.height), given.bound << 20
        taken = peak_of_pages(Path(name), given.rows, given.pages, size, bound, given.threads)
    row = given.pages * given.width * given.height * _CHANNELS
    sizes = {"row": row, "all": given.rows * row, "bound": bound, **taken._asdict()}
    sys.stdout.write(json.dumps({name: size >> 20 for name, size in sizes.items()}) + "\n")


if __name__ == "__main__":
    main()
