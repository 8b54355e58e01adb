"""JSON Schemas of tools: made from annotations, or given by the author; and how a mismatch reads.

A schema that is made lists every parameter and nothing else (`additionalProperties: false`): what a
caller misspells is refused, not ignored. A schema that is given is checked when the tool is made,
every `$ref` in it included, and nothing is ever fetched from the network. Schemas are JSON Schema
2020-12 unless `$schema` says otherwise.

Whatever does not fit is a `ValueError` with one sentence that begins with the place.
"""

import copy
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter
from typing import Any, Final

import msgspec
from jsonschema import Draft202012Validator, exceptions, validators
from jsonschema.protocols import Validator
from msgspec import inspect as types
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import SchemaResource, UnknownDialect, specification_with

Schema = dict[str, Any]
Binder = Callable[[bytes | msgspec.Raw], dict[str, Any]]
OutputCheck = Callable[[bytes, Any], None]  # the output as JSON, and read back from it

# The place and the reason name what the peer sent, which may be megabytes.
_SENTENCE_MAX: Final = 400
# Enough to find the one that matters; a long array of wrong items has one for each of them.
_MISMATCHES_MAX: Final = 100

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"  # MCP's default
# A schema holds all that it refers to: nothing is looked up elsewhere, least of all fetched.
_NOTHING_ELSE: Final[Registry[Any]] = Registry()

_ABSENT: Final = object()
_REFERENCE: Final = "#/$defs/"
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>.*)`", re.DOTALL)
_PLACE: Final = re.compile(r"(?P<why>.*) - at (?P<key>`key` in )?`\$(?P<path>.*?)`", re.DOTALL)


def parameters_schema(parameters: Sequence[Parameter]) -> Schema:
    """The input schema of these parameters; their annotations carry `msgspec.Meta` over.

    A default is listed where it is JSON of the parameter's own type (not `rows: int = None`).
    Raises `TypeError` naming the parameter whose annotation has no JSON form.
    """
    try:
        found, definitions = _components([parameter.annotation for parameter in parameters])
    except (TypeError, ValueError, NameError) as error:
        raise TypeError(_culprit(parameters, error)) from error
    properties = {
        parameter.name: schema | _advertised_default(parameter)
        for parameter, schema in zip(parameters, found, strict=True)
    }
    schema: Schema = {"type": "object", "properties": properties}
    required = [parameter.name for parameter in parameters if is_required(parameter)]
    if required:
        schema["required"] = required
    schema["additionalProperties"] = False
    return schema | ({"$defs": definitions} if definitions else {})


def is_required(parameter: Parameter) -> bool:
    """Whether a call without this argument is refused."""
    return parameter.default is Parameter.empty


def object_schema(annotation: Any) -> Schema | None:
    """The output schema of a Struct, dataclass or TypedDict; None for every other annotation.

    Raises `TypeError` where a field of such a class has no JSON form.
    """
    try:
        described = types.type_info(annotation)
    except TypeError:
        return None  # not a type at all, or none that msgspec could write; to_result will tell
    while isinstance(described, types.Metadata):
        described = described.type
    if not isinstance(described, types.StructType | types.DataclassType | types.TypedDictType):
        return None
    (found,), definitions = _components([annotation])
    return _with_root_inlined(found, definitions)


def _with_root_inlined(found: Schema, definitions: Schema) -> Schema | None:
    name = found["$ref"].removeprefix(_REFERENCE)
    root: Schema = definitions[name]
    if root["type"] != "object":
        return None  # a Struct with array_like=True
    extra = {key: value for key, value in found.items() if key != "$ref"}
    is_recursive = msgspec.json.encode(found["$ref"]) in msgspec.json.encode(definitions)
    kept = {key: value for key, value in definitions.items() if is_recursive or key != name}
    return root | extra | ({"$defs": kept} if kept else {})


def _components(annotations: Sequence[Any]) -> tuple[tuple[Schema, ...], Schema]:
    found, definitions = msgspec.json.schema_components(
        annotations, ref_template=_REFERENCE + "{name}"
    )
    # Through JSON: a default of msgspec's may be a set or a tuple, which is no JSON yet.
    plain = msgspec.json.decode(msgspec.json.encode((found, definitions)))
    return tuple(plain[0]), plain[1]


def _culprit(parameters: Sequence[Parameter], error: Exception) -> str:
    for parameter in parameters:
        try:
            _components([parameter.annotation])
        except (TypeError, ValueError, NameError) as found:
            why = str(found).splitlines()[-1]
            return f"{parameter.name}: {why}; use a type that JSON has, or give input_schema"
    return str(error)  # each is fine alone, not all together


def _advertised_default(parameter: Parameter) -> Schema:
    if is_required(parameter):
        return {}
    try:
        encoded = msgspec.json.encode(parameter.default)
        msgspec.json.decode(encoded, type=parameter.annotation)
        return {"default": msgspec.json.decode(encoded)}
    except (TypeError, ValueError, RecursionError):
        return {}  # None for an int, or a sentinel object: nothing that a caller could send


def annotation_binder(parameters: Sequence[Parameter]) -> Binder:
    """Decodes arguments into these parameters' types; what is absent gets its default.

    Defaults that are lists, dicts or sets are copied, so that no call changes the next one's.
    """
    # The fields' own names are ours, so that a parameter may be called anything, `self` included.
    shape = msgspec.defstruct(
        "Arguments",
        [_field(f"p{index}", parameter) for index, parameter in enumerate(parameters)],
        rename={f"p{index}": parameter.name for index, parameter in enumerate(parameters)},
        forbid_unknown_fields=True,
        kw_only=True,
    )
    decoder = msgspec.json.Decoder(shape)

    def bind(raw: bytes | msgspec.Raw) -> dict[str, Any]:
        try:
            values = msgspec.structs.astuple(decoder.decode(raw))
        except (ValueError, RecursionError) as error:
            raise ValueError(explain(error, "arguments")) from None
        return {
            parameter.name: _fresh(parameter.default) if value is _ABSENT else value
            for parameter, value in zip(parameters, values, strict=True)
        }

    return bind


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
    """Decodes arguments as plain JSON that fits `schema`, and that the function can take.

    `more_allowed` says that the function has `**kwargs`; `taken` is the name that they cannot have.
    """
    known = {parameter.name: parameter for parameter in parameters}

    def bind(raw: bytes | msgspec.Raw) -> dict[str, Any]:
        try:
            values = msgspec.json.decode(raw, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise ValueError(explain(error, "arguments")) from None
        _require_names(values, known, more_allowed=more_allowed, taken=taken)
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
            raise ValueError(_shortened(f"{name}: unknown argument"))
    for name, parameter in known.items():
        if name not in given and is_required(parameter):
            raise ValueError(f"{name}: missing")


def annotation_check(annotation: Any) -> OutputCheck:
    """Raises `ValueError` for output that does not fit the annotation."""
    decoder = msgspec.json.Decoder(annotation)

    def check(encoded: bytes, _: Any) -> None:
        try:
            decoder.decode(encoded)
        except (ValueError, RecursionError) as error:
            raise ValueError(explain(error, "result")) from None

    return check


def given_check(schema: "GivenSchema") -> OutputCheck:
    """Raises `ValueError` for output that does not fit the schema."""
    return lambda _, value: schema.check(value, "result")


class GivenSchema:
    """A schema that an author wrote, checked once: `schema` is a copy that nobody changes."""

    def __init__(self, schema: Mapping[str, Any], what: str) -> None:
        """Raises `ValueError` beginning with `what` unless it is a schema of an object."""
        self.schema = _checked(schema, what)
        validator = validators.validator_for(self.schema, default=Draft202012Validator)
        self._validator: Validator = validator(self.schema, registry=_NOTHING_ELSE)

    def check(self, value: Any, whole: str) -> None:
        """Raises `ValueError` with the mismatch that matters most; `whole` names the value."""
        try:
            errors = itertools.islice(self._validator.iter_errors(value), _MISMATCHES_MAX)
            error = exceptions.best_match(errors)
        except (RecursionError, OverflowError) as too_much:
            raise ValueError(f"{whole}: nested too deeply or a number too large") from too_much
        if error is not None:
            raise ValueError(_explain_mismatch(error, whole))


def _checked(schema: Mapping[str, Any], what: str) -> Schema:
    try:
        plain = msgspec.json.decode(msgspec.json.encode(dict(schema)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: not JSON: {error}") from error
    if plain.get("type") != "object":
        raise ValueError(f'{what}: MCP wants "type": "object" at the root')
    try:
        specification = specification_with(str(plain.get("$schema", _DIALECT)))
        validators.validator_for(plain, default=Draft202012Validator).check_schema(plain)
        resource = specification.create_resource(plain)
        _resolve_all(resource, _NOTHING_ELSE.resolver_with_root(resource))
    except UnknownDialect as error:
        raise ValueError(f"{what}: unknown $schema {error.uri}") from error
    except exceptions.SchemaError as error:
        raise ValueError(f"{what}: not a JSON Schema: {_explain_mismatch(error, '#')}") from error
    except Unresolvable as error:
        raise ValueError(f"{what}: $ref {error.ref} leads nowhere in this schema") from error
    return dict(plain)


def _resolve_all(resource: SchemaResource, resolver: Any) -> None:
    contents = resource.contents
    if isinstance(contents, dict) and "$ref" in contents:
        resolver.lookup(contents["$ref"])
    for inner in resource.subresources():
        _resolve_all(inner, resolver.in_subresource(inner))


def explain(error: Exception, whole: str) -> str:
    """msgspec's error as one sentence, place first: `rows: expected int, got str`."""
    if isinstance(error, RecursionError):
        return f"{whole}: nested too deeply"
    if not isinstance(error, msgspec.ValidationError):
        return _shortened(f"{whole}: not JSON: {error}")
    place = _PLACE.fullmatch(str(error))
    why, path = (place["why"], place["path"].lstrip(".")) if place else (str(error), "")
    for pattern, verdict in (
        (_UNKNOWN, f"unknown {whole.removesuffix('s')}"),
        (_MISSING, "missing"),
    ):
        if found := pattern.fullmatch(why):
            return _shortened(f"{path}.{found['field']}: {verdict}".lstrip("."))
    if place and place["key"]:
        path += " (a key)"
    return _shortened(f"{path or whole}: {_plain_words(why)}")


def _plain_words(why: str) -> str:
    unquoted = re.sub(r"`([^`]*)`", r"\1", why)
    # Only msgspec's own sentences: an author's may begin with a name.
    return re.sub(r"^(Expected|Invalid|Object|Missing)\b", lambda word: word[0].lower(), unquoted)


def _explain_mismatch(error: exceptions._Error, whole: str) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path]
    path = "".join(steps).lstrip(".")
    required, value = error.validator_value, error.instance
    if error.validator == "required" and isinstance(required, list) and isinstance(value, dict):
        missing = next(name for name in required if name not in value)
        return _shortened(f"{path}.{missing}: missing".lstrip("."))
    return _shortened(f"{path or whole}: {error.message}")


def _shortened(sentence: str) -> str:
    return sentence if len(sentence) <= _SENTENCE_MAX else sentence[: _SENTENCE_MAX - 1] + "…"
