"""One call: its state, its timeline, its open questions and its messages."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

import msgspec

from streams.admin.page import calls, questions
from streams.admin.page.charts import MARKS, Rule, timeline
from streams.admin.page.html import Markup, join, tag
from streams.admin.page.layout import Region, region
from streams.admin.page.messages import pretty
from streams.clock import lasting, utc, wall
from streams.messages import Run
from streams.observe.history import Past, Sample
from streams.observe.lines import Kind, view
from streams.observe.registry import LIVE_STATES, CallView

MESSAGES_MAX: Final = 50  # on a page
READ_BYTES: Final = 1024 * 1024  # in one read of the journal
UPDATE_BYTES_MAX: Final = 4 * 1024 * 1024  # read for one update; the rest comes with the next
RULED: Final = frozenset(
    ["cut", "silent", "resumed", "asked", "answered", "restarted", "interrupted"]
)

ReadRuns = Callable[[int, int], Awaitable[Sequence[Run]]]
"""The kept messages behind a seq, and at most so many bytes of them."""

ReadPages = Callable[[], Awaitable[Collection[int]]]
"""The seqs of responses that are not the last one."""


class _Shown(msgspec.Struct, frozen=True):
    """A message in the table: see `MessageView`, whose content would take much memory."""

    seq: int
    kind: Kind
    size: int
    text: str


class Messages:
    """The messages that one browser is shown: the newest, or those before a seq."""

    def __init__(self, before: int | None = None) -> None:
        self.before = before
        self._seen: dict[int, _Shown] = {}
        self._read = 0

    async def advance(self, call: CallView, read: ReadRuns, pages: ReadPages) -> None:
        """Read what is new."""
        end = call.durable if self.before is None else min(call.durable, self.before - 1)
        after = max(self._read, end - MESSAGES_MAX)
        budget = UPDATE_BYTES_MAX
        interim = await pages() if after < end else ()
        while after < end and budget > 0:
            runs = await read(after, READ_BYTES)
            if not runs:
                break
            for run in runs:
                budget -= len(run.body)
                for seq, line in enumerate(run.lines, run.seq):
                    if end - MESSAGES_MAX < seq <= end:
                        found = view(seq, line, is_page=seq in interim)
                        self._seen[seq] = _Shown(seq, found.kind, found.size, found.text)
            after = runs[-1].last
        self._read = after
        for seq in [seq for seq in self._seen if seq <= end - MESSAGES_MAX]:
            del self._seen[seq]

    def region(self, call: CallView) -> list[Region]:
        """The table of messages, the newest first, and what stands below it."""
        parts = {
            f"message-{seq}": _message(call, self._seen[seq])
            for seq in sorted(self._seen, reverse=True)
        }
        inside: Sequence[Markup] = list(parts.values()) or [_no_messages(call)]
        rows = Region("messages", region("tbody", "messages", *inside), parts)
        return [rows, self._pager(call)]

    def _pager(self, call: CallView) -> Region:
        path = f"/calls/{call.id}"
        first = min(self._seen, default=0)
        newest = tag("a", "Newest", href=path, id="to-newest") if self.before else None
        older = None
        if first > 1 and first > call.delivered + 1 - MESSAGES_MAX:
            older = tag("a", "Older", href=f"{path}?before={first}", id="to-older", rel="next")
        told = f"{len(self._seen)} of {call.numbered}. Delivered messages are deleted."
        count = tag("span", told, class_="faint")
        html = region("nav", "pager", newest, count, older, class_="pager", aria_label="Messages")
        return Region("pager", html)


def regions(
    call: CallView, past: Past | None, messages: Messages, path: str, form_token: str
) -> list[Region]:
    """The parts of a call's page that change. With a `form_token` it has forms."""
    hidden = tag("input", type="hidden", name="form", value=form_token) if form_token else None
    return [
        _facts(call),
        _timeline(call, past),
        _moments(call, past),
        _questions(call, path, hidden),
        _actions(call, path, hidden),
        *messages.region(call),
    ]


def body(call: CallView, parts: Sequence[Region]) -> Markup:
    """The page of a call."""
    facts, chart, moments, asked, actions, table, more = (each.html for each in parts)
    head = tag(
        "tr",
        tag("th", "No.", scope="col", class_="c-seq number"),
        tag("th", "Kind", scope="col", class_="c-kind"),
        tag("th", "Text", scope="col", class_="c-text"),
        tag("th", "Size", scope="col", class_="c-bytes number"),
    )
    return tag(
        "main",
        calls.clock(),
        tag(
            "h2",
            tag("bdi", call.tool),
            " ",
            tag("span", call.id, class_="id faint"),
            class_="first",
        ),
        asked,
        facts,
        actions,
        tag("h2", "Timeline"),
        chart,
        tag("h2", "Moments"),
        moments,
        tag("h2", "Messages"),
        tag("table", tag("thead", head), table, class_="messages"),
        more,
    )


def whole(call: CallView, seq: int, line: bytes) -> Markup:
    """The page of one message."""
    text, left_out = pretty(line)
    return tag(
        "main",
        tag("h2", f"Message {seq} of ", tag("a", call.id, href=f"/calls/{call.id}", class_="id")),
        tag("p", calls.size(len(line)), class_="faint"),
        tag("pre", text),
        tag("p", f"{calls.size(left_out)} more are not shown.") if left_out else None,
    )


def _facts(call: CallView) -> Region:
    ended = call.ended_at
    facts: list[tuple[str, Markup | str | int | None]] = [
        ("State", calls.state(call)),
        ("Age", calls.age(call.began_at)),
        ("Began", utc(call.began_at)[:19].replace("T", " ") + " UTC"),
        ("Took", None if ended is None else f"{ended - call.began_at:.1f} s"),
        ("Transport", calls.transport(call) or "none attached"),
        ("Principal", tag("bdi", call.principal)),
        ("Pending messages", calls.pending(call)),
        ("Kept for", None if call.expires_at is None else _left(call.expires_at)),
        ("Restarts", call.restarts),
        ("Replica", call.owner or None),
    ]
    html = region(
        "dl",
        "facts",
        *(
            tag("div", tag("dt", name), tag("dd", value))
            for name, value in facts
            if value is not None
        ),
        class_="facts",
    )
    return Region("facts", html)


def _left(until: float) -> Markup:
    """The time until then; the page's script lets it shrink."""
    return tag("time", lasting(until - wall()), data_until=f"{until:.0f}")


def _timeline(call: CallView, past: Past | None) -> Region:
    now = wall()
    points = [] if past is None else list(past.samples)
    is_over = call.ended_at is not None and call.delivered == call.numbered
    until = max([each.at for each in points[-1:]] + [call.ended_at or now]) if is_over else now
    marks = (call.numbered, call.durable, call.handed, call.delivered)
    if not points:
        points = [Sample(call.began_at, *marks)]
    points.append(Sample(until, *marks))
    rules = [
        Rule(each.at, each.what, f"{each.what} at {each.seq}")
        for each in (() if past is None else past.moments)
        if each.what in RULED
    ]
    told = dict(zip(MARKS, marks, strict=True))
    label = ", ".join(f"{name} {seq}" for name, seq in told.items())
    since = min([each.at for each in points] + [each.at for each in rules])
    html = region(
        "div",
        "timeline",
        timeline(points, rules, until, label),
        tag("div", tag("span", clock_time(since)), tag("span", clock_time(until)), class_="ends"),
        tag(
            "ul",
            *(
                tag("li", tag("span", class_=f"swatch {name}"), f"{name} ", tag("b", seq))
                for name, seq in told.items()
            ),
            class_="legend",
        ),
        class_="chart",
    )
    return Region("timeline", html)


def _moments(call: CallView, past: Past | None) -> Region:
    none = "None since this process began."
    if call.is_elsewhere:
        none = "Its replica shows them: another one than this."
    found = [] if past is None else list(reversed(past.moments))
    listed = [
        tag(
            "li",
            tag("span", clock_time(each.at), class_="faint"),
            tag("span", each.what, class_=each.what),
            tag("span", f"at {each.seq}", tag("bdi", f" {each.details}" if each.details else "")),
        )
        for each in found
    ] or [tag("li", none, class_="none faint")]
    return Region("moments", region("ol", "moments", *listed, class_="moments", tabindex=0))


def _questions(call: CallView, path: str, hidden: Markup | None) -> Region:
    listed = []
    for question in call.questions:
        form = None
        if hidden is not None:
            named = tag("input", type="hidden", name="request", value=question.seq)
            form = questions.form(question, f"{path}/answer", join([hidden, named]))
        listed.append(questions.shown(question, form))
    return Region("questions", region("div", "questions", *listed))


def _actions(call: CallView, path: str, hidden: Markup | None) -> Region:
    buttons = []
    if hidden is not None and call.is_attached:
        buttons.append(_action(f"{path}/cut", "Cut the connection", hidden, "plain-cut"))
    if hidden is not None and call.state in LIVE_STATES:
        sure = f"Cancel the call {call.id}? Its work stops, and its messages are deleted."
        buttons.append(_action(f"{path}/cancel", "Cancel the call", hidden, "danger", sure))
    return Region("actions", region("div", "actions", *buttons, class_="actions"))


def _action(path: str, name: str, hidden: Markup, class_: str, sure: str | None = None) -> Markup:
    button = tag("button", name, class_=class_, id=f"do-{path.rpartition('/')[2]}")
    return tag("form", hidden, button, method="post", action=path, data_confirm=sure)


def _message(call: CallView, message: _Shown) -> Markup:
    path = f"/calls/{call.id}/messages/{message.seq}"
    waits = "waits" if message.seq > call.delivered else None
    link = tag("a", message.seq, href=path, id=f"to-{message.seq}")
    return region(
        "tr",
        f"message-{message.seq}",
        tag("td", link, class_="c-seq number"),
        tag("td", message.kind, class_="c-kind"),
        tag("td", tag("bdi", message.text), class_="c-text"),
        tag("td", calls.size(message.size), class_="c-bytes number faint"),
        class_=waits,
    )


def _no_messages(call: CallView) -> Markup:
    told = "All messages were delivered." if call.numbered else "No messages yet."
    return tag("tr", tag("td", tag("div", told, class_="empty"), colspan=4), class_="none")


def clock_time(at: float) -> str:
    """A time of day, in UTC."""
    return utc(at)[11:19]
