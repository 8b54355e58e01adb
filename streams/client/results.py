"""The answers of a server as types: tools, resources, prompts, completions, results of tools.

Every field that MCP lets a server leave out has a default. A field that is null counts as left out.
"""

import sys
from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_args

import msgspec

from streams import messages
from streams.errors import ToolFailed

_T = TypeVar("_T")


class _Answer(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    meta: dict[str, Any] = msgspec.field(name="_meta", default={})


class Tool(_Answer, frozen=True):
    """A tool as the server lists it. The schemas are JSON Schema; `annotations` are its hints."""

    name: str
    input_schema: dict[str, Any] = {}
    description: str = ""
    title: str = ""
    output_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] = {}


class Resource(_Answer, frozen=True):
    """A resource as the server lists it. `size` is in bytes."""

    uri: str
    name: str = ""
    title: str = ""
    description: str = ""
    mime_type: str = ""
    size: int | None = None
    annotations: dict[str, Any] = {}


class ResourceTemplate(_Answer, frozen=True):
    """A template of resources; `uri_template` is an RFC 6570 template (`reports://{id}`)."""

    uri_template: str
    name: str = ""
    title: str = ""
    description: str = ""
    mime_type: str = ""
    annotations: dict[str, Any] = {}


class ResourcePart(_Answer, frozen=True):
    """A part of a resource: `text`, or `blob` (bytes, no longer base64), never both."""

    uri: str
    mime_type: str = ""
    text: str | None = None
    blob: bytes | None = None


class PromptArgument(msgspec.Struct, frozen=True, kw_only=True):
    """An argument of a prompt."""

    name: str
    title: str = ""
    description: str = ""
    required: bool = False


class Prompt(_Answer, frozen=True):
    """A prompt as the server lists it."""

    name: str
    title: str = ""
    description: str = ""
    arguments: list[PromptArgument] = []


class PromptMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a prompt; `content` is one content block, as the server sent it."""

    role: str
    content: dict[str, Any]

    @property
    def text(self) -> str:
        """The text; empty for another kind of content."""
        return _text_of([self.content])


class PromptResult(_Answer, frozen=True):
    """A prompt, filled in with its arguments."""

    messages: list[PromptMessage]
    description: str = ""


class CompletionResult(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Values that complete an argument; `total` is None if the server does not tell it."""

    values: list[str]
    total: int | None = None
    has_more: bool = False


class CallToolResult(_Answer, frozen=True):
    """The result of a tool; `content` are its content blocks, as the server sent them."""

    content: list[dict[str, Any]] = []
    structured_content: Any = None
    is_error: bool = False

    @property
    def text(self) -> str:
        """The text blocks of the content, each on a line of its own."""
        return _text_of(self.content)


class _Value(msgspec.Struct, rename="camel"):
    structured_content: msgspec.Raw = msgspec.Raw(b"null")


_NULL: Final = b"null"
_WRAPPED: Final = "result"  # MCP allows only objects: other values are wrapped under this key


def page_of(raw: msgspec.Raw, field: str, shape: type[_T]) -> tuple[list[_T], str | None]:
    """A page of a listing: its items, and the cursor of the next page. Raises `ValueError`."""
    page = messages.decode(raw, dict[str, Any])
    if field not in page:
        raise ValueError(f"it has no {field!r}")
    items = msgspec.convert(page[field], list[dict[str, Any]])
    cursor = msgspec.convert(page.get("nextCursor"), str | None)
    return [_from_fields(item, shape) for item in items], cursor


def one_of(raw: msgspec.Raw, field: str | None, shape: type[_T]) -> _T:
    """An answer, or one field of it. Raises `ValueError`."""
    answer = messages.decode(raw, dict[str, Any])
    if field is None:
        return _from_fields(answer, shape)
    if field not in answer:
        raise ValueError(f"it has no {field!r}")
    return _from_fields(msgspec.convert(answer[field], dict[str, Any]), shape)


def _from_fields(fields: Mapping[str, Any], shape: type[_T]) -> _T:
    given = {name: value for name, value in fields.items() if value is not None}
    if shape is Prompt and isinstance(given.get("arguments"), list):
        given["arguments"] = [
            _from_fields(msgspec.convert(each, dict[str, Any]), PromptArgument)
            for each in given["arguments"]
        ]
    return msgspec.convert(given, shape)


def read_as(raw: bytes | msgspec.Raw, shape: Any) -> Any:
    """JSON as a value of type `shape`: what msgspec decodes, or pydantic where that is used.

    Raises `ValueError` if it does not fit, `TypeError` for a type that neither can make.
    """
    try:
        if _has_model(shape):
            return sys.modules["pydantic"].TypeAdapter(shape).validate_json(bytes(raw))
        return msgspec.json.decode(raw, type=shape, dec_hook=_as_model)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except NotImplementedError as error:  # msgspec makes a `ValueError` of any other
        raise TypeError(str(error)) from None


def _has_model(shape: Any) -> bool:
    """Whether the type is a model of pydantic, or has one among its parameters."""
    return hasattr(shape, "model_validate") or any(map(_has_model, get_args(shape)))


def _as_model(shape: type, value: Any) -> Any:
    if hasattr(shape, "model_validate"):  # the field of a dataclass, say
        return shape.model_validate(value)
    raise NotImplementedError(f"{shape!r} is no type that JSON can be decoded into")


def tool_value(raw: msgspec.Raw, shape: Any) -> Any:
    """The value that a tool returned, from its result.

    That is its structured content, else its text: decoded, unless `shape` is `str`. With
    `CallToolResult` it is the whole result. Raises `ToolFailed`, or `ValueError` for a value that
    does not fit.
    """
    result = one_of(raw, None, CallToolResult)
    if shape is CallToolResult:
        return result
    if result.is_error:
        raise ToolFailed(result.text or "The tool failed, and did not say why.", result)
    structured = messages.decode(raw, _Value).structured_content
    if bytes(structured) != _NULL:
        return _unwrapped(structured, shape)
    texts = [block["text"] for block in result.content if _is_text(block)]
    if shape is str:
        return "\n".join(texts)
    if len(texts) != 1:
        raise ValueError(f"no structured content, and {len(texts)} text blocks in place of one")
    return read_as(texts[0].encode(), shape)


def _unwrapped(structured: msgspec.Raw, shape: Any) -> Any:
    """Structured content as a `shape`, as it is or wrapped as the only field of an object."""
    try:
        return read_as(structured, shape)
    except ValueError:
        if not bytes(structured).startswith(b"{"):
            raise
        fields = messages.decode(structured, dict[str, msgspec.Raw])
        if list(fields) != [_WRAPPED]:
            raise
        return read_as(fields[_WRAPPED], shape)


def _is_text(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and isinstance(block.get("text"), str)


def _text_of(content: list[dict[str, Any]]) -> str:
    return "\n".join(block["text"] for block in content if _is_text(block))
