"""Results: made from the values that tools return, and checked against output schemas."""

import dataclasses
import datetime
import inspect
import math
import pathlib
import uuid
from collections.abc import Callable
from threading import Event
from typing import Annotated, Any, ClassVar

import jsonschema
import mcp_types
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.mcpserver import Image as SDKImage
from mcp_types import _v2025_11_25 as mcp
from msgspec import Meta

import streams
from streams import messages
from streams.schemas.content import EmbeddedResource, Image, Text, ToolResult
from streams.server.tools import error_result, listing, to_result
from tests.rigs.toolkit import (
    SUBCLASSED,
    Box,
    Colour,
    Count,
    Markup,
    Mean,
    Node,
    Point,
    Report,
    Row,
    Summary,
    a_tool,
    patient,
    returning,
    taking,
    text_of,
)


class Times(msgspec.Struct):
    at: datetime.datetime
    daily: datetime.time
    takes: datetime.timedelta
    aware: Annotated[datetime.datetime, Meta(tz=True)]


class TimesModel(pydantic.BaseModel):
    at: datetime.datetime
    daily: datetime.time
    takes: datetime.timedelta
    aware: pydantic.AwareDatetime


class TestResults:
    def test_text_is_one_text_block(self) -> None:
        assert to_result("hi", a_tool()) == {"content": [{"type": "text", "text": "hi"}]}

    def test_none_is_no_content(self) -> None:
        assert to_result(None, a_tool()) == {"content": []}

    def test_blocks_and_text_may_be_mixed(self) -> None:
        image = {"type": "image", "data": "YQ==", "mimeType": "image/png"}
        text = {"type": "text", "text": "see"}
        made = Image(b"a", "image/png")
        assert to_result(made, a_tool()) == {"content": [image]}
        assert to_result(["see", made], a_tool()) == {"content": [text, image]}
        assert to_result((made, Text("see")), a_tool()) == {"content": [image, text]}

    def test_beside_blocks_there_is_only_text(self) -> None:
        with pytest.raises(TypeError, match="returned int in a list of content blocks"):
            to_result([Image(b"a", "image/png"), 3], a_tool())

    @pytest.mark.parametrize(
        "value", [{"x": 1, "y": 0}, Point(1), Report(1, 0.5), Summary(rows=1), Box(Box(1))]
    )
    def test_an_object_is_structured_content_and_its_json(self, value: Any) -> None:
        result = to_result(value, a_tool())
        assert result["structuredContent"] == msgspec.to_builtins(value)
        assert msgspec.json.decode(text_of(result)) == result["structuredContent"]

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (3, "3"),
            (True, "true"),
            (2**70, str(2**70)),
            (0.5, "0.5"),
            ([], "[]"),
            (["a", "b"], '["a","b"]'),
            ((1, None), "[1,null]"),
            (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
            (Colour.RED, '"red"'),
            (Row(1), "[1]"),
            ([pathlib.PurePosixPath("/a")], '["/a"]'),
            ([Report(1)], '[{"rows":1,"average":0.0}]'),
        ],
    )
    def test_any_other_json_is_its_text(self, value: Any, text: str) -> None:
        assert to_result(value, a_tool()) == {"content": [{"type": "text", "text": text}]}

    @pytest.mark.parametrize(("value", "text"), SUBCLASSED)
    def test_an_instance_of_a_subclass_is_what_it_holds(self, value: Any, text: str) -> None:
        shown = msgspec.json.decode(text) if isinstance(value, str) else text
        assert text_of(to_result(value, a_tool())) == shown

    @pytest.mark.parametrize(
        ("annotation", "value"), [(str, Markup("ä")), (int, Count(3)), (float, Mean(0.5))]
    )
    def test_an_instance_of_a_subclass_fits_the_annotation(
        self, annotation: Any, value: Any
    ) -> None:
        result = to_result(value, returning(annotation))
        assert result["structuredContent"] == {"result": value}

    def test_nan_and_infinity_become_null(self) -> None:
        assert text_of(to_result([math.nan, math.inf, -math.inf], a_tool())) == "[null,null,null]"

    def test_bytes_are_base64_inside_a_value_and_refused_alone(self) -> None:
        assert to_result({"data": b"a"}, a_tool())["structuredContent"] == {"data": "YQ=="}
        with pytest.raises(TypeError, match="returned bytes; return an Image"):
            to_result(b"a", a_tool())

    @pytest.mark.parametrize(
        "value",
        [
            object(),
            Event(),
            {"a": complex(1)},
            {(1, 2): 3},
            "\ud800",
            {"\ud800": 1},
            Text("\ud800"),
            Text("a", meta={"k": object()}),
            iter([1]),
            {"a": msgspec.Raw(b"zz")},
        ],
    )
    def test_what_is_no_json_is_told_with_its_type(self, value: Any) -> None:
        sentence = f"^tool build returned {type(value).__name__}, which is not JSON: "
        with pytest.raises(TypeError, match=sentence):
            to_result(value, a_tool())

    def test_a_value_that_contains_itself_is_refused(self) -> None:
        endless: list[Any] = []
        endless.append(endless)
        with pytest.raises(TypeError, match="returned list, which is not JSON"):
            to_result(endless, a_tool())

    def test_raw_json_cannot_break_the_line(self) -> None:
        result = to_result({"a": msgspec.Raw(b'{\n"b":1}')}, a_tool())
        assert result["structuredContent"] == {"a": {"b": 1}}
        assert messages.result(1, result).count(b"\n") == 1

    @patient
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        )
    )
    def test_mcps_own_model_reads_every_result(self, value: Any) -> None:
        line = messages.result(1, to_result(value, a_tool()))
        result = msgspec.json.decode(line)["result"]
        read = mcp.CallToolResult.model_validate(result)
        assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == result

    @patient
    @given(st.text(st.characters()))
    def test_an_error_result_never_fails(self, message: str) -> None:
        result = error_result(message + "\ud800")
        assert messages.is_tool_error(msgspec.Raw(msgspec.json.encode(result)))
        assert mcp.CallToolResult.model_validate(result).is_error
        assert text_of(result).startswith(message) or not message.isprintable()


class TestOutputSchemas:
    @pytest.mark.parametrize("annotation", [Report, Summary, Point, Annotated[Point, Meta()]])
    def test_an_object_as_return_annotation_is_listed(self, annotation: Any) -> None:
        schema = listing(returning(annotation))["outputSchema"]
        assert schema["type"] == "object"
        assert schema["properties"]
        assert "$defs" not in schema

    def test_definitions_are_kept_where_they_are_needed(self) -> None:
        recursive, generic = returning(Node).output_schema, returning(Box[Point]).output_schema
        assert recursive is not None
        assert generic is not None
        assert list(recursive["$defs"]) == ["Node"]
        assert list(generic["$defs"]) == ["Point"]
        jsonschema.validate({"name": "a", "children": [{"name": "b"}]}, recursive)

    @pytest.mark.parametrize(
        ("annotation", "schema"),
        [
            (None, {"type": "null"}),
            (str, {"type": "string"}),
            (int, {"type": "integer"}),
            (list[str], {"type": "array", "items": {"type": "string"}}),
            (str | None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
            (dict[int, str], {"type": "object", "additionalProperties": {"type": "string"}}),
            (bytes, {"type": "string", "contentEncoding": "base64"}),
        ],
    )
    def test_any_other_json_is_the_result_of_an_object(
        self, annotation: Any, schema: dict[str, Any]
    ) -> None:
        assert listing(returning(annotation))["outputSchema"] == {
            "type": "object",
            "properties": {"result": schema},
            "required": ["result"],
        }

    @pytest.mark.parametrize("annotation", [list[Report], Report | None, Colour])
    def test_definitions_of_a_result_are_kept(self, annotation: Any) -> None:
        schema = listing(returning(annotation))["outputSchema"]
        assert list(schema["properties"]) == ["result"]
        assert schema["$defs"]

    def test_a_dict_is_listed_as_an_object(self) -> None:
        schema = listing(returning(dict[str, int]))["outputSchema"]
        assert schema == {"type": "object", "additionalProperties": {"type": "integer"}}

    @pytest.mark.parametrize(
        "annotation",
        [
            *(Any, object, dict, list, tuple, inspect.Signature.empty),
            *(Image, Text, EmbeddedResource, Image | Text, list[Image], Image | None),
            *(list[str | Image], tuple[str, Image], Annotated[list[Text], "blocks"]),
            *(Row, pathlib.Path, uuid.UUID, datetime.datetime),
            *(
                ToolResult,
                ToolResult | None,
                Annotated[ToolResult, "all"],
                mcp_types.CallToolResult,
                mcp_types.TextContent,
            ),
            *(list[mcp_types.ContentBlock], SDKImage, list[SDKImage | str]),
        ],
    )
    def test_content_and_what_says_little_has_no_output_schema(self, annotation: Any) -> None:
        assert "outputSchema" not in listing(returning(annotation))

    @pytest.mark.parametrize("annotation", [Callable[[], int], Event, list[complex | Row]])
    def test_a_result_that_json_has_not_is_refused_at_once(self, annotation: Any) -> None:
        with pytest.raises(TypeError, match=r"^tool build: return annotation: [^\n]*; use a type"):
            returning(annotation)

    def test_a_field_that_json_has_not_is_told_at_once(self) -> None:
        bad = dataclasses.make_dataclass("Bad", [("event", Event)])
        with pytest.raises(TypeError, match=r"^tool build: return annotation: [^\n]*Event"):
            returning(bad)

    @pytest.mark.parametrize("value", [Report(3, 0.5), {"rows": 3, "average": 0.5}])
    def test_what_fits_is_structured_content(self, value: Any) -> None:
        assert to_result(value, returning(Report)) == {
            "content": [{"type": "text", "text": '{"rows":3,"average":0.5}'}],
            "structuredContent": {"rows": 3, "average": 0.5},
        }

    @pytest.mark.parametrize(
        ("value", "sentence"),
        [
            ({}, "rows: missing"),
            (Report("3"), "rows: expected int, got str"),
            (Report(3, -1), "average: expected float >= 0.0"),
            (Report(3, math.nan), "average: expected float, got null"),
        ],
    )
    def test_what_does_not_fit_the_annotation_is_told(self, value: Any, sentence: str) -> None:
        with pytest.raises(ValueError, match=f"^tool build broke its output schema: {sentence}$"):
            to_result(value, returning(Report))

    @pytest.mark.parametrize("value", [None, "text", 3, [1], Text("a"), [Text("a")]])
    def test_what_is_no_object_breaks_the_promise_of_one(self, value: Any) -> None:
        with pytest.raises(TypeError, match="but its output schema promises an object"):
            to_result(value, returning(Report))

    @pytest.mark.parametrize(
        ("annotation", "value", "text"),
        [
            (list[str], ["a", "b"], '["a","b"]'),
            (str, "ä", "ä"),
            (str, "a", "a"),
            (int | None, 3, "3"),
            (Colour, Colour.RED, '"red"'),
            (Report | None, Report(1), '{"rows":1,"average":0.0}'),
            (set[int], {1}, "[1]"),
            (bytes, b"a", '"YQ=="'),
            (bytearray, bytearray(b"a"), '"YQ=="'),
        ],
    )
    def test_a_wrapped_result_has_its_own_text(
        self, annotation: Any, value: Any, text: str
    ) -> None:
        result = to_result(value, returning(annotation))
        assert text_of(result) == text
        assert result["structuredContent"] == {"result": msgspec.to_builtins(value)}
        jsonschema.validate(result["structuredContent"], returning(annotation).output_schema)

    @pytest.mark.parametrize("kind", [Times, TimesModel])
    def test_a_time_has_no_format_that_its_values_may_not_fit(self, kind: Any) -> None:
        """RFC 3339 has no time without a zone, and no duration with a fraction or a sign."""
        schema = returning(kind).output_schema
        assert schema is not None
        formats = {name: each.get("format") for name, each in schema["properties"].items()}
        assert formats == {"at": None, "daily": None, "takes": None, "aware": "date-time"}
        (given,) = taking(kind).input_schema["$defs"].values()
        assert given["properties"]["at"]["format"] == "date-time"

    @pytest.mark.parametrize("annotation", [tuple[int, str], dict[str, list[tuple[int, str]]]])
    def test_a_tuple_fits_its_schema_as_draft_7_too(self, annotation: Any) -> None:
        """The official client in TypeScript reads all schemas as draft 7."""
        pair: Any = (1, "a")
        longer: Any = (1, "a", 2)
        if annotation != tuple[int, str]:
            pair, longer = {"x": [pair]}, {"x": [longer]}
        tool = returning(annotation)
        assert tool.output_schema is not None
        result = to_result(pair, tool)["structuredContent"]
        jsonschema.Draft7Validator(tool.output_schema).validate(result)
        whole = longer if "x" in result else {"result": longer}
        too_long = msgspec.json.decode(msgspec.json.encode(whole))
        assert not jsonschema.Draft202012Validator(tool.output_schema).is_valid(too_long)

    def test_blocks_in_any_list_stay_blocks(self) -> None:
        image = {"type": "image", "data": "YQ==", "mimeType": "image/png"}
        assert to_result(["see", Image(b"a", "image/png")], returning(list[Any])) == {
            "content": [{"type": "text", "text": "see"}, image],
            "structuredContent": {"result": ["see", image]},
        }

    def test_none_is_a_result_without_text(self) -> None:
        assert to_result(None, returning(int | None)) == {
            "content": [],
            "structuredContent": {"result": None},
        }

    @pytest.mark.parametrize(
        ("annotation", "value"),
        [(str, 3), (str, None), (int, "3"), (int, True), (list[str], [1]), (None, 0)],
    )
    def test_a_result_of_another_type_breaks_the_promise(self, annotation: Any, value: Any) -> None:
        with pytest.raises(ValueError, match=r"^tool build broke its output schema: result"):
            to_result(value, returning(annotation))

    def test_bytes_are_no_text(self) -> None:
        with pytest.raises(TypeError, match="returned bytes; return an Image"):
            to_result(b"a", returning(str))

    def test_a_class_with_annotated_attributes_is_an_object(self) -> None:
        class Ticket:
            number: int
            title: str = "none"

            def __init__(self, number: Any) -> None:
                self.number = number

        tool = returning(Ticket)
        assert tool.output_schema is not None
        assert tool.output_schema["required"] == ["number"]
        assert to_result(Ticket(3), tool)["structuredContent"] == {"number": 3, "title": "none"}
        with pytest.raises(ValueError, match=r"^tool build broke its output schema: "):
            to_result(Ticket("three"), tool)

    def test_a_class_with_an_attribute_that_json_has_not_is_refused(self) -> None:
        class Ticket:
            shared: ClassVar[Event]
            done: Event

        with pytest.raises(TypeError, match=r"^tool build: return annotation: Ticket: .*Event"):
            returning(Ticket)

    def test_a_tool_may_have_text_alone(self) -> None:
        for annotation, value, text in (
            (str, "a", "a"),
            (Report, Report(1), None),
            (Any, {}, "{}"),
        ):
            tool = returning(annotation, structured_output=False)
            assert "outputSchema" not in listing(tool)
            made = to_result(value, tool)
            assert list(made) == ["content"]
            assert text in (text_of(made), None)
        with pytest.raises(ValueError, match="output_schema: drop it, or structured_output=False"):
            returning(Report, structured_output=False, output_schema={"type": "object"})

    def test_a_tool_may_insist_on_a_schema(self) -> None:
        assert returning(str, structured_output=True).output_schema is not None
        with pytest.raises(TypeError, match="tool build: structured_output: annotate the result"):
            returning(Any, structured_output=True)

    def test_a_given_schema_wins_and_is_checked(self) -> None:
        schema = {"type": "object", "required": ["a"], "properties": {"a": {"enum": [1]}}}
        tool = returning(Report, output_schema=schema)
        assert listing(tool)["outputSchema"] == schema
        assert to_result({"a": 1}, tool)["structuredContent"] == {"a": 1}
        with pytest.raises(ValueError, match="broke its output schema: a: missing"):
            to_result({}, tool)
        with pytest.raises(ValueError, match="broke its output schema: a: 2 is not one of"):
            to_result({"a": 2}, tool)


class TestWholeResults:
    WIRE: ClassVar[dict[str, Any]] = {
        "content": [
            {"type": "text", "text": "see"},
            {"type": "image", "data": "YQ==", "mimeType": "image/png"},
        ],
        "structuredContent": {"rows": 3, "note": None},
        "isError": True,
        "_meta": {"a.b/c": 1, "none": None},
    }

    def test_a_tool_result_passes_as_it_is(self) -> None:
        made = ToolResult(
            ["see", Image(b"a", "image/png")],
            structured_content={"rows": 3, "note": None},
            is_error=True,
            meta={"a.b/c": 1, "none": None},
        )
        assert to_result(made, returning(Any)) == self.WIRE
        assert streams.ToolResult is ToolResult

    def test_so_does_the_result_of_the_official_sdk(self) -> None:
        made = mcp_types.CallToolResult.model_validate(self.WIRE)
        assert to_result(made, returning(Any)) == self.WIRE
        assert to_result(made, returning(mcp_types.CallToolResult)) == self.WIRE

    @pytest.mark.parametrize(
        ("content", "blocks"),
        [
            ((), []),
            ([], []),
            ("a", [{"type": "text", "text": "a"}]),
            (Text("a"), [{"type": "text", "text": "a"}]),
            (mcp_types.TextContent(type="text", text="a"), [{"type": "text", "text": "a"}]),
            (("a", Text("ä")), [{"type": "text", "text": "a"}, {"type": "text", "text": "ä"}]),
        ],
    )
    def test_content_is_text_a_block_or_a_list(self, content: Any, blocks: list[Any]) -> None:
        assert to_result(ToolResult(content), returning(Any)) == {"content": blocks}

    def test_structured_content_may_be_any_object(self) -> None:
        made = to_result(ToolResult("a", Report(3, 0.5)), returning(ToolResult))
        assert made["structuredContent"] == {"rows": 3, "average": 0.5}
        with pytest.raises(TypeError, match="structured_content is no object in JSON"):
            to_result(ToolResult("a", [1]), returning(ToolResult))
        with pytest.raises(TypeError, match="returned int in a list of content blocks"):
            to_result(ToolResult([3]), returning(ToolResult))

    @pytest.mark.parametrize(
        "annotation",
        [
            Report,
            Annotated[ToolResult, Report],
            Annotated[mcp_types.CallToolResult, Report],
        ],
    )
    def test_a_promise_holds_for_it(self, annotation: Any) -> None:
        tool = returning(annotation)
        assert tool.output_schema is not None
        assert tool.output_schema["required"] == ["rows"]
        made = to_result(ToolResult("three", {"rows": 3}), tool)
        assert made["structuredContent"] == {"rows": 3}
        for broken in (ToolResult("a", {}), mcp_types.CallToolResult(content=[])):
            with pytest.raises((TypeError, ValueError), match="output schema"):
                to_result(broken, tool)
        failed = to_result(ToolResult("it failed", is_error=True), tool)
        assert failed == {"content": [{"type": "text", "text": "it failed"}], "isError": True}

    @pytest.mark.parametrize("annotation", [Any, list[mcp_types.ContentBlock]])
    def test_blocks_of_the_official_sdk_pass(self, annotation: Any) -> None:
        image = mcp_types.ImageContent(type="image", data="YQ==", mime_type="image/png")
        shown = {"type": "image", "data": "YQ==", "mimeType": "image/png"}
        link = mcp_types.ResourceLink(type="resource_link", uri="a://b", name="b")
        made = to_result(["see", image, link, Text("a")], returning(annotation))
        assert made == {
            "content": [
                {"type": "text", "text": "see"},
                shown,
                {"type": "resource_link", "uri": "a://b", "name": "b"},
                {"type": "text", "text": "a"},
            ]
        }
        assert to_result(image, returning(annotation)) == {"content": [shown]}
        helper = SDKImage(data=b"a", format="png")
        assert to_result(helper, returning(annotation)) == {"content": [shown]}
        assert to_result([helper], returning(annotation)) == {"content": [shown]}
