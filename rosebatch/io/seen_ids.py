"""The ids of all rows so far. Those of a long file are in a temporary database on the disk, so memory does not grow."""

import hashlib
import sqlite3

from rosebatch.errors import UserError

_CACHE_KIB = 2048
# Of longer ids only a digest is stored.
_LONGEST = 64
# So many stay in memory, some 6 MB. Each call of the database gives other threads of Python their turn.
_MOST_IN_MEMORY = 2**16


class SeenIds:
    """A set of ids. Only the thread that made it may use it.

    Raises:
        UserError: here and in ``add``: the disk of the temporary database is full or fails.
    """

    def __init__(self) -> None:
        self._in_memory: set[bytes] = set()
        self._database: sqlite3.Connection | None = None

    def add(self, identity: str | int) -> bool:
        """Add an id. Returns whether it is new."""
        # repr tells the text "1" from the number 1.
        key = repr(identity).encode("utf-8", "surrogatepass")
        if len(key) > _LONGEST:
            key = hashlib.blake2b(key, digest_size=_LONGEST).digest()
        if self._database is None:
            if key in self._in_memory:
                return False
            self._in_memory.add(key)
            if len(self._in_memory) == _MOST_IN_MEMORY:
                self._move()
            return True
        try:
            return self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (key,)).rowcount == 1
        except sqlite3.Error as error:
            raise _failure(error) from None

    def _move(self) -> None:
        """From memory to a database."""
        try:
            self._database = sqlite3.connect("", isolation_level=None)
            self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._database.execute("PRAGMA journal_mode = OFF")
            self._database.execute("CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID")
            self._database.execute("BEGIN")
            self._database.executemany("INSERT INTO ids VALUES (?)", ((key,) for key in sorted(self._in_memory)))
        except sqlite3.Error as error:
            raise _failure(error) from None
        self._in_memory.clear()


def _failure(error: sqlite3.Error) -> UserError:
    return UserError(f"the temporary database of row ids: {error}; SQLITE_TMPDIR names the folder for it")
