"""Forms: the types that `call.elicit` asks for, as the flat schemas that MCP demands.

"Form mode elicitation schemas are limited to flat objects with primitive properties only": strings,
numbers, booleans, enums of strings, and lists of such enums. A type is a dataclass, a msgspec
Struct, a TypedDict or a pydantic model.

msgspec matches patterns by `re`, which backtracks: one short answer could hold up the server for
hours. So an answer is matched in linear time first, as the arguments of a tool are.
"""

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, get_type_hints

import msgspec

from streams.errors import InvalidAnswer
from streams.schemas.annotations import is_field
from streams.schemas.models import REFERENCE, ModelReader
from streams.schemas.validator import Schema, Validator

_FORMATS: Final = frozenset(["email", "uri", "date", "date-time"])
_HEADLINE: Final = ("title", "description", "default")
_KEPT: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("minLength", "maxLength", "format", "enum", "enumNames", "oneOf", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": (),
    "array": ("minItems", "maxItems", "items"),
}
_KEPT_OF: Final = {**_KEPT, "integer": _KEPT["number"]}

# The most work to match one field, in units of `Validator.work`: 60 ms, for 8 KiB or more.
_MATCH_WORK_MAX: Final = 4 * 1024 * 1024


class Form(msgspec.Struct, frozen=True):
    """A type as a form: its schema, and how an answer becomes a value of the type."""

    schema: Schema
    read: Callable[[bytes], Any]


@lru_cache(maxsize=256)
def form_of(kind: Any) -> Form:
    """The form of a type. Raises `TypeError`, which names the field, for one that is not flat."""
    name = getattr(kind, "__name__", str(kind))
    try:
        if (reader := model_reader(kind, "answer")) is not None:
            whole: Schema = reader.schema
            read: Callable[[bytes], Any] = reader.read
        else:
            whole, read = msgspec.json.schema(kind), msgspec.json.Decoder(kind).decode
    except (TypeError, ValueError, NameError, RuntimeError) as error:  # pydantic's is the last
        raise TypeError(f"{name} cannot be a form: {str(error).splitlines()[-1]}") from error
    definitions = whole.get("$defs", {})
    root = _resolved(whole, definitions)
    if root.get("type") != "object":
        raise TypeError(
            f"{name} cannot be a form: expected a dataclass, a Struct, a TypedDict or a model"
        )
    properties = {
        field: _property(schema, definitions, f"{name}.{field}")
        for field, schema in root.get("properties", {}).items()
    }
    schema: Schema = {"type": "object", "properties": properties}
    if required := root.get("required"):
        schema["required"] = list(required)
    matched = {} if reader is not None else _matched(properties, name)
    # Through JSON: a default may be of any type that msgspec encodes.
    return Form(msgspec.json.decode(msgspec.json.encode(schema)), _reading(read, matched, name))


def model_reader(kind: Any, whole: str) -> ModelReader | None:
    """The reader of a type that needs pydantic, `whole` in its errors; None for all others.

    Such a type is a model, a dataclass of pydantic, or a class with a `Field` in its annotations or
    defaults, which msgspec would ignore. Pydantic is not imported here.
    """
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(kind, type):
        return None
    is_theirs = issubclass(kind, pydantic.BaseModel) or hasattr(kind, "__pydantic_validator__")
    return ModelReader(kind, whole) if is_theirs or _has_field(kind) else None


def _has_field(kind: type) -> bool:
    try:
        hints = get_type_hints(kind, include_extras=True)
    except (TypeError, NameError):
        return False  # msgspec says what is wrong
    marks = [mark for hint in hints.values() for mark in getattr(hint, "__metadata__", ())]
    marks += [getattr(kind, name, None) for name in hints]
    return any(map(is_field, marks))


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """The schema without a reference and without `null`, which MCP's forms do not have."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix(REFERENCE)]
        schema = target | {key: value for key, value in schema.items() if key != "$ref"}
    if len(schema.get("allOf", ())) == 1:  # older versions of pydantic
        schema = schema | schema["allOf"][0]
        schema.pop("allOf")
        return _resolved(schema, definitions)
    if "anyOf" in schema:
        others = [each for each in schema["anyOf"] if each.get("type") != "null"]
        if len(others) == 1:
            rest = {key: value for key, value in schema.items() if key != "anyOf"}
            return _resolved(others[0] | rest, definitions)
    return schema


def _property(schema: Schema, definitions: Mapping[str, Schema], field: str) -> Schema:
    schema = _resolved(schema, definitions)
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [each for each in kind if each != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    if "enum" in schema:
        schema = {**schema, "enum": [each for each in schema["enum"] if each is not None]}
        if not all(isinstance(each, str) for each in schema["enum"]):
            raise _not_flat(field, "an enum of a form has only strings")
        kind = "string"
    if kind not in _KEPT_OF:
        raise _not_flat(field, "a form has only strings, numbers, booleans and enums of strings")
    if kind == "array":
        schema = {**schema, "items": _choice(schema.get("items", {}), definitions, field)}
    found = {"type": kind} | {
        key: schema[key] for key in (*_HEADLINE, *_KEPT_OF[kind]) if key in schema
    }
    if found.get("default", "") is None:
        del found["default"]
    if found.get("format", "email") not in _FORMATS:
        del found["format"]  # a client may refuse one that MCP does not know
    return found


def _choice(items: Schema, definitions: Mapping[str, Schema], field: str) -> Schema:
    """The schema of the items of a list, each of which the user may choose."""
    resolved = _resolved(items, definitions)
    if "anyOf" in resolved:
        return {"anyOf": resolved["anyOf"]}
    chosen = _property(resolved, definitions, field) if "enum" in resolved else {}
    if "enum" not in chosen:
        raise _not_flat(field, "a list of a form has only items of an enum of strings")
    return {"type": "string", "enum": chosen["enum"]}


def _not_flat(field: str, why: str) -> TypeError:
    return TypeError(f"{field} cannot be in a form: {why}")


def _matched(properties: Mapping[str, Schema], name: str) -> dict[str, Validator]:
    """The fields with patterns. Raises `TypeError` for a pattern that needs backtracking."""
    patterns = {field: each["pattern"] for field, each in properties.items() if "pattern" in each}
    try:
        return {field: Validator({"pattern": each}) for field, each in patterns.items()}
    except ValueError as error:
        raise TypeError(f"{name} cannot be a form: {error}") from error


def _reading(
    read: Callable[[bytes], Any], matched: Mapping[str, Validator], name: str
) -> Callable[[bytes], Any]:
    def read_answer(content: bytes) -> Any:
        try:
            if matched:
                _match(content, matched)
            return read(content)
        except (ValueError, RecursionError) as error:
            raise InvalidAnswer(f"The client's answer is no {name}: {error}") from error

    return read_answer


def _match(content: bytes, matched: Mapping[str, Validator]) -> None:
    """Raise `ValueError` for a field that does not match its pattern."""
    answer = msgspec.json.decode(content)
    if not isinstance(answer, dict):
        return
    for field, validator in matched.items():
        text = answer.get(field)
        if isinstance(text, str) and validator.work(len(text.encode())) > _MATCH_WORK_MAX:
            raise ValueError(f"{field}: {len(text)} characters are too many for its pattern")
        if (why := validator.mismatch(text, field)) is not None:
            raise ValueError(why)
