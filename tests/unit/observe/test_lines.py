"""Messages are told by kind, and in one line of their content."""

import pytest

from streams import messages
from streams.messages import Run
from streams.observe.lines import SHOWN_BYTES_MAX, counted, in_words, view

PROGRESS = messages.notification("notifications/progress", {"progressToken": 1, "progress": 3})
QUESTION = messages.request("q", "elicitation/create", {"message": "How many?"})
RESULT = messages.result(1, {"content": [{"type": "text", "text": "a\nb"}]})
DEEP = b'{"jsonrpc":"2.0","id":1,"result":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        (PROGRESS, "progress", "3"),
        (
            messages.notification(
                "notifications/progress", {"progress": 1, "total": 4, "message": "one"}
            ),
            "progress",
            "1/4 one",
        ),
        (
            messages.notification("notifications/message", {"level": "info", "data": {"a": 1}}),
            "log",
            'info: {"a":1}',
        ),
        (QUESTION, "question", "elicitation/create How many?"),
        (messages.request("q", "roots/list", {}), "question", "roots/list {}"),
        (messages.notification("notifications/x", [1]), "notification", ""),
        (RESULT, "result", "a b"),
        (messages.result(1, {"n": 1}), "result", '{"n":1}'),
        (messages.error(1, messages.refusal("cancelled")), "error", None),
        (b"\xff\n", "notification", "(unreadable)"),
        (DEEP, "notification", "(unreadable)"),
    ],
)
def test_a_message_has_a_kind_and_a_text(line: bytes, kind: str, text: str | None) -> None:
    found = view(7, line)
    assert (found.seq, found.kind, found.size) == (7, kind, len(line))
    assert text is None or found.text == text


def test_a_long_message_is_not_shown() -> None:
    line = messages.result(1, {"content": [{"type": "text", "text": "x" * SHOWN_BYTES_MAX}]})
    found = view(1, line)
    assert bytes(found.message) == b"null"
    assert found.text == f"({len(line):,} bytes)"


def test_what_was_missed_is_told_in_words() -> None:
    body = PROGRESS * 35 + QUESTION + RESULT
    count = counted([Run(1, 37, body)])
    assert in_words(count) == "35 progress, 1 question, 1 result"
    assert in_words(counted([Run(1, 37, body)], pages=[37])) == "35 progress, 1 question, 1 page"
    assert in_words(counted([])) == ""
    assert in_words(counted([Run(1, 1, DEEP)])) == "1 notification"
