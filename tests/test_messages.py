"""Runs that end where a response does, and responses as the answer to another request."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import messages
from streams.errors import Refusal, refusal
from streams.messages import Run

LINES = st.lists(st.binary(max_size=5).map(lambda b: b.replace(b"\n", b"") + b"\n"), min_size=1)


@given(LINES, st.integers(1, 5), st.data())
def test_a_run_until_a_seq_has_what_came_up_to_it(
    lines: list[bytes], first: int, data: st.DataObject
) -> None:
    run = Run(first, len(lines), b"".join(lines))
    seq = data.draw(st.integers(run.seq, run.last + 3))
    head = run.until(seq)
    count = min(seq, run.last) + 1 - first
    assert head == Run(first, count, b"".join(lines[:count]))
    if head.last < run.last:
        assert head.body + run.after(head.last).body == run.body
        assert run.after(head.last).seq == head.last + 1


@pytest.mark.parametrize("request_id", [7, "7", 0, "", "ü"])
def test_a_result_may_be_the_answer_to_another_request(request_id: int | str) -> None:
    line = b'{"jsonrpc":"2.0","id":1,"result":{"n":1.0,"big":12345678901234567890123}}\n'
    again = messages.readdressed(line, request_id)
    assert msgspec.json.decode(again)["id"] == request_id
    assert again.endswith(b'"result":{"n":1.0,"big":12345678901234567890123}}\n')  # as it was
    assert messages.readdressed(again, 1) == line


def test_an_error_may_be_the_answer_to_another_request() -> None:
    line = messages.error(1, refusal("too_large", limit=5))
    again = messages.readdressed(line, "two")
    assert again == messages.error("two", refusal("too_large", limit=5))
    assert messages.readdressed(again, 1) == line


def pinging(value: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":' + value + b"}}"


MANY = messages.CONTAINERS_MAX
BRACKETS = b'[{"}' * (MANY // 2)


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"[]," * MANY + b"1]",
        b"[" + b"{}," * MANY + b"1]",
        b"[" + b'["[",{}],' * (MANY // 2) + b"1]",
        b"[" + b'{"\\\\":[]},' * (MANY // 2) + b"1]",
    ],
    ids=["lists", "objects", "beside strings", "under names of a backslash"],
)
def test_a_message_of_too_many_lists_and_objects_is_refused(value: bytes) -> None:
    line = pinging(value)
    assert messages.parse(line).method == "ping"
    with pytest.raises(Refusal, match=f"are too many: send at most {MANY}") as refused:
        messages.parse_bounded(line)
    assert refused.value.data == {"reason": "too_large", "limit": MANY}


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"[]," * (MANY - 4) + b"1]",
        b"[" + b"1," * 4 * MANY + b"1]",
        msgspec.json.encode(BRACKETS.decode()),
        msgspec.json.encode(msgspec.json.encode(BRACKETS.decode()).decode()),
        msgspec.json.encode(["[", "{\\"] * MANY),
        b"[" + b"[]," * (4 * MANY) + b'"' + b"x" * 64 * MANY + b'"]',
    ],
    ids=["as many", "numbers", "in a string", "in JSON in a string", "in strings", "for its size"],
)
def test_brackets_in_strings_are_no_lists(value: bytes) -> None:
    line = pinging(value)
    assert messages.parse_bounded(line) == messages.parse(line)


JSON = st.recursive(
    st.text('\\"[{]}n', max_size=5) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('\\"[{', max_size=3), inner, max_size=4)
    ),
)


def count(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else 0


@given(JSON)
def test_lists_and_objects_are_counted_exactly_where_there_may_be_too_many(value: object) -> None:
    assert messages._containers(msgspec.json.encode(value), -1) == count(value)
