"""The output of the command for any message and result of a server, and on a terminal."""

import json
from typing import Any

import pytest

from streams import messages
from streams.cli.actions.output import (
    ERROR_CHARS_MAX,
    Display,
    as_json_text,
    harmless,
    one_line,
    print_result,
)
from streams.messages import Message

CONTROLS = [
    *(chr(code) for code in range(32) if chr(code) not in "\t\n"),
    *map(chr, range(0x7F, 0xA0)),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    *"\xad\u200b\u2060\ufeff\U000e0001\U000e0041\U000e007f",
    "\ud800",
    "\udfff",
]
HARMLESS = "a\tb\nc é 語 \u200d 😀"


def test_what_controls_a_terminal_does_not_reach_one() -> None:
    for control in CONTROLS:
        assert harmless(f"a{control}b") == "a\N{REPLACEMENT CHARACTER}b", hex(ord(control))
    assert harmless(HARMLESS) == HARMLESS


def test_json_escapes_it_and_says_the_same() -> None:
    value = {"".join(CONTROLS[:-2]): [*CONTROLS[:-2], HARMLESS]}
    text = as_json_text(value)
    assert json.loads(text) == value
    assert not set(text).intersection(CONTROLS)
    assert "é 語" in text, "the rest is left as it is"


def test_a_word_that_is_not_utf8_is_escaped_in_json() -> None:
    """Python has a surrogate for each byte of a command line that it cannot decode."""
    text = as_json_text({"journal\udcff": ["x\udcff.db", 1, None], "name": "é"})
    assert json.loads(text) == {"journal\\udcff": ["x\\udcff.db", 1, None], "name": "é"}


def test_an_error_is_a_line_of_bounded_length() -> None:
    assert one_line(" a\nb\r\n\tc\u2028d ") == "a b c d"
    assert len(one_line("x" * 1_000_000)) == ERROR_CHARS_MAX + 1


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "abc"}, '{"content":"abc"}'),
        ({"content": {"text": "x"}}, '{"content":{"text":"x"}}'),
        ({"content": 5}, '{"content":5}'),
        ({"content": None}, '{"content":null}'),
        ({"content": []}, '{"content":[]}'),
        ({"content": ["a", 1, None, [2]]}, '"a"\n1\nnull\n[2]'),
        ({"content": [{}]}, "{}"),
        ({"content": [{"type": "text", "text": 7}]}, "[text]"),
        ({"content": [{"type": ["text"]}]}, '{"type":["text"]}'),
        ({"content": [{"type": "resource", "resource": "r"}]}, "[resource]"),
        ({"content": [{"type": "resource", "resource": {"uri": 1, "blob": 2}}]}, "[resource]"),
        ({"content": [{"type": "image", "data": {"a": 1}}]}, "[image]"),
        ({"content": [{"type": "image", "mimeType": "image/png", "data": "AAAA"}]}, None),
        ("abc", '"abc"'),
        (None, "null"),
        ([1], "[1]"),
    ],
)
def test_a_result_of_any_shape_is_shown(
    result: Any, shown: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(result, as_json=False)
    assert capsys.readouterr().out == f"{shown or '[image image/png 3 bytes]'}\n"
    print_result(result, as_json=True)
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize(
    "params",
    [
        b"{}",
        b"[]",
        b"null",
        b'"text"',
        b'{"level":5,"data":{"a":[]}}',
        b'{"progress":"1","total":[]}',
        b'{"progress":1e308,"total":1e-300,"message":"x"}',
        b'{"progress":-1,"total":0}',
        b'{"progress":null}',
        b"[" * 5_000 + b"]" * 5_000,
        b'"\xff\xfe"',
        b"1e999",
    ],
)
@pytest.mark.parametrize("method", ["notifications/progress", "notifications/message", "x"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_notification_of_any_shape_is_shown_in_a_line(
    method: str, params: bytes, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    line = b'{"jsonrpc":"2.0","method":"%b","params":%b}' % (method.encode(), params)
    try:
        message: Message = messages.look(line)
    except (ValueError, RecursionError):
        return  # it does not come so far
    with Display(as_json=as_json) as display:
        display.show(message)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_bar_that_cannot_be_drawn_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Display(as_json=False) as display:
        for params in (
            {"progress": 1e308, "total": 1e-300},
            {"progress": -1e308},
            {"progress": 1, "total": 1e308},
            {"progress": 1, "total": -1},
            {"progress": 1, "total": 0},
            {"progress": 2**60, "message": "a\nb\x9b"},
            {"progress": 1, "total": 2, "message": "a\nb\x9b"},
        ):
            display.show(messages.look(messages.notification("notifications/progress", params)))
