"""Messages, and the params of the dialects."""

import contextlib
import io
import json
from functools import partial
from typing import Any

import msgspec

from streams import messages
from streams.cli.actions.output import Display, as_json_text, print_result
from streams.client import wire
from streams.client.results import (
    CallToolResult,
    Prompt,
    PromptResult,
    Tool,
    one_of,
    page_of,
    tool_value,
)
from streams.engine.identity import call_digest
from streams.errors import INVALID_REQUEST, PARSE_ERROR, ClientError, Refusal, ToolFailed
from streams.logs import CONTROLS
from streams.messages import Kind, Message, Position
from streams.protocol.dialects import DIALECTS, page_token, questions, resumings
from streams.protocol.extension import ack, settings_of
from streams.protocol.vocabulary import Announcement, Poll, Resume, Standing, read_params


def parse(data: bytes) -> None:
    """A line is a message that agrees with JSON, or is refused with an error under its id."""
    try:
        message = messages.parse(data)
    except Refusal as refused:
        assert refused.code in (PARSE_ERROR, INVALID_REQUEST)
        if refused.code == INVALID_REQUEST:
            json.loads(data)
        answer = messages.parse(messages.error(messages.salvage_id(data), refused))
        assert answer.kind is Kind.ERROR
        return
    plain = json.loads(data)
    for name in ("id", "method"):
        known = getattr(message, name)
        assert (None if known is msgspec.UNSET else known) == plain.get(name)
    _look_again(message, data)
    if message.kind in (Kind.RESULT, Kind.ERROR):
        moved = messages.parse(messages.readdressed(data, "elsewhere"))
        assert (moved.id, moved.kind) == ("elsewhere", message.kind)
        assert (moved.result, moved.error) == (message.result, message.error)
        hear(message)


def _look_again(message: Message, data: bytes) -> None:
    """The parser for trusted peers finds the same."""
    assert messages.look(data) == message
    if b"\n" not in data:
        assert messages.look_at_lines(data + b"\n" + data + b"\n") == [message, message]


def hear(message: Message) -> None:
    """A client reads every response, whatever its shape."""
    if message.kind is Kind.ERROR:
        body = wire.error_of(message)
        assert body.retry_after_s >= 0
        assert isinstance(wire.as_error(body), ClientError)
        return
    assert isinstance(message.result, msgspec.Raw)
    assert messages.is_tool_error(message.result) in (True, False)
    assert isinstance(wire.how_it_ended(message), str)
    for field, shape in (("tools", Tool), ("prompts", Prompt), ("statuses", Standing)):
        try:
            page_of(message.result, field, shape)
        except ValueError as error:
            assert str(error)
    for whole in (CallToolResult, PromptResult):
        try:
            one_of(message.result, None, whole)
        except ValueError as error:
            assert str(error)
    try:
        tool_value(message.result, str)
    except (ValueError, ToolFailed) as error:
        assert str(error)


def read(data: bytes) -> None:
    """A server makes an intent of params or refuses them; a client can express the same intent.

    The caller of this parser has parsed the message, so the bytes are UTF-8.
    """
    if not _is_utf8(data):
        return
    params = msgspec.Raw(data)
    for method, word in (resumings() | questions()).items():
        try:
            intent = word.read(params)
        except Refusal as refused:
            assert refused.code < 0
            continue
        assert method
        _ask_again(intent)
    for reader in (page_token, ack, _digest, _settings):
        try:
            reader(params)
        except Refusal as refused:
            assert refused.message


def _digest(params: msgspec.Raw) -> None:
    """A digest does not depend on the order of keys."""
    digest = call_digest(params, "somebody")
    turned = dict(reversed(json.loads(bytes(params)).items()))
    assert call_digest(msgspec.Raw(json.dumps(turned).encode()), "somebody") == digest
    assert call_digest(params, "somebody else") != digest


def _settings(params: msgspec.Raw) -> None:
    settings = settings_of(read_params(params, dict[str, Any]))
    assert all(dialect.announcing for dialect in settings.dialects)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _ask_again(intent: object) -> None:
    for dialect in DIALECTS.values():
        if (
            isinstance(intent, Resume)
            and dialect.resuming
            and _fits(intent.stream, dialect.resuming)
        ):
            asked = dialect.resuming.ask(intent.stream or "", intent.token or "", intent.after)
            again = dialect.resuming.read(msgspec.Raw(msgspec.json.encode(asked)))
            assert (again.stream, again.after) == (intent.stream, intent.after)
            assert (again.token or "") == (intent.token or "")
        if isinstance(intent, Poll) and dialect.polling and _fits(intent.stream, dialect.resuming):
            request_id = 0 if intent.request_id is None else intent.request_id
            asked = dialect.polling.ask(
                intent.stream or "", intent.token or "", request_id, intent.after
            )
            found = dialect.polling.read(msgspec.Raw(msgspec.json.encode(asked)))
            assert (found.stream, found.after) == (intent.stream, intent.after)


def _fits(stream: str | None, word: Any) -> bool:
    """Whether a dialect can express this intent by the stream's id."""
    return (stream is None) == word.takes_over


def announced(data: bytes) -> None:
    """A client reads an announcement or refuses it; a server can write each one that was read."""
    params = msgspec.Raw(data)
    for dialect in DIALECTS.values():
        word = dialect.announcing
        if word is None:
            continue
        try:
            made: Announcement = word.hear(params)
        except ValueError as error:
            assert str(error)
            continue
        if made.max_s is not None:
            again = word.hear(msgspec.Raw(msgspec.json.encode(word.tell(made))))
            assert (again.stream, again.token, again.request_id) == (
                made.stream,
                made.token,
                made.request_id,
            )
            assert (again.min_s, again.max_s) == (made.min_s, made.max_s)
    for hear_other in (partial(messages.decode, shape=Position), wire.progress_token):
        try:
            hear_other(params)
        except ValueError as error:
            assert str(error)


def shown(data: bytes) -> None:
    """Results and messages are shown in lines without terminal controls; JSON stays JSON."""
    try:
        value = msgspec.json.decode(data)
        message = messages.look(
            b'{"jsonrpc":"2.0","method":"notifications/progress","params":%b}' % data
        )
    except (ValueError, RecursionError):
        return
    text = as_json_text(value)
    assert json.loads(text) == json.loads(data)
    assert not CONTROLS.search(text)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for as_json in (False, True):
            print_result(value, as_json=as_json)
            print_result({"content": value}, as_json=as_json)
            print_result({"content": [value]}, as_json=as_json)
            with Display(as_json=as_json) as display:
                display.show(message)
    assert said.getvalue().count("\n") >= 8
