"""Questions of a server, answered at a terminal."""

import os
import pty
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from streams.cli.actions.questions import Questions


class Keyboard:
    """Standard input of this process as a terminal, at which a test types."""

    def __init__(self, master: int) -> None:
        self._master = master

    def type(self, *lines: str) -> None:
        for line in lines:
            os.write(self._master, f"{line}\n".encode())


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyboard]:
    master, slave = pty.openpty()
    with open(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield Keyboard(master)
    os.close(master)


def question(*required: str, **fields: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": fields, "required": list(required)}
    return {"message": "Well?", "requestedSchema": schema}


async def test_each_kind_of_field_has_its_answer(keyboard: Keyboard) -> None:
    keyboard.type("Ada", "36", "1.5", "yes", "2", "Blue")
    answer = await Questions().answer(
        question(
            *("name", "age", "size", "is_sure", "color", "shade"),
            name={"type": "string"},
            age={"type": "integer"},
            size={"type": "number"},
            is_sure={"type": "boolean"},
            color={"type": "string", "enum": ["r", "b"], "enumNames": ["Red", "Blue"]},
            shade={"oneOf": [{"const": "r", "title": "Red"}, {"const": "b", "title": "Blue"}]},
        )
    )
    content = {"name": "Ada", "age": 36, "size": 1.5, "is_sure": True, "color": "b", "shade": "b"}
    assert answer == {"action": "accept", "content": content}


@pytest.mark.parametrize(
    ("field", "wrong", "right", "value"),
    [
        ({"type": "integer"}, "1.5", "2", 2),
        ({"type": "integer", "minimum": 3}, "2", "3", 3),
        ({"type": "number", "maximum": 3}, "nan", "3", 3.0),
        ({"type": "number"}, "inf", "1e3", 1000.0),
        ({"type": "boolean"}, "perhaps", "n", False),
        ({"type": "string", "minLength": 3}, "ab", "abc", "abc"),
        ({"enum": ["red", "blue"]}, "green", "BLUE", "blue"),
        ({"enum": ["red", "blue"]}, "3", "1", "red"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, "a,c", "a, 2", ["a", "b"]),
        ({"type": "string"}, "", "x", "x"),
    ],
)
async def test_an_answer_that_does_not_fit_is_asked_for_again(
    keyboard: Keyboard,
    field: dict[str, Any],
    wrong: str,
    right: str,
    value: object,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keyboard.type(wrong, right)
    answer = await Questions().answer(question("it", it=field))
    assert answer == {"action": "accept", "content": {"it": value}}
    assert capsys.readouterr().err.count("it") >= 2


async def test_an_empty_answer_is_the_default_or_none(keyboard: Keyboard) -> None:
    keyboard.type("", "")
    fields = {"a": {"type": "integer", "default": 7}, "b": {"type": "string"}}
    answer = await Questions().answer(question("a", **fields))
    assert answer == {"action": "accept", "content": {"a": 7}}


@pytest.mark.parametrize("params", [{}, {"message": "?", "requestedSchema": 7}, question()])
@pytest.mark.parametrize(("typed", "action"), [("y", "accept"), ("n", "decline")])
async def test_a_question_without_fields_is_agreed_to(
    keyboard: Keyboard, params: dict[str, Any], typed: str, action: str
) -> None:
    keyboard.type(typed)
    assert (await Questions().answer(params))["action"] == action


async def test_ctrl_d_declines(keyboard: Keyboard) -> None:
    keyboard.type("x")
    os.write(keyboard._master, b"\x04")
    fields = {"a": {"type": "string"}, "b": {"type": "string"}}
    assert await Questions().answer(question("a", "b", **fields)) == {"action": "decline"}


async def test_a_server_cannot_steer_the_terminal(
    keyboard: Keyboard, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard.type("x")
    odd = {"type": "string", "title": "\x1b[2Ja\nb", "description": "\x1b]0;c\x07"}
    await Questions().answer({**question("it", it=odd), "message": "\x1b[31mWell\n?"})
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\x07" not in said
