"""Caches of the Hugging Face Hub, as its library makes them."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from huggingface_hub import constants


def without_network(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """The library looks into this cache, and finds the network down."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return cache


def add_snapshot(
    cache: Path, files: Mapping[str, bytes], *, name: str = "org/name", commit: str = "b" * 40, ref: str = "main"
) -> Path:
    """Put a snapshot into a cache: links to blobs, and a ref to the commit."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for each in (folder / "blobs", folder / "refs", snapshot):
        each.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        blob = folder / "blobs" / f"{commit[0]}-{file}"
        blob.write_bytes(content)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    if ref:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot
