"""Checks against JSON Schemas: their cost, its estimate, and the sentences about mismatches."""

import time
from typing import Any

import pytest

from streams.schemas.inputs import INLINE_WORK_MAX
from streams.schemas.validator import SENTENCE_MAX, Validator

TREE: dict[str, Any] = {
    "properties": {"tree": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
}
BRANCHES = [
    {"type": "object", "properties": {"of": {"$ref": "#/$defs/node"}}},
    {"type": "object", "properties": {"of": {"$ref": "#/$defs/node"}, "no": False}},
    {"type": "integer"},
]
BRANCHING: dict[str, Any] = {
    "properties": {"tree": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"anyOf": BRANCHES}},
}


class TestWhatACheckTakes:
    def test_it_grows_with_the_value_and_with_the_schema(self) -> None:
        small = Validator({"properties": {"a": {"type": "integer"}}})
        large = Validator({"properties": {"a": {"enum": list(range(1000))}}})
        assert small.work(100) < large.work(100) < large.work(1000) < float("inf")
        assert small.work(4096) <= INLINE_WORK_MAX < large.work(4096)

    def test_each_reference_counts_as_what_it_refers_to(self) -> None:
        doubled: dict[str, Any] = {"$defs": {"a0": {"type": "integer"}}}
        for level in range(1, 40):
            below = {"$ref": f"#/$defs/a{level - 1}"}
            doubled["$defs"][f"a{level}"] = {"allOf": [below, below]}
        doubled["properties"] = {"a": {"$ref": "#/$defs/a39"}}
        assert Validator(doubled).work(1) > 2**39

    def test_a_tree_is_walked_once_and_branches_may_multiply(self) -> None:
        assert Validator(TREE).work(100) < INLINE_WORK_MAX
        assert Validator(BRANCHING).work(1) == float("inf")

    @pytest.mark.parametrize(
        "node",
        [
            {"properties": {"a": {"$ref": "#"}}, "patternProperties": {"a": {"$ref": "#"}}},
            {"items": {"$ref": "#"}, "contains": {"$ref": "#"}},
            {"items": {"$ref": "#", "minItems": 1}},
            {"if": {"items": {"$ref": "#"}}, "then": {"items": {"$ref": "#"}}},
            {"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}},
        ],
    )
    def test_whatever_may_look_twice_at_each_level_counts_as_exponential(self, node: Any) -> None:
        assert Validator(node).work(1) == float("inf")

    def test_data_is_no_schema(self) -> None:
        assert Validator({"const": {"$ref": "#/nowhere", "anyOf": [1]}}).work(1) < 100

    def test_a_pattern_that_is_small_may_still_be_costly(self) -> None:
        plain = Validator({"pattern": "^a+$"})
        assert Validator({"pattern": "^(a|b){1,200}$"}).work(1) > 10 * plain.work(1)


class TestLinear:
    @pytest.mark.parametrize(
        ("schema", "value"),
        [
            ({"uniqueItems": True}, [{"k": [index]} for index in range(20_000)]),
            ({"uniqueItems": True}, [[index] for index in range(20_000)]),
            ({"uniqueItems": True}, [{str(index): 0} for index in range(20_000)]),
        ],
    )
    def test_items_are_not_compared_pair_by_pair(self, schema: Any, value: Any) -> None:
        """Of 200,000,000 pairs. The CPU time with and without them differs by a factor of 1,000."""
        before = time.process_time()
        assert Validator(schema).fits(value)
        assert time.process_time() - before < 5

    @pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", "(x+x+)+y", "(.*)*b"])
    def test_a_pattern_does_not_backtrack(self, pattern: str) -> None:
        """Backtracking would take billions of years."""
        text = "a" * 5_000 + "!" + "x" * 5_000
        assert not Validator({"pattern": pattern}).fits(text)


class TestSentences:
    @pytest.mark.parametrize(
        ("schema", "value", "sentence"),
        [
            ({"required": ["a"]}, {}, "a: missing"),
            ({"items": {"required": ["a"]}}, [{}], "[0].a: missing"),
            ({"type": "integer"}, "x", 'arguments: "x" is not of type "integer"'),
            (
                {"anyOf": [{"type": "integer"}, {"properties": {"a": {"type": "string"}}}]},
                {"a": 1},
                'a: 1 is not of type "string"',
            ),
            ({"enum": [1, 2]}, 3, "arguments: 3 is not one of 1 or 2"),
        ],
    )
    def test_the_place_comes_first(self, schema: Any, value: Any, sentence: str) -> None:
        assert Validator(schema).mismatch(value, "arguments") == sentence

    def test_what_cannot_be_compared_is_told(self) -> None:
        deep: list[Any] = []
        for _ in range(5_000):
            deep = [deep]
        validator = Validator({"uniqueItems": True})
        assert not validator.fits([deep, deep])
        told = validator.mismatch([deep, deep], "arguments")
        assert told == "arguments: nested too deeply or a number too large"

    def test_a_sentence_has_an_end(self) -> None:
        told = Validator({"type": "integer"}).mismatch("x" * 10_000, "arguments")
        assert told is not None
        assert len(told) == SENTENCE_MAX
