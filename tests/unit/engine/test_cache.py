"""Streams that are evicted from memory: a client that resumes them does not notice."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.engine.stream import ACK_WAIT_S
from streams.errors import Unavailable
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.limits import Limits
from tests.rigs.evicting import evicted, idle, in_memory, serving
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    REQUESTS,
    RESUME_REQUEST,
    STATUS_OF_REQUEST,
    STREAMS,
    House,
    Json,
    Steps,
    named,
    open_house,
    reason,
    said,
    text_of,
    with_token,
)
from tests.rigs.troubled import Troubled
from tests.rigs.web import browsing, logged

# Which streams stay


async def test_those_that_were_used_last_stay_in_memory(autojump_clock: MockClock) -> None:
    server, steps = serving(resident_max=2)
    async with open_house(server) as house:
        told = await idle(house, steps, 4)
        ids = [stream["streamId"] for stream in told]
        assert (in_memory(house), evicted(house)) == (ids[2:], 2)
        talker = await house.dial()
        await talker.poll(1, told[2])
        await talker.poll(2, told[0])
        await wait_all_tasks_blocked()
        assert (sorted(in_memory(house)), evicted(house)) == (sorted([ids[2], ids[0]]), 2)


async def test_what_runs_or_is_followed_stays_in_memory(autojump_clock: MockClock) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        await talker.leave()
        assert in_memory(house) == [stream["streamId"]]
        steps.finish()
        await trio.sleep(2)
        assert in_memory(house) == []


async def test_to_be_polled_is_no_confirmation_to_wait_for(autojump_clock: MockClock) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        talker, poller = await house.dial(POSITIONS), await house.dial()
        stream = await talker.begin(1, "step")
        steps.finish()
        await talker.answer(1)
        await talker.leave()
        for n in range(int(ACK_WAIT_S) + 4):
            await poller.poll(n, stream)
            await poller.request(100 + n, "stream/poll/all")
            await trio.sleep(1)
        assert (in_memory(house), evicted(house)) == ([], 1)


async def test_what_a_client_may_yet_confirm_stays_in_memory(autojump_clock: MockClock) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        talker = await house.dial(POSITIONS)
        streams = []
        for n in range(2):
            streams.append(await talker.begin(n, "step"))
            steps.finish()
            await talker.answer(n)
        await trio.sleep(ACK_WAIT_S - 2)
        assert len(in_memory(house)) == 2
        await talker.tell("notifications/stream/ack", **named(streams[0]), seq=1)
        await trio.sleep(5)
        assert (in_memory(house), evicted(house)) == ([], 2)
        statuses = (await talker.request(9, "stream/poll/all"))["statuses"]
        assert [status["streamId"] for status in statuses] == [streams[1]["streamId"]]


async def test_what_a_sign_of_life_may_yet_prove_stays_in_memory(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        steps.finish()
        await talker.answer(1)
        await trio.sleep(100)
        assert in_memory(house) == [stream["streamId"]]
        await trio.sleep(50)
        assert await talker.request(2, "ping") == {}  # by now it is believed
        await trio.sleep(5)
        assert in_memory(house) == []
        assert not (await talker.poll(3, stream))["pendingMessages"]


async def test_streams_with_pages_stay_in_memory(autojump_clock: MockClock) -> None:
    server = Server("tested", limits=Limits(resident_max=0))
    Steps(server, pages=False)

    @server.tool(pages=True)
    async def count() -> Any:
        for number in range(3):
            yield str(number)

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.page(1, "count")
        await talker.leave()
        await trio.sleep(5)
        assert (len(in_memory(house)), evicted(house)) == (1, 0)


async def test_a_client_that_comes_during_an_eviction_stops_it(autojump_clock: MockClock) -> None:
    journal = Troubled()
    server, steps = serving(resident_max=1)
    async with open_house(server, journal=journal) as house:
        first, second = await idle(house, steps, 2)
        await trio.sleep(2)
        journal.hold()
        talker = await house.dial()
        await talker.poll(1, first)  # the other one is to leave now
        await wait_all_tasks_blocked()
        heard = await talker.resume(2, second)
        assert said(heard) == ["of 1"]
        journal.let_go()
        await trio.sleep(2)
        assert second["streamId"] in in_memory(house)


# How they come back


async def test_an_evicted_stream_is_resumed_by_its_maker_and_by_its_token(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        first, second, third = await idle(house, steps, 3)
        maker = await house.dial()
        assert said(await maker.resume(5, first)) == ["of 0"]
        bob = await house.dial(STREAMS | REQUESTS, "bob")
        assert said(await bob.resume(5, second, **with_token(second))) == ["of 1"]
        status = await bob.request(6, STATUS_OF_REQUEST, requestId=2, **with_token(third))
        assert (status["status"], status["hasPendingMessage"]) == ("completed", True)
        await bob.ask(7, RESUME_REQUEST, **with_token(third))
        answer = await bob.answer(7)
        assert text_of(answer) == "done 2"


async def test_a_stranger_learns_nothing_of_an_evicted_stream(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        (stream,) = await idle(house, steps)
        bob = await house.dial(STREAMS | REQUESTS, "bob")
        wrong = "x" * 43
        asked = [
            await bob.poll(1, stream),
            await bob.poll(2, stream, resumeToken=wrong),
            await bob.request(3, RESUME_REQUEST, resumeToken=wrong),
            await bob.poll(4, "nobody's"),
        ]
        assert [reason(each) for each in asked] == ["stream_not_found"] * 4
        assert len({str(each) for each in asked}) == 1


async def test_a_poll_of_all_goes_through_evicted_streams_and_others(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving(resident_max=40)
    async with open_house(server) as house:
        told = await idle(house, steps, 250)
        await idle(house, steps, 5, principal="bob")
        talker = await house.dial()
        for n in reversed(range(0, 250, 7)):
            await talker.poll(f"p{n}", told[n])  # some are in memory again
        await wait_all_tasks_blocked()
        ids: list[str] = []
        page: Json = {"nextCursor": "after-0"}
        while "nextCursor" in page:
            page = await talker.request(
                f"a{len(ids)}", "stream/poll/all", cursor=page["nextCursor"]
            )
            assert len(page["statuses"]) <= 100
            ids += [status["streamId"] for status in page["statuses"]]
            assert all(status["pendingMessages"] for status in page["statuses"])
        assert ids == [stream["streamId"] for stream in told]


async def test_two_clients_that_come_at_once_find_the_same_stream(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        (stream,) = await idle(house, steps)
        one, two = await house.dial(), await house.dial()
        await one.ask(1, "stream/resume", **named(stream))
        await two.ask(2, "stream/resume", **named(stream))
        replies = [await one.answer(1), await two.answer(2)]
        ended = [reply["result"]["_meta"]["mcp-streams/ended"] for reply in replies]
        assert "completed" in ended
        assert set(ended) <= {"completed", "superseded"}  # whether one is quicker is open
        assert evicted(house) + len(in_memory(house)) == 1


async def test_what_is_forgotten_is_not_found_though_the_journal_still_has_it(
    autojump_clock: MockClock,
) -> None:
    journal = Troubled()
    server, steps = serving(streams_per_principal_max=1)
    async with open_house(server, journal=journal) as house:
        talker = await house.dial(STREAMS)
        stream = await talker.begin(1, "step")
        steps.finish()
        await talker.answer(1)
        await talker.leave()
        again = await house.dial()
        journal.hold()
        await again.ask(2, "tools/call", name="step")
        assert reason(await again.poll(3, stream)) == "stream_not_found"
        listed = (await again.request(4, "stream/poll/all"))["statuses"]
        assert stream["streamId"] not in [status["streamId"] for status in listed]
        journal.let_go()
        await again.announced()
        assert await journal.find(stream["streamId"]) is None


async def test_a_journal_that_cannot_be_read_is_no_lost_stream(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Troubled()
    server, steps = serving()

    async def busy(*_: object) -> None:
        raise Unavailable("held by another program")

    async with open_house(server, journal=journal) as house, browsing(house, PLAIN) as browser:
        (stream,) = await idle(house, steps)
        cut = await browser.call(1, "step")
        await cut.hang_up()
        steps.finish()
        await trio.sleep(5)
        talker = await house.dial()
        with monkeypatch.context() as patched:
            patched.setattr(journal, "find", busy)
            refused = await talker.poll(1, stream)
            assert (refused["code"], "try again" in refused["message"]) == (-32603, True)
            assert (await browser.go_on(cut.ids[0])).status == 503
        assert (await talker.poll(2, stream))["status"] == "completed"


# Keys and event ids


async def test_tokens_of_every_key_lead_to_an_evicted_stream(autojump_clock: MockClock) -> None:
    server, steps = serving()
    journal = MemoryJournal()
    old, new = b"1" * 32, b"2" * 32
    async with open_house(server, journal=journal, keyring=Keyring([old])) as house:
        first, second = await idle(house, steps, 2)
    async with open_house(server, journal=journal, keyring=Keyring([new, old])) as house:
        bob = await house.dial(STREAMS | REQUESTS, "bob")
        await bob.ask(1, "stream/resume", **named(first), **with_token(first))
        renewed = await bob.announced()
        await bob.answer(1)
        assert renewed["resumeToken"] != first["resumeToken"]
        crashed = _copy(house)
        for n, token in enumerate((renewed, first, second)):
            asked = {"requestId": int(token is second), **with_token(token)}
            assert "status" in await bob.request(f"s{n}", STATUS_OF_REQUEST, **asked)
    async with open_house(server, journal=crashed, keyring=Keyring([new])) as house:
        bob = await house.dial(STREAMS | REQUESTS, "bob")
        known = await bob.request(1, STATUS_OF_REQUEST, requestId=0, **with_token(renewed))
        assert known["status"] == "completed"
        gone = await bob.request(2, STATUS_OF_REQUEST, requestId=1, **with_token(second))
        assert reason(gone) == "stream_not_found"


def _copy(house: House) -> MemoryJournal:
    return house.as_after_a_crash()


async def test_an_event_id_leads_to_an_evicted_stream_for_its_own_session(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving()
    async with (
        open_house(server) as house,
        browsing(house, PLAIN) as browser,
        browsing(house, PLAIN) as stranger,
    ):
        cut = await browser.call(1, "step")
        await cut.hang_up()
        steps.log("a", "b")
        steps.finish()
        await trio.sleep(3)
        assert evicted(house) == 1
        assert (await stranger.go_on(cut.ids[0])).status == 400
        rest = await browser.go_on(cut.ids[0])
        assert (rest.status, logged(rest)) == (200, ["a", "b"])
        assert (await browser.go_on(cut.ids[0][:-1] + "9")).status == 400


async def test_a_granted_delivery_of_an_evicted_stream_is_resumed(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving()
    async with (
        open_house(server) as house,
        browsing(house, STREAMS) as browser,
        browsing(house, STREAMS) as other,
    ):
        first = await browser.call(1, "step")
        stream = first.events[1][1]
        assert stream is not None
        told = stream["params"]["stream"]
        await first.hang_up()
        steps.log("a")
        resumed = await other.post(7, "stream/resume", **named(told), **with_token(told))
        await resumed.hang_up()
        steps.finish()
        await trio.sleep(3)
        assert evicted(house) == 1
        rest = await other.go_on(resumed.ids[0])
        assert rest.status == 200
        reply = rest.events[-1][1]
        assert reply is not None
        assert reply["id"] == 7


async def test_evicted_streams_end_with_their_session(autojump_clock: MockClock) -> None:
    server, steps = serving()
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        for n in range(3):
            cut = await browser.call(n, "step")
            await cut.hang_up()
            steps.finish()
        (kept,) = await idle(house, steps)
        await trio.sleep(1)
        await trio.sleep(2)
        assert evicted(house) == 4
        await browser.fetch("DELETE")
        await trio.sleep(1)
        assert (evicted(house), in_memory(house)) == (1, [])
        assert (await (await house.dial()).poll(1, kept))["status"] == "completed"
