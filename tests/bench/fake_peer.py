"""A peer that generates nothing. ``args`` control it; each process adds one line of JSON to ``args["log"]``."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rosebatch.bench.peers.protocol import Loaded, Streaming, serve


def load(spec):
    """Behaves as ``args`` say."""
    args = spec["args"]
    with Path(args["log"]).open("a") as log:
        config = json.loads((Path(spec["model"]) / "config.json").read_text())
        log.write(json.dumps({"spec": spec, "path": os.environ["PYTHONPATH"], "config": config}) + "\n")
    sys.stdout.write("noise of Python\n")
    sys.stdout.flush()
    os.write(1, b"noise of C\n")
    subprocess.run(["echo", "noise of a process"], check=True)
    if args.get("crash"):
        raise RuntimeError("no GPU")

    def prepare(prompts, output_lens, sampling):
        return lambda: [n - args.get("short_by", 0) for n in output_lens]

    return Loaded("1.2", prepare)


async def load_streaming(spec):
    """Brings two tokens at a time, at once."""
    loaded = load(spec)

    async def stream(prompt, length, sampling):
        for total in range(2, length + 2, 2):
            yield min(total, length) - spec["args"].get("short_by", 0)

    return Streaming(loaded.version, stream)


if __name__ == "__main__":
    serve(load, load_streaming)
