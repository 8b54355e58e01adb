"""Messages of a stream, for people: what kind each is, and a line of what it says."""

from typing import Any, Final

import msgspec

from streams import messages
from streams.errors import Refusal
from streams.messages import Kind, Message

# A list shows the first letters of a message. A longer one than this is not parsed for that, since
# parsing takes longer than showing.
PARSED_BYTES_MAX: Final = 64 * 1024
SHOWN_LETTERS_MAX: Final = 300
# Of one message on a page of its own; browsers take long for more on a page.
WHOLE_BYTES_MAX: Final = 256 * 1024


class Seen(msgspec.Struct, frozen=True):
    """A message, as a list shows it."""

    seq: int
    kind: str
    text: str
    size: int  # bytes


def seen(seq: int, line: bytes) -> Seen:
    """What a list shows of a message."""
    size = len(line)
    if size > PARSED_BYTES_MAX:
        return Seen(seq, "long message", _start(line), size)
    try:
        kind, text = _told(messages.parse(line))
    except Refusal:
        kind, text = "unreadable", _start(line)
    return Seen(seq, kind, _short(text), size)


def pretty(line: bytes) -> tuple[str, int]:
    """A whole message, indented, and how many bytes of it are left out."""
    left_out = max(0, len(line) - WHOLE_BYTES_MAX)
    if left_out:
        return line[:WHOLE_BYTES_MAX].decode(errors="replace"), left_out
    try:
        return msgspec.json.format(line, indent=2).decode(errors="replace"), 0
    except ValueError:
        return line.decode(errors="replace"), 0


def _told(message: Message) -> tuple[str, str]:
    """The kind of a message, and what it says."""
    params = _decoded(message.params)
    if message.method == "notifications/progress":
        total = params.get("total")
        done = f"{params.get('progress')}" + (f" / {total}" if total is not None else "")
        return "progress", f"{done} {params.get('message', '')}"
    if message.method == "notifications/message":
        return f"log {params.get('level', '')}", _said(params.get("data"))
    if message.kind is Kind.NOTIFICATION:
        return "notification", f"{message.method} {_said(params)}"
    if message.kind is Kind.REQUEST:
        return "question", f"{message.method} {params.get('message', '') or _said(params)}"
    return _answer(message)


def _answer(message: Message) -> tuple[str, str]:
    if message.kind is Kind.ERROR:
        error = _decoded(message.error)
        return "error", f"{error.get('code')} {error.get('message', '')}"
    result = _decoded(message.result)
    kind = "tool error" if result.get("isError") is True else "result"
    content = result.get("content")
    if isinstance(content, list):
        texts = [each.get("text") for each in content if isinstance(each, dict)]
        shown = " ".join(text for text in texts if isinstance(text, str))
        if shown:
            return kind, shown
    return kind, _said(result)


def _decoded(raw: msgspec.Raw | msgspec.UnsetType) -> dict[str, Any]:
    """An object of a message; empty if it is something else."""
    if raw is msgspec.UNSET:
        return {}
    try:
        value = msgspec.json.decode(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _said(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _start(line: bytes) -> str:
    return _short(line[: 4 * SHOWN_LETTERS_MAX].decode(errors="replace"))


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SHOWN_LETTERS_MAX else f"{text[:SHOWN_LETTERS_MAX]}…"
