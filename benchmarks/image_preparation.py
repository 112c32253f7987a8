"""Images a second that rows with JPEGs become patches of Qwen3-VL, on some cores, without a model.

``python -m benchmarks.image_preparation [--cores 1 2] [--images 200] [--width 1024] [--height 768]``: one image a row,
as a data URL. For each number of cores a process of its own is bound to so many. The fastest of three passes counts:
other work on the machine makes the others slower. Processor time says more then: that of this process, and that of
those that decode. The last line is JSON by cores: images a second, and both in milliseconds an image.
"""

import base64
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.options import options
from rosebatch.core.errors import UserError
from rosebatch.host.threads import DaemonPool
from rosebatch.io.images.decode import processes
from rosebatch.io.rows import parse_row
from rosebatch.job.images import with_images
from rosebatch.job.prepare import prepare
from rosebatch.job.prepared import Prepared
from rosebatch.model.vision.qwen_vl import QwenProcessor
from rosebatch.model.vision.vision import Vision
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend

PLACEHOLDER = 257
TEMPLATE = (
    "{% for p in messages[0].content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
)
# Of Qwen3-VL.
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_PASSES = 3


def picture(width: int, height: int, number: int) -> bytes:
    """A JPEG of large spots with some noise, as photographs have both."""
    numbers = np.random.default_rng(number)
    spots = numbers.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(spots).resize((width, height)), int)
    pixels = (smooth + numbers.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def jpeg(width: int, height: int, number: int) -> str:
    """Its data URL."""
    return f"data:image/jpeg;base64,{base64.b64encode(picture(width, height, number)).decode()}"


def decoding_seconds() -> float:
    """Processor time of the processes that decode."""
    found = 0
    for each in processes.waiting:
        fields = Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()
        found += int(fields[11]) + int(fields[12])
    return found / os.sysconf("SC_CLK_TCK")


def prepare_all(urls: list[str]) -> list[float]:
    """All of them through the stages of a job: images a second, and milliseconds of both kinds of processes."""
    backend = byte_backend()
    backend.add_special_tokens(["<image>"])
    tokenizer = Tokenizer(backend, TEMPLATE)
    lines = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": url}, {"type": "text", "text": "a"}]}]}
        for url in urls
    ]
    with tempfile.TemporaryDirectory() as folder, DaemonPool(1, "text") as pool:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        (Path(folder) / "config.json").write_text('{"model_type": "qwen3_vl"}')
        processor = QwenProcessor(Path(folder), PLACEHOLDER, None)
        vision = Vision(PLACEHOLDER, (), lambda max_pixels, encode: processor, lambda weights: None)  # type: ignore
        passes = []
        # The first one starts processes.
        for _ in range(1 + _PASSES):
            own, others = time.process_time(), decoding_seconds()
            rows = (parse_row(line, index=number, where="", defaults={}) for number, line in enumerate(lines))
            begun = time.perf_counter()
            for row in with_images(prepare(rows, tokenizer, None, pool, sight=vision), vision, tokenizer):
                if not isinstance(row, Prepared):
                    raise UserError("a row failed")
            seconds = time.perf_counter() - begun, time.process_time() - own, decoding_seconds() - others
            passes.append([each / len(urls) for each in seconds])
    real, own, others = map(min, zip(*passes[1:], strict=True))
    return [round(each, 1) for each in (1 / real, 1000 * own, 1000 * others)]


def main() -> None:
    """Run each number of cores in a process."""
    given = options(__doc__, cores=[1, 2], images=200, width=1024, height=768)
    urls = [jpeg(given.width, given.height, number) for number in range(given.images)]
    usable, found = sorted(os.sched_getaffinity(0)), {}
    for cores in given.cores:
        if cores > len(usable):
            sys.exit(f"{len(usable)} cores are there")
        read, write = os.pipe()
        if not (child := os.fork()):
            os.sched_setaffinity(0, usable[:cores])
            os.write(write, json.dumps(prepare_all(urls)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        found[cores] = json.loads(os.read(read, 100))
        rate, own, others = found[cores]
        told = f"{rate} images/s; processor time of an image: {own} ms here, {others} ms decoding"
        sys.stdout.write(f"{cores} cores: {told}\n")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
