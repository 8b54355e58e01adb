"""Which sessions share a child, how many children there are, and when an unused one ends."""

import random
from typing import Any

import pytest
import trio

from streams import Limits
from streams.backends.child import ChildBackend
from tests.rigs.children import Web, call, said, state, surfing, text, until, wrapped
from tests.rigs.server import PLAIN, STREAMS, House, Json, Talker, reason

ASK = "elicitation/create"
ASKING: Json = {"elicitation": {}, "roots": {}}


async def count(backend: ChildBackend, number: int) -> None:
    """Wait until so many children run."""
    while len(backend.children) != number:
        await trio.sleep(0.01)


def asks(method: str) -> Any:
    return lambda message: message.get("method") == method


# One child for each session


async def test_each_session_has_a_child_of_its_own() -> None:
    async with wrapped() as (house, backend):
        first, second = await house.dial(PLAIN), await house.dial(PLAIN)
        assert (await state(first))["pid"] != (await state(second))["pid"]
        assert (await state(first, 2))["pid"] == (await state(first, 3))["pid"]
        assert (await state(second, 2))["calls"] == 2
        assert len(backend.children) == 2


async def test_messages_of_no_request_stay_in_their_session() -> None:
    async with wrapped() as (house, _):
        first, second = await house.dial(ASKING), await house.dial(ASKING)
        await call(first, "stray", ask="roots/list", tell=["notifications/tools/list_changed"])
        await first.find(asks("notifications/tools/list_changed"))
        await call(second, "echo")
        assert not any("method" in each for each in second.seen)


async def test_a_child_outlives_its_session_while_a_call_runs() -> None:
    async with wrapped() as (house, backend):
        first = await house.dial(STREAMS)
        stream = await first.begin(1, "question")
        question = await first.find(asks(ASK))
        await first.channel.aclose()
        await trio.sleep(0.3)
        assert len(backend.children) == 1
        second = await house.dial(STREAMS)
        await second.ask(2, "stream/resume", streamId=stream["streamId"])
        await second.say({"id": question["id"], "result": {"n": 1}})
        assert said((await second.answer(1))["result"]) == {"n": 1}
        await count(backend, 1)


async def test_a_session_over_http_keeps_its_child_between_requests() -> None:
    async with wrapped() as (house, backend), surfing(house, PLAIN) as web:
        pids = {said(await web.call_tool("state"))["pid"] for _ in range(3)}
        assert [*pids] == backend.children
        web.ask("DELETE")
        await count(backend, 0)


# How many


async def test_over_the_limit_a_new_session_is_refused() -> None:
    async with wrapped(children_max=2) as (house, backend):
        busy = [await house.dial(PLAIN) for _ in range(2)]
        for talker in busy:
            await talker.call(1, "never")
            await talker.find(asks("notifications/message"))
        cable = house.cable()
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x"}}
        refused = Talker(cable.near, cable)
        for number in range(3):
            error = await refused.request(number, "initialize", **hello)
            assert error["data"] == {"reason": "too_many_children", "limit": 2}
        assert len(backend.places.supervisors) == 2  # nothing is kept of those that were refused
        await busy[0].channel.aclose()
        await count(backend, 1)
        hello = await refused.request("again", "initialize", **hello)
        assert hello["serverInfo"]["name"] == "naughty"


async def test_an_idle_child_makes_room_and_comes_back_as_it_was() -> None:
    async with wrapped(children_max=1) as (house, backend):
        first = await house.dial(PLAIN)
        await first.request(1, "logging/setLevel", level="error")
        before = await state(first)
        second = await house.dial(PLAIN)
        assert len(backend.children) == 1
        assert (await state(second))["level"] is None
        after = await state(first, 2)
        assert after["pid"] != before["pid"]
        assert (after["level"], after["initialized"]) == ("error", 1)


async def test_the_child_that_was_used_least_recently_makes_room() -> None:
    async with wrapped(children_max=2) as (house, _):
        first, second = await house.dial(PLAIN), await house.dial(PLAIN)
        pids = [(await state(each))["pid"] for each in (first, second)]
        await state(first, 2)
        third = await house.dial(PLAIN)
        await state(third)
        assert (await state(first, 3))["pid"] == pids[0]
        assert (await state(second, 3))["pid"] != pids[1]


async def test_many_sessions_share_few_places() -> None:
    async with wrapped(children_max=3) as (house, backend):
        most = 0
        talkers = [await house.dial(PLAIN) for _ in range(12)]
        for number in range(3):
            for talker in random.Random(number).sample(talkers, 12):
                assert text(await call(talker, "echo", number)) == "{}"
                most = max(most, len(backend.children))
        assert most <= 3
        for talker in talkers:
            await talker.channel.aclose()
        await count(backend, 0)
        assert backend.places.taken == 0
        assert not backend.places.supervisors
        assert not backend.guests


async def test_a_child_that_is_not_used_ends_and_starts_again() -> None:
    async with wrapped(child_idle_s=0.3) as (house, backend):
        talker = await house.dial(PLAIN)
        before = (await state(talker))["pid"]
        await talker.call(1, "question")
        await trio.sleep(0.8)
        assert backend.children == [before]  # a call runs
        question = await talker.find(asks(ASK))
        await talker.say({"id": question["id"], "result": {}})
        await talker.answer(1)
        await count(backend, 0)
        assert (await state(talker))["pid"] != before


async def subscribed(house: House, uri: str = "a:1") -> Talker:
    talker = await house.dial(PLAIN)
    assert await talker.request(1, "resources/subscribe", uri=uri) == {}
    return talker


@pytest.mark.parametrize("isolate", ["session", "none"])
async def test_a_child_lives_while_a_client_listens_for_its_updates(isolate: str) -> None:
    async with wrapped(child_idle_s=0.3, isolate=isolate) as (house, backend):
        talker = await subscribed(house)
        before = backend.children
        await trio.sleep(1.0)
        assert backend.children == before
        news = {"tell": ["notifications/resources/updated"], "params": {"uri": "a:1"}}
        await call(talker, "stray", 2, **news)
        await talker.find(asks("notifications/resources/updated"))
        await talker.request(3, "resources/unsubscribe", uri="a:1")
        await count(backend, 0)


async def test_a_child_lives_while_a_client_over_http_listens() -> None:
    async with wrapped(child_idle_s=0.3) as (house, backend), surfing(house, PLAIN) as web:
        standing = await web.standing()
        await standing.until(lambda: standing.status)
        await web.request("resources/subscribe", uri="a:1")
        await trio.sleep(1.0)
        assert len(backend.children) == 1
        await standing.hang_up()
        await count(backend, 0)


async def test_a_child_with_a_listener_makes_room_last() -> None:
    async with wrapped(children_max=2) as (house, backend):
        await subscribed(house)
        listened = backend.children
        await state(await house.dial(PLAIN))
        await state(await house.dial(PLAIN))
        assert listened[0] in backend.children
        for talker in [await subscribed(house, "a:2"), await subscribed(house, "a:3")]:
            await state(talker)
        assert listened[0] not in backend.children


# One child for all


@pytest.fixture
def shared() -> Json:
    return {"isolate": "none"}


async def test_all_sessions_share_a_child(shared: Json) -> None:
    async with wrapped(**shared) as (house, backend):
        first, second = await house.dial(PLAIN), await house.dial(PLAIN, "bob")
        found = await state(first)
        assert (await state(second))["pid"] == found["pid"]
        assert len(backend.children) == 1
        assert found["initialized"] == 1
        assert found["client"]["capabilities"] == {
            "elicitation": {"form": {}, "url": {}},
            "sampling": {},
            "roots": {"listChanged": True},
        }
        await first.channel.aclose()
        assert (await state(second, 2))["pid"] == found["pid"]


async def test_a_question_without_a_call_of_its_own_is_refused(shared: Json) -> None:
    async with wrapped(**shared) as (house, _):
        first, second = await house.dial(ASKING), await house.dial(ASKING, "bob")
        await second.call(1, "never")
        await second.find(asks("notifications/message"))
        await first.call(1, "question")
        error = said((await first.answer(1))["result"])
        assert error["code"] == -32603
        await call(second, "echo", 2)
        assert not any(asks(ASK)(each) for each in [*first.seen, *second.seen])


async def test_a_question_that_a_client_cannot_answer_is_refused(shared: Json) -> None:
    async with wrapped(**shared) as (house, _):
        able, unable = await house.dial(ASKING), await house.dial(PLAIN, "bob")
        await unable.call(1, "question")
        error = said((await unable.answer(1))["result"])
        assert error["code"] == -32601
        assert "elicitation" in error["message"]
        await able.call(1, "question", params={"mode": "url", "message": "?"})
        assert said((await able.answer(1))["result"])["code"] == -32601
        await able.call(2, "question")
        question = await able.find(asks(ASK))
        await able.say({"id": question["id"], "result": {"n": 1}})
        assert said((await able.answer(2))["result"]) == {"n": 1}


async def test_what_belongs_to_no_client_reaches_none(shared: Json) -> None:
    news = ["notifications/message", "notifications/theirs", "notifications/tools/list_changed"]
    async with wrapped(**shared) as (house, _):
        first, second = await house.dial(ASKING), await house.dial(ASKING, "bob")
        await call(first, "stray", tell=news, ask="roots/list", params={"data": "secret"})
        for talker in (first, second):
            await talker.find(asks("notifications/tools/list_changed"))
            await call(talker, "echo", 5)
            assert [each["method"] for each in talker.seen if "method" in each] == news[2:]
        found = await until(first, lambda found: found["answers"])
        assert found["answers"][0]["error"]["code"] == -32603


@pytest.mark.parametrize("method", ["tasks/list", "tasks/get", "tasks/result", "tasks/cancel"])
async def test_tasks_of_a_shared_child_are_refused(method: str, shared: Json) -> None:
    """Its list would have the tasks of all clients."""
    async with wrapped(**shared) as (house, _):
        first, second = await house.dial(ASKING), await house.dial(ASKING, "bob")
        await call(first, "task", 1)
        error = await second.request(1, method, taskId="t1")
        assert error["code"] == -32601
        assert method in error["message"]


async def test_news_and_questions_of_a_task_of_a_shared_child_reach_no_client(shared: Json) -> None:
    of_task = {"taskId": "t1", "_meta": {"io.modelcontextprotocol/related-task": {"taskId": "t1"}}}
    news = ["notifications/tasks/status", "notifications/tools/list_changed"]
    async with wrapped(**shared) as (house, _):
        first, second = await house.dial(ASKING), await house.dial(ASKING, "bob")
        await call(first, "task")
        await call(second, "stray", tell=news, ask=ASK, params=of_task)
        for talker in (first, second):
            await talker.find(asks(news[1]))
            await call(talker, "echo", 5)
            assert [each["method"] for each in talker.seen if "method" in each] == news[1:]
        found = await until(first, lambda found: found["answers"])
        assert found["answers"][0]["error"]["code"] == -32603


async def test_updates_reach_their_subscribers(shared: Json) -> None:
    async with wrapped(**shared) as (house, _):
        first, second = await house.dial(PLAIN), await house.dial(PLAIN, "bob")
        for talker, uris in ((first, ["a:1", "a:2"]), (second, ["a:2"])):
            for number, uri in enumerate(uris):
                assert await talker.request(number, "resources/subscribe", uri=uri) == {}
        assert await second.request(9, "resources/unsubscribe", uri="a:2") == {}
        assert (await state(first))["subscribed"] == ["a:1", "a:2", "a:2"]
        for uri in ("a:1", "a:2"):
            news = {"tell": ["notifications/resources/updated"], "params": {"uri": uri}}
            await call(second, "stray", **news)
            told = await first.find(asks("notifications/resources/updated"))
            assert told["params"]["uri"] == uri
        await call(second, "echo", 7)
        assert not any("method" in each for each in second.seen)


async def test_each_client_has_its_own_level_of_a_shared_child(shared: Json) -> None:
    async with wrapped(**shared) as (house, _):
        first, second = await house.dial(PLAIN), await house.dial(PLAIN, "bob")
        await first.request(1, "logging/setLevel", level="error")
        await first.call(2, "count", n=3)
        await first.answer(2)
        assert not any("method" in each for each in first.seen)
        await second.call(2, "count", n=3)
        await second.answer(2)
        assert len([each for each in second.seen if "method" in each]) == 3


async def test_a_cancelled_call_of_another_may_still_ask(shared: Json) -> None:
    async with wrapped(**shared, cancel_timeout_s=0.05) as (house, _):
        first, second = await house.dial(ASKING), await house.dial(ASKING, "bob")
        await first.call(1, "never")
        await first.find(asks("notifications/message"))
        await first.tell("notifications/cancelled", requestId=1)
        await until(second, lambda found: "cancelled" in found)
        await trio.sleep(0.2)
        await second.call(1, "question")
        error = said((await second.answer(1))["result"])
        assert error["code"] == -32603


async def test_a_call_of_another_that_has_failed_here_is_cancelled_and_may_still_ask(
    shared: Json,
) -> None:
    async with wrapped(**shared, limits=Limits(unsent_entries_max=10)) as (house, _):
        first, second = await house.dial(PLAIN, capacity=4096), await house.dial(ASKING, "bob")
        await first.call(1, "flood", n=5000, ends=False)
        assert reason((await first.answer(1))["error"]) == "too_slow"
        await second.call(1, "question")
        answer = await second.find(lambda m: asks(ASK)(m) or m.get("id") == 1)
        assert said(answer["result"])["code"] == -32603
        assert "cancelled" in await state(second, 2)


async def test_questions_never_cross_principals(shared: Json) -> None:
    """Many clients of one child call and ask at once, in any order: each answers its own."""

    async def client(house: House, name: str, number: int) -> None:
        talker = await house.dial(ASKING, name)
        chance = random.Random(number)
        for turn in range(60):
            await trio.sleep(chance.random() * 0.01)
            params = {"message": name, "turn": turn}
            await talker.call(turn, "question", params=params)
            while True:
                message = await talker.read()
                if message.get("method") == ASK:
                    assert message["params"] == params
                    await talker.say({"id": message["id"], "result": {"from": name}})
                elif message.get("id") == turn:
                    given = said(message["result"])
                    assert given == {"from": name} or given["code"] == -32603
                    answered[given == {"from": name}] += 1
                    break

    answered = {True: 0, False: 0}
    async with wrapped(**shared) as (house, _), trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(client, house, f"client {number}", number)
    assert sum(answered.values()) == 360
    assert answered[True] > 0
    assert answered[False] > 0


# One child for each call


async def test_each_call_has_a_child_of_its_own() -> None:
    async with wrapped(isolate="call") as (house, backend):
        talker = await house.dial(ASKING)
        pids = [(await state(talker, number))["pid"] for number in range(3)]
        assert len({*pids}) == 3
        assert (await state(talker, 4))["calls"] == 1
        await count(backend, 1)  # the one for lists
        assert (await talker.request(5, "tools/list"))["tools"]
        await count(backend, 1)


async def test_a_question_of_two_calls_at_once_goes_to_its_own() -> None:
    async with wrapped(isolate="call") as (house, _):
        talker = await house.dial(ASKING)
        await talker.call(1, "question", params={"message": "1"})
        await talker.call(2, "question", params={"message": "2"})
        for _ in range(2):
            question = await talker.find(asks(ASK))
            answer = {"for": question["params"]["message"]}
            await talker.say({"id": question["id"], "result": answer})
        found: Json = {}
        while len(found) < 2:
            for each in talker.seen:
                if each.get("id") in (1, 2):
                    found[each["id"]] = said(each["result"])
            if len(found) < 2:
                await talker.read()
        assert found == {1: {"for": "1"}, 2: {"for": "2"}}


async def test_a_cancelled_call_ends_its_child() -> None:
    async with wrapped(isolate="call", stop_timeout_s=0.3) as (house, backend):
        talker = await house.dial(PLAIN)
        await talker.call(1, "never")
        await talker.find(asks("notifications/message"))
        assert len(backend.children) == 2
        await talker.tell("notifications/cancelled", requestId=1)
        await count(backend, 1)


async def test_a_call_needs_a_place() -> None:
    async with wrapped(isolate="call", children_max=2) as (house, backend):
        talker = await house.dial(PLAIN)
        for number in (1, 2):
            await talker.call(number, "never")
            await talker.find(asks("notifications/message"))
        assert len(backend.children) == 2  # the one for lists has made room
        error = await call(talker, "echo", 3)
        assert error["data"] == {"reason": "too_many_children", "limit": 2}


async def test_a_child_that_dies_ends_its_own_call() -> None:
    async with wrapped(isolate="call") as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "never")
        await talker.find(asks("notifications/message"))
        assert (await call(talker, "leave", 2, code=3))["data"]["exitCode"] == 3
        assert text(await call(talker, "echo", 3)) == "{}"
        assert not any(each.get("id") == 1 for each in talker.seen)


@pytest.mark.parametrize("isolate", ["session", "call", "none"])
async def test_tasks_are_offered_only_where_a_session_has_a_child(isolate: str) -> None:
    async with wrapped(isolate=isolate) as (house, _), trio.open_nursery() as nursery:
        web = Web(house, nursery)
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x"}}
        answer = await web.request("initialize", **hello)
        assert ("tasks" in answer["capabilities"]) == (isolate == "session")
        assert "tools" in answer["capabilities"]
        nursery.cancel_scope.cancel()
