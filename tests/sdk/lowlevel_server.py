"""A server made with the official SDK's low-level API: pages of tools, roots, errors with data.

`python lowlevel_server.py` serves it over stdio.
"""

import warnings
from typing import Any, Final

import anyio
from mcp import MCPError, types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

# Roots are "deprecated as of 2026-07-28"; hosts have them.
warnings.filterwarnings("ignore", message=".*deprecated as of 2026-07-28.*")

OWN_ERROR: Final = -31999  # a code of the application

_ANY: Final = {"type": "object"}
_TOOLS: Final = {
    "greet": types.Tool(
        name="greet",
        input_schema={
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
        output_schema={
            "type": "object",
            "properties": {"greeting": {"type": "string"}},
            "required": ["greeting"],
        },
    ),
    "fail": types.Tool(name="fail", input_schema=_ANY),
    "roots": types.Tool(name="roots", input_schema=_ANY),
    "change": types.Tool(name="change", input_schema=_ANY),
    "slow": types.Tool(name="slow", input_schema=_ANY),
}


async def list_tools(_: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    """Pages of two."""
    names = list(_TOOLS)
    start = int(params.cursor) if params and params.cursor else 0
    rest = str(start + 2) if start + 2 < len(names) else None
    page = [_TOOLS[name] for name in names[start : start + 2]]
    return types.ListToolsResult(tools=page, next_cursor=rest)


async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    """Do one of the tools."""
    match params.name:
        case "greet":
            greeting = f"Hello, {(params.arguments or {})['name']}"
            return types.CallToolResult(
                content=[types.TextContent(type="text", text=greeting)],
                structured_content={"greeting": greeting},
                _meta={"example.com/trace": "1"},
            )
        case "fail":
            raise MCPError(OWN_ERROR, "no such luck", {"luck": 0})
        case "roots":
            roots = (await ctx.session.list_roots()).roots
            return _text(", ".join(str(root.uri) for root in roots))
        case "change":
            await ctx.session.send_tool_list_changed()
            await ctx.session.send_resource_updated("note://1")
            return _text("changed")
        case "slow":
            for step in range(1_000):
                await ctx.session.report_progress(step, 1_000)
                await anyio.sleep(0.02)
    raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name}")


def _text(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)])


async def list_resources(_: Any, params: Any) -> types.ListResourcesResult:
    """One note."""
    return types.ListResourcesResult(resources=[types.Resource(uri="note://1", name="note")])


async def read_resource(_: Any, params: Any) -> types.ReadResourceResult:
    """Any note."""
    contents = types.TextResourceContents(uri=params.uri, text=f"the note {params.uri}")
    return types.ReadResourceResult(contents=[contents])


server = Server(
    "lowlevel",
    version="1.0",
    instructions="Say hello.",
    on_list_tools=list_tools,
    on_call_tool=call_tool,
    on_list_resources=list_resources,
    on_read_resource=read_resource,
)


async def main() -> None:
    """Serve."""
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
