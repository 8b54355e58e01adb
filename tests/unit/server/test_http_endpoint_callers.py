"""Callers who have shown who they are, at the endpoint: what is theirs, and how much of it."""

import math
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.exchange import Caller
from streams.limits import Limits
from tests.rigs.server import PLAIN, RESIDENT_MAX, STREAMS, Steps, named, open_house, reason
from tests.rigs.web import Answer, browsing, logged

ADA, EVE = (Caller(f"bearer(tokens, {name})", lambda: math.inf) for name in ("ada", "eve"))


def serving(**limits: float) -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=600, limits=Limits(**limits))  # type: ignore[arg-type]


def until(at: float) -> Callable[[], float]:
    return lambda: at - trio.current_time()


async def test_who_has_too_many_sessions_gives_up_one_of_their_own(
    autojump_clock: MockClock,
) -> None:
    server = serving(sessions_max=4, sessions_per_principal_max=2)
    async with (
        open_house(server) as house,
        browsing(house, PLAIN, caller=EVE) as eves,
        browsing(house, PLAIN, caller=ADA) as first,
        browsing(house, PLAIN, caller=ADA) as second,
        browsing(house, PLAIN) as nobodys,
        browsing(house, PLAIN, caller=ADA) as third,
    ):
        statuses = [(await each.post(1, "ping")).status for each in (eves, first, second, third)]
        assert statuses == [200, 404, 200, 200]
        assert (await nobodys.post(1, "ping")).status == 200


@pytest.mark.parametrize(("caller", "other"), [(ADA, EVE), (ADA, None), (None, ADA)])
async def test_a_session_is_of_who_has_begun_it(
    caller: Caller | None, other: Caller | None
) -> None:
    async with (
        open_house(serving()) as house,
        browsing(house, PLAIN, caller=caller) as browser,
    ):
        browser.caller = other
        for method in ("POST", "GET", "DELETE"):
            message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            assert (await browser.fetch(method, message)).status == 404
        browser.caller = caller
        assert (await browser.post(1, "ping")).status == 200


@pytest.mark.parametrize("resident_max", RESIDENT_MAX)
async def test_a_response_that_outlives_its_token_goes_on_with_the_next_one(
    resident_max: int, autojump_clock: MockClock
) -> None:
    server = serving(resident_max=resident_max)
    steps = Steps(server)
    async with open_house(server) as house, browsing(house, PLAIN, caller=ADA) as browser:
        browser.caller = Caller(ADA.principal, until(trio.current_time() + 100))
        standing = browser.ask("GET", accept="text/event-stream")
        answer = await browser.call(1, "step")
        steps.log("one")
        await trio.sleep(99)
        assert not answer.is_whole
        await trio.sleep(2)
        assert answer.is_whole, "it ends in good order"
        assert standing.is_whole
        steps.log("two")
        steps.finish()
        await trio.sleep(60)
        browser.caller = ADA
        rest = await browser.go_on(answer.ids[-1])
        assert logged(answer) + logged(rest) == ["one", "two"]
        assert "result" in rest.events[-1][1]


async def test_a_response_of_a_bearer_is_that_of_one_session(autojump_clock: MockClock) -> None:
    server = serving()
    steps = Steps(server)
    async with (
        open_house(server) as house,
        browsing(house, PLAIN, caller=ADA) as browser,
        browsing(house, PLAIN, caller=ADA) as other,
    ):
        answer = await browser.call(1, "step")
        steps.log("one")
        await wait_all_tasks_blocked()
        await answer.hang_up()
        assert (await other.go_on(answer.ids[0])).status == 400
        assert logged(await browser.go_on(answer.ids[0])) == ["one"]


# -- how much


async def test_who_asks_too_often_over_http_is_told_when_to_come_back(
    autojump_clock: MockClock,
) -> None:
    async with (
        open_house(serving(requests_per_principal_max=0.2)) as house,
        browsing(house, PLAIN, caller=ADA) as browser,
        browsing(house, PLAIN, caller=EVE) as other,
    ):

        async def ask() -> Answer:
            return await browser.post(1, "ping")

        assert (await ask()).status == 200
        refused = await ask()
        assert (refused.status, refused.headers["retry-after"]) == (429, "5")
        assert refused.json["id"] == 1
        assert reason(refused.json["error"]) == "too_many_requests"
        assert (await browser.fetch("GET", accept="text/event-stream")).status == 429
        assert (await browser.tell("notifications/initialized")).status == 202
        assert (await other.post(1, "ping")).status == 200
        await trio.sleep(5)
        assert (await ask()).status == 200


async def test_who_asks_too_often_over_a_connection_is_told_when_to_come_back(
    autojump_clock: MockClock,
) -> None:
    async with open_house(serving(requests_per_principal_max=0.2)) as house:
        talker = await house.dial(PLAIN)
        assert await talker.request(1, "ping") == {}
        refused = await talker.request(2, "ping")
        assert (reason(refused), refused["data"]["retryAfter"]) == ("too_many_requests", 5)
        await trio.sleep(5)
        assert await talker.request(3, "ping") == {}


async def test_who_leaves_too_much_undelivered_begins_nothing_new(
    autojump_clock: MockClock,
) -> None:
    server = serving(bytes_per_principal_max=10_000)
    steps = Steps(server)
    async with open_house(server) as house:
        first, stranger = await house.dial(STREAMS, "ada"), await house.dial(STREAMS, "eve")
        stream = await first.begin(1, "step")
        await first.leave()
        steps.log("x" * 10_000)
        await trio.sleep(2)
        talker = await house.dial(STREAMS, "ada")
        refused = await talker.request(2, "tools/call", name="step", arguments={})
        assert reason(refused) == "too_many_bytes"
        assert refused["data"]["limit"] == 10_000
        assert await stranger.begin(3, "step")
        await talker.ask("r", "stream/resume", **named(stream))
        await trio.sleep(60)
        assert await talker.begin(4, "step")
