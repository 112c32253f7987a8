"""A job whose rows are an attack: each costs itself, nothing forbidden is read, memory and time are bounded."""

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rosebatch.io.images.decode import DecodeLimits, processes
from rosebatch.io.images.policy import MediaPolicy, look_up
from rosebatch.io.images.public_address import is_public
from rosebatch.job import open_input
from rosebatch.job.images import loading_threads
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from tests.helpers.forks import in_fork
from tests.helpers.seeing import seeing_model
from tests.io.images.picture_files import saved
from tests.job.hostile_images import (
    PUBLIC,
    Resolver,
    as_text,
    listed,
    of_servers,
    pictures,
    references,
    servers,
)

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")]

# Of each host. Slow ones take all of it, and no others, however slow the machine is.
SECONDS = 10
GOOD = saved("PNG")
# Names of what nothing may open, whatever a row says.
FORBIDDEN = {"passwd", "zero", "urandom", "random", "full", "mem", "kcore", "environ", "secret.png"}


def chat(*sources):
    parts = [{"type": "image", "image": source} for source in sources]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


def attack(folder):
    """Runs the job; returns its results, and what it took. In a process of its own: what it does is watched."""
    root = folder / "root"
    root.mkdir()
    opened = []

    def watch(event, arguments):
        if event == "open" and str(arguments[0]).rpartition("/")[2] in FORBIDDEN:
            opened.append(arguments[0])

    with servers(lambda port: of_servers(port)[1]) as (port, asked):
        given = {**pictures(), **references(root), **of_servers(port)[0]}
        given["too-many"] = ([GOOD] * 33, "too_many_images")
        expected = {}
        with (folder / "in.jsonl").open("w") as file:
            for number, (name, (source, code)) in enumerate(given.items()):
                if number % 9 == 0:
                    file.write(json.dumps({"id": f"good-{number}", **chat(as_text(GOOD, "", root))}) + "\n")
                    expected[f"good-{number}"] = {"None"}
                sources = source if isinstance(source, list) else [source]
                texts = [as_text(each, name, root) for each in sources]
                file.write(json.dumps({"id": name, **chat(*texts)}) + "\n")
                expected[name] = set(map(str, code if isinstance(code, set) else {code}))
        allowed = {"seconds": SECONDS, "resolve": Resolver(look_up)}
        allowed["may_connect"] = lambda address: address == PUBLIC or is_public(address)
        open_input.MediaPolicy = SimpleNamespace(of=lambda *flags: replace(MediaPolicy.of(*flags), **allowed))
        with LLM(folder / "model", device="cpu") as llm:
            Path("/proc/self/clear_refs").write_text("5")
            before = memory()
            sys.addaudithook(watch)
            begun = time.monotonic()
            run_file(
                folder / "in.jsonl",
                folder / "out.jsonl",
                model=llm,
                sampling={"max_tokens": 2, "ignore_eos": True},
                media_root=root,
                media_domains=listed(port),
                max_row_bytes="64MiB",
            )
            seconds = time.monotonic() - begun
            after = memory()
        processes.end_all()
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    return expected, opened, asked, after - before, largest, seconds


def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def test_an_attack(tmp_path):
    """Each row comes to what it may, the good ones between them are answered alike, and the job ends."""
    (tmp_path / "model").mkdir()
    seeing_model("Qwen3VLForConditionalGeneration", tmp_path / "model")
    expected, opened, asked, grown, largest, seconds = in_fork(attack, tmp_path)
    text = (tmp_path / "out.jsonl").read_text()
    found = {each["id"]: each for each in map(json.loads, text.strip("\n").split("\n"))}
    assert len(found) == len(expected) > 500
    codes = {name: str(each.get("error", {}).get("code")) for name, each in found.items()}
    wrong = {
        name: (code, expected[name], found[name].get("error"))
        for name, code in codes.items()
        if code not in expected[name]
    }
    print(f"{len(found)} rows, {seconds:.0f} s, {grown >> 20} MiB, a decoder {largest >> 20} MiB")  # noqa: T201
    assert wrong == {}
    assert len({each["text"] for name, each in found.items() if name.startswith("good-")}) == 1
    assert (opened, asked) == ([], [])
    assert largest < DecodeLimits().memory + (200 << 20)
    # Each thread has an image as it came and as it is resized, and some wait.
    assert grown < (2 * loading_threads() + 2) * 3 * DecodeLimits().pixels
