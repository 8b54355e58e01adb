"""The server for the official conformance suite, as an object of the official SDK.

`python conformance_sdk_server.py` serves it bare over stdio, `… HTTP_PORT` bare over HTTP.
"""

import base64
import json
import sys
import warnings
from typing import Any, Final

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.prompts.base import Message, UserMessage
from mcp.server.streamable_http import (
    EventCallback,
    EventId,
    EventMessage,
    EventStore,
    JSONRPCMessage,
    StreamId,
)
from mcp_types import (
    AudioContent,
    Completion,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    SamplingMessage,
    SetLevelRequestParams,
    SubscribeRequestParams,
    TextContent,
    TextResourceContents,
    UnsubscribeRequestParams,
)

# Roots, sampling and logging are "deprecated as of 2026-07-28"; the suite tests them.
warnings.filterwarnings("ignore", message=".*deprecated as of 2026-07-28.*")

PIXEL: Final = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
SILENCE: Final = base64.b64encode(
    b"RIFF$\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00"
    b"@\x1f\x00\x00\x80>\x00\x00\x02\x00\x10\x00data\x00\x00\x00\x00"
).decode()
MOMENT_S: Final = 0.05

Json = dict[str, Any]

server = MCPServer("conformance", version="1.0")


def _text(text: str) -> TextContent:
    return TextContent(type="text", text=text)


def _resource(uri: str, text: str, mime_type: str = "text/plain") -> EmbeddedResource:
    contents = TextResourceContents(uri=uri, mime_type=mime_type, text=text)
    return EmbeddedResource(type="resource", resource=contents)


def _pixel() -> ImageContent:
    return ImageContent(type="image", data=base64.b64encode(PIXEL).decode(), mime_type="image/png")


@server.tool()
def test_simple_text() -> str:
    """Return text."""
    return "This is a simple text response for testing."


@server.tool()
def test_image_content() -> list[ImageContent]:
    """Return an image of one pixel."""
    return [_pixel()]


@server.tool()
def test_audio_content() -> list[AudioContent]:
    """Return a sound of no length."""
    return [AudioContent(type="audio", data=SILENCE, mime_type="audio/wav")]


@server.tool()
def test_embedded_resource() -> list[EmbeddedResource]:
    """Return a resource with its text."""
    return [_resource("test://embedded-resource", "This is an embedded resource content.")]


@server.tool()
def test_multiple_content_types() -> list[TextContent | ImageContent | EmbeddedResource]:
    """Return text, an image and a resource."""
    data = json.dumps({"test": "data", "value": 123})
    return [
        _text("Multiple content types test:"),
        _pixel(),
        _resource("test://mixed-content-resource", data, "application/json"),
    ]


@server.tool()
async def test_tool_with_logging(ctx: Context) -> str:
    """Log messages."""
    await ctx.info("Tool execution started")
    await anyio.sleep(MOMENT_S)
    await ctx.info("Tool processing data")
    await anyio.sleep(MOMENT_S)
    await ctx.info("Tool execution completed")
    return "Tool with logging executed successfully"


@server.tool()
async def test_tool_with_progress(ctx: Context) -> str:
    """Report progress."""
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100, f"Completed step {done} of 100")
        await anyio.sleep(MOMENT_S)
    return "Tool with progress executed successfully"


@server.tool()
async def test_error_handling() -> str:
    """Fail."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@server.tool()
async def test_reconnection(ctx: Context) -> str:
    """Release the client in the middle of the call, where the transport can do that."""
    await ctx.close_sse_stream()
    await anyio.sleep(2 * MOMENT_S)
    return "Reconnection test completed"


@server.tool()
async def test_sampling(prompt: str, ctx: Context) -> str:
    """Ask the client's model."""
    message = SamplingMessage(role="user", content=_text(prompt))
    answer = await ctx.session.create_message(
        [message], max_tokens=100, related_request_id=ctx.request_id
    )
    return f"LLM response: {getattr(answer.content, 'text', '')}"


@server.tool()
async def test_elicitation(message: str, ctx: Context) -> str:
    """Ask the user for a name."""
    username = {"type": "string", "description": "User's response"}
    email = {"type": "string", "description": "User's email address"}
    properties = {"username": username, "email": email}
    return f"User response: {await _ask(ctx, message, properties, required=list(properties))}"


@server.tool()
async def test_elicitation_sep1034_defaults(ctx: Context) -> str:
    """Ask the user, with a default for everything."""
    statuses = ["active", "inactive", "pending"]
    properties: Json = {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": statuses, "default": "active"},
        "verified": {"type": "boolean", "default": True},
    }
    answer = await _ask(ctx, "Please review your information", properties)
    return f"Elicitation completed: {answer}"


@server.tool()
async def test_elicitation_sep1330_enums(ctx: Context) -> str:
    """Ask the user to choose, in every form that the revision has."""
    options = ["option1", "option2", "option3"]
    titled = [
        {"const": "value1", "title": "First Option"},
        {"const": "value2", "title": "Second Option"},
        {"const": "value3", "title": "Third Option"},
    ]
    properties: Json = {
        "untitledSingle": {"type": "string", "enum": options},
        "titledSingle": {"type": "string", "oneOf": titled},
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
        "titledMulti": {"type": "array", "items": {"anyOf": titled}},
    }
    answer = await _ask(ctx, "Please choose", properties)
    return f"Elicitation completed: {answer}"


async def _ask(
    ctx: Context, message: str, properties: Json, *, required: list[str] | None = None
) -> str:
    schema: Json = {"type": "object", "properties": properties, "required": required or []}
    answer = await ctx.session.elicit_form(message, schema, related_request_id=ctx.request_id)
    return f"action={answer.action}, content={json.dumps(answer.content)}"


@server.tool()
def json_schema_2020_12_tool(name: str = "", address: Json | None = None) -> str:
    """Tool with JSON Schema 2020-12 features."""
    return f"{name} lives in {(address or {}).get('city', 'nowhere')}"


# The SDK takes a schema from the signature alone. The suite wants to see this one in the listing.
_schema_tool = server._tool_manager.get_tool("json_schema_2020_12_tool")
assert _schema_tool is not None
_schema_tool.parameters = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}


@server.resource("test://static-text", mime_type="text/plain")
def static_text() -> str:
    """A text."""
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    """An image of one pixel."""
    return PIXEL


@server.resource("test://template/{id}/data", mime_type="application/json")
def template_data(id: str) -> str:
    """The data of an id."""
    return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


@server.resource("test://watched-resource", mime_type="text/plain")
def watched_resource() -> str:
    """A text that could change."""
    return "Watched resource content"


@server.prompt()
def test_simple_prompt() -> str:
    """A prompt without arguments."""
    return "This is a simple prompt for testing."


@server.prompt()
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """A prompt with two arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.prompt()
def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:  # noqa: N803
    """A prompt with a resource in it."""
    return [
        UserMessage(_resource(resourceUri, "Embedded resource content for testing.")),
        UserMessage("Please process the embedded resource above."),
    ]


@server.prompt()
def test_prompt_with_image() -> list[Message]:
    """A prompt with an image in it."""
    return [UserMessage(_pixel()), UserMessage("Please analyze the image above.")]


@server.completion()
async def complete(ref: Any, argument: Any, context: Any) -> Completion:
    cities = ("paris", "park", "party")
    return Completion(values=[each for each in cities if each.startswith(argument.value)])


async def _done(ctx: Any, params: Any) -> EmptyResult:
    return EmptyResult()


# The high-level class has no decorators for these.
for _method, _params in (
    ("logging/setLevel", SetLevelRequestParams),
    ("resources/subscribe", SubscribeRequestParams),
    ("resources/unsubscribe", UnsubscribeRequestParams),
):
    server._lowlevel_server.add_request_handler(_method, _params, _done)


class Events(EventStore):
    """The events of the bare server over HTTP, in memory."""

    def __init__(self) -> None:
        self._events: list[tuple[StreamId, JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        self._events.append((stream_id, message))
        return str(len(self._events))

    async def replay_events_after(
        self, last_event_id: EventId, send_callback: EventCallback
    ) -> StreamId | None:
        at = int(last_event_id)
        stream = self._events[at - 1][0]
        for number, (each, message) in enumerate(self._events[at:], at + 1):
            if each == stream and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream


if __name__ == "__main__":
    if len(sys.argv) < 2:
        server.run()
    else:
        port = int(sys.argv[1])
        server.run("streamable-http", port=port, event_store=Events(), retry_interval=500)
