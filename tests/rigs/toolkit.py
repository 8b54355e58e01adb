"""Types and tools for the tests of tools."""

import dataclasses
import enum
from typing import Annotated, Any, Generic, TypedDict, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from msgspec import Meta

from streams.server.tools import Tool, make_tool

# No test depends on the speed of the machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

V = TypeVar("V")


class Point(msgspec.Struct):
    x: int
    y: int = 0

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("X must not be negative")


class Node(msgspec.Struct):
    name: str
    children: list["Node"] = []


class Box(msgspec.Struct, Generic[V]):
    value: V


class Row(msgspec.Struct, array_like=True):
    x: int


@dataclasses.dataclass
class Report:
    rows: int
    average: Annotated[float, Meta(ge=0)] = 0.0


class Summary(TypedDict):
    rows: int


class Colour(enum.Enum):
    RED = "red"


class Markup(str):
    """As a library has it."""

    __slots__ = ()

    def __str__(self) -> str:
        return "not asked"


class Count(int):
    pass


class Mean(float):
    pass


class Digest(bytes):
    pass


# Values that msgspec does not encode by itself, and what they are as JSON.
SUBCLASSED: list[tuple[Any, str]] = [
    (Markup("<b>ä</b>"), '"<b>ä</b>"'),
    (Count(2**70), str(2**70)),
    (Mean(0.5), "0.5"),
    ([Markup("a"), {Markup("b"): Digest(b"c")}], '["a",{"b":"Yw=="}]'),
]


def a_tool(**settings: Any) -> Tool:
    def build():
        """Build."""

    return make_tool(build, **settings)


def returning(annotation: Any, **settings: Any) -> Tool:
    def build() -> None:
        """Build."""

    build.__annotations__["return"] = annotation
    return make_tool(build, **settings)


def taking(annotation: Any) -> Tool:
    def build(x: Any) -> None:
        """Build."""

    build.__annotations__["x"] = annotation
    return make_tool(build)


def why(tool: Tool, arguments: bytes) -> str:
    with pytest.raises(ValueError, match=r"^\S") as caught:
        tool.bind(arguments)
    return str(caught.value)


def text_of(result: dict[str, Any]) -> str:
    (block,) = result["content"]
    assert block["type"] == "text"
    return str(block["text"])
