"""The status of a call, in words."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from streams.cli.actions import calls
from streams.cli.actions.calls import Finding
from streams.cli.actions.notes import Entry
from streams.client.client import Client
from streams.client.wire import Standing
from streams.errors import Refusal, refusal
from streams.exchange import Channel, ClientChannel
from streams.protocol.ticket import Ticket
from tests.rigs.clients import Params, Stepping, connected
from tests.rigs.scripted import Scripted

URL = "ws://127.0.0.1:1"


def entry(ticket: Ticket, *, name: str = "step-1", url: str = URL) -> Entry:
    return Entry(name, url, "step", 0.0, ticket)


@pytest.mark.parametrize(
    ("status", "pending", "has_request", "has_error", "words"),
    [
        ("live", False, False, False, "running"),
        ("live", True, False, True, "running"),
        ("live", False, True, False, "running, has a question for you"),
        ("completed", True, False, False, "done, result waiting"),
        ("completed", True, False, True, "failed, error waiting"),
        ("completed", False, False, False, "gone (delivered)"),
    ],
)
def test_a_poll_is_put_into_words(
    status: str, pending: bool, has_request: bool, has_error: bool, words: str
) -> None:
    standing = Standing("stream", status, pending, has_request, has_error)
    assert calls.in_words(standing).status == words


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (-5, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3_599, "59 min"),
        (7_300, "2 h"),
        (400_000, "4 d"),
    ],
)
def test_an_age_is_in_the_largest_unit_that_it_fills(seconds: float, age: str) -> None:
    assert calls.age(seconds) == age


class Refusing(Scripted):
    """A server that refuses all polls, or only those with a position."""

    def __init__(self, answer: Refusal, *, only_positions: bool = False) -> None:
        super().__init__()
        self.answer = answer
        self.only_positions = only_positions

    def _standing(self, params: Params) -> Params:
        if "after" in params or not self.only_positions:
            raise self.answer
        return super()._standing(params)


async def status_of(server: Scripted, client: Client) -> Finding:
    """The status of a call of which one message was read."""
    step = Stepping(server)
    step.say("one")
    async with client.call("step") as call:
        await anext(call)
        assert call.ticket is not None
        return await calls.status_of(client, entry(call.ticket))


@pytest.mark.parametrize(
    ("reason", "state", "words"),
    [
        ("stream_not_found", "gone", "gone (not found)"),
        ("abandoned", "gone", "gone (abandoned)"),
        ("cancelled", "gone", "gone (cancelled)"),
    ],
)
async def test_what_is_gone_is_told_from_what_is_not_known(
    reason: str, state: str, words: str
) -> None:
    server = Refusing(refusal(reason))
    async with connected(server) as client:
        assert await status_of(server, client) == Finding(state, words)


async def test_a_server_that_cannot_be_asked_says_nothing_about_its_calls() -> None:
    server = Refusing(Refusal(-32601, "What poll?"))
    async with connected(server) as client:
        found = await status_of(server, client)
    assert found == Finding("unknown", "not known: What poll? (code -32601)")


@pytest.mark.parametrize("reason", ["messages_gone", "cursor_ahead"])
async def test_a_cursor_that_does_not_fit_does_not_make_a_call_unknown(reason: str) -> None:
    server = Refusing(refusal(reason), only_positions=True)
    async with connected(server) as client:
        assert await status_of(server, client) == Finding("running", "running")


# Many servers


@asynccontextmanager
async def silence() -> AsyncIterator[ClientChannel]:
    """A server that never answers."""
    await trio.sleep_forever()
    yield cast(Channel, None)


async def test_servers_are_asked_side_by_side_and_none_for_longer_than_told(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("one")
        await anext(call)
        assert call.ticket is not None
        silent = [entry(call.ticket, name=f"s-{n}", url=f"ws://{n}") for n in range(40)]
        answering = [entry(call.ticket, name=name) for name in ("step-1", "step-2")]
        begun_at = trio.current_time()
        found = await calls.ask_all(
            [*silent, *answering],
            5.0,
            lambda url, _: server.memory.connect if url == URL else silence,
        )
        assert trio.current_time() - begun_at <= -(-41 // calls.SERVERS_AT_ONCE) * 5
    assert [found[each.name].status for each in answering] == ["running", "running"]
    assert {found[each.name].status for each in silent} == {
        "cannot be reached: no answer within 5 s"
    }


async def test_who_is_not_there_is_told_with_the_reason() -> None:
    @asynccontextmanager
    async def refuse() -> AsyncIterator[ClientChannel]:
        await trio.lowlevel.checkpoint()
        raise OSError("nobody here")
        yield

    ticket = Ticket("stream", "token", 1)
    found = await calls.ask_all([entry(ticket)], 5.0, lambda *_: refuse)
    assert found == {"step-1": Finding("unreachable", "cannot be reached: nobody here")}
    found = await calls.ask_all([entry(ticket, url="ftp://x")], 5.0)
    assert found["step-1"].status.startswith("cannot be reached: cannot dial 'ftp://x'")


def test_a_table_takes_words_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["b-1", "[bold]b[/]", "3 min", "cannot be reached: :100:"]
    for show in (calls.print_aligned, calls.print_to_terminal):
        show([cells])
        head, line = capsys.readouterr().out.splitlines()
        assert head.split() == list(calls.COLUMNS)
        assert line.split("  ")[0] == "b-1"
        assert all(cell in line for cell in cells)
