"""The server for the scenarios of the official conformance suite, as its text describes it."""

import base64
import json
from typing import Any, Final

import trio

from streams import Audio, Call, EmbeddedResource, Image, Server, UserMessage

PIXEL: Final = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
SILENCE: Final = b"RIFF$\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00" + (
    b"@\x1f\x00\x00\x80>\x00\x00\x02\x00\x10\x00data\x00\x00\x00\x00"
)
MOMENT_S: Final = 0.05

Json = dict[str, Any]

server = Server("conformance", version="1.0", resume_min_s=0.5)


@server.tool
async def test_simple_text() -> str:
    """Return text."""
    return "This is a simple text response for testing."


@server.tool
async def test_image_content() -> Image:
    """Return an image of one pixel."""
    return Image(data=PIXEL, mime_type="image/png")


@server.tool
async def test_audio_content() -> Audio:
    """Return a sound of no length."""
    return Audio(data=SILENCE, mime_type="audio/wav")


@server.tool
async def test_embedded_resource() -> EmbeddedResource:
    """Return a resource with its text."""
    text = "This is an embedded resource content."
    return EmbeddedResource.of("test://embedded-resource", text=text, mime_type="text/plain")


@server.tool
async def test_multiple_content_types() -> list[Any]:
    """Return text, an image and a resource."""
    data = json.dumps({"test": "data", "value": 123})
    return [
        "Multiple content types test:",
        Image(data=PIXEL, mime_type="image/png"),
        EmbeddedResource.of(
            "test://mixed-content-resource", text=data, mime_type="application/json"
        ),
    ]


@server.tool
async def test_tool_with_logging(call: Call) -> str:
    """Log messages."""
    await call.log("info", "Tool execution started")
    await trio.sleep(MOMENT_S)
    await call.log("info", "Tool processing data")
    await trio.sleep(MOMENT_S)
    await call.log("info", "Tool execution completed")
    return "Tool with logging executed successfully"


@server.tool
async def test_tool_with_progress(call: Call) -> str:
    """Report progress."""
    await call.progress(0, total=100)
    await trio.sleep(MOMENT_S)
    await call.progress(50, total=100)
    await trio.sleep(MOMENT_S)
    await call.progress(100, total=100)
    return "Tool with progress executed successfully"


@server.tool
async def test_error_handling() -> str:
    """Fail."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@server.tool
async def test_reconnection(call: Call) -> str:
    """Release the client in the middle of the call."""
    await call.disconnect()
    await trio.sleep(2 * MOMENT_S)
    return "Reconnection test completed"


@server.tool
async def test_sampling(call: Call, prompt: str) -> str:
    """Ask the client's model."""
    said = {"role": "user", "content": {"type": "text", "text": prompt}}
    params = {"messages": [said], "maxTokens": 100}
    answer = await call.request("sampling/createMessage", params)
    return f"LLM response: {answer['content']['text']}"


@server.tool
async def test_elicitation(call: Call, message: str) -> str:
    """Ask the user for a name."""
    username = {"type": "string", "description": "User's response"}
    email = {"type": "string", "description": "User's email address"}
    properties = {"username": username, "email": email}
    return f"User response: {await _ask(call, message, properties)}"


@server.tool
async def test_elicitation_sep1034_defaults(call: Call) -> str:
    """Ask the user, with a default for everything."""
    properties = {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {
            "type": "string",
            "enum": ["active", "inactive", "pending"],
            "default": "active",
        },
        "verified": {"type": "boolean", "default": True},
    }
    answer = await _ask(call, "Please review your information", properties, required=())
    return f"Elicitation completed: {answer}"


@server.tool
async def test_elicitation_sep1330_enums(call: Call) -> str:
    """Ask the user to choose, in every form that the revision has."""
    options = ["option1", "option2", "option3"]
    titled = [
        {"const": "value1", "title": "First Option"},
        {"const": "value2", "title": "Second Option"},
        {"const": "value3", "title": "Third Option"},
    ]
    properties = {
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
    answer = await _ask(call, "Please choose", properties, required=())
    return f"Elicitation completed: {answer}"


async def _ask(
    call: Call, message: str, properties: Json, *, required: tuple[str, ...] | None = None
) -> str:
    schema: Json = {"type": "object", "properties": properties}
    schema["required"] = list(properties if required is None else required)
    params = {"message": message, "requestedSchema": schema}
    answer = await call.request("elicitation/create", params)
    return f"action={answer['action']}, content={json.dumps(answer.get('content'))}"


@server.tool(
    description="Tool with JSON Schema 2020-12 features",
    input_schema={
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
    },
)
async def json_schema_2020_12_tool(name: str = "", address: Json | None = None) -> str:
    return f"{name} lives in {(address or {}).get('city', 'nowhere')}"


@server.resource("test://static-text", mime_type="text/plain")
async def static_text() -> str:
    """A text."""
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
async def static_binary() -> bytes:
    """An image of one pixel."""
    return PIXEL


@server.resource("test://template/{id}/data", mime_type="application/json")
async def template_data(id: str) -> Json:
    """The data of an id."""
    return {"id": id, "templateTest": True, "data": f"Data for ID: {id}"}


@server.resource("test://watched-resource", mime_type="text/plain")
async def watched_resource() -> str:
    """A text that could change."""
    return "Watched resource content"


@server.prompt
async def test_simple_prompt() -> str:
    """A prompt without arguments."""
    return "This is a simple prompt for testing."


@server.prompt
async def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """A prompt with two arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.completion("test_prompt_with_arguments", "arg1")
async def complete_arg1(value: str) -> list[str]:
    return [each for each in ("paris", "park", "party") if each.startswith(value)]


@server.prompt
async def test_prompt_with_embedded_resource(resourceUri: str) -> list[Any]:  # noqa: N803
    """A prompt with a resource in it."""
    text = "Embedded resource content for testing."
    return [
        EmbeddedResource.of(resourceUri, text=text, mime_type="text/plain"),
        "Please process the embedded resource above.",
    ]


@server.prompt
async def test_prompt_with_image() -> list[UserMessage]:
    """A prompt with an image in it."""
    return [
        UserMessage(Image(data=PIXEL, mime_type="image/png")),
        UserMessage("Please analyze the image above."),
    ]
