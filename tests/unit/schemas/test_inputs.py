"""Schemas of tools, and the checks of arguments against them."""

import contextlib
import datetime
import math
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mcp_types import _v2025_11_25 as mcp
from msgspec import Meta

from streams.server.tools import Tool, listing, make_tool
from tests.rigs.toolkit import Colour, Node, Point, a_tool, patient, taking, why


class TestArgumentsFromAnnotations:
    def build(
        self,
        rows: Annotated[int, Meta(ge=1, description="how many")],
        title: Annotated[str, Meta(max_length=3)] = "",
        point: Point | None = None,
        counts: dict[int, list[int]] = {},  # noqa: B006  # what is tested
        colour: Colour = Colour.RED,
        kind: Literal["a", 1] = "a",
        id: uuid.UUID | None = None,
        anything: Any = None,
    ) -> None: ...

    @pytest.fixture
    def tool(self) -> Tool:
        return make_tool(self.build)

    def test_values_come_in_their_annotated_types(self, tool: Tool) -> None:
        sent = (
            b'{"rows":2,"title":"abc","point":{"x":1},"counts":{"7":[8]},"colour":"red","kind":1,'
            b'"id":"00000000-0000-0000-0000-000000000001"}'
        )
        assert tool.bind(msgspec.Raw(sent)) == {
            "rows": 2,
            "title": "abc",
            "point": Point(1),
            "counts": {7: [8]},
            "colour": Colour.RED,
            "kind": 1,
            "id": uuid.UUID(int=1),
            "anything": None,
        }

    @pytest.mark.parametrize(
        ("sent", "sentence"),
        [
            ("{}", "rows: missing"),
            ('{"rows":"2"}', "rows: expected int, got str"),
            ('{"rows":true}', "rows: expected int, got bool"),
            ('{"rows":null}', "rows: expected int, got null"),
            ('{"rows":0}', "rows: expected int >= 1"),
            ('{"rows":1,"rwos":1}', "rwos: unknown argument"),
            ('{"rows":1,"title":"abcd"}', "title: expected str of length <= 3"),
            ('{"rows":1,"point":{}}', "point.x: missing"),
            ('{"rows":1,"point":{"x":"1"}}', "point.x: expected int, got str"),
            ('{"rows":1,"point":{"x":-1}}', "point: X must not be negative"),
            ('{"rows":1,"counts":{"a":[]}}', "counts (a key): expected int, got str"),
            ('{"rows":1,"counts":{"1":["a"]}}', "counts[...][0]: expected int, got str"),
            ('{"rows":1,"colour":"blue"}', "colour: invalid enum value 'blue'"),
            ("[]", "arguments: expected object, got array"),
            ("null", "arguments: expected object, got null"),
            ('{"rows":1', "arguments: not JSON: Input data was truncated"),
            ('{"rows":1,"anything":' + "[" * 100_000, "arguments: nested too deeply"),
        ],
    )
    def test_what_does_not_fit_is_told_in_one_sentence(
        self, tool: Tool, sent: str, sentence: str
    ) -> None:
        assert why(tool, sent.encode()) == sentence

    def test_a_sentence_does_not_repeat_megabytes(self, tool: Tool) -> None:
        sentence = why(tool, msgspec.json.encode({"rows": 1, "x" * 1_000_000: 1}))
        assert len(sentence) == 400

    def test_constraints_and_descriptions_carry_over(self, tool: Tool) -> None:
        properties = tool.input_schema["properties"]
        assert properties["rows"] == {"type": "integer", "minimum": 1, "description": "how many"}
        assert properties["title"] == {"type": "string", "maxLength": 3, "default": ""}
        assert properties["colour"] == {"$ref": "#/$defs/Colour", "default": "red"}
        assert set(tool.input_schema["$defs"]) == {"Point", "Colour"}

    def test_a_call_cannot_change_the_defaults_of_the_next(self, tool: Tool) -> None:
        tool.bind(b'{"rows":1}')["counts"][1] = [1]
        assert tool.bind(b'{"rows":1}')["counts"] == {}

    def test_a_default_that_a_caller_could_not_send_is_not_listed(self) -> None:
        sentinel = object()

        def build(a: int, b: Any = sentinel, c: float = math.nan) -> None: ...

        build.__defaults__ = (None, sentinel, math.nan)  # `a: int = None`, as authors write it

        tool = make_tool(build)
        assert tool.input_schema["properties"] == {
            "a": {"type": "integer"},
            "b": {},
            "c": {"type": "number"},
        }
        assert "required" not in tool.input_schema
        assert tool.bind(b"{}")["b"] is sentinel

    def test_a_set_as_default_is_listed_as_an_array(self) -> None:
        def build(tags: set[str] = set()) -> None: ...  # noqa: B006  # what is tested

        tool = make_tool(build)
        assert msgspec.json.encode(listing(tool))
        assert tool.input_schema["properties"]["tags"]["default"] == []
        assert tool.bind(b'{"tags":["a"]}') == {"tags": {"a"}}

    def test_parameters_may_have_any_name_that_python_allows(self) -> None:
        names = ["self", "cls", "match", "type", "class_", "_meta", "__init__", "größe", "p0"]
        namespace: dict[str, Any] = {}
        exec(f"def build(first, {', '.join(names)}): ...", namespace)
        tool = make_tool(namespace["build"])
        sent: dict[str, Any] = {name: name for name in ["first", *names]}
        assert tool.bind(msgspec.json.encode(sent)) == sent

    def test_a_type_that_refers_to_itself_keeps_its_definition(self) -> None:
        schema = taking(Node).input_schema
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate({"x": {"name": "a", "children": [{"name": "b"}]}}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"x": {"name": "a", "children": [{}]}}, schema)

    def test_times_have_a_format_wherever_they_are(self) -> None:
        moment, time = (
            {"type": "string", "format": "date-time"},
            {"type": "string", "format": "time"},
        )
        for annotation, schema in (
            (datetime.datetime, moment),
            (datetime.datetime | None, {"anyOf": [moment, {"type": "null"}]}),
            (dict[str, list[datetime.time]], {"type": "array", "items": time}),
            (
                Annotated[datetime.datetime, Meta(description="when")],
                moment | {"description": "when"},
            ),
        ):
            found = taking(annotation).input_schema["properties"]["x"]
            assert found.get("additionalProperties", found) == schema
        first = msgspec.defstruct("First", [("at", datetime.datetime)], tag=True)
        second = msgspec.defstruct("First_", [("at", str)], tag=True, rename="upper")
        schema = taking(list[first | second] | datetime.time).input_schema
        assert schema["$defs"]["First"]["properties"]["at"] == moment
        assert schema["$defs"]["First_"]["properties"]["AT"] == {"type": "string"}

    @patient
    @given(
        st.dictionaries(
            st.sampled_from(["rows", "title", "tags", "point", "other"]),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers(-3, 3)
                | st.floats(allow_nan=False, allow_infinity=False)
                | st.text(max_size=4),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)
                ),
                max_leaves=6,
            ),
        )
    )
    def test_the_schema_says_exactly_what_is_accepted(self, sent: dict[str, Any]) -> None:
        class Spot(msgspec.Struct):
            x: int
            y: float = 0

        def build(
            rows: Annotated[int, Meta(ge=0)],
            title: Annotated[str, Meta(min_length=1, max_length=3)] | None = None,
            tags: list[str] | dict[str, int] | bool = False,
            point: Annotated[Spot, Meta(description="where")] = Spot(0),  # noqa: B008  # frozen in effect
        ) -> None: ...

        # To JSON Schema 1.0 is an integer; to a Python function it is not.
        assume(not _has_integral_float(sent))
        tool = make_tool(build)
        try:
            tool.bind(msgspec.json.encode(sent))
            is_accepted = True
        except ValueError:
            is_accepted = False
        assert jsonschema.Draft202012Validator(tool.input_schema).is_valid(sent) == is_accepted

    @patient
    @given(st.binary(max_size=30) | st.text(max_size=30).map(str.encode))
    def test_no_bytes_make_it_fail_in_another_way(self, sent: bytes) -> None:
        with contextlib.suppress(ValueError):
            assert "rows" in make_tool(self.build).bind(sent)


def _has_integral_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_integral_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_integral_float, value))
    return isinstance(value, float) and value.is_integer()


class TestArgumentsFromAGivenSchema:
    SCHEMA: dict[str, Any] = {  # noqa: RUF012  # never changed
        "type": "object",
        "properties": {
            "rows": {"type": "integer", "multipleOf": 0.5},
            "from": {"type": "string"},
            "tree": {"$ref": "#/$defs/tree"},
        },
        "if": {"required": ["from"]},
        "then": {"required": ["rows"]},
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }

    @pytest.fixture
    def tool(self) -> Tool:
        def build(call, rows: int = 1, **rest: Any): ...

        return make_tool(build, input_schema=self.SCHEMA)

    def test_the_schema_is_listed_as_given(self, tool: Tool) -> None:
        assert listing(tool)["inputSchema"] == self.SCHEMA
        assert mcp.Tool.model_validate(listing(tool)).input_schema.type == "object"

    def test_arguments_come_as_plain_json_even_where_python_has_no_such_name(
        self, tool: Tool
    ) -> None:
        sent = b'{"from":"a","rows":2,"tree":[[],[[]]],"more":null}'
        assert tool.bind(sent) == msgspec.json.decode(sent)
        assert tool.bind(b"{}") == {"rows": 1}

    @pytest.mark.parametrize(
        ("sent", "sentence"),
        [
            ('{"rows":"2"}', 'rows: "2" is not of type "integer"'),
            ('{"from":"a"}', "rows: missing"),
            ('{"tree":[[1]]}', 'tree[0][0]: 1 is not of type "array"'),
            ("[]", "arguments: expected object, got array"),
            ("{", "arguments: not JSON: Input data was truncated"),
            ('{"tree":' + "[" * 100_000, "arguments: nested too deeply"),
            (
                '{"tree":' + "[" * 900 + "1" + "]" * 900 + "}",
                (f'tree{"[0]" * 900}: 1 is not of type "array"')[:399] + "…",
            ),
        ],
    )
    def test_what_does_not_fit_is_told_in_one_sentence(
        self, tool: Tool, sent: str, sentence: str
    ) -> None:
        assert why(tool, sent.encode()) == sentence

    def test_a_sentence_does_not_repeat_what_was_sent(self, tool: Tool) -> None:
        assert len(why(tool, msgspec.json.encode({"rows": "x" * 1_000}))) == 400

    def test_what_the_function_cannot_take_is_refused_before_it_runs(self) -> None:
        def build(rows: int) -> None: ...

        tool = make_tool(build, input_schema={"type": "object"})
        assert why(tool, b'{"rows":1,"more":1}') == "more: unknown argument"
        assert why(tool, b"{}") == "rows: missing"
        assert tool.bind(b'{"rows":"any"}') == {"rows": "any"}

    def test_the_authors_dict_may_change_afterwards(self) -> None:
        schema: dict[str, Any] = {"type": "object", "properties": {"rows": {}}}

        def build(rows: int) -> None: ...

        tool = make_tool(build, input_schema=schema)
        schema["properties"]["rows"]["type"] = "string"
        assert tool.bind(b'{"rows":1}') == {"rows": 1}

    @pytest.mark.parametrize("which", ["input_schema", "output_schema"])
    @pytest.mark.parametrize(
        ("schema", "sentence"),
        [
            ({}, "MCP requires"),
            ({"type": "array"}, "MCP requires"),
            ({"type": "object", "properties": 3}, 'properties: 3 is not of type "object"'),
            ({"type": "object", "properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
            (
                {"type": "object", "properties": {"a": {"pattern": "a(?=b)"}}},
                "properties.a.pattern: .* without look-around",
            ),
            (
                {"type": "object", "patternProperties": {r"^(a)\1$": {}}},
                "patternProperties.* without look-around",
            ),
            ({"type": "object", "properties": {"a": {"$ref": "#/no"}}}, "leads nowhere"),
            ({"type": "object", "$defs": {"a": {"$ref": "#/no"}}}, "leads nowhere"),
            ({"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}, "leads nowhere"),
            ({"type": "object", "$schema": "http://x/y"}, "unknown \\$schema http://x/y"),
            ({"type": "object", "default": object()}, "not JSON"),
        ],
    )
    def test_a_schema_that_is_none_is_refused_at_once(
        self, which: str, schema: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(ValueError, match=f"tool build: {which}: .*{sentence}"):
            a_tool(**{which: schema})

    @pytest.mark.parametrize("name", ["call", "other"])
    def test_a_schema_with_what_the_function_cannot_take_is_refused(self, name: str) -> None:
        def build(call, rows): ...

        with pytest.raises(ValueError, match=f"the function cannot take '{name}'"):
            make_tool(build, input_schema={"type": "object", "properties": {name: {}}})

    def test_an_older_dialect_is_honoured(self) -> None:
        def build(pair: list[Any]) -> None: ...

        pair = {"items": [{"type": "string"}, {"type": "integer"}], "additionalItems": False}
        schema = {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"pair": pair},
        }
        tool = make_tool(build, input_schema=schema)
        assert tool.bind(b'{"pair":["a",1]}') == {"pair": ["a", 1]}
        assert why(tool, b'{"pair":[1,1]}') == 'pair[0]: 1 is not of type "string"'
