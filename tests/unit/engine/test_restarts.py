"""Calls that are run again after their server has died, over a journal in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.messages import NESTED_MAX
from streams.protocol.extension import KEY
from streams.server.call import SyncCall
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    REQUESTS,
    STREAMS,
    House,
    Json,
    Talker,
    methods,
    named,
    open_house,
    reason,
    said,
    text_of,
)

Work = Callable[[Call], Any]


class Lives:
    """A server whose process may die; its tool does something else in each life."""

    def __init__(self, **limits: Any) -> None:
        self.keyring = Keyring.load(None)
        self.journal: Journal = MemoryJournal()
        self.limits = Limits(**limits)
        self.level = "debug"

    def house(self, work: Work, **settings: Any) -> Any:
        """A life, in which the tool `step` does this."""
        server = Server("tested", announce_after_s=0, limits=self.limits)
        server.tool(**({"name": "step", "restart": True} | settings))(work)
        return open_house(server, journal=self.journal, keyring=self.keyring)

    def die(self, house: House) -> None:
        """The next life begins with what the journal has now."""
        self.journal = house.as_after_a_crash()


@pytest.fixture
def lives() -> Lives:
    return Lives()


async def forever(call: Call) -> None:
    await trio.sleep_forever()


async def begin(house: House, capabilities: Json = POSITIONS) -> tuple[Talker, Json]:
    talker = await house.dial(capabilities)
    stream = await talker.begin(1, "step")
    return talker, stream


async def rest_of(house: House, stream: Json, after: int | None = None) -> list[Json]:
    """The messages that a client gets that resumes, up to the end of the stream."""
    talker = await house.dial(POSITIONS)
    cursor = {} if after is None else {"after": after}
    return await talker.resume(2, stream, **cursor)


def numbered(first: int, last: int, *, then: Work | None = None) -> Work:
    async def work(call: Call) -> str:
        for n in range(first, last + 1):
            await call.notify("count", {"n": n})
        if then is not None:
            await then(call)
        return f"{last}"

    return work


def counts(messages: list[Json]) -> list[int]:
    return [m["params"]["n"] for m in messages if m.get("method") == "count"]


async def test_what_was_sent_is_not_sent_again(lives: Lives) -> None:
    async with lives.house(numbered(1, 5, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 5)
        lives.die(house)
    async with lives.house(numbered(1, 8)) as house:
        came = await rest_of(house, stream, after=2)
    assert counts(came) == [3, 4, 5, 6, 7, 8]
    assert text_of(next(m for m in came if m.get("id") == 1)) == "8"


async def test_a_call_begins_behind_its_last_checkpoint(lives: Lives) -> None:
    async def first(call: Call) -> None:
        assert call.restored is None
        await call.notify("count", {"n": 1})
        await call.checkpoint({"done": 1})
        await call.notify("count", {"n": 2})
        await call.flush()
        await forever(call)

    restored = []

    async def second(call: Call) -> None:
        restored.append(call.restored)
        await call.notify("count", {"n": 2})
        await call.notify("count", {"n": 3})

    async with lives.house(first) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 2)
        lives.die(house)
    async with lives.house(second) as house:
        assert counts(await rest_of(house, stream)) == [1, 2, 3]
    assert restored == [{"done": 1}]


async def test_what_is_acked_is_kept_until_the_next_checkpoint(
    lives: Lives, autojump_clock: MockClock
) -> None:
    async with lives.house(numbered(1, 5, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 5)
        await talker.tell("notifications/stream/ack", streamId=stream["streamId"], seq=5)
        await trio.sleep(2)
        lives.die(house)
    async with lives.house(numbered(1, 6)) as house:
        assert counts(await rest_of(house, stream)) == [6]
        talker = await house.dial(POSITIONS)
        gone = await talker.request(3, "stream/resume", streamId=stream["streamId"], after=3)
        assert reason(gone) == "messages_gone"


async def test_who_sends_something_else_is_ended_with_an_error(lives: Lives) -> None:
    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
        lives.die(house)
    with structlog.testing.capture_logs():
        async with lives.house(numbered(2, 9)) as house:
            came = await rest_of(house, stream)
    assert counts(came) == [1, 2, 3]
    error = next(m for m in came if m.get("id") == 1)["error"]
    assert reason(error) == "interrupted"
    assert "did not repeat itself (it sends another message than before)" in error["message"]


async def test_who_is_done_too_early_is_ended_with_an_error(lives: Lives) -> None:
    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
        lives.die(house)
    async with lives.house(numbered(1, 2)) as house:
        came = await rest_of(house, stream)
    assert (
        "has not sent all of that again"
        in next(m for m in came if m.get("id") == 1)["error"]["message"]
    )


async def test_one_that_fails_meanwhile_fails(lives: Lives) -> None:
    async def fail(call: Call) -> None:
        raise ValueError("the disk is gone")

    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
        lives.die(house)
    with structlog.testing.capture_logs():
        async with lives.house(fail) as house:
            came = await rest_of(house, stream)
    answer = next(m for m in came if m.get("id") == 1)
    assert answer["result"]["isError"]
    assert text_of(answer) == "the disk is gone"


async def test_progress_and_logs_that_were_dropped_are_dropped_again(
    lives: Lives, autojump_clock: MockClock
) -> None:
    async def work(call: Call) -> None:
        for n in range(1, 6):
            await call.progress(n)
            await call.log("info", f"step {n}")
        await call.notify("count", {"n": 1})
        await call.flush()

    async def and_wait(call: Call) -> None:
        await work(call)
        await forever(call)

    async with lives.house(and_wait) as house:
        talker = await house.dial(POSITIONS)
        await talker.request(9, "logging/setLevel", level="error")
        await talker.call(1, "step", token="t")
        stream = await talker.announced()
        await talker.find(lambda m: m.get("method") == "count")
        assert methods(talker.seen).count("notifications/message") == 0
        lives.die(house)
    async with lives.house(work) as house:
        came = await rest_of(house, stream)
    assert methods(came).count("notifications/progress") == 5
    assert methods(came).count("notifications/message") == 0
    assert counts(came) == [1]


@pytest.mark.parametrize("token", ["second", None])
async def test_a_call_that_was_made_again_with_another_progress_token_repeats_itself(
    lives: Lives, token: str | None
) -> None:
    async def report(call: Call, last: int) -> None:
        for n in range(1, last + 1):
            await call.progress(n)
            await call.log("info", n)
        await call.flush()

    async def first(call: Call) -> None:
        await report(call, 1)
        await made_again.wait()
        await report(call, 2)
        await forever(call)

    async def second(call: Call) -> str:
        await made_once_more.wait()
        await report(call, 1)
        await report(call, 2)
        return "done"

    def made(id: int, token: str | None) -> Json:
        meta = {KEY: "k" * 40} | ({} if token is None else {"progressToken": token})
        return {"id": id, "name": "step", "arguments": {}, "_meta": meta}

    made_again, made_once_more = trio.Event(), trio.Event()
    async with lives.house(first) as house:
        talker = await house.dial(STREAMS)
        await talker.ask(method="tools/call", **made(1, "first"))
        await talker.find(lambda m: said([m]) == [1])
        await talker.leave()
        talker = await house.dial(STREAMS)
        await talker.ask(method="tools/call", **made(2, token))
        await wait_all_tasks_blocked()
        made_again.set()
        await talker.find(lambda m: said([m]) == [2])
        lives.die(house)
    async with lives.house(second) as house:
        talker = await house.dial(STREAMS)
        await talker.ask(method="tools/call", **made(3, token))
        await wait_all_tasks_blocked()
        made_once_more.set()
        assert text_of(await talker.answer(3)) == "done"


async def test_progress_that_was_held_back_comes_before_the_checkpoint() -> None:
    lives = Lives(unsent_entries_max=2)

    async def first(call: Call) -> None:
        await call.request("elicitation/create", {"message": "?"})
        for n in range(1, 6):
            await call.progress(n)
        await call.checkpoint("reported")
        await forever(call)

    async with lives.house(first) as house:
        talker = await house.dial(POSITIONS)
        await talker.call(1, "step", token="t")
        stream = await talker.announced()
        asked = await talker.question()
        await talker.leave()
        talker = await house.dial(POSITIONS)
        await talker.say({"id": asked["id"], "result": {}})
        await wait_all_tasks_blocked()
        lives.die(house)
    async with lives.house(numbered(1, 1)) as house:
        came = await rest_of(house, stream, after=1)
    reported = [m["params"]["progress"] for m in came if "progress" in m.get("params", {})]
    assert reported == [1, 2, 5]
    assert counts(came) == [1]


async def test_who_fails_with_other_logs_than_before_has_not_repeated_itself(lives: Lives) -> None:
    async def logging(call: Call, *texts: str) -> None:
        for text in texts:
            await call.log("info", text)
        await call.flush()

    async def first(call: Call) -> None:
        await logging(call, "a", "b")
        await forever(call)

    async def second(call: Call) -> None:
        await logging(call, "a", "c")
        raise ValueError("too bad")

    async with lives.house(first) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: said([m]) == ["b"])
        lives.die(house)
    with structlog.testing.capture_logs():
        async with lives.house(second) as house:
            came = await rest_of(house, stream)
    assert reason(next(m for m in came if m.get("id") == 1)["error"]) == "interrupted"
    assert said(came) == ["a", "b"]


async def ask(call: Call) -> str:
    await call.notify("count", {"n": 1})
    answer = await call.request("elicitation/create", {"message": "?"})
    return str(answer["says"])


async def test_a_question_is_not_asked_twice(lives: Lives) -> None:
    async def ask_and_wait(call: Call) -> None:
        await ask(call)
        await forever(call)

    async with lives.house(ask_and_wait) as house:
        talker, stream = await begin(house)
        asked = await talker.question()
        await talker.say({"id": asked["id"], "result": {"says": "yes"}})
        await wait_all_tasks_blocked()
        lives.die(house)
    async with lives.house(ask) as house:
        came = await rest_of(house, stream, after=2)
    assert "elicitation/create" not in methods(came)
    assert text_of(next(m for m in came if m.get("id") == 1)) == "yes"


async def test_a_question_that_nobody_answered_stands(lives: Lives) -> None:
    async with lives.house(ask) as house:
        talker, stream = await begin(house)
        asked = await talker.question()
        lives.die(house)
    async with lives.house(ask) as house:
        talker = await house.dial(POSITIONS)
        assert (await talker.poll(3, stream, after=2))["hasRequest"]
        await talker.ask(2, "stream/resume", streamId=stream["streamId"], after=2)
        again = await talker.question()
        assert again["id"] == asked["id"]
        await talker.say({"id": asked["id"], "result": {"says": "late"}})
        assert text_of(await talker.answer(1)) == "late"


async def test_an_answer_may_come_while_nobody_runs(
    lives: Lives, autojump_clock: MockClock
) -> None:
    async with lives.house(ask) as house:
        talker, stream = await begin(house)
        asked = await talker.question()
        lives.die(house)
    async with lives.house(ask) as house:  # has begun to wait again
        lives.die(house)
    async with lives.house(ask) as house:  # waits before it begins for the third time
        talker = await house.dial(POSITIONS)
        await talker.ask(2, "stream/resume", streamId=stream["streamId"], after=2)
        await talker.question()
        await talker.say({"id": asked["id"], "result": {"says": "early"}})
        assert text_of(await talker.answer(1)) == "early"


async def test_who_stops_the_server_again_and_again_is_given_up(autojump_clock: MockClock) -> None:
    lives = Lives(restarts_max=3)
    began_at = []

    async def work(call: Call) -> None:
        began_at.append(trio.current_time())
        await call.notify("count", {"n": 1})
        await forever(call)

    async with lives.house(work) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count")
        lives.die(house)
    waited = []
    for n in range(2, 5):
        since = trio.current_time()
        async with lives.house(work) as house:
            await trio.sleep(10)
            assert len(began_at) == n
            lives.die(house)
        waited.append(began_at[-1] - since)
    assert waited == pytest.approx([0, 0.1, 0.2])
    async with lives.house(work) as house:
        came = await rest_of(house, stream)
    assert len(began_at) == 4
    error = next(m for m in came if m.get("id") == 1)["error"]
    assert reason(error) == "interrupted"
    assert error["data"]["attempts"] == 3


async def test_who_gets_further_each_time_is_not_given_up(autojump_clock: MockClock) -> None:
    lives = Lives(restarts_max=1)
    async with lives.house(numbered(1, 1, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count")
        lives.die(house)
    for n in range(2, 7):
        async with lives.house(numbered(1, n, then=forever)) as house:
            await trio.sleep(5)
            lives.die(house)
    async with lives.house(numbered(1, 7)) as house:
        assert counts(await rest_of(house, stream)) == list(range(1, 8))


async def test_a_shutdown_leaves_it_to_the_next_server(lives: Lives) -> None:
    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
    record = next(r for r in await lives.journal.claim())
    assert record.restart is not None
    assert record.restart.attempts == 0
    async with lives.house(numbered(1, 4)) as house:
        assert counts(await rest_of(house, stream, after=3)) == [4]


async def test_a_tool_that_is_gone_ends_as_interrupted(lives: Lives) -> None:
    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
        lives.die(house)
    async with lives.house(forever, restart=False) as house:
        came = await rest_of(house, stream)
    assert reason(next(m for m in came if m.get("id") == 1)["error"]) == "interrupted"


async def test_arguments_that_fit_no_more_end_it_as_interrupted(lives: Lives) -> None:
    async def strict(call: Call, rows: int) -> None:
        await forever(call)

    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
        lives.die(house)
    with structlog.testing.capture_logs() as logs:
        async with lives.house(strict) as house:
            came = await rest_of(house, stream)
    assert reason(next(m for m in came if m.get("id") == 1)["error"]) == "interrupted"
    assert any(line["event"] == "a call cannot be restarted" for line in logs)


async def test_a_cancelled_call_is_not_run_again(lives: Lives) -> None:
    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
        await talker.tell("notifications/cancelled", requestId=1)
        await wait_all_tasks_blocked()
        lives.die(house)
    async with lives.house(numbered(1, 3)) as house:
        talker = await house.dial(POSITIONS)
        refused = await talker.request(2, "stream/resume", streamId=stream["streamId"])
        assert reason(refused) == "cancelled"


async def test_a_resumable_request_goes_on_as_well(lives: Lives) -> None:
    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker = await house.dial(REQUESTS)
        await talker.call(1, "step")
        policy = await talker.policy()
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
        lives.die(house)
    async with lives.house(numbered(1, 4)) as house:
        talker = await house.dial(REQUESTS)
        await talker.ask(1, "requests/resume", resumeToken=policy["resumeToken"])
        assert text_of(await talker.answer(1)) == "4"
        assert counts(talker.seen) == [1, 2, 3, 4]


async def test_the_same_key_leads_to_the_call_that_is_run_again(lives: Lives) -> None:
    key = {KEY: "k" * 40}
    async with lives.house(numbered(1, 3, then=forever)) as house:
        talker = await house.dial(PLAIN)
        await talker.ask(1, "tools/call", name="step", _meta=key)
        await talker.find(lambda m: m.get("method") == "count" and m["params"]["n"] == 3)
        lives.die(house)
    async with lives.house(numbered(1, 4)) as house:
        talker = await house.dial(PLAIN)
        await talker.ask(7, "tools/call", name="step", _meta=key)
        assert text_of(await talker.answer(7)) == "4"
        assert counts(talker.seen) == [1, 2, 3, 4]


async def test_a_plain_call_is_not_run_again_and_its_checkpoints_cost_nothing(
    lives: Lives,
) -> None:
    async def work(call: Call) -> str:
        await call.checkpoint(1)
        return str(call.restored)

    async with lives.house(work) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        assert text_of(await talker.answer(1)) == "None"


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (object(), "unsupported"),
        ("x" * 65_600, "a checkpoint of 65602 bytes, of which there may be 65536"),
    ],
)
async def test_a_state_that_cannot_be_kept_fails_the_tool(
    lives: Lives, state: Any, says: str
) -> None:
    async def work(call: Call) -> None:
        await call.checkpoint(state)

    with structlog.testing.capture_logs():
        async with lives.house(work) as house:
            talker, _ = await begin(house)
            assert says in text_of(await talker.answer(1))


async def test_a_tool_without_restart_has_no_checkpoints(lives: Lives) -> None:
    async def work(call: Call) -> None:
        await call.checkpoint(1)

    with structlog.testing.capture_logs():
        async with lives.house(work, restart=False) as house:
            talker, _ = await begin(house)
            assert "it is never restarted" in text_of(await talker.answer(1))


def test_pages_cannot_be_made_again() -> None:
    server = Server("tested")

    with pytest.raises(ValueError, match="cannot be restarted"):

        @server.tool(pages=True, restart=True)
        async def pages(call: Call) -> Any:
            yield 1


def test_who_cannot_come_back_needs_no_restart() -> None:
    server = Server("tested")
    with pytest.raises(ValueError, match="no client can resume after a restart"):

        @server.tool(restart=True, resume_max_s=0)
        async def short(call: Call) -> None: ...


async def test_a_plain_function_goes_on_as_well(lives: Lives) -> None:
    def first(call: SyncCall) -> None:
        call.notify("count", {"n": 1})
        call.checkpoint("at 1")
        call.notify("count", {"n": 2})
        call.request("elicitation/create", {"message": "?"})

    def second(call: SyncCall) -> str:
        call.notify("count", {"n": 2})
        call.request("elicitation/create", {"message": "?"})
        return str(call.restored)

    async with lives.house(first) as house:
        talker, stream = await begin(house)
        asked = await talker.question()
        lives.die(house)
        await talker.say({"id": asked["id"], "result": {}})  # or else its thread would wait
        await talker.answer(1)
    async with lives.house(second) as house:
        talker = await house.dial(POSITIONS)
        await talker.ask(2, "stream/resume", streamId=stream["streamId"])
        asked = await talker.question()
        await talker.say({"id": asked["id"], "result": {}})
        assert text_of(await talker.answer(1)) == "at 1"
        assert counts(talker.seen) == [1, 2]


async def test_questions_of_a_run_before_do_not_outlive_the_call(
    lives: Lives, autojump_clock: MockClock
) -> None:
    async def asks(call: Call) -> None:
        await call.request("elicitation/create", {"message": "?"})

    async with lives.house(asks) as house:
        talker, stream = await begin(house)
        await talker.question()
        lives.die(house)
    async with lives.house(forever) as house:
        talker = await house.dial(POSITIONS)
        await talker.ask(2, "stream/resume", **named(stream))
        await wait_all_tasks_blocked()
        assert len(house.running.engine._streams.answers) == 1
        await talker.tell("notifications/cancelled", requestId=1)
        await wait_all_tasks_blocked()
        assert not house.running.engine._streams.answers


async def test_a_call_that_is_nested_as_deeply_as_may_be_is_taken_over(
    lives: Lives, autojump_clock: MockClock
) -> None:
    async def ends(call: Call) -> str:
        return "done"

    nested: list[Any] = []
    for _ in range(NESTED_MAX - 4):  # besides the message, its params, and `_meta`
        nested = [nested]
    async with lives.house(forever) as house:
        talker = await house.dial(POSITIONS)
        await talker.ask(1, "tools/call", name="step", _meta={"nested": nested})
        stream = await talker.announced()
        lives.die(house)
    async with lives.house(ends) as house:
        came = await rest_of(house, stream)
    assert text_of(next(m for m in came if m.get("id") == 1)) == "done"
