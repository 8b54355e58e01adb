"""Schemas and behaviour of tools, compared with those of the official Python SDK."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.tools.base import Tool as SDKTool
from pydantic import PydanticUserError

from streams.server.tools import Tool, make_tool, to_result
from tests.rigs import ROOT
from tests.sdk.signatures import CASES, Case, table
from tests.wire.process import CLI

Json = dict[str, Any]
REFUSED = object()

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.signature)


def normal(schema: Any, root: Any = None, seen: tuple[str, ...] = ()) -> Any:
    """A schema without what is only another way to say the same.

    Titles, the names of definitions, and `additionalProperties: false`, which our schemas have.
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [normal(each, root, seen) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        if name in seen:
            return {"again": True}
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return normal(root["$defs"][name] | rest, root, (*seen, name))
    made = {
        key: normal(value, root, seen)
        for key, value in schema.items()
        if key not in {"title", "$defs", "discriminator", "default", "properties", "required"}
    }
    made |= {key: schema[key] for key in ("default",) if key in schema}
    if "properties" in schema:
        made["properties"] = {
            name: normal(node, root, seen) for name, node in schema["properties"].items()
        }
    if schema.get("required"):
        made["required"] = sorted(schema["required"])
    for key, empty in (("additionalProperties", (False,)), ("items", (False, {}))):
        if made.get(key, 0) in empty and key in made:
            del made[key]
    if "const" in made:
        made["enum"] = [made.pop("const")]
    if "enum" in made:
        made.pop("type", None)
        made["enum"].sort(key=json.dumps)
    for either in ("anyOf", "oneOf"):
        if either in made:
            made["anyOf"] = sorted(made.pop(either), key=partial(json.dumps, sort_keys=True))
    return made


def ours_called(tool: Tool, arguments: Json) -> Any:
    try:
        bound = tool.bind(msgspec.json.encode(arguments))
    except ValueError:
        return REFUSED
    return to_result(tool.function(**bound), tool)


async def sdk_called(case: Case, arguments: Json) -> Any:
    server = MCPServer("sdk")
    server.add_tool(case.function())
    try:
        result: Any = await server.call_tool("tool", arguments)
    except Exception:
        return REFUSED
    return result.model_dump(mode="json", by_alias=True, exclude_none=True)


def value_of(result: Any) -> Any:
    """The part of a result that a program reads: its structured content, or its blocks."""
    if result is REFUSED:
        return REFUSED
    if result.get("isError"):
        return result["content"], result.get("structuredContent"), True
    if "structuredContent" in result:
        return result["structuredContent"]
    return [_block(block) for block in result["content"]]


def _block(block: Json) -> Any:
    if block["type"] != "text":
        return block
    try:
        return json.loads(block["text"])
    except ValueError:
        return block["text"]


@every_case
async def test_it_is_as_in_the_official_sdk(case: Case) -> None:
    if "refused" in case.differs:
        SDKTool.from_function(case.function())
        with pytest.raises(TypeError, match=r"^tool tool: "):
            make_tool(case.function())
        return
    ours = make_tool(case.function())
    if "accepted" in case.differs:
        with pytest.raises(PydanticUserError):
            SDKTool.from_function(case.function())
        assert ours_called(ours, case.good) is not REFUSED
        assert ours_called(ours, case.bad or {}) is REFUSED
        return
    theirs = SDKTool.from_function(case.function())
    jsonschema.Draft202012Validator.check_schema(ours.input_schema)
    good = ours_called(ours, case.good)
    assert good is not REFUSED
    if ours.output_schema is not None:
        jsonschema.Draft202012Validator.check_schema(ours.output_schema)
        jsonschema.validate(good["structuredContent"], ours.output_schema)
    same = {
        "input": normal(ours.input_schema) == normal(theirs.parameters),
        "output": normal(ours.output_schema) == normal(theirs.output_schema),
        "good": value_of(good) == value_of(await sdk_called(case, case.good)),
        "description": (ours.description or "") == theirs.description,
    }
    if case.bad is not None:
        assert ours_called(ours, case.bad) is REFUSED
        same["bad"] = await sdk_called(case, case.bad) is REFUSED
    assert {aspect for aspect, is_same in same.items() if not is_same} == set(case.differs), (
        normal(ours.input_schema),
        normal(theirs.parameters),
        normal(ours.output_schema),
        normal(theirs.output_schema),
        good,
        await sdk_called(case, case.good),
    )


def test_the_official_client_reads_every_schema_and_result() -> None:
    """It checks structured content against the output schema."""
    serve = [*CLI, "serve", f"{Path(__file__).parent / 'signatures_server.py'}:server", "--stdio"]
    environment = {"PYTHONPATH": str(ROOT)}
    spawned = StdioServerParameters(command=serve[0], args=serve[1:], env=environment)

    async def main() -> None:
        async with asyncio.timeout(100), Client(spawned) as client:
            listed = (await client.list_tools()).tools
            assert len(listed) == sum("refused" not in case.differs for case in CASES)
            for tool in listed:
                case = CASES[int(tool.name.removeprefix("tool-"))]
                result = await client.call_tool(tool.name, case.good)
                assert result.structured_content is not None or tool.output_schema is None
                if case.bad is not None:
                    refused = await client.call_tool(tool.name, case.bad)
                    assert refused.is_error
                    assert refused.content[0].text.startswith(f"Bad arguments for {tool.name}: ")

    asyncio.run(main())


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "inside" / "signatures.md").read_text()
    assert page.endswith(f"\n\n{table()}\n"), "python -m tests.sdk.signatures prints it"
