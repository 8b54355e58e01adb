"""The log of calls: which lines a call has, and what they say."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server
from streams.engine.events import Events
from streams.keys import Keyring, new_bearer
from streams.logs import STANDARD_ERROR, WAITING_LINES_MAX
from streams.observe import calls
from streams.observe.calls import LONG_S, CallLog
from tests.rigs.server import PLAIN, POSITIONS, House, Json, Steps, named, open_house

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Told:
    """All that was written to standard error."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.text = ""

    def lines(self) -> list[Json]:
        """All lines of the log of calls until now, which is in JSON."""
        STANDARD_ERROR.write_waiting()
        self.text += self._capfd.readouterr().err
        found = [json.loads(line) for line in self.text.splitlines() if line.startswith("{")]
        return [line for line in found if line["logger"] == "calls"]

    def events(self) -> list[str]:
        return [line["event"].removeprefix("call ") for line in self.lines()]

    def only(self, event: str) -> Json:
        (found,) = [line for line in self.lines() if line["event"] == event]
        return found


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str]) -> Iterator[Told]:
    yield Told(capfd)
    STANDARD_ERROR.write_waiting()


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=600.0, announce_after_s=0)


@asynccontextmanager
async def logged(
    server: Server, level: int = logging.INFO, *, as_json: bool = True, **settings: Any
) -> AsyncIterator[House]:
    events = Events()
    log = CallLog(level, as_json=as_json)
    log.listen_to(events)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        async with open_house(server, events=events, **settings) as house:
            yield house
        nursery.cancel_scope.cancel()


async def test_a_call_that_ends_soon_has_one_line(told: Told, server: Server) -> None:
    steps = Steps(server)
    async with logged(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        steps.log("one", "two")
        steps.finish()
        await talker.answer(1)
    (line,) = told.lines()
    at, duration_s = line.pop("timestamp"), line.pop("duration_s")
    assert at.endswith("Z")
    assert 0 <= duration_s < 60
    assert len(line.pop("stream")) == 8
    assert line.pop("bytes") > 200
    assert line == {
        "event": "call ended",
        "level": "info",
        "logger": "calls",
        "tool": "step",
        "principal": "alice",
        "transport": "memory",
        "messages": 3,
        "outcome": "completed",
    }


async def test_a_call_that_runs_for_a_second_has_a_line_before_its_end(
    told: Told, server: Server, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "wall", lambda: began + trio.current_time() - started)
    began = 2e9
    steps = Steps(server)
    async with logged(server) as house:
        started = trio.current_time()
        monkeypatch.setattr("streams.engine.engine.wall", calls.wall)
        talker = await house.dial()
        await talker.begin(1, "step")
        await trio.sleep(LONG_S / 2)
        assert told.events() == []
        await trio.sleep(LONG_S)
        assert told.only("call began")["age_s"] >= LONG_S
        steps.finish()
        await talker.answer(1)
    assert told.events() == ["began", "ended"]
    assert told.only("call ended")["duration_s"] == pytest.approx(1.5 * LONG_S, abs=0.2)


async def test_at_the_level_debug_a_call_has_a_line_when_it_begins(
    told: Told, server: Server
) -> None:
    Steps(server)
    async with logged(server, logging.DEBUG) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        assert told.events() == ["began"]


async def test_a_resume_tells_how_much_the_client_has_missed(told: Told, server: Server) -> None:
    steps = Steps(server)
    async with logged(server) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "step")
        await talker.leave()
        steps.log("one", "two")
        steps.ask()
        await wait_all_tasks_blocked()
        again = await house.dial(POSITIONS)
        await again.ask(2, "stream/resume", **named(stream), after=0)
        asked = await again.find(lambda m: m.get("method") == "elicitation/create")
        await again.say({"id": asked["id"], "result": {"action": "decline"}})
        steps.finish()
        await again.answer(1)
    assert told.events() == ["began", "detached", "asks", "resumed", "answered", "ended"]
    assert told.only("call detached")["why"] == "gone"
    resumed = told.only("call resumed")
    assert (resumed["by"], resumed["after"], resumed["missed"]) == ("memory", 0, 3)
    assert resumed["questions"] == 1
    assert resumed["away_s"] > 0
    assert "has_result" not in resumed
    asks = told.only("call asks")
    assert (asks["asks"], asks["is_attached"]) == ("elicitation/create", False)
    assert "is_attached" not in told.only("call ended")


async def test_the_end_of_a_call_tells_that_no_client_is_there(told: Told, server: Server) -> None:
    steps = Steps(server)
    async with logged(server) as house:
        talker = await house.dial(POSITIONS)
        await talker.begin(1, "step")
        await talker.leave()
        steps.fail()
        await wait_all_tasks_blocked()
    ended = told.only("call ended")
    assert (ended["is_attached"], ended["why"]) == (False, "tool_error")


async def test_each_call_that_a_restart_meets_is_named(told: Told, server: Server) -> None:
    @server.tool(restart=True)
    async def again(call: Call) -> str:
        await trio.sleep_forever()
        raise AssertionError

    @server.tool
    async def once(call: Call) -> str:
        await trio.sleep_forever()
        raise AssertionError

    keyring = Keyring.load(None)
    async with logged(server, keyring=keyring) as house:
        talker = await house.dial()
        await talker.begin(1, "again")
        await talker.begin(2, "once")
        after_kill = house.as_after_a_crash()
    lines = {line["event"]: line for line in told.lines()}
    assert lines["call released"]["tool"] == "again"
    assert lines["call interrupted"]["tool"] == "once"
    assert lines["call interrupted"]["level"] == "warning"
    assert "call ended" not in lines

    told.text = ""
    async with logged(server, keyring=keyring, journal=after_kill):
        await wait_all_tasks_blocked()
        events = {line["event"]: line["tool"] for line in told.lines()}
    assert events == {"call interrupted": "once", "call restarted": "again"}


async def test_above_info_only_interrupted_calls_are_told(told: Told, server: Server) -> None:
    steps = Steps(server)
    async with logged(server, logging.WARNING) as house:
        talker = await house.dial()
        await talker.call(1, "step")
        steps.finish()
        await talker.answer(1)
        await talker.begin(2, "step")
    assert told.events() == ["interrupted"]


@pytest.mark.parametrize("as_json", [True, False])
async def test_no_line_has_a_secret_or_moves_a_terminal(
    told: Told, server: Server, *, as_json: bool
) -> None:
    secret = new_bearer()

    @server.tool(name=f"tool-{secret}")
    async def tool(text: str) -> str:
        return f"the result: {text}"

    async with logged(server, as_json=as_json) as house:
        talker = await house.dial(PLAIN, principal='al\x1b[2Jice\u202e ="x\n2026 [info] forged')
        await talker.call(1, f"tool-{secret}", text="an argument")
        await talker.answer(1)
    assert bool(told.lines()) is as_json
    assert "[redacted]" in told.text
    for hidden in (secret, "argument", "the result", "\x1b", "\u202e"):
        assert hidden not in told.text
    assert len(told.text.splitlines()) == 1


async def test_a_line_of_text_reads_as_those_of_the_rest_of_the_log(
    told: Told, server: Server
) -> None:
    steps = Steps(server)
    async with logged(server, as_json=False) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        steps.finish()
        await talker.answer(1)
    assert told.lines() == []
    assert " [info     ] call ended                     [calls] stream=" in told.text
    assert " tool=step principal=alice transport=memory duration_s=0." in told.text
    assert told.text.endswith(" outcome=completed\n")


@pytest.mark.parametrize(
    ("given", "trace_id"),
    [
        (TRACEPARENT, TRACE),
        ("00-short", None),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", None),
        (7, None),
    ],
)
async def test_a_trace_is_named_if_it_is_one(
    told: Told, server: Server, given: Any, trace_id: str | None
) -> None:
    steps = Steps(server)
    async with logged(server) as house:
        talker = await house.dial(PLAIN)
        params = {"name": "step", "arguments": {}, "_meta": {"traceparent": given}}
        await talker.ask(1, "tools/call", **params)
        steps.finish()
        await talker.answer(1)
    assert told.only("call ended").get("trace_id") == trace_id


async def test_a_request_that_is_long_is_not_kept_for_its_line(told: Told, server: Server) -> None:
    @server.tool
    async def echo(text: str) -> int:
        return len(text)

    async with logged(server) as house:
        talker = await house.dial(PLAIN, capacity=1 << 20)
        await talker.call(1, "echo", text="x" * 100_000)
        await talker.answer(1)
    assert told.only("call ended")["tool"] == "echo"


async def test_lines_that_nobody_reads_are_lost_and_counted(told: Told) -> None:
    line = msgspec.json.encode({"event": "x", "logger": "calls"}) + b"\n"
    for _ in range(WAITING_LINES_MAX + 7):
        STANDARD_ERROR.add(lambda: line)
    assert len(told.lines()) == WAITING_LINES_MAX
    assert "lines of the log were lost" in told.text
    assert "lines=7" in told.text
