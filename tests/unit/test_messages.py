"""Runs that end where a response does, and responses as the answer to another request."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import messages
from streams.errors import refusal
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
