"""The registry shows what lives: calls in memory, evicted ones, connections, and counts."""

from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Limits, Server
from streams.engine.lifecycle import StreamState
from streams.journal.memory import MemoryJournal
from streams.journal.records import Record
from streams.keys import SHOWN_LETTERS
from streams.observe.registry import NoSuchCall, Registry, Wanted
from tests.rigs.server import POSITIONS, STREAMS, House, Steps, Talker, open_house

SERVER_LIMITS = Limits(resident_max=0)


@pytest.fixture
def server() -> Server:
    return Server("registry", limits=SERVER_LIMITS)


@pytest.fixture
async def house(server: Server, steps: Steps) -> AsyncIterator[House]:
    async with open_house(server) as house:
        yield house


def registry_of(house: House) -> Registry:
    return Registry(house.journal, house.running.engine)


async def begun(house: House, steps: Steps, id: int = 1) -> tuple[Talker, str]:
    """A call that has logged one message, and its streamId."""
    talker = await house.dial(POSITIONS)
    stream = await talker.begin(id, "step")
    steps.log("hello")
    await talker.find(lambda m: m.get("method") == "notifications/message")
    await wait_all_tasks_blocked()
    return talker, stream["streamId"]


async def test_a_running_call_is_shown_with_its_client(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    _, stream = await begun(house, steps)
    registry = registry_of(house)
    [call] = (await registry.calls()).calls
    assert (call.tool, call.state, call.principal) == ("step", "running", "alice")
    assert call.id == stream[:SHOWN_LETTERS]
    assert (call.numbered, call.durable, call.handed, call.pending) == (1, 1, 1, 1)
    assert call.is_attached
    assert call.expires_at is None
    [connection] = registry.connections()
    assert connection.number == call.connection
    assert (connection.client, connection.calls) == ("talker", (call.id,))
    assert registry.connection(connection.number) is not None
    assert registry.connection(99) is None


async def test_a_detached_call_says_when_it_expires(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker, stream = await begun(house, steps)
    await talker.leave()
    call = await registry_of(house).call(stream)
    assert not call.is_attached
    assert call.expires_at is not None
    assert call.state == "running"


async def test_a_question_is_shown_until_it_is_answered(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker, stream = await begun(house, steps)
    steps.ask()
    asked = await talker.question()
    registry = registry_of(house)
    call = await registry.call(stream)
    assert call.state == "asking"
    [question] = call.questions
    assert (question.method, question.seq) == ("elicitation/create", 2)
    assert question.request_id == asked["id"]
    assert registry.counts().questions == 1
    await talker.say({"id": asked["id"], "result": {"action": "decline"}})
    await wait_all_tasks_blocked()
    assert (await registry.call(stream)).questions == ()


async def test_a_question_that_is_nested_too_deeply_hides_no_call(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker, stream = await begun(house, steps)
    steps.ask()
    await talker.question()
    [kept] = house.running.engine.index
    [(request_id, question)] = kept.state.questions.items()
    deep = b'{"jsonrpc":"2.0","id":1,"method":"x","params":' + b"[" * 100_000 + b"]" * 100_000
    kept.state.questions[request_id] = msgspec.structs.replace(question, line=deep + b"}\n")
    [shown] = (await registry_of(house).call(stream)).questions
    assert (shown.request_id, shown.method) == (request_id, "")


async def test_an_evicted_call_is_found_in_the_journal(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker, stream = await begun(house, steps)
    await talker.leave()
    steps.finish()
    await trio.sleep(30)
    registry = registry_of(house)
    assert not list(registry.live())
    [call] = (await registry.calls()).calls
    assert (call.state, call.is_in_memory, call.numbered, call.pending) == (
        "completed",
        False,
        2,
        2,
    )
    assert await registry.find(stream[:8]) == stream
    runs = await registry.runs(stream, 0, bytes_max=10_000)
    assert sum(run.count for run in runs) == 2
    counts = registry.counts()
    assert (counts.running, counts.evicted, counts.pending) == (0, 1, 0)


async def test_a_call_whose_result_says_is_error_has_failed(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    """In memory, and once it has left that."""
    talker, _ = await begun(house, steps)
    steps.fail()
    answer = await talker.find(lambda m: "result" in m and m["result"].get("isError"))
    registry = registry_of(house)
    wanted = Wanted(states=frozenset(["failed"]))
    [call] = (await registry.calls(wanted=wanted)).calls
    assert (call.state, call.is_in_memory, answer["id"]) == ("failed", True, 1)
    await talker.leave()
    await trio.sleep(30)
    [call] = (await registry.calls(wanted=wanted)).calls
    assert (call.state, call.is_in_memory) == ("failed", False)


async def test_counts_are_those_of_this_process(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    await begun(house, steps, 1)
    counts = registry_of(house).counts()
    assert (counts.running, counts.attached, counts.pending) == (1, 1, 1)
    assert counts.pending_bytes > 0
    assert sum(counts.connections.values()) == 1


async def test_a_call_of_another_replica_is_not_said_to_be_without_a_client(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    """The record has no connection, and says nothing of questions: only the replica knows."""
    _, stream = await begun(house, steps)
    record = await house.journal.find(stream)
    assert record is not None

    class Shared:
        """A journal in which another replica runs this call."""

        async def find(self, _: str) -> Record:
            return msgspec.structs.replace(record, owner="b3f76af6fb5de4e4")

    call = await Registry(cast(Any, Shared())).call(stream)
    assert (call.state, call.is_attached, call.is_elsewhere) == ("running", False, True)
    call = await registry_of(house).call(stream)
    assert (call.is_attached, call.is_elsewhere) == (True, False)


async def test_the_bytes_of_messages_from_before_a_restart_are_not_known(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    _, stream = await begun(house, steps)
    record = await house.journal.find(stream)
    assert record is not None
    state = StreamState(record, SERVER_LIMITS)
    assert (state.last, state.kept_bytes, state.unmeasured) == (1, 0, 1)
    state.add(b'{"jsonrpc":"2.0"}\n')
    assert (state.kept_bytes > 0, state.unmeasured) == (True, 1)
    state.committed(2)
    state.deliver(1)
    assert state.unmeasured == 0


async def test_pages_go_from_the_newest_to_the_oldest(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker = await house.dial(STREAMS)
    for number in range(7):
        await talker.begin(number, "step")
    registry = registry_of(house)
    first = await registry.calls(limit=3)
    second = await registry.calls(limit=3, before=first.before)
    third = await registry.calls(limit=3, before=second.before)
    numbers = [call.number for page in (first, second, third) for call in page.calls]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) == 7
    assert third.before is None


async def test_calls_are_chosen_by_state_and_by_text(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker = await house.dial(STREAMS, "bob")
    await talker.begin(1, "step")
    registry = registry_of(house)

    async def found(wanted: Wanted) -> int:
        return len((await registry.calls(wanted=wanted)).calls)

    assert await found(Wanted(frozenset(["running"]))) == 1
    assert await found(Wanted(frozenset(["completed"]))) == 0
    assert await found(Wanted(text="BOB")) == 1
    assert await found(Wanted(frozenset(["running"]), "alice")) == 0


async def test_an_id_that_is_unknown_or_not_unique_is_refused(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    registry = registry_of(house)
    with pytest.raises(NoSuchCall, match="No call"):
        await registry.find("x")
    talker = await house.dial(STREAMS)
    one = (await talker.begin(1, "step"))["streamId"]
    await talker.begin(2, "step")
    with pytest.raises(NoSuchCall, match="No call"):
        await registry.find("")
    with pytest.raises(NoSuchCall, match="Several calls"):
        await registry.find(one[:1])


async def test_the_secret_letters_of_an_id_are_not_found_by_asking(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    _, stream = await begun(house, steps)
    registry = registry_of(house)
    assert await registry.find(stream[:SHOWN_LETTERS]) == stream
    refusals = set()
    for guess in (stream[: SHOWN_LETTERS + 1], stream[:SHOWN_LETTERS] + "!", stream):
        with pytest.raises(NoSuchCall) as caught:
            await registry.find(guess)
        refusals.add(str(caught.value))
    assert len(refusals) == 1, "a right guess is answered like a wrong one"


async def test_a_journal_alone_shows_calls_that_no_process_runs(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    _, stream = await begun(house, steps)
    left = house.as_after_a_crash()
    assert isinstance(left, MemoryJournal)
    call = await Registry(left, is_served=False).call(stream)
    assert (call.state, call.is_in_memory, call.transport) == ("stopped", False, "")
