"""The file of the calls that the command has begun."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.cli.actions.notes import (
    ARGUMENTS_BYTES_MAX,
    CALLS_MAX,
    ENTRY_BYTES_MAX,
    Callbook,
    CallbookUnusable,
    Entry,
    path_of_user,
)
from streams.protocol.ticket import Ticket

URL = "ws://127.0.0.1:1"
NOW = 1_800_000_000.0


def ticket(number: int = 1, after: int | None = None) -> Ticket:
    return Ticket(f"stream-{number}", f"token-{number}", number, after, 1, 60)


def note(book: Callbook, number: int = 1, tool: str = "build", **changes: Any) -> Entry:
    given = {"url": URL, "tool": tool, "arguments": {"n": number}, "cwd": None, "now": NOW}
    return book.add(ticket(number), **(given | changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "mcp-streams" / "calls.json"


@pytest.fixture
def book(path: Path) -> Callbook:
    return Callbook(path)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


# Stored notes


def test_what_was_noted_is_there_for_every_other_process(book: Callbook, path: Path) -> None:
    noted = [note(book), note(book, 2, cwd="/there")]
    assert Callbook(path).entries() == noted
    assert noted[0] == Entry("build-1", URL, "build", NOW, ticket(), {"n": 1})
    assert noted[1].cwd == "/there"


def test_where_there_is_no_file_there_are_no_calls_and_none_is_made(
    book: Callbook, path: Path
) -> None:
    assert book.entries() == []
    assert not path.parent.exists()


def test_a_name_is_the_tools_and_the_lowest_number_that_is_free(book: Callbook) -> None:
    assert [note(book, n).name for n in (1, 2, 3)] == ["build-1", "build-2", "build-3"]
    assert note(book, 4, "test").name == "test-1"
    book.remove([ticket(2)])
    assert note(book, 5).name == "build-2"


@given(tool=st.text())
@settings(deadline=None)
def test_a_name_can_be_typed_whatever_the_tool_is_called(
    tool: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = note(Callbook(tmp_path_factory.mktemp("book") / "calls.json"), tool=tool).name
    assert re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*-1", name)


def test_a_call_is_known_by_its_ticket_wherever_that_stands(book: Callbook) -> None:
    note(book)
    noted = note(book, 2)
    assert book.find(ticket(2, after=7)) == noted
    assert book.find(ticket(3)) is None
    book.remove([ticket(2, after=9)])
    assert book.find(ticket(2)) is None
    assert book.find(ticket(1))


def test_calls_without_a_stream_are_told_apart(book: Callbook) -> None:
    tickets = [Ticket("", "one", 1), Ticket("", "two", 1)]
    for each in tickets:
        book.add(each, url=URL, tool="t", arguments={}, cwd=None, now=NOW)
    book.move(Ticket("", "two", 1, after=5))
    assert [entry.ticket.after for entry in book.entries()] == [None, 5]
    book.remove([tickets[0]])
    assert [entry.name for entry in book.entries()] == ["t-2"]


def test_a_call_that_was_not_left_is_noted_at_its_beginning(book: Callbook) -> None:
    """A message may be handed out and never printed."""
    entry = book.add(ticket(after=3), url=URL, tool="t", arguments={}, cwd=None, now=NOW)
    assert entry.ticket == ticket()


def test_a_position_moves_forward_only_until_it_is_forgotten(book: Callbook) -> None:
    note(book)
    note(book, 2)
    for after, noted in [(None, None), (4, 4), (2, 4), (None, 4), (9, 9)]:
        book.move(ticket(after=after))
        assert book.entries()[0].ticket.after == noted
    book.forget_position(ticket())
    assert [entry.ticket for entry in book.entries()] == [ticket(), ticket(2)]


def test_what_changes_nothing_writes_nothing(book: Callbook, path: Path) -> None:
    note(book)
    before = path.stat().st_ino
    book.move(ticket(2, after=1))
    book.forget_position(ticket())
    book.remove([ticket(2)])
    assert path.stat().st_ino == before


# Limits


def test_the_oldest_calls_go(book: Callbook, path: Path) -> None:
    first = note(book)
    many = [msgspec.structs.replace(first, name=f"b-{n}") for n in range(CALLS_MAX)]
    path.write_bytes(msgspec.json.encode({"version": 1, "calls": many}))
    note(book, 2)
    names = [entry.name for entry in book.entries()]
    assert (len(names), names[0], names[-1]) == (CALLS_MAX, "b-1", "build-1")


def test_long_arguments_are_left_out(book: Callbook) -> None:
    assert note(book, arguments={"text": "x" * ARGUMENTS_BYTES_MAX}).arguments is None
    assert book.entries()[0].arguments is None


def test_what_is_too_long_is_not_noted(book: Callbook) -> None:
    with pytest.raises(CallbookUnusable, match="more than 65536 bytes"):
        note(book, url="x" * ENTRY_BYTES_MAX)
    assert book.entries() == []


# Secrets


def test_nobody_else_may_read_it(book: Callbook, path: Path) -> None:
    note(book)
    assert [mode(each) for each in (path, path.parent, path.parent.parent)] == [
        0o600,
        0o700,
        0o700,
    ]
    path.chmod(0o644)
    note(book, 2)
    assert mode(path) == 0o600
    assert all(mode(each) == 0o600 for each in path.parent.iterdir())


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    note(Callbook(tmp_path / "calls.json"))
    assert mode(tmp_path) == 0o755


def test_a_link_stays_one(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    note(Callbook(link))
    assert link.is_symlink()
    assert len(Callbook(path).entries()) == 1


# Where it is


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({"MCP_STREAMS_STATE": "/a/b.json", "XDG_STATE_HOME": "/x"}, "/a/b.json"),
        ({"MCP_STREAMS_STATE": "", "XDG_STATE_HOME": "/x"}, "/x/mcp-streams/calls.json"),
        ({"XDG_STATE_HOME": "x"}, "~/.local/state/mcp-streams/calls.json"),
        ({}, "~/.local/state/mcp-streams/calls.json"),
    ],
)
def test_it_is_where_the_environment_says(environment: dict[str, str], where: str) -> None:
    assert path_of_user(environment) == Path(where).expanduser()


# Trouble


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "no list of calls"),
        (b"\xff\x00", "no list of calls"),
        (b"[" * 100_000, "no list of calls"),
        (b'{"theirs": 1}', "no list of calls"),
        (b'{"version": 1, "calls": [{"name": "build-1"}]}', "no list of calls"),
        (b'{"version": 2, "calls": {}}', "newer version: update mcp-streams"),
    ],
)
def test_what_is_not_ours_is_told_and_left_alone(
    book: Callbook, path: Path, content: bytes, why: str
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for act in (book.entries, lambda: note(book), lambda: book.remove([ticket()])):
        with pytest.raises(CallbookUnusable, match=why) as caught:
            act()
        assert str(path) in str(caught.value)
        assert "MCP_STREAMS_STATE" in str(caught.value)
    assert path.read_bytes() == content


def test_an_empty_file_is_an_empty_list(book: Callbook, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch()
    assert book.entries() == []
    note(book)
    assert len(book.entries()) == 1


def test_what_is_no_file_is_neither_waited_for_nor_replaced(book: Callbook, path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    for act in (book.entries, lambda: note(book)):
        with pytest.raises(CallbookUnusable, match="no regular file"):
            act()
    assert path.is_fifo()


def test_a_place_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    book = Callbook(tmp_path / "file" / "calls.json")
    with pytest.raises(CallbookUnusable, match=r"cannot be used \(Not a directory\)"):
        note(book)


# Several processes at once

HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""

NOTE = """
import sys
from pathlib import Path
from streams.cli.actions.notes import Callbook
from streams.protocol.ticket import Ticket
book = Callbook(Path(sys.argv[1]), lock_s=60)
for number in range(20):
    ticket = Ticket(sys.argv[2], "token", number)
    book.add(ticket, url="ws://h", tool="t", arguments={}, cwd=None, now=0)
    if number % 2:
        book.remove([ticket])
"""


def test_who_keeps_it_locked_is_not_waited_for_for_ever(book: Callbook, path: Path) -> None:
    note(book)
    lock = path.with_name("calls.json.lock")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(CallbookUnusable, match="another process keeps it locked"):
            note(Callbook(path, lock_s=0), 2)
        assert len(book.entries()) == 1, "a reader needs no lock"
        holder.stdin.close()
    note(book, 2)
    assert len(book.entries()) == 2


def test_processes_do_not_lose_each_others_changes(book: Callbook, path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", NOTE, str(path), str(number)])
        for number in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    entries = book.entries()
    assert len(entries) == 40
    assert len({entry.name for entry in entries}) == 40
    assert sorted(each.name for each in path.parent.iterdir()) == ["calls.json", "calls.json.lock"]
