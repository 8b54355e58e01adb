"""The entry of a call in the list, for each way in which the call can end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from streams.cli.actions import notes
from streams.cli.actions.notes import Callbook, Note
from streams.client.call import RunningCall
from streams.errors import (
    CallFailed,
    CallLost,
    CannotConnect,
    ClientError,
    Refusal,
    StreamGone,
    Superseded,
)
from streams.protocol.ticket import Ticket
from tests.rigs.clients import Stepping, connected, counting
from tests.rigs.scripted import Scripted, Stream

URL = "ws://127.0.0.1:1"


@pytest.fixture
def book(callbook_path: Path) -> Callbook:
    return Callbook(callbook_path)


@asynccontextmanager
async def reading(*, is_numbering: bool = True) -> AsyncIterator[RunningCall]:
    """A call of which one message was read and the second has come."""
    server = Scripted() if is_numbering else Scripted(is_numbering=False)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("one", "two")
        await anext(call)
        yield call


def taken(call: RunningCall) -> Note:
    note = Note.of_new(URL, "step", {})
    note.take(call)
    assert note.name == "step-1"
    return note


def positions(book: Callbook) -> list[int | None]:
    """The position of each call in the list."""
    return [entry.ticket.after for entry in book.entries()]


async def test_a_call_is_noted_once(book: Callbook) -> None:
    async with reading() as call:
        note = taken(call)
        await anext(call)
        note.take(call)
        assert positions(book) == [None]


async def test_a_call_that_was_never_announced_is_not_noted(book: Callbook) -> None:
    async with reading(is_numbering=False) as call:
        note = Note.of_new(URL, "step", {})
        note.take(call)
        note.leave(call)
        note.failed(call, CallLost("gone"))
    assert (note.name, book.entries()) == (None, [])


async def test_leaving_notes_how_far_one_was(book: Callbook) -> None:
    async with reading() as call:
        note = Note.of_new(URL, "step", {})
        note.leave(call)
    assert (note.name, positions(book)) == ("step-1", [1])


@pytest.mark.parametrize(
    ("error", "left", "hint"),
    [
        (CannotConnect("nobody"), [1], "To come back to the call: mcp-streams resume step-1"),
        (
            StreamGone("bad", "unreadable"),
            [1],
            "To come back to the call: mcp-streams resume step-1",
        ),
        (
            StreamGone("gone", "messages_gone"),
            [None],
            "To have what is left of it: mcp-streams resume step-1",
        ),
        (Superseded("elsewhere"), [None], None),
        (CallFailed(-32601, "What resume?"), [None], None),
        (StreamGone("gone", "stream_not_found"), [], None),
        (StreamGone("gone", "abandoned"), [], None),
        (StreamGone("gone", "cancelled"), [], None),
        (StreamGone("gone", "delivered"), [], None),
    ],
)
async def test_a_call_is_kept_as_long_as_there_is_something_to_come_back_to(
    book: Callbook, error: ClientError, left: list[int | None], hint: str | None
) -> None:
    async with reading() as call:
        taken(call).failed(call, error)
    assert positions(book) == left
    assert getattr(error, "__notes__", [None]) == [hint]


async def test_an_error_that_is_the_answer_ends_the_call(book: Callbook) -> None:
    async def refuse(stream: Stream) -> None:
        raise Refusal(-32000, "no")

    server = Scripted()
    server.tools["step"] = refuse
    async with connected(server) as client, client.call("step") as call:
        with pytest.raises(CallFailed) as caught:
            await call.result()
        note = taken(call)
        note.failed(call, caught.value)
    assert book.entries() == []


async def test_a_call_of_which_some_messages_are_left_is_kept(book: Callbook) -> None:
    async with reading() as call:
        taken(call)
        ticket = book.entries()[0].ticket
        gone = StreamGone("gone", "messages_gone", earliest=7)
        Note.of_noted(ticket).refused(ticket, gone)
        assert positions(book) == [None]
        Note.of_noted(ticket).skip(msgspec.structs.replace(ticket, after=6))
    assert positions(book) == [6]


async def test_what_is_gone_without_a_position_has_nothing_left(book: Callbook) -> None:
    async with reading() as call:
        taken(call)
        assert call.ticket is not None
        ticket = book.entries()[0].ticket
        Note.of_noted(call.ticket).refused(ticket, StreamGone("gone", "messages_gone"))
    assert book.entries() == []


async def test_a_call_that_is_not_noted_here_stays_so(book: Callbook) -> None:
    async with reading() as call:
        assert call.ticket is not None
        note = Note.of_noted(call.ticket)
        note.take(call)
        note.leave(call)
        note.remove(call)
    assert (note.name, book.entries()) == (None, [])


async def test_what_is_wrong_with_the_file_is_said_once(
    callbook_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbook_path.mkdir(parents=True)
    server = counting()
    async with connected(server) as client, client.call("count", {"n": 1}) as call:
        await call.result()
        note = Note.of_new(URL, "count", {})
        note.take(call)
        note.leave(call)
        note.remove(call)
    said = f"This call is not saved in the list of calls: {callbook_path} is no regular file: "
    assert capsys.readouterr().err == f"{said}name another file with MCP_STREAMS_STATE.\n"


# Names


def test_a_name_leads_to_where_the_call_was_begun(book: Callbook) -> None:
    ticket = Ticket("stream", "token", 1)
    book.add(ticket, url="stdio:serve", tool="t", arguments={}, cwd="/there", now=0)
    assert notes.find("t-1") == notes.Target("stdio:serve", ticket, "/there")
    assert notes.find_at(URL, "t-1") == notes.Target(URL, ticket)
    assert notes.find_at(URL, str(ticket)) == notes.Target(URL, ticket)
    assert notes.ticket_or_id("t-1") == notes.ticket_or_id(str(ticket)) == ticket


def test_an_id_needs_no_file(callbook_path: Path) -> None:
    assert notes.ticket_or_id("id") == "id"
    callbook_path.mkdir(parents=True)
    assert notes.ticket_or_id("id") == "id"


def test_an_unknown_name_is_told_with_those_that_there_are(book: Callbook) -> None:
    for begun in range(31):
        with pytest.raises(ValueError, match="No call is called x") as caught:
            notes.find("x")
        names = [f"t-{number}" for number in range(1, begun + 1)]
        assert str(caught.value).endswith(f"There are: {', '.join(names)}." if names else "empty.")
        ticket = Ticket("stream", "token", begun)
        book.add(ticket, url=URL, tool="t", arguments={}, cwd=None, now=0)
    with pytest.raises(ValueError, match=r"There are: …, t-2, .*, t-31\.$"):
        notes.find("x")


def test_what_may_be_half_a_ticket_is_not_repeated() -> None:
    word = str(Ticket("stream", "t" * 43, 1))[:-2]
    with pytest.raises(ValueError, match="it is no ticket") as caught:
        notes.find_at(URL, word)
    assert word not in str(caught.value)
