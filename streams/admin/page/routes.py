"""The routes of the page, and the updates of what a browser shows.

/                            the calls, the newest first: ?show=&text=&before=
/calls/ID                    one call: ?before=
/calls/ID/messages/SEQ       one message
/live, /calls/ID/live        server-sent events with what has changed
/login, /logout              a form for the operator's token
/static/VERSION/NAME         style sheet and scripts
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import trio

from streams.admin.changes import Answering, Changes
from streams.admin.endpoint import Number, Route, journal_errors, query_of
from streams.admin.gate import TokenGate
from streams.admin.page import call as one_call
from streams.admin.page import calls
from streams.admin.page.access import Visitors, form_of
from streams.admin.page.html import Child, Markup, tag
from streams.admin.page.layout import (
    ASSETS,
    HTML,
    SAFE,
    VERSION,
    Region,
    Updates,
    asset_headers,
    page,
    trouble,
)
from streams.admin.page.questions import answer_of
from streams.admin.sse import HEADERS, Responses, while_connected
from streams.clock import worked
from streams.engine.events import CallEvent
from streams.errors import Missing
from streams.exchange import Headers, HttpError, Request, Responder
from streams.keys import SHOWN_LETTERS
from streams.messages import Run
from streams.observe.history import History
from streams.observe.registry import Registry

UPDATE_S: Final = 0.5  # between two updates where nothing is told to happen
SOON_S: Final = 0.2  # before one that is due to an event: more events may follow at once
# All updates together may take this share of a processor: a list of 10,000 calls takes 20 ms.
SHARE_MAX: Final = 0.05
RETRY_MS: Final = 400  # a browser whose server is gone asks so often whether it is back
LIVE_MAX: Final = 24  # pages with updates; connections of operators are few

EVENTS: Final[Headers] = (*HEADERS, *SAFE)
_CHANGES: Final = re.compile(r"/calls/[A-Za-z0-9_-]{1,200}/(?:answer|cut|cancel)|/logout")

View = Callable[[], Awaitable[Sequence[Region]]]


class _CallAsked(msgspec.Struct, frozen=True):
    """The query of one call."""

    before: Number | None = None


class LivePage:
    """The operator's page over one server."""

    def __init__(
        self, registry: Registry, history: History, gate: TokenGate, changes: Changes
    ) -> None:
        self._registry = registry
        self._history = history
        self._gate = gate
        self._changes = changes
        self._visitors = Visitors(gate, _CHANGES)
        gate.proofs.append(self._visitors.is_operator)
        self._has_news = trio.Event()
        self._live = Responses(LIVE_MAX, "pages", EVENTS)

    def hear(self, _: CallEvent) -> None:
        """Something has happened to a call: what is shown may have changed."""
        if self._live.open:
            self._has_news.set()

    @property
    def routes(self) -> tuple[Route, ...]:
        """The table. Pages are open: they ask for the token with a form."""
        return (
            Route("GET", "/", self._guarded(self._list), "open"),
            Route("GET", "/live", self._list_updates),
            Route("GET", "/calls/{}", self._guarded(self._call), "open"),
            Route("GET", "/calls/{}/live", self._call_updates),
            Route("GET", "/calls/{}/messages/{}", self._guarded(self._message), "open"),
            Route("POST", "/calls/{}/answer", self._told(self._answer), "write"),
            Route("POST", "/calls/{}/cut", self._told(self._cut), "write"),
            Route("POST", "/calls/{}/cancel", self._told(self._cancel), "write"),
            Route("GET", "/login", self._guarded(self._list), "open"),
            Route("POST", "/login", self._told(self._login), "open"),
            Route("POST", "/logout", self._told(self._logout)),
            Route("GET", "/static/{}/{}", self._static, "open"),
        )

    # Pages

    async def _list(self, request: Request, responder: Responder) -> None:
        asked = query_of(request, calls.Asked)
        parts = await self._list_regions(asked)
        await self._respond(
            request, responder, "Calls", calls.body(asked, parts), live=f"/live{_query(request)}"
        )

    async def _list_regions(self, asked: calls.Asked) -> list[Region]:
        found = await self._registry.calls(
            before=asked.before, limit=calls.ROWS_MAX, wanted=asked.wanted
        )
        return calls.regions(asked, found, self._registry.counts(), self._history.rates)

    async def _call(self, request: Request, responder: Responder, prefix: str) -> None:
        view = await self._call_view(request, prefix)
        found = await self._registry.call(await self._find(prefix))
        await self._respond(
            request,
            responder,
            f"{found.tool} {found.id}",
            one_call.body(found, await view()),
            live=f"/calls/{found.id}/live{_query(request)}",
        )

    async def _call_view(self, request: Request, prefix: str) -> View:
        """A function that makes the parts of a call's page."""
        stream = await self._find(prefix)
        messages = one_call.Messages(query_of(request, _CallAsked).before)
        form_token = self._visitors.form_token(request) if self._gate.may_write else ""
        path = f"/calls/{stream[:SHOWN_LETTERS]}"

        async def read(after: int, bytes_max: int) -> Sequence[Run]:
            try:
                return await self._registry.runs(stream, after, bytes_max=bytes_max)
            except Missing:  # just delivered, and deleted
                return ()

        async def pages() -> Sequence[int]:
            record = await self._registry.record(stream)
            return () if record is None else record.pages or ()

        async def view() -> list[Region]:
            found = await self._registry.call(stream)
            await messages.advance(found, read, pages)
            return one_call.regions(found, self._history.past(stream), messages, path, form_token)

        return view

    async def _message(
        self, request: Request, responder: Responder, prefix: str, number: str
    ) -> None:
        stream = await self._find(prefix)
        found = await self._registry.call(stream)
        seq = int(number) if re.fullmatch("[0-9]{1,15}", number) else 0
        runs = await self._registry.runs(stream, seq - 1, bytes_max=1) if seq else ()
        line = runs[0].lines[0] if runs and runs[0].seq == seq else None
        if line is None:
            raise HttpError(404, f"Message {number[:20]} is not here: delivered ones are deleted.")
        title = f"Message {seq} of {found.id}"
        await self._respond(request, responder, title, one_call.whole(found, seq, line))

    async def _find(self, prefix: str) -> str:
        with journal_errors():
            return await self._registry.find(prefix)

    async def _respond(
        self,
        request: Request,
        responder: Responder,
        title: str,
        body: Markup,
        *,
        live: str | None = None,
        status: int = 200,
        headers: Headers = (),
    ) -> None:
        head = _head(self._visitors.form_token(request), live=live is not None)
        shown = (head, trouble().html, body)
        whole = page(f"{title} · mcp-streams", *shown, live=live)
        await responder.respond(status, (*HTML, *headers), whole)

    # Updates

    async def _list_updates(self, request: Request, responder: Responder) -> None:
        asked = query_of(request, calls.Asked)
        await self._update(request, responder, partial(self._list_regions, asked))

    async def _call_updates(self, request: Request, responder: Responder, prefix: str) -> None:
        await self._update(request, responder, await self._call_view(request, prefix))

    async def _update(self, request: Request, responder: Responder, view: View) -> None:
        """Send what changes until the browser leaves, or its cookie is void."""
        respond = partial(self._send_updates, request, responder, view)
        await self._live.answer(request, responder, respond)

    async def _send_updates(self, request: Request, responder: Responder, view: View) -> None:
        updates = Updates()
        first = f"retry: {RETRY_MS}\n\n".encode()
        async with while_connected(responder, EVENTS, first) as send:
            while self._gate.has_token(request) or self._visitors.is_operator(request):
                self._has_news = trio.Event()
                spent_s = worked()
                try:
                    with journal_errors():
                        parts = await view()
                except HttpError as error:
                    html = updates.lacking([trouble(error.refusal.message)])
                else:
                    html = updates.lacking([trouble(), *parts])
                spent_s = worked() - spent_s
                await send(_event(html))
                await trio.sleep(max(SOON_S, self._live.open * spent_s / SHARE_MAX))
                with trio.move_on_after(UPDATE_S):
                    await self._has_news.wait()

    # Forms

    async def _login(self, request: Request, responder: Responder) -> None:
        self._gate.check_browser(request)
        form = form_of(request)
        cookie = self._visitors.welcome(form)
        to = form.get("to", "/")
        if not re.fullmatch(r"/(?:calls/[A-Za-z0-9_-]+)?", to):
            to = "/"
        await _go(responder, to, cookie)

    async def _logout(self, request: Request, responder: Responder) -> None:
        self._visitors.check_form(request, form_of(request))
        await _go(responder, "/", self._visitors.farewell)

    async def _answer(self, request: Request, responder: Responder, prefix: str) -> None:
        form = form_of(request)
        self._visitors.check_form(request, form)
        stream = await self._find(prefix)
        found = await self._registry.call(stream)
        wanted = (each for each in found.questions if str(each.seq) == form.get("request"))
        question = next(wanted, None)
        if question is None:
            raise HttpError(409, "This question is answered already, or its call has ended.")
        result = {
            name: msgspec.Raw(msgspec.json.encode(value))
            for name, value in answer_of(question, form).items()
        }
        await self._changes.answer(stream, Answering(question.request_id, result))
        await _go(responder, f"/calls/{found.id}")

    async def _cut(self, request: Request, responder: Responder, prefix: str) -> None:
        self._visitors.check_form(request, form_of(request))
        found = await self._registry.call(await self._find(prefix))
        if found.connection is None:
            raise HttpError(409, "No connection is attached to this call.")
        self._changes.cut(found.connection)
        await _go(responder, f"/calls/{found.id}")

    async def _cancel(self, request: Request, responder: Responder, prefix: str) -> None:
        self._visitors.check_form(request, form_of(request))
        stream = await self._find(prefix)
        await self._changes.cancel(stream)
        await _go(responder, f"/calls/{stream[:SHOWN_LETTERS]}")

    # Answers that are no pages of their own

    def _guarded(self, answer: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """A page that asks for the operator's token in place of a refusal."""

        async def guarded(request: Request, responder: Responder, *parts: str) -> None:
            try:
                self._gate.check(request, "read")
            except HttpError as refused:
                if refused.status == 401:
                    await self._ask(request, responder)
                    return
                await self._tell(request, responder, refused)
                return
            await self._told(answer)(request, responder, *parts)

        return guarded

    def _told(self, answer: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """An answer whose refusals are told as a page."""

        async def told(request: Request, responder: Responder, *parts: str) -> None:
            try:
                with journal_errors():
                    await answer(request, responder, *parts)
            except HttpError as refused:
                await self._tell(request, responder, refused)

        return told

    async def _ask(
        self, request: Request, responder: Responder, problem: str | None = None, status: int = 401
    ) -> None:
        body = tag(
            "main",
            tag("h1", "mcp-streams"),
            tag(
                "p", "This page needs the operator's token. The log names its file.", class_="faint"
            ),
            tag("p", problem, class_="problem", role="alert") if problem else None,
            tag(
                "form",
                tag("input", type="hidden", name="to", value=_place(request)),
                tag(
                    "label",
                    tag("span", "Operator's token"),
                    tag(
                        "input",
                        type="password",
                        name="token",
                        id="token",
                        required=True,
                        autofocus=True,
                        autocomplete="current-password",
                    ),
                ),
                tag("button", "Sign in", class_="first"),
                method="post",
                action="/login",
            ),
            class_="login",
        )
        await responder.respond(status, HTML, page("Sign in · mcp-streams", body))

    async def _tell(self, request: Request, responder: Responder, refused: HttpError) -> None:
        told = refused.refusal.message
        if request.path == "/login":
            await self._ask(request, responder, told, refused.status)
            return
        body = tag("main", tag("h2", told), tag("p", tag("a", "All calls", href="/")))
        await self._respond(
            request,
            responder,
            str(refused.status),
            body,
            status=refused.status,
            headers=refused.headers,
        )

    async def _static(self, _: Request, responder: Responder, version: str, name: str) -> None:
        content = ASSETS.get(name) if version == VERSION else None
        if content is None:
            raise HttpError(404, "This file is of another version: load the page again.")
        await responder.respond(200, asset_headers(name), content)


def _head(form_token: str, *, live: bool) -> Markup:
    nav: list[Child] = []
    if live:
        nav.append(tag("span", "Not live", id="connection", role="status"))
    if form_token:
        hidden = tag("input", type="hidden", name="form", value=form_token)
        button = tag("button", "Sign out", class_="plain")
        nav.append(tag("form", hidden, button, method="post", action="/logout"))
    title = tag("h1", tag("a", "mcp-streams", href="/"))
    return tag("header", title, tag("nav", *nav))


def _event(html: Markup) -> bytes:
    """A server-sent event; empty if there is nothing to send."""
    if not html:
        return b""
    lines = "".join(f"data: {line}\n" for line in html.split("\n"))
    return f"{lines}\n".encode()


def _query(request: Request) -> str:
    return f"?{request.query}" if request.query else ""


def _place(request: Request) -> str:
    return "/" if request.path == "/login" else request.path


async def _go(responder: Responder, path: str, cookie: str | None = None) -> None:
    """Send the browser to a page."""
    cookies = () if cookie is None else (("set-cookie", cookie),)
    await responder.respond(303, (*HTML, ("location", path), *cookies))
