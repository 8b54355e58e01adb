"""Runs and blocks of lines, and responses that are sent as the answer to another request."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import messages
from streams.client.buffer import Batch, cut
from streams.errors import Refusal, refusal
from streams.messages import BATCH_LINES_AIM, BATCH_LINES_MAX, Block, Run, TooLarge
from streams.protocol import extension
from tests.rigs.toolkit import SUBCLASSED
from transports.lines import LineSplitter, in_blocks, lines_of

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


def test_a_response_that_is_too_deep_to_be_readdressed_is_an_error() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    again = messages.readdressed(b'{"jsonrpc":"2.0","id":1,"result":%b}\n' % deep, "two")
    found = messages.parse(again)
    assert found.id == "two"
    assert b"nested too deeply" in bytes(found.error)  # type: ignore[arg-type]


NOTE = messages.notification("notifications/message", {"level": "info", "data": "x"})
LONG = messages.notification("notifications/message", {"level": "info", "data": "x" * 2_000})
ASK = messages.request("ask-1", "roots/list", {})
HEADER = extension.position("s", Run(1, 3, b""))


def cut_up(data: bytes, most: int) -> list[Batch]:
    block, at = Block(b"before\n" + data + b"after", 7, 7 + len(data)), 7
    found = []
    while at < block.end:
        batch, at = cut(block, at, most)
        found.append(batch)
    assert at == block.end
    return found


@given(
    lines=st.lists(st.sampled_from([NOTE, LONG, ASK, HEADER, b"\n", b"{}\n"]), min_size=1),
    times=st.integers(1, 40),
    most=st.integers(0, 400),
)
def test_pieces_are_the_lines_in_order_and_counted(
    lines: list[bytes], times: int, most: int
) -> None:
    data = b"".join(lines * times)
    found = cut_up(data, most)
    assert b"".join(batch.body for batch in found) == b"".join(filter(b"\n".__ne__, lines * times))
    for batch in found:
        assert batch.count == batch.body.count(b"\n") <= max(1, min(most, BATCH_LINES_MAX))
        assert batch.is_plain <= all(line.startswith(NOTE[:40]) for line in batch.lines)  # type: ignore[union-attr]


def test_messages_of_one_size_make_pieces_of_one_size() -> None:
    for line in (NOTE, LONG):
        assert {batch.count for batch in cut_up(line * 2 * BATCH_LINES_AIM, 1_000)} == {
            BATCH_LINES_AIM
        }


@pytest.mark.parametrize("line", [ASK, b"\n", b"babble\n", b' {"jsonrpc":"2.0"}\n'])
def test_plain_is_only_what_begins_as_notifications_do(line: bytes) -> None:
    (batch,) = cut_up(NOTE * 3, 300)
    assert batch.is_plain
    for lines in ([line, NOTE], [NOTE, line], [NOTE, line, NOTE]):
        assert not any(batch.is_plain for batch in cut_up(b"".join(lines), 300) if batch.count > 1)


def test_a_batch_can_be_parted() -> None:
    batch = Batch(3, NOTE + ASK + LONG)
    assert batch.until(2) == Batch(2, NOTE + ASK)
    assert batch.after(2) == Batch(1, LONG)
    assert batch.until(3) is batch.after(0) is batch
    assert batch.lines == [NOTE[:-1], ASK[:-1], LONG[:-1]]
    assert batch.last == LONG[:-1]
    assert Batch.of(TooLarge(7)).lines == [TooLarge(7)]


def blocks_of(pieces: Sequence[bytes], limit: int) -> list[Block | TooLarge]:
    splitter = LineSplitter(limit)
    found = []
    for piece in pieces:
        found += splitter.blocks(b"<" + piece + b">\n", 1, 1 + len(piece))
    return found


@given(
    pieces=st.lists(st.text("ab\r\n", max_size=12).map(str.encode), max_size=20),
    limit=st.integers(1, 6),
)
def test_blocks_hold_what_lines_are_however_the_bytes_are_cut(
    pieces: list[bytes], limit: int
) -> None:
    splitter = LineSplitter(limit)
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    found = blocks_of(pieces, limit)
    assert lines_of(found) == lines
    assert lines_of(in_blocks(lines)) == lines
    for block in found:
        if isinstance(block, Block):
            assert block.data[: block.end].endswith(b"\n")


def pinging(value: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":' + value + b"}}"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (rb'"\ud800"', "half of a surrogate pair"),
        (rb'"\uD83D and more"', "half of a surrogate pair"),
        (rb'"\udc00"', "half of a surrogate pair"),
        (rb'"\ud83d\ude00', "Input data was truncated"),
    ],
    ids=["first half", "first half before text", "second half", "a pair and no end"],
)
def test_what_cannot_be_read_is_said(value: bytes, why: str) -> None:
    with pytest.raises(Refusal, match=f"Not UTF-8 JSON: {why}"):
        messages.parse(pinging(value))


HALVES = [rb'"\ud800"', rb'"\uD83D and more"', rb'"\udc00"']


@pytest.mark.parametrize(
    "half", HALVES, ids=["first half", "first half before text", "second half"]
)
def test_half_a_surrogate_pair_hides_no_id(half: bytes) -> None:
    """JavaScript writes it as JSON: its client would wait for the answer."""
    assert messages.salvage_id(pinging(half)) == 1
    assert messages.salvage_id(b'{"method":"ping","params":{"a":' + half + b'},"id":"x"}') == "x"
    assert messages.salvage_id(b'{"jsonrpc":"2.0","method":"ping","id":' + half + b"}") is None


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
def test_lists_and_objects_are_counted_without_those_in_strings(value: object) -> None:
    structure = messages._structure(msgspec.json.encode(value))
    assert structure.count(b"[") + structure.count(b"{") == count(value)


@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_message_that_is_nested_too_deeply_is_refused(opened: bytes, closed: bytes) -> None:
    def nested(depth: int) -> bytes:
        inside = opened * depth + b'"' + b"[" * 999 + b'"' + closed * depth
        return pinging(b"[" + b"[]," * 999 + inside + b"]")

    # The message, its params and the list are three.
    deepest = nested(messages.NESTED_MAX - 3)
    assert messages.parse_bounded(deepest) == messages.parse(deepest)
    with pytest.raises(Refusal, match="nest at most 500") as refused:
        messages.parse_bounded(nested(messages.NESTED_MAX - 2))
    assert refused.value.data == {"reason": "too_large", "limit": 500}


@pytest.mark.parametrize(("value", "text"), SUBCLASSED)
def test_an_instance_of_a_subclass_is_encoded_as_what_it_holds(value: object, text: str) -> None:
    assert messages.encode({"data": value}).decode() == f'{{"data":{text}}}'


def test_a_value_that_json_has_not_is_refused_with_its_class() -> None:
    with pytest.raises(TypeError, match="objects of type complex is unsupported"):
        messages.encode([1j])


def test_raw_json_with_newlines_is_put_into_one_line() -> None:
    pretty = msgspec.Raw(b'{\r\n  "a": [1,\n "b\\n"]\n}')
    made = (
        messages.notification("x", pretty),
        messages.result(1, {"found": pretty}),
        messages.request(1, "x", pretty),
        messages.error(1, Refusal(-1, "x", pretty)),
    )
    for line in made:
        assert (line.count(b"\n"), line[-1:]) == (1, b"\n")
        assert b'{"a":[1,"b\\n"]}' in line
