"""Interim answers, `wait_for_call` and `list_calls`, on the engine with a mock clock."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Client, Limits, Server, messages
from streams.backends import Guest, PatienceSettings
from streams.engine.stream import UNHEARD, Stream
from streams.errors import Full, Refusal
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.server import patience as module
from streams.server.backend import Received, Run, SessionInfo, Standing
from streams.server.local import LocalBackend
from streams.server.running import open_backend
from tests.rigs.replicas import open_replicas
from tests.rigs.server import (
    EXTENDED,
    PLAIN,
    POSITIONS,
    RESIDENT_MAX,
    STREAMS,
    House,
    Json,
    Steps,
    Talker,
    methods,
    open_house,
    reason,
    said,
    text_of,
)
from tests.rigs.troubled import Troubled
from tests.rigs.web import EVENTS, JSON, browsing
from transports.memory import MemoryServer

USER = "os(1000)"
PATIENT = PatienceSettings(patience_s=2)
KEPT = "mcp-streams/call"


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    return Server("tested", limits=Limits(resident_max=request.param))


def code_in(answer: Json) -> str:
    """The short name in an interim answer."""
    code = str(answer["result"]["_meta"][KEPT])
    assert f'call="{code}"' in text_of(answer)
    assert "isError" not in answer["result"]
    return code


async def wait_for(talker: Talker, id: int, code: str, **more: Any) -> Json:
    await talker.call(id, "wait_for_call", call=code, **more)
    return await talker.answer(id)


async def calls(talker: Talker, id: int | str = "list") -> list[Json]:
    await talker.call(id, "list_calls")
    found: list[Json] = (await talker.answer(id))["result"]["structuredContent"]["calls"]
    return found


# Interim answers


async def test_a_long_call_is_answered_and_its_result_fetched(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        began = trio.current_time()
        await talker.call(1, "step")
        interim = await talker.answer(1)
        assert trio.current_time() - began == pytest.approx(2, abs=0.1)
        assert text_of(interim).startswith("Still running. Call `wait_for_call`")
        steps.finish("built")
        for number in (2, 3):  # as often as one likes
            answer = await wait_for(talker, number, code_in(interim))
            assert answer["result"] == {"content": [{"type": "text", "text": "built"}]}


async def test_a_short_call_is_answered_as_ever(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        steps.finish()
        await talker.call(1, "step")
        assert text_of(await talker.answer(1)) == "done"
        await trio.sleep(10)
        await talker.request(2, "ping")
        assert methods(talker.seen) == ["result", "result"]


async def test_an_interim_answer_tells_the_latest_progress(
    server: Server, autojump_clock: MockClock
) -> None:
    @server.tool
    async def build(call: Call) -> str:
        for number in range(1, 41):
            await call.progress(number, 40, "compiling")
            await trio.sleep(0.15)
        return "built"

    async with open_house(server, patience=PATIENT) as house:
        silent = await house.dial(PLAIN, USER)
        await silent.call(1, "build")
        interim = await silent.answer(1)
        assert text_of(interim).startswith("Still running (14/40 compiling). Call")
        assert methods(silent.seen) == ["result"]
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "build", token="mine")
        code = code_in(await talker.answer(1))
        values = [m["params"]["progress"] for m in talker.seen[:-1]]
        assert values == list(range(1, 15))
        assert {m["params"]["progressToken"] for m in talker.seen[:-1]} == {"mine"}
        await trio.sleep(1)
        talker.seen.clear()
        await talker.call(2, "wait_for_call", token=77, call=code)
        answer = await talker.answer(2)
        assert answer["id"] == 2
        assert {m["params"]["progressToken"] for m in talker.seen[:-1]} == {77}
        values = [m["params"]["progress"] for m in talker.seen[:-1]]
        assert values == list(range(values[0], values[-1] + 1))
        assert values[0] > 14
        assert code_in(answer) == code
        last = await wait_for(talker, 3, code)
        assert text_of(last) == "built"


async def test_progress_comes_to_the_waiter_as_the_backend_has_sent_it(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    line = b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,%s}}\n'
    odd = b'"progress":1,"x":1e400'
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        steps.do(lambda call: call._stream.send_progress(UNHEARD, line % odd))
        code = code_in(await talker.answer(1))
        await talker.call(2, "wait_for_call", token=77, call=code)
        (told,) = await talker.channel.receive()
        assert odd in told
        assert b'"progressToken":77' in told
        assert code_in(await talker.answer(2)) == code


async def test_on_the_journal_an_interim_answer_is_nothing(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        steps.log("a")
        code = code_in(await talker.answer(1))
        steps.log("b")
        steps.finish()
        await wait_for(talker, 2, code)
        (stream,) = house.running.engine._streams.index.wanted(USER)
        (run,) = await house.journal.read(stream.id, stream.state.delivered, bytes_max=1 << 20)
        assert run.last == 3
        kept = [msgspec.json.decode(line) for line in run.lines]
        assert said(kept) == ["a", "b"][-len(kept) + 1 :]
        assert kept[-1]["id"] == 1
        assert text_of(kept[-1]) == "done"


async def test_what_was_logged_meanwhile_is_delivered_to_the_waiter(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        steps.log("before")
        code = code_in(await talker.answer(1))
        assert said(talker.seen) == ["before"]
        steps.log("between", "and")
        await wait_all_tasks_blocked()
        await talker.call(2, "wait_for_call", call=code)
        await wait_all_tasks_blocked()
        steps.log("after")
        steps.finish()
        await talker.answer(2)
        assert said(talker.seen) == ["before", "between", "and", "after"]
        await wait_for(talker, 3, code)
        assert said(talker.seen) == ["before", "between", "and", "after"]


async def test_an_open_question_is_asked_again_and_answered_by_the_waiter(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        first = await house.dial(PLAIN, USER)
        await first.call(1, "step")
        steps.ask()
        interim = await first.answer(1)
        assert "It waits for an answer" in text_of(interim)
        asked = next(m for m in first.seen if m.get("method") == "elicitation/create")
        await first.leave()
        second = await house.dial(PLAIN, USER)
        (listed,) = await calls(second)
        assert (listed["call"], listed["state"]) == (code_in(interim), "waiting for an answer")
        await second.call(1, "wait_for_call", call=listed["call"])
        again = await second.find(lambda m: m.get("method") == "elicitation/create")
        assert again == asked
        await second.say({"id": again["id"], "result": {"action": "accept"}})
        steps.finish()
        assert text_of(await second.answer(1)) == "done"
        assert steps.answers == [{"action": "accept"}]


async def test_a_question_while_somebody_waits_reaches_the_waiter(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        code = code_in(await talker.answer(1))
        await talker.call(2, "wait_for_call", call=code)
        await wait_all_tasks_blocked()
        steps.ask("sampling/createMessage")
        asked = await talker.find(lambda m: m.get("method") == "sampling/createMessage")
        await talker.say({"id": asked["id"], "result": {"x": 1}})
        steps.finish()
        assert text_of(await talker.answer(2)) == "done"
        assert steps.answers == [{"x": 1}]


async def test_an_error_is_fetched_verbatim(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        code = code_in(await talker.answer(1))
        steps.fail()
        failed = await wait_for(talker, 2, code)
        assert failed["result"]["isError"] is True
        assert text_of(failed) == "as it was told"
        assert [each["state"] for each in await calls(talker)] == ["failed"]


@pytest.mark.parametrize("wait_s", [0, 0.5, 1, 60])
async def test_a_wait_ends_when_it_says_or_when_patience_does(
    server: Server, steps: Steps, autojump_clock: MockClock, wait_s: float
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        code = code_in(await talker.answer(1))
        began = trio.current_time()
        assert code_in(await wait_for(talker, 2, code, wait_s=wait_s)) == code
        assert trio.current_time() - began == pytest.approx(min(wait_s, 2), abs=0.1)


@pytest.mark.parametrize("name", ["lower", "spaced"])
async def test_a_short_name_may_be_written_in_any_case(
    server: Server, steps: Steps, autojump_clock: MockClock, name: str
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        code = code_in(await talker.answer(1))
        steps.finish()
        written = code.lower().replace("0", "o") if name == "lower" else f" {code} "
        assert text_of(await wait_for(talker, 2, written)) == "done"


@pytest.mark.parametrize(
    "arguments", [{}, {"call": 7}, {"call": "K7Q2", "wait_s": "long"}, {"call": ""}, {"call": "A"}]
)
async def test_a_wait_for_nothing_that_is_kept_is_an_error_result(
    server: Server, steps: Steps, autojump_clock: MockClock, arguments: Json
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        await talker.answer(1)
        await talker.call(2, "wait_for_call", **arguments)
        assert (await talker.answer(2))["result"]["isError"] is True


# Clients


async def test_a_call_outlives_its_connection(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        first = await house.dial(PLAIN, USER)
        await first.call(1, "step")
        await wait_all_tasks_blocked()
        await first.leave()  # before any interim answer
        await trio.sleep(3600 * 20)
        second = await house.dial(PLAIN, USER)
        (listed,) = await calls(second)
        assert (listed["tool"], listed["state"]) == ("step", "running")
        assert listed["ageS"] == pytest.approx(3600 * 20, abs=5)
        steps.finish()
        assert text_of(await wait_for(second, 1, listed["call"])) == "done"
        assert [each["state"] for each in await calls(second)] == ["done"]


async def test_results_that_are_never_fetched_make_room_for_new_calls(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested", limits=Limits(streams_per_principal_max=3))

    @server.tool
    async def work(seconds: float) -> float:
        await trio.sleep(seconds)
        return seconds

    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        codes = []
        for number in range(6):
            await talker.call(number, "work", seconds=3 + number)
            codes.append(code_in(await talker.answer(number)))
            await trio.sleep(30)
        assert [each["call"] for each in await calls(talker)] == codes[:2:-1]
        for number in (3, 4, 5):
            assert text_of(await wait_for(talker, 10 + number, codes[number])) == f"{number + 3}.0"
        for number in range(3):
            await talker.call(30 + number, "work", seconds=1e5)
            await talker.answer(30 + number)
        refused = await talker.request(40, "tools/call", name="work", arguments={"seconds": 1})
        assert reason(refused) == "too_many_streams"  # these run


async def test_a_result_that_came_in_time_is_forgotten_when_it_was_confirmed(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested")

    @server.tool
    async def work() -> str:
        await trio.sleep(1)
        return "done"

    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "work")
        await talker.answer(1)
        (kept,) = await calls(talker)
        await trio.sleep(300)
        await talker.request(2, "ping")  # a sign of life
        await trio.sleep(300)
        assert kept["state"] == "done"
        assert await calls(talker) == []


async def test_a_call_ends_with_the_connection_that_alone_could_find_it(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        first = await house.dial(PLAIN, "conn(x)")
        await first.call(1, "step")
        await first.answer(1)
        await first.leave()
        assert steps.was_cancelled


@pytest.mark.parametrize("others", ["os(1001)", "conn(x)", "session(y)", "bearer(a, b)"])
async def test_principals_never_see_each_other_s_calls(
    server: Server, steps: Steps, autojump_clock: MockClock, others: str
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        code = code_in(await talker.answer(1))
        other = await house.dial(PLAIN, others)
        assert await calls(other) == []
        answer = await wait_for(other, 1, code)
        assert answer["result"]["isError"] is True
        assert answer["result"]["content"] == [
            {
                "type": "text",
                "text": f"No call '{code}' of yours is kept: `list_calls` shows those that are.",
            }
        ]
        steps.finish()
        assert text_of(await wait_for(talker, 2, code)) == "done"


@pytest.mark.parametrize("capabilities", [STREAMS, EXTENDED, POSITIONS])
async def test_a_client_that_can_resume_waits_by_itself(
    server: Server, steps: Steps, autojump_clock: MockClock, capabilities: Json
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(capabilities, USER)
        await talker.begin(1, "step")
        await trio.sleep(600)
        other = await house.dial(PLAIN, USER)
        (listed,) = await calls(other)
        refused = await wait_for(other, 1, listed["call"])
        assert text_of(refused).startswith("Another client of yours is connected")
        steps.finish()
        assert text_of(await talker.answer(1)) == "done"


async def test_the_call_of_a_client_that_can_resume_may_be_fetched_once_it_is_gone(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(POSITIONS, USER)
        await talker.begin(1, "step")
        await talker.leave()
        other = await house.dial(PLAIN, USER)
        (listed,) = await calls(other)
        steps.finish()
        assert text_of(await wait_for(other, 1, listed["call"])) == "done"


async def test_the_newest_waiter_wins_and_the_other_is_told_so(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        first, second = [await house.dial(PLAIN, USER) for _ in range(2)]
        await first.call(1, "step")
        await wait_all_tasks_blocked()
        (listed,) = await calls(second)
        await second.call(5, "wait_for_call", call=listed["call"])
        assert code_in(await first.answer(1)) == listed["call"]
        await first.call(5, "wait_for_call", call=listed["call"])
        assert code_in(await second.answer(5)) == listed["call"]
        steps.finish()
        assert text_of(await first.answer(5)) == "done"


async def test_to_cancel_a_wait_does_not_cancel_the_call(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        first = await house.dial(PLAIN, USER)
        await first.call(7, "step")
        code = code_in(await first.answer(7))
        second = await house.dial(PLAIN, USER)
        await second.call(7, "wait_for_call", call=code)  # the same id, in another conversation
        await wait_all_tasks_blocked()
        await second.tell("notifications/cancelled", requestId=7, reason="the user")
        await wait_all_tasks_blocked()
        assert not steps.was_cancelled
        await first.call(8, "wait_for_call", call=code)
        await first.tell("notifications/cancelled", requestId=7)  # it was answered long ago
        await wait_all_tasks_blocked()
        steps.finish()
        assert text_of(await first.answer(8)) == "done"
        assert not steps.was_cancelled


async def test_names_that_collide_are_longer(
    server: Server, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: dict[str, str] = {}
    monkeypatch.setattr(module, "_code", lambda stream: codes.setdefault(stream, _next(codes)))

    @server.tool
    async def work(number: int) -> int:
        await trio.sleep(10)
        return number

    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        told = []
        for number in range(3):
            await talker.call(number, "work", number=number)
            told.append(code_in(await talker.answer(number)))
        assert told == ["AAAA", "AAAAA1", "AAAAA2"]
        await trio.sleep(20)
        for number, code in enumerate(told):
            assert text_of(await wait_for(talker, 10 + number, code)) == str(number)


def _next(codes: dict[str, str]) -> str:
    return f"AAAAA{len(codes)}{'Z' * 20}"


# Transports


async def test_over_http_with_events_and_with_json(
    server: Server, autojump_clock: MockClock
) -> None:
    @server.tool
    async def work(call: Call) -> str:
        await call.log("info", "began")
        await trio.sleep(5)
        await call.log("info", "ends")
        return "done"

    async with open_house(server, patience=PATIENT) as house:
        for accept in (f"{JSON}, {EVENTS}", JSON):
            async with browsing(house, PLAIN) as browser:
                answer = await browser.call(1, "work", accept)
                await trio.sleep(2.1)
                assert answer.is_whole
                is_json = accept == JSON
                interim = answer.json if is_json else answer.events[-1][1]
                assert interim is not None
                waited = await browser.call(2, "wait_for_call", accept, call=code_in(interim))
                await trio.sleep(2.1)
                assert waited.is_whole
                listed = await browser.call(3, "list_calls")
                (kept,) = listed.json["result"]["structuredContent"]["calls"]
                assert kept["state"] == "running"
                await trio.sleep(5)
                waited = await browser.call(4, "wait_for_call", accept, call=kept["call"])
                last = waited.json if is_json else waited.events[-1][1]
                assert last is not None
                assert text_of(last) == "done"
                async with browsing(house, PLAIN) as other:
                    listed = await other.call(1, "list_calls")
                    assert listed.json["result"]["structuredContent"]["calls"] == []


async def test_a_client_that_continues_by_event_id_gets_the_interim_answer_too(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house, browsing(house, PLAIN) as browser:
        answer = await browser.call(1, "step")
        await trio.sleep(1)
        await answer.hang_up()
        again = await browser.go_on(answer.ids[-1])
        await trio.sleep(1.1)  # its patience began with the call
        message = again.events[-1][1]
        assert message is not None
        assert message["id"] == 1
        code = code_in(message)
        late = await browser.go_on(answer.ids[-1])
        await trio.sleep(0.1)
        message = late.events[-1][1]
        assert message is not None
        assert code_in(message) == code
        steps.finish()
        waited = await browser.call(2, "wait_for_call", JSON, call=code)
        assert text_of(waited.json) == "done"


# Other ways to call


async def test_our_client_may_wait_for_a_call_too(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step", token="t")
        code = code_in(await talker.answer(1))
        memory = MemoryServer(principal=USER)
        await house.nursery.start(memory.serve, house.running.serve)
        async with Client(memory.connect) as client:
            async with client.call("wait_for_call", {"call": code, "wait_s": 1}) as call:
                assert code in (await call.result())["content"][0]["text"]
            async with client.call("wait_for_call", {"call": code}) as call:
                await wait_all_tasks_blocked()
                steps.log("live")
                steps.finish()
                assert (await call.result())["content"][0]["text"] == "done"
            async with client.call("wait_for_call", {"call": code}) as call:
                assert (await call.result())["content"][0]["text"] == "done"


async def test_pages_are_waited_for_as_well(autojump_clock: MockClock) -> None:
    server = Server("tested")

    @server.tool(pages=True)
    async def count(call: Call) -> AsyncIterator[str]:
        for number in (1, 2):
            await trio.sleep(5)
            yield str(number)

    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "count")
        code = code_in(await talker.answer(1))
        for number, page in enumerate(("1", "2")):
            for attempt in range(5):
                answer = await wait_for(talker, 10 * number + attempt + 2, code)
                if text_of(answer) == page:
                    break
                assert code_in(answer) == code
            else:
                raise AssertionError("the page has not come")
            if page == "1":
                token = answer["result"]["nextResumeToken"]
                turned = await talker.page(50, "count", token)
                assert turned["_meta"][KEPT] == code


class Listing(LocalBackend):
    """A backend that runs `tools/list` as a stream, as a child process does."""

    def delivers(self, method: str) -> bool:
        return method == "tools/list" or super().delivers(method)

    async def open(self, session: SessionInfo, standing: Standing) -> Any:
        return ListingGuest(await super().open(session, standing))


class ListingGuest:
    def __init__(self, inner: Guest) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def request(self, received: Received) -> Any:
        if received.message.method != "tools/list":
            return await self._inner.request(received)

        async def handler(stream: Stream) -> tuple[bytes, bool]:
            await trio.sleep(1)
            try:
                answer = await self._inner.request(received)
            except Refusal as refused:
                return messages.error(stream.request_id, refused), True
            return messages.result(stream.request_id, answer), False

        return Run(handler=handler)


async def test_a_listing_that_takes_time_has_our_tools_too(autojump_clock: MockClock) -> None:
    server = Server("tested")

    @server.tool(annotations={"readOnlyHint": True})
    def add(x: int) -> int:
        return x

    settings = PatienceSettings(patience_s=2, once=("hinted",))
    opened = open_backend(Listing(server), MemoryJournal(), Keyring.load(None), patience=settings)
    async with opened as running, trio.open_nursery() as nursery:
        house = House(running, MemoryJournal(), nursery)
        tools = await listed(house)
        assert [tool["name"] for tool in tools] == ["add", "wait_for_call", "list_calls"]
        assert "outputSchema" not in tools[0]
        assert tools[0]["annotations"] == {"readOnlyHint": True}
        talker = await house.dial(PLAIN, USER)
        refused = await talker.request(5, "tools/list", cursor="bad")
        assert "cursor" in refused["message"]
        nursery.cancel_scope.cancel()


# Restarts


async def test_after_a_crash_the_result_is_still_there(
    server: Server, autojump_clock: MockClock
) -> None:
    @server.tool
    async def work(seconds: float) -> str:
        await trio.sleep(seconds)
        return f"after {seconds:g}"

    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "work", seconds=5)
        done = code_in(await talker.answer(1))
        await talker.call(2, "work", seconds=1e6)
        lost = code_in(await talker.answer(2))
        await trio.sleep(10)
        journal = house.as_after_a_crash()
    async with open_house(server, journal=journal, keyring=keyring, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        assert {each["call"]: each["state"] for each in await calls(talker)} == {
            done: "done",
            lost: "failed",
        }
        for number in (1, 2):
            assert text_of(await wait_for(talker, number, done)) == "after 5"
            failed = await wait_for(talker, 10 + number, lost)
            assert reason(failed["error"]) == "interrupted"


async def test_a_call_that_is_restarted_is_waited_for_before_and_after(
    server: Server, autojump_clock: MockClock
) -> None:
    @server.tool(restart=True)
    async def work(call: Call) -> str:
        for number in range(1, 21):
            await call.progress(number, 20)
            await call.log("info", number)
            await trio.sleep(0.5)
        return "done"

    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "work", token="first")
        code = code_in(await talker.answer(1))
        await talker.call(2, "wait_for_call", token="second", call=code)
        await talker.answer(2)
        journal = house.as_after_a_crash()
    async with open_house(server, journal=journal, keyring=keyring, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        for number in range(10):
            await talker.call(number, "wait_for_call", token=number, call=code)
            answer = await talker.answer(number)
            if text_of(answer) == "done":
                break
        assert text_of(answer) == "done"
        assert said(talker.seen)[-1] == 20


# Listings


@pytest.mark.parametrize("page_size", [1, 2, 100])
async def test_our_tools_are_on_one_page_and_no_tool_has_an_output_schema(
    autojump_clock: MockClock, page_size: int
) -> None:
    server = Server("tested", page_size=page_size)
    for name in ("a", "b", "c"):

        @server.tool(name=name)
        def add(x: int) -> int:
            return x

    for settings in (None, PATIENT):
        async with open_house(server, patience=settings) as house:
            tools = await listed(house)
            names = [tool["name"] for tool in tools]
            own = ["wait_for_call", "list_calls"] if settings else []
            assert sorted(names) == sorted(["a", "b", "c", *own])
            has_schema = {
                name for name, tool in zip(names, tools, strict=True) if "outputSchema" in tool
            }
            assert has_schema == (set() if settings else {"a", "b", "c"})


async def listed(house: House) -> list[Json]:
    talker = await house.dial(PLAIN, USER)
    tools, cursor, number = [], {}, 0
    while True:
        page = await talker.request(number, "tools/list", **cursor)
        tools += page["tools"]
        if "nextCursor" not in page:
            return tools
        cursor, number = {"cursor": page["nextCursor"]}, number + 1


async def test_a_tool_of_the_backend_keeps_its_name(autojump_clock: MockClock) -> None:
    server = Server("tested")

    @server.tool
    async def wait_for_call(call: str) -> str:
        return f"waited for {call}"

    @server.tool
    async def work() -> str:
        await trio.sleep(3)
        return "done"

    async with open_house(server, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        assert text_of(await wait_for(talker, 1, "a taxi")) == "waited for a taxi"
        names = [tool["name"] for tool in await listed(house)]
        assert names == ["wait_for_call", "work", "mcp_streams_wait_for_call", "list_calls"]
        await talker.call(2, "work")
        interim = await talker.answer(2)
        assert "Call `mcp_streams_wait_for_call` with" in text_of(interim)
        code = interim["result"]["_meta"][KEPT]
        await talker.call(3, "mcp_streams_wait_for_call", call=code)
        assert text_of(await talker.answer(3)) == "done"
        assert text_of(await wait_for(talker, 4, code)) == f"waited for {code}"


async def test_without_patience_there_is_no_such_tool(autojump_clock: MockClock) -> None:
    server = Server("tested")
    once = PatienceSettings(once=("*",), keep_cancelled="timeout")
    for settings in (None, PatienceSettings(), once):
        async with open_house(server, patience=settings) as house:
            talker = await house.dial(PLAIN, USER)
            assert await talker.request(1, "tools/list") == {"tools": []}
            refused = await talker.request(2, "tools/call", name="list_calls", arguments={})
            assert "Unknown tool" in refused["message"]


@pytest.mark.parametrize(
    "settings",
    [
        {"patience_s": 0},
        {"patience_s": -1},
        {"patience_s": float("nan")},
        {"patience_s": float("inf")},
        {"once": ("",)},
        {"once": "hinted"},
        {"keep_cancelled": "sometimes"},
    ],
)
def test_bad_settings_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        PatienceSettings(**settings)


async def test_an_interim_answer_waits_for_a_store_that_is_away(autojump_clock: MockClock) -> None:
    async with open_replicas(lambda: Server("tested")) as replicas:
        replica = await replicas.start(patience=PATIENT)
        talker = await replica.dial(PLAIN, USER)
        other = await replica.dial(PLAIN, "os(8)")
        await talker.call(1, "step")
        await trio.sleep(1.9)
        replicas.kill_store(replica)
        await trio.sleep(0.8)
        replicas.start_store(replica)
        assert KEPT in (await talker.answer(1))["result"]["_meta"]
        assert await other.request(2, "ping") == {}


async def test_a_server_ends_while_an_interim_answer_waits_for_room(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested")
    Steps(server)
    journal = Troubled()
    async with open_house(server, journal=journal, patience=PATIENT) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        journal.trouble = Full("no room")
        await trio.sleep(4)
