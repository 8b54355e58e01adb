"""Streamable HTTP on the engine with a mock clock; `tests/wire` has the rest."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Limits, Server
from streams.errors import JournalUnusable
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
from tests.rigs.troubled import Troubled
from tests.rigs.web import EVENTS, JSON, LINES, browsing, logged


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    return Server(
        "tested",
        resume_min_s=20,
        resume_max_s=600,
        announce_after_s=0,
        limits=Limits(resident_max=request.param),
    )


# Responses


async def test_a_call_that_has_something_to_say_is_answered_with_events(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        answer = await browser.call(1, "step")
        assert (answer.status, answer.type, logged(answer)) == (200, EVENTS, [])
        key, seq = answer.ids[0].split("_")
        assert seq == "0"
        assert b"retry: 15000\n" in answer.body, "stock clients take a longer wait for a death"
        steps.log("a", "b")
        steps.finish()
        await wait_all_tasks_blocked()
        assert logged(answer) == ["a", "b"]
        assert answer.ids == [f"{key}_{seq}" for seq in range(4)]
        assert text_of(answer.events[-1][1]) == "done"
        assert answer.is_whole


async def test_a_server_that_announces_every_call_announces_one_that_is_over_at_once(
    server: Server, autojump_clock: MockClock
) -> None:
    @server.tool
    async def immediate() -> str:
        return "done"

    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        answer = await browser.call(1, "immediate")
        await wait_all_tasks_blocked()
        assert answer.type == EVENTS
        assert answer.ids[0].endswith("_0")
        assert text_of(answer.events[-1][1]) == "done"


async def test_a_client_that_reads_json_alone_is_given_the_response_alone(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, STREAMS) as browser:
        answer = await browser.call(1, "step", JSON)
        assert answer.status == 0
        steps.log("a")
        steps.finish()
        await wait_all_tasks_blocked()
        assert (answer.status, answer.type, text_of(answer.json)) == (200, JSON, "done")


async def test_nobody_can_come_back_for_a_lone_response(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, STREAMS) as browser:
        answer = await browser.call(1, "step", JSON)
        await answer.hang_up()
        await wait_all_tasks_blocked()
        assert steps.was_cancelled
        statuses = (await browser.post(2, "stream/poll/all")).json["result"]["statuses"]
        assert statuses == []


@pytest.mark.parametrize("accept", [EVENTS, LINES])
async def test_a_silent_response_shows_signs_of_life(
    server: Server, steps: Steps, autojump_clock: MockClock, accept: str
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        answer = await browser.call(1, "step", accept)
        before = answer.body
        await trio.sleep(16)
        assert answer.body == before + (b":\n\n" if accept == EVENTS else b"\n")


async def test_a_shutdown_says_so_to_who_was_told_nothing(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        answer = await browser.call(1, "step", JSON)
        await house.running.engine.shut_down()
        assert (answer.status, reason(answer.json["error"])) == (200, "interrupted")


async def test_a_resume_in_json_alone_has_the_response_inside(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    positions = {"positions": True, "replayResponse": True}
    capabilities = {"experimental": {"mcp-streams/v1": positions}}
    async with open_house(server) as house, browsing(house, capabilities) as browser:
        first = await browser.call(1, "step")
        stream = first.events[1][1]["params"]["stream"]["streamId"]
        await first.hang_up()
        resumed = await browser.post(2, "stream/resume", JSON, streamId=stream)
        steps.finish()
        await wait_all_tasks_blocked()
        assert resumed.json["id"] == 2
        assert text_of(resumed.json["result"]["_meta"]["mcp-streams/response"]) == "done"


async def test_a_call_can_be_cancelled_while_its_response_is_cut(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.call(1, "step")
        await first.hang_up()
        async with browsing(house, PLAIN) as other:
            await other.tell("notifications/cancelled", requestId=1)
            assert not steps.was_cancelled
        assert (await browser.tell("notifications/cancelled", requestId=1)).status == 202
        await steps.is_over.wait()
        assert steps.was_cancelled


# Resuming a response


async def test_a_response_goes_on_where_it_was_cut(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.call(1, "step")
        steps.log("a", "b")
        await wait_all_tasks_blocked()
        await first.hang_up()
        second = await browser.go_on(first.ids[1])
        steps.finish()
        await wait_all_tasks_blocked()
        assert second.ids == [first.ids[1], *first.ids[2:], first.ids[0][:-1] + "3"]
        assert logged(second) == ["b"]
        assert text_of(second.events[-1][1]) == "done"
        nothing_left = await browser.go_on(second.ids[-1])
        assert (nothing_left.status, nothing_left.headers["allow"]) == (405, "POST, GET, DELETE")


async def test_a_response_that_goes_on_elsewhere_ends_without_a_word(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.call(1, "step")
        before = first.body
        second = await browser.go_on(first.ids[0])
        assert (first.is_whole, first.body) == (True, before)
        steps.finish()
        await wait_all_tasks_blocked()
        assert text_of(second.events[-1][1]) == "done"


async def test_a_resumes_own_response_goes_on_under_its_own_id(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, EXTENDED) as browser:
        first = await browser.call(1, "step")
        stream = first.events[1][1]["params"]["stream"]
        steps.log("a")
        await wait_all_tasks_blocked()
        await first.hang_up()
        second = await browser.post(2, "stream/resume", streamId=stream["streamId"])
        assert logged(second) == ["a"]
        await second.hang_up()
        third = await browser.go_on(second.ids[-1])
        steps.finish()
        await wait_all_tasks_blocked()
        reply = third.events[-1][1]
        assert reply["id"] == 2
        assert text_of(reply["result"]["_meta"]["mcp-streams/response"]) == "done"
        assert third.ids == [second.ids[-1], second.ids[-1].replace("_1_", "_2_")]


async def test_who_comes_back_too_late_is_told_under_the_id_that_waits(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.call("x", "step")
        await first.hang_up()
        await trio.sleep(605)
        late = await browser.go_on(first.ids[0])
        assert (late.status, late.is_whole) == (200, True)
        ((event_id, message),) = late.events
        assert event_id.startswith(first.ids[0])
        assert (message["id"], reason(message["error"])) == ("x", "abandoned")
        assert (await browser.go_on(event_id)).status == 405, "nothing is left to say"


async def test_coming_back_puts_off_the_end(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.call(1, "step")
        await first.hang_up()
        for _ in range(3):
            await trio.sleep(500)
            again = await browser.go_on(first.ids[0])
            await again.hang_up()
        assert not steps.was_cancelled


@pytest.mark.parametrize("event_id", ["", "x", "0" * 32 + "_1", "{key}_9", "{key}_0_no-grant"])
async def test_an_event_id_of_nobody_is_a_bad_request(
    server: Server, steps: Steps, autojump_clock: MockClock, event_id: str
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.call(1, "step")
        key = first.ids[0].partition("_")[0]
        assert (await browser.go_on(event_id.format(key=key))).status == 400


# Failures


async def test_a_journal_that_cannot_be_read_ends_the_server(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    journal = Troubled()

    async def read() -> None:
        async with open_house(server, journal=journal) as house, browsing(house, PLAIN) as browser:
            await browser.call(1, "step")
            journal.read_trouble = JournalUnusable("gone")
            steps.log("a")
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as ended:
        await read()
    assert ended.group_contains(JournalUnusable)
