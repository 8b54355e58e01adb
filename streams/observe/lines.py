"""The messages of a call in the words of operators: kinds, one-line texts, and counts of kinds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from streams import messages
from streams.messages import Message, Run

SHOWN_BYTES_MAX: Final = 64 * 1024  # a longer message is told without its content
TEXT_LETTERS_MAX: Final = 300

NULL: Final = msgspec.Raw(b"null")

Kind = Literal["progress", "log", "notification", "question", "page", "result", "error"]

# In the order in which they are told.
KINDS: Final[tuple[tuple[Kind, str, str], ...]] = (
    ("progress", "progress", "progress"),
    ("log", "log message", "log messages"),
    ("notification", "notification", "notifications"),
    ("question", "question", "questions"),
    ("page", "page", "pages"),
    ("result", "result", "results"),
    ("error", "error", "errors"),
)

_BY_METHOD: Final[dict[str, Kind]] = {
    "notifications/progress": "progress",
    "notifications/message": "log",
}


class MessageView(msgspec.Struct, frozen=True, rename="camel"):
    """One message of a call. `message` is null where it is too long to be shown."""

    seq: int
    kind: Kind
    method: str
    size: int  # bytes
    text: str  # one line of its content
    message: msgspec.Raw


def views(runs: Iterable[Run], pages: Sequence[int] = ()) -> list[MessageView]:
    """The messages of these runs. `pages` are the seqs of responses that are not the last one."""
    return [
        view(seq, line, is_page=seq in pages)
        for run in runs
        for seq, line in enumerate(run.lines, run.seq)
    ]


def view(seq: int, line: bytes, *, is_page: bool = False) -> MessageView:
    """One message, as operators see it."""
    try:
        message = messages.look(line)
    except (ValueError, RecursionError):
        return MessageView(seq, "notification", "", len(line), "(unreadable)", NULL)
    kind: Kind = "page" if is_page else kind_of(message)
    is_shown = len(line) <= SHOWN_BYTES_MAX
    return MessageView(
        seq=seq,
        kind=kind,
        method=message.method if isinstance(message.method, str) else "",
        size=len(line),
        text=_text(kind, message) if is_shown else f"({len(line):,} bytes)",
        message=msgspec.Raw(line.rstrip()) if is_shown else NULL,
    )


def kind_of(message: Message) -> Kind:
    """The kind of a message that a server sends."""
    if isinstance(message.method, str):
        if message.id is not msgspec.UNSET:
            return "question"
        return _BY_METHOD.get(message.method, "notification")
    return "error" if message.result is msgspec.UNSET else "result"


def counted(runs: Iterable[Run], pages: Sequence[int] = ()) -> Counter[Kind]:
    """How many messages of each kind these runs have."""
    count: Counter[Kind] = Counter()
    for run in runs:
        try:
            found = messages.look_at_lines(run.body)
        except (ValueError, RecursionError):
            found = []
        if len(found) != run.count:
            count["notification"] += run.count  # damaged; `verify` says so
            continue
        for seq, message in enumerate(found, run.seq):
            count["page" if seq in pages else kind_of(message)] += 1
    return count


def in_words(count: Mapping[Kind, int]) -> str:
    """Counts in words: 35 progress, 1 question, 1 result."""
    return ", ".join(
        f"{count[kind]:,} {one if count[kind] == 1 else many}"
        for kind, one, many in KINDS
        if count.get(kind)
    )


def _text(kind: Kind, message: Message) -> str:
    try:
        return " ".join(_said(kind, message).split())[:TEXT_LETTERS_MAX]
    except (ValueError, RecursionError):  # the params of another server may have any shape
        return message.method if isinstance(message.method, str) else ""


def _said(kind: Kind, message: Message) -> str:
    if kind in ("result", "page"):
        return _of_result(messages.decode(_raw(message.result), Any))
    if kind == "error":
        found = messages.decode(_raw(message.error), Any)
        return str(found.get("message", "")) if isinstance(found, dict) else str(found)
    params = messages.decode(message.params, Any)
    if not isinstance(params, dict):
        return ""
    if kind == "progress":
        total = "" if params.get("total") is None else f"/{params['total']}"
        return f"{params.get('progress')}{total} {params.get('message') or ''}"
    if kind == "log":
        data = params.get("data")
        return f"{params.get('level')}: {data if isinstance(data, str) else _json(data)}"
    asked = params.get("message")
    return f"{message.method} {asked if isinstance(asked, str) else _json(params)}"


def _of_result(result: Any) -> str:
    blocks = result.get("content") if isinstance(result, dict) else None
    texts = [
        block["text"]
        for block in (blocks if isinstance(blocks, list) else [])
        if isinstance(block, dict) and isinstance(block.get("text"), str)
    ]
    return " ".join(texts) if texts else _json(result)


def _raw(found: msgspec.Raw | msgspec.UnsetType) -> msgspec.Raw:
    return NULL if found is msgspec.UNSET else found


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
