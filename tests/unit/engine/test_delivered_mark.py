"""All that moves the delivered mark, which never passes the delivery that is attached now.

The clients here read when the test says so: what the server sends, and the pings that follow it,
wait in a queue until then. A pong, an answer or an ack can be as late as on the slowest line.
"""

import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server
from streams.engine.stream import Stream
from streams.errors import Missing
from streams.exchange import Request, Responder
from streams.messages import Incoming, Run
from tests.rigs.server import PLAIN, POSITIONS, STREAMS, House, Json, Steps, open_house
from tests.rigs.web import EVENTS, Answer, Browser

READ_BYTES: Final = 1_000  # of all messages in one write: some three of them
NUMBER: Final = re.compile(rb"#([0-9]+)#")
RESUME_MAX_S: Final = 1_000_000


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog of some kilobytes takes as many writes as one of some megabytes would."""
    for name in ("RUNS_BYTES", "RUNS_BYTES_MAX", "STREAM_BYTES_MIN"):
        monkeypatch.setattr(f"streams.engine.connection.{name}", READ_BYTES)


class Line:
    """From the server to a client: what is put on it waits until it is let through."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, trio.Event]] = deque()
        self._came: list[bytes] = []
        self.is_open = False
        self.is_cut = False

    @property
    def numbers(self) -> list[int]:
        """The numbers of the messages that have come."""
        return [int(number) for number in NUMBER.findall(b"".join(self._came))]

    @property
    def had(self) -> int:
        return max(self.numbers, default=0)

    async def carry(self, piece: bytes) -> None:
        """Wait until the client has read this, and all before it."""
        await trio.lowlevel.checkpoint()
        event = trio.Event()
        self._waiting.append((piece, event))
        if self.is_open:
            self.let(1)
        if not self.is_cut:
            await event.wait()
        if self.is_cut:
            raise trio.BrokenResourceError

    def let(self, count: int) -> None:
        """Have the client read so many of the writes and pings that wait."""
        for _ in range(min(count, len(self._waiting))):
            piece, event = self._waiting.popleft()
            self._came.append(piece)
            event.set()

    def open(self) -> None:
        """From now on the client reads everything at once."""
        self.is_open = True
        self.let(len(self._waiting))

    def cut(self) -> None:
        self.is_cut = True
        for _, event in self._waiting:
            event.set()


class SlowChannel:
    """The server's end of a WebSocket."""

    def __init__(self, principal: str) -> None:
        self.principal = principal
        self.scopes = None
        self.line = Line()
        self._said, self._heard = trio.open_memory_channel[list[bytes]](1_000)

    def say(self, *messages: Json) -> None:
        """Send messages to the server, in one piece."""
        self._said.send_nowait([msgspec.json.encode({"jsonrpc": "2.0"} | m) for m in messages])

    def cut(self) -> None:
        self.line.cut()
        self._said.close()

    async def receive(self) -> Sequence[Incoming]:
        return await self._heard.receive()

    def is_writable(self) -> bool:
        return not self.line.is_cut

    async def send(self, *lines: bytes) -> None:
        await self.line.carry(b"".join(lines))

    async def ping(self) -> bool:
        await self.line.carry(b"")
        return True

    def unsent_bytes(self) -> int | None:
        return None

    async def aclose(self) -> None:
        self.cut()
        await trio.lowlevel.checkpoint()


class SlowAnswer(Answer):
    """An HTTP response."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()

    async def write(self, *data: bytes) -> None:
        await self.line.carry(b"".join(data))
        await super().write(*data)


class SlowBrowser(Browser):
    """A client over HTTP whose event streams are slow, and whose other responses are not."""

    make_answer = SlowAnswer

    def __init__(self, house: House, nursery: trio.Nursery) -> None:
        super().__init__(house, nursery)
        serve = self._endpoint

        async def listen(request: Request, responder: Responder) -> None:
            try:
                await serve(request, responder)
            except* trio.BrokenResourceError:
                pass  # the client has gone, which ends nothing else in a listener

        self._endpoint = listen

    def ask(self, method: str, body: Any = None, *, path: str = "/mcp", **headers: str) -> Answer:
        answer = super().ask(method, body, path=path, **headers)
        assert isinstance(answer, SlowAnswer)
        is_stream = method == "GET" or body.get("method") in ("tools/call", "stream/resume")
        if not is_stream:
            answer.line.open()
        return answer


class Rig:
    """One call of a tool that does what it is told, and all the clients that come for it."""

    def __init__(self, house: House, steps: Steps) -> None:
        self.house = house
        self.lines: list[Line] = []  # of all clients, the newest last
        self.browsed: list[Line] = []  # those over HTTP
        self.said = 0  # messages of the stream so far
        self.stream: Stream
        self._steps = steps
        self._browser: SlowBrowser | None = None

    def dial(self, capabilities: Json) -> SlowChannel:
        """A WebSocket that is initialized."""
        channel = SlowChannel("alice")
        self.house.serve(channel)
        params = {"protocolVersion": "2025-11-25", "capabilities": capabilities}
        channel.say({"id": "hello", "method": "initialize", "params": params})
        self.lines.append(channel.line)
        return channel

    async def browse(self, capabilities: Json) -> SlowBrowser:
        """A session over HTTP."""
        self._browser = browser = SlowBrowser(self.house, self.house.nursery)
        await browser.greet(capabilities)
        return browser

    def ask(self, browser: SlowBrowser, method: str, body: Json | None, **headers: str) -> Line:
        """Send a request over HTTP whose response is slow."""
        said = None if body is None else {"jsonrpc": "2.0"} | body
        answer = browser.ask(method, said, **headers)
        assert isinstance(answer, SlowAnswer)
        self.lines.append(answer.line)
        self.browsed.append(answer.line)
        return answer.line

    async def call(self, capabilities: Json, count: int = 0) -> SlowChannel:
        """A WebSocket that has made the call and has read `count` messages of it."""
        channel = self.dial(capabilities)
        channel.line.open()
        channel.say(calling())
        await self.began()
        self.say(count)
        await wait_all_tasks_blocked()
        return channel

    async def began(self) -> None:
        """Wait until the call is there."""
        await wait_all_tasks_blocked()
        (self.stream,) = self.house.running.engine._streams.index

    @property
    def named(self) -> Json:
        """The params of a resume that any caller may send."""
        keyring = self.house.running.engine._streams._keyring
        return {"streamId": self.stream.id, "resumeToken": keyring.token(self.stream.id)}

    @property
    def key(self) -> str:
        """The beginning of its event ids."""
        return self.house.running.engine._streams._keyring.event_keys(self.stream.id)[0]

    def say(self, count: int = 1) -> None:
        """Have the tool send messages."""
        for _ in range(count):
            self.said += 1
            self._steps.log(f"#{self.said}# {'.' * 200}")

    def ask_client(self) -> None:
        """Have the tool ask its client, and go on when that has answered."""
        self.said += 1
        params = {"message": f"#{self.said}#"}

        async def ask(call: Call) -> None:
            await call.request("elicitation/create", params)

        self._steps.do(ask)

    @property
    def questions(self) -> list[Any]:
        """The ids of those that have no answer yet."""
        return list(self.stream.state.questions)

    def answer(self) -> None:
        """Have the maker of the call answer, over HTTP or over another WebSocket."""
        for request_id in self.questions:
            answer = {"id": request_id, "result": {}}
            if self._browser is not None:
                self._browser.ask("POST", {"jsonrpc": "2.0"} | answer)
            else:
                self.dial(STREAMS).say(answer)

    def check(self) -> None:
        """The invariants."""
        state, delivery = self.stream.state, self.stream.delivery
        if delivery is not None:
            assert state.delivered <= delivery.position == state.position
        assert state.delivered <= max(line.had for line in self.lines)

    async def see_it_through(self) -> None:
        """The tool ends, and a client that comes back has all that is not delivered, in order."""
        self.say()
        self.answer()
        self.said += 1
        self._steps.finish(f"#{self.said}#")
        await trio.sleep(2)
        last = self.dial(POSITIONS)
        last.line.open()
        first = self.stream.state.delivered + 1
        last.say({"id": "last", "method": "stream/resume", "params": self.named})
        await wait_all_tasks_blocked()
        assert last.line.numbers == list(range(first, self.said + 1))


@asynccontextmanager
async def open_rig() -> AsyncIterator[Rig]:
    server = Server("marked", resume_min_s=0, resume_max_s=RESUME_MAX_S)
    steps = Steps(server)
    async with open_house(server) as house:
        rig = Rig(house, steps)
        yield rig
        for line in rig.lines:
            line.cut()


def calling(request_id: int = 1) -> Json:
    return {"id": request_id, "method": "tools/call", "params": {"name": "step"}}


# The ways in which a mark once passed the delivery


async def test_an_answer_does_not_pass_a_replay_that_is_under_way(
    autojump_clock: MockClock,
) -> None:
    """The question was read before the cut; the replay has not come to it yet."""
    async with open_rig() as rig:
        browser = await rig.browse(PLAIN)
        first = rig.ask(browser, "POST", calling())
        first.open()
        await rig.began()
        rig.say(12)
        rig.ask_client()
        await wait_all_tasks_blocked()
        (question,) = rig.questions
        first.cut()
        replay = rig.ask(browser, "GET", None, accept=EVENTS, last_event_id=f"{rig.key}_0")
        await wait_all_tasks_blocked()
        await browser.fetch("POST", {"jsonrpc": "2.0", "id": question, "result": {}})
        await trio.sleep(2)
        rig.check()
        assert rig.stream.state.delivered == 0
        replay.open()
        await wait_all_tasks_blocked()
        assert replay.numbers == list(range(1, 14))
        await rig.see_it_through()


async def test_an_answer_proves_what_the_replay_has_brought_again(
    autojump_clock: MockClock,
) -> None:
    async with open_rig() as rig:
        browser = await rig.browse(PLAIN)
        rig.ask(browser, "POST", calling()).open()
        await rig.began()
        rig.say(2)
        rig.ask_client()
        await wait_all_tasks_blocked()
        (question,) = rig.questions
        rig.lines[0].cut()
        replay = rig.ask(browser, "GET", None, accept=EVENTS, last_event_id=f"{rig.key}_0")
        replay.open()
        await wait_all_tasks_blocked()
        await browser.fetch("POST", {"jsonrpc": "2.0", "id": question, "result": {}})
        assert rig.stream.state.delivered == 3
        await rig.see_it_through()


async def test_a_late_pong_of_the_old_connection_moves_nothing(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        old = rig.dial(STREAMS)
        old.line.let(1)
        old.say(calling())
        await rig.began()
        rig.say(24)
        for _ in range(40):
            await wait_all_tasks_blocked()
            if old.line.had < 24:
                old.line.let(1)
        await trio.sleep(2)  # the ping is out, and nobody has read it
        assert rig.stream.state.delivered == 0
        new = rig.dial(STREAMS)
        new.say({"id": 2, "method": "stream/resume", "params": rig.named})
        new.line.let(1)
        await wait_all_tasks_blocked()
        old.line.open()
        await trio.sleep(2)
        rig.check()
        assert rig.stream.state.delivered == 0
        new.line.open()
        await wait_all_tasks_blocked()
        assert new.line.numbers == list(range(1, 25))
        await trio.sleep(2)
        assert rig.stream.state.delivered == 24  # the new connection's own pong counts
        await rig.see_it_through()


@pytest.mark.parametrize("quiet_s", [0.0, 3.0, 14.0, 100.0])
async def test_the_first_ping_follows_a_write_by_a_second(
    autojump_clock: MockClock, quiet_s: float
) -> None:
    async with open_rig() as rig:
        await rig.call(STREAMS)
        await trio.sleep(quiet_s)
        rig.say()
        await trio.sleep(1.1)
        assert rig.stream.state.delivered == 1
        await rig.see_it_through()


async def test_an_ack_of_an_earlier_delivery_moves_nothing(autojump_clock: MockClock) -> None:
    """A resume from 0 and an ack of where the former delivery ended, in one piece."""
    async with open_rig() as rig:
        channel = await rig.call(POSITIONS, 24)
        assert channel.line.had == 24
        channel.line.is_open = False
        resume = rig.named | {"after": 0}
        ack = {"streamId": rig.stream.id, "seq": 24}
        channel.say(
            {"id": 2, "method": "stream/resume", "params": resume},
            {"method": "notifications/stream/ack", "params": ack},
        )
        await trio.sleep(2)
        rig.check()
        assert rig.stream.state.delivered == 0
        channel.line.open()
        await wait_all_tasks_blocked()
        assert channel.line.numbers == [*range(1, 25)] * 2
        channel.say({"method": "notifications/stream/ack", "params": ack})
        await wait_all_tasks_blocked()
        assert rig.stream.state.delivered == 24
        await rig.see_it_through()


async def test_a_newer_cursor_does_not_take_from_a_read_that_is_under_way(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old connection is about to read what the new one's cursor lets go of."""
    async with open_rig() as rig:
        old = await rig.call(POSITIONS, 24)
        read, is_reading = rig.house.journal.read, trio.Event()

        async def read_late(stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
            if not is_reading.is_set():
                is_reading.set()
                await trio.sleep(5)
            return await read(stream, after, bytes_max=bytes_max)

        monkeypatch.setattr(rig.house.journal, "read", read_late)
        old.say({"id": 2, "method": "stream/resume", "params": rig.named | {"after": 0}})
        await is_reading.wait()
        new = rig.dial(POSITIONS)
        new.line.open()
        new.say({"id": 2, "method": "stream/resume", "params": rig.named | {"after": 20}})
        await trio.sleep(10)
        assert new.line.numbers == [21, 22, 23, 24]
        await rig.see_it_through()


async def test_a_reader_behind_what_is_kept_is_told_and_nobody_else(
    autojump_clock: MockClock,
) -> None:
    """Nothing lets this happen: the mark is moved by hand, past the rule."""
    async with open_rig() as rig:
        channel = await rig.call(STREAMS, 24)
        channel.line.is_open = False
        channel.say({"id": 2, "method": "stream/resume", "params": rig.named})
        await wait_all_tasks_blocked()
        rig.stream.state.position = None
        rig.stream.mark_delivered(20)
        await trio.sleep(2)
        channel.line.open()
        await wait_all_tasks_blocked()
        told = b"".join(channel.line._came)
        assert b'"messages_gone"' in told
        assert b'"earliestSeq":21' in told
        channel.say({"id": 3, "method": "ping"})
        await wait_all_tasks_blocked()
        assert b'"id":3,"result":{}' in b"".join(channel.line._came)
        await rig.see_it_through()


async def test_a_gap_for_the_attached_reader_still_means_a_lost_journal(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(Missing, match="lines 1 to 1 of a stream are missing"),
        flatten_subgroups=True,
        allow_unwrapped=True,
    ):
        async with open_rig() as rig:

            async def nothing(stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
                await trio.lowlevel.checkpoint()
                return []

            monkeypatch.setattr(rig.house.journal, "read", nothing)
            await rig.call(STREAMS)
            rig.say()
            await trio.sleep(10)


# Any schedule

ACTIONS: Final = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("ask"), st.just(0), st.just(0)),
        st.tuples(st.just("read"), st.integers(0, 2), st.sampled_from([1, 3, 12])),
        st.tuples(st.just("read"), st.integers(0, 2), st.sampled_from([1, 3, 12])),
        st.tuples(st.just("open"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("cut"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("get"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("post"), st.integers(-1, 30), st.just(0)),
        st.tuples(st.just("resume"), st.integers(0, 3), st.integers(-1, 30)),
        st.tuples(st.just("ack"), st.integers(0, 3), st.integers(0, 30)),
        st.tuples(st.just("answer"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("post answer"), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 2, 20, 200]), st.just(0)),
    ),
    min_size=25,
    max_size=40,
)


class Schedule:
    """Two WebSockets, one with positions and one without, and a session over HTTP."""

    def __init__(self, rig: Rig, browser: SlowBrowser) -> None:
        self._rig = rig
        self._browser = browser
        self._channels: dict[int, SlowChannel] = {}
        self._ids = iter(range(100, 10_000))

    def _channel(self, index: int) -> SlowChannel:
        channel = self._channels.get(index)
        if channel is None or channel.line.is_cut:
            capabilities = POSITIONS if index % 2 else STREAMS
            channel = self._channels[index] = self._rig.dial(capabilities)
            channel.line.let(1)
        return channel

    @property
    def _had(self) -> int:
        """Up to where all clients together have the stream: an honest cursor is not above it."""
        return max(line.had for line in self._rig.lines)

    @property
    def _has_seen_questions(self) -> bool:
        """Whether the session over HTTP was asked all that is asked."""
        had = max(line.had for line in self._rig.browsed)
        return all(question.seq <= had for question in self._rig.stream.state.questions.values())

    async def do(self, action: str, first: int, second: int) -> None:
        rig = self._rig
        match action:
            case "say":
                rig.say(first)
            case "ask" if not rig.questions:
                rig.ask_client()
            case "read" | "open" | "cut":
                self._at_line(action, rig.lines[-1 - first % len(rig.lines)], second)
            case "get":
                event_id = f"{rig.key}_{min(first, self._had)}"
                rig.ask(self._browser, "GET", None, accept=EVENTS, last_event_id=event_id)
            case "post":
                rig.ask(self._browser, "POST", self._resuming(first))
            case "resume":
                self._channel(first).say(self._resuming(second))
            case "ack":
                ack = {"streamId": rig.stream.id, "seq": min(second, self._had)}
                self._channel(first).say({"method": "notifications/stream/ack", "params": ack})
            case "answer":
                self._answer(self._channel(first))
            case "post answer" if self._has_seen_questions:
                rig.answer()
            case "wait":
                await trio.sleep(first)
        await wait_all_tasks_blocked()

    def _at_line(self, action: str, line: Line, count: int) -> None:
        match action:
            case "read":
                line.let(count)
            case "open":
                line.open()
            case "cut":
                line.cut()

    def _answer(self, channel: SlowChannel) -> None:
        for request_id, question in self._rig.stream.state.questions.items():
            if question.seq <= channel.line.had:
                channel.say({"id": request_id, "result": {}})

    def _resuming(self, after: int) -> Json:
        cursor = {} if after < 0 else {"after": min(after, self._had)}
        params = self._rig.named | cursor
        return {"id": next(self._ids), "method": "stream/resume", "params": params}


@given(actions=ACTIONS)
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_schedule_takes_from_a_reader_what_it_has_not_had(
    actions: list[tuple[str, int, int]],
) -> None:
    """Slow readers, connections that live on beside newer ones, late pongs, answers and acks."""

    async def live() -> None:
        async with open_rig() as rig:
            browser = await rig.browse(STREAMS)
            rig.ask(browser, "POST", calling()).open()
            await rig.began()
            rig.say(15)
            rig.ask_client()
            rig.say(15)
            await wait_all_tasks_blocked()
            schedule = Schedule(rig, browser)
            for action in actions:
                await schedule.do(*action)
                rig.check()
            await rig.see_it_through()

    trio.run(live, clock=MockClock(autojump_threshold=0))
