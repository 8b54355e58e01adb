"""The result of a call as a type."""

from dataclasses import dataclass
from datetime import date
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from streams import CallToolResult, ClientError, ToolFailed
from tests.rigs.clients import Params, connected
from tests.rigs.scripted import Scripted, Stream


class Row(msgspec.Struct):
    at: date
    value: int


@dataclass
class Point:
    x: int
    y: int = 0


class Named(TypedDict):
    name: str


class Model(pydantic.BaseModel):
    number: int = pydantic.Field(ge=1)


@dataclass
class Holder:
    models: list[Model]


def text(*texts: str) -> Params:
    return {"content": [{"type": "text", "text": each} for each in texts]}


def structured(value: Any) -> Params:
    return text("for people") | {"structuredContent": value}


async def result_of(result: Params, *shape: Any) -> Any:
    server = Scripted()

    async def give(stream: Stream) -> Params:
        return result

    server.tools["give"] = give
    raised: Exception | None = None
    async with connected(server) as client:
        try:
            async with client.call("give") as call:
                value = await call.result(*shape)
            if shape:
                assert await client.call_tool("give", type=shape[0]) == value
        except Exception as error:
            raised = error  # the server of the test would put it into a group
    if raised is not None:
        raise raised
    return value


@pytest.mark.parametrize(
    ("result", "shape", "value"),
    [
        (structured({"at": "2026-11-23", "value": 1}), Row, Row(date(2026, 11, 23), 1)),
        (structured({"x": 1}), Point, Point(1)),
        (structured({"name": "a"}), Named, {"name": "a"}),
        (structured({"number": 3}), Model, Model(number=3)),
        (structured({"result": [{"number": 3}]}), list[Model], [Model(number=3)]),
        (structured({"result": {"number": 3}}), Model | None, Model(number=3)),
        (structured({"result": None}), Model | None, None),
        (structured({"models": [{"number": 3}]}), Holder, Holder([Model(number=3)])),
        (structured({"result": [1, 2]}), list[int], [1, 2]),
        (structured({"result": "a"}), str, "a"),
        (structured({"result": 1}), dict[str, int], {"result": 1}),
        (structured({"result": 1}), int, 1),
        (structured({"a": 1}), dict, {"a": 1}),
        (text("[1, 2]"), list[int], [1, 2]),
        (text("3"), int, 3),
        (text("3"), str, "3"),
        (text("a", "b"), str, "a\nb"),
        (text() | {"structuredContent": None}, str, ""),
    ],
)
async def test_a_value_comes_as_the_type_that_is_asked_for(
    result: Params, shape: Any, value: Any
) -> None:
    assert await result_of(result, shape) == value


@pytest.mark.parametrize(
    ("result", "shape", "why"),
    [
        (structured({"x": "1"}), Point, "Expected `int`, got `str`"),
        (structured({"number": 0}), Model, "greater than or equal to 1"),
        (structured({"result": ["1"]}), list[int], "Expected `int`, got `str`"),
        (structured([1]), dict[str, int], "Expected `object`, got `array`"),
        (text("three"), int, "malformed"),
        (text("1", "2"), int, "2 text blocks in place of one"),
        (text(), int, "0 text blocks in place of one"),
        ({"content": 3}, str, "Expected `array`, got `int`"),
        (text("1") | {"isError": "no"}, str, "Expected `bool`, got `str`"),
    ],
)
async def test_another_value_is_an_error_that_says_what_does_not_fit(
    result: Params, shape: Any, why: str
) -> None:
    with pytest.raises(ClientError, match=why) as failed:
        await result_of(result, shape)
    assert str(failed.value).startswith("The result of give does not fit: ")


async def test_a_failed_tool_raises_where_its_value_is_asked_for_and_only_there() -> None:
    failed = text("no", "really") | {
        "isError": True,
        "structuredContent": {"x": 1},
        "_meta": {"a": 1},
    }
    for shape in (str, Point, dict[str, Any]):
        with pytest.raises(ToolFailed, match="no\nreally") as raised:
            await result_of(failed, shape)
        assert raised.value.result.content == failed["content"]
    assert await result_of(failed) == failed
    whole = await result_of(failed, CallToolResult)
    assert (whole.is_error, whole.text, whole.structured_content) == (True, "no\nreally", {"x": 1})
    assert whole.meta == {"a": 1}
    with pytest.raises(ToolFailed, match="did not say why"):
        await result_of({"content": [], "isError": True}, str)


async def test_a_type_that_json_cannot_be_decoded_into_is_the_callers_mistake() -> None:
    with pytest.raises(TypeError, match="is no type that JSON can be decoded into"):
        await result_of(structured({}), Scripted)
