"""Files that cannot be a journal, here and now, are refused with a sentence that helps."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from streams.errors import JournalUnusable
from streams.journal.sqlite import SCHEMA_VERSION, SQLiteStore
from tests.rigs.sqlite import APPENDING, PLENTY, last_of, make_journal, running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def made(path: Path) -> Path:
    return make_journal(path)


def why_not(path: Path) -> str:
    """The sentence with which the journal refuses to open; it leaves no lock behind."""
    sentences = []
    for _ in range(2):
        with pytest.raises(JournalUnusable) as refused:
            SQLiteStore(path)
        sentences.append(str(refused.value))
    assert sentences[0] == sentences[1]
    assert str(path) in sentences[0]
    return sentences[0]


def test_a_journal_is_owned_once_in_a_process(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with closing(SQLiteStore(path)):
        for name in (path, link):
            with pytest.raises(JournalUnusable, match="already owned by this process"):
                SQLiteStore(name)
    SQLiteStore(link).close()


def test_a_journal_is_owned_by_one_process(path: Path) -> None:
    with running(APPENDING, path, "process") as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert f"another process (pid {process.pid})" in why_not(path)


def test_another_kind_of_file_is_refused_and_left_alone(path: Path) -> None:
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    before = path.read_bytes()
    assert "it is not a SQLite file: name another file" in why_not(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("application_id", [0, 0x47504B47])
def test_another_programs_database_is_refused_and_left_alone(
    path: Path, application_id: int
) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA application_id = {application_id}")
        other.execute("CREATE TABLE streams (id INTEGER PRIMARY KEY)")
    before = path.read_bytes(), path.stat().st_mode
    assert "a SQLite file of another program: name another file" in why_not(path)
    assert (path.read_bytes(), path.stat().st_mode) == before


def test_a_newer_journal_is_refused(made: Path) -> None:
    with closing(sqlite3.connect(made)) as other:
        other.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    assert "newer mcp-streams" in why_not(made)
    assert "upgrade" in why_not(made)


def test_a_directory_is_no_journal(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    assert "is a directory" in why_not(place)


def test_the_directory_must_be_there(tmp_path: Path) -> None:
    assert f"there is no directory {tmp_path / 'missing'}" in why_not(tmp_path / "missing" / "j")


READ_ONLY = """
    import os, sys, tempfile
    from pathlib import Path
    from streams.errors import JournalUnusable
    from streams.journal.sqlite import SQLiteStore, schemas  # which nobody may not load

    if os.getuid() == 0:
        os.setuid(65534)  # nobody: root may write whatever the mode says
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "journal.db")
        SQLiteStore(path).close()
        os.chmod(path, 0o400)
        if sys.argv[1] == "directory":
            os.chmod(directory, 0o500)
        try:
            SQLiteStore(path)
        except JournalUnusable as error:
            print(error)
        os.chmod(directory, 0o700)
"""


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_read_only_journal_is_refused(what: str) -> None:
    with running(READ_ONLY, what) as process:
        said, _ = process.communicate()
    assert "allow" in said
    assert "writ" in said


def test_a_damaged_journal_is_refused(made: Path) -> None:
    with made.open("r+b") as damaged:
        damaged.seek(100)
        damaged.write(b"\xa5" * 20_000)
    assert "it is damaged: restore it" in why_not(made)


def test_damage_that_is_found_late_is_fatal_too(made: Path) -> None:
    with made.open("r+b") as damaged:
        content = damaged.read()
        # The pages that are full of lines, and not the tree that leads to them.
        for page in range(0, len(content), 4096):
            if content[page : page + 4096].count(b"x") > 2000 and page:
                damaged.seek(page)
                damaged.write(b"\xa5" * 4096)
    with closing(SQLiteStore(made)) as opened, pytest.raises(JournalUnusable):
        opened.read("s", 0, bytes_max=PLENTY)


def test_a_truncated_journal_is_refused(made: Path) -> None:
    os.truncate(made, 4096)
    with (
        pytest.raises(JournalUnusable, match="it is damaged"),
        closing(SQLiteStore(made)) as opened,
    ):
        opened.claim()


@pytest.mark.parametrize("garbage", [b"", b"\x00" * 5000, b"\xff" * 50_000, b"WAL"])
def test_garbage_for_a_wal_is_ignored(made: Path, garbage: bytes) -> None:
    Path(f"{made}-wal").write_bytes(garbage)
    with closing(SQLiteStore(made)) as opened:
        assert last_of(opened) == 500
