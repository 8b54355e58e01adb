"""Prompts and completions end to end."""

import enum
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import pytest
import trio

from streams import (
    AssistantMessage,
    Audio,
    Call,
    Completion,
    EmbeddedResource,
    Icon,
    Image,
    ResourceLink,
    Server,
    Text,
    UserMessage,
)
from streams.server.features import VALUES_MAX
from tests.rigs import ROOT
from tests.rigs.doc_pages import blocks
from tests.rigs.server import PLAIN, Json, Talker, open_house, said
from tests.rigs.toolkit import Markup, Mean

CHANGED = "notifications/prompts/list_changed"


@pytest.fixture
def server() -> Server:
    return Server("tested")


async def ask(server: Server, method: str, **params: Any) -> Json:
    """The answer to one request: its result, or its error."""
    async with open_house(server) as house:
        return await (await house.dial(PLAIN)).request(1, method, **params)


async def get(server: Server, name: str, **arguments: str) -> Json:
    return await ask(server, "prompts/get", name=name, arguments=arguments)


# Messages


def text(said: str, role: str = "user") -> Json:
    return {"role": role, "content": {"type": "text", "text": said}}


class _Point(msgspec.Struct):
    x: int


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ("hello", [text("hello")]),
        ("", [text("")]),
        (Markup("<b>"), [text("<b>")]),
        ([Mean(0.5)], [text("0.5")]),
        (Text("hello"), [text("hello")]),
        (UserMessage("hello"), [text("hello")]),
        (AssistantMessage("hello"), [text("hello", "assistant")]),
        (UserMessage(Text("hello")), [text("hello")]),
        ({"role": "assistant", "content": "hello"}, [text("hello", "assistant")]),
        (text("hello", "assistant"), [text("hello", "assistant")]),
        (["a", AssistantMessage("b"), Text("c")], [text("a"), text("b", "assistant"), text("c")]),
        (("a", "b"), [text("a"), text("b")]),
        ([], []),
        (
            Image(data=b"\x00", mime_type="image/png"),
            [
                {
                    "role": "user",
                    "content": {"type": "image", "data": "AA==", "mimeType": "image/png"},
                }
            ],
        ),
        (
            AssistantMessage(Audio(data=b"\x00", mime_type="audio/wav")),
            [
                {
                    "role": "assistant",
                    "content": {"type": "audio", "data": "AA==", "mimeType": "audio/wav"},
                }
            ],
        ),
        (
            EmbeddedResource.of("x:1", text="a", mime_type="text/plain"),
            [
                {
                    "role": "user",
                    "content": {
                        "type": "resource",
                        "resource": {"uri": "x:1", "text": "a", "mimeType": "text/plain"},
                    },
                }
            ],
        ),
        (
            ResourceLink("x:1", "one"),
            [
                {
                    "role": "user",
                    "content": {"type": "resource_link", "uri": "x:1", "name": "one"},
                }
            ],
        ),
        ({"x": 1}, [text('{"x":1}')]),
        (_Point(1), [text('{"x":1}')]),
        ([1, _Point(2)], [text("1"), text('{"x":2}')]),
        (None, [text("null")]),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_value_becomes_messages(
    server: Server, value: Any, messages: list[Json], is_async: bool
) -> None:
    async def in_task() -> Any:
        return value

    def in_thread() -> Any:
        return value

    server.prompt(name="it")(in_task if is_async else in_thread)
    assert (await get(server, "it"))["messages"] == messages


@pytest.mark.parametrize(
    "value",
    [{"role": "system", "content": "no"}, UserMessage("a", role="system"), object(), "\udcff"],  # type: ignore[arg-type]
)
async def test_a_value_that_is_no_message_is_an_error(server: Server, value: Any) -> None:
    @server.prompt
    async def odd() -> Any:
        return value

    error = await get(server, "odd")
    assert error["code"] == -32603
    assert error["message"].startswith("The prompt odd failed: ")


# Arguments


class _Tone(enum.Enum):
    KIND = "kind"
    BRISK = "brisk"


async def test_arguments_are_described_checked_and_converted(server: Server) -> None:
    @server.prompt(title="Review code", icons=[Icon("data:,")], meta={"k": 1})
    async def review(
        code: Annotated[str, msgspec.Meta(description="The code.", title="Code")],
        tone: _Tone = _Tone.KIND,
        depth: int = 1,
        files: list[str] | None = None,
    ) -> str:
        """Review some code."""
        return f"{code} {tone} {depth} {files}"

    (listed,) = (await ask(server, "prompts/list"))["prompts"]
    assert listed == {
        "name": "review",
        "title": "Review code",
        "description": "Review some code.",
        "arguments": [
            {"name": "code", "title": "Code", "description": "The code.", "required": True},
            {"name": "tone", "required": False},
            {"name": "depth", "required": False},
            {"name": "files", "required": False},
        ],
        "icons": [{"src": "data:,"}],
        "_meta": {"k": 1},
    }
    result = await get(server, "review", code="x = 1", tone="brisk", depth="3", files='["a"]')
    assert result == {
        "description": "Review some code.",
        "messages": [text("x = 1 _Tone.BRISK 3 ['a']")],
    }
    assert (await get(server, "review", code="1"))["messages"] == [text("1 _Tone.KIND 1 None")]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"name": "review"}, "code: missing"),
        ({"name": "review", "arguments": None}, "code: missing"),
        ({"name": "review", "arguments": {"code": "a", "more": "b"}}, "more: unknown argument"),
        (
            {"name": "review", "arguments": dict.fromkeys(map(str, range(100_000)), "")},
            "0: unknown argument",
        ),
        ({"name": "review", "arguments": {"code": "a", "depth": "deep"}}, "depth: expected int"),
        ({"name": "review", "arguments": {"code": 7}}, "Bad params"),
        ({"name": "review", "arguments": ["a"]}, "Bad params"),
        ({"name": "review", "arguments": {"code": "a", "files": "[" * 9_999}}, "files: "),
        ({"name": "review", "arguments": {"code": "a", "files": "[]" * 200_000}}, "send at most"),
        ({"name": "other"}, "Unknown prompt 'other'"),
        ({"name": "x" * 10_000}, "Unknown prompt"),
        ({"name": 7}, "Bad params"),
        ({}, "Bad params"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused(
    server: Server, params: Json, why: str
) -> None:
    @server.prompt
    async def review(code: str, depth: int = 1, files: list[Any] | None = None) -> str:
        raise AssertionError("it is not run")

    error = await ask(server, "prompts/get", **params)
    assert error["code"] == -32602
    assert why in error["message"]
    assert len(error["message"]) < 300


async def test_a_prompt_without_parameters_has_no_arguments(server: Server) -> None:
    @server.prompt(description="Say it.")
    def hello() -> str:
        return "hello"

    (listed,) = (await ask(server, "prompts/list"))["prompts"]
    assert listed == {"name": "hello", "description": "Say it.", "arguments": []}
    result = await ask(server, "prompts/get", name="hello")
    assert result == {"description": "Say it.", "messages": [text("hello")]}


async def test_a_prompt_may_use_its_call(server: Server) -> None:
    @server.prompt
    async def it(call: Call, name: str) -> str:
        await call.log("info", f"for {name}")
        return name

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.request(1, "prompts/get", name="it", arguments={"name": "Bo"})
        assert said(talker.seen) == ["for Bo"]


async def test_a_prompt_that_fails_or_hangs_hurts_no_other_request(server: Server) -> None:
    @server.prompt
    def fail() -> str:
        raise RuntimeError("it broke")

    @server.prompt
    async def hang() -> str:
        await trio.sleep_forever()
        raise AssertionError

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.ask(1, "prompts/get", name="hang")
        error = await talker.request(2, "prompts/get", name="fail")
        assert error == {"code": -32603, "message": "The prompt fail failed: it broke"}
        await talker.tell("notifications/cancelled", requestId=1)
        assert await talker.request(3, "ping") == {}
        assert await talker.request(1, "ping") == {}


async def test_prompts_are_listed_in_pages_and_come_and_go() -> None:
    server = Server("tested", page_size=2)
    for n in range(3):
        server.prompt(name=f"p{n}")(lambda: "")
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        page = await talker.request(1, "prompts/list")
        assert [each["name"] for each in page["prompts"]] == ["p0", "p1"]
        server.remove_prompt("p1")
        await talker.find(lambda message: message.get("method") == CHANGED)
        page = await talker.request(1, "prompts/list", cursor=page["nextCursor"])
        assert [each["name"] for each in page["prompts"]] == ["p2"]
        assert "nextCursor" not in page
        server.prompt(name="p1")(lambda: "again")
        await talker.find(lambda message: message.get("method") == CHANGED)
        result = await talker.request(1, "prompts/get", name="p1")
        assert result["messages"] == [text("again")]


async def test_only_a_server_with_prompts_says_so(server: Server) -> None:
    server.prompt(name="it")(lambda: "")
    async with open_house(server) as house:
        cable = house.cable()
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}
        answer = await Talker(cable.near, cable).request(1, "initialize", **hello)
        assert answer["capabilities"]["prompts"] == {"listChanged": True}
        assert not {"resources", "completions"} & answer["capabilities"].keys()


def test_what_cannot_be_a_prompt_is_refused_at_once(server: Server) -> None:
    with pytest.raises(ValueError, match="name="):
        server.prompt(lambda: "")
    with pytest.raises(TypeError, match="unknown settings of a prompt: colour"):
        server.prompt(colour="red")(lambda: "")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="prompt p: x"):
        server.prompt(name="p")(_takes_an_event)
    with pytest.raises(TypeError, match="rest"):
        server.prompt(name="p")(_takes_the_rest)
    server.prompt(name="p")(lambda: "")
    with pytest.raises(ValueError, match="there is a prompt p already"):
        server.prompt(name="p")(lambda: "")


def _takes_an_event(x: trio.Event) -> str:
    return f"{x}"


def _takes_the_rest(**rest: str) -> str:
    return f"{rest}"


def _complete_nothing() -> list[str]:
    return []


# Completion


async def complete(
    server: Server, ref: Json, name: str, value: str = "", context: Json | None = None
) -> Json:
    """The completion of an argument, or the error."""
    known = {} if context is None else {"context": {"arguments": context}}
    argument = {"name": name, "value": value}
    result = await ask(server, "completion/complete", ref=ref, argument=argument, **known)
    found: Json = result.get("completion", result)
    return found


PROMPT = {"type": "ref/prompt", "name": "paint"}
TEMPLATE = {"type": "ref/resource", "uri": "x:{colour}/{kind}"}


@pytest.fixture
def painter(server: Server) -> Server:
    @server.prompt
    async def paint(
        colour: Literal["red", "rose", "blue"], loud: bool = False, what: str = ""
    ) -> str:
        return colour

    @server.resource("x:{colour}/{kind}")
    async def kinds(colour: str, kind: Literal[1, 2] | None) -> str:
        return colour

    return server


async def test_arguments_that_list_their_values_complete_by_themselves(painter: Server) -> None:
    everything = await complete(painter, PROMPT, "colour")
    assert sorted(everything["values"]) == ["blue", "red", "rose"]
    assert (everything["total"], everything["hasMore"]) == (3, False)
    assert sorted((await complete(painter, PROMPT, "colour", "R"))["values"]) == ["red", "rose"]
    assert (await complete(painter, PROMPT, "loud"))["values"] == ["true", "false"]
    assert (await complete(painter, TEMPLATE, "kind"))["values"] == ["1", "2"]
    nothing = {"values": [], "total": 0, "hasMore": False}
    assert await complete(painter, PROMPT, "what") == nothing
    assert await complete(painter, TEMPLATE, "colour") == nothing


async def test_a_function_completes_one_argument(painter: Server) -> None:
    @painter.completion("paint", "what")
    def what(value: str, arguments: dict[str, str]) -> list[str]:
        return [f"{value} in {arguments.get('colour', 'any')}"]

    @painter.completion("x:{colour}/{kind}", "colour")
    async def colour(call: Call, value: str) -> list[str]:
        await call.log("info", "asked")
        return [value, value]

    found = await complete(painter, PROMPT, "what", "a", {"colour": "red"})
    assert found == {"values": ["a in red"], "total": 1, "hasMore": False}
    assert (await complete(painter, PROMPT, "what", "a"))["values"] == ["a in any"]
    assert (await complete(painter, TEMPLATE, "colour", "b"))["values"] == ["b", "b"]
    assert sorted((await complete(painter, PROMPT, "colour"))["values"]) == ["blue", "red", "rose"]


@pytest.mark.parametrize("is_called", [True, False])
async def test_one_function_completes_the_rest(painter: Server, is_called: bool) -> None:
    async def anything(ref: Any, argument: Any, context: Any) -> Completion | None:
        if argument.name != "what":
            return None
        known = context.arguments if context else None
        return Completion(values=[f"{ref.type} {ref.name} {argument.value} {known}"], total=7)

    (painter.completion() if is_called else painter.completion)(anything)
    found = await complete(painter, PROMPT, "what", "a", {"colour": "red"})
    assert found["values"] == ["ref/prompt paint a {'colour': 'red'}"]
    assert (found["total"], found["hasMore"]) == (7, False)
    assert (await complete(painter, PROMPT, "what"))["values"] == ["ref/prompt paint  None"]
    assert (await complete(painter, PROMPT, "loud"))["values"] == ["true", "false"], "after None"


def _many(count: int) -> Iterator[str]:
    return map(str, range(count))


@pytest.mark.parametrize(
    ("value", "count", "total", "has_more"),
    [
        (["a"] * VALUES_MAX, VALUES_MAX, VALUES_MAX, False),
        (["a"] * (VALUES_MAX + 1), VALUES_MAX, VALUES_MAX + 1, True),
        (("a", "b"), 2, 2, False),
        (_many(1_000), VALUES_MAX, None, True),
        (Completion(values=["a"], total=1_000, has_more=True), 1, 1_000, True),
        (Completion(values=["a"] * 200), VALUES_MAX, 200, True),
        ({"values": ["a"], "total": 5, "hasMore": True}, 1, 5, True),
        ([], 0, 0, False),
    ],
)
async def test_at_most_a_hundred_values_are_sent(
    painter: Server, value: Any, count: int, total: int | None, has_more: bool
) -> None:
    @painter.completion("paint", "what")
    async def what(typed: str) -> Any:
        return value

    found = await complete(painter, PROMPT, "what")
    assert (len(found["values"]), found.get("total"), found["hasMore"]) == (count, total, has_more)


@pytest.mark.parametrize("value", ["abc", [1], 7, {"a": 1}, [None]])
async def test_completions_that_are_no_texts_are_an_error(painter: Server, value: Any) -> None:
    @painter.completion("paint", "what")
    async def what(typed: str) -> Any:
        return value

    assert (await complete(painter, PROMPT, "what"))["code"] == -32603


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ({"type": "ref/prompt", "name": "other"}, "colour"),
        ({"type": "ref/prompt"}, "colour"),
        ({"type": "ref/resource", "uri": "x:{other}"}, "colour"),
        ({"type": "ref/tool", "name": "paint"}, "colour"),
        ({"name": "paint"}, "colour"),
        (PROMPT, "other"),
        (TEMPLATE, "what"),
        ({}, ""),
    ],
)
async def test_a_completion_of_something_unknown_is_refused(
    painter: Server, ref: Json, name: str
) -> None:
    assert (await complete(painter, ref, name))["code"] == -32602


async def test_completion_is_declared_where_something_completes(painter: Server) -> None:
    async with open_house(painter) as house:
        cable = house.cable()
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}
        answer = await Talker(cable.near, cable).request(1, "initialize", **hello)
        assert answer["capabilities"]["completions"] == {}


def test_what_cannot_complete_is_refused_at_once(server: Server) -> None:
    with pytest.raises(TypeError, match="is given"):
        server.completion("paint", "what")(_complete_nothing)
    with pytest.raises(TypeError, match="is given"):
        server.completion("paint", "what")(lambda a, b, c: [])
    with pytest.raises(TypeError, match="is given"):
        server.completion(lambda a, b, c, d: [])
    with pytest.raises(TypeError, match="an argument of it"):
        server.completion("paint")
    with pytest.raises(TypeError, match="is given"):
        server.completion("paint", "what")(lambda value, *, more: [])
    server.completion("paint", "what")(lambda value, known=[], *, more=1: [])
    with pytest.raises(ValueError, match="one already"):
        server.completion("paint", "what")(lambda value: [])


async def test_the_page_in_the_documentation_does_as_it_says() -> None:
    (block, *_) = blocks(ROOT / "docs" / "use" / "resources.md", "python")
    names: dict[str, Any] = {"__name__": "library"}
    exec(compile(block.text, "library.py", "exec"), names)
    library: Server = names["server"]
    async with open_house(library) as house:
        talker = await house.dial(PLAIN)
        uri = "library://reports/2"
        error = await talker.request(1, "resources/read", uri=uri)
        assert (error["code"], error["message"]) == (-32002, "There is no report 2.")
        await talker.request(2, "resources/subscribe", uri=uri)
        await talker.ask(3, "tools/call", name="write", arguments={"id": 2, "text": "Draft."})
        await talker.find(lambda message: message.get("method", "").endswith("/updated"))
        content = (await talker.request(4, "resources/read", uri=uri))["contents"][0]
        assert content == {"uri": uri, "text": "Draft.", "mimeType": "text/plain"}
        rules = (await talker.request(5, "resources/read", uri="library://rules"))["contents"][0]
        assert rules["mimeType"] == "text/markdown"
        review = {"name": "review", "arguments": {"id": "2", "tone": "brisk"}}
        said = (await talker.request(6, "prompts/get", **review))["messages"]
        assert said[0] == text("Review this report in a brisk tone: Draft.")
    assert (await complete(library, {"type": "ref/prompt", "name": "review"}, "id"))["total"] == 2


def test_threads_may_change_the_prompts_while_they_are_listed(server: Server) -> None:
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            server.prompt(name="p")(lambda: "")
            server.remove_prompt("p")

    for n in range(50):
        server.prompt(name=f"p{n}")(lambda: "")
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(2_000):
            listed, _ = server.features.prompts.page(None, 100)
            assert len(listed) in {50, 51}
    finally:
        is_over.set()
        thread.join()
