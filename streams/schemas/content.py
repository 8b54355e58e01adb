"""Content blocks of MCP 2025-11-25, which a tool may return besides plain values.

Each block is a frozen Struct that encodes to the JSON of the wire, so a block may also be part of
the params of a request to the client (`sampling/createMessage`). Binary data is passed as bytes and
becomes base64 on the wire. Fields that are None are left out. `annotations` and `meta` (`_meta` on
the wire) are keyword arguments.

The blocks of the official SDK (`mcp.types.TextContent` …) may take the place of these, its `Image`
and `Audio` as well, and its `CallToolResult` the place of a `ToolResult`. They are known by the
names of their classes, since the SDK is no dependency.
"""

import types
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

_SEQUENCES: Final = (list, tuple, Sequence)

Role = Literal["user", "assistant"]


def _wire_name(field: str) -> str:
    if field == "meta":
        return "_meta"
    head, *rest = field.split("_")
    return head + "".join(word.capitalize() for word in rest)


class _Wire(msgspec.Struct, frozen=True, omit_defaults=True, rename=_wire_name):
    """A Struct with the spelling of the wire: camelCase, `_meta`, and no nulls."""


class Annotations(_Wire, frozen=True, kw_only=True):
    """Hints about a block: its audience and its importance.

    `priority` is from 0 (optional) to 1 (required). `last_modified` is an ISO 8601 time.
    """

    audience: tuple[Role, ...] | None = None
    priority: float | None = None
    last_modified: str | None = None

    def __post_init__(self) -> None:
        if self.priority is not None and not 0 <= self.priority <= 1:
            raise ValueError(f"priority: expected 0 to 1, got {self.priority}")


class _Block(_Wire, frozen=True, kw_only=True, tag_field="type"):
    annotations: Annotations | None = None
    meta: dict[str, Any] | None = None


class Text(_Block, frozen=True, tag="text"):
    """Text for the model or the user."""

    text: str

    def __post_init__(self) -> None:
        _require_str("text", self.text)


class Image(_Block, frozen=True, tag="image"):
    """An image: its bytes (not base64) and their MIME type."""

    data: bytes
    mime_type: str

    def __post_init__(self) -> None:
        _require_bytes("data", self.data)


class Audio(_Block, frozen=True, tag="audio"):
    """A sound: its bytes (not base64) and their MIME type."""

    data: bytes
    mime_type: str

    def __post_init__(self) -> None:
        _require_bytes("data", self.data)


class ResourceContents(_Wire, frozen=True):
    """The contents of a resource: either `text` or `blob` (bytes, not base64).

    Raises `ValueError` unless exactly one of them is given.
    """

    uri: str
    text: str | None = None
    blob: bytes | None = None
    mime_type: str | None = None
    meta: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.blob is None):
            raise ValueError("a resource has either text or blob: give exactly one of them")
        if self.text is not None:
            _require_str("text", self.text)
        if self.blob is not None:
            _require_bytes("blob", self.blob)


class EmbeddedResource(_Block, frozen=True, tag="resource"):
    """A resource with its contents. `EmbeddedResource.of(uri, text=…)` is the short form."""

    resource: ResourceContents

    @classmethod
    def of(
        cls,
        uri: str,
        *,
        text: str | None = None,
        blob: bytes | None = None,
        mime_type: str | None = None,
        annotations: Annotations | None = None,
        meta: dict[str, Any] | None = None,
    ) -> "EmbeddedResource":
        """A block with one resource. `annotations` and `meta` belong to the block.

        Raises `ValueError` unless exactly one of `text` and `blob` is given.
        """
        contents = ResourceContents(uri, text, blob, mime_type)
        return cls(contents, annotations=annotations, meta=meta)


class Icon(_Wire, frozen=True):
    """An icon. `src` is an http(s) or `data:` URI; sizes are like "48x48", or "any"."""

    src: str
    mime_type: str | None = None
    sizes: tuple[str, ...] | None = None
    theme: Literal["light", "dark"] | None = None


class ResourceLink(_Block, frozen=True, tag="resource_link"):
    """A resource that the client may read from the server; `size` is in bytes."""

    uri: str
    name: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None
    size: int | None = None
    icons: tuple[Icon, ...] | None = None


Block = Text | Image | Audio | EmbeddedResource | ResourceLink


class ToolResult(msgspec.Struct, frozen=True):
    """A whole result, which is sent as it is.

    `content` is a str, a block, or a list of them. `structured_content` is an object in JSON, and
    must fit the tool's output schema unless `is_error` is set. `meta` is `_meta` on the wire.
    """

    content: Any = ()
    structured_content: Any = None
    is_error: bool = False
    meta: dict[str, Any] | None = None


_SDK_PACKAGES: Final = frozenset({"mcp", "mcp_types"})
_SDK_BLOCKS: Final = frozenset(
    {"TextContent", "ImageContent", "AudioContent", "EmbeddedResource", "ResourceLink"}
)
_RESULT: Final = ("content", "structuredContent", "isError", "_meta")
# Methods of the SDK's and FastMCP's `Image` and `Audio`, which make a block of the SDK's.
_CONVERSIONS: Final = ("to_image_content", "to_audio_content")


def is_block_type(annotation: Any) -> bool:
    """Whether an annotation is a content block, or has one in a list, a tuple or a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return is_block_type(get_args(annotation)[0])
    if origin in {Union, types.UnionType} or (isinstance(origin, type) and origin in _SEQUENCES):
        return any(map(is_block_type, get_args(annotation)))
    return isinstance(annotation, type) and (
        issubclass(annotation, Block)
        or _is_sdk(annotation, _SDK_BLOCKS)
        or _converts(annotation) is not None
    )


def is_result_type(annotation: Any) -> bool:
    """Whether an annotation is `ToolResult`, or the SDK's `CallToolResult`, or a union with it."""
    if get_origin(annotation) in {Union, types.UnionType}:
        return any(map(is_result_type, get_args(annotation)))
    return isinstance(annotation, type) and (
        issubclass(annotation, ToolResult) or _is_sdk(annotation, {"CallToolResult"})
    )


def sdk_block(value: Any) -> dict[str, Any] | None:
    """The JSON of a block of the official SDK; None for any other value."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return None
    if name := _converts(kind):
        value = getattr(value, name)()
        kind = type(value)
    return _dumped(value) if _is_sdk(kind, _SDK_BLOCKS) else None


def sdk_result(value: Any) -> dict[str, Any] | None:
    """The JSON of a `CallToolResult` of the official SDK; None for any other value."""
    kind = type(value)
    if kind.__module__ == "builtins" or not _is_sdk(kind, {"CallToolResult"}):
        return None
    dumped = _dumped(value)
    return {name: dumped[name] for name in _RESULT if name in dumped}


def _dumped(value: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def _is_sdk(kind: type, names: Collection[str]) -> bool:
    return any(
        base.__name__ in names and base.__module__.partition(".")[0] in _SDK_PACKAGES
        for base in kind.__mro__
    )


def _converts(kind: type) -> str | None:
    return next((name for name in _CONVERSIONS if callable(getattr(kind, name, None))), None)


def _require_str(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{field}: expected str, got {type(value).__name__}")


def _require_bytes(field: str, value: object) -> None:
    # A str would be sent unchanged, and clients would decode it as base64.
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(
            f"{field}: expected bytes, got {type(value).__name__} (decode base64 first)"
        )
