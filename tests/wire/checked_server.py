"""Tools whose schemas are costly to check, for `test_costly_checks`."""

from typing import Annotated, Any

import msgspec

from streams import Server

server = Server("costly-checks", resume_max_s=600)

_NODE = {"$ref": "#/$defs/node"}
TREE = {
    "type": "object",
    "properties": {"tree": _NODE},
    "$defs": {
        "node": {
            "anyOf": [
                {"type": "object", "properties": {"of": _NODE}},
                {"type": "object", "properties": {"of": _NODE, "no": False}},
                {"type": "integer"},
            ]
        }
    },
}
MANY = {
    "type": "object",
    "properties": {"items": {"items": {"enum": [{"a": number} for number in range(10_000)]}}},
}
UNIQUE = {"type": "object", "properties": {"items": {"type": "array", "uniqueItems": True}}}
NUMBERS = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "integer"}}},
}
WORD = {"type": "object", "properties": {"word": {"type": "string", "pattern": "^(a+)+$"}}}


@server.tool(input_schema=TREE)
def tree(tree: Any) -> str:
    return "tree"


@server.tool(input_schema=MANY)
def many(items: list[Any]) -> str:
    return "many"


@server.tool(input_schema=UNIQUE)
def unique(items: list[Any]) -> str:
    return "unique"


@server.tool(input_schema=NUMBERS)
def numbers(items: list[Any]) -> str:
    return "numbers"


@server.tool(input_schema=WORD)
def word(word: str) -> str:
    return "word"


@server.tool
def annotated(word: Annotated[str, msgspec.Meta(pattern="^(a+)+$")]) -> str:
    return "annotated"


@server.tool(output_schema=MANY)
def returned(count: int) -> dict[str, Any]:
    return {"items": [{"a": 9_999}] * count}


@server.tool(output_schema=WORD)
async def echoed(word: str) -> dict[str, Any]:
    return {"word": word}
