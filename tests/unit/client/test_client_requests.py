"""A client's requests besides calls: listings, resources, prompts, any method."""

import base64
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from streams import CallFailed, CallLost, Client, ClientError
from streams.errors import refusal
from tests.rigs.clients import Params, connected, counting
from tests.rigs.scripted import Scripted

OFFERED = {"tools": {}, "resources": {"subscribe": True}, "prompts": {}, "completions": {}}
UPDATED = "notifications/resources/updated"


def offering(**results: Any) -> Scripted:
    """A server that answers these methods; `_` stands for a slash."""
    server = counting()
    server.capabilities = OFFERED
    server.results = {method.replace("_", "/"): result for method, result in results.items()}
    return server


async def test_a_request_that_is_refused_for_now_is_given_up_after_the_patience(
    autojump_clock: MockClock,
) -> None:
    server = counting()
    refused = server._asked

    def busy(connection: Any, message: Any, method: str, params: Any) -> None:
        if method == "tools/list":
            raise refusal("unavailable", retryAfter=1.0)
        refused(connection, message, method, params)

    server._asked = busy  # type: ignore[method-assign]
    async with connected(server, patience_s=30) as client:
        with pytest.raises(CallFailed, match="try again later"):
            await client.tools()
    assert 29 < trio.current_time() < 32


async def test_tools_have_all_that_the_server_says_of_them() -> None:
    server = counting()
    said = {
        "name": "sum",
        "title": "Sum",
        "description": "Adds.",
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object", "title": "S"},
        "annotations": {"readOnlyHint": True},
        "_meta": {"a": 1},
        "icons": [{"src": "data:"}],
    }
    server._page = lambda _: {"tools": [said, {"name": "bare", "description": None}]}  # type: ignore[method-assign]
    async with connected(server) as client:
        tool, bare = await client.tools()
        assert (tool.name, tool.title, tool.description) == ("sum", "Sum", "Adds.")
        assert tool.input_schema == {"type": "object"}
        assert tool.output_schema == {"type": "object", "title": "S"}
        assert tool.annotations == {"readOnlyHint": True}
        assert tool.meta == {"a": 1}
        assert (bare.description, bare.output_schema, bare.meta) == ("", None, {})
        assert await client.list_tools() == [tool, bare]


async def test_listings_are_read_to_their_last_page() -> None:
    pages = [{"resources": [{"uri": f"r://{n}", "name": str(n)}]} for n in range(5)]
    templates = [
        {"resourceTemplates": [{"uriTemplate": "r://{n}", "name": "r"}]},
        {"resourceTemplates": []},
    ]
    prompts = [
        {"prompts": [{"name": "p", "arguments": [{"name": "a", "required": True, "title": None}]}]},
        {"prompts": [{"name": "q", "arguments": None}]},
    ]
    server = offering(
        resources_list=pages, resources_templates_list=templates, prompts_list=prompts
    )
    async with connected(server) as client:
        assert [each.uri for each in await client.resources()] == [f"r://{n}" for n in range(5)]
        assert [each.uri_template for each in await client.resource_templates()] == ["r://{n}"]
        first, second = await client.prompts()
        assert [(each.name, each.required) for each in first.arguments] == [("a", True)]
        assert (second.name, second.arguments) == ("q", [])


async def test_a_listing_that_turns_in_a_circle_ends_in_an_error() -> None:
    server = offering(prompts_list={"prompts": [], "nextCursor": "again"})
    async with connected(server) as client:
        with pytest.raises(ClientError, match="have no end below 10000 pages"):
            await client.prompts()


async def test_a_resource_is_text_or_bytes() -> None:
    blob = base64.b64encode(b"\x00\xff").decode()
    contents = [
        {"uri": "r://1", "mimeType": "text/plain", "text": "one"},
        {"uri": "r://2", "blob": blob, "text": None},
    ]
    async with connected(offering(resources_read={"contents": contents})) as client:
        text, binary = await client.read_resource("r://1")
        assert (text.text, text.blob, text.mime_type) == ("one", None, "text/plain")
        assert (binary.text, binary.blob, binary.mime_type) == (None, b"\x00\xff", "")


async def test_a_prompt_and_a_completion() -> None:
    server = offering(
        prompts_get={
            "description": "d",
            "messages": [{"role": "user", "content": {"type": "text", "text": "hi"}}],
        },
        completion_complete={"completion": {"values": ["python", "pytorch"], "hasMore": True}},
    )
    async with connected(server) as client:
        prompt = await client.prompt("greet", {"who": "you"})
        assert [(each.role, each.text) for each in prompt.messages] == [("user", "hi")]
        found = await client.complete("language", "py", prompt="review", arguments={"a": "b"})
        assert (found.values, found.total, found.has_more) == (["python", "pytorch"], None, True)
        await client.complete("id", "1", resource="r://{id}")
        with pytest.raises(TypeError, match="either prompt= or resource="):
            await client.complete("id", "1")
    assert server.got("prompts/get") == [{"name": "greet", "arguments": {"who": "you"}}]
    assert server.got("completion/complete") == [
        {
            "ref": {"type": "ref/prompt", "name": "review"},
            "argument": {"name": "language", "value": "py"},
            "context": {"arguments": {"a": "b"}},
        },
        {
            "ref": {"type": "ref/resource", "uri": "r://{id}"},
            "argument": {"name": "id", "value": "1"},
        },
    ]


@pytest.mark.parametrize(
    ("ask", "lacking"),
    [
        (lambda client: client.resources(), "resources"),
        (lambda client: client.resource_templates(), "resources"),
        (lambda client: client.read_resource("r://1"), "resources"),
        (lambda client: client.subscribe("r://1"), "resources"),
        (lambda client: client.prompts(), "prompts"),
        (lambda client: client.prompt("p"), "prompts"),
        (lambda client: client.complete("a", "b", prompt="p"), "completions"),
    ],
)
async def test_what_a_server_does_not_offer_is_named(ask: Any, lacking: str) -> None:
    async with connected(counting()) as client:
        with pytest.raises(CallFailed, match=f"does not offer {lacking}, which .* needs") as failed:
            await ask(client)
        assert failed.value.code == -32601


async def test_subscribing_needs_more_than_resources() -> None:
    server = counting()
    server.capabilities = {"resources": {}}
    async with connected(server) as client:
        with pytest.raises(CallFailed, match=r"does not offer resources\.subscribe"):
            await client.subscribe("r://1")


async def test_the_error_of_a_server_that_does_offer_it_is_its_own() -> None:
    async with connected(offering()) as client:
        with pytest.raises(CallFailed, match="There is no prompts/get here"):
            await client.prompt("p")


@pytest.mark.parametrize("result", [{}, {"prompts": {}}, {"prompts": [1]}, {"prompts": [{}]}])
async def test_a_listing_of_another_shape_is_an_error(result: Params) -> None:
    async with connected(offering(prompts_list=result)) as client:
        with pytest.raises(ClientError, match="answer to prompts/list does not fit"):
            await client.prompts()


# Any request


class Answer(msgspec.Struct):
    number: int


async def test_any_request_can_be_sent_and_its_result_typed() -> None:
    async with connected(offering(x_y={"number": 3})) as client:
        assert await client.request("x/y", {"a": 1}) == {"number": 3}
        assert await client.request("x/y", type=Answer) == Answer(3)
        assert await client.request("x/y", type=dict[str, int]) == {"number": 3}
        with pytest.raises(ClientError, match="answer to x/y does not fit"):
            await client.request("x/y", type=list[int])
        with pytest.raises(CallFailed, match="There is no x/z here"):
            await client.request("x/z")
        with pytest.raises(ValueError, match="use call or call_tool"):
            await client.request("tools/call", {"name": "count"})


async def test_a_request_of_a_method_that_is_unknown_is_not_sent_twice(autojump_clock: Any) -> None:
    server = offering()
    server.silent = {"x/y", "prompts/list"}
    async with connected(server) as client, trio.open_nursery() as nursery:

        async def cut(method: str) -> None:
            await server.until(lambda: server.got(method))
            server.cut()

        nursery.start_soon(cut, "x/y")
        with pytest.raises(CallLost, match="x/y may or may not have run"):
            await client.request("x/y")
        assert len(server.got("x/y")) == 1
        server.results["prompts/list"] = {"prompts": []}
        server.results["x/z"] = {}
        server.silent = {"prompts/list", "x/z"}
        for method in server.silent:

            async def answer_the_second(method: str = method) -> None:
                await server.until(lambda: server.got(method))
                server.silent = set()
                server.cut()

            server.silent = {method}
            nursery.start_soon(answer_the_second)
            await client.request(method, repeat=method == "x/z")
            assert len(server.got(method)) == 2


# Subscriptions


async def test_a_subscription_outlives_its_connection(autojump_clock: Any) -> None:
    server = offering(resources_subscribe={}, resources_unsubscribe={})
    heard: list[str] = []
    async with connected(server) as client:
        client.on_notification(UPDATED, lambda params: heard.append(params["uri"]))
        await client.subscribe("r://1")
        await client.subscribe("r://2")
        server.notify(UPDATED, {"uri": "r://1"})
        await client.ping()
        assert heard == ["r://1"]
        await client.unsubscribe("r://2")
        server.cut()
        await server.until(lambda: len(server.got("resources/subscribe")) == 3)
        await client.ping()
        assert server.got("resources/subscribe")[-1] == {"uri": "r://1"}
        assert heard == ["r://1", "r://1"], "an update may have been missed"


async def test_a_client_that_is_not_open_says_so() -> None:
    client = Client(counting().memory.connect)
    with pytest.raises(RuntimeError, match="not open"):
        await client.tools()
    server = counting()
    async with server.serving():
        async with Client(server.memory.connect) as client:
            pass
        with pytest.raises(RuntimeError, match="not open"):
            await client.tools()
        with pytest.raises(RuntimeError, match="not open"):
            async with client.call("count"):
                pass
        with pytest.raises(RuntimeError, match="entered once"):
            await client.__aenter__()
