"""Prompts: messages for a model, which a user chooses by name and fills with arguments.

A function makes the messages. Its parameters are the arguments, which arrive as text. Its value
becomes the messages:

    str, a content block                      one message of the user
    UserMessage, AssistantMessage             this message
    {"role": …, "content": …}                 this message
    a list of these                           these messages
    any other value that is JSON              its JSON, as one message of the user
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, TypedDict, get_args

import msgspec

from streams.schemas.arguments import Callee, json_text, make_callee, name_of
from streams.schemas.content import Block, Icon, Role, Text
from streams.server.listing import icons_of

_BLOCK: Final = get_args(Block)
_BLOCK_TYPES: Final = ("text", "image", "audio", "resource", "resource_link")


class PromptMessage(msgspec.Struct, frozen=True):
    """A message of a prompt: of the user or of the assistant."""

    content: Any
    role: Role = "user"


class UserMessage(PromptMessage, frozen=True):
    """A message of the user. The content is a str or a content block."""


class AssistantMessage(PromptMessage, frozen=True):
    """A message of the assistant. The content is a str or a content block."""

    role: Literal["user", "assistant"] = "assistant"


class PromptSettings(TypedDict, total=False):
    """The keywords of `Server.prompt`. `DEFAULTS` has the values of those that are left out."""

    name: str | None  # by default the function's
    title: str | None
    description: str | None  # by default the docstring
    icons: Iterable[Icon] | None
    meta: dict[str, Any] | None


DEFAULTS: Final[PromptSettings] = {
    "name": None,
    "title": None,
    "description": None,
    "icons": None,
    "meta": None,
}


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """One prompt."""

    callee: Callee
    settings: PromptSettings

    @property
    def key(self) -> str:
        """The name."""
        return self.callee.name

    @property
    def description(self) -> str | None:
        """As it was given, or else the docstring."""
        given = self.settings["description"]
        return self.callee.description if given is None else given

    def shown(self) -> dict[str, Any]:
        """The entry in `prompts/list`."""
        settings, callee = self.settings, self.callee
        arguments = [
            {name: told for name in ("title", "description") if (told := schema.get(name))}
            | {"name": argument, "required": argument in callee.required}
            for argument, schema in callee.input_schema["properties"].items()
        ]
        entry = {
            "name": callee.name,
            "title": settings["title"],
            "description": self.description,
            "arguments": arguments,
            "icons": settings["icons"],
            "_meta": settings["meta"],
        }
        return {name: value for name, value in entry.items() if value is not None}

    def result(self, value: Any) -> dict[str, Any]:
        """The result of `prompts/get`. Raises `TypeError` for a value that is no message."""
        many = value if isinstance(value, list | tuple) else [value]
        told = {"messages": [_message(each) for each in many]}
        return told if self.description is None else {"description": self.description} | told


def make_prompt(function: Callable[..., Any], given: PromptSettings) -> Prompt:
    """Inspect a function once, and report here everything that is wrong with it.

    Raises `TypeError` for a function that cannot be a prompt and for an unknown setting,
    `ValueError` for a name that cannot be used.
    """
    if unknown := given.keys() - DEFAULTS.keys():
        raise TypeError(f"unknown settings of a prompt: {', '.join(sorted(unknown))}")
    if isinstance(function, str):
        raise TypeError(f"the name of a prompt is a setting: @server.prompt(name={function!r})")
    settings: PromptSettings = {**DEFAULTS, **given}
    name = settings["name"] or name_of(function, "prompt")
    what = f"prompt {name}"
    settings["icons"] = icons_of(settings["icons"], what)
    return Prompt(make_callee(function, name, what), settings)


def _message(value: Any) -> dict[str, Any]:
    if isinstance(value, PromptMessage):
        return {"role": _role(value.role), "content": _content(value.content)}
    if isinstance(value, dict) and value.keys() == {"role", "content"}:
        return {"role": _role(value["role"]), "content": _content(value["content"])}
    return {"role": "user", "content": _content(value)}


def _role(role: Any) -> str:
    if role not in get_args(Role):
        raise TypeError(f"the role of a message is 'user' or 'assistant', not {role!r}")
    return str(role)


def _content(value: Any) -> Any:
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, _BLOCK):
        return value
    if isinstance(value, dict) and value.get("type") in _BLOCK_TYPES:
        return value
    return Text(json_text(value))
