"""Annotations: the types and the metadata in them, and the descriptions that they have.

Classes of pydantic are known by their modules and attributes, so that it need not be imported.
"""

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterable, Iterator
from inspect import Parameter
from typing import Annotated, Any, Final, NewType, Union, get_args, get_origin

_PACKAGES: Final = frozenset({"pydantic", "pydantic_core", "annotated_types"})


def uses_pydantic(annotation: Any, default: Any = Parameter.empty) -> bool:
    """Whether an annotation, or the default of its parameter, has anything of pydantic's in it."""
    return is_field(default) or any(
        _is_marker(part) if is_metadata else _is_known(part)
        for part, is_metadata in parts(annotation)
    )


def is_field(default: Any) -> bool:
    """Whether the default of a parameter is a `Field(…)`."""
    return type(default).__name__ == "FieldInfo" and _is_of(type(default))


def parts(annotation: Any, seen: dict[int, Any] | None = None) -> Iterator[tuple[Any, bool]]:
    """All types in an annotation, also those of fields, and whether they are metadata instead."""
    seen = {} if seen is None else seen
    if id(annotation) in seen:
        return
    seen[id(annotation)] = annotation  # kept, so that no other has its id
    yield annotation, False
    inner: Iterable[Any] = get_args(annotation)
    if isinstance(annotation, list | tuple):
        inner = annotation
    elif isinstance(annotation, NewType):
        inner = [annotation.__supertype__]
    elif type(annotation).__name__ == "TypeAliasType":
        inner = [annotation.__value__]
    elif get_origin(annotation) is Annotated:
        yield from ((each, True) for each in annotation.__metadata__)
        inner = [annotation.__origin__]
    for each in itertools.chain(inner, _fields(annotation)):
        yield from parts(each, seen)


def _is_of(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _is_marker(metadata: Any) -> bool:
    """Whether a part of an `Annotated` means something to pydantic, and nothing to msgspec."""
    if isinstance(getattr(metadata, "documentation", None), str):
        return False  # a description
    kind = metadata if isinstance(metadata, type) else type(metadata)
    return _is_of(kind) or _is_known(metadata) or hasattr(metadata, "__get_pydantic_json_schema__")


def _is_known(annotation: Any) -> bool:
    return any(
        hasattr(annotation, name)
        for name in ("__get_pydantic_core_schema__", "__pydantic_core_schema__")
    ) or (isinstance(annotation, type) and _is_of(annotation))


def _fields(annotation: Any) -> Iterable[Any]:
    """The annotations of the fields of a dataclass, TypedDict, NamedTuple or Struct."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or not (
        dataclasses.is_dataclass(kind)
        or typing.is_typeddict(kind)
        or hasattr(kind, "__required_keys__")
        or hasattr(kind, "__struct_fields__")
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    ):
        return ()
    try:
        return typing.get_type_hints(kind, include_extras=True).values()
    except (NameError, TypeError):
        return ()  # msgspec reports it


def description(annotation: Any) -> str | None:
    """The description in an annotation: `Annotated[int, "how many"]`, or a `Doc("how many")`."""
    if get_origin(annotation) in {Union, types.UnionType}:
        found = [text for each in get_args(annotation) if (text := description(each))]
        return found[0] if len(found) == 1 else None
    if get_origin(annotation) is not Annotated:
        return None
    metadata = get_args(annotation)[1:]
    for each in metadata:
        if isinstance(text := getattr(each, "documentation", None), str):
            return text  # of typing_extensions, annotated_doc, and annotated_types
    return next((each for each in metadata if isinstance(each, str)), None)
