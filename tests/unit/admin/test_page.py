"""The operator's page, without a browser: markup, regions, forms, cookies, charts."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from streams import messages
from streams.admin.endpoint import AdminEndpoint
from streams.admin.gate import REFUSED_MAX, Token, TokenGate
from streams.admin.page import calls, layout
from streams.admin.page.access import HOLDS_S, Visitors, form_of
from streams.admin.page.call import MESSAGES_MAX, Messages, regions, whole
from streams.admin.page.charts import Rule, sparkline, timeline
from streams.admin.page.html import Markup, join, tag, text
from streams.admin.page.layout import Region, Updates, region
from streams.admin.page.messages import WHOLE_BYTES_MAX, pretty
from streams.admin.page.questions import answer_of, fields_of, form, shown
from streams.admin.page.routes import LIVE_MAX, LivePage
from streams.errors import Missing, Unavailable
from streams.exchange import HttpError, Request
from streams.messages import Run
from streams.observe.history import History, Sample
from streams.observe.registry import CallView, Counts, NoSuchCall, OpenQuestion, Page
from streams.observe.tallies import Tallies

SECRET = "an operator's secret-0123456789".replace(" ", "-").replace("'", "-")
CHANGES = re.compile("/calls/[a-z]+/answer")
HOSTILE = "<script>alert(1)</script> \u202e\x1b[2J\x00\"'>&"


class Elements(HTMLParser):
    """The elements of a text, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def call(**changed: Any) -> CallView:
    known: dict[str, Any] = {
        "id": "abcdefghijkl",
        "number": 7,
        "tool": "build",
        "principal": "os(1000)",
        "state": "running",
        "began_at": 1000.0,
        "ended_at": None,
        "numbered": 40,
        "durable": 39,
        "handed": 37,
        "written": 37,
        "delivered": 35,
        "pending": 5,
        "pending_bytes": 2048,
        "is_in_memory": True,
    }
    return CallView(**{**known, **changed})


def counts() -> Counts:
    return Counts(
        running=1,
        asking=0,
        attached=1,
        ended=0,
        evicted=0,
        pending=5,
        pending_bytes=2048,
        uncounted=0,
        questions=0,
        connections={"websocket": 1},
        sessions=0,
    )


def question(params: Any, method: str = "elicitation/create") -> OpenQuestion:
    return OpenQuestion("q1", 3, method, msgspec.Raw(msgspec.json.encode(params)))


def asked(**properties: Any) -> OpenQuestion:
    schema = {"type": "object", "properties": properties, "required": ["name"]}
    return question({"message": "Who?", "requestedSchema": schema})


# Markup


def test_text_is_never_markup() -> None:
    found = Elements(tag("p", HOSTILE, title=HOSTILE))
    assert found.names == ["p"]
    assert "<script>alert(1)</script>" in found.text
    assert [name for name, _ in found.attributes] == ["title"]


def test_controls_and_marks_of_direction_are_shown_as_escapes() -> None:
    assert text("a\u202eb\x1bc\x00") == r"a\u202eb\u001bc\u0000"


def test_only_what_was_made_by_tag_is_markup() -> None:
    assert tag("p", tag("b", "x"), None, 3) == "<p><b>x</b>3</p>"
    assert join([Markup("<i></i>"), "<i>"]) == "<i></i>&lt;i&gt;"
    assert tag("input", required=True, hidden=False, for_="a", hx_ext="b") == (
        '<input required for="a" hx-ext="b">'
    )


# Regions


def sent(html: Markup) -> str:
    return tag("template", html)


def test_a_browser_is_sent_only_what_has_changed() -> None:
    updates = Updates()
    one, two = region("p", "one", "1"), region("p", "two", "2")
    assert updates.lacking([Region("one", one), Region("two", two)]) == sent(one) + sent(two)
    changed = region("p", "two", "3")
    assert updates.lacking([Region("one", one), Region("two", changed)]) == sent(changed)
    assert updates.lacking([Region("one", one), Region("two", changed)]) == ""


def test_a_browser_is_not_sent_what_has_only_become_older(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for, updates = calls.Asked(), Updates()

    def lacking(at: float, **changed: Any) -> str:
        monkeypatch.setattr("streams.admin.page.calls.wall", lambda: at)
        found = Page((call(**changed), call(id="mnopqrstuvwx")), None)
        return updates.lacking([calls.rows(asked_for, found)])

    assert ">3m 20s<" in lacking(1200.0)
    assert lacking(1201.0) == ""
    later = lacking(1202.0, state="completed")
    assert ">3m 22s<" in later
    assert "mnopqrstuvwx" not in later, "of the other row only the age has changed"


def test_of_a_table_only_the_rows_that_have_changed_are_sent() -> None:
    def table(**rows: str) -> Region:
        parts = {id_: region("tr", id_, words) for id_, words in rows.items()}
        return Region("rows", region("tbody", "rows", *parts.values()), parts)

    updates = Updates()
    updates.lacking([table(a="1", b="1")])
    assert updates.lacking([table(a="1", b="2")]) == sent(region("tr", "b", "2"))
    whole_table = table(c="1", a="1", b="2")
    assert updates.lacking([whole_table]) == sent(whole_table.html)


def test_a_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    shown_page = Page((call(tool=HOSTILE, principal=HOSTILE),), 6)
    parts = calls.regions(calls.Asked(text=HOSTILE), shown_page, counts(), [])
    html = layout.page(HOSTILE, calls.body(calls.Asked(text=HOSTILE), parts), live="/live").decode()
    found = Elements(html)
    assert found.names.count("script") == 3, "its own three"
    assert not any(name == "style" or name.startswith("on") for name, _ in found.attributes)
    places = [value or "" for name, value in found.attributes if name in ("src", "href", "action")]
    assert all(place.startswith(("/", "data:,")) for place in places), places
    assert "style" not in found.names


def test_a_script_of_another_version_is_not_cached() -> None:
    assert layout.asset("page.js") == f"/static/{layout.VERSION}/page.js"
    assert set(layout.ASSETS) >= {"htmx.min.js", "htmx-ext-sse.min.js", "page.js", "page.css"}


def test_an_empty_list_says_why() -> None:
    nothing = Page((), None)
    assert "No calls yet" in calls.rows(calls.Asked(), nothing).html
    assert "No call is one of those" in calls.rows(calls.Asked(text="x"), nothing).html
    assert "Older" in calls.rows(calls.Asked(text="x"), Page((), 5)).html, "more was not looked at"


# Messages


def test_a_long_message_is_cut_and_says_so() -> None:
    line = messages.notification("notifications/message", {"data": "x" * (2 * WHOLE_BYTES_MAX)})
    shown_text, left_out = pretty(line)
    assert len(shown_text) == WHOLE_BYTES_MAX
    assert left_out == len(line) - WHOLE_BYTES_MAX
    assert "more are not shown" in whole(call(), 1, line)


def test_a_whole_message_is_text() -> None:
    line = messages.notification("notifications/message", {"data": HOSTILE})
    found = Elements(whole(call(), 1, line))
    assert "script" not in found.names
    assert "<script>" in found.text


async def no_pages() -> tuple[int, ...]:
    return ()


async def test_a_page_of_a_result_is_shown_as_the_api_shows_it() -> None:
    lines = [messages.result(1, {"content": [{"type": "text", "text": each}]}) for each in "ab"]

    async def read(after: int, bytes_max: int) -> list[Run]:
        return [Run(1, 2, b"".join(lines))]

    async def pages() -> tuple[int, ...]:
        return (1,)

    shown_messages = Messages()
    found = call(numbered=2, durable=2, delivered=0)
    await shown_messages.advance(found, read, pages)
    rows, _ = shown_messages.region(found)
    kinds = [re.findall('class="c-kind">([a-z]+)', html) for html in rows.parts.values()]
    assert kinds == [["result"], ["page"]], "the newest first"


async def test_only_new_messages_are_read() -> None:
    reads: list[tuple[int, int]] = []

    async def read(after: int, bytes_max: int) -> list[Run]:
        reads.append((after, bytes_max))
        lines = [
            messages.notification("notifications/message", {"data": n})
            for n in range(after + 1, last + 1)
        ]
        return [Run(after + 1, len(lines), b"".join(lines))]

    shown_messages = Messages()
    last = 200
    await shown_messages.advance(call(numbered=last, durable=last), read, no_pages)
    last = 202
    await shown_messages.advance(call(numbered=last, durable=last), read, no_pages)
    await shown_messages.advance(call(numbered=last, durable=last), read, no_pages)
    assert [after for after, _ in reads] == [150, 200]
    rows, _ = shown_messages.region(call(numbered=last, durable=last))
    assert list(rows.parts) == [f"message-{seq}" for seq in range(202, 202 - MESSAGES_MAX, -1)]


async def test_messages_that_are_deleted_are_no_error() -> None:
    async def read(after: int, bytes_max: int) -> list[Run]:
        return []

    shown_messages = Messages()
    await shown_messages.advance(call(), read, no_pages)
    rows, _ = shown_messages.region(call())
    assert "All messages were delivered" in rows.html


# Questions


def test_the_fields_of_a_schema_become_a_form() -> None:
    wanted = asked(
        name={"type": "string", "title": HOSTILE},
        count={"type": "integer"},
        is_sure={"type": "boolean", "default": True},
        size={"type": "string", "enum": ["s", "m"]},
    )
    found = Elements(form(wanted, "/calls/x/answer", Markup("")))
    assert found.names.count("input") == 3
    assert found.names.count("select") == 1
    assert "script" not in found.names
    given = {"action": "accept", "field name": "Ada", "field count": "3", "field size": ""}
    assert answer_of(wanted, given) == {
        "action": "accept",
        "content": {"name": "Ada", "count": 3, "is_sure": False},
    }
    assert answer_of(wanted, {"action": "decline"}) == {"action": "decline"}


@pytest.mark.parametrize(
    "given", [{}, {"action": "explode"}, {"action": "accept", "field count": "many"}]
)
def test_a_form_that_is_wrong_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(HttpError) as caught:
        answer_of(asked(name={"type": "string"}, count={"type": "integer"}), given)
    assert caught.value.status == 400


def test_any_other_question_is_answered_with_json() -> None:
    other = question({"messages": []}, "sampling/createMessage")
    assert fields_of(other) is None
    assert answer_of(other, {"result": '{"role":"user"}'}) == {"role": "user"}
    for wrong in ("", "[]", "{"):
        with pytest.raises(HttpError):
            answer_of(other, {"result": wrong})
    assert "<textarea" in form(other, "/", Markup(""))


@pytest.mark.parametrize(
    "params", [[], {"requestedSchema": 3}, {"requestedSchema": {"properties": [1]}}]
)
def test_a_question_may_have_any_params(params: Any) -> None:
    assert "question" in shown(question(params), form(question(params), "/", Markup("")))


NESTED = "[" * 30_000 + "]" * 30_000


@pytest.mark.parametrize(
    "schema",
    [
        5,
        None,
        [],
        {"properties": 5},
        {"properties": {"name": 5}},
        {"properties": {"name": {"type": ["string", "null"]}}},
        {"properties": {"name": {"type": {}}}},
        {"properties": {"name": {"type": "object"}}},
    ],
)
def test_a_schema_that_cannot_be_drawn_is_answered_with_json(schema: Any) -> None:
    asked_for = question({"message": "Which?", "requestedSchema": schema})
    assert Elements(form(asked_for, "/", Markup(""))).names.count("textarea") == 1
    assert answer_of(asked_for, {"result": '{"action":"decline"}'}) == {"action": "decline"}


@pytest.mark.parametrize(
    "changed",
    [
        {"required": 5},
        {"required": "name"},
        {"required": {"name": True}},
        {"required": [[], {}, 5]},
        {"properties": {"name": {"type": "string", "enum": 5}}},
        {"properties": {"name": {"type": "string", "enum": {"a": 1}}}},
        {"properties": {"name": {"type": "string", "enum": [1, [], {}]}}},
        {"properties": {"name": {"type": "string", "title": 5, "default": [], "enum": None}}},
    ],
)
def test_the_rest_of_a_schema_may_be_anything(changed: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, **changed}
    asked_for = question({"message": "Which?", "requestedSchema": schema})
    found = Elements(form(asked_for, "/", Markup("")))
    assert (found.names.count("input"), found.names.count("select")) == (1, 0)
    assert ("required", None) not in found.attributes
    given = {"action": "accept", "field name": "Ada"}
    assert answer_of(asked_for, given) == {"action": "accept", "content": {"name": "Ada"}}


def test_what_is_nested_too_deeply_is_shown_and_refused() -> None:
    params = msgspec.Raw(f'{{"message":"Which?","a":{NESTED}}}'.encode())
    asked_for = OpenQuestion("q1", 3, "elicitation/create", params)
    assert "[[[" in Elements(shown(asked_for, form(asked_for, "/", Markup("")))).text
    other = question({}, "sampling/createMessage")
    with pytest.raises(HttpError) as caught:
        answer_of(other, {"result": f'{{"a":{NESTED}}}'})
    assert caught.value.status == 400
    assert pretty(NESTED.encode()) == (NESTED, 0)


def test_without_leave_to_write_there_are_no_forms() -> None:
    found = call(questions=(asked(name={"type": "string"}),), connection=4, transport="websocket")
    read_only = join(each.html for each in regions(found, None, Messages(), "/calls/x", ""))
    assert "Who?" in read_only
    assert "<form" not in read_only
    writable = join(each.html for each in regions(found, None, Messages(), "/calls/x", "t"))
    assert Elements(writable).names.count("form") == 3, "answer, cut, cancel"


def test_a_call_of_another_replica_is_not_shown_as_detached() -> None:
    """This one does not know its client, and has not seen what happened to it."""
    elsewhere = call(is_in_memory=False, owner="b3f76af6fb5de4e4")
    told = Elements(
        join(each.html for each in regions(elsewhere, None, Messages(), "/calls/x", ""))
    )
    assert "Transportunknown" in told.text
    assert "Its replica shows them" in told.text
    here = Elements(join(each.html for each in regions(call(), None, Messages(), "/calls/x", "")))
    assert "elsewhere" not in here.text
    for found, word in ((elsewhere, "running"), (call(), "detached")):
        assert Elements(calls.state(found)).text == word


def test_times_of_a_page_are_said_to_be_utc() -> None:
    told = join(each.html for each in regions(call(), None, Messages(), "/calls/x", ""))
    assert "1970-01-01 00:16:40 UTC" in told


# Cookies


def gate() -> TokenGate:
    return TokenGate(Token(SECRET), may_write=True)


def request(path: str = "/", method: str = "GET", body: bytes = b"", **headers: str) -> Request:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(method, path, given, body)


def cookie_of(visitors: Visitors) -> str:
    return visitors.welcome({"token": SECRET}).partition(";")[0]


async def test_a_cookie_stands_for_the_token() -> None:
    visitors = Visitors(gate(), CHANGES)
    told = visitors.welcome({"token": SECRET})
    assert SECRET not in told
    assert "HttpOnly; SameSite=Strict" in told
    cookie = cookie_of(visitors)
    assert visitors.is_operator(request(cookie=cookie))
    assert Visitors(gate(), CHANGES).is_operator(request(cookie=cookie)), "after a restart"
    other = Visitors(TokenGate(Token("another-secret-9876543210")), CHANGES)
    assert not other.is_operator(request(cookie=cookie)), "with another token"
    assert not visitors.is_operator(request())


async def test_a_cookie_lets_no_program_change_anything() -> None:
    visitors = Visitors(gate(), CHANGES)
    cookie = cookie_of(visitors)
    assert not visitors.is_operator(request("/api/drain", "POST", cookie=cookie))
    assert visitors.is_operator(request("/calls/abc/answer", "POST", cookie=cookie))


async def test_a_forged_or_expired_cookie_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    visitors = Visitors(gate(), CHANGES)
    cookie = cookie_of(visitors)
    name, _, value = cookie.partition("=")
    expires, _, mac = value.partition(".")
    for wrong in (f"{int(expires) + 1}.{mac}", f"{expires}.{'0' * 64}", expires, "", "é"):
        assert not visitors.is_operator(request(cookie=f"{name}={wrong}"))
    later = float(expires) + 1
    monkeypatch.setattr("streams.admin.page.access.wall", lambda: later)
    assert not visitors.is_operator(request(cookie=cookie))
    assert HOLDS_S < 24 * 3600


async def test_a_wrong_token_opens_nothing() -> None:
    visitors = Visitors(gate(), CHANGES)
    for wrong in ("", "x", SECRET[:-1]):
        with pytest.raises(HttpError) as caught:
            visitors.welcome({"token": wrong})
        assert caught.value.status == 403


async def test_a_form_belongs_to_one_browser() -> None:
    visitors = Visitors(gate(), CHANGES)
    mine = request("/calls/abc/answer", "POST", cookie=cookie_of(visitors))
    visitors.check_form(mine, {"form": visitors.form_token(mine)})
    for wrong in ({}, {"form": ""}, {"form": "0" * 64}):
        with pytest.raises(HttpError):
            visitors.check_form(mine, wrong)
    stranger = request("/calls/abc/answer", "POST")
    with pytest.raises(HttpError):
        visitors.check_form(stranger, {"form": visitors.form_token(mine)})
    visitors.check_form(request(authorization=f"Bearer {SECRET}"), {})


def test_only_forms_are_read() -> None:
    kind = "application/x-www-form-urlencoded"
    assert form_of(request(method="POST", body=b"a=1&b=", content_type=kind)) == {"a": "1", "b": ""}
    for body, given in ((b"a=1", "text/plain"), (b"\xff", kind), (b"&".join([b"a=1"] * 999), kind)):
        with pytest.raises(HttpError):
            form_of(request(method="POST", body=body, content_type=given))


# Charts


def test_a_timeline_draws_four_marks_and_its_moments() -> None:
    points = [Sample(0, 0, 0, 0, 0), Sample(5, 10, 8, 6, 4), Sample(10, 20, 20, 20, 20)]
    drawn = Elements(timeline(points, [Rule(5, "cut", HOSTILE)], 10, "marks"))
    assert drawn.names.count("path") == 4
    assert ("class", "area delivered") in drawn.attributes
    assert ("x1", "500") in drawn.attributes
    assert "script" not in drawn.names


def test_a_timeline_of_nothing_is_a_picture() -> None:
    assert "NaN" not in timeline([], [], 0.0, "marks")
    assert 'points="240,39"' in sparkline([0.0], 120, "x")


def test_a_page_of_ten_minutes_is_small() -> None:
    rates = [SimpleNamespace(at=n, messages_per_s=n, commit_s=0.001) for n in range(600)]
    html: Any = calls.charts(rates).html  # type: ignore[arg-type]
    assert len(html) < 6_000


# Updates


class Peer:
    """A responder that keeps what it is sent, for a browser that leaves when it has seen enough."""

    def __init__(self) -> None:
        self.status = 0
        self.sent = b""
        self.changed = trio.Event()
        self._has_left = trio.Event()

    async def respond(self, status: int, headers: Any = (), body: bytes = b"") -> None:
        self.status, self.sent = status, body

    async def start(self, status: int, headers: Any, *first: bytes) -> None:
        self.status = status
        await self.write(*first)

    async def write(self, *data: bytes) -> None:
        self.sent += b"".join(data)
        self.changed.set()
        self.changed = trio.Event()

    async def gone(self) -> None:
        await self._has_left.wait()

    async def until(self, words: str) -> str:
        while words.encode() not in self.sent:
            await self.changed.wait()
        sent, self.sent = self.sent.decode(), b""
        return sent

    def leave(self) -> None:
        self._has_left.set()


class Calls:
    """A registry of one call, over a journal that may be away."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.shown = call()

    async def find(self, prefix: str) -> str:
        if not self.shown.id.startswith(prefix):
            raise NoSuchCall("No call has this id.")
        return self.shown.id

    async def call(self, stream: str) -> CallView:
        if self.failure is not None:
            raise self.failure
        return self.shown

    async def record(self, stream: str) -> None:
        return None

    async def runs(self, stream: str, after: int, *, bytes_max: int) -> list[Run]:
        raise Missing(1, 2)


@pytest.fixture
async def operated() -> tuple[Calls, AdminEndpoint, Request]:
    registry, let_in = Calls(), gate()
    live_page = LivePage(registry, History(Tallies()), let_in, Any)  # type: ignore[arg-type]
    bearer = {"authorization": f"Bearer {SECRET}"}
    return (
        registry,
        AdminEndpoint(let_in, live_page.routes),
        Request("GET", f"/calls/{registry.shown.id}/live", bearer, b""),
    )


Operated = tuple[Calls, AdminEndpoint, Request]


async def test_updates_go_on_when_the_journal_is_back(
    operated: Operated, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    registry, endpoint, asked_for = operated
    peer = Peer()
    nursery.start_soon(endpoint, asked_for, peer)
    await peer.until("running")
    registry.failure = Unavailable("the disk is slow")
    failed = await peer.until("The journal cannot be read: the disk is slow.")
    assert "running" not in failed, "only the trouble is new"
    registry.failure, registry.shown = None, call(state="completed")
    back = await peer.until("completed")
    assert re.search(r'<p id="trouble"[^>]* hidden[^>]*></p>', back), "the trouble is over"
    registry.failure = NoSuchCall("It is forgotten.")
    await peer.until("It is forgotten.")
    peer.leave()


async def test_a_page_over_a_journal_that_is_away_says_so(operated: Operated) -> None:
    registry, endpoint, asked_for = operated
    registry.failure = Unavailable("the disk is slow")
    peer = Peer()
    path = asked_for.path.removesuffix("/live")
    await endpoint(msgspec.structs.replace(asked_for, path=path), peer)  # type: ignore[arg-type]
    assert peer.status == 503
    assert "the disk is slow" in peer.sent.decode()


@pytest.mark.parametrize("before", ["9223372036854775808", "-1", "-9223372036854775809", "x"])
async def test_numbers_that_no_journal_can_have_are_refused(
    operated: Operated, before: str
) -> None:
    _, endpoint, asked_for = operated
    for path in ("/", "/live", asked_for.path, asked_for.path.removesuffix("/live")):
        peer = Peer()
        target = msgspec.structs.replace(asked_for, path=path, query=f"before={before}")
        await endpoint(target, peer)  # type: ignore[arg-type]
        assert (path, peer.status) == (path, 400)


async def test_strangers_do_not_keep_operators_from_signing_in(operated: Operated) -> None:
    _, endpoint, _ = operated
    wrong = request(authorization=f"Bearer {SECRET}x")
    refused = Peer()
    for _ in range(3 * REFUSED_MAX):
        await endpoint(request(), Peer())  # type: ignore[arg-type]
        await endpoint(wrong, refused)  # type: ignore[arg-type]
    assert refused.status == 429
    peer = Peer()
    await endpoint(request(), peer)  # type: ignore[arg-type]
    assert (peer.status, b'name="token"' in peer.sent) == (401, True)
    await endpoint(request(layout.asset("page.js")), peer)  # type: ignore[arg-type]
    assert peer.status == 200
    sign_in = {"content_type": "application/x-www-form-urlencoded"}
    await endpoint(
        request("/login", "POST", f"token={SECRET}".encode(), **sign_in),
        peer,  # type: ignore[arg-type]
    )
    assert peer.status == 303


async def test_pages_with_updates_are_few(
    operated: Operated, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    _, endpoint, asked_for = operated
    peers = [Peer() for _ in range(LIVE_MAX)]
    for peer in peers:
        nursery.start_soon(endpoint, asked_for, peer)
        await peer.until("running")
    late = Peer()
    await endpoint(asked_for, late)  # type: ignore[arg-type]
    assert late.status == 503
    peers[0].leave()
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(endpoint, asked_for, late)
    await late.until("running")
    nursery.cancel_scope.cancel()
