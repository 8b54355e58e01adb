"""Decides which events are sent to whom, and adds them to the commits that they belong to.

The server's own URLs get the events of all calls. A caller that is authenticated may name one more
for its call, if the operator has listed it. The URL is part of the call's request, so a restart and
other replicas know it as well.

The caller's own URL gets the whole streamId. The server's URLs get the letters that operators see:
with all of it, a receiver could resume the stream of an anonymous caller.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import trio
from msgspec.structs import replace

from streams.clock import wall
from streams.engine.lifecycle import Question
from streams.errors import Refusal, refusal
from streams.exchange import authenticated
from streams.journal.records import Append, Outcome, Record
from streams.journal.webhooks import DropWebhook, SaveWebhook, Webhook, WebhookChange
from streams.keys import SHOWN_LETTERS
from streams.logs import STREAM_LETTERS, log
from streams.messages import Run
from streams.protocol.extension import WEBHOOK
from streams.protocol.origin import CALL, Origin
from streams.webhooks import events
from streams.webhooks.receivers import Receivers

# Webhooks that may wait, of one journal. A receiver that is away for days must not fill it.
WAITING_MAX: Final = 10_000
CALLERS_PART: Final = 2  # beyond this part of it only the server's own URLs get events


class Queue:
    """`streams.engine.hooks.Hooks`. The sender counts what waits, and is woken by `has_more`."""

    def __init__(
        self,
        receivers: Receivers,
        urls: Sequence[str],
        *,
        has_content: bool = False,
        clock: Callable[[], float] = wall,
    ) -> None:
        """`urls` are those of the server, `receivers` those that callers may name.

        With `has_content`, events have the message that they tell of.
        """
        self._receivers = receivers
        self._urls = tuple(urls)
        self._has_content = has_content
        self._clock = clock
        self._is_full = False
        self._has_told = False  # since the last commit
        self.waiting = 0  # in the journal, as far as this process knows
        self.has_more = trio.Event()

    def check(self, url: Any, principal: str) -> None:
        """See `Hooks.check`."""
        if not authenticated(principal):
            raise refusal("webhook_refused").saying(
                f"Only authenticated callers may name a webhook: leave out _meta[{WEBHOOK!r}], or "
                "send a bearer token."
            )
        if not isinstance(url, str):
            raise refusal("webhook_refused").saying(f"_meta[{WEBHOOK!r}] must be a URL.")
        try:
            self._receivers.checked(url)
        except ValueError as error:
            raise refusal("webhook_refused").saying(
                f"_meta[{WEBHOOK!r}] is no URL of a receiver: {error}."
            ) from None
        if not self._receivers.allow(url):
            raise _not_listed()

    def wants(self, record: Record) -> bool:
        """See `Hooks.wants`."""
        return bool(self._urls_for(record, Origin.of(record.origin)))

    def told(self, record: Record, append: Append, questions: Sequence[Question]) -> Append:
        """See `Hooks.told`."""
        told = [(events.QUESTION, each.seq, each.line) for each in questions]
        if append.outcome.is_end:
            told.append((_kind(append), append.run.last, _last_line(append.run)))
        return replace(append, webhooks=tuple(self._made(record, told)))

    def left(
        self, record: Record, questions: Sequence[Question], after_s: float
    ) -> Sequence[WebhookChange]:
        """See `Hooks.left`."""
        told = [(events.QUESTION, each.seq, each.line) for each in questions]
        return [SaveWebhook(each) for each in self._made(record, told, after_s)]

    def taken_back(self, record: Record, seq: int) -> Sequence[WebhookChange]:
        """See `Hooks.taken_back`."""
        urls = self._urls_for(record, Origin.of(record.origin))
        self.waiting = max(0, self.waiting - len(urls))
        return [DropWebhook(events.event_id(record, events.QUESTION, seq, url)) for url in urls]

    def _made(
        self, record: Record, told: Sequence[tuple[str, int, bytes]], after_s: float = 0.0
    ) -> Sequence[Webhook]:
        """The webhooks of events, each of them a kind, a seq and a line; none without room."""
        call = Origin.of(record.origin)
        if not (urls := self._urls_for(record, call)):
            return ()
        at = self._clock()
        made = [
            Webhook(
                id=events.event_id(record, kind, seq, url),
                stream=record.stream,
                url=url,
                body=events.event(
                    kind,
                    record,
                    record.stream[:SHOWN_LETTERS] if url in self._urls else record.stream,
                    call.target,
                    at,
                    line if self._has_content else None,
                ),
                due_at=at + after_s,
            )
            for kind, seq, line in told
            for url in urls
        ]
        return self._with_room(made, record)

    def _urls_for(self, record: Record, call: Origin) -> Sequence[str]:
        """The receivers of a call's events; () for a request that calls no tool."""
        if call.method != CALL or not call.target:
            return ()
        given = call.webhook
        if not given or not authenticated(record.principal) or given in self._urls:
            return self._urls
        # The list may have become shorter since the call began.
        return (*self._urls, given) if self._receivers.allow(given) else self._urls

    def _with_room(self, made: Sequence[Webhook], record: Record) -> Sequence[Webhook]:
        """Those of these webhooks that may wait.

        Callers must not be able to fill what the server's own receivers need.
        """
        kept = made
        if self.waiting + len(made) > WAITING_MAX // CALLERS_PART:
            kept = [each for each in made if each.url in self._urls]
        if self.waiting + len(kept) > WAITING_MAX:
            kept = ()
        is_full = len(kept) < len(made)
        if is_full and not self._is_full:
            log.error(
                "too many webhooks wait: events are dropped until their receivers take some",
                waiting=self.waiting,
                stream=record.stream[:STREAM_LETTERS],
            )
        self._is_full = is_full or (self._is_full and self.waiting > WAITING_MAX // CALLERS_PART)
        self.waiting += len(kept)
        self._has_told = self._has_told or bool(kept)
        return kept

    def committed(self) -> None:
        """See `Hooks.committed`."""
        if self._has_told:
            self._has_told = False
            self.has_more.set()


def _kind(append: Append) -> str:
    is_failed = append.outcome is Outcome.FAILED or append.last_error == append.run.last
    return events.FAILED if is_failed else events.COMPLETED


def _last_line(run: Run) -> bytes:
    return run.body[run.body.rfind(b"\n", 0, -1) + 1 :]


def _not_listed() -> Refusal:
    return refusal("webhook_refused").saying(
        f"This server's operator has not listed the URL in _meta[{WEBHOOK!r}] as one that callers "
        "may name: leave it out, or ask the operator for --webhook-allow."
    )
