"""Annotations for pydantic: models, `Field`, discriminated unions, and what msgspec cannot express.

pydantic is no dependency. It is imported when a tool has an annotation for it: one that uses a
class or a constraint of pydantic's, or one that only pydantic can read, such as a union of two
dataclasses. Each parameter has one reader: msgspec reads the others, which is faster.

pydantic makes the schemas, validates the arguments, and turns results into JSON. Its errors become
one sentence that begins with the place, as those of msgspec do.

Two kinds of arguments would take pydantic long. A long list of wrong values has an error for each
of them, so a validation ends with the first wrong value of a list or dict (`_failing_fast`). A type
that refers to itself by a union without a discriminator takes exponential time in the depth, so its
arguments have a bound (`Recursion`).
"""

import itertools
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import Parameter
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
)

import msgspec

from streams.schemas.annotations import is_field
from streams.schemas.validator import Schema, shortened

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

REFERENCE: Final = "#/$defs/"

# The errors of one validation that are told. A client corrects one after the other.
_TOLD: Final = 3
# Above this, not even the first errors are told: pydantic hands out all of them, or none.
_ERRORS_MAX: Final = 1_000

_ADVICE: Final = "use a type that JSON has (a dataclass, a model …), or give input_schema"


def require_pydantic() -> None:
    """Raise `ImportError` unless pydantic 2 is installed."""
    import pydantic

    if pydantic.VERSION.startswith("1."):
        raise ImportError(f"pydantic 2 is needed, not {pydantic.VERSION}")


# -- annotations as pydantic reads them


def _readable(annotation: Any) -> Any:
    """The annotation with pydantic's `Field` in place of `msgspec.Meta`.

    Before Python 3.12, pydantic refuses a `typing.TypedDict` as well.
    """
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        return Annotated[(_readable(base), *map(_as_field, metadata))]
    if isinstance(annotation, msgspec.StructMeta):
        raise TypeError(
            f"pydantic cannot read the msgspec.Struct {annotation.__name__}; make it a dataclass"
        )
    if typing.is_typeddict(annotation):
        return _readable_typeddict(annotation)
    inner = get_args(annotation)
    if not inner or get_origin(annotation) is typing.Literal:
        return annotation
    readable = tuple(_readable(each) if not isinstance(each, list) else each for each in inner)
    if all(new is old for new, old in zip(readable, inner, strict=True)):
        return annotation
    if get_origin(annotation) in {Union, types.UnionType}:
        return Union[readable]  # noqa: UP007  # made of a tuple
    return (
        annotation.copy_with(readable)
        if hasattr(annotation, "copy_with")
        else (get_origin(annotation)[readable])
    )


def _as_field(metadata: Any) -> Any:
    from pydantic import Field

    if not isinstance(metadata, msgspec.Meta):
        return metadata
    names = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
    given = {name: getattr(metadata, name) for name in (*names, "title", "description")}
    extra = dict(metadata.extra_json_schema or {})
    if metadata.examples is not None:
        extra["examples"] = metadata.examples
    found = {name: value for name, value in given.items() if value is not None}
    return Field(**found, json_schema_extra=extra or None)


def _readable_typeddict(kind: Any) -> Any:
    if sys.version_info >= (3, 12) or type(kind).__module__ != "typing":
        return kind
    import typing_extensions

    fields = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        bare = get_args(hint)[0] if get_origin(hint) in {Required, NotRequired} else hint
        is_required = name in kind.__required_keys__
        fields[name] = (Required if is_required else NotRequired)[_readable(bare)]
    make: Any = typing_extensions.TypedDict
    made = make(kind.__name__, fields)
    for name in ("__doc__", "__module__", "__qualname__", "__pydantic_config__"):
        if hasattr(kind, name):
            setattr(made, name, getattr(kind, name))
    return made


# -- arguments


class ModelArguments:
    """The parameters of a tool that pydantic reads, as the fields of one model.

    `properties` and `definitions` are their schemas, `required` the names that a call must have.
    An alias is the name of an argument.
    """

    def __init__(self, parameters: Collection[Parameter]) -> None:
        """Raises `TypeError` with the name of a parameter that pydantic cannot read.

        `ImportError` without pydantic 2.
        """
        require_pydantic()
        try:
            self._model = _model(parameters)
            schema = _json_schema(self._model, "validation")
        except Exception as error:
            raise TypeError(_culprit(parameters, error)) from error
        self._fields = dict(
            zip((each.name for each in parameters), self._model.model_fields, strict=True)
        )
        self.properties: Schema = schema.get("properties", {})
        self.required: list[str] = schema.get("required", [])
        self.definitions: Schema = schema.get("$defs", {})
        self.accepted: list[str] = []  # all names that arguments may have
        self.names = dict(map(self._named, self._fields))  # of properties, by those of parameters
        self._recursion = Recursion(schema, "arguments")
        model = self._model
        self._validate = _failing_fast(
            model.__pydantic_core_schema__, model.__pydantic_validator__, "arguments"
        )

    def _named(self, name: str) -> tuple[str, str]:
        field = self._model.model_fields[self._fields[name]]
        alias: Any = field.validation_alias or field.alias
        aliases = [alias] if isinstance(alias, str) else list(getattr(alias, "choices", (alias,)))
        if not all(isinstance(each, str) for each in aliases):
            raise TypeError(f"{name}: an argument has a name of its own: drop the AliasPath")
        self.accepted += aliases
        return name, next((each for each in aliases if each in self.properties), name)

    def values(self, given: Mapping[str, bytes]) -> dict[str, Any]:
        """The values of the parameters, with defaults for those that are absent.

        `given` has the arguments as JSON. Raises `ValueError` with the place and the reason.
        """
        parts = (msgspec.json.encode(name) + b":" + raw for name, raw in given.items())
        encoded = b"{" + b",".join(parts) + b"}"
        self._recursion.check(encoded)
        made = self._validate(encoded)
        return {name: getattr(made, field) for name, field in self._fields.items()}


class ModelReader:
    """Reads one value of a type of pydantic's from JSON, within the bounds of arguments."""

    def __init__(self, annotation: Any, whole: str) -> None:
        """`whole` names the value in errors. Raises what pydantic raises for the annotation."""
        from pydantic import TypeAdapter

        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        self.schema: Schema = adapter.json_schema()
        self._recursion = Recursion(self.schema, whole)
        self._validate = _failing_fast(adapter.core_schema, adapter.validator, whole)

    def read(self, encoded: bytes) -> Any:
        """The value. Raises `ValueError` with the place and the reason."""
        self._recursion.check(encoded)
        return self._validate(encoded)


def takes_others(parameters: Iterable[Parameter]) -> bool:
    """Whether a default is made by a factory that is given the arguments before it."""
    fields = [each.default for each in parameters if is_field(each.default)]
    for parameter in parameters:
        if get_origin(parameter.annotation) is Annotated:
            fields += filter(is_field, get_args(parameter.annotation)[1:])
    return any(field.default_factory_takes_validated_data for field in fields)


def _model(parameters: Iterable[Parameter]) -> "type[BaseModel]":
    from pydantic import BaseModel, ConfigDict, Field, create_model

    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        base, *metadata = (
            get_args(parameter.annotation)
            if get_origin(parameter.annotation) is Annotated
            else (parameter.annotation,)
        )
        # The alias comes first, so that an alias of the author's wins.
        named = (Field(alias=parameter.name), *map(_as_field, metadata))
        annotation: Any = Annotated[(_readable(base), *named)]
        name = parameter.name
        if name.startswith("_") or hasattr(BaseModel, name):
            name = f"p{index}_{name.strip('_')}"
        default = () if parameter.default is Parameter.empty else (parameter.default,)
        fields[name] = (annotation, *default) if default else annotation
    config = ConfigDict(protected_namespaces=(), extra="forbid")
    made: type[BaseModel] = create_model("Arguments", __config__=config, **fields)
    return made


def _failing_fast(core_schema: Any, usual: Any, whole: str) -> Callable[[bytes], Any]:
    """A function that validates JSON, and ends with the first wrong item of a list or dict.

    `usual` is pydantic's own validator of this schema.
    """
    from pydantic import ValidationError
    from pydantic_core import SchemaValidator

    try:
        validator = SchemaValidator(_with_fail_fast(core_schema), _use_prebuilt=False)
    except Exception:
        # An older pydantic, which cannot. A long list of wrong values takes it seconds.
        validator = usual

    def validate(encoded: bytes) -> Any:
        try:
            return validator.validate_json(encoded)
        except ValidationError as error:
            raise ValueError(explain(error, whole, encoded)) from None

    return validate


_COLLECTIONS: Final = frozenset({"list", "set", "frozenset", "tuple", "dict", "deque"})
_VALUES: Final = frozenset({"default", "expected", "metadata", "serialization", "members", "cls"})


def _with_fail_fast(node: Any) -> Any:
    if isinstance(node, list | tuple):
        return type(node)(_with_fail_fast(inner) for inner in node)
    if not isinstance(node, dict):
        return node
    made = {
        name: inner if name in _VALUES else _with_fail_fast(inner) for name, inner in node.items()
    }
    if isinstance(made.get("type"), str) and made["type"] in _COLLECTIONS:
        made["fail_fast"] = True
    return made


def _culprit(parameters: Iterable[Parameter], error: Exception) -> str:
    for parameter in parameters:
        try:
            _json_schema(_model([parameter]), "validation")
        except Exception as found:
            named = getattr(parameter.annotation, "__name__", "the model")
            why = _why(found).replace("Arguments", named)
            return f"{parameter.name}: {why}; {_ADVICE}"
    return _why(error)  # each parameter is valid alone, but not all of them together


def _why(error: Exception) -> str:
    """The first sentence of pydantic's error. The others tell what to change in a model."""
    return str(error).splitlines()[0].partition(". Set `")[0].rstrip(".")


def _json_schema(adapted: Any, mode: Any) -> Schema:
    """The schema of a model or a `TypeAdapter`. Raises if a part of the type has no JSON form."""
    from pydantic.json_schema import GenerateJsonSchema

    class Strict(GenerateJsonSchema):
        def emit_warning(self, kind: Any, detail: str) -> None:
            if kind != "non-serializable-default":  # such a default is not listed
                raise TypeError(detail)

        def datetime_schema(self, schema: Any) -> Schema:
            return _fitting(super().datetime_schema(schema), schema, mode)

        def time_schema(self, schema: Any) -> Schema:
            return _fitting(super().time_schema(schema), schema, mode)

        def timedelta_schema(self, schema: Any) -> Schema:
            return _fitting(super().timedelta_schema(schema), schema, mode)

    make = getattr(adapted, "model_json_schema", None) or adapted.json_schema
    # Through JSON, since a default may be a set or a tuple.
    made: Schema = msgspec.json.decode(
        msgspec.json.encode(make(mode=mode, schema_generator=Strict))
    )
    return made


def _fitting(made: Schema, core: Any, mode: Any) -> Schema:
    """The schema of a time, in results without a format that not all values fit: see `outputs`."""
    if mode == "serialization" and core.get("tz_constraint") != "aware":
        made.pop("format", None)
    return made


# -- results


class ModelResult:
    """The return annotation of a tool that pydantic reads. `schema` describes it."""

    def __init__(self, annotation: Any) -> None:
        """Raises `TypeError` if pydantic cannot read the annotation; `ImportError` without it."""
        require_pydantic()
        from pydantic import TypeAdapter

        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(_readable(annotation))
            self.schema = _json_schema(self._adapter, "serialization")
        except Exception as error:
            raise TypeError(_why(error)) from error

    def plain(self, value: Any) -> Any:
        """The value as plain data. Raises `ValueError` if it is not what the annotation says."""
        from pydantic import BaseModel, ValidationError

        try:
            made = self._adapter.validate_python(value, by_alias=True, by_name=True)
        except ValidationError as error:
            raise ValueError(explain(error, "result")) from None
        if isinstance(made, BaseModel):  # a subclass keeps its own fields
            return made.model_dump(mode="json", by_alias=True)
        return self._adapter.dump_python(made, mode="json", by_alias=True)


def is_model(value: Any) -> bool:
    """Whether a value is a model, or a dataclass of pydantic's."""
    return hasattr(type(value), "__pydantic_serializer__")


def as_plain(model: Any) -> Any:
    """A model as plain data, by its own serializer."""
    return type(model).__pydantic_serializer__.to_python(model, mode="json", by_alias=True)


# -- errors


def explain(error: "ValidationError", whole: str, encoded: bytes = b"") -> str:
    """pydantic's errors as a sentence: `rows: Input should be greater than or equal to 1`."""
    if error.error_count() > _ERRORS_MAX:
        return f"{whole}: {error.error_count()} values do not fit: see the schema"
    found = [
        each
        for each in error.errors(include_url=False, include_context=False, include_input=False)
        if each["type"] != "default_factory_not_called"  # follows from another error
    ]
    if found[0]["type"] == "json_invalid":  # msgspec has read the JSON before
        return f"{whole}: nested too deeply"
    value = msgspec.json.decode(encoded) if encoded else None
    told = [
        f"{_place(each['loc'], value, each['type'] == 'missing') or whole}: {_reason(each)}"
        for each in found[:_TOLD]
    ]
    more = len(found) - len(told)
    return shortened("; ".join(dict.fromkeys(told)) + (f"; and {more} more" if more else ""))


def _reason(error: Any) -> str:
    if error["type"] == "missing":
        return "missing"
    message = str(error["msg"])
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _place(location: Iterable[Any], value: Any, is_missing: bool) -> str:
    """The path of an error. The names of the branches of unions are no part of it."""
    path = ""
    steps = list(location)
    for position, step in enumerate(steps):
        is_last = position == len(steps) - 1
        if isinstance(step, int):
            path += f"[{step}]"
            value = value[step] if isinstance(value, list) and step < len(value) else None
        elif isinstance(value, dict) and step in value:
            path += f".{step}"
            value = value[step]
        elif (is_last and is_missing) or value is None:
            path += f".{step}"
    return path.lstrip(".")


# -- types that refer to themselves


class Recursion:
    """The bound of arguments for types that refer to themselves by unions without discriminators.

    pydantic tries each alternative of such a union, and each of them again at each level below. So
    the time may multiply with each level.
    """

    # Values that may be tried. Each takes a microsecond, or ten if it does not fit.
    WORK_MAX: Final = 5_000

    def __init__(self, schema: Schema, whole: str) -> None:
        """`whole` names the value in errors."""
        self._whole = whole
        self._definitions: Schema = schema.get("$defs", {})
        self.alternatives = max(
            (self._alternatives(node, name, {name}) for name, node in self._definitions.items()),
            default=1,
        )

    def check(self, encoded: bytes) -> None:
        """Raise `ValueError` if a validation of these arguments may take long."""
        if self.alternatives < 2:
            return
        work, times = 0, 1
        level: list[Any] = [msgspec.json.decode(encoded)]
        while level and work <= self.WORK_MAX:
            work += len(level) * times
            times *= self.alternatives
            level = list(itertools.chain.from_iterable(map(_below, level)))
        if work > self.WORK_MAX:
            raise ValueError(
                f"{self._whole}: too many levels for a type that refers to itself by a union "
                "without a discriminator"
            )

    def _alternatives(self, node: Any, name: str, seen: set[str]) -> int:
        """How often one value below `node` may be tried on the ways back to the definition `name`.

        Unions within unions multiply. A schema does not show those of `list[P] | tuple[P, ...]`,
        since both alternatives are the same array in it.
        """
        if isinstance(node, list):
            return max((self._alternatives(inner, name, seen) for inner in node), default=1)
        if not isinstance(node, dict):
            return 1
        inner = {key: value for key, value in node.items() if key not in ("anyOf", "$ref")}
        found = [self._alternatives(value, name, seen) for value in inner.values()]
        target = str(node.get("$ref", "")).removeprefix(REFERENCE)
        if target in self._definitions and target not in seen:
            followed = self._definitions[target]
            if followed.get("type") != "object":  # an object is a level of its own
                found.append(self._alternatives(followed, name, seen | {target}))
        # A union with a discriminator is a `oneOf`. An alternative of another type fails at once.
        ways = [
            (self._resolved(each).get("type"), self._alternatives(each, name, seen))
            for each in node.get("anyOf", ())
            if self._leads_to(each, name, set())
        ]
        for type_ in ("object", "array"):
            found.append(sum(count for kind, count in ways if kind in (type_, None)))
        return max(1, *found)

    def _resolved(self, node: Schema) -> Schema:
        target = str(node.get("$ref", "")).removeprefix(REFERENCE)
        found: Schema = self._definitions.get(target, node)
        return found

    def _leads_to(self, node: Any, name: str, seen: set[str]) -> bool:
        if isinstance(node, list):
            return any(self._leads_to(inner, name, seen) for inner in node)
        if not isinstance(node, dict):
            return False
        target = str(node.get("$ref", "")).removeprefix(REFERENCE)
        if target == name:
            return True
        if target in self._definitions and target not in seen:
            seen.add(target)
            if self._leads_to(self._definitions[target], name, seen):
                return True
        return any(self._leads_to(inner, name, seen) for inner in node.values())


def _below(value: Any) -> Iterable[Any]:
    """The objects that are the next level below an object or a list, and lists within lists."""
    inner = value.values() if isinstance(value, dict) else value
    for each in inner:
        if isinstance(each, dict) or (isinstance(each, list) and isinstance(value, list)):
            yield each
        elif isinstance(each, list):
            yield from _below(each)
