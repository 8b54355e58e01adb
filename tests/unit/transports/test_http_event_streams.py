"""Event streams of servers that are not ours: the standing one, and responses that are continued.

The server is scripted; the client is whole, over real sockets.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from streams.client.client import Client
from streams.errors import CallLost
from streams.messages import Message, decode
from tests.rigs.clients import rest_of
from tests.rigs.scripted_http import EVENTS, JSON, NDJSON, Asked, HttpServer, Script, http_server
from transports import dial
from transports.http import client as httpclient

Json = dict[str, Any]
Answering = Callable[[Asked], Awaitable[object]]

PRIMING = b"id: p\nretry: 0\ndata:\n\n"
SESSION = "Mcp-Session-Id: abc\r\n"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`retry: 0` is taken at its word, and is what is usual."""
    monkeypatch.setattr(httpclient, "RETRY_S", 0.0)
    monkeypatch.setattr(httpclient, "RETRY_MIN_S", 0.0)


def event(message: Json, event_id: str = "") -> bytes:
    named = f"id: {event_id}\n" if event_id else ""
    return f"{named}data: {json.dumps({'jsonrpc': '2.0', **message})}\n\n".encode()


def log(text: str, event_id: str = "") -> bytes:
    params = {"level": "info", "data": text}
    return event({"method": "notifications/message", "params": params}, event_id)


def result_of(asked: Asked, event_id: str = "") -> bytes:
    return event({"id": json.loads(asked.body)["id"], "result": {"content": []}}, event_id)


class Foreign:
    """A plain MCP server: what it does with calls and with GETs, in order; the last goes on."""

    def __init__(self, calls: list[Answering], gets: list[Answering], extra: str = SESSION) -> None:
        self.calls = calls
        self.gets = gets
        self.extra = extra
        self.kind = JSON
        self.answers: list[Json] = []
        self.refusals = 0  # of answers of the client, which are cut
        self.server: HttpServer

    @property
    def got(self) -> list[str | None]:
        """The `Last-Event-ID` of each GET."""
        return [a.headers.get("last-event-id") for a in self.server.asked if a.method == "GET"]

    @property
    def asked(self) -> list[str]:
        """The methods of all POSTs."""
        return [json.loads(body).get("method", "answer") for body in self.server.posted]

    async def __call__(self, asked: Asked) -> None:
        if asked.method == "GET":
            await (self.gets.pop(0) if len(self.gets) > 1 else self.gets[0])(asked)
            return
        if asked.method == "DELETE":
            await asked.respond("204 No Content")
            return
        message = json.loads(asked.body)
        match message.get("method"):
            case "initialize":
                hello = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
                body = {"jsonrpc": "2.0", "id": message["id"], "result": hello}
                line = json.dumps(body).encode() + b"\n"
                await asked.respond("200 OK", line, self.kind, self.extra)
            case "tools/call":
                await (self.calls.pop(0) if len(self.calls) > 1 else self.calls[0])(asked)
            case "ping" | "tools/list":
                value: Json = {"tools": []}
                body = {"jsonrpc": "2.0", "id": message["id"], "result": value}
                await asked.respond("200 OK", json.dumps(body).encode())
            case None if self.refusals:
                self.refusals -= 1
                await asked.cut()
            case None:
                self.answers.append(message)
                await asked.respond()
            case _:
                await asked.respond()


@asynccontextmanager
async def served(foreign: Foreign, script: Script) -> AsyncIterator[str]:
    async with http_server(script) as foreign.server:
        yield foreign.server.url


@asynccontextmanager
async def client_of(foreign: Foreign, **options: Any) -> AsyncIterator[Client]:
    async with served(foreign, foreign) as url:
        with trio.fail_after(60):
            async with Client(dial(url), **options) as client:
                yield client


def streaming(*pieces: bytes, is_cut: bool = False) -> Answering:
    """An event stream that ends, as it should or not."""

    async def answer(asked: Asked) -> None:
        await asked.start(EVENTS)
        for piece in pieces:
            await asked.write(piece)
        await (asked.cut() if is_cut else asked.finish())

    return answer


def refusing(status: str) -> Answering:
    async def answer(asked: Asked) -> None:
        await asked.respond(status)

    return answer


async def stay(asked: Asked) -> None:
    """An event stream on which nothing is said."""
    await asked.start(EVENTS)


class Call:
    """A call's response: what comes first is given, what comes later is said by GETs."""

    def __init__(self, *pieces: bytes, is_cut: bool = True) -> None:
        self.pieces = pieces
        self.is_cut = is_cut
        self.asked: Asked

    async def __call__(self, asked: Asked) -> None:
        self.asked = asked
        await streaming(*self.pieces, is_cut=self.is_cut)(asked)

    def rest(self, *pieces: bytes, is_cut: bool = False) -> Answering:
        """A GET that is answered by this, and by the result."""

        async def answer(asked: Asked) -> None:
            await streaming(*pieces, result_of(self.asked, "last"), is_cut=is_cut)(asked)

        return answer


async def said(client: Client) -> list[str]:
    async with client.call("t") as call:
        heard = await rest_of(call)
        assert await call.result() == {"content": []}
    return heard


# Responses that are continued


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "closed on purpose"])
@pytest.mark.parametrize("extra", [SESSION, ""], ids=["session", "no session"])
async def test_a_response_is_continued_behind_its_last_event(*, is_cut: bool, extra: str) -> None:
    call = Call(PRIMING, log("a", "1"), log("b", "2"), is_cut=is_cut)
    foreign = Foreign([call], [stay, call.rest(log("c", "3"))], extra)
    async with client_of(foreign) as client:
        assert await said(client) == ["a", "b", "c"]
    assert foreign.got == [None, "2"]
    assert foreign.asked.count("initialize") == 1


async def test_what_comes_again_is_not_given_again() -> None:
    call = Call(PRIMING, log("a", "1"), log("b", "2"))
    again = call.rest(log("a", "1"), log("b", "2"), log("c", "3"))
    foreign = Foreign([call], [stay, again])
    async with client_of(foreign) as client:
        assert await said(client) == ["a", "b", "c"]


async def test_a_response_that_is_cut_many_times_is_whole() -> None:
    call = Call(PRIMING)
    legs = [streaming(log(str(n), f"e{n}"), is_cut=bool(n % 2)) for n in range(20)]
    foreign = Foreign([call], [stay, *legs, call.rest()])
    async with client_of(foreign) as client:
        assert await said(client) == [str(n) for n in range(20)]
    assert foreign.got == [None, "p", *(f"e{n}" for n in range(20))]


@pytest.mark.parametrize(
    "status", ["429 Too Many Requests", "503 Service Unavailable", "521 Web Server Is Down"]
)
async def test_a_server_that_is_busy_or_hangs_up_is_asked_again(status: str) -> None:
    async def hang_up(asked: Asked) -> None:
        await asked.cut()

    call = Call(PRIMING)
    busy = refusing(status)
    foreign = Foreign([call], [stay, busy, hang_up, streaming(), call.rest()])
    async with client_of(foreign) as client:
        assert await said(client) == []
    assert foreign.got == [None, *["p"] * 4]


@pytest.mark.parametrize(
    "status", ["405 Method Not Allowed", "400 Bad Request", "501 Not Implemented"]
)
async def test_a_response_that_the_server_does_not_continue_is_lost(status: str) -> None:
    foreign = Foreign([Call(PRIMING)], [stay, refusing(status)])
    async with client_of(foreign) as client:
        with pytest.raises(CallLost):
            await said(client)


async def test_a_session_that_is_gone_loses_its_calls_and_the_next_one_begins() -> None:
    answered = Call(PRIMING)
    foreign = Foreign([answered], [stay, refusing("404 Not Found"), stay])
    async with client_of(foreign) as client:
        with pytest.raises(CallLost):
            await said(client)
        await client.ping()
    assert foreign.asked.count("initialize") == 2


@pytest.mark.parametrize("pieces", [(), (log("a"),)], ids=["nothing", "an event without id"])
async def test_a_response_without_event_ids_is_lost_with_its_connection(
    pieces: tuple[bytes, ...],
) -> None:
    foreign = Foreign([Call(*pieces)], [stay])
    async with client_of(foreign) as client:
        with pytest.raises(CallLost, match="may or may not have run"):
            await said(client)
    assert foreign.got[0] is None


async def test_a_response_that_is_lost_takes_no_other_with_it() -> None:
    may_end = trio.Event()

    async def slow(asked: Asked) -> None:
        await asked.start(EVENTS)
        await may_end.wait()
        await asked.write(result_of(asked))
        await asked.finish()

    foreign = Foreign([slow, Call()], [stay])
    async with client_of(foreign) as client, client.call("slow") as call:
        with pytest.raises(CallLost, match="may or may not have run"):
            await said(client)
        may_end.set()
        assert await call.result() == {"content": []}
    assert foreign.asked.count("initialize") == 1


async def test_a_stream_with_a_token_is_resumed_by_it() -> None:
    async def announce(asked: Asked) -> None:
        request_id = json.loads(asked.body)["id"]
        stream = {"streamId": "s", "requestId": request_id, "resumeToken": "t"}
        params = {"stream": stream}
        created = event({"method": "notifications/stream/create", "params": params}, "1")
        await streaming(PRIMING, created, is_cut=True)(asked)

    async def script(asked: Asked) -> None:
        if b"stream/resume" in asked.body:
            resumed.append(json.loads(asked.body)["params"])
            call_id = next(json.loads(b)["id"] for b in foreign.server.posted if b"tools/call" in b)
            final = event({"id": call_id, "result": {"content": []}})
            await streaming(final, result_of(asked))(asked)
        else:
            await foreign(asked)

    resumed: list[Json] = []
    foreign = Foreign([announce], [stay])
    async with served(foreign, script) as url, Client(dial(url)) as client:
        assert await said(client) == []
    assert [(each["streamId"], each["resumeToken"]) for each in resumed] == [("s", "t")]
    assert set(foreign.got) == {None}, "no response is continued, by its event id, as well"


# Streams that are resumed by a request


Announced = tuple[str, Json]
CREATED: Announced = ("notifications/stream/create", {"stream": {"streamId": "s"}})
POLICY: Announced = ("notifications/requests/resumePolicy", {"resumeToken": "t"})


class Replaying:
    """A server that keeps what it says, with event ids, and goes by `Last-Event-ID` alone.

    `spans` are how far each of its responses comes: the first to the call, the others to resumes.
    """

    def __init__(self, announced: Announced, spans: list[int]) -> None:
        self.announced = announced
        self.spans = spans
        self.is_replying = True
        self.foreign = Foreign([self.call], [refusing("405 Method Not Allowed")])
        self.resumed: list[str | None] = []
        self.polled: list[str | None] = []
        self.called: Asked

    async def script(self, asked: Asked) -> None:
        method = json.loads(asked.body).get("method", "") if asked.body else ""
        last_event_id = asked.headers.get("last-event-id")
        if method in ("stream/resume", "requests/resume"):
            self.resumed.append(last_event_id)
            await asked.start(EVENTS)
            await self.deliver(asked, int(last_event_id or "0"))
        elif method in ("stream/poll", "requests/getStatus"):
            self.polled.append(last_event_id)
            flags = {"pendingMessages": True, "hasRequest": False, "hasError": False}
            status = {"streamId": "s", "status": "live", **flags}
            line = {"jsonrpc": "2.0", "id": json.loads(asked.body)["id"], "result": status}
            await asked.respond("200 OK", json.dumps(line).encode())
        else:
            assert last_event_id is None
            await self.foreign(asked)

    async def call(self, asked: Asked) -> None:
        self.called = asked
        method, params = self.announced
        request_id = json.loads(asked.body)["id"]
        await asked.start(EVENTS)
        await asked.write(event({"method": method, "params": params | {"requestId": request_id}}))
        await self.deliver(asked, 0)

    async def deliver(self, asked: Asked, start: int) -> None:
        until = self.spans.pop(0)
        for number in range(start + 1, min(until, 6) + 1):
            await asked.write(log(str(number), str(number)))
        if until <= 6:
            await asked.cut()
            return
        await asked.write(result_of(self.called, "7"))
        if asked is not self.called and self.announced is CREATED and self.is_replying:
            await asked.write(result_of(asked))
        await asked.finish()


@pytest.mark.parametrize("announced", [CREATED, POLICY], ids=["stream", "request"])
async def test_a_resume_says_what_came_last(announced: Announced) -> None:
    """899: "Clients use the Last-Event-ID HTTP header to resume". 925: "upon reconnect to indicate
    the last delivered message"."""
    server = Replaying(announced, [2, 2, 5, 7])
    async with served(server.foreign, server.script) as url, Client(dial(url)) as client:
        with trio.fail_after(60):
            assert [decode(each, Json)["data"] for each in await said_params(client)] == [
                "1", "2", "3", "4", "5", "6"
            ]  # fmt: skip
    assert server.resumed == ["2", "2", "5"]


@pytest.mark.parametrize("announced", [CREATED, POLICY], ids=["stream", "request"])
async def test_a_poll_says_what_came_last(announced: Announced) -> None:
    go_on = trio.Event()

    class Waiting(Replaying):
        async def deliver(self, asked: Asked, start: int) -> None:
            if asked is self.called:
                await asked.write(log("1", "1"))
                await asked.write(log("2", "2"))
                await go_on.wait()
            await super().deliver(asked, 2)

    server = Waiting(announced, [7])
    async with served(server.foreign, server.script) as url, Client(dial(url)) as client:
        with trio.fail_after(60):
            async with client.call("t") as call:
                await anext(call)
                await anext(call)
                await client.ping()  # the channel has been asked for what follows
                assert call.ticket is not None
                await client.poll(call.ticket)
                go_on.set()
                await call.result()
    assert server.polled == ["2"]


async def test_a_resume_without_a_reply_ends_no_other_call() -> None:
    server = Replaying(CREATED, [2, 7, 7, 7])
    server.is_replying = False
    async with served(server.foreign, server.script) as url, Client(dial(url)) as client:
        with trio.fail_after(60):
            for _ in range(3):
                assert len(await said_params(client)) == 6
    assert server.foreign.asked.count("initialize") == 2


async def said_params(client: Client) -> list[Any]:
    async with client.call("t") as call:
        params = [message.params async for message in call]
        await call.result()
    return params


# The standing stream


async def test_the_standing_stream_is_there_before_the_first_call() -> None:
    foreign = Foreign([Call(is_cut=False)], [stay])
    async with client_of(foreign) as client:
        with pytest.raises(CallLost):
            await said(client)
    (get,) = [each for each in foreign.server.asked if each.method == "GET"][:1]
    assert get.headers["accept"] == EVENTS
    assert get.headers["mcp-session-id"] == "abc"
    assert get.headers["mcp-protocol-version"] == "2025-11-25"
    methods = [each.method for each in foreign.server.asked]
    assert methods.index("GET") == 2, "after initialize and initialized"


async def test_a_server_of_ours_is_not_asked_for_one() -> None:
    foreign = Foreign([Call()], [stay])
    foreign.kind = NDJSON
    async with client_of(foreign) as client:
        await client.ping()
    assert foreign.got == []


@pytest.mark.parametrize("when", ["setting", "before", "later"])
async def test_a_server_of_ours_is_asked_for_one_where_notifications_are_heard(when: str) -> None:
    foreign = Foreign([Call()], [stay])
    foreign.kind = NDJSON
    settings = {"on_notification": lambda message: None} if when == "setting" else {}
    async with client_of(foreign, **settings) as client:
        if when == "later":
            await client.ping()
            assert foreign.got == []
        if when != "setting":
            client.on_notification("notifications/tools/list_changed", lambda params: None)
        while not foreign.got:
            await client.ping()
        client.on_notification("notifications/message", lambda params: None)
        await client.ping()
    assert foreign.got == [None], "one is enough"


@pytest.mark.parametrize("status", ["405 Method Not Allowed", "404 Not Found", "200 OK"])
async def test_a_server_without_one_is_not_asked_again(status: str) -> None:
    foreign = Foreign([streaming()], [refusing(status)])
    async with client_of(foreign) as client:
        for _ in range(5):
            await client.ping()
        assert foreign.got == [None]
    assert foreign.asked.count("initialize") == 1


async def test_what_is_said_there_is_heard_and_requests_are_answered() -> None:
    async def roots(_: Json) -> Json:
        return {"roots": []}

    notified: list[str] = []

    def note(message: Message) -> None:
        notified.append(decode(message.params, Json)["data"])

    questions = [
        log("hello"),
        event({"id": 7, "method": "roots/list"}),
        event({"id": "8", "method": "ping"}),
    ]

    async def ask(asked: Asked) -> None:
        await asked.start(EVENTS)
        for piece in questions:
            await asked.write(piece)

    foreign = Foreign([], [ask])
    async with client_of(foreign, answers={"roots/list": roots}, on_notification=note):
        while len(foreign.answers) < 2:
            await trio.sleep(0.001)
    assert {each["id"]: each["result"] for each in foreign.answers} == {7: {"roots": []}, "8": {}}
    assert notified == ["hello"]


async def test_it_is_opened_again_behind_its_last_event() -> None:
    done = trio.Event()

    async def last(asked: Asked) -> None:
        done.set()
        await stay(asked)

    legs = [streaming(PRIMING, is_cut=True), streaming(log("a", "1")), refusing("503 Busy"), last]
    foreign = Foreign([], legs)  # type: ignore[arg-type]
    async with client_of(foreign):
        await done.wait()
    assert foreign.got == [None, "p", "1", "1"]


async def test_a_session_that_is_gone_is_noticed_there() -> None:
    foreign = Foreign([], [streaming(PRIMING), refusing("404 Not Found"), stay])
    async with client_of(foreign) as client:
        while foreign.asked.count("initialize") < 2:
            await trio.sleep(0.001)
        await client.ping()


async def test_a_call_may_be_answered_there() -> None:
    calls: list[Asked] = []
    called = trio.Event()

    async def call(asked: Asked) -> None:
        calls.append(asked)
        await asked.start(EVENTS)
        await asked.write(PRIMING)
        called.set()

    async def answer(asked: Asked) -> None:
        await asked.start(EVENTS)
        await called.wait()
        await asked.write(result_of(calls[0]))

    foreign = Foreign([call], [answer])
    async with client_of(foreign) as client:
        # The GET is answered at once, and says something once the call is there.
        assert await said(client) == []
        await client.ping()
    assert foreign.got == [None], "the response that nothing comes on is not continued"


async def test_an_answer_whose_post_is_cut_is_sent_again_while_its_call_waits() -> None:
    async def elicit(_: Json) -> Json:
        return {"action": "accept"}

    async def ask(asked: Asked) -> None:
        await asked.start(EVENTS)
        await asked.write(PRIMING + event({"id": 1, "method": "elicitation/create"}, "1"))
        while not foreign.answers:
            await trio.sleep(0.001)
        await asked.write(result_of(asked, "2"))
        await asked.finish()

    foreign = Foreign([ask], [stay])
    foreign.refusals = 3
    async with client_of(foreign, answers={"elicitation/create": elicit}) as client:
        assert await said(client) == []
    assert [each["id"] for each in foreign.answers] == [1]
    assert foreign.asked.count("initialize") == 1


async def test_a_server_behind_a_proxy_may_be_starting_too() -> None:
    hellos = 0

    async def script(asked: Asked) -> None:
        nonlocal hellos
        hellos += b'"initialize"' in asked.body
        await (asked.respond("503 Service Unavailable") if hellos < 3 else foreign(asked))

    foreign = Foreign([], [stay])
    async with served(foreign, script) as url, Client(dial(url), connect_s=60) as client:
        await client.ping()
    assert hellos == 3
