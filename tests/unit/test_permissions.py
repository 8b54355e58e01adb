"""Files that another user owns, may read or may change are told from those that are safe."""

import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.errors import JournalUnusable, UnsafeFile
from streams.journal.ownership import OwnerLock, check_files, lock_path, log_path
from streams.permissions import (
    check_file,
    check_folder,
    check_socket,
    open_own,
    open_safe,
    read_secret,
    real_path,
)
from tests.rigs import ROOT
from tests.rigs.needing import another_user, lacking


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch(0o600)
    return path


def why_not(path: Path, *, is_secret: bool = True) -> str:
    """The sentence with which a file is refused, by its name and when it is opened."""
    said = []
    for look in (check_file, open_safe):
        with pytest.raises(UnsafeFile) as refused:
            look(path, is_secret=is_secret)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert str(path) in said[0]
    return said[0]


def close(descriptor: int) -> None:
    os.close(descriptor)


# Files


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_secret_of_ours_alone_is_safe(file: Path, mode: int) -> None:
    file.chmod(mode)
    close(open_safe(file))
    check_file(file, is_secret=True)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666])
def test_a_secret_that_others_may_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert f"(mode {mode:04o}): run chmod 600 {file}" in why_not(file)


@pytest.mark.parametrize("mode", [0o602, 0o622, 0o666, 0o777])
def test_what_others_may_write_to_is_refused_though_it_is_no_secret(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert f"(mode {mode:04o}): run chmod 600 {file}" in why_not(file, is_secret=False)


def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, another_user(), -1)
    for is_secret in (True, False):
        said = why_not(file, is_secret=is_secret)
        assert "(uid 65534) and not to root (uid 0)" in said
        assert f"run chown -h 0 {file}, else remove it" in said


def test_the_command_that_mends_it_can_be_pasted(tmp_path: Path) -> None:
    path = tmp_path / "a file; of ours"
    path.touch(0o644)
    path.chmod(0o644)
    assert f"chmod 600 '{path}'" in why_not(path)


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "socket", "directory"])
def test_what_is_no_regular_file_is_neither_opened_nor_waited_for(
    tmp_path: Path, file: Path, kind: str
) -> None:
    path = tmp_path / "it"
    with socket.socket(socket.AF_UNIX) as bound:
        if kind == "pipe":
            os.mkfifo(path, 0o600)
        elif kind == "socket":
            bound.bind(str(path))
        elif kind == "directory":
            path.mkdir(0o700)
        else:
            path.symlink_to(file if kind == "link" else tmp_path / "nothing")
        assert "is no file but a" in why_not(path)
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY):
            with pytest.raises(UnsafeFile, match="is no file but a"):
                open_own(path, flags)
    assert not (tmp_path / "nothing").exists()


def test_a_new_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        close(open_own(tmp_path / "new", os.O_RDWR | os.O_CREAT))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_a_file_that_the_program_makes_itself_is_made_private(file: Path) -> None:
    file.chmod(0o644)
    close(open_own(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_no_secret_keeps_its_mode(file: Path) -> None:
    """A certificate, or a set of public keys, is for others to read."""
    file.chmod(0o644)
    close(open_safe(file, is_secret=False))
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_second_name_of_a_file_is_not_written_to(tmp_path: Path, file: Path) -> None:
    planted = tmp_path / "planted"
    os.link(file, planted)
    with pytest.raises(UnsafeFile, match=f"one of 2 hard links to a file: run rm {planted}"):
        open_own(planted, os.O_RDWR)
    close(open_own(planted))  # to read it harms nobody


def test_what_is_not_there_is_safe_and_cannot_be_opened(tmp_path: Path) -> None:
    check_file(tmp_path / "missing")
    check_socket(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        open_safe(tmp_path / "missing")


# Links


def test_links_of_ours_are_followed_where_the_user_gave_the_name(
    tmp_path: Path, file: Path
) -> None:
    """As Kubernetes and Let's Encrypt have them."""
    file.write_bytes(b"secret")
    (tmp_path / "one").symlink_to("file")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    assert real_path(tmp_path / "two") == file
    assert read_secret(tmp_path / "two", 100) == b"secret"
    with pytest.raises(UnsafeFile, match="a symbolic link"):
        read_secret(tmp_path / "two", 100, follows_links=False)


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        real_path(tmp_path / "one")


def test_a_link_of_another_user_is_refused(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    os.chown(link, another_user(), -1, follow_symlinks=False)
    for use in (real_path, check_files, lambda path: read_secret(path, 9)):
        with pytest.raises((UnsafeFile, JournalUnusable), match=f"{link} belongs to"):
            use(link)


# Folders


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_in_which_others_may_replace_files_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    if os.geteuid() != 0 and mode in (0o770, 0o720):
        lacking("the group of root is no private one; that of this user may be")
    with pytest.raises(UnsafeFile, match=rf"\(mode {mode:04o}\): run chmod go-w {tmp_path}"):
        check_folder(tmp_path)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777, 0o1770])
def test_a_folder_in_which_others_can_replace_nothing_is_safe(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    check_folder(tmp_path)


def test_a_folder_of_another_user_is_refused_even_if_it_is_sticky(tmp_path: Path) -> None:
    os.chown(tmp_path, another_user(), -1)
    for mode in (0o700, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(UnsafeFile, match=f"run chown 0 {tmp_path}"):
            check_folder(tmp_path)


# Journals


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", ".lock", ".log", ".key", ".sock"])
def test_a_file_of_another_user_beside_a_journal_is_refused(tmp_path: Path, suffix: str) -> None:
    planted = tmp_path / f"journal.db{suffix}"
    with socket.socket(socket.AF_UNIX) as bound:
        if suffix == ".sock":
            bound.bind(str(planted))
            planted.chmod(0o600)
        else:
            planted.touch(0o600)
        check_files(tmp_path / "journal.db")
        os.chown(planted, another_user(), -1)
        with pytest.raises(JournalUnusable, match=f"^{planted} belongs to .*remove it\\.$"):
            check_files(tmp_path / "journal.db")


def test_a_socket_to_which_others_may_connect_and_what_is_none_are_refused(
    tmp_path: Path, file: Path
) -> None:
    path = tmp_path / "journal.db.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        path.chmod(0o666)
        with pytest.raises(JournalUnusable, match=f"run chmod 600 {path}"):
            check_files(tmp_path / "journal.db")
        path.chmod(0o600)
        check_files(tmp_path / "journal.db")
    path.unlink()
    path.symlink_to(file)
    with pytest.raises(JournalUnusable, match="a symbolic link and no socket"):
        check_files(tmp_path / "journal.db")


def test_a_lock_that_is_a_link_overwrites_nothing(tmp_path: Path, file: Path) -> None:
    file.write_text("precious")
    journal = tmp_path / "journal.db"
    for plant in (lock_path(journal).symlink_to, lock_path(journal).hardlink_to):
        plant(file)
        with pytest.raises(JournalUnusable, match="cannot be locked"):
            OwnerLock(journal).acquire()
        lock_path(journal).unlink()
    assert file.read_text() == "precious"
    assert not log_path(journal).exists()


# Other users


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_user(uid: int, gid: int, code: str, *words: Path) -> str:
    """The output of code that runs as a user; `streams.permissions` and `Path` are there."""
    begin = f"""
        import os, sys
        from pathlib import Path
        from streams import permissions
        from streams.errors import UnsafeFile
        os.setgroups([]); os.setgid({gid}); os.setuid({uid})
    """
    program = textwrap.dedent(begin) + textwrap.dedent(code)
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout


READ = """
    try:
        print(permissions.read_secret(Path(sys.argv[1]), 100))
    except UnsafeFile as error:
        print(error)
"""


def test_root_may_hand_a_secret_to_the_group_of_a_service(place: Path) -> None:
    nobody = another_user()
    secret = place / "secret"
    secret.write_bytes(b"key")
    os.chown(secret, 0, nobody)
    for mode, said in ((0o640, "b'key'"), (0o440, "b'key'"), (0o660, "0660"), (0o644, "0644")):
        secret.chmod(mode)
        assert said in as_user(nobody, nobody, READ, secret)
    assert f"run chmod 640 {secret}" in as_user(nobody, nobody, READ, secret)
    secret.chmod(0o640)
    assert f"(mode 0640): run chmod 600 {secret}" in why_not(secret), "root's own is no exception"


def test_a_group_of_one_user_alone_is_that_user(place: Path) -> None:
    """The umask is 002 where each user has such a group."""
    another_user()
    try:
        user = pwd.getpwnam("daemon")  # has a group of its own in every Debian
    except KeyError:
        lacking("there is no user daemon")
    check = """
        try:
            print(permissions.check_folder(Path(sys.argv[1])))
        except UnsafeFile as error:
            print(error)
    """
    folder = place / "folder"
    folder.mkdir()
    for owner, group, said in (
        (user.pw_uid, user.pw_gid, "None"),
        (0, user.pw_gid, "None"),
        (user.pw_uid, 0, "Other users may replace files"),
        (user.pw_uid, another_user(), "Other users may replace files"),
    ):
        os.chown(folder, owner, group)
        folder.chmod(0o775)
        assert said in as_user(user.pw_uid, user.pw_gid, check, folder)
    os.chown(folder, user.pw_uid, user.pw_gid)
    folder.chmod(0o777)
    assert "mode 0777" in as_user(user.pw_uid, user.pw_gid, check, folder)
