"""A share of a job's rows: one of several runs, on machines that need no connection."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rosebatch.core.errors import FlagError

# Neighbours often begin alike, so they stay together.
_CHUNK = 64
_FORM = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Number ``number`` of ``count`` shards, from 1 on. Chunks of rows go to the shards in turn."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From ``I/N``.

        Raises:
            FlagError: it has another form, or I is none of 1 to N.
        """
        found = _FORM.fullmatch(text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise FlagError(f"--shard {text}: must be I/N with I from 1 to N, such as 1/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def has(self, index: int) -> bool:
        """Whether a row belongs to it."""
        return index // _CHUNK % self.count == self.number - 1

    def rows(self, total: int) -> Iterator[int]:
        """The rows that belong to it, of so many in all."""
        for start in range((self.number - 1) * _CHUNK, total, self.count * _CHUNK):
            yield from range(start, min(start + _CHUNK, total))

    def size(self, total: int) -> int:
        """Its number of rows, of so many in all."""
        chunks, rest = divmod(total, _CHUNK)
        own = chunks // self.count + (chunks % self.count >= self.number)
        return own * _CHUNK + rest * (chunks % self.count == self.number - 1)

    def part(self, path: Path) -> Path:
        """Its part file for an output, which ``rosebatch merge`` looks for."""
        return path.with_name(f"{path.name}.{self.number}-of-{self.count}.part")


def find_parts(path: Path) -> dict[Shard, Path]:
    """The part files of an output's shards."""
    form = re.compile(re.escape(path.name) + r"\.(\d{1,6})-of-(\d{1,6})\.part")
    found = {}
    for each in path.parent.iterdir() if path.parent.is_dir() else ():
        if name := form.fullmatch(each.name):
            found[Shard(int(name[1]), int(name[2]))] = each
    return found
