"""The file of a journal: created, recognized, migrated and configured; and SQLite's errors."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from streams.errors import Full, JournalError, JournalUnusable, Unavailable
from streams.journal.sqlite import compaction
from streams.limits import Durability

APPLICATION_ID: Final = 0x6D637073  # "mcps", in the header of every journal
_ROOM_BYTES_MIN: Final = 1024 * 1024  # a disk with less free space than this counts as full
# A full disk can be reported as one of these too. A failed fsync never counts as a full disk: which
# pages it has lost is unknown.
_OUT_OF_ROOM: Final = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
# The page size of new files; SQLite's default is 4 KiB. Rows of the log and segments are long: with
# larger pages they are read at twice the speed and written with a quarter of the calls, and a short
# commit takes 5 % longer.
_PAGE_BYTES: Final = 16 * 1024
# Pages that the writer keeps in memory; SQLite's default is 2 MB. A deletion reads all pages of the
# lines that it deletes, and a commit that has more pages writes some of them twice.
_WRITER_BYTES: Final = 8 * 1024 * 1024
_WAL_BYTES_KEPT: Final = 64 * 1024 * 1024  # a WAL that one huge commit made longer is cut to this
_SYNCHRONOUS: Final[dict[Durability, str]] = {"power": "FULL", "process": "NORMAL"}

# The last two are raised for invalid text in the file.
SQLITE_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError, msgspec.DecodeError)

DAMAGED: Final = (
    "it is damaged: restore it from a backup, or save what `mcp-streams export` can read of it and "
    "move the file away"
)
_ADVICE: Final = {
    sqlite3.SQLITE_NOTADB: "it is not a SQLite file: name another file, or move this one away",
    sqlite3.SQLITE_CORRUPT: DAMAGED,
    sqlite3.SQLITE_READONLY: "it is read-only: allow writing to the file and to its directory",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: allow reading and writing to it and its side "
    "files (-wal, -shm)",
    sqlite3.SQLITE_IOERR: "the disk fails: see the system's log, check the disk, then restart",
}

# In the header of the file as `user_version`: the number of migrations in `schemas`.
SCHEMA_VERSION: Final = 8

BUSY_READ_MS: Final = 50  # a read waits on trio's thread, so not for long


def connect(path: Path, busy_ms: int) -> sqlite3.Connection:
    return sqlite3.connect(
        path, timeout=busy_ms / 1000, isolation_level=None, check_same_thread=False
    )


def connect_to_read(path: Path, *, cache_bytes: int | None = None) -> sqlite3.Connection:
    """A read-only connection, which has opened all the file descriptors that it will need.

    Its cache has 2 MB unless `cache_bytes` is given.
    """
    connection = connect(path, BUSY_READ_MS)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA schema_version").fetchone()  # which opens the WAL
        if cache_bytes is not None:
            connection.execute(f"PRAGMA cache_size = -{cache_bytes // 1024}")
    except BaseException:
        connection.close()
        raise
    return connection


def check_new(path: Path) -> None:
    """Check that nothing is in the place of a new SQLite file. Raises `JournalUnusable`.

    SQLite would apply a WAL or a rollback journal that lies beside it, of a file that was there
    before, to the new one.
    """
    if os.path.lexists(path):
        raise JournalUnusable(f"{path} exists already: name a new file.")
    for suffix in ("-wal", "-journal"):
        left = path.with_name(path.name + suffix)
        if os.path.lexists(left):
            raise JournalUnusable(
                f"{left} is left of a file that was there: remove it, or name a new file."
            )


def create_file(path: Path) -> None:
    """Create an empty file that only this user may read; SQLite would let others read it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return  # `streams.journal.ownership.check_files` has checked it
    except OSError as error:
        raise JournalUnusable(f"{path} cannot be created: {error}.") from error


def prepare(connection: sqlite3.Connection, path: Path, *, is_compact: bool = False) -> None:
    """Make sure that the file is a journal with the newest schema; set it up if it is empty."""
    is_new, version = recognized(connection, path)
    _keep_private(path)
    if is_new:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    if is_compact:
        compaction.prepare(connection)
    if version < SCHEMA_VERSION:
        _migrate(connection)


def recognized(connection: sqlite3.Connection, path: Path) -> tuple[bool, int]:
    """Whether the file is empty, and the version of its schema (0 if it has none yet).

    Raises `JournalUnusable` if it belongs to another program or to a newer release.
    """
    application = _pragma(connection, "application_id")
    version: int = _pragma(connection, "user_version")
    is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != APPLICATION_ID and not (is_new and application == version == 0):
        raise JournalUnusable(f"{path} is a SQLite file of another program: name another file.")
    if version > SCHEMA_VERSION:
        raise JournalUnusable(
            f"{path} was written by a newer mcp-streams (schema {version}, this one knows "
            f"{SCHEMA_VERSION}): upgrade mcp-streams, or name another file."
        )
    return is_new, version


def _migrate(connection: sqlite3.Connection) -> None:
    """Run all missing migrations in one transaction: a crash leaves the file as it was."""
    # Imported here (PLC0415): sqlite-utils takes as long to load as trio does, and most files have
    # the newest schema when they are opened.
    from sqlite_utils import Database  # noqa: PLC0415

    from streams.journal.sqlite.schemas import migrations  # noqa: PLC0415

    with Database(connection, recursive_triggers=False, execute_plugins=False).atomic() as db:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        migrations.apply(db)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _keep_private(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        side = path.with_name(path.name + suffix)
        try:
            mode = stat.S_IMODE(side.stat().st_mode)
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                side.chmod(mode & stat.S_IRWXU)
        except FileNotFoundError:
            pass  # SQLite will create it with the mode of the journal
        except OSError as error:
            raise JournalUnusable(
                f"{side} can be read by other users and that cannot be changed ({error}): "
                "give it to this user, or name another file."
            ) from error


def configure(
    connection: sqlite3.Connection,
    path: Path,
    durability: Durability,
    secure_delete: bool,
    file_bytes_max: int | None,
) -> None:
    if _pragma(connection, "journal_mode = WAL") != "wal":
        raise JournalUnusable(f"{path} is on a file system without shared memory: use a local one.")
    _synchronize(connection, durability)
    connection.execute(f"PRAGMA secure_delete = {secure_delete:d}")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES_KEPT}")
    connection.execute(f"PRAGMA cache_size = -{_WRITER_BYTES // 1024}")
    connection.execute("PRAGMA wal_autocheckpoint = 0")  # see `streams.journal.sqlite.checkpoints`
    if file_bytes_max is not None:
        pages = file_bytes_max // _pragma(connection, "page_size")
        connection.execute(f"PRAGMA max_page_count = {pages}")
    # A write shows whether the file is read-only; BEGIN IMMEDIATE alone does not.
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    finally:
        connection.execute("ROLLBACK")


def configure_copier(connection: sqlite3.Connection, durability: Durability) -> None:
    """Configure a connection that only copies the WAL into the file."""
    _synchronize(connection, durability)
    _pragma(connection, "schema_version")  # a connection finds the WAL at its first read


def _synchronize(connection: sqlite3.Connection, durability: Durability) -> None:
    connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: an fsync that reaches the disk


def _pragma(connection: sqlite3.Connection, text: str) -> Any:
    return connection.execute(f"PRAGMA {text}").fetchone()[0]


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise `journal_error` in place of `SQLITE_ERRORS`.

    Commits and reads catch these errors themselves, which is faster than a context manager.
    """
    try:
        yield
    except SQLITE_ERRORS as error:
        raise journal_error(path, error) from error


def journal_error(path: Path, error: Exception) -> JournalError:
    """Translate one of `SQLITE_ERRORS` into an error of the journal."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    kind = code & 0xFF  # the upper bits tell variants apart
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(f"{path} is locked by another program.")
    if kind == sqlite3.SQLITE_FULL or (code in _OUT_OF_ROOM and not _has_room(path)):
        return Full(f"There is no room for {path}.")
    advice = _ADVICE.get(kind, "move it away, and report this")
    return JournalUnusable(f"{path}: {error}: {advice}.")


def _has_room(path: Path) -> bool:
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return True  # unknown: report the error itself
    return disk.f_bavail * disk.f_frsize >= _ROOM_BYTES_MIN
