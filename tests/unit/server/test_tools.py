"""Tools: made from functions, or refused; and the registry of tools."""

import functools
import math
import threading
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import _v2025_11_25 as mcp
from msgspec import Meta

from streams.errors import InsufficientScope
from streams.server.call import Call, SyncCall
from streams.server.tools import Tool, Tools, listing, make_tool
from tests.rigs.toolkit import Node, Point, Report, a_tool, patient, taking, why

BetterCall = types.new_class("BetterCall", (Call,))


class TestTheFunction:
    def test_everything_is_taken_from_the_function(self) -> None:
        async def build(call: Call, rows: int, title: str = "yearly") -> str:
            """Build the report.

            All of it.
            """
            return f"{title}: {rows}"

        tool = make_tool(build)
        assert listing(tool) == {
            "name": "build",
            "description": "Build the report.\n\nAll of it.",
            "inputSchema": {
                "type": "object",
                "properties": {
                    "rows": {"type": "integer"},
                    "title": {"type": "string", "default": "yearly"},
                },
                "required": ["rows"],
                "additionalProperties": False,
            },
            "outputSchema": {
                "type": "object",
                "properties": {"result": {"type": "string"}},
                "required": ["result"],
            },
        }
        assert (tool.is_async, tool.takes_call, tool.function) == (True, True, build)

    def test_what_is_given_wins_over_what_the_function_says(self) -> None:
        tool = a_tool(
            name="a.b-c_D",
            title="A title",
            description="Other.",
            annotations={"readOnlyHint": True},
            resume_min_s=1,
            resume_max_s=60,
            overflow="fail",
        )
        assert listing(tool) == {
            "name": "a.b-c_D",
            "title": "A title",
            "description": "Other.",
            "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
            "annotations": {"readOnlyHint": True},
        }
        assert (tool.resume_min_s, tool.resume_max_s, tool.overflow) == (1, 60, "fail")

    def test_mcps_own_model_reads_the_listing(self) -> None:
        def build(node: Node, rows: Annotated[int, Meta(description="how many")] = 1) -> Report:
            return Report(rows)

        entry = listing(make_tool(build, title="B", annotations={"idempotentHint": True}))
        read = mcp.Tool.model_validate(entry)
        assert read.model_dump(by_alias=True, exclude_none=True, exclude_unset=True) == entry

    def test_strings_as_annotations_are_resolved(self) -> None:
        def build(call: "Call", point: "Annotated[Point, Meta(description='where')]") -> "Report":
            return Report(point.x)

        tool = make_tool(build)
        assert tool.takes_call
        assert tool.bind(b'{"point":{"x":1}}') == {"point": Point(1)}
        assert tool.output_schema is not None

    def test_call_may_be_imported_for_the_type_checker_only(self) -> None:
        namespace: dict[str, Any] = {}
        exec("def build(running: 'Call', rows: 'int'): ...", namespace)
        tool = make_tool(namespace["build"])
        assert tool.takes_call
        assert list(tool.input_schema["properties"]) == ["rows"]

    def test_an_annotation_that_does_not_resolve_is_told_at_once(self) -> None:
        namespace: dict[str, Any] = {}
        exec("def build(rows: 'Missing'): ...", namespace)
        with pytest.raises(TypeError, match=r"tool build: cannot resolve .*'Missing'"):
            make_tool(namespace["build"])

    @pytest.mark.parametrize(
        "annotation", [Call, SyncCall, BetterCall, Call | None, Annotated[Call, "the call"]]
    )
    def test_a_call_is_known_by_its_annotation_whatever_its_name(self, annotation: Any) -> None:
        def build(running: Any, rows: int) -> None: ...

        build.__annotations__["running"] = annotation
        tool = make_tool(build)
        assert tool.takes_call
        assert tool.bind(b'{"rows":1}') == {"rows": 1}

    def test_a_tool_may_be_annotated_with_both_calls(self) -> None:
        async def build(running: Call | SyncCall) -> None: ...

        assert make_tool(build).takes_call

    def test_an_unannotated_first_parameter_named_call_is_the_call(self) -> None:
        def build(call, rows): ...

        tool = make_tool(build)
        assert tool.takes_call
        assert tool.bind(b'{"rows":[1]}') == {"rows": [1]}

    def test_a_parameter_named_call_with_another_type_is_an_argument(self) -> None:
        def build(call: str, rows: int = 0) -> None: ...

        tool = make_tool(build)
        assert not tool.takes_call
        assert tool.bind(b'{"call":"mayday"}') == {"call": "mayday", "rows": 0}

    def test_an_authors_own_class_named_call_is_an_argument(self) -> None:
        own = msgspec.defstruct("Call", [("number", str)])
        assert taking(own).bind(b'{"x":{"number":"112"}}') == {"x": own("112")}

    def test_the_peer_cannot_send_the_call(self) -> None:
        def build(call, **rest): ...

        tool = make_tool(build, input_schema={"type": "object"})
        assert why(tool, b'{"call":1}') == "call: unknown argument"

    @pytest.mark.parametrize(
        ("source", "sentence"),
        [
            ("def build(*rows): ...", r"\*rows: arguments of MCP have names"),
            ("def build(rows, /): ...", "rows: arguments of MCP have names"),
            ("def build(**rows): ...", r"\*\*rows: describe its arguments by input_schema"),
            ("def build(rows, running: Call): ...", "running: the call must be the first"),
            ("def build(*, running: Call): ...", "running: the call must be the first"),
            (
                "async def build(running: SyncCall): ...",
                "running: an async function is given a Call",
            ),
            (
                "async def build(running: SyncCall | None): ...",
                "a SyncCall is for plain functions",
            ),
            ("def build(): yield", "set pages=True for a function that yields pages"),
            ("async def build(): yield", "set pages=True for a function that yields pages"),
            ("def build(rows: 1 + ''): ...", "annotation"),
        ],
    )
    def test_a_function_that_cannot_be_a_tool_is_refused(self, source: str, sentence: str) -> None:
        namespace: dict[str, Any] = {"Call": Call, "SyncCall": SyncCall}
        exec("from __future__ import annotations\n" + source, namespace)
        with pytest.raises(TypeError, match="tool build: .*" + sentence):
            make_tool(namespace["build"])

    def test_what_cannot_be_called_is_no_tool(self) -> None:
        not_callable: Any = 3
        with pytest.raises(TypeError, match="a tool is a function, not int"):
            make_tool(not_callable)

    @pytest.mark.parametrize(
        "annotation", [Callable[[], int], threading.Event, Point | Node, list[Callable[[], int]]]
    )
    def test_a_type_that_json_has_not_is_refused_by_name(self, annotation: Any) -> None:
        with pytest.raises(TypeError, match=r"^tool build: x: [^\n]*not supported; use a type"):
            taking(annotation)

    def test_methods_partials_wrappers_and_callable_objects_are_tools(self) -> None:
        class Shop:
            async def sell(self, what: str) -> str:
                """Sell it."""
                return what

            async def __call__(self, what: str) -> str:
                """Call the shop."""
                return what

        def plain(what: str, count: int) -> str:
            """Plain."""
            return what * count

        @functools.wraps(plain)
        def wrapped(*args: Any, **kwargs: Any) -> str:
            return plain(*args, **kwargs)

        bound = make_tool(Shop().sell)
        called = make_tool(Shop(), name="shop")
        partial = make_tool(functools.partial(plain, count=2))
        around = make_tool(wrapped)
        assert [t.name for t in (bound, called, partial, around)] == [
            "sell",
            "shop",
            "plain",
            "plain",
        ]
        assert [t.is_async for t in (bound, called, partial, around)] == [True, True, False, False]
        assert [t.description for t in (bound, partial, around)] == ["Sell it.", "Plain.", "Plain."]
        assert partial.function(**partial.bind(b'{"what":"a"}')) == "aa"
        assert around.function(**around.bind(b'{"what":"a","count":3}')) == "aaa"

    @pytest.mark.parametrize("name", ["", "a b", "a\n", "ä", "a/b", "x" * 129])
    def test_a_name_that_mcp_does_not_allow_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"tool name .* expected 1 to 128 characters"):
            a_tool(name=name)

    def test_a_function_without_a_good_name_needs_one(self) -> None:
        with pytest.raises(ValueError, match="give name="):
            make_tool(lambda: None)
        assert make_tool(lambda: None, name="x" * 128).name == "x" * 128

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"resume_min_s": -1}, "resume_min_s: expected seconds from 0"),
            ({"resume_max_s": math.inf}, "resume_max_s: expected seconds from 0"),
            ({"resume_max_s": math.nan}, "resume_max_s: expected seconds from 0"),
            ({"resume_min_s": 5, "resume_max_s": 4}, "above resume_max_s"),
            ({"overflow": "drop"}, "expected 'block' or 'fail'"),
            ({"annotations": {"readOnlyHint": "yes"}}, "annotations: .*readOnlyHint"),
        ],
    )
    def test_a_setting_that_cannot_be_is_refused(
        self, settings: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(ValueError, match="tool build: .*" + sentence):
            a_tool(**settings)

    def test_a_max_of_0_goes_with_any_min(self) -> None:
        assert a_tool(resume_min_s=5, resume_max_s=0).resume_max_s == 0


def named(count: int) -> Iterator[Tool]:
    return (a_tool(name=f"tool-{number}") for number in range(count))


class TestTheRegistry:
    @patient
    @given(st.integers(0, 12), st.integers(1, 13))
    def test_pages_hold_every_tool_once_and_in_order(self, count: int, size: int) -> None:
        tools = Tools()
        for tool in named(count):
            tools.add(tool)
        found, cursor = tools.page(None, size)
        while cursor is not None:
            page, cursor = tools.page(cursor, size)
            assert 1 <= len(page) <= size
            found += page
        assert [entry["name"] for entry in found] == [f"tool-{n}" for n in range(count)]
        assert len(tools) == count

    def test_a_cursor_stays_good_when_tools_are_added_and_after_a_restart(self) -> None:
        first, restarted = Tools(), Tools()
        for tool in named(3):
            first.add(tool)
        _, cursor = first.page(None, 2)
        for tool in named(5):
            restarted.add(tool)
        page, cursor = restarted.page(cursor, 10)
        assert [entry["name"] for entry in page] == ["tool-2", "tool-3", "tool-4"]
        assert cursor is None

    @pytest.mark.parametrize("cursor", ["", "0", "1", "tool-0", "\ud800", "AAAA=", "é"])
    def test_a_cursor_that_is_not_ours_is_refused(self, cursor: str) -> None:
        tools = Tools()
        tools.add(a_tool())
        with pytest.raises(ValueError, match="unknown cursor"):
            tools.page(cursor, 1)

    def test_a_page_holds_at_least_one_tool(self) -> None:
        with pytest.raises(ValueError, match="size: expected at least 1"):
            Tools().page(None, 0)

    def test_a_name_can_be_taken_once(self) -> None:
        tools = Tools()
        tool = a_tool()
        tools.add(tool)
        with pytest.raises(ValueError, match="there is a tool build already"):
            tools.add(a_tool())
        assert tools.get("build") is tool
        assert tools.get("other") is None


class TestScopes:
    def test_a_tool_needs_each_of_its_scopes_once(self) -> None:
        tool = a_tool(scopes=["b", "a", "b"])
        assert tool.scopes == ("b", "a")
        tool.check_scopes(None)
        tool.check_scopes(frozenset("abc"))
        for granted, missing in ((frozenset("a"), ["b"]), (frozenset(), ["b", "a"])):
            with pytest.raises(InsufficientScope) as refused:
                tool.check_scopes(granted)
            assert refused.value.data == {
                "reason": "insufficient_scope",
                "scope": "b a",
                "missing": missing,
            }

    def test_a_tool_without_scopes_is_anybodys(self) -> None:
        a_tool().check_scopes(frozenset())

    def test_a_server_knows_what_its_tools_need(self) -> None:
        tools = Tools()
        for name, scopes in (("one", "ba"), ("two", ""), ("three", "ca")):
            tools.add(a_tool(name=name, scopes=list(scopes)))
        assert tools.scopes == ("b", "a", "c")

    def test_one_string_is_not_taken_for_its_letters(self) -> None:
        with pytest.raises(TypeError, match=r"tool build: scopes: .* \('reports.write',\)"):
            a_tool(scopes="reports.write")

    @pytest.mark.parametrize("scope", ["", "a b", 'a"', "a\\", "ü", "a\n", 7, None])
    def test_what_is_no_scope_is_refused(self, scope: Any) -> None:
        with pytest.raises(ValueError, match="tool build: scope "):
            a_tool(scopes=[scope])
