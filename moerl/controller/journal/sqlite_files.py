"""SQLite databases of the controller: a write outlives the process, not a crash of the machine."""

from __future__ import annotations

import sqlite3
from pathlib import Path

_PRAGMAS = """
pragma auto_vacuum = full;
pragma journal_mode = wal;
pragma synchronous = off;
pragma wal_autocheckpoint = 200;  -- pages of 4 KiB
"""


def set_up(db: sqlite3.Connection, schema: str) -> None:
    """Make the tables that are missing.  Raises sqlite3.Error."""
    db.executescript(_PRAGMAS + schema)


def remove_logs(path: Path) -> None:
    """Delete what SQLite keeps next to a database that is closed."""
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
