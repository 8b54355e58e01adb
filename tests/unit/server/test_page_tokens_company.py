"""Page tokens beside newer calls, resumes and crashes."""

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.keys import Keyring
from tests.rigs.pages import begun, counting
from tests.rigs.server import (
    PLAIN,
    REQUESTS,
    RESUME_REQUEST,
    STREAMS,
    is_last,
    next_of,
    open_house,
    page_text,
    reason,
    said,
)


@pytest.fixture
def server() -> Server:
    return counting()


@pytest.mark.parametrize(("reply_id", "is_stopped"), [(1, True), (2, False)])
async def test_cancelling_a_resume_of_pages_stops_the_tool_only_under_the_original_id(
    server: Server, autojump_clock: MockClock, reply_id: int, is_stopped: bool
) -> None:
    stopped = trio.Event()
    gate = trio.Event()

    @server.tool(pages=True)
    async def wait() -> AsyncIterator[str]:
        try:
            await gate.wait()
            yield "1"
        finally:
            stopped.set()

    async with open_house(server) as house:
        first, second = await house.dial(REQUESTS), await house.dial(REQUESTS)
        await first.call(1, "wait")
        token = {"resumeToken": (await first.policy())["resumeToken"]}
        await second.ask(reply_id, RESUME_REQUEST, **token)
        await second.policy()
        await second.tell("notifications/cancelled", requestId=reply_id)
        await wait_all_tasks_blocked()
        assert stopped.is_set() is is_stopped
        gate.set()
        answer = await second.request(3, RESUME_REQUEST, **token)
        assert reason(answer) == "cancelled" if is_stopped else page_text(answer) == "1"


async def test_the_newest_call_for_a_page_wins(server: Server, autojump_clock: MockClock) -> None:
    gate = trio.Event()

    @server.tool(pages=True, page_wait_s=100)
    async def wait() -> AsyncIterator[str]:
        yield "1"
        await gate.wait()
        yield "2"

    async with open_house(server) as house:
        first, second = await house.dial(PLAIN), await house.dial(PLAIN)
        token = next_of(await first.page(1, "wait"))
        turn = {"name": "wait", "arguments": {}, "resumeToken": token}
        await first.ask(2, "tools/call", **turn)
        await wait_all_tasks_blocked()
        await second.ask(3, "tools/call", **turn)
        assert reason((await first.answer(2))["error"]) == "superseded"
        gate.set()
        assert page_text((await second.answer(3))["result"]) == "2"


async def test_after_a_crash_what_is_journaled_is_given_and_then_the_error(
    server: Server, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        _, tokens = await begun(house)
        await trio.sleep(2)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, keyring=keyring) as house:
        talker = await house.dial(PLAIN, "os(0)")
        page = await talker.page(1, "count", tokens[1])
        assert (page_text(page), next_of(page)) == ("3", tokens[2])
        assert reason(await talker.page(2, "count", tokens[0])) == "invalid_token"
        failed = await talker.page(3, "count", tokens[2])
        assert (failed["code"], reason(failed)) == (-32603, "interrupted")
        assert await talker.page(4, "count", tokens[2]) == failed
        await trio.sleep(130)
        assert reason(await talker.page(5, "count", tokens[2])) == "invalid_token"


async def test_tokens_under_an_older_key_stay_valid_after_a_restart(
    server: Server, autojump_clock: MockClock
) -> None:
    old, new = b"1" * 32, b"2" * 32
    async with open_house(server, keyring=Keyring([old])) as house:
        _, tokens = await begun(house)
        await trio.sleep(2)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, keyring=Keyring([new, old])) as house:
        talker = await house.dial(PLAIN, "os(0)")
        page = await talker.page(1, "count", tokens[1])
        assert page_text(page) == "3"
        assert next_of(page) != tokens[2]  # the page token is made with the new key
        for token in (next_of(page), tokens[2]):
            assert reason(await talker.page(2, "count", token)) == "interrupted"


# Clients that come back without a page token


async def test_a_resume_behind_the_page_that_was_sent_last_brings_the_next_one(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(STREAMS)
        stream = await talker.begin(1, "count", to=3)
        first = (await talker.answer(1))["result"]
        heard = await talker.resume(2, stream, after=2)
        second = heard[-2]["result"]
        assert (said(heard), page_text(second)) == ([2], "2")
        third = await talker.page(3, "count", next_of(second), to=3)
        assert (page_text(third), is_last(third)) == ("3", True)
        assert reason(await talker.page(4, "count", next_of(first), to=3)) == "invalid_token"


async def test_a_resume_alone_keeps_the_pages_that_it_passed(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(REQUESTS)
        await talker.call(1, "count")
        token = {"resumeToken": (await talker.policy())["resumeToken"]}
        pages = [(await talker.answer(1))["result"]]
        for after in (2, 4):
            pages.append(await talker.request(after, RESUME_REQUEST, **token, after=after))
        assert list(map(page_text, pages)) == ["1", "2", "3"]
        assert await talker.page(9, "count", next_of(pages[0])) == pages[1]
