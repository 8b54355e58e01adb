"""Our client with servers that know the page of a proposal and no more (`page_server`)."""

import json
from typing import Any

import pytest
import trio

from streams import Client, Ticket
from streams.client.call import RunningCall
from streams.errors import CallLost
from tests.rigs.command import run
from tests.wire.page_server import CREATE, PageServer, Reply, notification
from tests.wire.raw import DEADLINE_S
from transports import dial

POLICY = "notifications/requests/resumePolicy"


@pytest.fixture(params=["ws", "http", "stdio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def read(call: RunningCall) -> tuple[list[int], str]:
    """A call's messages and its result."""
    with trio.fail_after(DEADLINE_S):
        seen = [json.loads(bytes(message.params))["data"]["n"] async for message in call]
        return seen, (await call.result())["content"][0]["text"]


async def counted(client: Client, n: int) -> tuple[list[int], str]:
    async with client.call("count", {"n": n}) as call:
        return await read(call)


def resumed(server: PageServer) -> list[Any]:
    """The params of all resumes."""
    return [each["params"] for each in server.asked if each.get("method") == "stream/resume"]


@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("reply", ["last", "first", "never"])
async def test_the_pages_own_announcement_is_enough_to_survive_three_cuts(
    kind: str, is_flat: bool, reply: Reply
) -> None:
    """W§2: "A client reads announcements without `requestId` or token too (the page's own example
    has neither): with one unannounced call in flight it is that call's". The page shows no reply to
    a resume, so it may come at any time, or not at all."""
    server = PageServer(is_flat=is_flat, reply=reply, cuts=(0, 2, 6))
    with server.serving():
        async with Client(dial(server.urls[kind])) as client:
            assert await counted(client, 6) == ([1, 2, 3, 4, 5, 6], "counted 6")
    assert len(resumed(server)) == 3
    assert all(params.keys() == {"streamId"} for params in resumed(server))


async def test_a_half_open_connection_loses_nothing(kind: str) -> None:
    """The client leaves a server that is silent and answers no ping, and resumes over a new
    connection.
    """
    server = PageServer(cuts=(1, 5), mutes=(3,))
    with server.serving():
        async with Client(dial(server.urls[kind]), silence_s=1) as client:
            assert await counted(client, 6) == ([1, 2, 3, 4, 5, 6], "counted 6")
    assert len(resumed(server)) >= 3


async def test_a_page_that_does_not_come_is_asked_for_again(kind: str) -> None:
    server = PageServer()
    server.mute_calls = 1
    with server.serving(), trio.fail_after(DEADLINE_S):
        async with Client(dial(server.urls[kind]), silence_s=1) as client:
            pages = [page["content"][0]["text"] async for page in client.pages("rows", {"n": 4})]
    assert pages == ["page 1", "page 2", "page 3", "page 4"]


@pytest.mark.parametrize("reply", ["last", "first", "never"])
async def test_a_reply_that_does_not_come_last_leaves_the_next_call_alone(reply: Reply) -> None:
    """A response may end without a reply to its resume: the stream is over, and no other call."""
    server = PageServer(reply=reply, cuts=(2,))
    with server.serving():
        async with Client(dial(server.urls["http"])) as client:
            for n in (3, 2, 1):
                assert await counted(client, n) == (list(range(1, n + 1)), f"counted {n}")
    assert server.methods().count("initialize") == 2, "once more for the cut, and no other time"


async def test_one_call_after_another_is_announced(kind: str) -> None:
    server = PageServer(cuts=(1, 1, 3))
    with server.serving():
        async with Client(dial(server.urls[kind])) as client:
            for n in (2, 3, 1):
                assert await counted(client, n) == (list(range(1, n + 1)), f"counted {n}")
    assert len({params["streamId"] for params in resumed(server)}) == 2


async def test_a_ticket_without_a_token_leads_back(kind: str) -> None:
    """W§2: "`streamId` alone": another client polls and resumes by it, and so does the command."""
    server = PageServer(cuts=(2, 2))
    with server.serving():
        tickets = []
        for _ in range(2):
            async with (
                Client(dial(server.urls[kind])) as client,
                client.call("count", {"n": 4}) as call,
            ):
                await anext(call)
                assert call.ticket is not None
                tickets.append(Ticket.parse(str(call.ticket)))
        assert [ticket.token for ticket in tickets] == ["", ""]
        async with Client(dial(server.urls[kind])) as client:
            standing = await client.poll(tickets[0])
            assert standing == await client.poll(tickets[0].stream)
            assert (standing.stream_id, standing.status) == (tickets[0].stream, "live")
            unsent = list(range(server.sent(tickets[0].stream) + 1, 5))  # the second may be
            async with client.resume(tickets[0]) as call:
                assert await read(call) == (unsent, "counted 4")

        def by_command() -> None:
            where = (server.urls[kind], str(tickets[1]))
            assert tickets[1].stream in run("poll", *where).stdout
            assert run("resume", *where).stdout == "counted 4\n"

        await trio.to_thread.run_sync(by_command)


async def test_the_command_survives_cuts_by_it(kind: str) -> None:
    server = PageServer(cuts=(1, 2, 3))
    with server.serving():
        done = await trio.to_thread.run_sync(run, "call", server.urls[kind], "count", "n:=3")
    assert (done.returncode, done.stdout) == (0, "counted 3\n")
    assert len(resumed(server)) == 3


def stream(**fields: Any) -> dict[str, Any]:
    return notification(CREATE, {"stream": {"streamId": "a stream"} | fields})


GARBAGE = [
    *(notification(method, params) for method in (CREATE, POLICY) for params in ({}, [], 5, None)),
    *(notification(CREATE, {"stream": value}) for value in ({}, [], "x", 5, {"streamId": ""})),
    *(stream(streamId=value) for value in (None, 5, {}, ["x"])),
    *(stream(requestId=value) for value in (1.5, True, {}, [1])),
    *(stream(resumeToken=value) for value in (5, {}, True)),
    *(stream(resumeInterval=value) for value in (5, "5", [1, 2], {"min": "5"}, {"max": []})),
    stream(resumeInterval={"min": -1}),
    stream(requestId="of no call"),
    notification(POLICY, {"requestId": {}, "resumeToken": "t"}),
    notification(POLICY, {"resumeToken": ""}),
    notification(POLICY, {"resumeToken": "t", "minWait": "soon"}),
    notification("notifications/stream/end", None),
    notification("notifications/stream/end", {"streamId": 5}),
    notification("notifications/stream/end", {"streamId": "another"}),
]


async def test_an_announcement_that_cannot_be_used_ends_nothing(kind: str) -> None:
    """W§2: "an announcement that cannot be used never ends a connection"."""
    server = PageServer(before=tuple(GARBAGE), cuts=(2,))
    with server.serving():
        async with Client(dial(server.urls[kind])) as client:
            assert await counted(client, 3) == ([1, 2, 3], "counted 3")
    assert server.methods().count("initialize") == 2, "for the one cut"


@pytest.mark.parametrize("kind", ["ws", "stdio"])
async def test_it_is_not_guessed_whose_an_announcement_is(kind: str) -> None:
    """W§2: "else it is logged and ignored": a call that was not announced is lost with its
    connection, and no other call takes its announcement."""
    server = PageServer(is_waiting=True)
    with server.serving():
        async with (
            Client(dial(server.urls[kind])) as client,
            client.call("count", {"n": 2}) as one,
            client.call("count", {"n": 2}) as two,
        ):
            await client.ping()
            server.announce()
            await client.ping()
            assert (one.ticket, two.ticket) == (None, None)
            server.is_to_cut = True
            await client.ping()
            for call in (one, two):
                with pytest.raises(CallLost), trio.fail_after(DEADLINE_S):
                    await call.result()
    assert not resumed(server)


@pytest.mark.parametrize("place", ["params", "_meta"])
async def test_between_pages_nothing_changes_but_the_token(kind: str, place: Any) -> None:
    """1003: "MUST only mutate the `resumeToken` field of a resumed request"; W§3: "the token goes
    to `_meta` only where it came in `_meta` alone"."""
    server = PageServer(token_place=place)
    with server.serving():
        async with Client(dial(server.urls[kind])) as client:
            arguments = {"b": 1.0, "a": {"é": [None, 10**17]}}
            pages = [page["content"][0]["text"] async for page in client.pages("rows", arguments)]
    assert pages == ["page 1", "page 2", "page 3", "page 4"]
    calls = [raw for raw in server.raw if b"tools/call" in raw]
    first = calls[0].partition(b'"params":')[2].removesuffix(b"}").removesuffix(b"}")
    if place == "params":
        for number, raw in enumerate(calls[1:], 2):
            assert raw.endswith(first + b',"resumeToken":"%d"}}' % number)
