"""Owner and mode of files, checked before the files are used, as OpenSSH's StrictModes does.


- A file that the server or the command uses belongs to the user of this process, or to root. So do
  its folder and each symbolic link on the way from the given name to the file.
- The side files of a journal are opened without following links.
- Only the owner may read a secret (keys, tokens, a TLS key). If the owner is root, the group may
  read it too: that is how root gives a secret to a service. PostgreSQL has the same rule.
- Other users may not write to a file, nor to its folder. A sticky folder such as /tmp is allowed:
  there, other users can create files but not replace those of this user.
- A group that has the user's name and no other member is not "other users": where each user has
  such a group (Debian, Fedora), the umask is often 002. Debian's OpenSSH has the same exception.

A file that is opened here is checked by its descriptor, so that it cannot be replaced afterwards.
"""

import errno
import grp
import os
import pwd
import shlex
import stat
from pathlib import Path
from typing import Final

from streams.errors import UnsafeFile

LINKS_MAX: Final = 40  # as in Linux

# Without these, opening could wait for a named pipe, take over a terminal or follow a link.
_CAREFULLY: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, "a regular file"),
)


def real_path(path: Path) -> Path:
    """The absolute path that a given name leads to.

    Raises `UnsafeFile` for a link of another user, `OSError` for links in a circle.
    """
    for _ in range(LINKS_MAX):
        status = _status(path)
        if status is None or not stat.S_ISLNK(status.st_mode):
            return Path(os.path.realpath(path))
        _check_owner(path, status)
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))


def open_safe(path: Path, flags: int = os.O_RDONLY, *, is_secret: bool = True) -> int:
    """Open a file if it is safe to use, without following a link; return the descriptor.

    With `O_CREAT`, a new file has mode 0600. Raises `UnsafeFile`, or another `OSError`.
    """
    try:
        descriptor = os.open(path, flags | _CAREFULLY, 0o600)
    except OSError:
        check_file(path, is_secret=is_secret)  # may raise a more helpful error
        raise
    try:
        _check(path, os.fstat(descriptor), is_secret=is_secret)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """The same for a file that only this program creates, and that may have been readable by other
    users: it is made private.

    A file to write to must have no second hard link: another user could have linked a file here
    that is to be overwritten.
    """
    descriptor = open_safe(path, flags, is_secret=False)
    try:
        status = os.fstat(descriptor)
        if flags & (os.O_WRONLY | os.O_RDWR):
            _check_is_only_name(path, status)
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            os.fchmod(descriptor, status.st_mode & stat.S_IRWXU)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_secret(path: Path, bytes_max: int, *, follows_links: bool = True) -> bytes:
    """The secret in a file. One byte more than `bytes_max` means that the file is longer.

    Raises `UnsafeFile`, or another `OSError`.
    """
    descriptor = open_safe(real_path(path) if follows_links else path)
    try:
        return os.pread(descriptor, bytes_max + 1, 0)
    finally:
        os.close(descriptor)


def check_file(path: Path, *, is_secret: bool = False, has_one_name: bool = False) -> None:
    """Check a file by its name; a missing file is safe. Raises `UnsafeFile`."""
    status = _status(path)
    if status is None:
        return
    _check(path, status, is_secret=is_secret)
    if has_one_name and status.st_nlink > 1:
        # The advice is not `rm`, as for our own side files: this file may be needed.
        raise UnsafeFile(
            f"{path} is one of {status.st_nlink} hard links to a file: remove the others, which "
            f"{_command('find . -xdev -samefile', path)} lists"
        )


def check_socket(path: Path) -> None:
    """The same for a Unix socket: no other user may connect to it."""
    status = _status(path)
    if status is None:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise UnsafeFile(f"{path} is {_kind(status)} and no socket: run {_command('rm', path)}")
    _check_owner(path, status)
    if status.st_mode & 0o022:
        raise UnsafeFile(
            f"Other users may connect to {path} (mode {_mode(status)}): run "
            f"{_command('chmod 600', path)}"
        )


def check_folder(folder: Path) -> None:
    """Check that other users cannot replace files in a folder.

    Raises `UnsafeFile`, or another `OSError` where the folder is missing.
    """
    folder = folder.absolute()
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafeFile(
            f"The folder {folder} belongs to {_named(status.st_uid)} and not to "
            f"{_named(os.geteuid())}: run {_command(f'chown {os.geteuid()}', folder)}, or use "
            "another folder"
        )
    if _is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX:
        raise UnsafeFile(
            f"Other users may replace files in the folder {folder} (mode {_mode(status)}): run "
            f"{_command('chmod go-w', folder)}, or use another folder"
        )


def make_private_folders(folder: Path) -> None:
    """Make a folder and those above it, for their owner alone; existing ones stay as they are."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None  # opening it fails with a better message


def _check(path: Path, status: os.stat_result, *, is_secret: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFile(
            f"{path} is no file but {_kind(status)} and cannot be used: run "
            f"{_command('mv', path)} {shlex.quote(f'{path}.old')}, or name a regular file"
        )
    _check_owner(path, status)
    if is_secret and status.st_mode & _others_of_secret(status):
        raise UnsafeFile(
            f"Other users may use the secrets in {path} (mode {_mode(status)}): run "
            f"{_command('chmod 640' if _is_given_by_root(status) else 'chmod 600', path)}, and "
            "replace them if others have read or changed them"
        )
    if _is_writable_by_others(status):
        raise UnsafeFile(
            f"Other users may write to {path} (mode {_mode(status)}): run "
            f"{_command('chmod 600', path)}, if you trust what is in it"
        )


def _check_is_only_name(path: Path, status: os.stat_result) -> None:
    if status.st_nlink > 1:
        raise UnsafeFile(
            f"{path} is one of {status.st_nlink} hard links to a file: run {_command('rm', path)}"
        )


def _check_owner(path: Path, status: os.stat_result) -> None:
    user = os.geteuid()
    if status.st_uid not in (0, user):
        raise UnsafeFile(
            f"{path} belongs to {_named(status.st_uid)} and not to {_named(user)}: if you trust "
            f"it, run {_command(f'chown -h {user}', path)}, else remove it"
        )


def _others_of_secret(status: os.stat_result) -> int:
    return 0o037 if _is_given_by_root(status) else 0o077


def _is_given_by_root(status: os.stat_result) -> bool:
    return status.st_uid == 0 != os.geteuid()


def _is_writable_by_others(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid)


def _is_private_group(group_id: int) -> bool:
    """Whether a group is the user's own. Root's group is not: it may have many members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    if group_id == 0 or (group.gr_name, group_id) != (user.pw_name, user.pw_gid):
        return False
    members = {each.pw_name for each in pwd.getpwall() if each.pw_gid == group_id}
    return members.union(group.gr_mem) <= {user.pw_name}


def _kind(status: os.stat_result) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "a device")


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _named(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"


def _command(command: str, path: Path) -> str:
    return f"{command} {shlex.quote(os.fspath(path))}"
