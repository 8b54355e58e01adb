"""Ownership of a journal: at most one process owns it, until that process ends.

A journal has side files. If the journal is a symbolic link, they lie beside the file it leads to:

    <journal>.lock   byte 0 locked: a process owns the journal; byte 1: one is starting an owner;
                     bytes 2 to 4: see `Heir`
    <journal>.sock   where the owner listens for its relays
    <journal>.ops    where the owner answers operators of the same user
    <journal>.log    the log of an owner without a terminal
    <journal>.key    the keys of its resume tokens (`streams.keys`)
    <journal>.hello  what a remote server has said last of itself (`streams.backends.kept`)

The locks are those of `fcntl.lockf`. The kernel drops them when the process ends, however it ends.
A forked child does not inherit them; with `flock`, a child process of a tool would keep the journal
owned. These locks have two traps. They do not exclude the process that holds them, and closing
*any* descriptor of the file drops all locks of the process on it. So `_LockFile` keeps one
descriptor for each file, and shares it. The file is never deleted, because a lock on a deleted file
excludes no other process.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
from pathlib import Path
from typing import Final

from streams.errors import JournalUnusable, UnsafeFile
from streams.forks import in_child
from streams.permissions import (
    check_file,
    check_folder,
    check_socket,
    open_own,
    real_path,
)

_SQLITES: Final = ("", "-wal", "-shm")
_OWNER_BYTE: Final = 0
_STARTER_BYTE: Final = 1
_HEIR_BYTE: Final = 2
_LEAVES_BYTE: Final = 3
_LISTENS_BYTE: Final = 4
_PID_BYTES_MAX: Final = 20  # a 64-bit number
_FLOCK: Final = "hhqqi0q"  # Linux's struct flock: type, whence, start, length, pid


def lock_path(journal: Path) -> Path:
    """The lock file of `journal`."""
    return _beside(journal, ".lock")


def socket_path(journal: Path) -> Path:
    """The socket at which the owner of `journal` listens."""
    return _beside(journal, ".sock")


def operators_path(journal: Path) -> Path:
    """The socket at which the owner of `journal` answers operators."""
    return _beside(journal, ".ops")


def log_path(journal: Path) -> Path:
    """The log file of an owner of `journal` that has no terminal."""
    return _beside(journal, ".log")


def key_path(journal: Path) -> Path:
    """The file with the keys of `journal`'s resume tokens."""
    return _beside(journal, ".key")


def hello_path(journal: Path) -> Path:
    """The file with what a remote server, whose calls `journal` keeps, has said last of itself."""
    return _beside(journal, ".hello")


def _beside(journal: Path, suffix: str) -> Path:
    real = Path(os.path.realpath(journal))  # opening the file will report a loop of links
    return real.parent / f"{real.name}{suffix}"


def check_files(journal: Path) -> None:
    """Check that no other user owns or may change the journal, its side files or its folder.

    The files are checked by name, because closing a descriptor of the journal would drop SQLite's
    locks on it. In a folder that passes, other users cannot replace a file after its check. The
    files that SQLite writes must have no second name (a hard link): that one would stay in use when
    the journal is replaced, and SQLite would not find the WAL by it. Raises `JournalUnusable`.
    """
    try:
        real = real_path(journal)
        if os.path.isdir(real):
            raise JournalUnusable(f"{journal} is a directory: name a file in it.")
        check_folder(real.parent)
        for suffix in _SQLITES:
            check_file(_beside(real, suffix), has_one_name=True)
        for suffix in (".lock", ".log", ".key"):
            check_file(_beside(real, suffix), is_secret=suffix == ".key")
        check_socket(socket_path(real))
        check_socket(operators_path(real))
    except UnsafeFile as error:
        raise JournalUnusable(f"{error}.") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise JournalUnusable(f"{journal} cannot be used: {error}.") from error
        # A folder that is missing or may not be searched: opening the journal will report it.


class _Held(Exception):
    """The byte is locked already; the text names the process."""


class _LockFile:
    """The one descriptor of a lock file in this process, and the bytes that are held through it."""

    _open: Final[dict[Path, "_LockFile"]] = {}
    _guard = threading.Lock()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        self._held: set[int] = set()

    @classmethod
    def take(cls, path: Path, byte: int) -> "_LockFile":
        """Lock a byte of the file at `path`, without waiting.

        Raises `_Held` if it is locked already, by this or another process, and `OSError` if the
        file cannot be opened, or cannot be locked at all.
        """
        with cls._guard:
            file = cls._open.get(path) or cls(path)
            try:
                file._lock(byte)
            finally:
                file._keep_if_held()
            return file

    @classmethod
    def held(cls, path: Path) -> "_LockFile | None":
        """The file at `path`, if this process holds a byte of it."""
        with cls._guard:
            return cls._open.get(path)

    @classmethod
    def forget_all(cls) -> None:
        cls._open.clear()
        cls._guard = threading.Lock()  # another thread of the parent may have held it

    def give_back(self, byte: int) -> None:
        with self._guard:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)
            self._held.remove(byte)
            self._keep_if_held()

    def is_held_elsewhere(self, byte: int) -> bool:
        """Whether another process has locked this byte."""
        return _holder(self._descriptor, byte) is not None

    def sign(self) -> None:
        """Write our process id into the file, for the error message in other processes."""
        with contextlib.suppress(OSError):  # on a full disk the lock still holds, without the id
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def _lock(self, byte: int) -> None:
        if byte in self._held:
            raise _Held("this process")
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            signed = os.pread(self._descriptor, _PID_BYTES_MAX, 0).strip()
            name = f"pid {signed.decode()}" if signed.isdigit() else "pid unknown"
            raise _Held(f"another process ({name})") from None
        self._held.add(byte)

    def _keep_if_held(self) -> None:
        if self._held:
            self._open[self._path] = self
        else:
            self._open.pop(self._path, None)
            os.close(self._descriptor)


# A forked child holds none of the locks, so it must not believe that it does.
in_child(_LockFile.forget_all)


class OwnerLock:
    """Ownership of a journal, from `acquire` until `release` or the end of the process."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: _LockFile | None = None

    def acquire(self) -> None:
        """Own the journal. Raises `JournalUnusable` if it is owned already or cannot be locked."""
        try:
            self._file = _LockFile.take(lock_path(self._journal), _OWNER_BYTE)
        except _Held as held:
            raise JournalUnusable(
                f"{self._journal} is already owned by {held}: "
                "stop that process, or use another journal."
            ) from None
        except OSError as error:
            raise _cannot_lock(self._journal, error) from error
        self._file.sign()

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            self._file.give_back(_OWNER_BYTE)
            self._file = None


def owner_of(journal: Path) -> int | None:
    """The id of the process that owns `journal`; None if no process does.

    It locks nothing, so it does not disturb a process that is about to own the journal. It must not
    be called by a process that holds locks on the journal: see the head of this module.
    """
    try:
        descriptor = open_own(lock_path(journal), os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return _holder(descriptor, _OWNER_BYTE)
    finally:
        os.close(descriptor)


def _holder(descriptor: int, byte: int) -> int | None:
    """The id of the other process that has locked this byte of an open file."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    told = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    kind, _, _, _, pid = struct.unpack(_FLOCK, told)
    return None if kind == fcntl.F_UNLCK else int(pid)


class Heir:
    """The process that waits to be the next owner of a journal, which has one at most.

    The owner tells it by a lock (byte 3) that it is about to accept no connection any more. The
    heir listens then, and tells the owner so (byte 4). So one of the two always listens.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: _LockFile | None = None
        self._listens = False

    def acquire(self) -> None:
        """Be the heir. Raises `JournalUnusable` if another process is."""
        try:
            self._file = _LockFile.take(lock_path(self._journal), _HEIR_BYTE)
        except _Held:
            raise JournalUnusable(
                f"another process already waits for {self._journal}: stop that one."
            ) from None
        except OSError as error:
            raise _cannot_lock(self._journal, error) from error

    @property
    def is_owned(self) -> bool:
        """Whether a process owns the journal."""
        assert self._file is not None
        return self._file.is_held_elsewhere(_OWNER_BYTE)

    @property
    def may_listen(self) -> bool:
        """Whether the owner is about to accept no connection, or has ended."""
        assert self._file is not None
        return not self.is_owned or self._file.is_held_elsewhere(_LEAVES_BYTE)

    def listens(self) -> None:
        """Tell the owner that connections come here."""
        self._file = _LockFile.take(lock_path(self._journal), _LISTENS_BYTE)
        self._listens = True

    def release(self) -> None:
        """Be the heir no more, if it was: it is the owner, or gives up."""
        file, self._file = self._file, None
        if file is not None:
            file.give_back(_HEIR_BYTE)
            if self._listens:
                file.give_back(_LISTENS_BYTE)


def has_heir(journal: Path) -> bool:
    """Whether another process waits for a journal. This process must own it."""
    file = _LockFile.held(lock_path(journal))
    return file is not None and file.is_held_elsewhere(_HEIR_BYTE)


class Leave:
    """The owner of a journal is about to accept no connection any more, and to end; see `Heir`."""

    def __init__(self, journal: Path) -> None:
        self._file = _LockFile.take(lock_path(journal), _LEAVES_BYTE)

    @property
    def has_heir(self) -> bool:
        """Whether a process waits for the journal."""
        return self._file.is_held_elsewhere(_HEIR_BYTE)

    @property
    def is_followed(self) -> bool:
        """Whether that process listens."""
        return self._file.is_held_elsewhere(_LISTENS_BYTE)


class StarterLock:
    """The right to start an owner, so that of many relays only one does."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: _LockFile | None = None

    def acquire(self) -> bool:
        """Lock it without waiting; False if this or another process holds it.

        Raises `JournalUnusable` if the lock file cannot be used at all.
        """
        try:
            self._file = _LockFile.take(lock_path(self._journal), _STARTER_BYTE)
        except _Held:
            return False
        except OSError as error:
            raise _cannot_lock(self._journal, error) from error
        return True

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            self._file.give_back(_STARTER_BYTE)
            self._file = None


def _cannot_lock(journal: Path, error: OSError) -> JournalUnusable:
    if isinstance(error, UnsafeFile):
        return JournalUnusable(f"{journal} cannot be locked: {error}.")
    if isinstance(error, FileNotFoundError):
        return JournalUnusable(f"{journal}: there is no directory {journal.parent}: create it.")
    return JournalUnusable(
        f"{journal} cannot be locked ({error}): it needs a local directory that you may write to."
    )
