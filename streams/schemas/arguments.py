"""Arguments that arrive as text: the values of a URI template, the arguments of a prompt.

Each is a string on the wire. It becomes JSON as the schema of its parameter says, and is then
checked as the arguments of a tool are: `7` for an `int` is the number 7, and for a `str` the text
"7". A list or an object is JSON text. Text that fits no type stays text, so that the check
names it.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from streams.messages import as_builtin
from streams.schemas import docstrings
from streams.schemas.inputs import (
    GivenSchema,
    annotation_binder,
    for_models,
    is_required,
    parameters_schema,
    patterned_arguments,
)
from streams.schemas.models import REFERENCE, as_plain, is_model
from streams.schemas.signatures import Signature, innermost, is_async
from streams.schemas.validator import Schema, shortened

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
_NUMBER: Final = re.compile(
    r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(e[+-]?[0-9]{1,4})?", re.I
)
_WORDS: Final[dict[str, dict[str, bytes]]] = {
    "boolean": {"true": b"true", "1": b"true", "false": b"false", "0": b"false"},
    "null": {"null": b"null", "none": b"null", "": b"null"},
}
# JSON inside of a text has no part in the limit on the objects of one message.
JSON_LETTERS_MAX: Final = 256 * 1024
_DEPTH_MAX: Final = 8  # of references and unions that are looked into for the types of an argument

Values = Mapping[str, str | list[str]]


class Callee(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A function whose arguments are text, and how they are checked."""

    name: str
    description: str | None  # the docstring
    function: Callable[..., Any]
    is_async: bool
    takes_call: bool
    binder: Callable[[bytes | msgspec.Raw], dict[str, Any]]
    input_given: GivenSchema | None
    input_schema: Schema
    required: frozenset[str]

    def encoded(self, values: Values) -> bytes:
        """The values as the JSON of an object, for `bind`. Raises `ValueError` for another name."""
        properties = self.input_schema["properties"]
        unknown = next((name for name in values if name not in properties), None)
        if unknown is not None:  # before any work on what may be a hundred thousand names
            raise ValueError(shortened(f"{unknown}: unknown argument"))
        return msgspec.json.encode(
            {name: self._json(value, properties[name]) for name, value in values.items()}
        )

    def bind(self, arguments_raw: bytes | msgspec.Raw) -> dict[str, Any]:
        """See `Tool.bind`."""
        return self.binder(arguments_raw)

    def choices(self, name: str) -> list[str]:
        """The values that an argument can have, where its type lists them."""
        found: list[str] = []
        for kind in self._kinds(self.input_schema["properties"].get(name, {})):
            listed = [kind["const"]] if "const" in kind else kind.get("enum", ())
            if kind.get("type") == "boolean" and not listed:
                listed = (True, False)
            found += [_text(each) for each in listed if each is not None]
        return list(dict.fromkeys(found))

    def _json(self, value: str | list[str], schema: Schema) -> Any:
        kinds = self._kinds(schema)
        types = {each for kind in kinds for each in _types_of(kind)}
        if isinstance(value, list):
            if "array" in types:
                items: Schema = next((kind["items"] for kind in kinds if "items" in kind), {})
                return [self._json(each, items) for each in value]
            value = "/".join(value)
        for kind in kinds:
            for each in [kind["const"]] if "const" in kind else kind.get("enum", ()):
                if _text(each) == value:
                    return each
        return value if "string" in types or not types else _converted(value, types)

    def _kinds(self, schema: Schema, depth: int = 0) -> list[Schema]:
        """The alternatives of a schema, behind references and unions."""
        if depth > _DEPTH_MAX or not isinstance(schema, dict):
            return []
        if reference := schema.get("$ref"):
            name = str(reference).removeprefix(REFERENCE)
            return self._kinds(self.input_schema.get("$defs", {}).get(name, {}), depth + 1)
        inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
        if not inner:
            return [schema]
        return [kind for each in inner for kind in self._kinds(each, depth + 1)]


def make_callee(function: Callable[..., Any], name: str, what: str) -> Callee:
    """Inspect a function once. Raises `TypeError` or `ValueError`, beginning with `what`."""
    core = innermost(function)
    if inspect.isgeneratorfunction(core) or inspect.isasyncgenfunction(core):
        raise TypeError(f"{what}: a function that yields has no value: return it")
    accepted = Signature.of(function, what)
    if accepted.variadic is not None:
        raise TypeError(f"{what}: **{accepted.variadic}: give each argument a name")
    docstring, described = docstrings.split(inspect.getdoc(core) or "", accepted.names)
    try:
        models = for_models(accepted.parameters)
        schema = parameters_schema(accepted.parameters, models, described)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    checked = patterned_arguments(accepted.parameters, models, f"{what}: parameters")
    return Callee(
        name=name,
        description=docstring or None,
        function=function,
        is_async=is_async(function),
        takes_call=accepted.call_name is not None,
        binder=annotation_binder(accepted.parameters, models, checked),
        input_given=checked,
        input_schema=schema,
        required=frozenset(each.name for each in accepted.parameters if is_required(each)),
    )


def name_of(function: Callable[..., Any], what: str) -> str:
    """The function's name. Raises `ValueError` where it has none to show."""
    name = str(getattr(innermost(function), "__name__", ""))
    if not name or name == "<lambda>":
        raise ValueError(f"{what}: the function has no name: give name=…")
    return name


def json_text(value: Any) -> str:
    """A value as JSON. Raises `TypeError` for one that has no such form."""
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def _plain(value: Any) -> Any:
    if is_model(value):
        return as_plain(value)
    return as_builtin(value)


def _types_of(schema: Schema) -> list[str]:
    found = schema.get("type", [])
    return [found] if isinstance(found, str) else list(found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _converted(text: str, types: set[str]) -> Any:
    if types & {"integer", "number"} and _INTEGER.fullmatch(text):
        return msgspec.Raw(str(int(text)).encode())
    if "number" in types and _NUMBER.fullmatch(text):
        return float(text)
    for each in types & _WORDS.keys():
        if (found := _WORDS[each].get(text.lower())) is not None:
            return msgspec.Raw(found)
    if types & {"array", "object"} and text[:1] in {"[", "{"}:
        if len(text) > JSON_LETTERS_MAX:
            raise ValueError(f"JSON of {len(text)} characters: send at most {JSON_LETTERS_MAX}")
        try:
            return msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return text  # the check says that it is no list and no object
    return text
