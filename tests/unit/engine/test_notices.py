"""Notices: notifications to one client that belong to no request."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server, messages
from streams.engine.notices import NOTICES_BYTES_MAX, NOTICES_MAX, SENT_S, Notices
from tests.rigs.server import PLAIN, Json, Steps, Talker, methods, open_house
from tests.rigs.web import EVENTS, JSON, Answer, browsing

NEWS = "notifications/news"


def news(number: int, text: str = "") -> bytes:
    return messages.notification(NEWS, {"number": number, "text": text})


def numbers(heard: list[Json]) -> list[int]:
    return [each["params"]["number"] for each in heard if each.get("method") == NEWS]


def received(answer: Answer) -> list[int]:
    return numbers([message for _, message in answer.events if message])


@pytest.fixture
def server() -> Server:
    return Server("tested")


# The limits


def test_only_the_latest_of_a_key_is_kept_and_all_without_a_key() -> None:
    notices = Notices()
    notices.has_stream = True
    for key in ("a", "b", None, "a", None):
        notices.add(f"{key}".encode(), key)
    assert notices.take() == [b"b", b"None", b"a", b"None"]
    assert notices.take() == []


def test_the_oldest_are_dropped_at_both_limits() -> None:
    notices = Notices()
    notices.has_stream = True
    for number in range(NOTICES_MAX + 2):
        notices.add(str(number).encode(), None)
    kept = notices.take()
    assert (len(kept), kept[0]) == (NOTICES_MAX, b"2")
    for each in (b"a", b"b", b"c"):
        notices.add(each * (NOTICES_BYTES_MAX // 2), None)
    assert [line[:1] for line in notices.take()] == [b"b", b"c"]
    notices.add(b"short", None)
    notices.add(b"x" * (NOTICES_BYTES_MAX + 1), None)
    assert [line[:1] for line in notices.take()] == [b"x"]


# A connection that is the session


async def test_a_connection_sends_notices_at_once(server: Server) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        (session,) = house.running.engine.clients()
        session.notify(news(1))
        session.notify(news(2))
        await talker.find(lambda message: message["params"]["number"] == 2)
        assert numbers(talker.seen) == [1, 2]


async def test_a_reader_that_is_behind_gets_the_latest_of_each_key(server: Server) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN, capacity=1000)
        (session,) = house.running.engine.clients()
        session.notify(news(0, "x" * 2000), key="first")  # fills the pipe
        await wait_all_tasks_blocked()
        for number in range(1, 10):
            session.notify(news(number), key="news")
        await talker.find(lambda message: message["params"]["number"] == 9)
        assert numbers(talker.seen) == [0, 9]


async def test_clients_that_have_not_initialized_are_no_clients_yet(server: Server) -> None:
    async with open_house(server) as house:
        cable = house.cable()
        await Talker(cable.near, cable).request(1, "ping")
        assert house.running.engine.clients() == []


# The standing stream of HTTP


async def test_notices_wait_for_the_standing_stream(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        (session,) = house.running.engine.clients()
        for number in range(3):
            session.notify(news(number), key="news")
        assert (await browser.post(1, "ping")).type == JSON
        standing = await browser.fetch("GET", accept=EVENTS)
        assert received(standing) == [2]
        session.notify(news(3), key="news")
        await wait_all_tasks_blocked()
        assert received(standing) == [2, 3]


async def test_a_last_event_id_tells_which_notices_have_come(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        (session,) = house.running.engine.clients()
        first = await browser.fetch("GET", accept=EVENTS)
        for number in range(3):
            session.notify(news(number))
        await wait_all_tasks_blocked()
        await first.hang_up()
        session.notify(news(3), key="news")
        second = await browser.go_on(first.ids[1])
        assert received(second) == [2, 3]
        third = await browser.go_on(second.ids[-1])
        assert received(third) == []
        assert second.is_whole
        session.notify(news(4))
        await wait_all_tasks_blocked()
        assert received(third) == [4]


@pytest.mark.parametrize("last", ["standing_", "standing_x_7", "standing_7", "standing_²"])
async def test_an_unknown_id_of_a_standing_stream_loses_nothing(server: Server, last: str) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        (session,) = house.running.engine.clients()
        session.notify(news(1), key="news")
        standing = await browser.go_on(last)
        session.notify(news(2))
        await wait_all_tasks_blocked()
        assert received(standing) == [1, 2]


async def test_what_has_no_key_is_dropped_where_no_stream_is_open(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        (session,) = house.running.engine.clients()
        session.notify(news(0))
        first = await browser.fetch("GET", accept=EVENTS)
        session.notify(news(1))
        await wait_all_tasks_blocked()
        await first.hang_up()
        session.notify(news(2))
        session.notify(news(3), key="news")
        assert received(first) == [1]
        second = await browser.go_on(first.ids[0])
        assert received(second) == [3]
        await trio.sleep(2 * SENT_S)
        assert session.notices.kept == {}


async def test_an_id_ahead_of_all_notices_stops_none(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        (session,) = house.running.engine.clients()
        session.notify(news(1), key="news")
        first = await browser.fetch("GET", accept=EVENTS)
        standing = await browser.go_on(f"{first.ids[0]}000")
        session.notify(news(2))
        await wait_all_tasks_blocked()
        assert received(standing) == [2]


async def test_without_an_id_changes_of_late_are_sent_again(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        (session,) = house.running.engine.clients()
        first = await browser.fetch("GET", accept=EVENTS)
        session.notify(news(1), key="old")
        await wait_all_tasks_blocked()
        await trio.sleep(SENT_S + 1)
        session.notify(news(2), key="new")
        session.notify(news(3))
        await wait_all_tasks_blocked()
        assert received(first) == [1, 2, 3]
        assert received(await browser.fetch("GET", accept=EVENTS)) == [2]


async def test_a_call_and_notices_share_a_connection(server: Server) -> None:
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        (session,) = house.running.engine.clients()
        session.notify(news(1))
        await talker.find(lambda message: message.get("method") == NEWS)
        steps.finish()
        await talker.answer(1)
        assert methods(talker.seen) == [NEWS, "result"]
