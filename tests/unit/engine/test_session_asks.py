"""Requests to a client that belong to no call: kept until they are answered, and no longer."""

from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from streams import Refusal, Server
from streams.engine.connection import REQUESTS_MAX, Session
from streams.engine.notices import NOTICES_MAX, SENT_S
from streams.messages import Message, RequestId, decode
from tests.rigs.server import PLAIN, House, Json, open_house
from tests.rigs.web import EVENTS, Answer, browsing

ASK = "roots/list"


@pytest.fixture
def server() -> Server:
    return Server("tested")


class Asked:
    """A request to the one client of a house, and its answer."""

    def __init__(self, house: House, params: Any = None) -> None:
        (self.session,) = house.running.engine.clients()
        self.scope = trio.CancelScope()
        self.id: RequestId = ""
        self.answer: Message | None = None
        house.nursery.start_soon(self._ask, {} if params is None else params)

    async def _ask(self, params: Any) -> None:
        def on_sent(request_id: RequestId) -> None:
            self.id = request_id

        with self.scope:
            self.answer = await self.session.ask(ASK, params, on_sent=on_sent)

    @property
    def result(self) -> Any:
        if self.answer is None:
            return None
        assert isinstance(self.answer.result, msgspec.Raw)
        return decode(self.answer.result, dict[str, Any])


def questions(answer: Answer) -> list[Any]:
    """The ids of the requests in an event stream."""
    return [each["id"] for _, each in answer.events if each and each.get("method") == ASK]


def result(request_id: Any, **members: Any) -> Json:
    return {"jsonrpc": "2.0", "id": request_id, "result": members}


async def test_a_connection_is_asked_at_once_and_answers(server: Server) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        asked = Asked(house, {"a": [1]})
        question = await talker.find(lambda message: message.get("method") == ASK)
        assert question == {"jsonrpc": "2.0", "id": asked.id, "method": ASK, "params": {"a": [1]}}
        await talker.say({"id": asked.id, "result": {"n": 1}})
        await wait_all_tasks_blocked()
        assert asked.result == {"n": 1}


async def test_an_error_is_an_answer(server: Server) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        asked = Asked(house)
        await talker.find(lambda message: message.get("method") == ASK)
        await talker.say({"id": asked.id, "error": {"code": 1, "message": "no"}})
        await wait_all_tasks_blocked()
        assert asked.answer is not None
        assert isinstance(asked.answer.error, msgspec.Raw)
        assert decode(asked.answer.error, dict[str, Any]) == {"code": 1, "message": "no"}


async def test_it_waits_for_a_standing_stream(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        asked = Asked(house)
        await wait_all_tasks_blocked()
        standing = await browser.fetch("GET", accept=EVENTS)
        assert questions(standing) == [asked.id]


async def test_it_is_sent_again_over_each_new_standing_stream(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.fetch("GET", accept=EVENTS)
        asked = Asked(house)
        await wait_all_tasks_blocked()
        assert questions(first) == [asked.id]
        await first.hang_up()
        second = await browser.fetch("GET", accept=EVENTS)
        assert questions(second) == [asked.id]
        await second.hang_up()
        await trio.sleep(2 * SENT_S)  # notices that were sent are forgotten by then
        third = await browser.fetch("GET", accept=EVENTS)
        assert questions(third) == [asked.id]
        await browser.fetch("POST", result(asked.id, n=1))
        assert asked.result == {"n": 1}


async def test_a_client_that_has_received_it_is_not_sent_it_again(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.fetch("GET", accept=EVENTS)
        asked = Asked(house)
        await wait_all_tasks_blocked()
        await first.hang_up()
        second = await browser.go_on(first.ids[-1])
        assert questions(second) == []
        await browser.fetch("POST", result(asked.id))
        assert asked.result == {}


async def test_it_is_dropped_when_it_is_answered(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        first = await browser.fetch("GET", accept=EVENTS)
        asked = Asked(house)
        await wait_all_tasks_blocked()
        await browser.fetch("POST", result(asked.id, n=1))
        await browser.fetch("POST", result(asked.id, n=2))
        assert asked.result == {"n": 1}
        await first.hang_up()
        assert questions(await browser.fetch("GET", accept=EVENTS)) == []
        assert not asked.session.notices.kept


async def test_it_is_dropped_when_it_is_no_longer_wanted(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        asked = Asked(house)
        await wait_all_tasks_blocked()
        asked.scope.cancel()
        await wait_all_tasks_blocked()
        assert questions(await browser.fetch("GET", accept=EVENTS)) == []
        await browser.fetch("POST", result(asked.id))
        assert asked.answer is None


async def test_another_client_cannot_answer_it(server: Server) -> None:
    async with open_house(server) as house, browsing(house, PLAIN):
        asked = Asked(house)
        await wait_all_tasks_blocked()
        stranger = await house.dial(PLAIN, "mallory")
        await stranger.say({"id": asked.id, "result": {}})
        assert await stranger.request(1, "ping") == {}
        assert asked.answer is None


async def test_no_more_than_a_user_can_answer() -> None:
    session = Session("alice")
    async with trio.open_nursery() as nursery:
        for _ in range(REQUESTS_MAX):
            nursery.start_soon(session.ask, ASK, {})
        await wait_all_tasks_blocked()
        with pytest.raises(Refusal, match=f"{REQUESTS_MAX} requests to answer"):
            await session.ask(ASK, {})
        nursery.cancel_scope.cancel()
    assert not session.notices.kept


async def test_notices_do_not_push_it_out() -> None:
    session = Session("alice")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.ask, ASK, {})
        await wait_all_tasks_blocked()
        for number in range(NOTICES_MAX + 10):
            session.notify(b"x" * 300, key=f"{number}")
        assert ASK.encode() in b"".join(session.notices.take())
        nursery.cancel_scope.cancel()
