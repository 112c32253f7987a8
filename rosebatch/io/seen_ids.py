"""The ids of all rows so far, in a temporary database on the disk, so that memory does not grow with the file."""

import hashlib
import sqlite3

from rosebatch.errors import UserError
from rosebatch.io.piped import room

_CACHE_KIB = 2048
# Of longer ids only a digest is stored.
_LONGEST = 64


class SeenIds:
    """A set of ids. Only the thread that made it may use it."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def add(self, identity: str | int) -> bool:
        """Add an id. Returns whether it is new.

        Raises:
            UserError: the temporary folder has no room for the database.
        """
        # repr tells the text "1" from the number 1.
        key = repr(identity).encode("utf-8", "surrogatepass")
        if len(key) > _LONGEST:
            key = hashlib.blake2b(key, digest_size=_LONGEST).digest()
        try:
            return self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (key,)).rowcount == 1
        except sqlite3.Error as error:
            raise UserError(f"the ids of the rows fit in no temporary file ({error}); {room()}") from None
