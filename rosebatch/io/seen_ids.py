"""The ids of all rows so far. Those of a long file are in a temporary database on the disk, so memory does not grow."""

import hashlib
import sqlite3
from collections.abc import Sequence

from rosebatch.core.errors import UserError

_CACHE_KIB = 2048
# Of longer ids only a digest is stored.
_LONGEST = 64
# So many stay in memory, some 6 MB. The database takes longer.
_MAX_IN_MEMORY = 2**16
# Keys of a statement of the database.
_AT_ONCE = 128


class SeenIds:
    """A set of ids. Only the thread that made it may use it.

    Raises:
        UserError: here and in ``add``: the disk of the temporary database is full or fails.
    """

    def __init__(self) -> None:
        self._in_memory: set[bytes] = set()
        self._database: sqlite3.Connection | None = None
        self._groups = 0

    def repeated(self, identities: Sequence[str | int | None]) -> list[int]:
        """Add the ids of some rows, None where a row has none. Returns the places of those that are not new."""
        keys = [None if identity is None else _key(identity) for identity in identities]
        fresh = {key for key in keys if key is not None}
        known = self._add(fresh)
        if not known and len(fresh) == len(keys) - keys.count(None):
            return []
        places = []
        for place, key in enumerate(keys):
            if key is None:
                continue
            if key in known:
                places.append(place)
            # It is known from here on.
            known.add(key)
        return places

    def _add(self, keys: set[bytes]) -> set[bytes]:
        """Add keys. Returns those that an earlier call added."""
        if self._database is None:
            known = keys & self._in_memory
            self._in_memory |= keys
            if len(self._in_memory) >= _MAX_IN_MEMORY:
                self._move()
            return known
        known = set()
        ordered = sorted(keys)
        self._groups += 1
        try:
            for at in range(0, len(ordered), _AT_ONCE):
                known |= self._insert(self._database, ordered[at : at + _AT_ONCE])
        except sqlite3.Error as error:
            raise _failure(error) from None
        return known

    def _insert(self, database: sqlite3.Connection, keys: list[bytes]) -> set[bytes]:
        """Add keys by one statement: each statement gives other threads of Python their turn."""
        values = [self._groups, *keys]
        pairs = ",".join(f"(?{place},?1)" for place in range(2, len(values) + 1))
        if database.execute(f"INSERT OR IGNORE INTO ids VALUES {pairs}", values).rowcount == len(keys):
            return set()
        marks = ",".join(f"?{place}" for place in range(2, len(values) + 1))
        query = f"SELECT id FROM ids WHERE id IN ({marks}) AND added < ?1"
        return {key for (key,) in database.execute(query, values)}

    def _move(self) -> None:
        """From memory to a database."""
        try:
            self._database = sqlite3.connect("", isolation_level=None)
            self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._database.execute("PRAGMA journal_mode = OFF")
            self._database.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, added INTEGER) WITHOUT ROWID")
            self._database.execute("BEGIN")
            self._database.executemany("INSERT INTO ids VALUES (?, 0)", ((key,) for key in sorted(self._in_memory)))
        except sqlite3.Error as error:
            raise _failure(error) from None
        self._in_memory.clear()


def _key(identity: str | int) -> bytes:
    # repr distinguishes the text "1" from the number 1.
    key = repr(identity).encode("utf-8", "surrogatepass")
    return key if len(key) <= _LONGEST else hashlib.blake2b(key, digest_size=_LONGEST).digest()


def _failure(error: sqlite3.Error) -> UserError:
    return UserError(f"the temporary database of row ids: {error}; SQLITE_TMPDIR names the folder for it")
