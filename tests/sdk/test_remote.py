"""Servers that are not ours behind `RemoteBackend`: of the official SDK, and bad ones."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from streams.backends.remote import RemoteBackend, RemoteSettings
from streams.client.client import Client
from streams.errors import CallFailed, CannotConnect
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.messages import decode, encode
from streams.server.running import RunningServer, open_backend
from tests.rigs.doc_pages import free_port
from tests.rigs.outages import Network, network
from tests.rigs.remote import attached
from tests.rigs.scripted_http import EVENTS, Asked, http_server
from tests.rigs.server import Talker, greeted
from tests.sdk.stock import HERE
from transports import dial
from transports.memory import Cable

Json = dict[str, Any]

SERVER: Final = str(HERE / "event_store_server.py")

KEEPING: Final = ()
FORGETFUL: Final = ("--forgetful",)

# A bound for a test that hangs.
PATIENCE_S: Final = 90.0

# Without probes, a dead connection is noticed after minutes.
NOTICED_S: Final = 30.0

HELLO: Final = (
    b'{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25",'
    b'"capabilities":{"tools":{}},"serverInfo":{"name":"bad","version":"1"}}}'
)


class Foreign:
    """A server of the official SDK as a child process, which may be killed and started again."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, SERVER, *self._options, f"--port={self.port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == str(self.port)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    async def restart(self) -> None:
        self.kill()
        await trio.to_thread.run_sync(self.start)


@contextmanager
def foreign(*options: str) -> Iterator[Foreign]:
    server = Foreign(*options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def through_network(
    *options: str, **given: Any
) -> AsyncIterator[tuple[Foreign, Network, RunningServer]]:
    with trio.fail_after(PATIENCE_S), ExitStack() as stack:
        server = await trio.to_thread.run_sync(stack.enter_context, foreign(*options))
        async with (
            network(server.port) as net,
            attached(f"http://127.0.0.1:{net.port}/mcp", **given) as running,
        ):
            yield server, net, running


async def progress_of(call: Any) -> list[float]:
    return [decode(each.params, Json)["progress"] async for each in call]


async def elicit(_: Json) -> Json:
    return {"action": "accept", "content": {"name": "x"}}


@pytest.mark.parametrize("options", [KEEPING, FORGETFUL], ids=["keeping", "forgetful"])
async def test_calls_and_questions_pass(options: tuple[str, ...]) -> None:
    async with (
        through_network(*options) as (_, _, running),
        Client(running, answers={"elicitation/create": elicit}) as host,
    ):
        assert {tool.name for tool in await host.tools()} == {"count", "look", "choose"}
        async with host.call("count", {"rows": 5, "pause_s": 0.01}) as call:
            assert await progress_of(call) == [1, 2, 3, 4, 5]
            assert (await call.result())["content"][0]["text"] == "5 rows"
        assert (await host.call_tool("choose")).content[0]["text"] == "accept x"


async def test_with_event_ids_a_cut_loses_nothing() -> None:
    async with through_network() as (_, net, running), Client(running) as host:
        async with host.call("count", {"rows": 30, "pause_s": 0.1}) as call:
            first = decode((await anext(call)).params, Json)["progress"]
            net.cut()
            seen = [first, *await progress_of(call)]
            assert (await call.result())["content"][0]["text"] == "30 rows"
        # That server may lose messages while it replays, but must not send one twice.
        assert seen == sorted(set(seen))


async def test_with_event_ids_a_dead_network_is_noticed_and_left_soon(tmp_path: Path) -> None:
    until, effects = tmp_path / "until", tmp_path / "effects"
    async with through_network() as (_, net, running), Client(running) as host:
        arguments = {"rows": 1, "pause_s": 0, "until": str(until), "effects": str(effects)}
        async with host.call("count", arguments) as call:
            await anext(call)
            net.go("dead")
            until.touch()
            await trio.sleep(8)
            net.go("up")
            with trio.fail_after(NOTICED_S):
                assert (await call.result())["content"][0]["text"] == "1 rows"
        assert effects.read_text().split() == ["run"]
        # The session is the same: the host's next call needs no other one.
        await host.call_tool("count", {"rows": 1, "pause_s": 0})


async def test_without_event_ids_a_cut_is_an_honest_error(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with through_network(*FORGETFUL) as (_, net, running), Client(running) as host:
        arguments = {"rows": 1, "pause_s": 30, "effects": str(effects)}
        async with host.call("count", arguments) as call:
            await anext(call)
            net.cut()
            with pytest.raises(CallFailed, match="cannot resume") as raised:
                await call.result()
        assert raised.value.data["reason"] == "interrupted"
        assert effects.read_text().split() == ["run"]  # it was not sent again
        assert (await host.call_tool("count", {"rows": 1, "pause_s": 0})).content


@pytest.mark.parametrize("rerun", ["look", "l*k", "hinted"])
async def test_a_tool_that_may_run_again_is_sent_again(rerun: str, tmp_path: Path) -> None:
    until, effects = tmp_path / "until", tmp_path / "effects"
    async with (
        through_network(*FORGETFUL, rerun=(rerun,)) as (_, net, running),
        Client(running) as host,
    ):
        await host.tools()
        arguments = {"rows": 3, "pause_s": 0, "until": str(until), "effects": str(effects)}
        async with host.call("look", arguments) as call:
            seen = [decode((await anext(call)).params, Json)["progress"] for _ in range(3)]
            until.touch()
            net.cut()
            seen += await progress_of(call)
            assert (await call.result())["content"][0]["text"] == "3 rows"
        assert seen == [1, 2, 3]  # MCP: progress MUST increase
        assert effects.read_text().split() == ["run", "run"]
        async with host.call("count", {"rows": 1, "pause_s": 30}) as call:
            await anext(call)
            net.cut()
            with pytest.raises(CallFailed, match="cannot resume"):
                await call.result()


@pytest.mark.parametrize("options", [KEEPING, FORGETFUL], ids=["keeping", "forgetful"])
async def test_after_its_restart_the_server_gets_a_new_session(options: tuple[str, ...]) -> None:
    async with through_network(*options) as (server, _, running), Client(running) as host:
        async with host.call("count", {"rows": 1, "pause_s": 30}) as call:
            await anext(call)
            await server.restart()
            with pytest.raises(CallFailed) as raised:
                await call.result()
        assert raised.value.data["reason"] == "interrupted"
        assert len(await host.tools()) == 3  # a call beside the end of the session may be lost
        assert (await host.call_tool("count", {"rows": 1, "pause_s": 0})).content
        await server.restart()  # while nothing runs
        assert len(await host.tools()) == 3
        assert (await host.call_tool("count", {"rows": 1, "pause_s": 0})).content


async def test_requests_wait_for_a_server_that_is_away() -> None:
    async with through_network() as (_, net, running), Client(running) as host:
        net.go("refusing")
        async with trio.open_nursery() as nursery:

            async def go_up() -> None:
                await trio.sleep(1.5)
                net.go("up")

            nursery.start_soon(go_up)
            assert len(await host.tools()) == 3
            assert (await host.call_tool("count", {"rows": 1, "pause_s": 0})).content


# Bad servers


class Bad:
    """A server that greets, and then answers each call as `answers` says."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def __call__(self, asked: Asked) -> None:
        if asked.method != "POST":
            await asked.respond("405 Method Not Allowed")
            return
        message = decode(asked.body, Json)
        if message["method"] == "initialize":
            await asked.respond(
                "200 OK", HELLO % _quoted(message["id"]), extra="Mcp-Session-Id: s\r\n"
            )
        elif message["method"] == "tools/call":
            await self.answers.pop(0)(asked, _quoted(message["id"]))
        elif "id" in message:
            await asked.respond(
                "200 OK", b'{"jsonrpc":"2.0","id":%s,"result":{}}' % _quoted(message["id"])
            )
        else:
            await asked.respond()


def _quoted(request_id: str) -> bytes:
    return b'"%s"' % request_id.encode()


def _result(request_id: bytes, text: bytes = b"fine") -> bytes:
    return b'{"jsonrpc":"2.0","id":%s,"result":{"content":[{"type":"text","text":"%s"}]}}' % (
        request_id,
        text,
    )


async def fine(asked: Asked, request_id: bytes) -> None:
    await asked.respond("200 OK", _result(request_id))


async def redirect(asked: Asked, request_id: bytes) -> None:
    await asked.respond("307 Temporary Redirect", extra="Location: http://localhost:1/mcp\r\n")


async def forbidden(asked: Asked, request_id: bytes) -> None:
    await asked.respond("403 Forbidden", b"no")


async def html(asked: Asked, request_id: bytes) -> None:
    await asked.respond("200 OK", b"<html>", kind="text/html")


async def no_json(asked: Asked, request_id: bytes) -> None:
    await asked.respond("200 OK", b'{"jsonrpc":')


async def other_id(asked: Asked, request_id: bytes) -> None:
    await asked.respond("200 OK", _result(b'"another"'))


async def broken_events(asked: Asked, request_id: bytes) -> None:
    await asked.respond("200 OK", b"data: {\n\nnonsense\n\ndata: 1\n\n", kind=EVENTS)


async def huge(asked: Asked, request_id: bytes) -> None:
    await asked.start("application/json")
    for _ in range(200):
        await asked.write(b"x" * 100_000)


async def cut(asked: Asked, request_id: bytes) -> None:
    await asked.cut()


async def unavailable(asked: Asked, request_id: bytes) -> None:
    await asked.respond("503 Service Unavailable")


@pytest.mark.parametrize(
    "bad",
    [redirect, forbidden, html, no_json, other_id, broken_events, huge, cut, unavailable],
    ids=lambda bad: bad.__name__,
)
async def test_a_bad_answer_ends_its_own_call_and_nothing_else(bad: Any) -> None:
    with trio.fail_after(PATIENCE_S):
        async with (
            http_server(Bad(bad, fine)) as server,
            attached(server.url) as running,
            Client(running) as host,
        ):
            with pytest.raises(CallFailed):
                await host.call_tool("t")
            assert await host.call_tool("t", type=str) == "fine"


async def test_pretty_json_and_odd_values_pass_as_they_are() -> None:
    async def pretty(asked: Asked, request_id: bytes) -> None:
        odd = b'"big": 12345678901234567890123, "r": 1.0, "u": "\\u00e9"'
        result = b'{\n "content": [],\n %s\n}' % odd
        body = b'{\n "jsonrpc": "2.0",\n "id": %s,\n "result": ' + result + b"\n}"
        await asked.respond("200 OK", body % request_id)

    async def events(asked: Asked, request_id: bytes) -> None:
        body = (
            b'data: {"jsonrpc":"2.0","method":"vendor/odd",\ndata: "params":{"n":1.50}}\n\n'
            b"data: " + _result(request_id) + b"\n\n"
        )
        await asked.respond("200 OK", body, kind=EVENTS)

    with trio.fail_after(PATIENCE_S):
        async with (
            http_server(Bad(pretty, events)) as server,
            attached(server.url) as running,
            Client(running) as host,
        ):
            async with host.call("t") as call:
                await call.result()
                final = call._final
            assert final is not None
            odd = b'"big":12345678901234567890123,"r":1.0,"u":"\\u00e9"'
            assert odd in bytes(final.result)  # type: ignore[arg-type]
            async with host.call("t") as call:
                found = [(each.method, bytes(each.params)) async for each in call]
            assert found == [("vendor/odd", b'{"n":1.50}')]


async def test_each_request_has_the_headers_and_the_token_of_the_moment() -> None:
    tokens = ["first", "second"]
    authorized = [b"first"]
    good = Bad(fine, fine)

    async def guarded(asked: Asked) -> None:
        if asked.headers.get("authorization", "").encode() != b"Bearer " + authorized[0]:
            await asked.respond("401 Unauthorized")
        else:
            await good(asked)

    def token() -> str:
        return tokens.pop(0) if len(tokens) > 1 else tokens[0]

    with trio.fail_after(PATIENCE_S):
        async with http_server(guarded) as server:
            dialer = dial(server.url, token=token, headers=[("X-Tenant", "a b")], outlast_s=60)
            remote = RemoteBackend(RemoteSettings(url=server.url, dial=dialer))
            async with (
                open_backend(remote, MemoryJournal(), Keyring.load(None)) as running,
                Client(running) as host,
            ):
                assert await host.call_tool("t", type=str) == "fine"
                authorized[0] = b"second"  # the first one has expired
                assert await host.call_tool("t", type=str) == "fine"
    assert {asked.headers.get("x-tenant") for asked in server.asked} == {"a b"}


@pytest.mark.parametrize("reason", [b'"too late"', b"1e400", b"9" * 5000])
async def test_a_withdrawn_question_is_withdrawn_for_the_host(reason: bytes) -> None:
    async def ask_in_vain(asked: Asked, request_id: bytes) -> None:
        await asked.start(EVENTS)
        await asked.write(
            b'data: {"jsonrpc":"2.0","id":7,"method":"elicitation/create","params":{}}\n\n'
        )
        await question_came.wait()
        await asked.write(
            b'data: {"jsonrpc":"2.0","method":"notifications/cancelled",'
            b'"params":{"requestId":7,"reason":%s}}\n\n' % reason
        )
        await asked.write(b"data: " + _result(request_id) + b"\n\n")
        await asked.finish()

    question_came = trio.Event()
    with trio.fail_after(PATIENCE_S):
        async with (
            http_server(Bad(ask_in_vain)) as server,
            attached(server.url) as running,
            trio.open_nursery() as nursery,
        ):
            cable = Cable(principal="alice", capacity=1 << 20)
            nursery.start_soon(running.serve, cable.far)
            host = await greeted(Talker(cable.near, cable), {"elicitation": {}})
            await host.call(1, "t")
            question = await host.find(lambda each: each.get("method") == "elicitation/create")
            question_came.set()
            lines: list[Any] = []
            while not any(b"fine" in line for line in lines):
                lines += await host.channel.receive()
            (withdrawn,) = (line for line in lines if b"notifications/cancelled" in line)
            params = b'"params":{"requestId":%s,"reason":%s}' % (encode(question["id"]), reason)
            assert params in withdrawn
            nursery.cancel_scope.cancel()
        # MCP: "Receivers of cancellation notifications SHOULD … Not send a response".
        assert not [body for body in server.posted if b'"id":7' in body]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("401 Unauthorized", "valid token"),
        ("404 Not Found", "404"),
        ("405 Method Not Allowed", "405"),
    ],
)
async def test_a_server_that_refuses_says_why(status: str, said: str) -> None:
    async def refuse(asked: Asked) -> None:
        await asked.respond(status)

    with trio.fail_after(PATIENCE_S):
        async with http_server(refuse) as server, attached(server.url) as running:
            with pytest.raises(CannotConnect, match=said):
                async with Client(running):
                    pass


async def test_a_server_of_another_revision_is_named() -> None:
    async def modern(asked: Asked) -> None:
        request_id = _quoted(decode(asked.body, Json)["id"])
        data = b'{"supported":["2026-07-28"]}'
        error = b'{"code":-32022,"message":"Unsupported version","data":%s}' % data
        body = b'{"jsonrpc":"2.0","id":%s,"error":%s}' % (request_id, error)
        await asked.respond("400 Bad Request", body)

    with trio.fail_after(PATIENCE_S):
        async with http_server(modern) as server, attached(server.url) as running:
            with pytest.raises(CannotConnect, match=r"2025-11-25"):
                async with Client(running):
                    pass


# Answers that are no strict JSON, or too long


def _said(text: bytes) -> Any:
    async def answer(asked: Asked, request_id: bytes) -> None:
        await asked.respond("200 OK", _result(request_id, text))

    return answer


def _events(text: bytes) -> Any:
    """As servers of the SDK: the answer is the last event, and its continuation stays open."""

    async def answer(asked: Asked, request_id: bytes) -> None:
        body = b"id: 1\ndata: {}\n\n".replace(b"{}", LOG) + b"id: 2\ndata: "
        await asked.respond("200 OK", body + _result(request_id, text) + b"\n\n", kind=EVENTS)

    return answer


LOG: Final = (
    b'{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}'
)

ODD: Final = [(b"a\\ud800b", "a\ufffdb"), (b"a\xffb", "a\ufffdb"), (b'","n":NaN,"m":"', "")]


class Continuing(Bad):
    """Its continued responses stay open, and nothing comes."""

    async def __call__(self, asked: Asked) -> None:
        if asked.method == "GET" and "last-event-id" in asked.headers:
            await asked.start(EVENTS)
            await trio.sleep_forever()
        await super().__call__(asked)


@asynccontextmanager
async def a_host_of(server: Any) -> AsyncIterator[Talker]:
    """A host that gets the lines as they are, and refuses those that are no JSON in UTF-8."""
    with trio.fail_after(PATIENCE_S):
        async with (
            http_server(server) as http,
            attached(http.url) as running,
            trio.open_nursery() as nursery,
        ):
            cable = Cable(principal="alice", capacity=1 << 20)
            nursery.start_soon(running.serve, cable.far)
            yield await greeted(Talker(cable.near, cable), {})
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("form", [_said, _events], ids=["json", "events"])
@pytest.mark.parametrize(("text", "mended"), ODD, ids=["surrogate", "utf8", "nan"])
async def test_an_answer_that_is_no_strict_json_is_mended(
    form: Any, text: bytes, mended: str
) -> None:
    async with a_host_of(Continuing(form(text))) as host:
        await host.call(1, "t")
        answer = await host.answer(1)
    assert answer["result"]["content"][0]["text"] == mended


@pytest.mark.parametrize("form", [_said, _events], ids=["json", "events"])
async def test_an_answer_that_cannot_be_read_ends_its_own_call(form: Any) -> None:
    released = trio.Event()

    async def later(asked: Asked, request_id: bytes) -> None:
        await asked.start(EVENTS)
        await released.wait()
        await asked.write(b"data: " + _result(request_id) + b"\n\n")
        await asked.finish()

    async with a_host_of(Continuing(later, form(b'"oops'))) as host:
        await host.call(1, "t")
        await host.call(2, "t")
        refused = await host.answer(2)
        assert refused["error"]["data"]["reason"] == "unreadable"
        released.set()
        assert (await host.answer(1))["result"]["content"][0]["text"] == "fine"


async def test_notifications_that_are_no_text_are_mended() -> None:
    async def answer(asked: Asked, request_id: bytes) -> None:
        body = b"data: " + LOG.replace(b"1}", b'"\xff"}') + b"\n\ndata: " + _result(request_id)
        await asked.respond("200 OK", body + b"\n\n", kind=EVENTS)

    async with a_host_of(Bad(answer)) as host:
        await host.call(1, "t")
        await host.answer(1)
        assert [each["params"]["data"] for each in host.seen if "method" in each] == ["\ufffd"]


async def endless(asked: Asked, request_id: bytes) -> None:
    """An event without an end."""
    await asked.start(EVENTS)
    await asked.write(b"id: 1\ndata: {}\n\n".replace(b"{}", LOG) + b"data: ")
    while True:
        await asked.write(b"x" * 1_000_000)


async def long_event(asked: Asked, request_id: bytes) -> None:
    await asked.respond(
        "200 OK", b"data: " + _result(request_id, b"y" * 6_000_000) + b"\n\n", kind=EVENTS
    )


@pytest.mark.parametrize(
    "long",
    [_said(b"y" * 6_000_000), long_event, huge, endless],
    ids=["json", "event", "huge", "endless"],
)
async def test_an_answer_above_the_limit_ends_its_own_call(long: Any) -> None:
    released = trio.Event()

    async def later(asked: Asked, request_id: bytes) -> None:
        await asked.start(EVENTS)
        await asked.write(b"data: " + LOG + b"\n\n")
        await released.wait()
        await asked.write(b"data: " + _result(request_id) + b"\n\n")
        await asked.finish()

    async with a_host_of(Bad(later, long, fine)) as host:
        await host.call(1, "t")
        await host.call(2, "t")
        refused = await host.answer(2)
        assert refused["error"]["data"]["reason"] == "too_large"
        released.set()
        assert (await host.answer(1))["result"]["content"][0]["text"] == "fine"
        await host.call(3, "t")
        assert (await host.answer(3))["result"]["content"][0]["text"] == "fine"


# Calls of one session are independent


async def test_calls_to_a_server_that_answers_in_json_run_at_the_same_time() -> None:
    running: list[bytes] = []
    all_run = trio.Event()
    cancelled: list[Json] = []

    async def together(asked: Asked, request_id: bytes) -> None:
        running.append(request_id)
        if len(running) == 6:
            all_run.set()
        await all_run.wait()
        await asked.respond("200 OK", _result(request_id))

    async def never(asked: Asked, request_id: bytes) -> None:
        await trio.sleep_forever()

    class Counting(Bad):
        async def __call__(self, asked: Asked) -> None:
            if b"notifications/cancelled" in asked.body:
                cancelled.append(decode(asked.body, Json))
            await super().__call__(asked)

    async with a_host_of(Counting(*[together] * 6, never, fine)) as host:
        with trio.fail_after(4):  # one after the other, they begin every 5 s
            for number in range(6):
                await host.call(number, "t")
            for _ in range(6):
                await host.find(lambda message: "result" in message)
        await host.call(7, "t")
        await trio.sleep(0.1)
        with trio.fail_after(4):
            await host.tell("notifications/cancelled", requestId=7, reason="enough")
            await host.call(8, "t")
            assert (await host.answer(8))["result"]["content"][0]["text"] == "fine"
            while not cancelled:
                await trio.sleep(0.01)
        assert cancelled[0]["params"]["reason"] == "enough"


async def test_a_server_that_has_forgotten_its_events_ends_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transports.http.client.EMPTY_MAX", 3)
    continued: list[str] = []

    async def begun(asked: Asked, request_id: bytes) -> None:
        await asked.respond("200 OK", b"id: 1\ndata: " + LOG + b"\n\n", kind=EVENTS)

    class Forgetful(Bad):
        async def __call__(self, asked: Asked) -> None:
            if asked.method == "GET" and "last-event-id" in asked.headers:
                continued.append(asked.headers["last-event-id"])
                await asked.respond("200 OK", b"retry: 100\n\n", kind=EVENTS)
                return
            await super().__call__(asked)

    async with a_host_of(Forgetful(begun, fine)) as host:
        await host.call(1, "t")
        with trio.fail_after(10):
            assert (await host.answer(1))["error"]["data"]["reason"] == "interrupted"
        assert continued == ["1"] * 3
        await host.call(2, "t")
        assert (await host.answer(2))["result"]["content"][0]["text"] == "fine"


async def test_a_pause_that_the_server_asks_for_is_bounded() -> None:
    async def pausing(asked: Asked, request_id: bytes) -> None:
        body = b"retry: 99999999999\nid: %s\ndata: %s\n\n" % (request_id.strip(b'"'), LOG)
        await asked.respond("200 OK", body, kind=EVENTS)

    class Paused(Bad):
        async def __call__(self, asked: Asked) -> None:
            last = asked.headers.get("last-event-id")
            if asked.method == "GET" and last is not None:
                body = b"id: end\ndata: " + _result(_quoted(last)) + b"\n\n"
                await asked.respond("200 OK", body, kind=EVENTS)
                return
            await super().__call__(asked)

    async with a_host_of(Paused(pausing)) as host:
        await host.call(1, "t")
        with trio.fail_after(10):
            assert (await host.answer(1))["result"]["content"][0]["text"] == "fine"


@pytest.mark.parametrize("status", ["401 Unauthorized", "404 Not Found", "400 Bad Request"])
async def test_the_refusal_of_one_request_leaves_the_others_alone(status: str) -> None:
    released = trio.Event()

    async def later(asked: Asked, request_id: bytes) -> None:
        await asked.start(EVENTS)
        await asked.write(b"data: " + LOG + b"\n\n")
        await released.wait()
        await asked.write(b"data: " + _result(request_id) + b"\n\n")
        await asked.finish()

    async def refuse(asked: Asked, request_id: bytes) -> None:
        await asked.respond(status)

    async with a_host_of(Bad(later, refuse)) as host:
        await host.call(1, "t")
        await host.call(2, "t")
        refused = (await host.answer(2))["error"]
        if status.startswith("401"):
            assert refused["data"]["reason"] == "unauthorized"
        released.set()
        assert (await host.answer(1))["result"]["content"][0]["text"] == "fine"


@pytest.mark.parametrize("status", ["404 Not Found", "400 Bad Request"])
async def test_a_server_that_has_forgotten_the_session_gets_a_new_one(status: str) -> None:
    class Forgetting(Bad):
        """It knows a session until it is made to forget it."""

        is_known = False

        async def __call__(self, asked: Asked) -> None:
            if asked.method == "POST" and decode(asked.body, Json)["method"] == "initialize":
                self.is_known = True
            if self.is_known or asked.method != "POST":
                await super().__call__(asked)
            else:
                await asked.respond(status)

    server = Forgetting(fine, fine)
    async with a_host_of(server) as host:
        for number in (1, 2):
            await host.call(number, "t")
            assert (await host.answer(number))["result"]["content"][0]["text"] == "fine"
            server.is_known = False


async def test_a_kept_list_with_odd_numbers_is_told_while_the_server_is_away(
    tmp_path: Path,
) -> None:
    schema = b'{"type":"object","properties":{"a":{"maximum":1e400}}}'
    page = b'{"tools":[{"name":"t","inputSchema":%s}],"_meta":{"own":1e400}}' % schema

    class Listing(Bad):
        async def __call__(self, asked: Asked) -> None:
            message = decode(asked.body or b"{}", Json)
            if message.get("method") == "tools/list":
                line = b'{"jsonrpc":"2.0","id":%s,"result":%s}' % (_quoted(message["id"]), page)
                await asked.respond("200 OK", line)
            else:
                await super().__call__(asked)

    hello = tmp_path / "hello.json"
    with trio.fail_after(PATIENCE_S):
        async with (
            http_server(Listing()) as server,
            attached(server.url, hello_path=hello) as near,
            Client(near),
        ):
            while not hello.exists() or page not in hello.read_bytes():
                await trio.sleep(0.01)
        async with attached(server.url, hello_path=hello) as near, trio.open_nursery() as nursery:
            cable = Cable(principal="alice", capacity=1 << 20)
            nursery.start_soon(near.serve, cable.far)
            host = await greeted(Talker(cable.near, cable), {})
            await host.ask(1, "tools/list")
            (line,) = await host.channel.receive()
            assert schema in line
            assert b'"_meta":{"own":1e400,"mcp-streams/stale":true}' in line
            nursery.cancel_scope.cancel()
