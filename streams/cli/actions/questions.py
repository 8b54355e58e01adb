"""Questions of a server for the user, answered at the terminal: `elicitation/create`.

The answer to a question of the form is an object of strings, numbers, booleans and choices. Input
is read from the terminal without a thread, so that Ctrl-C detaches from the call meanwhile: the
question then comes again with the resume.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import trio

from streams.cli.actions.output import Display, harmless, one_line, say

READ_BYTES: Final = 4096  # a terminal gives no longer lines
FIELDS_MAX: Final = 50  # of one question

_YES: Final = ("y", "yes", "true", "1")
_NO: Final = ("n", "no", "false", "0")


class Declined(Exception):
    """The user has pressed Ctrl-D."""


def can_ask() -> bool:
    """Whether there is a user to ask: a terminal for questions and answers."""
    return all(each is not None and each.isatty() for each in (sys.stdin, sys.stderr))


class Questions:
    """Asks the user, one question at a time. `display` is paused meanwhile."""

    def __init__(self) -> None:
        self.display: Display | None = None
        self._turn = trio.Lock()

    async def answer(self, params: dict[str, Any]) -> dict[str, Any]:
        """The handler of `elicitation/create`."""
        async with self._turn:
            if self.display is not None:
                self.display.pause()
            try:
                return await _answered(params)
            finally:
                if self.display is not None:
                    self.display.go_on()


async def _answered(params: dict[str, Any]) -> dict[str, Any]:
    say(f"The server asks: {one_line(str(params.get('message', '')))}")
    schema = params.get("requestedSchema")
    fields = schema.get("properties") if isinstance(schema, dict) else None
    required = schema.get("required", ()) if isinstance(schema, dict) else ()
    try:
        if params.get("mode") == "url":
            say(f"It asks you to open {one_line(str(params.get('url')))}")
        if not isinstance(fields, dict) or not fields:
            agrees = await _value("Agree?", {"type": "boolean"}, is_required=True)
            return {"action": "accept", "content": {}} if agrees else {"action": "decline"}
        say("(Ctrl-D declines.)")
        content: dict[str, Any] = {}
        for name, field in list(fields.items())[:FIELDS_MAX]:
            about = field if isinstance(field, dict) else {}
            given = await _value(_label(name, about), about, is_required=name in required)
            if given is not None:
                content[name] = given
    except Declined:
        return {"action": "decline"}
    return {"action": "accept", "content": content}


def _label(name: str, field: Mapping[str, Any]) -> str:
    words = [str(field.get("title") or name)]
    if field.get("description"):
        words.append(f"({field['description']})")
    return " ".join(words)


async def _value(label: str, field: Mapping[str, Any], *, is_required: bool) -> Any:
    """Ask until the answer fits; None for no answer to what is not required."""
    choices, titles = _choices(field)
    is_many = field.get("type") == "array"
    for number, title in enumerate(titles, 1):
        say(f"  {number}. {one_line(title)}")
    default = field.get("default")
    hints = {"boolean": "y/n"}.get(str(field.get("type")), "")
    if choices:
        hints = "numbers, separated by commas" if is_many else "a number or a word"
    shown = ", ".join(filter(None, [hints, "" if default is None else f"default {default}"]))
    prompt = one_line(label) + (f" [{shown}]" if shown else "") + (":" if label[-1:] != "?" else "")
    while True:
        text = (await _line(f"{prompt} ")).strip()
        if not text:
            if default is not None or not is_required:
                return default
            say("An answer is required.")
            continue
        try:
            if is_many:
                return [_chosen(each.strip(), choices, titles) for each in text.split(",")]
            return _chosen(text, choices, titles) if choices else _parsed(text, field)
        except ValueError as error:
            say(f"{error}.")


def _choices(field: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[str]]:
    """The values to choose from, and their titles, of the shapes that MCP allows."""
    items = field.get("items")
    about = items if isinstance(items, dict) else field
    for key in ("oneOf", "anyOf"):
        if isinstance(options := about.get(key), list):
            found = [each for each in options if isinstance(each, dict) and "const" in each]
            return (
                [each["const"] for each in found],
                [str(each.get("title", each["const"])) for each in found],
            )
    values = about.get("enum")
    if not isinstance(values, list):
        return (), ()
    names = about.get("enumNames")
    if not isinstance(names, list) or len(names) != len(values):
        names = values
    return values, [str(each) for each in names]


def _chosen(text: str, choices: Sequence[Any], titles: Sequence[str]) -> Any:
    for value, title in zip(choices, titles, strict=True):
        if text.casefold() in (str(value).casefold(), title.casefold()):
            return value
    if text.isdecimal() and 1 <= int(text) <= len(choices):
        return choices[int(text) - 1]
    raise ValueError(f"{text}: write one of {', '.join(titles)}, or its number")


def _parsed(text: str, field: Mapping[str, Any]) -> Any:
    match field.get("type"):
        case "boolean":
            if text.lower() in (*_YES, *_NO):
                return text.lower() in _YES
            raise ValueError(f"{text}: write y or n")
        case "integer" | "number" as kind:
            return _number(text, field, kind)
        case _:
            most, least = field.get("maxLength", math.inf), field.get("minLength", 0)
            if not least <= len(text) <= most:
                raise ValueError(f"Write {least} to {most} letters")
            return text


def _number(text: str, field: Mapping[str, Any], kind: str) -> int | float:
    try:
        value = int(text) if kind == "integer" else float(text)
    except ValueError:
        raise ValueError(
            f"{text}: write {'a whole' if kind == 'integer' else 'a'} number"
        ) from None
    least, most = field.get("minimum", -math.inf), field.get("maximum", math.inf)
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{text}: write a number from {least} to {most}")
    return value


async def _line(prompt: str) -> str:
    """One line from the terminal. Raises `Declined` at the end of the input."""
    print(harmless(prompt), end="", file=sys.stderr, flush=True)
    fd = sys.stdin.fileno()
    line = b""
    while not line.endswith(b"\n"):
        await trio.lowlevel.wait_readable(fd)
        data = os.read(fd, READ_BYTES)  # a terminal gives at most a line
        if not data:
            say("")
            raise Declined
        line += data
    return line.decode(errors="replace")
