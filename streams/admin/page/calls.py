"""The list of calls: figures of the server, a filter, and a page of the newest calls."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from streams.admin.endpoint import Number
from streams.admin.page.charts import sparkline
from streams.admin.page.html import Markup, join, tag
from streams.admin.page.layout import Region, region
from streams.clock import lasting, wall
from streams.logs import STREAM_LETTERS
from streams.observe.history import EVERY_S, Rate, of_interval
from streams.observe.registry import (
    LIVE_STATES,
    TEXT_LETTERS_MAX,
    CallView,
    Counts,
    Page,
    State,
    Wanted,
)

ROWS_MAX: Final = 100
ROWS_KEPT: Final = 256  # rendered
SPARKS: Final = 120  # points of a small chart
SHOWN: Final[dict[str, frozenset[State]]] = {
    "": frozenset(),
    "live": LIVE_STATES,
    "asking": frozenset(["asking"]),
    "completed": frozenset(["completed"]),
    "failed": frozenset(["failed"]),
    "closed": frozenset(["abandoned", "cancelled"]),
}
_NAMES: Final = {
    "": "All calls",
    "live": "Not ended",
    "asking": "Asking",
    "completed": "Completed",
    "failed": "Failed",
    "closed": "Cancelled, abandoned",
}


class Asked(msgspec.Struct, frozen=True):
    """The query of the list."""

    show: str = ""
    text: str = ""
    before: Number | None = None

    @property
    def wanted(self) -> Wanted:
        """The calls that are wanted."""
        return Wanted(SHOWN.get(self.show, frozenset()), self.text[:TEXT_LETTERS_MAX])

    def query(self, before: int | None = None) -> str:
        """The query that asks for the same calls, from another place on."""
        fields = {"show": self.show, "text": self.text, "before": before}
        query = urlencode({name: value for name, value in fields.items() if value})
        return f"?{query}" if query else ""


def regions(asked: Asked, page: Page, counts: Counts, rates: Sequence[Rate]) -> list[Region]:
    """The parts of the list that change."""
    return [figures(counts), charts(rates), rows(asked, page), pager(asked, page)]


def body(asked: Asked, parts: Sequence[Region]) -> Markup:
    """The list."""
    counts, rates, table, more = (each.html for each in parts)
    head = tag(
        "tr",
        *(
            tag("th", name, scope="col", class_=f"c-{class_}")
            for name, class_ in (
                ("Tool", "tool"),
                ("State", "state"),
                ("Call", "id"),
                ("Age", "age"),
                ("Messages", "messages number"),
                ("Pending", "pending number"),
                ("Question", "question"),
                ("Principal", "principal"),
                ("Transport", "transport"),
            )
        ),
    )
    return tag(
        "main",
        clock(),
        tag("div", counts, rates),
        _filter(asked),
        tag("table", tag("thead", head), table, class_="calls"),
        more,
    )


def clock() -> Markup:
    """The server's time, from which the script of a page counts ages."""
    return tag("span", id="clock", data_now=f"{wall():.1f}", hidden=True)


def figures(counts: Counts) -> Region:
    """The numbers of what lives."""
    connections = sum(counts.connections.values())
    by_transport = ", ".join(f"{name} {n}" for name, n in sorted(counts.connections.items()))
    more = " and more" if counts.uncounted else ""
    shown = (
        ("Running", counts.running, f"{counts.attached} attached"),
        ("Asking", counts.asking, _plural(counts.questions, "open question")),
        ("Pending", counts.pending, f"messages, {size(counts.pending_bytes)}{more}"),
        ("Connections", connections, by_transport or "none"),
    )
    html = region(
        "div",
        "figures",
        *(
            tag(
                "div",
                tag("p", name),
                tag("b", f"{number:,}"),
                tag("p", more, class_="faint"),
                class_="figure",
            )
            for name, number, more in shown
        ),
        class_="figures",
    )
    return Region("figures", html)


def charts(rates: Sequence[Rate]) -> Region:
    """Throughput and the duration of commits."""
    steps = of_interval(rates, SPARKS)
    places = min(SPARKS, max(len(steps), 2))
    now = rates[-1] if rates else None
    per_s = 0.0 if now is None else now.messages_per_s
    commit_s = next((each.commit_s for each in reversed(rates) if each.commit_s), 0.0)
    minutes = f"last {max(1, round(len(rates) * EVERY_S / 60))} min"
    shown = (
        ("Messages/s", f"{per_s:.0f}", [each.messages_per_s for each in steps]),
        ("Commit", f"{commit_s * 1000:.1f} ms", [each.commit_s for each in steps]),
    )
    html = region(
        "div",
        "charts",
        *(
            tag(
                "div",
                tag("p", name, tag("span", f" · {minutes}", class_="span faint")),
                tag("b", value),
                sparkline(values, places, f"{name}: now {value}"),
                class_="figure",
            )
            for name, value, values in shown
        ),
        class_="figures",
    )
    return Region("charts", html)


def rows(asked: Asked, page: Page) -> Region:
    """The calls of a page."""
    parts = {f"call-{call.id}": _row_now(call) for call in page.calls}
    inside: Sequence[Markup] = list(parts.values()) or [_no_rows(asked, page)]
    return Region("rows", region("tbody", "rows", *inside), parts)


def _no_rows(asked: Asked, page: Page) -> Markup:
    if page.before is not None:
        told = "None of these calls is one of those. Look further with “Older”."
    elif asked.show or asked.text:
        told = "No call is one of those."
    else:
        told = "No calls yet. They appear here when clients make them."
    return tag("tr", tag("td", tag("div", told, class_="empty"), colspan=9), class_="none")


def _row_now(call: CallView) -> Markup:
    question = call.questions[0].method if call.questions else ""
    # Questions are left out of the kept calls: they may be long.
    return _row(replace(call, questions=()), question, lasting(wall() - call.began_at))


@lru_cache(ROWS_KEPT)
def _row(call: CallView, question: str, its_age: str) -> Markup:
    """A row of the list. It is kept, because most calls of a page change seldom."""
    letters = call.id[:STREAM_LETTERS]
    link = tag("a", letters, href=f"/calls/{call.id}", id=f"link-{call.id}", class_="id")
    return region(
        "tr",
        f"call-{call.id}",
        tag("td", tag("bdi", call.tool), class_="c-tool", title=call.tool),
        tag("td", state(call), class_="c-state"),
        tag("td", link, class_="c-id"),
        tag("td", age(call.began_at, its_age), class_="c-age"),
        tag("td", call.numbered, class_="c-messages number", data_label="messages"),
        tag("td", pending(call), class_="c-pending number", data_label="pending"),
        tag("td", tag("bdi", question, class_="asks") if question else None, class_="c-question"),
        tag("td", tag("bdi", call.principal), class_="c-principal", title=call.principal),
        tag("td", transport(call) or None, class_="c-transport"),
    )


def pending(call: CallView) -> str:
    """How much its client has not confirmed."""
    return " · ".join(
        [str(call.pending), *([size(call.pending_bytes)] if call.pending_bytes else [])]
    )


def transport(call: CallView) -> str:
    """The transport of its client; "" while none is attached."""
    if call.is_client_unknown:
        return "unknown"
    return "elsewhere" if call.client_is_elsewhere else call.transport


def state(call: CallView) -> Markup:
    """The state of a call, as a word behind a dot."""
    if call.state not in LIVE_STATES:
        return tag("span", call.state, class_=f"state {call.state}")
    if call.is_client_unknown:
        told = f"{call.state} at another replica, which knows its client and its questions"
        return tag("span", call.state, class_="state elsewhere", title=told)
    attached = "attached" if call.is_attached or call.client_is_elsewhere else "detached"
    told = f"{call.state}, {attached}"
    if call.owner:
        told = f"{told}, at replica {call.owner}"
    word = "detached" if (call.state, attached) == ("running", "detached") else call.state
    return tag("span", word, class_=f"state {attached}", title=told)


def age(since: float, now: str | None = None) -> Markup:
    """How long ago a time is, or was `now`; the page's script lets it grow."""
    return tag("time", now or lasting(wall() - since), data_since=f"{since:.1f}")


def size(count: int) -> str:
    """A number of bytes for people."""
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def pager(asked: Asked, page: Page) -> Region:
    """Links to newer and older calls."""
    newest = tag("a", "Newest", href=f"/{asked.query()}", id="to-newest") if asked.before else None
    older = None
    if page.before is not None:
        older = tag("a", "Older", href=f"/{asked.query(page.before)}", id="to-older", rel="next")
    count = tag("span", _plural(len(page.calls), "call"), class_="faint")
    html = region("nav", "pager", newest, count, older, class_="pager", aria_label="Pages")
    return Region("pager", html)


def _filter(asked: Asked) -> Markup:
    options = join(
        tag("option", name, value=value, selected=value == asked.show)
        for value, name in _NAMES.items()
    )
    return tag(
        "form",
        tag("label", "Tool, principal or call", for_="text", class_="unseen"),
        tag(
            "input",
            id="text",
            name="text",
            type="search",
            value=asked.text,
            maxlength=TEXT_LETTERS_MAX,
            placeholder="Tool, principal or call",
        ),
        tag("label", "State", for_="show", class_="unseen"),
        tag("select", options, id="show", name="show"),
        tag("button", "Filter"),
        class_="filter",
        method="get",
        action="/",
        role="search",
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
