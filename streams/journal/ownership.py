"""Who owns a journal: at most one process, and nobody once that process is dead.

A journal's side files stand beside it, beside the file that a symbolic link leads to:

    <journal>.lock   byte 0 locked: this process owns the journal; byte 1: it is starting an owner
    <journal>.sock   where the owner listens for its relays
    <journal>.log    what the owner has to say
    <journal>.key    the keys of its tokens (`streams.keys`)

The locks are `fcntl.lockf`'s. The kernel drops them when the process ends, however it ends, and a
forked child does not inherit them (with `flock` a tool's child would keep the journal owned). They
have two traps, which `_LockFile` is for: they do not hold off the process that has them, and
closing *any* descriptor of the file drops all that the process holds on it. Hence one descriptor a
file and process, shared by whoever holds a byte of it. The file is never deleted: who locks a
deleted file owns nothing.
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
_PID_BYTES_MAX: Final = 20  # a 64-bit number
_FLOCK: Final = "hhqqi0q"  # Linux's struct flock: type, whence, start, length, pid


def lock_path(journal: Path) -> Path:
    """Where the locks of `journal` are."""
    return _beside(journal, ".lock")


def socket_path(journal: Path) -> Path:
    """Where the owner of `journal` listens."""
    return _beside(journal, ".sock")


def log_path(journal: Path) -> Path:
    """Where an owner of `journal` that has no terminal writes its log."""
    return _beside(journal, ".log")


def key_path(journal: Path) -> Path:
    """Where the keys of `journal`'s tokens are."""
    return _beside(journal, ".key")


def _beside(journal: Path, suffix: str) -> Path:
    real = Path(os.path.realpath(journal))  # a loop of links is found when it is opened
    return real.parent / f"{real.name}{suffix}"


def check_files(journal: Path) -> None:
    """Look whether another user owns the journal, its side files or its folder, or may change them.

    The files are looked at by their names, since to close a descriptor of the journal would drop
    SQLite's locks on it; in a folder that passes, other users cannot replace what passes. The files
    that SQLite writes have one name each: another would stay in use when the journal is replaced,
    and with another name SQLite finds no WAL. Raises `JournalUnusable`.
    """
    try:
        real = real_path(journal)
        if os.path.isdir(real):
            raise JournalUnusable(f"{journal} is no file but a directory: name a file in it.")
        check_folder(real.parent)
        for suffix in _SQLITES:
            check_file(_beside(real, suffix), has_one_name=True)
        for suffix in (".lock", ".log", ".key"):
            check_file(_beside(real, suffix), is_secret=suffix == ".key")
        check_socket(socket_path(real))
    except UnsafeFile as error:
        raise JournalUnusable(f"{error}.") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise JournalUnusable(f"{journal} cannot be used: {error}.") from error
        # No folder, or none that may be searched: what is opened there next says so.


class _Held(Exception):
    """The byte is locked already; the text says by whom."""


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

        Raises `_Held` where it is locked already, here or elsewhere, and `OSError` where the file
        cannot be opened, or cannot be locked at all.
        """
        with cls._guard:
            file = cls._open.get(path) or cls(path)
            try:
                file._lock(byte)
            finally:
                file._keep_if_held()
            return file

    @classmethod
    def forget_all(cls) -> None:
        cls._open.clear()
        cls._guard = threading.Lock()  # another thread of the parent may have held it

    def give_back(self, byte: int) -> None:
        with self._guard:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)
            self._held.remove(byte)
            self._keep_if_held()

    def sign(self) -> None:
        """Leave our process id in the file, for the message that `_lock` gives to others."""
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only the name is missing
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def _lock(self, byte: int) -> None:
        if byte in self._held:
            raise _Held("this process")
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX lets a system choose between them
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


# A forked child holds none of the locks: there the descriptors are as good as closed.
in_child(_LockFile.forget_all)


class OwnerLock:
    """Ownership of a journal, from `acquire` until `release` or the end of the process."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: _LockFile | None = None

    def acquire(self) -> None:
        """Own the journal. Raises `JournalUnusable` where somebody else does, or nobody can."""
        try:
            self._file = _LockFile.take(lock_path(self._journal), _OWNER_BYTE)
        except _Held as held:
            raise JournalUnusable(
                f"{self._journal} is already owned by {held}: "
                "stop that one, or use another journal."
            ) from None
        except OSError as error:
            raise _cannot_lock(self._journal, error) from error
        self._file.sign()

    def release(self) -> None:
        """Let go of it; without having it, nothing happens."""
        if self._file is not None:
            self._file.give_back(_OWNER_BYTE)
            self._file = None


def owner_of(journal: Path) -> int | None:
    """The id of the process that owns `journal`; None where nobody does.

    Nothing is locked to find it out, so whoever is about to own it is not disturbed. Not for
    processes that hold locks on it themselves: see the head of this module.
    """
    try:
        descriptor = open_own(lock_path(journal), os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _OWNER_BYTE, 1, 0)
        told = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    finally:
        os.close(descriptor)
    kind, _, _, _, pid = struct.unpack(_FLOCK, told)
    return None if kind == fcntl.F_UNLCK else int(pid)


class StarterLock:
    """The right to start an owner, so that of many relays only one does."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: _LockFile | None = None

    def acquire(self) -> bool:
        """Try to have it, without waiting; False where this or another process has it.

        Raises `JournalUnusable` where the lock file cannot be used at all.
        """
        try:
            self._file = _LockFile.take(lock_path(self._journal), _STARTER_BYTE)
        except _Held:
            return False
        except OSError as error:
            raise _cannot_lock(self._journal, error) from error
        return True

    def release(self) -> None:
        """Let go of it; without having it, nothing happens."""
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
