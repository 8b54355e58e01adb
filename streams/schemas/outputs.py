"""Promises of results: output schemas from return annotations, and the checks of results by them.

An object in JSON (a model, a dataclass, a `dict[str, …]`) is promised as it is. Any other value is
the `result` of an object. Like the official SDK, a tool promises nothing for content blocks, `Any`,
a bare `dict` or `list`, and without an annotation.

Times have a format only where all of their values fit it. By RFC 3339 a `date-time` and a `time`
have a zone, and a `duration` has no fraction and no sign. The official client in TypeScript checks
formats, and refuses the whole result for a `datetime.now()`.
"""

import enum
import sys
from collections.abc import Callable
from inspect import Parameter
from pathlib import PurePath
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Never,
    NoReturn,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import inspect as types

from streams.schemas.annotations import uses_pydantic
from streams.schemas.content import is_block_type, is_result_type
from streams.schemas.inputs import (
    ADVICE,
    GivenSchema,
    decoded,
    patterned,
    plain_components,
    unreadable,
)
from streams.schemas.models import REFERENCE, ModelResult
from streams.schemas.validator import Schema

OutputCheck = Callable[[bytes, Any], None]  # the output as JSON, and read back from it


class Output(msgspec.Struct, frozen=True):
    """The promise of a tool's results, made by its return annotation or by a given schema."""

    schema: Schema
    check: OutputCheck
    given: GivenSchema | None = None  # of a check that a worker does where it is costly
    is_wrapped: bool = False  # whether the value is the `result` of the object
    is_text: bool = False  # whether every str fits
    plain: Callable[[Any], Any] | None = None  # makes plain data of a value, by pydantic


def annotated_output(annotation: Any, what: str) -> Output | None:
    """The promise of a return annotation; None where the official SDK has no output schema either.

    An object in JSON is promised as it is; any other value is the `result` of an object. Raises
    `TypeError`, beginning with `what`, for an annotation that has no JSON form.
    """
    bare = annotation
    while get_origin(bare) is Annotated:
        bare = get_args(bare)[0]
    if is_result_type(bare):
        # `Annotated[ToolResult, Report]`, as in the SDK.
        metadata = getattr(annotation, "__metadata__", ())
        promised = [each for each in metadata if isinstance(each, type) or get_origin(each)]
        return annotated_output(promised[0], what) if promised else None
    if bare in _UNSTRUCTURED or is_block_type(bare):
        return None
    why = unreadable(annotation)
    if uses_pydantic(annotation):
        return _output_by_model(annotation, bare, None, what)
    if not why:
        return _output_by_msgspec(annotation, bare, what)
    if isinstance(bare, type) and issubclass(bare, PurePath):
        return None
    if _is_plain_class(bare):
        return _output_by_attributes(bare, what)
    return _output_by_model(annotation, bare, why, what)


# The official SDK has no output schema for these, since they do not say enough.
_UNSTRUCTURED: Final = (
    *(Parameter.empty, Any, object, NoReturn, Never),
    *(dict, list, tuple, set, frozenset),
)


def _output_by_msgspec(annotation: Any, bare: Any, what: str) -> Output | None:
    (found,), definitions = _without(_is_duration, plain_components([annotation]))
    described = types.type_info(annotation)
    while isinstance(described, types.Metadata):
        described = described.type
    is_object = isinstance(
        described, types.StructType | types.DataclassType | types.TypedDictType
    ) or (isinstance(described, types.DictType) and isinstance(described.key_type, types.StrType))
    if is_object and (schema := _with_root_inlined(found, definitions)) is not None:
        checked = patterned(schema, what)
        return Output(schema, annotation_check(annotation, checked), checked)
    if isinstance(bare, type) and not get_args(bare) and not _is_wrapped_class(bare):
        return None
    schema = _wrapped(found, definitions)
    checked = patterned(schema, what)
    shape = msgspec.defstruct("Result", [("result", annotation)])
    check = annotation_check(shape, checked)
    return Output(schema, check, checked, is_wrapped=True, is_text=annotation is str)


def _without(is_unwanted: Callable[[str, Any], bool], node: Any) -> Any:
    """A schema, or several, without some members of its objects."""
    if isinstance(node, list | tuple):
        return [_without(is_unwanted, inner) for inner in node]
    if not isinstance(node, dict):
        return node
    return {
        name: _without(is_unwanted, inner)
        for name, inner in node.items()
        if not is_unwanted(name, inner)
    }


def _is_duration(name: str, value: Any) -> bool:
    return name == "format" and value == "duration"


def _is_pattern(name: str, value: Any) -> bool:
    return name == "pattern" and isinstance(value, str)


def _is_wrapped_class(kind: type) -> bool:
    """Whether a class that is no object in JSON has an output schema.

    The SDK has one for the first of these alone. An enum is as good as a `Literal`.
    """
    return kind in {str, int, float, bool, bytes, bytearray, type(None)} or issubclass(
        kind, enum.Enum
    )


def _output_by_model(annotation: Any, bare: Any, why: str | None, what: str) -> Output | None:
    """The promise that pydantic makes. `why` is the reason why msgspec does not."""
    try:
        made = ModelResult(annotation)
    except ImportError as error:
        why = why or "its annotation is for pydantic"
        raise TypeError(f"{what}: {why}; {ADVICE}output_schema, or install pydantic 2") from error
    except TypeError as error:
        raise TypeError(f"{what}: {why or error}; {ADVICE}output_schema") from error
    definitions = made.schema.get("$defs", {})
    schema = {name: node for name, node in made.schema.items() if name != "$defs"}
    inlined = _with_root_inlined(schema, definitions) if "$ref" in schema else made.schema
    is_class = isinstance(bare, type) and not get_args(bare)
    is_dict = get_origin(bare) is dict and get_args(bare)[0] is str
    if inlined and inlined.get("type") == "object" and (is_class or is_dict):
        return Output(inlined, _model_check(inlined, what), plain=made.plain)
    schema = _wrapped(schema, definitions)
    return Output(schema, _model_check(schema, what), is_wrapped=True, plain=made.plain)


def _output_by_attributes(kind: type, what: str) -> Output | None:
    """The promise of a class that is neither a dataclass nor a model, by its annotated attributes.

    As in the official SDK.
    """
    try:
        fields = [
            (name, hint, getattr(kind, name)) if hasattr(kind, name) else (name, hint)
            for name, hint in get_type_hints(kind, include_extras=True).items()
            if not name.startswith("_") and get_origin(hint) is not ClassVar
        ]
        shape = msgspec.defstruct(kind.__name__, fields, kw_only=True)
        why = unreadable(shape)
    except (TypeError, NameError) as error:
        why = str(error)
    if why:
        raise TypeError(f"{what}: {kind.__name__}: {why}; {ADVICE}output_schema")
    output = _output_by_msgspec(shape, shape, what)
    assert output is not None

    def plain(value: Any) -> Any:
        return msgspec.convert(value, shape, from_attributes=True)

    return msgspec.structs.replace(output, plain=plain)


def _is_plain_class(annotation: Any) -> bool:
    """Whether an annotation is an author's class with annotated attributes."""
    return isinstance(annotation, type) and any(
        "__annotations__" in vars(base) and base.__module__ not in sys.stdlib_module_names
        for base in annotation.__mro__
    )


def _wrapped(schema: Schema, definitions: Schema) -> Schema:
    return {"type": "object", "properties": {"result": schema}, "required": ["result"]} | (
        {"$defs": definitions} if definitions else {}
    )


def _model_check(schema: Schema, what: str) -> OutputCheck:
    """Returns a function that checks output which pydantic has made, unless that is costly.

    Not its patterns: pydantic has checked them, and lists some that need backtracking.
    """
    checked = GivenSchema(_without(_is_pattern, schema), what)

    def check(encoded: bytes, value: Any) -> None:
        if not checked.is_costly(len(encoded)):
            checked.check(value, "result")

    return check


def _with_root_inlined(found: Schema, definitions: Schema) -> Schema | None:
    if "$ref" not in found:
        return found | ({"$defs": definitions} if definitions else {})
    name = found["$ref"].removeprefix(REFERENCE)
    root: Schema = definitions[name]
    if root.get("type") != "object":
        return None  # a Struct with array_like=True
    extra = {key: value for key, value in found.items() if key != "$ref"}
    is_recursive = msgspec.json.encode(found["$ref"]) in msgspec.json.encode(definitions)
    kept = {key: value for key, value in definitions.items() if is_recursive or key != name}
    return root | extra | ({"$defs": kept} if kept else {})


def annotation_check(annotation: Any, schema: GivenSchema | None) -> OutputCheck:
    """Returns a function that checks output against `schema`, then against the annotation."""
    decoder = msgspec.json.Decoder(annotation)

    def check(encoded: bytes, value: Any) -> None:
        if schema is not None and not schema.is_costly(len(encoded)):
            schema.check(value, "result")
        decoded(encoded, decoder.decode, "result")

    return check


def given_check(schema: "GivenSchema") -> OutputCheck:
    """Returns a function that checks output against `schema`, unless that is costly."""

    def check(encoded: bytes, value: Any) -> None:
        if not schema.is_costly(len(encoded)):
            schema.check(value, "result")

    return check
