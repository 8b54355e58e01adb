"""A server without room for its files ends with one line and exit code 2, however little room there
is.

The tests use small file systems in memory, which root may make, and folders that may not be used.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.launch import failed_start, owner_pid, wait_for_end
from tests.rigs.needing import lacking
from tests.wire.process import CLI, FAULTY_APP, ServerProcess
from tests.wire.raw import DEADLINE_S, PipePeer
from tests.wire.verbs import POSITIONS, called

pytestmark = pytest.mark.needs_file("it damages the disk of the file")

WAYS = {
    "ws": ("--ws", "127.0.0.1:0"),
    "http": ("--http", "127.0.0.1:0"),
    "relay": ("--stdio",),
    "foreground": ("--stdio", "--foreground"),
}
# A journal and its side files are seven, and the folder is one as well.
FILES_MAX = 9


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir()
    chosen = ",".join(("size=16m", *options))
    mount = ["mount", "-t", "tmpfs", "-o", chosen, "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        lacking(f"a file system of our own may not be had here: {made.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(folder: Path, *, but_bytes: int = 0) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    with (folder / "theirs").open("wb") as file:
        file.write(bytes(free - but_bytes))


def refused(journal: Path, way: str) -> str:
    """The reason why a server does not start there: its only line."""
    code, said = failed_start([*CLI, "serve", FAULTY_APP, *WAYS[way], "--journal", str(journal)])
    lines = [line for line in said.splitlines() if "no --journal" not in line]
    assert (code, len(lines)) == (2, 1), said
    assert "Traceback" not in said
    return lines[0]


def started_or_refused(journal: Path, way: str) -> bool:
    """Start a server and end it, or check that it refuses in one line; whether it started."""
    command = [*CLI, "serve", FAULTY_APP, *WAYS[way], "--journal", str(journal)]
    if way == "relay":
        command += ["--linger", "0"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        if way in ("relay", "foreground"):
            process.stdin.close()
        said, is_told = b"", False
        while chunk := os.read(process.stderr.fileno(), 1 << 16):
            said += chunk
            if b"listening" in said and not is_told:
                is_told = True
                process.send_signal(signal.SIGTERM)
        code = process.wait(DEADLINE_S)
    assert b"Traceback" not in said, said.decode()
    if code == 2:
        lines = [line for line in said.splitlines() if b"[info" not in line]
        assert len(lines) == 1, said.decode()
    else:
        assert code == 0, said.decode()
    return code == 0


@pytest.mark.parametrize("way", WAYS)
def test_on_a_full_disk_no_server_starts(tmp_path: Path, way: str) -> None:
    with mounted(tmp_path / "disk") as disk:
        fill_up(disk)
        said = refused(disk / "journal.db", way)
        assert "There is no room for" in said
        assert "Make room" in said


@pytest.mark.parametrize("way", WAYS)
def test_on_a_disk_that_is_too_small_for_a_journal_no_server_starts(
    tmp_path: Path, way: str
) -> None:
    with mounted(tmp_path / "disk", "size=6m") as disk:
        said = refused(disk / "journal.db", way)
        assert "its disk has 6 MiB in all, and a journal needs at least 16 MiB" in said
        assert not (disk / "journal.db").exists()


@pytest.mark.parametrize("way", WAYS)
def test_however_little_room_there_is_it_starts_or_says_why_not(tmp_path: Path, way: str) -> None:
    for pages in (1, 3, 8, 21, 55):
        with mounted(tmp_path / f"disk{pages}") as disk:
            fill_up(disk, but_bytes=pages * 4096)
            started_or_refused(disk / "journal.db", way)


@pytest.mark.parametrize("way", WAYS)
def test_however_few_files_there_may_be_it_starts_or_says_why_not(tmp_path: Path, way: str) -> None:
    started = []
    for files in range(2, FILES_MAX + 1):
        with mounted(tmp_path / f"disk{files}", f"nr_inodes={files}") as disk:
            started.append(started_or_refused(disk / "journal.db", way))
    assert not started[0]
    assert started[-1]


@pytest.mark.parametrize("way", WAYS)
def test_a_journal_that_was_there_before_its_disk_was_full_waits_for_room(
    tmp_path: Path, way: str
) -> None:
    with mounted(tmp_path / "disk") as disk:
        with ServerProcess(disk, app=FAULTY_APP) as server:
            assert server.stop() == 0
        fill_up(disk)
        assert "Make room" in refused(server.journal, way)
        (disk / "theirs").unlink()
        with ServerProcess(disk, app=FAULTY_APP) as server, server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            assert called(peer, "add", a=1, b=2).result["content"][0]["text"] == "3"


def _missing(folder: Path) -> Path:
    return folder / "missing" / "journal.db"


def _behind_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "journal.db"


def _a_folder(folder: Path) -> Path:
    (folder / "journal.db").mkdir()
    return folder / "journal.db"


def _a_loop(folder: Path) -> Path:
    (folder / "journal.db").symlink_to(folder / "journal.db")
    return folder / "journal.db"


def _too_long(folder: Path) -> Path:
    return folder / ("j" * 252)


def _with_a_folder_at(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / f"journal.db.{suffix}").mkdir()
        return folder / "journal.db"

    return make


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "place",
    [
        _missing,
        _behind_a_file,
        _a_folder,
        _a_loop,
        _too_long,
        _with_a_folder_at("lock"),
        _with_a_folder_at("key"),
        _with_a_folder_at("sock"),
    ],
)
def test_a_place_that_cannot_be_had_is_told_in_one_line(
    tmp_path: Path, way: str, place: Callable[[Path], Path]
) -> None:
    assert str(tmp_path) in refused(place(tmp_path), way)


def test_a_log_that_cannot_be_had_is_told_in_one_line(tmp_path: Path) -> None:
    assert "journal.db.log" in refused(_with_a_folder_at("log")(tmp_path), "relay")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_disk_that_is_read_only_is_told_in_one_line(
    tmp_path: Path, way: str, is_there: bool
) -> None:
    with mounted(tmp_path / "disk") as disk:
        if is_there:
            with ServerProcess(disk, app=FAULTY_APP) as server:
                assert server.stop() == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert str(disk / "journal.db") in refused(disk / "journal.db", way)


def test_a_relay_hears_from_its_owner_why_it_does_not_start(tmp_path: Path) -> None:
    """This holds also where the owner cannot write the reason into its log."""
    with mounted(tmp_path / "disk") as disk:
        fill_up(disk)
        said = refused(disk / "journal.db", "relay")
        assert said.startswith("The journal's owner did not start: There is no room for")
        (disk / "theirs").unlink()
        command = [*CLI, "serve", FAULTY_APP, "--stdio", "--journal", str(disk / "journal.db")]
        with PipePeer([*command, "--linger", "0"]) as peer:
            peer.initialize(POSITIONS)
            owner = owner_pid(disk / "journal.db")
            assert called(peer, "add", a=1, b=2).result["content"][0]["text"] == "3"
        wait_for_end(owner)
