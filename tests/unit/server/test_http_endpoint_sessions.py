"""Sessions over HTTP with a mock clock: their state and their end."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.keys import Keyring
from streams.limits import DAY_S, Limits
from streams.turns import LARGE_BYTES
from tests.rigs.server import (
    EXTENDED,
    PLAIN,
    RESIDENT_MAX,
    STREAMS,
    Steps,
    open_house,
    reason,
    text_of,
)
from tests.rigs.web import EVENTS, Browser, browsing, logged


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    return Server(
        "tested",
        resume_min_s=20,
        resume_max_s=600,
        announce_after_s=0,
        limits=Limits(resident_max=request.param, sessions_max=3),
    )


async def test_a_session_and_its_responses_survive_a_crash(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house, browsing(house, EXTENDED) as browser:
        await browser.post(9, "logging/setLevel", level="warning")
        first = await browser.call(1, "step")
        stream = first.events[1][1]["params"]["stream"]["streamId"]
        await first.hang_up()
        second = await browser.post("2", "stream/resume", streamId=stream)
        crashed, session = house.as_after_a_crash(), browser.session
    async with (
        open_house(server, journal=crashed, keyring=keyring) as house,
        trio.open_nursery() as nursery,
    ):
        browser = Browser(house, nursery, session)
        third = await browser.go_on(second.ids[0])
        reply = third.events[-1][1]
        assert reply["id"] == "2"
        response = reply["result"]["_meta"]["mcp-streams/response"]
        assert (response["id"], reason(response["error"])) == (1, "interrupted")
        again = await browser.call(5, "step")
        steps.log("not as bad as a warning")
        steps.finish()
        await wait_all_tasks_blocked()
        assert logged(again) == []
        nursery.cancel_scope.cancel()


async def test_event_ids_under_an_older_key_stay_valid(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    older, newer = b"o" * 32, b"n" * 32
    async with (
        open_house(server, keyring=Keyring([older])) as house,
        browsing(house, PLAIN) as browser,
    ):
        first = await browser.call(1, "step")
        steps.finish()
        await wait_all_tasks_blocked()
        crashed, session = house.as_after_a_crash(), browser.session
    async with (
        open_house(server, journal=crashed, keyring=Keyring([newer, older])) as house,
        trio.open_nursery() as nursery,
    ):
        browser = Browser(house, nursery, session)
        second = await browser.go_on(first.ids[0])
        assert text_of(second.events[-1][1]) == "done"
        assert (await browser.go_on(second.ids[-1])).status == 405
        nursery.cancel_scope.cancel()


async def test_event_ids_stay_valid_when_a_running_server_gets_a_newer_key(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    older, newer = b"o" * 32, b"n" * 32
    keyring = Keyring([older])
    async with (
        open_house(server, keyring=keyring) as house,
        browsing(house, EXTENDED) as browser,
    ):
        first = await browser.call(1, "step")
        stream = first.events[1][1]["params"]["stream"]["streamId"]
        keyring.change_to(Keyring([newer, older]))
        await house.running.engine.use_new_keys()
        second = await browser.post(2, "stream/resume", streamId=stream)
        third = await browser.go_on(first.ids[0])
        steps.finish()
        await wait_all_tasks_blocked()
        assert second.ids[0].partition("_")[0] != first.ids[0].partition("_")[0]
        [_, _, (_, answer), _] = third.events
        assert text_of(answer) == "done"


async def test_a_session_ends_after_the_keys_of_its_event_ids_were_removed(
    autojump_clock: MockClock,
) -> None:
    limits = Limits(streams_per_principal_max=1)
    server = Server("tested", announce_after_s=0, limits=limits)
    steps = Steps(server)
    keyring = Keyring([b"o" * 32])
    async with open_house(server, keyring=keyring) as house, browsing(house, PLAIN) as browser:
        await browser.call(1, "step")
        steps.finish()
        await wait_all_tasks_blocked()
        keyring.change_to(Keyring([b"n" * 32]))
        await house.running.engine.use_new_keys()
        await browser.call(2, "step")  # makes the server forget the first
        assert (await browser.fetch("DELETE")).status == 200
        assert (await browser.post(3, "ping")).status == 404


async def test_a_deleted_session_ends_what_nobody_has_a_token_for(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        answer = await browser.call(1, "step")
        standing = await browser.fetch("GET", accept=EVENTS)
        assert (await browser.fetch("DELETE")).status == 200
        assert steps.was_cancelled
        assert (answer.is_whole, standing.is_whole) == (True, True)
        assert (await browser.post(2, "ping")).status == 404


async def test_streams_with_tokens_outlive_their_session(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, STREAMS) as browser:
        answer = await browser.call(1, "step")
        stream = answer.events[1][1]["params"]["stream"]
        await browser.fetch("DELETE")
        assert not steps.was_cancelled
        async with browsing(house, EXTENDED) as other:
            named = {name: stream[name] for name in ("streamId", "resumeToken")}
            resumed = await other.post(2, "stream/resume", **named)
            steps.finish()
            await wait_all_tasks_blocked()
            reply = resumed.events[-1][1]
            assert text_of(reply["result"]["_meta"]["mcp-streams/response"]) == "done"


async def test_a_session_that_nobody_uses_is_ended_for_a_new_one(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, trio.open_nursery() as nursery:
        browsers = [Browser(house, nursery) for _ in range(3)]
        for browser in browsers:
            await browser.greet(PLAIN)
        await browsers[0].call(1, "step")
        newest = Browser(house, nursery)
        await newest.greet(PLAIN)
        statuses = [(await each.post(2, "ping")).status for each in [*browsers, newest]]
        assert statuses == [200, 404, 200, 200]
        nursery.cancel_scope.cancel()


async def test_there_is_no_room_where_all_sessions_are_at_work(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, trio.open_nursery() as nursery:
        for _ in range(3):
            browser = Browser(house, nursery)
            await browser.greet(PLAIN)
            await browser.call(1, "step")
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}}
        refused = await Browser(house, nursery).post(7, "initialize", **hello)
        assert (refused.status, refused.json["id"]) == (503, 7)
        nursery.cancel_scope.cancel()


async def test_a_session_ends_a_day_after_it_was_used_last(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        await trio.sleep(DAY_S - 1)
        assert (await browser.post(1, "ping")).status == 200
        await trio.sleep(DAY_S + 1)
        assert (await browser.post(2, "ping")).status == 404


async def test_what_an_idle_session_had_begun_ends_with_it(autojump_clock: MockClock) -> None:
    server = Server("tested", resume_max_s=2 * DAY_S)
    steps = Steps(server)
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        await (await browser.call(1, "step")).hang_up()
        await trio.sleep(DAY_S + 1)
        assert not steps.was_cancelled
        assert (await browser.post(2, "ping")).status == 404
        assert steps.was_cancelled


async def test_a_session_whose_client_stands_by_is_not_idle(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        standing = await browser.fetch("GET", accept=EVENTS)
        await trio.sleep(DAY_S + 1)
        assert (await browser.post(1, "ping")).status == 200
        await standing.hang_up()
        await trio.sleep(DAY_S + 1)
        assert (await browser.post(2, "ping")).status == 404


async def test_of_one_stream_the_latest_responses_can_go_on(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, STREAMS) as browser:
        first = await browser.call(1, "step")
        stream = first.events[1][1]["params"]["stream"]["streamId"]
        await first.hang_up()
        resumed = []
        for number in range(2, 20):
            resumed.append(await browser.post(number, "stream/resume", streamId=stream))
            await resumed[-1].hang_up()
        statuses = [(await browser.go_on(each.ids[0])).status for each in resumed]
        assert statuses == [400, 400, *[200] * 16]


async def test_a_request_that_waits_while_its_session_ends_opens_no_other_conversation(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested")

    @server.tool
    async def echo(text: str) -> str:
        return text

    call = {"name": "echo", "arguments": {"text": "x" * 2 * LARGE_BYTES}}
    async with open_house(server) as house:
        for turns in range(10):
            async with browsing(house, PLAIN) as browser:
                browser.ask(
                    "POST", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
                )
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                browser.ask("DELETE")
                await trio.sleep(10)
        assert not house.running._guests._guests
