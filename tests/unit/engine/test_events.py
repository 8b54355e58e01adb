"""The engine tells listeners what happens to calls."""

from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock

from streams import Call, Server
from streams.engine.events import (
    CALL_KINDS,
    KINDS,
    CallAnswered,
    CallAsked,
    CallBegan,
    CallDetached,
    CallEnded,
    CallInterrupted,
    CallReleased,
    CallRestarted,
    CallResumed,
    ConnectionClosed,
    ConnectionOpened,
    DeliveryBegan,
    DeliveryEnded,
    Event,
    Events,
    ResultAbandoned,
    ResumeRefused,
)
from streams.journal.records import Outcome
from streams.keys import Keyring
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    STREAMS,
    Json,
    Steps,
    Talker,
    named,
    open_house,
)

MAX_S = 600.0

# The events of connections come with each of them, and are tested by themselves.
OF_DELIVERIES = (ConnectionOpened, ConnectionClosed, DeliveryBegan, DeliveryEnded)


class Heard:
    """The events of a test."""

    def __init__(self) -> None:
        self.events = Events()
        self.all: list[Event] = []
        self.events.listen(self.all.append)

    @property
    def kinds(self) -> list[str]:
        """The names of the events about calls."""
        return [type(each).__name__ for each in self.all if not isinstance(each, OF_DELIVERIES)]

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.all if isinstance(each, kind)]

    def only(self, kind: type[Any]) -> Any:
        (found,) = self.of(kind)
        return found


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=MAX_S, announce_after_s=0)


async def test_events_know_whether_anything_listens() -> None:
    events, seen = Events(), list[Event]()
    assert not events.is_heard
    events.listen(seen.append)
    assert events.is_heard
    events.unlisten(seen.append)
    assert not events.is_heard


def test_the_kinds_of_calls_have_the_stream_of_theirs() -> None:
    of_streams = {each for each in KINDS if "stream" in each.__struct_fields__}
    assert set(CALL_KINDS) == of_streams


async def test_a_call_begins_and_ends(heard: Heard, server: Server) -> None:
    steps = Steps(server)
    async with open_house(server, events=heard.events) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        steps.log("one", "two")
        steps.finish()
        await talker.answer(1)
        await talker.leave()
    assert heard.kinds == ["CallBegan", "CallEnded"]
    began, ended = heard.only(CallBegan), heard.only(CallEnded)
    assert (began.transport, began.http) == ("memory", None)
    assert (ended.outcome, ended.why) == (Outcome.COMPLETED, "")
    assert ended.stream is began.stream
    assert ended.stream.state.last == 3


@pytest.mark.parametrize(
    ("tool", "outcome", "why"),
    [("wrong", Outcome.COMPLETED, "tool_error"), ("large", Outcome.FAILED, "too_large")],
)
async def test_the_end_of_a_call_says_why(
    heard: Heard, server: Server, tool: str, outcome: Outcome, why: str
) -> None:
    @server.tool
    async def wrong() -> str:
        raise ValueError("a secret of the tool's")

    @server.tool
    async def large() -> str:
        return "x" * (server.limits.message_bytes_max + 1)

    async with open_house(server, events=heard.events) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, tool)
        await talker.answer(1)
    ended = heard.only(CallEnded)
    assert (ended.outcome, ended.why) == (outcome, why)


async def test_a_call_is_detached_and_resumed(heard: Heard, server: Server) -> None:
    steps = Steps(server)
    async with open_house(server, events=heard.events) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "step")
        await talker.leave()
        assert heard.only(CallDetached).why == "gone"
        steps.log("one", "two")
        await trio.testing.wait_all_tasks_blocked()
        again = await house.dial(POSITIONS)
        await again.ask(2, "stream/resume", **named(stream), after=0)
        await again.find(lambda m: m.get("params", {}).get("data") == "two")
        steps.finish()
        await again.answer(1)
        await again.leave()
    resumed = heard.only(CallResumed)
    assert (resumed.transport, resumed.after, resumed.replayed) == ("memory", 0, 2)
    assert heard.kinds == ["CallBegan", "CallDetached", "CallResumed", "CallEnded"]
    first, second = heard.of(DeliveryEnded)
    assert (first.sent, first.replayed) == (0, 0)
    assert (second.sent, second.replayed) == (3, 2)
    assert [each.delivery for each in heard.of(DeliveryBegan)] == [first.delivery, second.delivery]


async def test_a_client_that_displaces_another_is_resumed_and_nothing_is_detached(
    heard: Heard, server: Server
) -> None:
    steps = Steps(server)
    async with open_house(server, events=heard.events) as house:
        talker, other = await house.dial(), await house.dial()
        stream = await talker.begin(1, "step")
        await other.ask(2, "stream/resume", **named(stream))
        await talker.answer(1)
        steps.finish()
        await other.answer(2)
    assert heard.kinds == ["CallBegan", "CallResumed", "CallEnded"]
    assert len(heard.of(DeliveryEnded)) == 2


async def test_a_resume_that_is_refused_is_told_with_its_reason(
    heard: Heard, server: Server
) -> None:
    async with open_house(server, events=heard.events) as house:
        talker = await house.dial()
        await talker.request(2, "stream/resume", **named("nothing"))
    assert heard.only(ResumeRefused) == ResumeRefused("stream_not_found", "memory")


async def test_questions_are_told_with_whether_a_client_is_there(
    heard: Heard, server: Server
) -> None:
    steps = Steps(server)
    async with open_house(server, events=heard.events) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "step")
        steps.ask()
        asked = await talker.find(lambda m: m.get("method") == "elicitation/create")
        await talker.say({"id": asked["id"], "result": {"action": "decline"}})
        await trio.testing.wait_all_tasks_blocked()
        await talker.leave()
        steps.ask()
        await trio.testing.wait_all_tasks_blocked()
        again = await house.dial(POSITIONS)
        await again.ask(2, "stream/resume", **named(stream), after=1)
        asked = await again.find(lambda m: m.get("method") == "elicitation/create")
        await again.say({"id": asked["id"], "result": {"action": "decline"}})
        steps.finish()
        await again.answer(1)
    asks, answers = heard.of(CallAsked), heard.of(CallAnswered)
    assert [each.is_attached for each in asks] == [True, False]
    assert {each.method for each in asks} == {"elicitation/create"}
    assert [each.request_id for each in answers] == [each.request_id for each in asks]


async def test_a_call_whose_client_cannot_come_back_is_dropped(
    heard: Heard, server: Server
) -> None:
    Steps(server)
    async with open_house(server, events=heard.events) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        await trio.testing.wait_all_tasks_blocked()
        await talker.leave()
        ended = heard.only(CallEnded)
    assert (ended.outcome, ended.why) == (Outcome.CANCELLED, "dropped")


async def test_a_cancel_and_an_abandonment_end_a_call(
    heard: Heard, server: Server, autojump_clock: MockClock
) -> None:
    Steps(server)
    async with open_house(server, events=heard.events) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        await talker.tell("notifications/cancelled", requestId=1)
        await trio.sleep(1)
        await talker.begin(2, "step")
        await talker.leave()
        await trio.sleep(MAX_S)
    assert [(each.outcome, each.why) for each in heard.of(CallEnded)] == [
        (Outcome.CANCELLED, "cancelled"),
        (Outcome.ABANDONED, "abandoned"),
    ]


async def test_a_result_that_no_client_fetched_is_told(
    heard: Heard, server: Server, autojump_clock: MockClock
) -> None:
    steps = Steps(server)
    async with open_house(server, events=heard.events) as house:
        talker = await house.dial(POSITIONS)
        await talker.begin(1, "step")
        await talker.leave()
        steps.finish()
        await trio.sleep(2 * MAX_S)
    assert heard.kinds == ["CallBegan", "CallDetached", "CallEnded", "ResultAbandoned"]
    assert heard.only(ResultAbandoned).stream is heard.only(CallEnded).stream


async def test_a_restart_interrupts_calls_or_goes_on_with_them(
    heard: Heard, server: Server
) -> None:
    go = trio.Event()

    @server.tool(restart=True)
    async def again(call: Call) -> str:
        await go.wait()
        return "done"

    @server.tool
    async def once(call: Call) -> str:
        await trio.sleep_forever()
        raise AssertionError

    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring, events=heard.events) as house:
        talker = await house.dial()
        await talker.begin(1, "again")
        await talker.begin(2, "once")
        after_kill = house.as_after_a_crash()
    assert tools(heard.of(CallReleased)) == ["again"]
    assert tools(heard.of(CallInterrupted)) == ["once"]
    ended = heard.only(CallEnded)
    assert (tools([ended]), ended.why) == (["once"], "interrupted")

    second = Heard()
    async with open_house(
        server, journal=after_kill, keyring=keyring, events=second.events
    ) as house:
        go.set()
        await trio.testing.wait_all_tasks_blocked()
    assert tools(second.of(CallInterrupted)) == ["once"]
    assert tools(second.of(CallRestarted)) == ["again"]
    assert sorted(tools(second.of(CallEnded))) == ["again", "once"]


def tools(told: list[Any]) -> list[str]:
    return [
        each.stream.record.origin.split(b'"name":"')[1].split(b'"')[0].decode() for each in told
    ]


async def test_connections_open_and_close(heard: Heard, server: Server) -> None:
    async with open_house(server, events=heard.events) as house:
        talker = await house.dial()
        opened = heard.only(ConnectionOpened)
        assert opened.connection.transport == "memory"
        assert not heard.of(ConnectionClosed)
        await talker.leave()
        assert heard.only(ConnectionClosed).connection is opened.connection


async def test_a_listener_that_fails_does_not_harm_the_call(server: Server) -> None:
    steps, events = Steps(server), Events()

    def fail(event: Event) -> None:
        raise ValueError("a listener's fault")

    events.listen(fail)
    after = Heard()
    events.listen(after.all.append)
    with structlog.testing.capture_logs() as logged:
        async with open_house(server, events=events) as house:
            talker: Talker = await house.dial(STREAMS)
            await talker.begin(1, "step")
            steps.finish()
            answer: Json = await talker.answer(1)
    assert "result" in answer
    assert "CallEnded" in after.kinds
    assert {"CallBegan", "CallEnded"} <= {str(each.get("of")) for each in logged}
