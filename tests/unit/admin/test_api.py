"""The operators' API shows calls, and changes them where it may."""

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.admin.api import Api
from streams.admin.changes import Answering, Changes
from streams.admin.endpoint import AdminEndpoint
from streams.admin.gate import OwnerGate
from streams.exchange import HttpError
from streams.keys import SHOWN_LETTERS
from streams.observe.registry import Registry
from tests.rigs.operators import Answered, asked_of
from tests.rigs.server import PLAIN, POSITIONS, STREAMS, House, Steps, Talker, open_house, reason


@pytest.fixture
def server() -> Server:
    return Server("api")


@pytest.fixture
async def house(server: Server, steps: Steps) -> AsyncIterator[House]:
    async with open_house(server) as house:
        yield house


class Operator:
    """An operator of a house."""

    def __init__(self, house: House) -> None:
        engine = house.running.engine
        registry = Registry(house.journal, engine)
        self.drains: list[float | None] = []
        api = Api(registry, Changes(registry, engine), about=lambda: {"pid": 7}, drain=self._drain)
        self.endpoint = AdminEndpoint(OwnerGate(), api.routes)

    def _drain(self, grace_s: float | None) -> float:
        self.drains.append(grace_s)
        return 5.0 if grace_s is None else grace_s

    async def look(self, target: str, status: int = 200) -> Any:
        answered = await asked_of(self.endpoint, target)
        assert answered.status == status, answered.body
        return answered.json

    async def post(self, target: str, value: Any = None) -> Answered:
        body = b"" if value is None else json.dumps(value).encode()
        return await asked_of(self.endpoint, target, "POST", body=body)


async def asking(house: House, steps: Steps, capabilities: Any = POSITIONS) -> tuple[Talker, str]:
    """A call that waits for an answer, and the id of its question."""
    talker = await house.dial(capabilities)
    await talker.call(1, "step")
    steps.log("one", "two")
    steps.ask()
    asked = await talker.find(lambda m: m.get("method") == "elicitation/create")
    await wait_all_tasks_blocked()
    return talker, asked["id"]


async def test_the_list_the_counts_and_the_connections(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    await asking(house, steps)
    operator = Operator(house)
    page = await operator.look("/api/calls")
    assert [call["state"] for call in page["calls"]] == ["asking"]
    assert page["before"] is None
    assert (await operator.look("/api/stats"))["asking"] == 1
    [connection] = await operator.look("/api/connections")
    assert connection["number"] == page["calls"][0]["connection"]
    assert (await operator.look("/api/calls?state=completed,failed"))["calls"] == []
    assert (await operator.look("/api/calls?state=nonsense", 400))["error"]["message"]
    await operator.look("/api/calls?limit=x", 400)
    await operator.look("/api/calls?unknown=1", 400)


@pytest.mark.parametrize("number", [2**63, -1, -(2**63) - 1, 10**30, 10**100])
async def test_numbers_that_no_journal_can_have_are_refused(
    house: House, steps: Steps, autojump_clock: MockClock, number: int
) -> None:
    await asking(house, steps)
    operator = Operator(house)
    [call] = (await operator.look(f"/api/calls?before={2**63 - 1}"))["calls"]
    messages = f"/api/calls/{call['id']}/messages"
    assert (await operator.look(f"{messages}?after={2**63 - 1}"))["messages"] == []
    for target in ("/api/calls?before", "/api/calls?limit", f"{messages}?after"):
        refused = await operator.look(f"{target}={number}", 400)
        assert "The query is wrong" in refused["error"]["message"]


async def test_an_answer_that_is_nested_too_deeply_is_refused(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    _, question = await asking(house, steps)
    operator = Operator(house)
    [call] = (await operator.look("/api/calls"))["calls"]
    answering = Answering(question, {"a": msgspec.Raw(b"[" * 30_000 + b"]" * 30_000)})
    with pytest.raises(HttpError) as caught:
        answering.message()
    assert caught.value.status == 400
    path = f"/api/calls/{call['id']}/answer"
    for depth in (*range(800, 1000, 5), 30_000):  # the limit depends on the callers of a function
        nested = "[" * depth + "]" * depth
        body = f'{{"requestId":"another","result":{{"a":{nested}}}}}'
        answered = await asked_of(operator.endpoint, path, "POST", body=body.encode())
        assert answered.status in (400, 409)
    assert (await operator.look(f"/api/calls/{call['id']}"))["state"] == "asking"


async def test_a_call_says_what_its_client_has_missed(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    await asking(house, steps)
    operator = Operator(house)
    [call] = (await operator.look("/api/calls"))["calls"]
    detail = await operator.look(f"/api/calls/{call['id'][:8]}")
    assert detail["missed"] == {"log": 2, "question": 1}
    assert (detail["pending"], detail["uncounted"]) == (3, 0)
    await operator.look("/api/calls/nowhere", 404)


async def test_more_letters_than_operators_see_name_no_call(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker = await house.dial(POSITIONS)
    stream = (await talker.begin(1, "step"))["streamId"]
    operator = Operator(house)
    for path in (f"/api/calls/{stream}", f"/api/calls/{stream}/messages"):
        await operator.look(path, 404)
    assert (await operator.post(f"/api/calls/{stream}/cancel")).status == 404
    assert (await operator.post(f"/api/calls/{stream[:SHOWN_LETTERS]}/cancel")).status == 200


async def test_messages_are_read_in_pages(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    await asking(house, steps)
    operator = Operator(house)
    [call] = (await operator.look("/api/calls"))["calls"]
    path = f"/api/calls/{call['id']}/messages"
    first = await operator.look(f"{path}?limit=2")
    assert [(each["seq"], each["kind"], each["text"]) for each in first["messages"]] == [
        (1, "log", "info: one"),
        (2, "log", "info: two"),
    ]
    second = await operator.look(f"{path}?after={first['after']}")
    assert [each["kind"] for each in second["messages"]] == ["question"]
    assert second["messages"][0]["message"]["method"] == "elicitation/create"
    assert second["after"] is None
    assert (await operator.look(f"{path}?after=99"))["messages"] == []


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS, POSITIONS])
async def test_a_cancelled_call_stops_and_its_client_is_told(
    house: House, steps: Steps, autojump_clock: MockClock, capabilities: Any
) -> None:
    """A client that did not cancel waits for a response, whatever it understands."""
    talker, _ = await asking(house, steps, capabilities)
    operator = Operator(house)
    [call] = (await operator.look("/api/calls"))["calls"]
    done = await operator.post(f"/api/calls/{call['id']}/cancel")
    assert (done.status, done.json) == (200, {"cancelled": call["id"]})
    answer = await talker.answer(1)
    assert reason(answer["error"]) == "cancelled"
    await steps.is_over.wait()
    assert steps.was_cancelled
    again = await operator.post(f"/api/calls/{call['id']}/cancel")
    assert again.status == (404 if capabilities is PLAIN else 409)


async def test_a_call_that_has_ended_is_not_cancelled(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker = await house.dial(POSITIONS)
    await talker.begin(1, "step")
    steps.finish()
    await talker.answer(1)
    operator = Operator(house)
    [call] = (await operator.look("/api/calls"))["calls"]
    refused = await operator.post(f"/api/calls/{call['id']}/cancel")
    assert (refused.status, "completed" in refused.body.decode()) == (409, True)


async def test_an_operator_answers_for_the_client(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker, question = await asking(house, steps)
    await talker.leave()
    operator = Operator(house)
    [call] = (await operator.look("/api/calls"))["calls"]
    path = f"/api/calls/{call['id']}/answer"
    answer = {"requestId": question, "result": {"action": "accept", "content": {"n": 1}}}
    assert (await operator.post(path, answer)).status == 200
    await wait_all_tasks_blocked()
    [given] = steps.answers
    assert given == answer["result"]
    assert (await operator.post(path, answer)).status == 409, "the first answer counts"


@pytest.mark.parametrize(
    "body",
    [
        {"requestId": "x"},
        {"requestId": "x", "result": {}, "error": "no"},
        {"requestId": "x", "result": 7},
        {"result": {}},
        {"requestId": "x", "result": {}, "more": 1},
        [],
    ],
)
async def test_a_wrong_answer_changes_nothing(
    house: House, steps: Steps, autojump_clock: MockClock, body: Any
) -> None:
    await asking(house, steps)
    operator = Operator(house)
    [call] = (await operator.look("/api/calls"))["calls"]
    refused = await operator.post(f"/api/calls/{call['id']}/answer", body)
    assert refused.status == 400
    assert (await operator.look(f"/api/calls/{call['id']}"))["state"] == "asking"


async def test_a_refusal_is_an_answer(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker, question = await asking(house, steps)
    operator = Operator(house)
    [call] = (await operator.look("/api/calls"))["calls"]
    body = {"requestId": question, "error": "not today"}
    assert (await operator.post(f"/api/calls/{call['id']}/answer", body)).status == 200
    assert "not today" in str(await talker.answer(1))


async def test_a_cut_connection_ends_and_its_call_goes_on(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker, _ = await asking(house, steps)
    operator = Operator(house)
    [connection] = await operator.look("/api/connections")
    path = f"/api/connections/{connection['number']}/cut"
    assert (await operator.post(path)).status == 200
    await talker.end()
    await trio.sleep(1)
    [call] = (await operator.look("/api/calls"))["calls"]
    assert (call["state"], call["connection"]) == ("asking", None)
    assert (await operator.post(path)).status == 404
    assert (await operator.post("/api/connections/x/cut")).status == 404


async def test_a_drain_takes_the_grace_that_is_given(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    operator = Operator(house)
    assert (await operator.post("/api/drain")).json == {"draining": True, "graceS": 5.0}
    done = await operator.post("/api/drain", {"graceS": 30})
    assert (done.status, done.json["graceS"]) == (202, 30)
    for wrong in ({"graceS": -1}, {"graceS": "x"}, {"grace": 1}):
        assert (await operator.post("/api/drain", wrong)).status == 400
    assert operator.drains == [None, 30]
    assert (await operator.look("/api/stats"))["pid"] == 7
