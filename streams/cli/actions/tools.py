"""The action of `tools`: what a server offers, and how to call it.

All of it is the server's text, so nothing of it may control the terminal, or be run as it stands:
the example line is quoted for a shell.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import trio

from streams.cli.actions.output import as_json_text, harmless, one_line, print_table, say
from streams.cli.base import DONE, USAGE, complain, nearest
from streams.client.client import Client
from streams.client.results import Tool
from streams.errors import ClientError

HINT_S: Final = 2.0  # for the list of tools, after a call has failed
DEPTH_MAX: Final = 4  # of a schema, as it is shown
CHOICES_MAX: Final = 8  # of an enum, as it is shown

_EXAMPLES: Final = {
    "date-time": "2026-01-31T12:00:00Z",
    "date": "2026-01-31",
    "email": "ada@example.com",
    "uri": "https://example.com",
}


class Argument(msgspec.Struct, frozen=True):
    """One argument of a tool, in words."""

    name: str
    type: str
    required: str
    default: str
    description: str


async def list_tools(client: Client, name: str | None, *, call_line: str, as_json: bool) -> int:
    """`mcp-streams tools`. `call_line` is what an example begins with, up to the URL."""
    tools = await client.tools()
    if name is None:
        _print_all(tools, as_json=as_json)
        return DONE
    tool = next((each for each in tools if each.name == name), None)
    if tool is None:
        return complain(_unknown(name, tools), USAGE)
    if as_json:
        print(as_json_text(_as_listed(tool)))
    else:
        _print_one(tool, call_line)
    return DONE


def _print_all(tools: Sequence[Tool], *, as_json: bool) -> None:
    if as_json:
        print(as_json_text([_as_listed(each) for each in tools]))
    elif not tools:
        say("The server has no tools.")
    else:
        rows = [
            [_shown(each.name), _signature(each), _shown(each.description or each.title)]
            for each in tools
        ]
        print_table(
            ("tool", "arguments", "description"), rows, wrapped=("arguments", "description")
        )


def _print_one(tool: Tool, call_line: str) -> None:
    about = f"{tool.name}: {tool.title}" if tool.title else tool.name
    print(_shown(about))
    if tool.description:
        print(harmless(tool.description.strip()))
    print()
    if arguments := arguments_of(tool):
        rows = [[_shown(cell) for cell in msgspec.structs.astuple(each)] for each in arguments]
        print_table(Argument.__struct_fields__, rows, wrapped=("type", "default", "description"))
    else:
        print("no arguments")
    print(f"\n{call_line} {example(tool)}".rstrip())


def _as_listed(tool: Tool) -> dict[str, Any]:
    """The tool as the server lists it, without fields that it did not send."""
    fields = msgspec.to_builtins(tool)
    return {key: value for key, value in fields.items() if value or key == "inputSchema"}


def _shown(text: str) -> str:
    return harmless(one_line(text))


def _signature(tool: Tool) -> str:
    """The arguments in one line: optional ones in brackets."""
    named = [
        f"{each.name}: {each.type}" if each.required else f"[{each.name}: {each.type}]"
        for each in arguments_of(tool)
    ]
    return _shown(", ".join(named))


def arguments_of(tool: Tool) -> list[Argument]:
    """The arguments of a tool, as its schema describes them."""
    required = _required(tool)
    return [
        Argument(
            name,
            type_in_words(schema, tool.input_schema),
            "yes" if name in required else "",
            as_json_text(schema["default"]) if "default" in schema else "",
            str(schema.get("description") or schema.get("title") or ""),
        )
        for name, schema in _properties(tool).items()
    ]


def _properties(tool: Tool) -> dict[str, Mapping[str, Any]]:
    found = tool.input_schema.get("properties")
    if not isinstance(found, dict):
        return {}
    return {name: _resolved(schema, tool.input_schema) for name, schema in found.items()}


def _required(tool: Tool) -> Sequence[str]:
    found = tool.input_schema.get("required")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema in place of a reference to it."""
    for _ in range(DEPTH_MAX):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name, {}) if isinstance(found, dict) else {}
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**found, **rest} if isinstance(found, dict) else rest
    return schema if isinstance(schema, dict) else {}


def type_in_words(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """The type that a JSON Schema allows, such as `array of integer` or `red | blue`."""
    schema = _resolved(schema, root)
    if depth >= DEPTH_MAX:
        return "…"
    if "const" in schema:
        return _literal(schema["const"])
    if isinstance(choices := schema.get("enum"), list):
        more = ["…"] if len(choices) > CHOICES_MAX else []
        return " | ".join([*map(_literal, choices[:CHOICES_MAX]), *more])
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            return _either(type_in_words(each, root, depth + 1) for each in options)
    kind = schema.get("type")
    if isinstance(kind, list):
        return _either(map(str, kind))
    if kind == "array" and "items" in schema:
        inner = type_in_words(schema["items"], root, depth + 1)
        return f"array of {f'({inner})' if ' | ' in inner else inner}"
    return str(kind) if kind else "anything"


def _either(types: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(types))


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else as_json_text(value)


# An example


def example(tool: Tool) -> str:
    """The words of a call with all required arguments, for a shell."""
    properties = _properties(tool)
    words = [tool.name]
    for name in _required(tool):
        value = _example(properties.get(name, {}), tool.input_schema)
        words.append(
            f"{name}={value}" if isinstance(value, str) else f"{name}:={as_json_text(value)}"
        )
    return harmless(shlex.join(words))


def _example(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """A value of the type that the schema describes, in simple cases a valid one."""
    schema = _resolved(schema, root)
    if "default" in schema:
        return schema["default"]
    for key in ("examples", "enum"):
        if isinstance(given := schema.get(key), list) and given:
            return given[0]
    if "const" in schema:
        return schema["const"]
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options and depth < DEPTH_MAX:
            return _example(options[0], root, depth + 1)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "integer" | "number":
            return _example_number(schema)
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            count = schema.get("minItems", 1)
            inner = schema.get("items", {})
            is_few = isinstance(count, int) and 0 <= count <= CHOICES_MAX and depth < DEPTH_MAX
            return [_example(inner, root, depth + 1)] * count if is_few else []
        case "object":
            return _example_object(schema, root, depth)
        case _:
            return _example_text(schema)


def _example_number(schema: Mapping[str, Any]) -> Any:
    for key, step in (("minimum", 0), ("exclusiveMinimum", 1), ("maximum", 0)):
        bound = schema.get(key)
        if isinstance(bound, int | float) and not (key == "maximum" and bound >= 1):
            return bound + step
    return 1


def _example_object(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    properties, required = schema.get("properties"), schema.get("required")
    if not (isinstance(properties, dict) and isinstance(required, list)) or depth >= DEPTH_MAX:
        return {}
    return {
        name: _example(properties.get(name, {}), root, depth + 1)
        for name in required
        if isinstance(name, str)
    }


def _example_text(schema: Mapping[str, Any]) -> str:
    text = _EXAMPLES.get(str(schema.get("format")), "text")
    least = schema.get("minLength", 0)
    return text.ljust(least, "x") if isinstance(least, int) and least <= 100 else text


# After a call has failed


async def hint_for(client: Client, tool: str, given: Mapping[str, Any]) -> str | None:
    """The sentence on what a failed call probably meant; None if its words fit the tool."""
    with trio.move_on_after(HINT_S):
        try:
            tools = await client.tools()
        except ClientError:
            return None  # the call's own error is what counts
        named = next((each for each in tools if each.name == tool), None)
        if named is None:
            return _unknown(tool, tools)
        return _about_arguments(named, given)
    return None


def _unknown(name: str, tools: Sequence[Tool]) -> str:
    return f"No tool is called {name}{nearest(name, [each.name for each in tools])}"


def _about_arguments(tool: Tool, given: Mapping[str, Any]) -> str | None:
    properties = _properties(tool)
    if tool.input_schema.get("additionalProperties") in (None, False):
        for name in given.keys() - properties.keys():
            return f"{tool.name} has no argument {name}{nearest(name, properties)}"
    if missing := [name for name in _required(tool) if name not in given]:
        return f"{tool.name} needs {', '.join(missing)}, for example: {example(tool)}"
    for name, value in given.items():
        kinds = type_in_words(properties.get(name, {}), tool.input_schema).split(" | ")
        is_text = "string" in kinds or "anything" in kinds or value in kinds
        if isinstance(value, str) and not is_text:
            if properties[name].keys() & {"enum", "const"}:
                return f"{name} is {' or '.join(kinds)}."
            return f"{name} is not text but {' or '.join(kinds)}, so write {name}:=JSON."
    return None
