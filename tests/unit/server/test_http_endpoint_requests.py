"""Resumable requests and pages over HTTP, where each response is a connection of its own."""

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server
from streams.keys import Keyring
from streams.limits import Limits
from tests.rigs.server import (
    PLAIN,
    REQUESTS,
    RESIDENT_MAX,
    RESUME_REQUEST,
    Steps,
    is_last,
    next_of,
    open_house,
    page_text,
    reason,
    text_of,
)
from tests.rigs.web import EVENTS, JSON, Answer, Browser, browsing, logged


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    server = Server(
        "tested", resume_max_s=600, announce_after_s=0, limits=Limits(resident_max=request.param)
    )

    @server.tool(pages=True)
    async def count(call: Call, to: int = 3) -> AsyncIterator[str]:
        for number in range(1, to + 1):
            await call.log("info", number)
            yield str(number)

    return server


async def cut_off(browser: Browser) -> dict[str, str]:
    """Begin a call and lose its response. Returns what a client needs to resume it."""
    first = await browser.call(1, "step")
    token = first.events[1][1]["params"]["resumeToken"]
    await first.hang_up()
    return {"resumeToken": token}


def numbers(answer: Answer) -> list[str]:
    """The second part of each event id."""
    return [event_id.split("_")[1] for event_id in answer.ids]


@pytest.mark.parametrize("reply_id", [1, 2])
async def test_the_response_to_a_resume_is_the_original_one_under_the_resumes_id(
    server: Server, steps: Steps, autojump_clock: MockClock, reply_id: int
) -> None:
    async with open_house(server) as house, browsing(house, REQUESTS) as browser:
        token = await cut_off(browser)
        steps.log("a")
        second = await browser.post(reply_id, RESUME_REQUEST, **token)
        steps.finish()
        await wait_all_tasks_blocked()
        assert logged(second) == ["a"]
        final = second.events[-1][1]
        assert (final["id"], text_of(final)) == (reply_id, "done")
        assert "_meta" not in final["result"]
        assert numbers(second) == ["0", "1", "2"]
        assert len({event_id.split("_")[2] for event_id in second.ids}) == 1
        assert second.is_whole


async def test_events_that_are_whole_at_once_keep_their_connection(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, REQUESTS) as browser:
        token = await cut_off(browser)
        steps.log("a")
        long = await browser.post(1, RESUME_REQUEST, **token)
        steps.finish()
        await wait_all_tasks_blocked()
        whole = await browser.post(2, RESUME_REQUEST, **token)
        await wait_all_tasks_blocked()
        assert logged(whole) == logged(long) == ["a"]
        assert long.headers["connection"] == "close"
        assert "connection" not in whole.headers


async def test_a_resume_that_is_cut_goes_on_and_ends_under_the_same_id_even_after_a_crash(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        async with browsing(house, REQUESTS) as browser:
            token = await cut_off(browser)
            steps.log("a", "b")
            await wait_all_tasks_blocked()
            second = await browser.post("r", RESUME_REQUEST, **token, after=1)
            assert logged(second) == ["b"]
            await second.hang_up()
            third = await browser.go_on(second.ids[0])
            assert logged(third) == ["b"]
            await trio.sleep(2)
            session, crashed = browser.session, house.as_after_a_crash()
        (grant,) = (await crashed.sessions())[1]
        assert (grant.takes_over, grant.start, grant.reply_id) == (True, 1, "r")
    async with (
        open_house(server, journal=crashed, keyring=keyring) as house,
        trio.open_nursery() as nursery,
    ):
        browser = Browser(house, nursery, session)
        fourth = await browser.go_on(second.ids[-1])
        ((_, final),) = [event for event in fourth.events if event[1]]
        assert (final["id"], reason(final["error"])) == ("r", "interrupted")
        nursery.cancel_scope.cancel()


async def test_a_resume_in_json_alone_is_answered_with_the_response_alone(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, REQUESTS) as browser:
        token = await cut_off(browser)
        steps.log("a")
        steps.finish()
        answer = await browser.post(2, RESUME_REQUEST, JSON, **token)
        assert (answer.type, answer.json["id"], text_of(answer.json)) == (JSON, 2, "done")


async def test_a_last_event_id_is_a_cursor_for_a_resume(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, REQUESTS) as browser:
        first = await browser.call(1, "step")
        token = first.events[1][1]["params"]["resumeToken"]
        steps.log("a", "b")
        await wait_all_tasks_blocked()
        await first.hang_up()
        message = {"jsonrpc": "2.0", "id": 2, "method": RESUME_REQUEST}
        message["params"] = {"resumeToken": token}
        second = await browser.fetch("POST", message, last_event_id=first.ids[1])
        assert logged(second) == ["b"]


# Pages


async def turned(browser: Browser, id: int, token: str | None = None, accept: str = "") -> Answer:
    turn = {} if token is None else {"resumeToken": token}
    given = {"accept": accept} if accept else {}
    return await browser.post(id, "tools/call", name="count", arguments={}, **turn, **given)


async def test_each_page_is_the_response_to_a_call_of_its_own(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        heard, token = [], None
        for number in (1, 2, 3):
            answer = await turned(browser, number, token)
            await trio.sleep(1)
            assert (answer.type, answer.is_whole) == (EVENTS, True)
            final = answer.events[-1][1]
            assert final["id"] == number
            heard.append((logged(answer), page_text(final["result"])))
            token = None if is_last(final["result"]) else next_of(final["result"])
        assert heard == [([1], "1"), ([2], "2"), ([3], "3")]
        assert token is None


async def test_pages_come_as_plain_json_where_that_is_all_that_is_read(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await turned(browser, 1, accept=JSON)
        await trio.sleep(1)
        assert (first.type, page_text(first.json["result"])) == (JSON, "1")
        second = await turned(browser, 2, next_of(first.json["result"]), accept=JSON)
        await trio.sleep(1)
        assert (second.json["id"], page_text(second.json["result"])) == (2, "2")


async def test_a_page_whose_response_was_cut_goes_on_and_is_the_same(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await turned(browser, 1)
        await trio.sleep(1)
        token = next_of(first.events[-1][1]["result"])
        second = await turned(browser, 2, token)
        await trio.sleep(1)
        again = await browser.go_on(second.ids[0])
        await trio.sleep(1)
        assert again.events[-1] == second.events[-1]
        assert again.events[-1][1]["id"] == 2
        assert (await browser.go_on(second.ids[-1])).status == 405


async def test_a_client_that_is_cut_before_its_first_page_comes_back_by_its_event_id(
    server: Server, autojump_clock: MockClock
) -> None:
    gate = trio.Event()

    @server.tool(pages=True)
    async def slow() -> AsyncIterator[str]:
        await gate.wait()
        yield "1"
        yield "2"

    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.call(1, "slow")
        await first.hang_up()
        gate.set()
        second = await browser.go_on(first.ids[0])
        await trio.sleep(1)
        assert page_text(second.events[-1][1]["result"]) == "1"


async def test_pages_outlive_the_session_that_asked_for_the_first_one(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await turned(browser, 1)
        await trio.sleep(1)
        token = next_of(first.events[-1][1]["result"])
        async with browsing(house, PLAIN) as other:
            second = await turned(other, 1, token)
            await trio.sleep(1)
            assert page_text(second.events[-1][1]["result"]) == "2"


async def test_a_resume_that_is_cancelled_late_does_not_come_back(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """SDKs continue a response that ended without a result, also that of a cancelled request."""
    async with open_house(server) as house, browsing(house, REQUESTS) as browser:
        token = await cut_off(browser)
        steps.log("a")
        in_vain = await browser.post(2, RESUME_REQUEST, **token)
        newer = await browser.post(3, RESUME_REQUEST, **token)
        await browser.tell("notifications/cancelled", requestId=2)
        assert (await browser.go_on(in_vain.ids[0])).status == 405
        steps.finish()
        await wait_all_tasks_blocked()
        final = newer.events[-1][1]
        assert (final["id"], text_of(final)) == (3, "done")
