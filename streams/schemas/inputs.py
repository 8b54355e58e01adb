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
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any, Final

import msgspec
from msgspec import inspect as types

from streams.messages import uncollected
from streams.schemas.annotations import description, is_field, parts, uses_pydantic
from streams.schemas.models import REFERENCE, ModelArguments, takes_others
from streams.schemas.validator import Schema, Validator, shortened

Binder = Callable[[bytes | msgspec.Raw], dict[str, Any]]

# The most work of a check that is done at once, in words of the schema times bytes of the value.
# It takes at most 4 ms, and nothing else in the server runs meanwhile.
INLINE_WORK_MAX: Final = 256 * 1024

_ABSENT: Final = object()
_UNREAD: Final = msgspec.Raw()  # an absent argument that pydantic would read
ADVICE: Final = "use a type that JSON has (a dataclass, a model …), or give "
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
    unknown = {each.name: why for each in others if (why := unreadable(each.annotation))}
    chosen = [each for each in parameters if each in using or each.name in unknown]
    if not chosen:
        return None
    try:
        return ModelArguments(chosen)
    except ImportError as error:
        name = chosen[0].name
        why = unknown.get(name, "its annotation is for pydantic")
        raise TypeError(f"{name}: {why}; {ADVICE}input_schema, or install pydantic 2") from error
    except TypeError as error:
        for name, why in unknown.items():
            if str(error).startswith(f"{name}: "):
                raise TypeError(f"{name}: {why}; {ADVICE}input_schema") from error
        raise


def unreadable(annotation: Any) -> str:
    """The reason why msgspec cannot read an annotation; empty if it can."""
    try:
        components([annotation])
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
    found, definitions = components([parameter.annotation for parameter in own])
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
        text = description(parameter.annotation) or (described or {}).get(parameter.name)
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
    default = parameter.default
    return default is Parameter.empty or (is_field(default) and bool(default.is_required()))


def plain_components(annotations: Sequence[Any]) -> tuple[list[Schema], Schema]:
    """msgspec's schemas of annotations, and the definitions to which they refer."""
    made = msgspec.json.schema_components(annotations, ref_template=REFERENCE + "{name}")
    # Through JSON, since msgspec lists a default as it is, which may be a set or a tuple.
    schemas, known = _with_open_tuples(msgspec.json.decode(msgspec.json.encode(made)))
    return schemas, known


def _with_open_tuples(node: Any) -> Any:
    """The schema without the `items: false` of tuples, whose length `maxItems` bounds already.

    The official client in TypeScript reads schemas as draft 7. That has no `prefixItems`, and no
    item of a tuple would fit.
    """
    if isinstance(node, list):
        return list(map(_with_open_tuples, node))
    if not isinstance(node, dict):
        return node
    made = {name: _with_open_tuples(inner) for name, inner in node.items()}
    is_bounded = isinstance(made.get("prefixItems"), list) and "maxItems" in made
    if is_bounded and made.get("items") is False:
        del made["items"]
    return made


def components(annotations: Sequence[Any]) -> tuple[tuple[Schema, ...], Schema]:
    """`plain_components` with the format of each time, which helps a model to write it."""
    schemas, known = plain_components(annotations)
    for node, described in zip(schemas, types.multi_type_info(annotations), strict=True):
        _add_formats(node, described, dict(known))
    return tuple(schemas), known


def _add_formats(node: Schema, described: types.Type, unseen: Schema) -> None:
    """Add the format of each time to a schema. msgspec has none where a time needs no zone.

    `unseen` has the definitions of classes that have not come up.
    """
    if isinstance(described, types.DateTimeType | types.TimeType):
        node.setdefault("format", _TIMES[type(described)])
    for part, inner in list(_inside(node, described, unseen)):
        _add_formats(part, inner, unseen)


_TIMES: Final = {types.DateTimeType: "date-time", types.TimeType: "time"}


def _inside(
    node: Schema, described: types.Type, unseen: Schema
) -> Iterator[tuple[Schema, types.Type]]:
    """The parts of a schema, each with its type."""
    if isinstance(described, types.Metadata):
        yield node, described.type
    elif isinstance(described, types.UnionType):
        for each in described.types:
            yield from ((part, each) for part in node["anyOf"] if _may_be(part, each))
    elif isinstance(described, types.DictType):
        yield node.get("additionalProperties", {}), described.value_type
    elif isinstance(described, types.TupleType):
        yield from zip(node.get("prefixItems", ()), described.item_types, strict=False)
    elif hasattr(described, "item_type"):
        yield node.get("items", {}), described.item_type
    elif hasattr(described, "fields"):
        definition = unseen.pop(node.get("$ref", "").removeprefix(REFERENCE), {})
        properties = definition.get("properties", {})
        for field in described.fields:
            if field.encode_name in properties:
                yield properties[field.encode_name], field.type


def _may_be(part: Schema, described: types.Type) -> bool:
    """Whether an alternative of a schema is that of a type. All strings are one alternative."""
    if isinstance(described, types.DateTimeType | types.TimeType):
        return part.get("type") == "string"
    if hasattr(described, "cls"):
        name: str = part.get("$ref", "").removeprefix(REFERENCE).rpartition(".")[2]
        own: str = described.cls.__name__
        return name == own or name.startswith(f"{own}_")  # `Box_int_` is a `Box[int]`
    if isinstance(described, types.DictType):
        return part.get("type") == "object"
    return part.get("type") == "array" or isinstance(described, types.Metadata)


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
            schema.check(decoded(given, msgspec.json.decode, "arguments"), "arguments")
        values = msgspec.structs.astuple(decoded(given, decoder.decode, "arguments"))
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
    if is_field(default):
        return default.get_default(call_default_factory=True, validated_data={})
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
        values: dict[str, Any] = decoded(given, decoder.decode, "arguments")
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


def decoded(encoded: bytes, decode: Callable[[bytes], Any], whole: str) -> Any:
    """The value of a JSON text. Raises `ValueError` with the place and the reason."""
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
