"""JSON Schemas of tools: made from annotations or given by the author, and the checks against them.

A schema made from annotations allows no other arguments (`additionalProperties: false`), so that a
misspelled argument is refused and not ignored. A schema that the author gives is checked when the
tool is made, with every `$ref` in it. Nothing is fetched from the network. Schemas are JSON Schema
2020-12 unless `$schema` names another draft.

The functions here take at most a few milliseconds per MiB. They skip a check that may take longer
(`GivenSchema.is_costly`), and the caller lets a worker process do it.

A value that does not fit raises `ValueError` with one sentence that begins with the place.
"""

import copy
import dataclasses
import enum
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from pathlib import PurePath
from typing import Annotated, Any, Final, Never, NoReturn, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect as types

from streams.messages import uncollected
from streams.server.content import is_block_type, is_result_type
from streams.server.docstrings import annotated
from streams.server.models import (
    REFERENCE,
    ModelArguments,
    ModelResult,
    parts,
    takes_others,
    uses_pydantic,
)
from streams.server.validator import Schema, Validator, shortened

Binder = Callable[[bytes | msgspec.Raw], dict[str, Any]]
OutputCheck = Callable[[bytes, Any], None]  # the output as JSON, and read back from it

# The most work of a check that is done at once, in words of the schema times bytes of the value.
# It takes at most 4 ms, and nothing else in the server runs meanwhile.
INLINE_WORK_MAX: Final = 256 * 1024

_ABSENT: Final = object()
_UNREAD: Final = msgspec.Raw()  # an absent argument that pydantic would read
_ADVICE: Final = "use a type that JSON has (a dataclass, a model …), or give "
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>.*)`", re.DOTALL)
_PLACE: Final = re.compile(r"(?P<why>.*) - at (?P<key>`key` in )?`\$(?P<path>.*?)`", re.DOTALL)


def for_models(parameters: Sequence[Parameter]) -> ModelArguments | None:
    """The parameters that pydantic reads: those that use it, and those that msgspec cannot express.

    Raises `TypeError` with the name of a parameter whose annotation has no JSON form.
    """
    using = [each for each in parameters if uses_pydantic(each.annotation, each.default)]
    if using and takes_others(using):
        return ModelArguments(parameters)
    others = [each for each in parameters if each not in using]
    unknown = {each.name: why for each in others if (why := _unreadable(each.annotation))}
    chosen = [each for each in parameters if each in using or each.name in unknown]
    if not chosen:
        return None
    try:
        return ModelArguments(chosen)
    except ImportError as error:
        name = chosen[0].name
        why = unknown.get(name, "its annotation is for pydantic")
        raise TypeError(f"{name}: {why}; {_ADVICE}input_schema, or install pydantic 2") from error
    except TypeError as error:
        for name, why in unknown.items():
            if str(error).startswith(f"{name}: "):
                raise TypeError(f"{name}: {why}; {_ADVICE}input_schema") from error
        raise


def _unreadable(annotation: Any) -> str:
    """The reason why msgspec cannot read an annotation; empty if it can."""
    try:
        _components([annotation])
        msgspec.json.Decoder(annotation)
    except (TypeError, ValueError, NameError) as error:
        return str(error).splitlines()[-1]
    return ""


def parameters_schema(
    parameters: Sequence[Parameter],
    models: ModelArguments | None,
    described: Mapping[str, str] | None = None,
) -> Schema:
    """The input schema of these parameters. `models` has those that pydantic reads.

    `described` has the descriptions in the docstring. One in the annotation wins.

    A default is listed if it is JSON of the parameter's own type (not for `rows: int = None`).
    Raises `TypeError` for two arguments of one name.
    """
    modelled = models.names if models else {}
    own = [parameter for parameter in parameters if parameter.name not in modelled]
    found, definitions = _components([parameter.annotation for parameter in own])
    own_properties = {
        parameter.name: schema | _advertised_default(parameter)
        for parameter, schema in zip(own, found, strict=True)
    }
    required = {parameter.name for parameter in own if is_required(parameter)}
    properties: Schema = {}
    others: Schema = {}
    if models:
        required |= set(models.required)
        others, definitions = _merged(
            {"properties": models.properties}, models.definitions, definitions
        )
    for parameter in parameters:
        name = modelled.get(parameter.name, parameter.name)
        if name in properties:
            raise TypeError(f"{parameter.name}: another argument has the name {name} already")
        is_own = parameter.name not in modelled
        properties[name] = own_properties[name] if is_own else others["properties"][name]
        text = annotated(parameter.annotation) or (described or {}).get(parameter.name)
        if text and "description" not in properties[name]:
            properties[name]["description"] = text
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = [name for name in properties if name in required]
    schema["additionalProperties"] = False
    return schema | ({"$defs": definitions} if definitions else {})


def _merged(schema: Schema, definitions: Schema, others: Schema) -> tuple[Schema, Schema]:
    """The schema and all definitions. Those of the schema get new names where others have them."""
    renamed = {
        REFERENCE + name: f"{REFERENCE}{name}_2"
        for name in definitions
        if name in others and others[name] != definitions[name]
    }

    def moved(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: moved(inner) for name, inner in node.items()}
        if isinstance(node, list):
            return list(map(moved, node))
        return renamed.get(node, node) if isinstance(node, str) else node

    kept = {
        renamed.get(REFERENCE + name, name).removeprefix(REFERENCE): moved(node)
        for name, node in definitions.items()
    }
    return moved(schema), others | kept


def is_required(parameter: Parameter) -> bool:
    """Whether a call must have this argument."""
    return parameter.default is Parameter.empty


class Output(msgspec.Struct, frozen=True):
    """The promise of a tool's results, made by its return annotation or by a given schema."""

    schema: Schema
    check: OutputCheck
    given: "GivenSchema | None" = None  # of a check that a worker does where it is costly
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
    if uses_pydantic(annotation):
        return _output_by_model(annotation, bare, what)
    if why := _unreadable(annotation):
        if isinstance(bare, type) and issubclass(bare, PurePath):
            return None
        if _is_plain_class(bare):
            return _output_by_attributes(bare, what)
        try:
            return _output_by_model(annotation, bare, what)
        except (ImportError, TypeError) as error:
            more = ", or install pydantic 2" if isinstance(error, ImportError) else ""
            raise TypeError(f"{what}: {why}; {_ADVICE}output_schema{more}") from error
    (found,), definitions = _components([annotation])
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


# The official SDK has no output schema for these, since they do not say enough.
_UNSTRUCTURED: Final = (
    *(Parameter.empty, Any, object, NoReturn, Never),
    *(dict, list, tuple, set, frozenset),
)


def _is_wrapped_class(kind: type) -> bool:
    """Whether a class that is no object in JSON has an output schema.

    The SDK has one for the first of these alone. An enum is as good as a `Literal`.
    """
    return kind in {str, int, float, bool, bytes, type(None)} or issubclass(kind, enum.Enum)


def _output_by_model(annotation: Any, bare: Any, what: str) -> Output | None:
    try:
        made = ModelResult(annotation)
    except TypeError as error:
        raise TypeError(f"{what}: {error}; {_ADVICE}output_schema") from error
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
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        (name, hint, getattr(kind, name)) if hasattr(kind, name) else (name, hint)
        for name, hint in hints.items()
        if not name.startswith("_")
    ]
    shape = msgspec.defstruct(kind.__name__, fields, kw_only=True)
    output = annotated_output(shape, what)
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
    checked = GivenSchema(_without_patterns(schema), what)

    def check(encoded: bytes, value: Any) -> None:
        if not checked.is_costly(len(encoded)):
            checked.check(value, "result")

    return check


def _without_patterns(node: Any) -> Any:
    if isinstance(node, list):
        return list(map(_without_patterns, node))
    if not isinstance(node, dict):
        return node
    return {
        name: _without_patterns(inner)
        for name, inner in node.items()
        if not (name == "pattern" and isinstance(inner, str))
    }


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


def _components(annotations: Sequence[Any]) -> tuple[tuple[Schema, ...], Schema]:
    found, definitions = msgspec.json.schema_components(
        annotations, ref_template=REFERENCE + "{name}"
    )
    # Through JSON, since msgspec lists a default as it is, which may be a set or a tuple.
    plain = msgspec.json.decode(msgspec.json.encode((found, definitions)))
    return tuple(plain[0]), plain[1]


def _advertised_default(parameter: Parameter) -> Schema:
    if is_required(parameter):
        return {}
    try:
        encoded = msgspec.json.encode(parameter.default)
        msgspec.json.decode(encoded, type=parameter.annotation)
        return {"default": msgspec.json.decode(encoded)}
    except (TypeError, ValueError, RecursionError):
        return {}  # None for an int, or a sentinel object: a client cannot send it


def annotation_binder(
    parameters: Sequence[Parameter],
    models: ModelArguments | None,
    schema: "GivenSchema | None",
) -> Binder:
    """Returns a function that decodes arguments into the types of these parameters.

    It checks them against `schema` first. A costly check is left to the caller. Absent arguments
    get their defaults, and a default that is a list, dict or set is copied for each call.
    """
    # The fields have names of their own, so that a parameter may have any name, even `self`.
    modelled = models.names if models else {}
    accepted = models.accepted if models else []
    own = [parameter for parameter in parameters if parameter.name not in modelled]
    names = [*(parameter.name for parameter in own), *accepted]
    shape = msgspec.defstruct(
        "Arguments",
        [_field(f"p{index}", parameter) for index, parameter in enumerate(own)]
        + [(f"p{index}", msgspec.Raw, _UNREAD) for index in range(len(own), len(names))],
        rename={f"p{index}": name for index, name in enumerate(names)},
        forbid_unknown_fields=True,
        kw_only=True,
    )
    decoder = msgspec.json.Decoder(shape)
    own_names = names[: len(own)]
    has_defaults = not all(map(is_required, own))
    incomplete = [each.name for each in own if _has_defaulted_dataclass(each.annotation)]

    def bind(raw: bytes | msgspec.Raw) -> dict[str, Any]:
        given = bytes(raw)
        if schema is not None and not schema.is_costly(len(given)):
            schema.check(_decoded(given, msgspec.json.decode, "arguments"), "arguments")
        values = msgspec.structs.astuple(_decoded(given, decoder.decode, "arguments"))
        bound = dict(zip(own_names, values, strict=False))
        for name in incomplete:
            _complete(bound[name])
        if has_defaults:
            for parameter in own:
                if bound[parameter.name] is _ABSENT:
                    bound[parameter.name] = _fresh(parameter.default)
        if models is not None:
            sent = zip(accepted, map(bytes, values[len(own) :]), strict=True)
            bound |= models.values({name: text for name, text in sent if text})
        return bound

    return bind


def _has_defaulted_dataclass(annotation: Any) -> bool:
    return any(
        isinstance(part, type)
        and dataclasses.is_dataclass(part)
        and any(each.default is not dataclasses.MISSING for each in dataclasses.fields(part))
        for part, _ in parts(annotation)
    )


def _complete(value: Any) -> None:
    """Give each dataclass in a decoded value its default values as attributes of its own.

    msgspec leaves them to the class, and would not find them when it encodes the value again.
    """
    if isinstance(value, list | tuple | set | frozenset):
        inner: Iterable[Any] = value
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, msgspec.Struct):
        inner = msgspec.structs.astuple(value)
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        inner = [getattr(value, name) for name in names]
        for name, own in zip(names, inner, strict=True):
            object.__setattr__(value, name, own)
    else:
        return
    for each in inner:
        _complete(each)


def _field(name: str, parameter: Parameter) -> Any:
    if is_required(parameter):
        return (name, parameter.annotation)
    return (name, parameter.annotation, msgspec.field(default_factory=lambda: _ABSENT))


def _fresh(default: Any) -> Any:
    is_container = isinstance(default, list | dict | set | bytearray)
    return copy.deepcopy(default) if is_container else default


def given_binder(
    schema: "GivenSchema", parameters: Sequence[Parameter], *, more_allowed: bool, taken: str | None
) -> Binder:
    """Returns a function that decodes arguments as plain JSON and checks them against `schema`.

    A costly check is left to the caller. With `more_allowed` the function has `**kwargs`. `taken`
    is the name of the parameter for the call, which no argument may have.
    """
    known = {parameter.name: parameter for parameter in parameters}
    decoder = msgspec.json.Decoder(dict[str, Any])

    def bind(raw: bytes | msgspec.Raw) -> dict[str, Any]:
        given = bytes(raw)
        values: dict[str, Any] = _decoded(given, decoder.decode, "arguments")
        _require_names(values, known, more_allowed=more_allowed, taken=taken)
        if not schema.is_costly(len(given)):
            schema.check(values, "arguments")
        defaults = {
            name: _fresh(parameter.default)
            for name, parameter in known.items()
            if name not in values
        }
        return values | defaults

    return bind


def _require_names(
    given: Collection[str],
    known: Mapping[str, Parameter],
    *,
    more_allowed: bool,
    taken: str | None,
) -> None:
    for name in given:
        if name == taken or (name not in known and not more_allowed):
            raise ValueError(shortened(f"{name}: unknown argument"))
    for name, parameter in known.items():
        if name not in given and is_required(parameter):
            raise ValueError(f"{name}: missing")


def annotation_check(annotation: Any, schema: "GivenSchema | None") -> OutputCheck:
    """Returns a function that checks output against `schema`, then against the annotation."""
    decoder = msgspec.json.Decoder(annotation)

    def check(encoded: bytes, value: Any) -> None:
        if schema is not None and not schema.is_costly(len(encoded)):
            schema.check(value, "result")
        _decoded(encoded, decoder.decode, "result")

    return check


def given_check(schema: "GivenSchema") -> OutputCheck:
    """Returns a function that checks output against `schema`, unless that is costly."""

    def check(encoded: bytes, value: Any) -> None:
        if not schema.is_costly(len(encoded)):
            schema.check(value, "result")

    return check


class GivenSchema:
    """A JSON Schema that values are checked against. `schema` is a copy of the one given."""

    def __init__(self, schema: Mapping[str, Any], what: str) -> None:
        """Raises `ValueError`, beginning with `what`, unless `schema` describes an object."""
        try:
            self.encoded = msgspec.json.encode(dict(schema))
            self.schema: Schema = msgspec.json.decode(self.encoded)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{what}: not JSON: {error}") from error
        if self.schema.get("type") != "object":
            raise ValueError(f'{what}: MCP requires "type": "object" at the root')
        try:
            self._validator = Validator(self.schema)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error

    def is_costly(self, value_bytes: int) -> bool:
        """Whether the check of a value of this size takes so long that a worker has to do it."""
        return self._validator.work(value_bytes) > INLINE_WORK_MAX

    def check(self, value: Any, whole: str) -> None:
        """Check a value. Raises `ValueError` with the mismatch; `whole` is the value's name."""
        if not self._validator.fits(value):
            raise ValueError(self._validator.mismatch(value, whole))


def patterned(schema: Schema, what: str) -> GivenSchema | None:
    """A schema from annotations as a `GivenSchema` if it has patterns; None without patterns.

    Values are checked against it before msgspec converts them. msgspec matches patterns by `re`,
    which backtracks and may take exponential time.

    Raises `ValueError`, beginning with `what`, for a pattern that needs backtracking.
    """
    return GivenSchema(schema, what) if _has_pattern(schema) else None


def patterned_arguments(
    parameters: Sequence[Parameter], models: ModelArguments | None, what: str
) -> GivenSchema | None:
    """`patterned` for the arguments that msgspec reads. pydantic matches in linear time itself."""
    modelled = models.names if models else {}
    schema = parameters_schema([each for each in parameters if each.name not in modelled], None)
    schema["properties"] |= {name: {} for name in (models.accepted if models else ())}
    return patterned(schema, what)


def _has_pattern(node: Any) -> bool:
    if isinstance(node, dict):
        return isinstance(node.get("pattern"), str) or any(map(_has_pattern, node.values()))
    return isinstance(node, list) and any(map(_has_pattern, node))


def _decoded(encoded: bytes, decode: Callable[[bytes], Any], whole: str) -> Any:
    try:
        with uncollected(len(encoded)):
            return decode(encoded)
    except (ValueError, RecursionError) as error:
        raise ValueError(explain(error, whole)) from None


def explain(error: Exception, whole: str) -> str:
    """msgspec's error as a sentence that begins with the place: `rows: expected int, got str`."""
    if isinstance(error, RecursionError):
        return f"{whole}: nested too deeply"
    if not isinstance(error, msgspec.ValidationError):
        return shortened(f"{whole}: not JSON: {error}")
    place = _PLACE.fullmatch(str(error))
    why, path = (place["why"], place["path"].lstrip(".")) if place else (str(error), "")
    for pattern, verdict in (
        (_UNKNOWN, f"unknown {whole.removesuffix('s')}"),
        (_MISSING, "missing"),
    ):
        if found := pattern.fullmatch(why):
            return shortened(f"{path}.{found['field']}: {verdict}".lstrip("."))
    if place and place["key"]:
        path += " (a key)"
    return shortened(f"{path or whole}: {_plain_words(why)}")


def _plain_words(why: str) -> str:
    unquoted = re.sub(r"`([^`]*)`", r"\1", why)
    # Only the first words of msgspec's own sentences. An author's sentence may begin with a name.
    return re.sub(r"^(Expected|Invalid|Object|Missing)\b", lambda word: word[0].lower(), unquoted)
