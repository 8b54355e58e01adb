"""The pages of a tool for the user of a client: `Client.pages`."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from streams import Call, Server, SyncCall
from streams.client.client import Client
from streams.client.pages import Pages
from streams.errors import CallFailed, CallLost, ClientError, Refusal
from streams.messages import Message
from tests.rigs.clients import Params, at_home, connected, said
from tests.rigs.scripted import Scripted, Stream

Page = dict[str, Any]
BOTH = ("streams", "resumableRequests")
REQUESTS = ("resumableRequests",)


@pytest.fixture(params=[BOTH, REQUESTS, ()], ids=["both", "requests", "none"])
def dialects(request: pytest.FixtureRequest) -> tuple[str, ...]:
    dialects: tuple[str, ...] = request.param
    return dialects


server = Server("paging", resume_min_s=0, resume_max_s=600)


async def rows(call: Call, n: int) -> AsyncIterator[str]:
    """Report progress and yield a page, this many times."""
    for number in range(1, n + 1):
        await call.log("info", number)
        yield f"page {number}"


server.tool(pages=True)(rows)
server.tool(name="rows_ahead", pages=True, pages_ahead=5)(rows)


@server.tool(pages=True)
def rows_of_a_thread(call: SyncCall, n: int) -> Iterator[str]:
    for number in range(1, n + 1):
        yield f"page {number}"


@server.tool(pages=True, page_wait_s=5)
async def slow(call: Call) -> AsyncIterator[str]:
    """Take longer than a call for a page may, ahead of each page and of the end."""
    for number in (1, 2):
        await trio.sleep(12)
        await call.progress(number)
        yield f"page {number}"
    await trio.sleep(12)


@server.tool(pages=True)
async def failing(call: Call) -> AsyncIterator[str]:
    yield "page 1"
    raise ValueError("the tool says no")


@server.tool(pages=True)
async def asking(call: Call) -> AsyncIterator[str]:
    for _ in range(3):
        answer = await call.request("elicitation/create", {"message": "Go on?"})
        yield str(answer["action"])


@server.tool(pages=True)
async def hanging_up(call: Call) -> AsyncIterator[str]:
    """Close the connection ahead of each page."""
    for number in (1, 2, 3):
        await call.disconnect()
        await trio.sleep(3)
        yield f"page {number}"


@server.tool(pages=True)
async def announcing(call: Call) -> AsyncIterator[str]:
    """Send a message, and have no page for a long time."""
    await call.log("info", "it begins")
    await trio.sleep(300)
    yield "page 1"


@server.tool
async def lone(call: Call) -> str:
    return "page 1"


def text(page: Page) -> str:
    return str(page["content"][0]["text"])


def up_to(n: int) -> list[str]:
    return [f"page {number}" for number in range(1, n + 1)]


async def texts(pages: Pages) -> list[str]:
    return [text(page) async for page in pages]


# Our server


@pytest.mark.parametrize("tool", ["rows", "rows_ahead"])
@pytest.mark.parametrize("n", [1, 2, 7])
async def test_all_pages_come_in_order(
    tool: str, n: int, dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:
        pages = client.pages(tool, {"n": n})
        assert pages.token is None
        found = []
        async for page in pages:
            found.append(text(page))
            assert (pages.token is None) == (len(found) == n)
        assert found == up_to(n)
        assert await texts(pages) == []


async def test_the_pages_of_a_thread_come_in_order() -> None:
    """Its speed decides whether the last page is known to be the last."""
    async with at_home(server) as memory, Client(memory.connect) as client:
        pages = client.pages("rows_of_a_thread", {"n": 7})
        assert await texts(pages) == up_to(7)
        assert pages.token is None


async def test_a_first_page_whose_reader_gives_up_again_and_again_is_of_one_run(
    autojump_clock: MockClock,
) -> None:
    async with at_home(server) as memory, Client(memory.connect) as client:
        pages = client.pages("slow")
        found = []
        for _ in range(60):
            with trio.move_on_after(1):
                found.append(text(await anext(pages)))
                break
        assert found + await texts(pages) == up_to(2)
        assert len(await client.poll_all()) <= 1


async def test_a_second_reader_of_pages_is_an_error_and_begins_no_run(
    autojump_clock: MockClock,
) -> None:
    found: list[str] = []

    async def read(pages: Pages) -> None:
        found.extend(await texts(pages))

    async with at_home(server) as memory, Client(memory.connect) as client:
        pages = client.pages("slow")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, pages)
            await trio.sleep(1)
            with pytest.raises(RuntimeError, match="another task reads these pages"):
                await anext(pages)
        assert found == up_to(2)


async def test_a_tool_without_pages_has_one(autojump_clock: MockClock) -> None:
    async with at_home(server) as memory, Client(memory.connect) as client:
        assert await texts(client.pages("lone")) == ["page 1"]


async def test_another_client_goes_on_from_the_token(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory:
        token, found = None, []
        for _ in range(5):
            async with Client(memory.connect, dialects=dialects) as client:
                pages = client.pages("rows", {"n": 5}, token=token)
                found.append(text(await anext(pages)))
                token = pages.token
        assert found == up_to(5)
        assert token is None


async def test_waiting_for_a_page_can_be_given_up_and_begun_again(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:
        pages = client.pages("slow")
        found = [text(await anext(pages))]
        while len(found) < 2:
            with trio.move_on_after(3):
                found.append(text(await anext(pages)))
        assert [*found, *await texts(pages)] == up_to(2)


async def test_what_says_only_that_there_is_nothing_yet_or_nothing_more_is_not_shown(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:
        started = trio.current_time()
        assert await texts(client.pages("slow")) == up_to(2)
        assert started + 36 <= trio.current_time() < started + 40


async def test_a_page_that_says_that_the_tool_failed_is_the_last(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:
        pages = client.pages("failing")
        first, last = [page async for page in pages]
        assert (text(first), first.get("isError", False)) == ("page 1", False)
        assert (text(last), last["isError"]) == ("the tool says no", True)
        assert pages.token is None


async def test_what_comes_between_pages_is_told_to_the_hook(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    heard: list[Message] = []
    async with (
        at_home(server) as memory,
        Client(memory.connect, dialects=dialects, on_notification=heard.append) as client,
    ):
        assert await texts(client.pages("rows", {"n": 4})) == up_to(4)
        assert [said(message) for message in heard] == [1, 2, 3, 4]
        heard.clear()
        assert await texts(client.pages("slow")) == up_to(2)
    assert [message.method for message in heard] == ["notifications/progress"] * 2


async def test_what_the_tool_asks_between_pages_is_answered(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async def answer(params: Params) -> Params:
        return {"action": "accept"}

    answers = {"elicitation/create": answer}
    async with (
        at_home(server) as memory,
        Client(memory.connect, dialects=dialects, answers=answers) as client,
    ):
        assert await texts(client.pages("asking")) == ["accept"] * 3


# Cuts


async def test_a_cut_at_any_byte_loses_no_page_and_repeats_none(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    """Wherever a page is lost on its way, it is asked for again."""
    async with at_home(server) as memory:
        for to_near in range(1, 700, 13):
            async with Client(memory.connect, dialects=dialects) as client:
                pages = client.pages("rows", {"n": 4})
                found = [text(await anext(pages))]
                while pages.token:
                    memory.cables[-1].cut_after(to_near=to_near)
                    found.append(text(await anext(pages)))
                assert found == up_to(4)


async def test_a_request_for_a_page_that_is_lost_is_made_again(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:
        pages = client.pages("rows", {"n": 6})
        found = [text(await anext(pages))]
        while pages.token:
            memory.cables[-1].cut_after(to_far=1)
            found.append(text(await anext(pages)))
            memory.cables[-1].cut()
            if pages.token:
                found.append(text(await anext(pages)))
        assert found == up_to(6)


@pytest.mark.parametrize("dialects", [BOTH, REQUESTS], ids=["both", "requests"])
async def test_the_first_page_survives_a_cut_as_any_call_does(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:

        async def cut_now_and_then() -> None:
            for _ in range(8):
                await trio.sleep(4)
                memory.cables[-1].cut()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut_now_and_then)
            assert await texts(client.pages("slow")) == up_to(2)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("dialects", [BOTH, REQUESTS], ids=["both", "requests"])
async def test_what_the_server_lets_go_of_is_asked_for_again(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:
        assert await texts(client.pages("hanging_up")) == up_to(3)


@pytest.mark.parametrize("dialects", [(), BOTH, REQUESTS], ids=["none", "both", "requests"])
async def test_a_first_page_of_which_nothing_has_come_is_asked_for_again(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:
        first = memory.cables[-1]
        first.cut_after(to_near=1)
        assert await texts(client.pages("slow")) == up_to(2)
        assert memory.cables[-1] is not first


async def test_nobody_comes_back_for_a_first_page_without_a_dialect_once_it_was_begun(
    autojump_clock: MockClock,
) -> None:
    async with at_home(server) as memory:

        def cut(message: Message) -> None:
            assert said(message) == "it begins"
            memory.cables[-1].cut()

        async with Client(memory.connect, dialects=(), on_notification=cut) as client:
            with pytest.raises(CallLost):
                await anext(client.pages("announcing"))
            assert text(await anext(client.pages("lone"))) == "page 1"


# Page tokens that lead nowhere, and servers of another make


async def test_a_token_that_leads_nowhere_is_an_error_with_a_reason(
    dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=dialects) as client:
        pages = client.pages("rows", {"n": 3})
        await anext(pages)
        token = pages.token
        await texts(pages)
        for name, arguments, stale in [
            ("rows", {"n": 3}, token),
            ("rows", {"n": 3}, "garbled"),
            ("rows", {"n": 4}, token),
            ("rows_ahead", {"n": 3}, token),
            ("lone", {}, token),
        ]:
            with pytest.raises(CallFailed) as caught:
                await anext(client.pages(name, arguments, token=stale))
            assert (caught.value.code, caught.value.data) == (-32602, {"reason": "invalid_token"})


def answering(*answers: Any) -> tuple[Scripted, list[Params]]:
    """A server that gives these results, one for each call; it keeps the params of the calls."""
    server = Scripted(is_numbering=False)
    asked: list[Params] = []
    left = list(answers)

    async def tool(stream: Stream) -> Any:
        asked.append(stream.params)
        answer = left.pop(0)
        if isinstance(answer, Refusal):
            raise answer
        return answer

    server.tools["tool"] = tool
    return server, asked


def page(content: str = "", **more: Any) -> Page:
    return {"content": [{"type": "text", "text": content}] if content else []} | more


async def test_a_page_is_asked_for_by_the_same_params_and_its_token() -> None:
    """1003: clients "MUST only mutate the `resumeToken` field of a resumed request"."""
    in_meta = {"mcp-streams/nextResumeToken": "two"}
    server, asked = answering(
        page("a", nextResumeToken="one"),
        page("b", _meta=in_meta),
        page("c", nextResumeToken="three", _meta=in_meta),
        page("d", nextResumeToken=None),
    )
    arguments = {"x": [1]}
    texts = []
    async with connected(server) as client:
        async for each in client.pages("tool", arguments):
            texts.append(text(each))
            arguments["x"].append(2)  # a change by the caller has no effect
    assert texts == ["a", "b", "c", "d"]
    first = asked[0]
    assert first.keys() == {"name", "arguments", "_meta"}
    assert first["_meta"].keys() == {"progressToken", "mcp-streams/idempotencyKey"}
    meta = first["_meta"] | {"mcp-streams/resumeToken": "two"}
    assert asked[1:] == [
        first | {"resumeToken": "one"},
        first | {"_meta": meta},
        first | {"resumeToken": "three"},
    ]


async def test_pages_from_a_token_on_have_no_key_of_a_first_call() -> None:
    server, asked = answering(page("b", nextResumeToken="two"), page("c"))
    async with connected(server) as client:
        pages = client.pages("tool", {"x": 1}, token="one")
        assert [text(each) async for each in pages] == ["b", "c"]
    assert [params["resumeToken"] for params in asked] == ["one", "two"]
    assert asked[0] | {"resumeToken": "two"} == asked[1]
    assert asked[0]["_meta"].keys() == {"progressToken"}


async def test_the_same_token_again_is_no_reason_to_hurry(autojump_clock: MockClock) -> None:
    waiting = page(nextResumeToken="one")
    server, asked = answering(waiting, *[waiting] * 10, page("a"))
    async with connected(server) as client:
        started = trio.current_time()
        assert await texts(client.pages("tool")) == ["a"]
        assert started + 10 <= trio.current_time() < started + 12
    assert len(asked) == 12


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        [],
        "page",
        17,
        {"nextResumeToken": 17},
        {"nextResumeToken": ["one"]},
        {"_meta": "x"},
        {"_meta": {"mcp-streams/nextResumeToken": 17}},
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_page_that_is_none_is_an_error(nonsense: Any, is_first: bool) -> None:
    pages_before = [] if is_first else [page("a", nextResumeToken="one")]
    server, _ = answering(*pages_before, nonsense, page("b"))
    async with connected(server) as client:
        pages = client.pages("tool")
        for _ in pages_before:
            await anext(pages)
        before = pages.token
        with pytest.raises(ClientError, match="page"):
            await anext(pages)
        assert pages.token == before
        assert text(await anext(pages)) == "b"  # it can be asked for again


async def test_an_error_between_pages_is_raised_and_the_token_is_kept() -> None:
    refused = Refusal(-32000, "Out of order.")
    server, _ = answering(page("a", nextResumeToken="one"), refused, page("b"))
    async with connected(server) as client:
        pages = client.pages("tool")
        await anext(pages)
        with pytest.raises(CallFailed, match="Out of order"):
            await anext(pages)
        assert pages.token == "one"
        assert await texts(pages) == ["b"]
