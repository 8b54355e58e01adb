"""Resources end to end: functions that clients read by URI, and subscriptions."""

import datetime
import enum
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import (
    Annotations,
    Call,
    Icon,
    ResourceContents,
    ResourceNotFound,
    Server,
    SyncCall,
)
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.server.resources import SUBSCRIPTION_BYTES_MAX, SUBSCRIPTIONS_MAX
from streams.server.templates import URI_LETTERS_MAX
from tests.rigs.server import (
    PLAIN,
    Json,
    Talker,
    greeted,
    methods,
    open_house,
    reason,
    said,
)
from tests.rigs.web import EVENTS, JSON, Browser, browsing, logged
from transports.memory import Cable

UPDATED = "notifications/resources/updated"
CHANGED = "notifications/resources/list_changed"
NOT_FOUND = -32002


@pytest.fixture
def server() -> Server:
    return Server("tested")


async def ask(server: Server, method: str, **params: Any) -> Json:
    """The answer to one request: its result, or its error."""
    async with open_house(server) as house:
        return await (await house.dial(PLAIN)).request(1, method, **params)


async def read(server: Server, uri: str) -> Any:
    """The one content of a resource."""
    (content,) = (await ask(server, "resources/read", uri=uri))["contents"]
    return content


async def initialized(server: Server) -> Json:
    async with open_house(server) as house:
        cable = house.cable()
        talker = Talker(cable.near, cable)
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}
        capabilities: Json = (await talker.request(1, "initialize", **hello))["capabilities"]
        return capabilities


# Values of readers


class _Model(pydantic.BaseModel):
    id: int


class _Row(msgspec.Struct):
    id: int
    at: datetime.date


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", {"text": "text", "mimeType": "text/plain"}),
        ("", {"text": "", "mimeType": "text/plain"}),
        (b"\x00\xff", {"blob": "AP8=", "mimeType": "application/octet-stream"}),
        (bytearray(b"a"), {"blob": "YQ==", "mimeType": "application/octet-stream"}),
        (b"", {"blob": "", "mimeType": "application/octet-stream"}),
        ({"a": [1, None]}, {"text": '{"a":[1,null]}', "mimeType": "application/json"}),
        (["a", "b"], {"text": '["a","b"]', "mimeType": "application/json"}),
        ([], {"text": "[]", "mimeType": "application/json"}),
        (None, {"text": "null", "mimeType": "application/json"}),
        (7, {"text": "7", "mimeType": "application/json"}),
        (
            _Row(1, datetime.date(2026, 1, 2)),
            {"text": '{"id":1,"at":"2026-01-02"}', "mimeType": "application/json"},
        ),
        (_Model(id=1), {"text": '{"id":1}', "mimeType": "application/json"}),
        ([_Model(id=1)], {"text": '[{"id":1}]', "mimeType": "application/json"}),
        (
            ResourceContents("x:other", text="a", mime_type="text/html", meta={"k": 1}),
            {"uri": "x:other", "text": "a", "mimeType": "text/html", "_meta": {"k": 1}},
        ),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_value_becomes_contents(
    server: Server, value: Any, content: Json, is_async: bool
) -> None:
    if is_async:

        @server.resource("x:it")
        async def it() -> Any:
            return value
    else:

        @server.resource("x:it")
        def it() -> Any:
            assert threading.current_thread() is not threading.main_thread()
            return value

    assert await read(server, "x:it") == {"uri": "x:it"} | content


async def test_a_list_with_contents_is_several(server: Server) -> None:
    @server.resource("x:folder", mime_type="text/x-part")
    async def folder() -> list[Any]:
        return [ResourceContents("x:folder/a", text="a"), "b", b"c"]

    result = await ask(server, "resources/read", uri="x:folder")
    assert result["contents"] == [
        {"uri": "x:folder/a", "text": "a"},
        {"uri": "x:folder", "text": "b", "mimeType": "text/x-part"},
        {"uri": "x:folder", "blob": "Yw==", "mimeType": "text/x-part"},
    ]


async def test_a_mime_type_of_the_resource_is_that_of_its_contents(server: Server) -> None:
    @server.resource("x:csv", mime_type="text/csv")
    async def csv() -> str:
        return "a,b"

    assert (await read(server, "x:csv"))["mimeType"] == "text/csv"


# Arguments from the URI


class _Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "7", 7),
        (int, "-7", -7),
        (int, "007", 7),
        (float, "1.5", 1.5),
        (float, "2", 2.0),
        (bool, "true", True),
        (bool, "False", False),
        (bool, "0", False),
        (str, "7", "7"),
        (str | int, "7", "7"),
        (int | None, "7", 7),
        (int | None, "null", None),
        (_Colour, "red", _Colour.RED),
        (Literal[1, 2], "2", 2),
        (Literal["a", "b"], "b", "b"),
        (datetime.date, "2026-01-02", datetime.date(2026, 1, 2)),
        (uuid.UUID, "12345678123456781234567812345678", uuid.UUID(hex="12345678" * 4)),
        (Annotated[int, msgspec.Meta(ge=1, le=9)], "9", 9),
        (list[int], "%5B1%2C2%5D", [1, 2]),
        (Any, "7", "7"),
    ],
)
async def test_values_are_converted_by_the_annotations(
    server: Server, annotation: Any, text: str, value: Any
) -> None:
    got = []

    async def it(v):  # type: ignore[no-untyped-def]
        got.append(v)
        return "ok"

    it.__annotations__ = {"v": annotation}
    server.resource("x:{v}")(it)
    assert (await read(server, f"x:{text}"))["text"] == "ok"
    assert got == [value]
    assert type(got[0]) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "seven"),
        (int, "7.5"),
        (int, "7e2"),
        (int, "²"),
        (int, "9" * 41),
        (float, "nan"),
        (float, "1e9999"),
        (bool, "maybe"),
        (_Colour, "green"),
        (Literal[1, 2], "3"),
        (datetime.date, "today"),
        (Annotated[int, msgspec.Meta(ge=1, le=9)], "10"),
        (Annotated[str, msgspec.Meta(pattern="^[a-z]+$")], "A"),
        (list[int], "%5B1%2C"),
        (list[int], "%5B" * 1000),
    ],
)
async def test_a_value_of_another_type_is_an_error_that_names_it(
    server: Server, annotation: Any, text: str
) -> None:
    async def it(v):  # type: ignore[no-untyped-def]
        raise AssertionError("it is not read")

    it.__annotations__ = {"v": annotation}
    server.resource("x:{v}")(it)
    error = await ask(server, "resources/read", uri=f"x:{text}")
    assert error["code"] == -32602
    assert ": v: " in error["message"]


async def test_the_parts_of_a_path_are_a_list_or_one_text(server: Server) -> None:
    @server.resource("x:one/{path*}")
    async def one(path: str) -> str:
        return path

    @server.resource("x:many/{path*}")
    async def many(path: list[str]) -> list[str]:
        return path

    @server.resource("x:numbers{/path*}")
    async def numbers(path: list[int]) -> list[int]:
        return path

    assert (await read(server, "x:one/a/b"))["text"] == "a/b"
    assert (await read(server, "x:many/a/b"))["text"] == '["a","b"]'
    assert (await read(server, "x:numbers/1/2"))["text"] == "[1,2]"


async def test_a_query_that_is_absent_has_the_default(server: Server) -> None:
    @server.resource("x:{id}{?limit,order}")
    async def it(id: int, limit: int = 10, order: Literal["up", "down"] = "up") -> list[Any]:
        return [id, limit, order]

    assert (await read(server, "x:1"))["text"] == '[1,10,"up"]'
    assert (await read(server, "x:1?order=down&limit=3"))["text"] == '[1,3,"down"]'
    error = await ask(server, "resources/read", uri="x:1?limit=many")
    assert error["code"] == -32602


async def test_a_single_resource_goes_before_templates_and_they_go_in_order(
    server: Server,
) -> None:
    @server.resource("x:{id}")
    async def first(id: str) -> str:
        return "first"

    @server.resource("x:{other}")
    async def second(other: str) -> str:
        raise AssertionError("it is not read")

    @server.resource("x:1")
    async def single() -> str:
        return "single"

    assert (await read(server, "x:1"))["text"] == "single"
    assert (await read(server, "x:2"))["text"] == "first"


async def test_an_unsafe_uri_is_not_passed_to_a_later_template(server: Server) -> None:
    @server.resource("x://{+path}")
    async def files(path: str) -> str:
        raise AssertionError("it is not read")

    @server.resource("x:{+anything}")
    async def lax(anything: str) -> str:
        raise AssertionError("it is not read")

    error = await ask(server, "resources/read", uri="x://a/../../etc/passwd")
    assert error["code"] == NOT_FOUND


# Errors


async def test_an_unknown_resource_is_not_found(server: Server) -> None:
    @server.resource("x:known")
    async def known() -> str:
        return ""

    for uri in ("x:unknown", "", "x:known/", "x:%6bnown"):
        error = await ask(server, "resources/read", uri=uri)
        assert (error["code"], error["data"]) == (NOT_FOUND, {"uri": uri})


async def test_a_reader_says_that_there_is_nothing(server: Server) -> None:
    @server.resource("x:{id}")
    async def report(id: int) -> str:
        raise ResourceNotFound(f"There is no report {id}.")

    error = await ask(server, "resources/read", uri="x:7")
    assert error == {"code": NOT_FOUND, "message": "There is no report 7.", "data": {"uri": "x:7"}}


async def test_a_uri_may_not_be_longer_than_a_server_reads(server: Server) -> None:
    @server.resource("x:{id}")
    async def report(id: str) -> str:
        return "ok"

    longest = "x:" + "a" * (URI_LETTERS_MAX - 2)
    assert (await read(server, longest))["text"] == "ok"
    for method in ("resources/read", "resources/subscribe"):
        error = await ask(server, method, uri=longest + "a")
        assert error["code"] == -32602
        assert len(error["message"]) < 200


@pytest.mark.parametrize("params", [{}, {"uri": 7}, {"uri": None}])
async def test_a_request_without_a_uri_is_refused(server: Server, params: Json) -> None:
    @server.resource("x:known")
    async def known() -> str:
        return ""

    for method in ("resources/read", "resources/subscribe", "resources/unsubscribe"):
        assert (await ask(server, method, **params))["code"] == -32602


@pytest.mark.parametrize("error", [RuntimeError("it broke"), SystemExit(3), KeyError("\udcff")])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_reader_that_fails_is_an_error_and_no_more(
    server: Server, error: BaseException, is_async: bool
) -> None:
    async def fail_in_task() -> str:
        raise error

    def fail_in_thread() -> str:
        raise error

    server.resource("x:broken")(fail_in_task if is_async else fail_in_thread)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        answer = await talker.request(1, "resources/read", uri="x:broken")
        assert answer["code"] == -32603
        assert answer["message"].startswith("The resource x:broken failed: ")
        assert await talker.request(2, "ping") == {}


@pytest.mark.parametrize(
    "value", [object(), "\udcff", {1j}, [ResourceContents("x:a", text="a"), 1j]]
)
async def test_a_value_that_is_not_json_is_an_error(server: Server, value: Any) -> None:
    @server.resource("x:odd")
    async def odd() -> Any:
        return value

    assert (await ask(server, "resources/read", uri="x:odd"))["code"] == -32603


async def test_a_large_resource_is_read_whole(server: Server) -> None:
    @server.resource("x:large")
    def large() -> bytes:
        return b"x" * (2 * 1024 * 1024)

    async with open_house(server) as house:
        talker = await house.dial(PLAIN, capacity=1 << 24)
        content = (await talker.request(1, "resources/read", uri="x:large"))["contents"][0]
        assert len(content["blob"]) == (2 * 1024 * 1024 + 2) // 3 * 4


# A read is a call


async def test_other_requests_do_not_wait_for_a_read(server: Server) -> None:
    go = trio.Event()

    @server.resource("x:slow")
    async def slow() -> str:
        await go.wait()
        return "at last"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.ask(1, "resources/read", uri="x:slow")
        assert await talker.request(2, "ping") == {}
        error = await talker.request(1, "ping")
        assert "in use" in error["message"]
        go.set()
        assert (await talker.answer(1))["result"]["contents"][0]["text"] == "at last"


async def test_a_read_can_be_cancelled(server: Server) -> None:
    cancelled = trio.Event()

    @server.resource("x:hanging")
    async def hanging() -> str:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.ask(1, "resources/read", uri="x:hanging")
        await talker.request(2, "ping")
        await talker.tell("notifications/cancelled", requestId=1)
        await cancelled.wait()
        await talker.request(3, "ping")
        assert "error" not in methods(talker.seen)
        assert (await talker.request(1, "ping")) == {}, "the id is free again"


async def test_a_read_ends_with_its_connection(server: Server, autojump_clock: MockClock) -> None:
    cancelled = trio.Event()

    @server.resource("x:hanging")
    async def hanging() -> str:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with open_house(server) as house:
        talker = await house.dial()
        await talker.ask(1, "resources/read", uri="x:hanging")
        await talker.request(2, "ping")
        await talker.leave()
        assert cancelled.is_set()
        again = await house.dial()
        assert (await again.request(1, "stream/poll/all"))["statuses"] == []


async def test_over_http_a_read_ends_with_its_response_or_a_cancel(
    server: Server, autojump_clock: MockClock
) -> None:
    ended: list[int] = []

    @server.resource("x:{id}")
    async def hanging(id: int) -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(id)
        raise AssertionError

    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        answer = browser.ask("POST", _read_message(1))
        await trio.sleep(1)
        await answer.hang_up()
        assert ended == [1]
        answer = browser.ask("POST", _read_message(2))
        await wait_all_tasks_blocked()
        await browser.tell("notifications/cancelled", requestId=2)
        assert ended == [1, 2]
        assert (await browser.post(2, "ping")).json["result"] == {}


def _read_message(id: int) -> Json:
    params = {"uri": f"x:{id}"}
    return {"jsonrpc": "2.0", "id": id, "method": "resources/read", "params": params}


async def test_a_shutdown_ends_reads(server: Server, autojump_clock: MockClock) -> None:
    @server.resource("x:hanging")
    async def hanging() -> str:
        await trio.sleep_forever()
        raise AssertionError

    async with trio.open_nursery() as nursery:
        async with server.open(MemoryJournal(), Keyring.load(None)) as running:
            cable = Cable(principal="alice", capacity=1 << 20)
            nursery.start_soon(running.serve, cable.far)
            talker = await greeted(Talker(cable.near, cable), PLAIN)
            await talker.ask(1, "resources/read", uri="x:hanging")
            await talker.request(2, "ping")
        assert reason((await talker.answer(1))["error"]) == "interrupted"


async def test_a_reader_may_use_its_call(server: Server) -> None:
    @server.resource("x:{id}")
    async def it(call: Call, id: str) -> str:
        await call.log("info", f"reading {id}")
        await call.progress(1, total=2)
        answer = await call.request("elicitation/create", {"message": "?"})
        return str(answer["action"])

    @server.resource("y:{id}")
    def plain(call: SyncCall, id: str) -> str:
        call.log("info", f"reading {id} in a thread")
        return f"{call.request_id}"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        meta = {"progressToken": "p"}
        await talker.ask(1, "resources/read", uri="x:7", _meta=meta)
        question = await talker.find(lambda message: message.get("method") == "elicitation/create")
        await talker.say({"id": question["id"], "result": {"action": "accept"}})
        assert (await talker.answer(1))["result"]["contents"][0]["text"] == "accept"
        heard = ["notifications/message", "notifications/progress", "elicitation/create", "result"]
        assert methods(talker.seen) == heard
        result = await talker.request(2, "resources/read", uri="y:8")
        assert result["contents"][0]["text"] == "2"
        assert said(talker.seen) == ["reading 7", "reading 8 in a thread"]


async def test_over_http_a_read_is_plain_json_or_events(server: Server) -> None:
    @server.resource("x:{id}")
    async def it(call: Call, id: int) -> str:
        for n in range(id):
            await call.log("info", n)
        return "done"

    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        plain = await browser.post(1, "resources/read", uri="x:0")
        assert plain.type == JSON
        assert plain.json["result"]["contents"][0]["text"] == "done"
        events = await browser.post(2, "resources/read", uri="x:2")
        assert events.type == EVENTS
        assert logged(events) == [0, 1]
        missing = await browser.post(3, "resources/read", uri="y:0")
        assert (missing.type, missing.json["error"]["code"]) == (JSON, NOT_FOUND)


async def test_a_read_is_not_restarted_as_a_tool_of_the_same_name(server: Server) -> None:
    """Its params look like those of a call: a prompt has a name and arguments as well."""
    ran = []

    @server.tool(restart=True)
    async def same(call: Call) -> str:
        ran.append("tool")
        return "tool"

    @server.prompt(name="same")
    async def same_prompt(call: Call) -> str:
        await call.log("info", "begun")
        await trio.sleep_forever()
        raise AssertionError

    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house, browsing(house, PLAIN) as browser:
        await browser.post(1, "prompts/get", name="same", arguments={})
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, keyring=keyring):
        await wait_all_tasks_blocked()
    assert ran == []


# Lists


async def test_resources_and_templates_are_listed_apart(server: Server) -> None:
    icon = Icon("https://example.com/icon.png", mime_type="image/png", sizes=("48x48",))

    @server.resource(
        "x:config",
        name="config",
        title="The configuration",
        description="All of it.",
        mime_type="application/json",
        size=17,
        annotations=Annotations(audience=("user",), priority=0.5, last_modified="2026-01-02"),
        icons=[icon],
        meta={"owner": "me"},
    )
    async def config() -> dict[str, int]:
        return {}

    @server.resource("x:{id}", icons=[icon])
    async def by_id(id: str) -> str:
        """Any of them.

        By its id.
        """
        return id

    shown = {"src": "https://example.com/icon.png", "mimeType": "image/png", "sizes": ["48x48"]}
    assert await ask(server, "resources/list") == {
        "resources": [
            {
                "uri": "x:config",
                "name": "config",
                "title": "The configuration",
                "description": "All of it.",
                "mimeType": "application/json",
                "size": 17,
                "annotations": {
                    "audience": ["user"],
                    "priority": 0.5,
                    "lastModified": "2026-01-02",
                },
                "icons": [shown],
                "_meta": {"owner": "me"},
            }
        ]
    }
    assert await ask(server, "resources/templates/list") == {
        "resourceTemplates": [
            {
                "uriTemplate": "x:{id}",
                "name": "by_id",
                "description": "Any of them.\n\nBy its id.",
                "icons": [shown],
            }
        ]
    }


async def test_lists_have_pages(server: Server) -> None:
    server = Server("tested", page_size=2)
    for n in range(5):
        server.resource(f"x:{n}", name=f"r{n}")(lambda: "")
        server.resource(f"y{n}:{{id}}", name=f"t{n}")(lambda id: "")
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        for method, key in (
            ("resources/list", "resources"),
            ("resources/templates/list", "resourceTemplates"),
        ):
            page = await talker.request(1, method)
            sizes, cursors = [len(page[key])], [page["nextCursor"]]
            server.remove_resource("x:1" if key == "resources" else "y1:{id}")
            while "nextCursor" in page:
                page = await talker.request(1, method, cursor=page["nextCursor"])
                sizes.append(len(page[key]))
            assert sizes == [2, 2, 1]
            assert (await talker.request(1, method, cursor=cursors[0]))[key], "still valid"
            error = await talker.request(1, method, cursor="unknown")
            assert error["code"] == -32602


async def test_only_a_server_with_resources_says_so(server: Server) -> None:
    assert not {"resources", "prompts", "completions"} & (await initialized(server)).keys()
    for method in ("resources/list", "resources/read", "prompts/get", "completion/complete"):
        assert (await ask(server, method, uri="x:1"))["code"] == -32601
    server.resource("x:{id}")(_reader)
    capabilities = await initialized(server)
    assert capabilities["resources"] == {"subscribe": True, "listChanged": True}
    assert not {"prompts", "completions"} & capabilities.keys()
    assert await ask(server, "resources/list") == {"resources": []}


async def _reader(id: str) -> str:
    return id


# Resources that are refused


@pytest.mark.parametrize(
    ("uri", "settings", "error"),
    [
        ("x:1", {}, "parameter id is not in the URI|id is not in the URI"),
        ("x:{other}", {}, "no parameter other"),
        ("x:y{?id}", {}, "id may be absent in a URI: give the parameter a default"),
        ("not a uri", {}, "expected something like"),
        ("x:{id}", {"colour": "red"}, "unknown settings of a resource: colour"),
        ("x:{id}", {"size": 3}, "size"),
        ("x:{id}", {"icons": ["i.png"]}, "expected Icon"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(
    server: Server, uri: str, settings: Json, error: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        server.resource(uri, **settings)(_reader)


def test_two_resources_cannot_have_one_uri(server: Server) -> None:
    server.resource("x:{id}")(_reader)
    with pytest.raises(ValueError, match="already"):
        server.resource("x:{id}")(_reader)
    with pytest.raises(ValueError, match="there is no resource x:2"):
        server.remove_resource("x:2")
    server.remove_resource("x:{id}")
    server.resource("x:{id}")(_reader)


def test_a_function_without_a_name_needs_one(server: Server) -> None:
    with pytest.raises(ValueError, match="name="):
        server.resource("x:1")(lambda: "")


async def _yields() -> AsyncIterator[str]:
    yield ""


def test_a_decorator_that_is_used_otherwise_says_how(server: Server) -> None:
    with pytest.raises(TypeError, match="a resource needs a URI"):
        server.resource(_new)(_new)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the name of a prompt is a setting"):
        server.prompt("name")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="resource x:1: a function that yields"):
        server.resource("x:1")(_yields)
    with pytest.raises(TypeError, match="not int"):
        server.resource("x:1", name="n")(7)  # type: ignore[type-var]


# Subscriptions


def updates(messages: list[Json]) -> list[str]:
    return [each["params"]["uri"] for each in messages if each.get("method") == UPDATED]


async def test_only_subscribers_hear_of_a_change(server: Server) -> None:
    server.resource("x:{id}")(_reader)
    async with open_house(server) as house:
        one, other = await house.dial(PLAIN), await house.dial(PLAIN)
        assert await one.request(1, "resources/subscribe", uri="x:1") == {}
        assert await one.request(2, "resources/subscribe", uri="x:1") == {}
        assert await other.request(1, "resources/subscribe", uri="x:2") == {}
        for uri in ("x:1", "x:2", "x:3"):
            await server.resource_updated(uri)
        await one.find(lambda message: message.get("method") == UPDATED)
        await other.find(lambda message: message.get("method") == UPDATED)
        assert (updates(one.seen), updates(other.seen)) == (["x:1"], ["x:2"])
        assert await one.request(3, "resources/unsubscribe", uri="x:1") == {}
        assert await one.request(4, "resources/unsubscribe", uri="x:unknown") == {}
        await server.resource_updated("x:1")
        await trio.testing.wait_all_tasks_blocked()
        await one.request(5, "ping")
        assert updates(one.seen) == ["x:1"]


async def test_only_resources_that_exist_can_be_watched(server: Server) -> None:
    server.resource("x:{id}")(_reader)
    for uri in ("y:1", "x:a/b", "x:.."):
        error = await ask(server, "resources/subscribe", uri=uri)
        assert error["code"] == NOT_FOUND


async def test_a_session_has_a_bounded_number_of_subscriptions(server: Server) -> None:
    server.resource("x:{id}")(_reader)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        for n in range(SUBSCRIPTIONS_MAX):
            assert await talker.request(n, "resources/subscribe", uri=f"x:{n}") == {}
        error = await talker.request(0, "resources/subscribe", uri="x:one-more")
        assert error["code"] == -32602
        assert str(SUBSCRIPTIONS_MAX) in error["message"]
        assert await talker.request(0, "resources/subscribe", uri="x:1") == {}
        await talker.request(0, "resources/unsubscribe", uri="x:1")
        assert await talker.request(0, "resources/subscribe", uri="x:one-more") == {}
        other = await house.dial(PLAIN)
        for n in range(SUBSCRIPTION_BYTES_MAX // URI_LETTERS_MAX):
            uri = f"x:{n}".ljust(URI_LETTERS_MAX, "a")
            assert await other.request(n, "resources/subscribe", uri=uri) == {}
        assert (await other.request(0, "resources/subscribe", uri="x:a"))["code"] == -32602


async def test_over_http_the_latest_change_waits_for_the_client(server: Server) -> None:
    server.resource("x:{id}")(_reader)
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        await browser.post(1, "resources/subscribe", uri="x:1")
        for _ in range(10):
            await server.resource_updated("x:1")
        standing = await browser.fetch("GET", accept=EVENTS)
        assert updates([message for _, message in standing.events if message]) == ["x:1"]
        await browser.post(2, "resources/unsubscribe", uri="x:1")
        await server.resource_updated("x:1")
        await wait_all_tasks_blocked()
        assert len(standing.events) == 1


async def test_subscriptions_over_http_survive_a_crash(
    server: Server, autojump_clock: MockClock
) -> None:
    server.resource("x:{id}")(_reader)
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house, browsing(house, PLAIN) as browser:
        await browser.post(1, "resources/subscribe", uri="x:1")
        await browser.post(2, "resources/subscribe", uri="x:2")
        await browser.post(3, "resources/unsubscribe", uri="x:2")
        crashed, session = house.as_after_a_crash(), browser.session
    async with (
        open_house(server, journal=crashed, keyring=keyring) as house,
        trio.open_nursery() as nursery,
    ):
        again = Browser(house, nursery, session)
        standing = await again.fetch("GET", accept=EVENTS)
        heard = updates([message for _, message in standing.events if message])
        assert heard == ["x:1"], "it may have changed during the crash"
        await server.resource_updated("x:1")
        await server.resource_updated("x:2")
        await wait_all_tasks_blocked()
        assert updates([message for _, message in standing.events if message]) == ["x:1", "x:1"]
        nursery.cancel_scope.cancel()


async def test_a_tool_in_a_thread_can_tell_of_a_change(server: Server) -> None:
    server.resource("x:{id}")(_reader)

    @server.tool
    def change() -> None:
        trio.from_thread.run(server.resource_updated, "x:1")
        server.resource("x:new")(_new)

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.request(1, "resources/subscribe", uri="x:1")
        await talker.call(2, "change")
        await talker.find(lambda message: message.get("method") == CHANGED)
        assert updates(talker.seen) == ["x:1"]


async def _new() -> str:
    return "new"


async def test_clients_hear_that_the_list_has_changed(server: Server) -> None:
    server.resource("x:{id}")(_reader)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        server.resource("x:new")(_new)
        await talker.find(lambda message: message.get("method") == CHANGED)
        content = (await talker.request(1, "resources/read", uri="x:new"))["contents"][0]
        assert content["text"] == "new"
        server.remove_resource("x:{id}")
        await talker.find(lambda message: message.get("method") == CHANGED)
        assert (await talker.request(2, "resources/read", uri="x:7"))["code"] == NOT_FOUND


async def test_a_server_that_does_not_run_has_no_clients_to_tell(server: Server) -> None:
    server.resource("x:{id}")(_reader)
    await server.resource_updated("x:1")
    async with open_house(server):
        pass
    await server.resource_updated("x:1")


async def test_a_file_below_a_folder(server: Server, tmp_path: Path) -> None:
    """Authors will join paths like this: no file outside of the folder can be read."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.txt").write_text("inside")
    (tmp_path / "secret").write_text("secret")

    @server.resource("docs://{+path}")
    def document(path: str) -> str:
        return (tmp_path / "inside" / path).read_text()

    assert (await read(server, "docs://a.txt"))["text"] == "inside"
    for uri in (
        "docs://../secret",
        "docs://%2e%2e/secret",
        "docs://..%2Fsecret",
        f"docs://{tmp_path}/secret",
        f"docs://%2F{tmp_path.name}/secret",
        "docs://a.txt%00",
    ):
        assert (await ask(server, "resources/read", uri=uri))["code"] == NOT_FOUND


async def test_two_clients_of_one_principal_read_at_once(server: Server) -> None:
    server.resource("x:{id}")(_reader)
    async with open_house(server) as house:
        cable = house.cable()
        one, other = await greeted(Talker(cable.near, cable), PLAIN), await house.dial(PLAIN)
        for talker in (one, other):
            for n in range(50):
                await talker.ask(n, "resources/read", uri=f"x:{n}")
        for talker in (one, other):
            for n in range(50):
                if not any(m.get("id") == n for m in talker.seen):
                    await talker.answer(n)
            texts = {m["id"]: m["result"]["contents"][0]["text"] for m in talker.seen}
            assert texts == {n: str(n) for n in range(50)}
