"""Signatures of tools, whose schemas and behaviour are compared with the official SDK's.

A case lists the aspects in which mcp-streams differs, with the reason; in all others it must equal
the SDK. The table in docs/inside/signatures.md has the `CASES` that differ.
"""

# ruff: noqa: F401  # the signatures are strings

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypeVar,
    Union,
)

import mcp_types
import pydantic
from mcp.server.mcpserver import Image
from pydantic import AfterValidator, BaseModel, Field, PositiveInt, conint, constr
from typing_extensions import Doc, TypedDict

V = TypeVar("V")
UserId = NewType("UserId", int)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(9, ge=1, description="left")


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Home(BaseModel):
    pets: list[Cat | Dog] = []
    owner: "Owner | None" = None


class Owner(BaseModel):
    name: str = Field(alias="ownerName")


class Page(BaseModel, Generic[V]):
    items: list[V]
    total: int = 0


class Price(BaseModel):
    amount: decimal.Decimal


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@dataclasses.dataclass
class Line:
    start: Point
    end: Point


@dataclasses.dataclass
class Event:
    at: datetime.datetime
    others: tuple[datetime.time | None, ...] = ()


@dataclasses.dataclass
class Size:
    width: int


@pydantic.dataclasses.dataclass
class Order:
    number: Annotated[int, Field(ge=1)]


class Query(TypedDict):
    text: str
    limit: NotRequired[int]


class Limited(TypedDict):
    limit: Annotated[int, Field(le=10)]


class Span(NamedTuple):
    start: int
    end: int = 0


class Plain:
    number: int

    def __init__(self, number: int) -> None:
        self.number = number


@dataclasses.dataclass(frozen=True)
class Case:
    """One signature, with a call that succeeds and a call that is refused."""

    parameters: str
    returns: str
    good: dict[str, Any]
    bad: dict[str, Any] | None = None
    body: str = "x"  # the value that the tool returns
    differs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    docstring: str = ""
    future: bool = False  # whether annotations are strings

    @property
    def signature(self) -> str:
        """As the table shows it."""
        shown = f"({self.parameters})" + (f" -> {self.returns}" if self.returns else "")
        future = "from __future__ import annotations; " if self.future else ""
        return f"{future}{shown}" + (f'  """{self.docstring}"""' if self.docstring else "")

    def function(self) -> Callable[..., Any]:
        """The function of this signature, with the name `tool`."""
        returns = f" -> {self.returns}" if self.returns else ""
        lines = [
            *(["from __future__ import annotations"] if self.future else []),
            f"def tool({self.parameters}){returns}:",
            f"    {self.docstring!r}" if self.docstring else "    pass",
            f"    return {self.body}",
        ]
        namespace = dict(globals())
        exec("\n".join(lines), namespace)
        made: Callable[..., Any] = namespace["tool"]
        return made


CAT: Final = {"kind": "cat", "lives": 9}
DOG: Final = {"kind": "dog", "name": "Rex"}
ID: Final = "00000000-0000-0000-0000-000000000001"
MOMENT: Final = "2026-11-23T12:00:00Z"

STRICT: Final = "a string is no number, as the schema says"
TIME = "without a format, which a time without a zone would not fit"
DECIMAL: Final = "a string, as it is sent"
ENUM: Final = "the SDK has none for an enum alone"
ONE_TEXT: Final = "one text block; the SDK has one for each item"
PARAMETER_ALIAS: Final = "the SDK passes the alias, and Python refuses it"
FORWARD: Final = "the SDK does not resolve a string within an annotation"
REFUSED: Final = "refused, since arguments have names"

CASES: Final[Sequence[Case]] = (
    # Plain types
    Case("x: int", "int", {"x": 3}, {"x": "three"}),
    Case("x: int", "str", {"x": 3}, {"x": "3"}, "str(x)", {"bad": STRICT}),
    Case("x: str = 'a'", "str", {}, {"x": 3}),
    Case("x: float", "float", {"x": 0.5}, {"x": []}),
    Case("x: bool", "bool", {"x": True}, {"x": "perhaps"}),
    Case("x: Any", "Any", {"x": {"a": 1}}, {}, differs={"good": "an object is structured"}),
    Case("x", "", {"x": "a"}, {}, differs={"input": "any JSON; the SDK says string"}),
    Case("", "None", {}, None, "None"),
    Case("x: Optional[int]", "Optional[int]", {"x": None}, {"x": "a"}),
    Case("x: Optional[int] = None", "int | None", {}, {"x": "a"}),
    Case("x: int | str", "int | str", {"x": "a"}, {"x": []}),
    Case("x: Union[int, list[int]]", "Union[int, list[int]]", {"x": [1]}, {"x": "a"}),
    Case("x: Literal['a', 'b']", "Literal['a', 'b']", {"x": "a"}, {"x": "c"}),
    Case(
        "x: Colour", "Colour", {"x": "red"}, {"x": "green"}, differs={"output": ENUM, "good": ENUM}
    ),
    Case("x: Level = Level.LOW", "list[Level]", {"x": 2}, {"x": 3}, "[x]"),
    Case("x: list[str]", "list[str]", {"x": ["a"]}, {"x": [1]}),
    Case(
        "x: set[int]",
        "set[int]",
        {"x": [1]},
        {"x": ["a"]},
    ),
    Case("x: tuple[int, str]", "tuple[int, str]", {"x": [1, "a"]}, {"x": [1]}),
    Case("x: dict[str, int]", "dict[str, int]", {"x": {"a": 1}}, {"x": {"a": "b"}}),
    Case("x: dict[int, str]", "dict[int, str]", {"x": {"1": "a"}}, {"x": {"a": "a"}}),
    Case("x: list", "list", {"x": [1]}, {"x": 1}, differs={"good": ONE_TEXT}),
    Case("x: Sequence[int]", "Sequence[int]", {"x": [1]}, {"x": ["a"]}),
    Case("x: UserId", "UserId", {"x": 1}, {"x": "a"}),
    Case(
        "x: bytes",
        "bytes",
        {"x": "YQ=="},
        {"x": 3},
        differs={"input": "base64; the SDK takes the text", "output": "base64"},
    ),
    # Times, numbers, paths
    Case(
        "x: datetime.datetime",
        "list[datetime.datetime]",
        {"x": MOMENT},
        {"x": "soon"},
        "[x]",
        {"output": TIME},
    ),
    Case("x: datetime.date", "datetime.date", {"x": "2026-11-23"}, {"x": "soon"}),
    Case("x: uuid.UUID", "list[uuid.UUID]", {"x": ID}, {"x": "1"}, "[x]"),
    Case(
        "x: decimal.Decimal",
        "list[decimal.Decimal]",
        {"x": "1.50"},
        {"x": "much"},
        "[x]",
        {"input": DECIMAL, "output": DECIMAL},
    ),
    Case("x: Path", "Path", {"x": "/a"}, {"x": 3}),
    Case("x: datetime.datetime | None = None", "Order | None", {}, {"x": "soon"}),
    Case(
        "x: Event",
        "list[Event] | None",
        {"x": {"at": MOMENT}},
        {"x": {"at": "soon"}},
        "[x]",
        {"output": TIME},
    ),
    # Parameters
    Case("x: int, y: int = 2, *, z: int = 3", "list[int]", {"x": 1, "z": 4}, {"y": 1}, "[x, y, z]"),
    Case(
        "x: int = None",
        "int | None",
        {},
        {"x": "a"},
        differs={
            "input": "null is no int, so it is not listed",
        },
    ),
    Case("x: list[int] = []", "list[int]", {}, {"x": ["a"]}),
    Case("*x: int", "str", {}, None, differs={"refused": REFUSED}),
    Case("**x: int", "str", {}, None, differs={"refused": REFUSED}),
    Case("x: 'Point'", "'Point'", {"x": {"x": 1}}, {"x": {}}),
    Case(
        "x: list['Point']",
        "Optional['Point']",
        {"x": [{"x": 1}]},
        {"x": [{}]},
        "x[0]",
        {"accepted": FORWARD},
    ),
    Case(
        "x: Annotated['Cat', Field()]",
        "dict[str, 'Cat']",
        {"x": CAT},
        {"x": DOG},
        "{'a': x}",
        {"accepted": FORWARD},
    ),
    Case("x: list[Point]", "Point | None", {"x": [{"x": 1}]}, {"x": [{}]}, "x[0]", future=True),
    Case("x: Annotated[int, Field(ge=1)] = 1", "int", {}, {"x": 0}, future=True),
    # Dataclasses, TypedDict, NamedTuple, classes
    Case("x: Point", "Point", {"x": {"x": 1}}, {"x": {"x": "a"}}),
    Case("x: Line", "Line", {"x": {"start": {"x": 1}, "end": {"x": 2}}}, {"x": {"start": {}}}),
    Case("x: Point | Size", "Point | Size", {"x": {"width": 1}}, {"x": {}}),
    Case("x: Query", "Query", {"x": {"text": "a"}}, {"x": {}}),
    Case("x: Limited", "Limited", {"x": {"limit": 1}}, {"x": {"limit": 11}}),
    Case("x: Span", "Span", {"x": [1, 2]}, {"x": ["a"]}, differs={"good": ONE_TEXT}),
    Case("x: int", "Plain", {"x": 1}, {"x": "a"}, "Plain(x)"),
    # pydantic
    Case("x: Annotated[int, Field(ge=1)]", "int", {"x": 1}, {"x": 0}),
    Case("x: Annotated[int, Field(ge=1)]", "Annotated[int, Field(ge=1)]", {"x": 1}, {"x": 0}),
    Case("x: int = Field(3, description='how many')", "int", {}, {"x": "a"}),
    Case(
        "x: list[int] = Field(default_factory=list, max_length=2)",
        "list[int]",
        {},
        {"x": [1, 2, 3]},
    ),
    Case("x: str = Field(examples=['a'], pattern='^a')", "str", {"x": "a"}, {"x": "b"}),
    Case(
        "x: int = Field(alias='rowCount')",
        "int",
        {"rowCount": 3},
        {},
        differs={"good": PARAMETER_ALIAS},
    ),
    Case("x: PositiveInt", "PositiveInt", {"x": 1}, {"x": 0}),
    Case("x: conint(ge=1) | constr(min_length=2)", "int | str", {"x": "ab"}, {"x": "a"}),
    Case("x: Annotated[int, AfterValidator(abs)]", "int", {"x": -1}, {"x": "a"}),
    Case("x: Cat", "Cat", {"x": {"kind": "cat"}}, {"x": {"kind": "cow"}}),
    Case("x: Cat | None = None", "Cat | None", {}, {"x": {}}),
    Case("x: list[Cat]", "list[Cat]", {"x": [CAT]}, {"x": [DOG]}),
    Case("x: dict[str, Cat]", "dict[str, Cat]", {"x": {"a": CAT}}, {"x": {"a": DOG}}),
    Case("x: Cat | Dog", "Cat | Dog", {"x": DOG}, {"x": {"kind": "cow"}}),
    Case(
        "x: Annotated[Cat | Dog, Field(discriminator='kind')]",
        "Annotated[Cat | Dog, Field(discriminator='kind')]",
        {"x": DOG},
        {"x": {"kind": "dog"}},
    ),
    Case("x: Tree", "Tree", {"x": {"value": 1, "children": [{"value": 2}]}}, {"x": {}}),
    Case(
        "x: Home",
        "Home",
        {"x": {"pets": [CAT], "owner": {"ownerName": "Ann"}}},
        {"x": {"owner": {"name": "Ann"}}},
    ),
    Case("x: Page[Cat]", "Page[Cat]", {"x": {"items": [CAT]}}, {"x": {"items": [DOG]}}),
    Case("x: Page[int], y: Point", "Page[int]", {"x": {"items": [1]}, "y": {"x": 1}}, {"x": {}}),
    Case(
        "x: Order",
        "Order",
        {"x": {"number": 1}},
        {"x": {"number": 0}},
        differs={
            "output": "with its constraints",
        },
    ),
    Case("x: str", "Price", {"x": "1.50"}, {"x": 3}, "Price(amount=x)", {"output": DECIMAL}),
    # Descriptions
    Case(
        "x: Annotated[int, 'how many']",
        "int",
        {"x": 1},
        {},
        differs={
            "input": "described",
        },
    ),
    Case("x: Annotated[int, Doc('how many')]", "int", {"x": 1}, {}, differs={"input": "described"}),
    Case(
        "x: int",
        "int",
        {"x": 1},
        {},
        docstring="Make.\n\nArgs:\n    x: how many",
        differs={"input": "described", "description": "without the section `Args:`"},
    ),
    # Content and whole results
    Case("", "Image", {}, None, "Image(data=b'a', format='png')"),
    Case("", "list[str | Image]", {}, None, "['a', Image(data=b'a', format='png')]"),
    Case("", "list[Any]", {}, None, "['b', mcp_types.TextContent(type='text', text='a')]"),
    Case("", "mcp_types.TextContent", {}, None, "mcp_types.TextContent(type='text', text='a')"),
    Case(
        "",
        "mcp_types.CallToolResult",
        {},
        None,
        "mcp_types.CallToolResult(content=[], structured_content={'a': 1}, is_error=True)",
    ),
    Case(
        "",
        "Annotated[mcp_types.CallToolResult, Point]",
        {},
        None,
        "mcp_types.CallToolResult(content=[], structured_content={'x': 1, 'y': 0})",
    ),
)


_SHOWN: Final = {
    "good": "result",
    "bad": "wrong value",
    "refused": "decoration",
    "accepted": "decoration",
}


def table() -> str:
    """The table of the page: `python -m tests.sdk.signatures` prints it."""
    rows = ["| signature | differs from the official SDK |", "|---|---|"]
    for case in CASES:
        aspects: dict[str, list[str]] = {}
        for aspect, reason in case.differs.items():
            aspects.setdefault(reason, []).append(_SHOWN.get(aspect, aspect))
        if aspects:
            shown = " ".join(case.signature.split()).replace("|", "\\|")
            told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in aspects.items())
            rows.append(f"| `{shown}` | {told} |")
    equal = sum(not case.differs for case in CASES)
    return "\n".join([*rows, "", f"{equal} other signatures are tested, and do not differ."])


if __name__ == "__main__":
    print(table())
