"""Tools that give pages: their functions, their listings and their settings."""

import functools
import math
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest
from mcp_types import _v2025_11_25 as mcp

from streams import Call, Server, SyncCall
from streams.server.tools import Paged, Tool, listing, make_tool
from tests.rigs.toolkit import Point, a_tool


async def as_told(call: Call, to: int) -> AsyncIterator[Point]:
    """Some pages."""
    yield Point(to)


def in_thread(call: SyncCall, to: int) -> Generator[Point, None, None]:
    """Some pages."""
    yield Point(to)


class Shelf:
    def rows(self, to: int) -> Iterator[str]:
        yield str(to)

    async def __call__(self, to: int) -> AsyncIterator[str]:
        yield str(to)


@functools.wraps(as_told)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return as_told(*args, **kwargs)


def test_a_generator_of_either_kind_gives_pages() -> None:
    tools = [make_tool(function, pages=True) for function in (as_told, in_thread)]
    assert [tool.is_async for tool in tools] == [True, False]
    assert all(tool.takes_call for tool in tools)
    assert all(tool.paged == Paged(ahead=1, wait_s=10.0) for tool in tools)
    for tool in tools:
        assert listing(tool) == {
            "name": tool.name,
            "description": "Some pages.",
            "inputSchema": {
                "type": "object",
                "properties": {"to": {"type": "integer"}},
                "required": ["to"],
                "additionalProperties": False,
            },
        }


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Shelf().rows, "rows"),
        (Shelf(), "shelf"),
        (functools.partial(in_thread, to=2), "in_thread"),
        (wrapped, "as_told"),
    ],
)
def test_what_is_a_tool_otherwise_gives_pages_too(function: Callable[..., Any], name: str) -> None:
    tool = make_tool(function, name=name, pages=True)
    assert tool.paged is not None
    assert "to" in tool.input_schema["properties"]


def test_without_pages_a_tool_has_none() -> None:
    assert a_tool().paged is None
    assert a_tool(pages_ahead=5).paged is None


@pytest.mark.parametrize("function", [as_told, in_thread, Shelf().rows, wrapped])
def test_a_function_that_yields_must_say_that_it_gives_pages(function: Any) -> None:
    with pytest.raises(TypeError, match="set pages=True for a function that yields pages"):
        make_tool(function)


def test_a_function_that_does_not_yield_cannot_give_pages() -> None:
    def returns() -> Iterator[str]:
        return iter("ab")

    async def awaited() -> list[str]:
        return ["a"]

    for function in (returns, awaited):
        with pytest.raises(TypeError, match="pages=True is for a function that yields pages"):
            make_tool(function, pages=True)


def test_nothing_can_be_promised_of_a_page_since_it_may_be_empty() -> None:
    assert make_tool(as_told, pages=True).output_schema is None
    with pytest.raises(ValueError, match=r"tool as_told: output_schema: pages cannot have one"):
        make_tool(as_told, pages=True, output_schema={"type": "object"})


def paged(**settings: Any) -> Tool:
    return make_tool(as_told, pages=True, **settings)


def test_how_far_ahead_and_how_patiently_is_the_authors_to_say() -> None:
    assert paged(pages_ahead=7, page_wait_s=0.5).paged == Paged(ahead=7, wait_s=0.5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pages_ahead": 0}, "pages_ahead: expected at least 1, got 0"),
        ({"pages_ahead": -1}, "pages_ahead: expected at least 1"),
        ({"page_wait_s": 0}, "page_wait_s: expected seconds above 0"),
        ({"page_wait_s": math.inf}, "page_wait_s: expected seconds above 0"),
        ({"page_wait_s": math.nan}, "page_wait_s: expected seconds above 0"),
        ({"expected_s": 0}, "expected_s: expected seconds above 0"),
        ({"expected_s": -1.0}, "expected_s: expected seconds above 0"),
        ({"expected_s": math.inf}, "expected_s: expected seconds above 0"),
        ({"resume_max_s": 0}, "resume_max_s must be above 0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"tool as_told: .*{sentence}"):
        paged(**settings)


@pytest.mark.parametrize(("expected_s", "listed"), [(90, "90"), (0.5, "0.5"), (90.0, "90.0")])
def test_how_long_a_call_takes_is_listed(expected_s: float, listed: str) -> None:
    entry = listing(a_tool(expected_s=expected_s))
    assert entry["_meta"] == {"mcp-streams/expectedSeconds": expected_s}
    assert str(entry["_meta"]["mcp-streams/expectedSeconds"]) == listed
    assert mcp.Tool.model_validate(entry).meta == entry["_meta"]
    assert "_meta" not in listing(a_tool())


def test_a_server_takes_all_of_these_settings() -> None:
    server = Server("tested")
    settings: dict[str, Any] = {"pages_ahead": 2, "page_wait_s": 3.0, "expected_s": 4.0}
    assert server.tool(pages=True, **settings)(as_told) is as_told
    tool = server.tools.get("as_told")
    assert tool is not None
    assert (tool.paged, tool.expected_s) == (Paged(2, 3.0), 4.0)


def test_a_server_whose_calls_cannot_be_resumed_takes_no_pages() -> None:
    server = Server("tested", resume_max_s=0)
    with pytest.raises(ValueError, match="tool as_told: pages need a resume_max_s above 0"):
        server.tool(pages=True)(as_told)
    assert server.tools.get("as_told") is None
    server.tool(pages=True, resume_max_s=5)(as_told)
