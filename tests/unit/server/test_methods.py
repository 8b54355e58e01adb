"""Requests and notifications of clients that MCP does not know."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pydantic
import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, CallFailed, Context, Refusal, Server, ToolError
from streams.protocol import dialects
from streams.server.handlers import tool_at
from streams.server.methods import MCP_NAMES
from tests.rigs.server import PLAIN, REQUESTS, STREAMS, Json, open_house, reason, with_token
from tests.rigs.web import EVENTS, JSON, browsing


@dataclass
class Search:
    words: list[str]
    limit: int = 10


class Model(pydantic.BaseModel):
    words: list[str]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    words: list[str]


@pytest.fixture
def server() -> Server:
    return Server("tested")


async def asked(server: Server, method: str, **params: Any) -> Json:
    """The result, or the error, of one request."""
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        return await talker.request(1, method, **params)


async def test_a_handler_has_the_call_and_typed_params(server: Server) -> None:
    @server.method("acme/search")
    async def search(call: Call, params: Search) -> Any:
        assert call.client.info.name == "talker"
        return {"id": call.request_id, "words": params.words, "limit": params.limit}

    found = await asked(server, "acme/search", words=["a", "b"])
    assert found == {"id": 1, "words": ["a", "b"], "limit": 10}


@pytest.mark.parametrize("result", [None, 1, "x", [1, 2], {"a": None}, True])
async def test_a_result_is_any_json(server: Server, result: Any) -> None:
    @server.method("acme/give")
    async def give() -> Any:
        return result

    assert await asked(server, "acme/give") == result


@pytest.mark.parametrize("kind", [dict, dict[str, Any], Any, Model, Strict])
async def test_params_have_any_type(server: Server, kind: Any) -> None:
    async def search(params: Any) -> Any:
        return params["words"] if isinstance(params, dict) else params.words

    search.__annotations__["params"] = kind
    server.method("acme/search")(search)
    assert await asked(server, "acme/search", words=["a"]) == ["a"]
    assert await asked(server, "acme/search", words=["a"], _meta={"progressToken": 1}) == ["a"]


async def test_the_watchdog_knows_a_handler(server: Server) -> None:
    @server.method("acme/look")
    async def look() -> Any:
        frame, names = sys._getframe(), list[str]()
        while frame is not None:
            names += filter(None, [tool_at(frame)])
            frame = frame.f_back
        return names

    assert await asked(server, "acme/look") == ["acme/look"]


async def test_a_handler_may_take_nothing(server: Server) -> None:
    @server.method("acme/now")
    async def now() -> str:
        return "now"

    @server.method("acme/who")
    async def name(context: Context) -> Any:
        return context.principal.name

    assert await asked(server, "acme/now", anything=1) == "now"
    assert await asked(server, "acme/who") == "alice"


@pytest.mark.parametrize("kind", [Search, Model, Strict])
async def test_params_that_do_not_fit_are_refused(server: Server, kind: Any) -> None:
    async def search(params: Any) -> Any:
        raise AssertionError(params)

    search.__annotations__["params"] = kind
    server.method("acme/search")(search)
    error = await asked(server, "acme/search", words=1)
    assert error["code"] == -32602
    assert error["message"].startswith("Bad params of acme/search: ")


class Code(msgspec.Struct, forbid_unknown_fields=True):
    code: Annotated[str, msgspec.Meta(pattern="^(a+)+$")]  # takes `re` 2 ** length steps


async def test_patterns_of_params_are_matched_in_linear_time(server: Server) -> None:
    told = []

    @server.method("acme/find")
    async def find(params: Code) -> str:
        return params.code[:2]

    @server.notification("acme/found")
    async def found(params: Code) -> None:
        told.append(params.code)

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        assert await talker.request(1, "acme/find", code="aaa", _meta={}) == "aa"
        for number, code in enumerate(["a" * 60 + "!", "a" * 100_000 + "!"], 2):
            error = await talker.request(number, "acme/find", code=code)
            assert error["message"].startswith("Bad params of acme/find: params.code: ")
            await talker.tell("acme/found", code=code)
        await talker.tell("acme/found", code="aa")
        assert await talker.request(4, "acme/find", code="a" * 100_000) == "aa"
    assert told == ["aa"]


def test_a_pattern_of_params_that_needs_backtracking_is_refused(server: Server) -> None:
    class Twice(msgspec.Struct):
        code: Annotated[str, msgspec.Meta(pattern=r"^(a)\1$")]

    with pytest.raises(TypeError, match=r"method acme/find: .* patterns are matched in linear"):

        @server.method("acme/find")
        async def find(params: Twice) -> None:
            """Never added."""


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (Refusal(-32042, "Pay first.", {"url": "x"}), -32042, "Pay first."),
        (ExceptionGroup("jobs", [Refusal(1, "Pay first.")]), 1, "Pay first."),
        (ToolError("Closed today."), -32603, "Closed today."),
        (ValueError("no rows"), -32603, "no rows"),
        (SystemExit(3), -32603, "SystemExit: 3"),
        (CallFailed(-1, "no user"), -32603, "no user (code -1)"),
    ],
)
async def test_an_exception_is_a_json_rpc_error(
    server: Server, raised: BaseException, code: int, message: str
) -> None:
    @server.method("acme/fail")
    async def fail() -> None:
        raise raised

    error = await asked(server, "acme/fail")
    assert (error["code"], error["message"]) == (code, message)
    assert ("data" in error) is (code == -32042)


async def test_an_exception_is_masked_on_request() -> None:
    server = Server("tested", mask_errors=True)

    @server.method("acme/fail")
    async def fail(params: dict[str, Any]) -> None:
        raise ToolError("Closed today.") if params else ValueError("secret")

    with structlog.testing.capture_logs() as logs:
        assert "secret" not in (await asked(server, "acme/fail"))["message"]
    assert [each["exc_info"][1].args for each in logs if "exc_info" in each] == [("secret",)]
    assert (await asked(server, "acme/fail", a=1))["message"] == "Closed today."


class Ending(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(7)


class EndingValue(Ending, ValueError):
    def __str__(self) -> str:
        raise SystemExit(7)


@pytest.mark.parametrize("mask_errors", [False, True])
@pytest.mark.parametrize("kind", [Ending, EndingValue])
async def test_an_exception_that_cannot_be_shown_ends_nothing_else(
    kind: type[Exception], mask_errors: bool
) -> None:
    server = Server("tested", mask_errors=mask_errors)

    @dataclass
    class Odd:
        words: int

        def __post_init__(self) -> None:
            raise kind

    @server.method("acme/fail")
    async def fail() -> None:
        raise kind

    @server.notification("acme/moved")
    async def moved() -> None:
        raise kind

    @server.method("acme/odd")
    async def odd(params: Odd) -> None:
        raise AssertionError(params)

    @server.tool
    async def build(odd: Odd) -> str:
        raise AssertionError(odd)

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        assert (await talker.request(1, "acme/fail"))["code"] == -32603
        assert (await talker.request(1, "acme/odd", words=1))["code"] == -32602
        await talker.tell("acme/moved")
        await talker.call(2, "build", odd={"words": 1})
        assert (await talker.answer(2))["result"]["isError"]
        assert await talker.request(3, "ping") == {}


@pytest.mark.parametrize("value", [object(), Refusal(1, "x", {"a": object()})])
async def test_what_is_not_json_is_an_error(server: Server, value: Any) -> None:
    @server.method("acme/odd")
    async def odd() -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        assert (await talker.request(1, "acme/odd"))["code"] == -32603
        assert await talker.request(2, "ping") == {}


async def test_a_request_can_be_cancelled(server: Server) -> None:
    begun, ended = trio.Event(), trio.Event()

    @server.method("acme/wait")
    async def wait() -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.ask(1, "acme/wait")
        await begun.wait()
        await talker.tell("notifications/cancelled", requestId=1)
        await ended.wait()
        assert await talker.request(1, "ping") == {}, "its id is free again"


async def test_other_messages_do_not_wait_for_a_handler(server: Server) -> None:
    @server.method("acme/wait")
    async def wait() -> None:
        await trio.sleep_forever()

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.ask(1, "acme/wait")
        assert await talker.request(2, "ping") == {}
        again = await talker.request(1, "acme/wait")
        assert "in use" in again["message"]


async def test_a_handler_reports_progress_and_asks(server: Server) -> None:
    @server.method("acme/work")
    async def work(call: Call) -> Any:
        await call.progress(1, total=2)
        await call.log("info", "half")
        return [root.uri for root in await call.roots()]

    async with open_house(server) as house:
        talker = await house.dial({"roots": {}})
        await talker.ask(1, "acme/work", _meta={"progressToken": "p"})
        progress = await talker.read()
        assert progress["params"] == {"progressToken": "p", "progress": 1, "total": 2}
        assert (await talker.read())["params"]["logger"] == "acme/work"
        question = await talker.read()
        await talker.say({"id": question["id"], "result": {"roots": [{"uri": "file:///a"}]}})
        assert (await talker.answer(1))["result"] == ["file:///a"]


@pytest.mark.parametrize("capabilities", [STREAMS, REQUESTS])
async def test_a_request_is_resumed(capabilities: Json, autojump_clock: MockClock) -> None:
    server = Server("tested", announce_after_s=0)

    @server.tool(scopes=["all"])
    async def scoped() -> None: ...

    @server.method("acme/wait")
    async def wait(call: Call) -> str:
        await trio.sleep(100)
        return "done"

    async with open_house(server) as house:
        talker = await house.dial(capabilities)
        await talker.ask(1, "acme/wait")
        if capabilities is STREAMS:
            stream = await talker.announced()
            await talker.leave()
            heard = await (await house.dial(capabilities)).resume(2, stream)
            (final,) = [m for m in heard if m.get("id") == 1]
        else:
            token = with_token(await talker.policy())
            await talker.leave()
            other = await house.dial(capabilities)
            await other.ask(2, "requests/resume", **token)
            final = await other.answer(2)
    assert final["result"] == "done"


async def test_a_request_is_interrupted_when_the_server_has_died(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested", announce_after_s=0)

    @server.method("acme/wait")
    async def wait() -> None:
        await trio.sleep_forever()

    async with open_house(server) as house:
        talker = await house.dial()
        await talker.ask(1, "acme/wait")
        stream = await talker.announced()
        journal = house.as_after_a_crash()
        keyring = house.running.engine.operations._keyring
    with structlog.testing.capture_logs() as logs:
        async with open_house(server, journal=journal, keyring=keyring) as house:
            heard = await (await house.dial()).resume(2, stream)
    (final,) = [m for m in heard if m.get("id") == 1]
    assert reason(final["error"]) == "interrupted"
    assert not [each for each in logs if each["log_level"] == "warning"]


async def test_it_works_over_http(server: Server, autojump_clock: MockClock) -> None:
    ended = trio.Event()

    @server.method("acme/search")
    async def search(call: Call, params: Search) -> Any:
        if params.limit == 0:
            try:
                await trio.sleep_forever()
            finally:
                ended.set()
        return params.words

    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        short = await browser.post(1, "acme/search", words=["a"])
        assert (short.type, short.json["result"]) == (JSON, ["a"])
        long = await browser.post(2, "acme/search", words=[], limit=0)
        await trio.sleep(1)
        assert long.type == EVENTS
        note = {"method": "notifications/cancelled", "params": {"requestId": 2}}
        await browser.fetch("POST", {"jsonrpc": "2.0"} | note)
        with trio.fail_after(10):
            await ended.wait()
        bad = await browser.post(3, "acme/search", words=1)
        assert bad.json["error"]["code"] == -32602


# Notifications


async def test_a_notification_has_a_handler(server: Server) -> None:
    heard: list[Any] = []

    @server.notification("acme/moved")
    async def moved(context: Context, params: Search) -> None:
        heard.append((params.words, context.principal.name, context.client.info.name))

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.tell("acme/moved", words=["a"])
        await talker.tell("acme/moved", words=["b"])
        assert await talker.request(1, "ping") == {}
        async with browsing(house, PLAIN) as browser:
            note = {"jsonrpc": "2.0", "method": "acme/moved", "params": {"words": ["c"]}}
            assert (await browser.fetch("POST", note)).status == 202
    assert [each[0] for each in heard] == [["a"], ["b"], ["c"]]
    assert heard[0][1:] == ("alice", "talker")
    assert heard[2][1].startswith("session(")


async def test_errors_of_a_notification_are_logged(server: Server) -> None:
    @server.notification("acme/moved")
    async def moved(params: Search) -> None:
        raise ValueError("no rows")

    with structlog.testing.capture_logs() as logs:
        async with open_house(server) as house:
            talker = await house.dial(PLAIN)
            await talker.tell("acme/moved", words=["a"])
            await talker.tell("acme/moved", words=1)
            assert await talker.request(1, "ping") == {}
            assert not [m for m in talker.seen if m.get("id") != 1]
    assert [each["exc_info"][1].args for each in logs if "exc_info" in each] == [("no rows",)]
    assert any("Bad params of acme/moved" in str(each.get("why")) for each in logs)


async def test_a_notification_ends_with_its_connection(server: Server) -> None:
    begun, ended = trio.Event(), trio.Event()

    @server.notification("acme/moved")
    async def moved() -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    with trio.fail_after(10):
        async with open_house(server) as house:
            talker = await house.dial(PLAIN)
            await talker.tell("acme/moved")
            await begun.wait()
            await wait_all_tasks_blocked()
        await ended.wait()


# Decoration


@pytest.mark.parametrize("name", sorted(MCP_NAMES | dialects.method_names()))
def test_names_of_mcp_and_of_the_proposals_are_refused(server: Server, name: str) -> None:
    async def handle() -> None: ...

    for add in (server.method, server.notification):
        with pytest.raises(ValueError, match="the name belongs to"):
            add(name)(handle)


@pytest.mark.parametrize(
    "name",
    ["", "a b", "x" * 201, "naïve", "rpc.discover", "mcp-streams/x", "notifications/stream/ack"],
)
def test_other_names_are_refused_too(server: Server, name: str) -> None:
    async def handle() -> None: ...

    with pytest.raises(ValueError, match="method "):
        server.method(name)(handle)


def test_a_name_has_one_handler(server: Server) -> None:
    async def handle() -> None: ...

    server.method("acme/x")(handle)
    for add in (server.method, server.notification):
        with pytest.raises(ValueError, match="it has a handler already"):
            add("acme/x")(handle)


def plain() -> None: ...
async def three(call: Call, a: int, b: int) -> None: ...
async def two_calls(call: Call, other: Call) -> None: ...
async def variadic(*params: Any) -> None: ...
async def keyword(*, params: Any) -> None: ...
async def unresolved(params: "NoSuch") -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def odd_type(params: trio.Event | int | trio.Lock) -> None: ...
async def pages() -> Any:
    yield 1


@pytest.mark.parametrize(
    "handler", [plain, three, two_calls, variadic, keyword, unresolved, odd_type, pages, 7]
)
def test_what_cannot_be_a_handler_is_refused(server: Server, handler: Any) -> None:
    with pytest.raises(TypeError):
        server.method("acme/x")(handler)


def test_a_notification_has_no_call(server: Server) -> None:
    async def handle(call: Call) -> None: ...

    with pytest.raises(TypeError, match="a notification has only a Context"):
        server.notification("acme/x")(handle)
