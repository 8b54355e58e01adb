"""A page's token is bound to what a call says, not to how that was written."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.engine.identity import call_digest
from streams.errors import Refusal
from tests.rigs.toolkit import patient


def digest(arguments: Any = None, *, name: str = "rows", principal: str = "os(0)") -> bytes:
    """Of a call with these arguments, given as JSON text or as what is to be encoded."""
    text = arguments if isinstance(arguments, bytes) else json.dumps(arguments).encode()
    params = b'{"name":%s,"arguments":%s}' % (json.dumps(name).encode(), text)
    return call_digest(msgspec.Raw(params), principal)


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ARGUMENTS = st.dictionaries(st.text(), ANY_JSON, max_size=4)


def rewritten(value: Any, backwards: bool) -> Any:
    """The same JSON value, otherwise written: other order of keys, `1.0` for `1` and back."""
    match value:
        case dict():
            items = reversed(value.items()) if backwards else value.items()
            return {key: rewritten(item, backwards) for key, item in items}
        case list():
            return [rewritten(item, backwards) for item in value]
        case int() if not isinstance(value, bool) and int(float(value)) == value:
            return float(value)
        case float() if value.is_integer():
            return int(value)
    return value


def same(a: Any, b: Any) -> bool:
    """Whether both are the same JSON value; Python takes True for 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@patient
@given(ARGUMENTS, st.booleans())
def test_how_a_value_is_written_does_not_count(arguments: Any, backwards: bool) -> None:
    again = rewritten(arguments, backwards)
    assert digest(again) == digest(arguments)
    spaced = json.dumps(again, indent=2, ensure_ascii=backwards).encode("utf-8", "surrogatepass")
    assert digest(spaced) == digest(arguments)


@patient
@given(ARGUMENTS, ARGUMENTS)
def test_calls_are_the_same_where_their_arguments_are(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) is same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"{}", b"null"),
        (b'{"n":1}', b'{"n":1.0}'),
        (b'{"n":1}', b'{"n":1e0}'),
        (b'{"n":100}', b'{"n":1E+2}'),
        (b'{"n":0}', b'{"n":-0.0}'),
        (b'{"n":[{"a":1,"b":[2]}]}', b'{"n": [{"b": [2.0], "a": 1}]}'),
        (b'{"\\u0061":"\\u00fc"}', '{"a":"ü"}'.encode()),
        (b'{"a":1,"a":2}', b'{"a":2}'),
    ],
)
def test_the_same_value(one: bytes, other: bytes) -> None:
    assert digest(one) == digest(other)


DIFFERENT = [
    b"{}",
    b'{"n":1}',
    b'{"n":true}',
    b'{"n":"1"}',
    b'{"n":null}',
    b'{"n":[1]}',
    b'{"n":1.5}',
    b'{"n":0}',
    b'{"n":false}',
    b'{"n":[]}',
    b'{"n":{}}',
    b'{"n":""}',
    b'{"N":1}',
    b'{"n":1,"m":null}',
    b'{"n":[1,2]}',
    b'{"n":[2,1]}',
    b'{"n":9007199254740992}',
    b'{"n":9007199254740993}',
    b"[]",
    b"[1]",
    b'"n"',
    b"1",
    b"true",
]


def test_other_values_are_other_calls() -> None:
    assert len({digest(arguments) for arguments in DIFFERENT}) == len(DIFFERENT)


def test_without_arguments_is_with_none() -> None:
    absent = call_digest(msgspec.Raw(b'{"name":"rows"}'), "os(0)")
    assert absent == digest(b"{}") == digest(b"null")


def test_nothing_else_in_the_params_counts() -> None:
    params = b'{"_meta":{"progressToken":7},"more":1,"resumeToken":"t","name":"rows"}'
    assert call_digest(msgspec.Raw(params), "os(0)") == digest(b"{}")


def test_another_tool_or_another_caller_is_another_call() -> None:
    names, principals = ("rows", "Rows", "", 'rows","x"'), ("", "os(0)", "os(1)", "bearer(a, b)")
    found = {digest(b"{}", name=n, principal=p) for n in names for p in principals}
    assert len(found) == len(names) * len(principals)


def test_a_digest_has_the_bytes_that_a_token_takes() -> None:
    assert len(digest(b"{}")) == 32


@pytest.mark.parametrize("digits", [20, 400, 4000])
def test_huge_numbers_are_told_apart(digits: int) -> None:
    one, other = b"1" * digits, b"1" * (digits - 1) + b"2"
    assert digest(b'{"n":%s}' % one) != digest(b'{"n":%s}' % other)


@pytest.mark.parametrize(
    "arguments",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"n":%s}' % (b"1" * 10_000),
    ],
    ids=["lists", "objects", "digits"],
)
def test_what_takes_too_much_to_compare_is_refused(arguments: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        digest(arguments)
    assert refused.value.code == -32602


@pytest.mark.parametrize("params", [b"{}", b"[]", b'{"name":5}', b"null"])
def test_what_is_no_call_is_refused(params: bytes) -> None:
    with pytest.raises(Refusal, match="Bad params"):
        call_digest(msgspec.Raw(params), "")
