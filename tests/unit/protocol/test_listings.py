"""Lists of tools as servers write them: strict hints, and tools that cannot be read."""

import json
from typing import Any

import msgspec
import pytest

from streams.protocol.listings import matches, next_cursor, tools_on


def page(*tools: Any, **more: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps({"tools": tools, **more}).encode())


def hints(found: msgspec.Raw) -> dict[str, bool]:
    return {each.name: each.is_hinted for each in tools_on(found)}


@pytest.mark.parametrize("name", ["readOnlyHint", "idempotentHint"])
@pytest.mark.parametrize(
    ("value", "is_hinted"),
    [(True, True), *((each, False) for each in (False, "false", "true", 1, 0, None, [True], {}))],
)
def test_a_hint_counts_only_if_it_is_true(name: str, value: Any, is_hinted: bool) -> None:
    assert hints(page({"name": "a", "annotations": {name: value}})) == {"a": is_hinted}


def test_one_hint_is_enough_whatever_the_other_is() -> None:
    both = {"readOnlyHint": "no", "idempotentHint": True, "title": 5}
    assert hints(page({"name": "a", "annotations": both})) == {"a": True}


@pytest.mark.parametrize(
    "bad", [None, 7, "a", [], {}, {"name": 7}, {"name": None}, {"annotations": {}}]
)
def test_a_tool_that_cannot_be_read_does_not_hide_the_others(bad: Any) -> None:
    good = {"name": "b", "annotations": {"readOnlyHint": True}}
    assert hints(page({"name": "a"}, bad, good)) == {"a": False, "b": True}


@pytest.mark.parametrize("annotations", [None, 7, "readOnlyHint", [], [True]])
def test_a_tool_with_unreadable_annotations_has_no_hint(annotations: Any) -> None:
    assert hints(page({"name": "a", "annotations": annotations})) == {"a": False}


@pytest.mark.parametrize("text", [b"null", b"[]", b"7", b'{"tools": {}}', b"{}"])
def test_a_page_without_a_list_has_no_tools(text: bytes) -> None:
    assert tools_on(msgspec.Raw(text)) == []


@pytest.mark.parametrize(("value", "cursor"), [("x", "x"), ("", ""), (None, None), (7, None)])
def test_the_next_cursor_is_text(value: Any, cursor: str | None) -> None:
    found = page({"name": "a"}, nextCursor=value)
    assert next_cursor(found) == cursor
    assert hints(found) == {"a": False}
    assert next_cursor(page()) is None


@pytest.mark.parametrize(
    ("globs", "hint", "is_selected"),
    [
        ((), True, False),
        (("read_*",), False, True),
        (("READ_*",), True, False),
        (("hinted",), False, False),
        (("hinted",), True, True),
        (("other", "hinted"), True, True),
        (("*",), False, True),
    ],
)
def test_tools_are_selected_by_globs_and_hints(
    globs: tuple[str, ...], hint: bool, is_selected: bool
) -> None:
    assert matches(globs, "read_file", hint) == is_selected


def test_the_word_for_hints_is_no_glob() -> None:
    assert not matches(("hinted",), "hinted", False)
