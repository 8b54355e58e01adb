"""Tools with annotations for pydantic."""

import dataclasses
import datetime
import decimal
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
)

import jsonschema
import msgspec
import pytest
from annotated_types import Ge
from msgspec import Meta
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    computed_field,
    conint,
    constr,
    create_model,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypeAliasType

from streams.schemas.models import ModelReader
from streams.server.tools import make_tool, to_result
from tests.rigs.toolkit import Point, returning, taking, text_of, why

V = TypeVar("V")
Count = NewType("Count", int)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(9, ge=1)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Unfinished(BaseModel):
    part: "Missing"  # noqa: F821  # what is tested


class And(BaseModel):
    left: "And | Or | None" = None


class Or(BaseModel):
    left: "And | Or | None" = None


class Leaf(BaseModel):
    op: Literal["leaf"]


class Either(BaseModel):
    op: Literal["or"]
    left: "Expression"
    right: "Expression"


Expression = Annotated[Leaf | Either, Field(discriminator="op")]
Either.model_rebuild()
Json = TypeAliasType("Json", "dict[str, Json] | list[Json] | int")


class Page(BaseModel, Generic[V]):
    items: list[V]


class Query(TypedDict):
    limit: Annotated[int, Field(ge=1)]
    cat: NotRequired[Cat]


class Span(NamedTuple):
    start: Annotated[int, Field(ge=0)]
    end: int = 0


@pydantic_dataclass
class Order:
    number: Annotated[int, Field(ge=1)]


@dataclasses.dataclass
class Plain:
    cat: Cat


@dataclasses.dataclass
class Left:
    a: int


@dataclasses.dataclass
class Right:
    b: int


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
CAT, DOG = {"kind": "cat", "lives": 9}, {"kind": "dog", "name": "Rex"}
WRONG = [""] * 2_000
MOMENT = "2026-11-23T12:00:00Z"


class TestArguments:
    @pytest.mark.parametrize(
        ("annotation", "good", "bad", "sentence"),
        [
            (Annotated[int, Field(ge=1)], 1, 0, "x: Input should be greater than or equal to 1"),
            (Annotated[int, Field(ge=1)] | None, None, 0, "x: Input should be greater than or "),
            (list[Annotated[int, Field(ge=1)]], [1], [1, 0], r"x\[1\]: Input should be greater"),
            (Annotated[int, Ge(1)], 1, 0, "x: Input should be greater"),
            (Annotated[int, Field(ge=1), Meta(le=3)], 3, 4, "x: Input should be less than or"),
            (conint(ge=1), 1, 0, "x: Input should be greater"),
            (constr(pattern="^a+$"), "aa", "b", "x: String should match pattern"),
            (PositiveInt, 1, 0, "x: Input should be greater than 0"),
            (Cat, CAT, {}, "x.kind: missing"),
            (Cat, CAT, {"kind": "cat", "lives": 0}, "x.lives: Input should be greater"),
            (Pet, DOG, {"kind": "dog"}, "x.name: missing"),
            (Pet, CAT, {"kind": "cow"}, "x: Input tag 'cow' found using 'kind'"),
            (Cat | Dog, DOG, {"kind": "dog"}, "x.kind: Input should be 'cat'; x.name: missing"),
            (list[Pet], [CAT, DOG], [CAT, 3], r"x\[1\]: "),
            (dict[str, Cat], {"a": CAT}, {"a": {}}, "x.a.kind: missing"),
            (Tree, {"value": 1, "children": []}, {"value": "a"}, "x.value: "),
            (Page[Cat], {"items": [CAT]}, {"items": [{}]}, r"x.items\[0\].kind: missing"),
            (Query, {"limit": 1}, {"limit": 0}, "x.limit: Input should be greater"),
            (list[Query], [{"limit": 1, "cat": CAT}], [{"limit": 0}], r"x\[0\].limit: Input"),
            (Span, [1, 2], [-1], "x"),
            (Order, {"number": 1}, {"number": 0}, "x.number: Input should be greater"),
            (Plain, {"cat": CAT}, {"cat": {}}, "x.cat.kind: missing"),
            (Left | Right, {"b": 1}, {"c": 1}, "x.a: missing"),
            (Path, "/a", 3, "x: Input is not a valid path"),
            (datetime.datetime | uuid.UUID, MOMENT, True, "x: Input should be a valid datetime"),
            (Annotated[Count, Field(ge=1)], 1, 0, "x: Input should be greater"),
        ],
    )
    def test_pydantic_validates_what_is_for_pydantic(
        self, annotation: Any, good: Any, bad: Any, sentence: str
    ) -> None:
        tool = taking(annotation)
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        tool.bind(json.dumps({"x": good}).encode())
        jsonschema.validate({"x": good}, tool.input_schema)
        with pytest.raises(ValueError, match=f"^{sentence}"):
            tool.bind(json.dumps({"x": bad}).encode())

    def test_values_come_as_the_authors_types(self) -> None:
        def build(pet: Pet, at: datetime.datetime, query: Query, point: Point) -> None: ...

        sent = {"pet": CAT, "at": MOMENT, "query": {"limit": 1, "cat": CAT}, "point": {"x": 1}}
        bound = make_tool(build).bind(json.dumps(sent).encode())
        assert bound["pet"] == Cat(kind="cat")
        assert bound["at"] == datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
        assert bound["query"] == {"limit": 1, "cat": Cat(kind="cat")}
        assert bound["point"] == Point(1)

    def test_a_field_may_be_the_default(self) -> None:
        def build(
            a: int = Field(3),
            b: int = Field(description="how many"),
            c: list[int] = Field(default_factory=list),  # noqa: B008
            d: int = Field(default_factory=lambda data: data["a"] + data["b"]),
        ) -> None: ...

        def ordered(a: int, b: int = Field(default_factory=lambda data: data["a"])) -> None: ...

        tool = make_tool(build)
        assert tool.input_schema["required"] == ["b"]
        assert tool.input_schema["properties"]["a"]["default"] == 3
        assert tool.input_schema["properties"]["b"]["description"] == "how many"
        assert why(tool, b"{}") == "b: missing"
        assert tool.bind(b'{"b":1}') == {"a": 3, "b": 1, "c": [], "d": 4}
        assert make_tool(ordered).bind(b'{"a":7}') == {"a": 7, "b": 7}

    def test_a_given_schema_leaves_the_default_of_a_field(self) -> None:
        def build(
            a: int = Field(3),
            b: int = Field(description="how many"),
            c: list[int] = Field(default_factory=list),  # noqa: B008
        ) -> None: ...

        tool = make_tool(build, input_schema={"type": "object"})
        assert tool.bind(b'{"b":1}') == {"a": 3, "b": 1, "c": []}
        assert why(tool, b"{}") == "b: missing"

    def test_both_places_of_a_field_count(self) -> None:
        def build(a: Annotated[int, Field(ge=1)] = Field(3, description="how many")) -> None: ...

        tool = make_tool(build)
        node = tool.input_schema["properties"]["a"]
        assert (node["minimum"], node["default"], node["description"]) == (1, 3, "how many")
        assert tool.bind(b"{}") == {"a": 3}
        assert why(tool, b'{"a":0}').startswith("a: Input should be greater")

    def test_a_call_cannot_change_the_defaults_of_the_next(self) -> None:
        def build(
            a: Annotated[list[int], Field(max_length=3)] = [],  # noqa: B006
            b: list[int] = Field(default_factory=list),  # noqa: B008
        ) -> None: ...

        tool = make_tool(build)
        bound = tool.bind(b"{}")
        bound["a"].append(1)
        bound["b"].append(1)
        assert tool.bind(b"{}") == {"a": [], "b": []}

    def test_an_alias_is_the_name_of_the_argument(self) -> None:
        def build(
            rows: Annotated[int, Field(alias="rowCount")],
            title: str = Field("none", validation_alias=AliasChoices("title", "name")),
        ) -> None: ...

        tool = make_tool(build)
        assert list(tool.input_schema["properties"]) == ["rowCount", "title"]
        assert tool.input_schema["required"] == ["rowCount"]
        assert tool.bind(b'{"rowCount":3}') == {"rows": 3, "title": "none"}
        assert tool.bind(b'{"rowCount":3,"name":"a"}') == {"rows": 3, "title": "a"}
        assert why(tool, b'{"rows":3}') == "rows: unknown argument"
        assert why(tool, b"{}") == "rowCount: missing"

    def test_parameters_may_have_any_name(self) -> None:
        names = ["self", "schema", "copy", "model_config", "json", "_meta", "p0", "__init__"]
        namespace: dict[str, Any] = {"Small": Annotated[int, Field(le=9)]}
        exec(f"def build(first, {', '.join(f'{name}: Small' for name in names)}): ...", namespace)
        tool = make_tool(namespace["build"])
        sent: dict[str, Any] = dict.fromkeys(["first", *names], 1)
        assert tool.bind(msgspec.json.encode(sent)) == sent
        assert list(tool.input_schema["properties"]) == ["first", *names]

    def test_each_parameter_has_one_reader(self) -> None:
        def build(rows: int, pet: Cat, limit: Annotated[int, Meta(ge=1)] = 1) -> None: ...

        tool = make_tool(build)
        pet = json.dumps(CAT)
        assert why(tool, f'{{"rows":"3","pet":{pet}}}'.encode()) == "rows: expected int, got str"
        assert why(tool, f'{{"rows":3,"pet":{pet},"limit":0}}'.encode()) == (
            "limit: expected int >= 1"
        )
        assert why(tool, b'{"rows":3,"pet":{},"more":1}') == "more: unknown argument"
        assert why(tool, b'{"rows":3}') == "pet: missing"
        assert why(tool, b"[]") == "arguments: expected object, got array"

    def test_definitions_of_one_name_stay_apart(self) -> None:
        other = msgspec.defstruct("Cat", [("claws", int)])

        def build(a: Any, b: Cat, c: Any) -> None: ...

        build.__annotations__ |= {"a": other, "c": list[Cat]}
        schema = make_tool(build).input_schema
        jsonschema.validate({"a": {"claws": 1}, "b": CAT, "c": [CAT]}, schema)
        for wrong in ({"a": CAT, "b": CAT, "c": []}, {"a": {"claws": 1}, "b": {}, "c": []}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, schema)

    def test_an_authors_validators_run(self) -> None:
        def even(value: int) -> int:
            if value % 2:
                raise ValueError("give an even number")
            return value * 10

        tool = taking(Annotated[int, AfterValidator(even)])
        assert tool.bind(b'{"x":2}') == {"x": 20}
        assert why(tool, b'{"x":1}') == "x: give an even number"
        split = taking(Annotated[list[str], BeforeValidator(lambda text: text.split(","))])
        assert split.bind(b'{"x":"a,b"}') == {"x": ["a", "b"]}

    def test_a_description_is_not_for_pydantic(self) -> None:
        class Doc:
            documentation = "how many"

        tool = taking(Annotated[int, Doc()])
        assert "title" not in tool.input_schema["properties"]["x"]

    @pytest.mark.parametrize(
        ("annotation", "sentence"),
        [
            (Annotated[list[Point], Field(min_length=1)], "msgspec.Struct Point; make it a data"),
            (Annotated[Callable[[], int], Field()], "use a type that JSON has"),
            (dict[str, Annotated[type, Field()]], "use a type that JSON has"),
            (Annotated[int, Field(validation_alias=AliasPath("a", "b"))], "drop the AliasPath"),
            (Unfinished, "`Unfinished` is not fully defined"),
            (Annotated[str, Field(pattern="(?=a)b")], "use a type that JSON has"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name(self, annotation: Any, sentence: str) -> None:
        with pytest.raises(TypeError, match=rf"^tool build: x: [^\n]*{sentence}"):
            taking(annotation)

    def test_two_arguments_of_one_name_are_refused(self) -> None:
        def build(a: int, b: Annotated[int, Field(alias="a")]) -> None: ...

        with pytest.raises(TypeError, match=r"^tool build: b: another argument has the name a"):
            make_tool(build)

    async def test_an_error_of_the_authors_code_is_no_crash(self) -> None:
        def fail(value: int) -> int:
            raise KeyError("gone")

        assert "gone" in why(taking(Annotated[int, AfterValidator(fail)]), b'{"x":1}')


class TestHostileArguments:
    @pytest.mark.parametrize(
        ("annotation", "sent", "sentence"),
        [
            (Annotated[list[int], Field(min_length=1)], WRONG, r"x\[0\]: Input"),
            (dict[str, PositiveInt], dict.fromkeys(map(str, range(2_000)), ""), "x.0: Input"),
            (Page[int], {"items": WRONG}, r"x.items\[0\]: Input"),
            (Dog | Page[int], {"items": WRONG}, r"x.kind: missing; .*; x.items\[0\]: Input"),
            (list[Page[int]], [{"items": WRONG}] * 3, r"x\[0\].items\[0\]: Input"),
        ],
    )
    def test_a_list_of_wrong_values_is_one_error(
        self, annotation: Any, sent: Any, sentence: str
    ) -> None:
        # Millions of errors would take seconds and a gigabyte.
        told = why(taking(annotation), json.dumps({"x": sent}).encode())
        assert re.match(sentence, told)
        assert "more" not in told

    def test_more_errors_than_can_be_told_are_counted(self) -> None:
        fields: Any = {f"f{number}": (int, ...) for number in range(2_000)}
        told = why(taking(create_model("Wide", **fields)), b'{"x":{}}')
        assert told == "arguments: 2000 values do not fit: see the schema"

    def test_a_union_that_refers_to_itself_has_a_bound(self) -> None:
        tool = taking(And | Or)
        deep = '{"x":' + '{"left":' * 40 + "null" + "}" * 41
        assert "refers to itself by a union without a discriminator" in why(tool, deep.encode())
        tool.bind(('{"x":' + '{"left":' * 8 + "null" + "}" * 9).encode())
        tool.bind(b'{"x":' + b'{"left":' * 2 + b"null" + b"}" * 3)

    def test_one_value_has_the_same_bounds(self) -> None:
        reader = ModelReader(And, "params")
        with pytest.raises(ValueError, match=r"^params: too many levels"):
            reader.read(b'{"left":' * 40 + b"null" + b"}" * 40)
        with pytest.raises(ValueError, match=r"^items\[0\]: Input[^;]*$"):
            ModelReader(Page[int], "params").read(json.dumps({"items": WRONG}).encode())

    def test_a_type_that_refers_to_itself_alone_has_no_bound(self) -> None:
        tool = taking(Tree)
        value: dict[str, Any] = {"value": 1}
        for _ in range(50):
            value = {"value": 1, "children": [value, {"value": 2}]}
        tool.bind(json.dumps({"x": value}).encode())

    @pytest.mark.parametrize("annotation", [Expression, Json])
    def test_a_union_that_can_be_told_apart_has_no_bound(self, annotation: Any) -> None:
        tool = taking(annotation)
        value: Any = {"op": "leaf"} if annotation is Expression else 1
        for _ in range(30):
            if annotation is Expression:
                value = {"op": "or", "left": value, "right": {"op": "leaf"}}
            else:
                value = {"a": [value, 2, {"b": 3}]}
        tool.bind(json.dumps({"x": value}).encode())

    def test_what_is_nested_too_deeply_is_told(self) -> None:
        tool = taking(Annotated[Any, Field(description="anything")])
        assert why(tool, b'{"x":' + b"[" * 900 + b"]" * 900 + b"}") == (
            "arguments: nested too deeply"
        )
        assert "nested too deeply" in why(tool, b'{"x":' + b"[" * 100_000)


class Priced(BaseModel):
    model_config = ConfigDict(extra="forbid")
    price: decimal.Decimal
    unitName: str = Field("kg", alias="unit")  # noqa: N815

    @computed_field
    def double(self) -> str:
        return str(self.price * 2)


class TestResults:
    @pytest.mark.parametrize(
        ("annotation", "value", "structured"),
        [
            (Cat, Cat(kind="cat"), CAT),
            (Cat, CAT, CAT),
            (Pet, Dog(kind="dog", name="Rex"), {"result": DOG}),
            (Cat | None, None, {"result": None}),
            (list[Cat], [Cat(kind="cat")], {"result": [CAT]}),
            (dict[str, Cat], {"a": Cat(kind="cat")}, {"a": CAT}),
            (dict[int, Cat], {1: Cat(kind="cat")}, {"result": {"1": CAT}}),
            (Tree, Tree(value=1), {"value": 1, "children": []}),
            (Page[Cat], Page[Cat](items=[Cat(kind="cat")]), {"items": [CAT]}),
            (Order, Order(number=1), {"number": 1}),
            (Query, {"limit": 1}, {"limit": 1}),
            (Plain, Plain(Cat(kind="cat")), {"cat": CAT}),
            (Left | Right, Right(1), {"result": {"b": 1}}),
            (Annotated[int, Field(ge=1)], 1, {"result": 1}),
            (list[Path], [Path("/a")], {"result": ["/a"]}),
            (list[uuid.UUID | int], [uuid.UUID(int=1)], {"result": [str(uuid.UUID(int=1))]}),
            (
                Priced,
                Priced(price=decimal.Decimal("1.50"), unit="g"),
                {"price": "1.50", "unit": "g", "double": "3.00"},
            ),
        ],
    )
    def test_a_model_is_structured_content(
        self, annotation: Any, value: Any, structured: dict[str, Any]
    ) -> None:
        tool = returning(annotation)
        result = to_result(value, tool)
        assert result["structuredContent"] == structured
        assert tool.output_schema is not None
        assert tool.output_schema["type"] == "object"
        jsonschema.validate(structured, tool.output_schema)
        if value is not None:
            shown = json.loads(text_of(result))
            assert shown == (structured.get("result") if "result" in structured else structured)

    @pytest.mark.parametrize(
        ("annotation", "value", "sentence"),
        [
            (Cat, {}, "kind: missing"),
            (Cat, 3, "result: Input should be a valid dictionary"),
            (list[Cat], [{}], r"\[0\].kind: missing"),
            (Cat, Cat.model_construct(kind="cow", lives=1), "kind: "),
            (Annotated[int, Field(ge=1)], 0, "result: Input should be greater"),
        ],
    )
    def test_what_does_not_fit_is_told(self, annotation: Any, value: Any, sentence: str) -> None:
        with pytest.raises(ValueError, match=f"^tool build broke its output schema: {sentence}"):
            to_result(value, returning(annotation))

    def test_a_subclass_keeps_its_fields(self) -> None:
        class Lion(Cat):
            mane: bool

        made = to_result(Lion(kind="cat", mane=True), returning(Cat))
        assert made["structuredContent"] == CAT | {"mane": True}

    @pytest.mark.parametrize("value", [Cat(kind="cat"), {"pet": Cat(kind="cat")}, Order(number=1)])
    def test_a_model_needs_no_annotation(self, value: Any) -> None:
        result = to_result(value, returning(Any))
        assert json.loads(text_of(result)) == result["structuredContent"]

    @pytest.mark.parametrize(
        "annotation", [Annotated[Callable[[], int], Field()], list[Annotated[type, Field()]]]
    )
    def test_what_cannot_work_is_refused(self, annotation: Any) -> None:
        with pytest.raises(TypeError, match=r"^tool build: return annotation: [^\n]*; use a type"):
            returning(annotation)


class TestWithoutPydantic:
    def run(self, code: str, *, blocked: bool = False) -> str:
        block = "import sys; sys.modules.update(pydantic=None, pydantic_core=None)\n"
        done = subprocess.run(
            [sys.executable, "-c", (block if blocked else "import sys\n") + code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    PLAIN = (
        "from streams.server.tools import make_tool\n"
        "def f(rows: int, tags: list[str] = []) -> dict[str, int]: return {'rows': rows}\n"
        "tool = make_tool(f)\n"
        "tool.bind(b'{\"rows\": 1}')\n"
    )

    def test_it_is_not_imported_for_plain_types(self) -> None:
        assert self.run(self.PLAIN + "print('pydantic' in sys.modules)").strip() == "False"
        assert self.run(self.PLAIN + "print('fine')", blocked=True).strip() == "fine"

    @pytest.mark.parametrize("annotation", ["datetime.datetime | str", "Annotated[int, Ge(1)]"])
    @pytest.mark.parametrize("place", ["x: {}", ") -> ({}"])
    def test_what_needs_it_says_so(self, annotation: str, place: str) -> None:
        code = (
            "import datetime\nfrom typing import Annotated\nfrom annotated_types import Ge\n"
            "from streams.server.tools import make_tool\n"
            f"def f({place.format(annotation)}): ...\nmake_tool(f)"
        )
        told = self.run(code, blocked=True)
        assert re.search("TypeError: tool f: (x|return annotation): ", told)
        assert ", or install pydantic 2" in told
