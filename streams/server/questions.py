"""Typed questions of a tool to its client: elicitation, sampling and roots.

Each takes the asking function of a call, so that plain and async tools share them. A question is
refused before it is sent if the client has not declared the capability that it needs.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar

import msgspec

from streams import messages
from streams.errors import InvalidAnswer
from streams.schemas.content import Audio, Block, Image, Role, Text
from streams.schemas.forms import form_of

ELICIT: Final = "elicitation/create"
SAMPLE: Final = "sampling/createMessage"
ROOTS: Final = "roots/list"

# The capability that each question needs.
FORM: Final = "elicitation.form"
URL: Final = "elicitation.url"

SAMPLE_TOKENS: Final = 1024  # of a sample, unless the tool says; enough for a page of text

_NOTHING: Final = msgspec.Raw(b"null")  # the content of a question that asks for nothing

_T = TypeVar("_T")


class AcceptedElicitation(msgspec.Struct, Generic[_T], frozen=True):
    """The user has accepted: `data` is the content, as a value of the type that was asked for."""

    data: _T
    action: Literal["accept"] = "accept"


class DeclinedElicitation(msgspec.Struct, frozen=True):
    """The user has declined."""

    action: Literal["decline"] = "decline"


class CancelledElicitation(msgspec.Struct, frozen=True):
    """The user has closed the question without an answer."""

    action: Literal["cancel"] = "cancel"


ElicitationResult = AcceptedElicitation[_T] | DeclinedElicitation | CancelledElicitation


class Root(msgspec.Struct, frozen=True):
    """A folder or file that the client opens to the server."""

    uri: str
    name: str | None = None


class Sample(msgspec.Struct, frozen=True):
    """The answer of a model of the client.

    `content` has the blocks in their order; blocks of other types than text, image and audio are
    dicts, as on the wire.
    """

    content: list[Text | Image | Audio | dict[str, Any]]
    role: Role
    model: str
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """The text of all text blocks."""
        return "".join(block.text for block in self.content if isinstance(block, Text))


class _Elicited(msgspec.Struct):
    action: Literal["accept", "decline", "cancel"]
    content: msgspec.Raw = _NOTHING


class _Sampled(msgspec.Struct, rename="camel"):
    content: dict[str, Any] | list[dict[str, Any]]
    role: Role
    model: str = ""
    stop_reason: str | None = None


class _Roots(msgspec.Struct):
    roots: list[Root]


Prompt = str | Block | Mapping[str, Any]
"""A message of a sample: a text or a block of the user, or a message as on the wire."""


class SampleOptions(TypedDict, total=False):
    """The options of `Call.sample`; each is left out unless given."""

    system_prompt: str
    temperature: float
    stop_sequences: Sequence[str]
    model_preferences: Mapping[str, Any]  # as on the wire
    include_context: Literal["none", "thisServer", "allServers"]
    metadata: Mapping[str, Any]


_WIRE_NAMES: Final = {
    "system_prompt": "systemPrompt",
    "temperature": "temperature",
    "stop_sequences": "stopSequences",
    "model_preferences": "modelPreferences",
    "include_context": "includeContext",
    "metadata": "metadata",
}


def form_params(message: str, response_type: Any) -> dict[str, Any]:
    """The params of a question with a form. Raises `TypeError` for a type that is not flat."""
    if response_type is not None and not isinstance(response_type, Hashable):
        raise TypeError(
            f"response_type: expected a class, got {type(response_type).__name__}; send a schema "
            "of your own with call.request"
        )
    empty = {"type": "object", "properties": {}}
    schema = empty if response_type is None else form_of(response_type).schema
    return {"message": message, "requestedSchema": schema}


def elicited(answer: msgspec.Raw, response_type: Any) -> ElicitationResult[Any]:
    """The result of a question with a form. Raises `InvalidAnswer`."""
    found = _read(answer, _Elicited, ELICIT)
    if found.action == "accept":
        content = b"{}" if found.content == _NOTHING else bytes(found.content)
        data = None if response_type is None else form_of(response_type).read(content)
        return AcceptedElicitation(data)
    return DeclinedElicitation() if found.action == "decline" else CancelledElicitation()


def url_params(message: str, url: str, elicitation_id: str) -> dict[str, Any]:
    """The params of a question that the user answers at a URL."""
    return {"mode": "url", "message": message, "url": url, "elicitationId": elicitation_id}


def sample_params(
    prompts: Prompt | Sequence[Prompt], max_tokens: int, options: SampleOptions
) -> dict[str, Any]:
    """The params of a sample. Raises `TypeError` or `ValueError` for what cannot be sent."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    if unknown := options.keys() - _WIRE_NAMES.keys():
        raise TypeError(f"unknown options of a sample: {', '.join(sorted(unknown))}")
    listed = [prompts] if isinstance(prompts, str | Mapping | Block) else list(prompts)
    params = {"messages": [_prompt(each) for each in listed], "maxTokens": max_tokens}
    return params | {
        _WIRE_NAMES[name]: value for name, value in options.items() if value is not None
    }


def _prompt(given: Any) -> Any:
    if isinstance(given, Mapping):
        if not {"role", "content"} <= given.keys():
            raise ValueError(f"a message of a sample has role and content, not {sorted(given)}")
        return given
    if isinstance(given, str):
        return {"role": "user", "content": Text(given)}
    if isinstance(given, Block):
        return {"role": "user", "content": given}
    raise TypeError(
        f"a message of a sample is a str, a block or a dict, not {type(given).__name__}"
    )


def sampled(answer: msgspec.Raw) -> Sample:
    """The result of a sample. Raises `InvalidAnswer`."""
    found = _read(answer, _Sampled, SAMPLE)
    blocks = found.content if isinstance(found.content, list) else [found.content]
    return Sample([_block(each) for each in blocks], found.role, found.model, found.stop_reason)


def _block(given: dict[str, Any]) -> Any:
    kind = given.get("type")
    if kind not in ("text", "image", "audio"):
        return given
    try:
        return msgspec.convert(given, Text | Image | Audio, strict=True)
    except ValueError as error:
        raise InvalidAnswer(f"The client's answer to {SAMPLE} does not fit: {error}") from error


def roots(answer: msgspec.Raw) -> list[Root]:
    """The result of `roots/list`. Raises `InvalidAnswer`."""
    return _read(answer, _Roots, ROOTS).roots


def _read(answer: msgspec.Raw, kind: type[_T], method: str) -> _T:
    try:
        return messages.decode(answer, kind)
    except ValueError as error:
        raise InvalidAnswer(f"The client's answer to {method} does not fit: {error}") from error
