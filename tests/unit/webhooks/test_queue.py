"""The events of calls are stored with the messages that they tell of, for whom they are meant."""

import json
from typing import Any

import pytest
import trio

from streams import Server
from streams.engine.hooks import Hooks
from streams.engine.lifecycle import Question
from streams.journal.memory import MemoryJournal
from streams.journal.records import Append, Outcome
from streams.journal.webhooks import Webhook
from streams.keys import SHOWN_LETTERS
from streams.messages import Run
from streams.webhooks import queue as queues
from streams.webhooks.events import CONTENT_BYTES_MAX
from streams.webhooks.events import event as event_of
from tests.rigs.lives import FENCE, record
from tests.rigs.server import PLAIN, STREAMS, House, Json, Steps, Talker, open_house, text_of
from tests.rigs.webhooks import URL, decoded, queue

OWN = "https://hooks.example/of/ada"
ADA = "bearer(ada)"


@pytest.fixture
def server() -> Server:
    return Server("steps", resume_min_s=0)


@pytest.fixture
def steps(server: Server) -> Steps:
    return Steps(server)


async def waiting(house: House) -> list[Webhook]:
    return list(await house.journal.webhooks(limit=99))


async def until_told(house: House, count: int = 1) -> list[Json]:
    """The events that wait, once there are so many, in the order in which they are due."""
    with trio.fail_after(60):
        while len(found := await waiting(house)) < count:
            await trio.sleep(0.01)
    return [decoded(each.body) for each in found]


async def call(talker: Talker, request_id: int = 1, **meta: Any) -> None:
    named = {f"mcp-streams/{name}": value for name, value in meta.items()}
    await talker.ask(request_id, "tools/call", name="step", arguments={}, _meta=named)


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS])
async def test_a_call_that_ends_at_once_is_told(
    server: Server, steps: Steps, capabilities: Json
) -> None:
    steps.finish("quick")
    async with open_house(server, hooks=queue(URL)) as house:
        talker = await house.dial(capabilities)
        await call(talker)
        assert text_of(await talker.answer(1)) == "quick"
        [event] = await until_told(house)
    assert event["type"] == "call.completed"
    assert event["timestamp"].endswith("Z")
    assert {k: event["data"][k] for k in ("tool", "status")} == {
        "tool": "step",
        "status": "completed",
    }
    assert set(event["data"]) == {"streamId", "tool", "status", "createdAt"}, "no content"


async def test_a_tool_that_raises_is_a_failed_call(server: Server, steps: Steps) -> None:
    steps.fail()
    async with open_house(server, hooks=queue(URL)) as house:
        talker = await house.dial()
        await call(talker)
        await talker.answer(1)
        [event] = await until_told(house)
    assert (event["type"], event["data"]["status"]) == ("call.failed", "failed")


async def test_a_question_is_told_if_no_client_is_attached(server: Server, steps: Steps) -> None:
    async with open_house(server, hooks=queue(URL)) as house:
        talker = await house.dial()
        await call(talker)
        stream = await talker.announced()
        steps.ask()
        asked = await talker.find(lambda m: m.get("method") == "elicitation/create")
        assert await waiting(house) == [], "its client has the question"
        await talker.say({"id": asked["id"], "result": {"action": "decline"}})
        while not steps.answers:
            await trio.sleep(0.01)
        await talker.leave()
        steps.ask()
        [event] = await until_told(house)
        assert event["type"] == "call.question"
        assert event["data"]["status"] == "asking"
        assert event["data"]["streamId"] == stream["streamId"][:SHOWN_LETTERS]


def test_an_event_has_the_same_id_however_lines_are_committed() -> None:
    hooks = queue(URL)
    question = Question(4, b'{"method":"elicitation/create","id":"q"}\n')
    other = Question(5, question.line)
    end = b'{"id":1,"result":{}}\n'
    call = record(origin=b'{"id":1,"method":"tools/call","params":{"name":"step"}}')

    def ids(run: Run, *asked: Question, ends: bool = False) -> list[str]:
        outcome = Outcome.COMPLETED if ends else Outcome.LIVE
        append = Append(call.stream, FENCE, run, 0, 0, outcome)
        return [each.id for each in hooks.told(call, append, asked).webhooks]

    at_once = ids(Run(4, 3, question.line * 2 + end), question, other, ends=True)
    one_by_one = [
        *ids(Run(4, 1, question.line), question),
        *ids(Run(5, 1, question.line), other),
        *ids(Run(6, 1, end), ends=True),
    ]
    assert at_once == one_by_one
    assert len(set(at_once)) == 3


async def test_content_is_told_where_it_is_asked_for(server: Server, steps: Steps) -> None:
    async with open_house(server, hooks=queue(URL, has_content=True)) as house:
        talker = await house.dial()
        await call(talker)
        await talker.announced()
        await talker.leave()
        steps.ask()
        [event] = await until_told(house)
        assert event["data"]["question"]["method"] == "elicitation/create"
        again = await house.dial()
        steps.finish("all of it")
        await call(again, 2)
        await again.answer(2)
        *_, event = await until_told(house, 2)
        assert event["data"]["result"]["content"] == [{"type": "text", "text": "all of it"}]


async def test_long_content_is_left_out(server: Server, steps: Steps) -> None:
    steps.finish("x" * CONTENT_BYTES_MAX)
    async with open_house(server, hooks=queue(URL, has_content=True)) as house:
        talker = await house.dial()
        await call(talker)
        await talker.answer(1)
        [event] = await until_told(house)
    assert event["data"]["isContentOmitted"] is True
    assert "result" not in event["data"]


def test_content_that_is_nested_too_deeply_is_left_out() -> None:
    deep = b'{"jsonrpc":"2.0","id":1,"result":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    told = event_of("call.completed", record(), "call", "tool", 0.0, deep)
    assert json.loads(told)["data"]["isContentOmitted"] is True


async def test_a_caller_may_name_a_listed_url(server: Server, steps: Steps) -> None:
    hooks = queue(URL, allow=["https://hooks.example/of/"])
    async with open_house(server, hooks=hooks) as house:
        talker = await house.dial(principal=ADA)
        steps.finish()
        await call(talker, webhook=OWN)
        await talker.answer(1)
        await until_told(house, 2)
        found = await waiting(house)
        assert {each.url for each in found} == {URL, OWN}
        assert len({each.id for each in found}) == 2
        told = {each.url: decoded(each.body)["data"]["streamId"] for each in found}
        assert told[OWN] == found[0].stream, "the caller's own receiver may resume the call"
        assert told[URL] == found[0].stream[:SHOWN_LETTERS], "any other must not"
        steps.finish()
        await call(talker, 2)
        await talker.answer(2)
        await until_told(house, 3)
        assert [each.url for each in await waiting(house)].count(OWN) == 1, "it is of one call"


async def test_without_urls_of_its_own_a_server_tells_only_calls_that_name_one(
    server: Server, steps: Steps
) -> None:
    async with open_house(server, hooks=queue(allow=["hooks.example"])) as house:
        talker = await house.dial(principal=ADA)
        for request_id, meta in ((1, {}), (2, {"webhook": OWN})):
            steps.finish()
            await call(talker, request_id, **meta)
            await talker.answer(request_id)
        await until_told(house)
        assert [each.url for each in await waiting(house)] == [OWN]


@pytest.mark.parametrize(
    ("principal", "given", "hooks", "why"),
    [
        ("session(1)", OWN, queue(URL, allow=["hooks.example"]), "authenticated"),
        (ADA, "https://other.example/", queue(URL, allow=["hooks.example"]), "--webhook-allow"),
        (ADA, "http://hooks.example/", queue(URL, allow=["hooks.example"]), "https"),
        (ADA, "https://169.254.169.254/", queue(URL, allow=["hooks.example"]), "--webhook-allow"),
        (ADA, 7, queue(URL, allow=["hooks.example"]), "a URL"),
        (ADA, None, queue(URL, allow=["hooks.example"]), "a URL"),
        (ADA, OWN, None, "no webhooks"),
    ],
)
async def test_any_other_url_of_a_caller_is_refused(
    server: Server, steps: Steps, principal: str, given: Any, hooks: Hooks | None, why: str
) -> None:
    async with open_house(server, hooks=hooks) as house:
        talker = await house.dial(principal=principal)
        await call(talker, webhook=given)
        error = (await talker.answer(1))["error"]
        assert error["data"]["reason"] == "webhook_refused"
        assert error["code"] == -32602
        assert why in error["message"]
        assert not hasattr(steps, "call"), "the tool has not run"
        assert await waiting(house) == []


async def test_a_call_that_dies_with_its_server_is_told_by_the_next(
    server: Server, steps: Steps
) -> None:
    async with open_house(server, hooks=queue(URL)) as house:
        talker = await house.dial()
        await call(talker)
        await talker.announced()
        await house.journal.webhooks(limit=1)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, hooks=queue(URL)) as house:
        [event] = await until_told(house)
        assert event["type"] == "call.failed"


async def test_a_restart_asks_the_list_again(server: Server, steps: Steps) -> None:
    async with open_house(server, hooks=queue(allow=["hooks.example"])) as house:
        talker = await house.dial(principal=ADA)
        await call(talker, webhook=OWN)
        await talker.announced()
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, hooks=queue(allow=["other.example"])) as house:
        assert await waiting(house) == []


async def test_a_cancelled_call_tells_nothing(server: Server, steps: Steps) -> None:
    async with open_house(server, hooks=queue(URL)) as house:
        talker = await house.dial()
        await call(talker)
        await talker.announced()
        await talker.tell("notifications/cancelled", requestId=1)
        await steps.is_over.wait()
        await talker.request(2, "ping")
        assert await waiting(house) == []


async def test_events_above_the_limit_are_dropped(
    server: Server, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "WAITING_MAX", 2)
    hooks = queue(URL)
    async with open_house(server, hooks=hooks) as house:
        talker = await house.dial()
        for request_id in range(4):
            steps.finish()
            await call(talker, request_id)
            assert text_of(await talker.answer(request_id)) == "done", "the call is not harmed"
        assert len(await until_told(house, 2)) == 2
        hooks.waiting = 0  # as after receivers have taken them
        steps.finish()
        await call(talker, 5)
        await talker.answer(5)
        await until_told(house, 3)


async def test_callers_leave_room_for_the_urls_of_the_server(
    server: Server, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "WAITING_MAX", 8)
    async with open_house(server, hooks=queue(URL, allow=["hooks.example"])) as house:
        talker = await house.dial(principal=ADA)
        for request_id in range(6):
            steps.finish()
            await call(talker, request_id, webhook=OWN)
            await talker.answer(request_id)
        await until_told(house, 8)
        urls = [each.url for each in await waiting(house)]
        assert (urls.count(URL), urls.count(OWN)) == (6, 2)


async def test_without_hooks_nothing_is_stored_for_a_quick_call(
    server: Server, steps: Steps
) -> None:
    steps.finish()
    async with open_house(server) as house:
        talker = await house.dial()
        await call(talker)
        await talker.answer(1)
        assert isinstance(house.journal, MemoryJournal)
        assert await house.journal.streams(0, 9) == []
