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
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter
from typing import Any, Final

import msgspec
from msgspec import inspect as types

from streams.messages import uncollected
from streams.server.validator import Schema, Validator, shortened

Binder = Callable[[bytes | msgspec.Raw], dict[str, Any]]
OutputCheck = Callable[[bytes, Any], None]  # the output as JSON, and read back from it

# The most work of a check that is done at once, in words of the schema times bytes of the value.
# It takes at most 4 ms, and nothing else in the server runs meanwhile.
INLINE_WORK_MAX: Final = 256 * 1024

_ABSENT: Final = object()
_REFERENCE: Final = "#/$defs/"
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>.*)`", re.DOTALL)
_PLACE: Final = re.compile(r"(?P<why>.*) - at (?P<key>`key` in )?`\$(?P<path>.*?)`", re.DOTALL)


def parameters_schema(parameters: Sequence[Parameter]) -> Schema:
    """The input schema of these parameters, with the constraints in their `msgspec.Meta`.

    A default is listed if it is JSON of the parameter's own type (not for `rows: int = None`).
    Raises `TypeError` with the name of a parameter whose annotation has no JSON form.
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
    """Whether a call must have this argument."""
    return parameter.default is Parameter.empty


def object_schema(annotation: Any) -> Schema | None:
    """The output schema of a Struct, dataclass or TypedDict; None for every other annotation.

    Raises `TypeError` where a field of such a class has no JSON form.
    """
    try:
        described = types.type_info(annotation)
    except TypeError:
        return None  # msgspec does not know it; `to_result` reports values that are not JSON
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
    # Through JSON, since msgspec lists a default as it is, which may be a set or a tuple.
    plain = msgspec.json.decode(msgspec.json.encode((found, definitions)))
    return tuple(plain[0]), plain[1]


def _culprit(parameters: Sequence[Parameter], error: Exception) -> str:
    for parameter in parameters:
        try:
            _components([parameter.annotation])
        except (TypeError, ValueError, NameError) as found:
            why = str(found).splitlines()[-1]
            return f"{parameter.name}: {why}; use a type that JSON has, or give input_schema"
    return str(error)  # each annotation is valid alone, but not all of them together


def _advertised_default(parameter: Parameter) -> Schema:
    if is_required(parameter):
        return {}
    try:
        encoded = msgspec.json.encode(parameter.default)
        msgspec.json.decode(encoded, type=parameter.annotation)
        return {"default": msgspec.json.decode(encoded)}
    except (TypeError, ValueError, RecursionError):
        return {}  # None for an int, or a sentinel object: a client cannot send it


def annotation_binder(parameters: Sequence[Parameter], schema: "GivenSchema | None") -> Binder:
    """Returns a function that decodes arguments into the types of these parameters.

    It checks them against `schema` first. A costly check is left to the caller. Absent arguments
    get their defaults, and a default that is a list, dict or set is copied for each call.
    """
    # The fields have names of their own, so that a parameter may have any name, even `self`.
    shape = msgspec.defstruct(
        "Arguments",
        [_field(f"p{index}", parameter) for index, parameter in enumerate(parameters)],
        rename={f"p{index}": parameter.name for index, parameter in enumerate(parameters)},
        forbid_unknown_fields=True,
        kw_only=True,
    )
    decoder = msgspec.json.Decoder(shape)
    names = [parameter.name for parameter in parameters]
    has_defaults = not all(map(is_required, parameters))

    def bind(raw: bytes | msgspec.Raw) -> dict[str, Any]:
        given = bytes(raw)
        if schema is not None and not schema.is_costly(len(given)):
            schema.check(_decoded(given, msgspec.json.decode, "arguments"), "arguments")
        values = msgspec.structs.astuple(_decoded(given, decoder.decode, "arguments"))
        bound = dict(zip(names, values, strict=True))
        if has_defaults:
            for parameter in parameters:
                if bound[parameter.name] is _ABSENT:
                    bound[parameter.name] = _fresh(parameter.default)
        return bound

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
