"""Sends the webhooks that wait in the journal, each until its receiver has taken it.

- Any 2xx ends it. So does 410, which says that the receiver is gone for good: that is logged.
- Everything else is a failure, redirects too: they could lead to an address that is not allowed.
- After a failure it waits for the next pause of `SCHEDULE`, or longer if the receiver asks for that
  by `Retry-After`. It is given up, and logged, after `ATTEMPTS_MAX` attempts: some 17 days.
- A replica takes a webhook for `LEASE_S`. If it dies meanwhile, another one sends the webhook then.

The states of a webhook that is in the journal:

| state     | `due_at`                            | held in      | then                            |
|-----------|-------------------------------------|--------------|---------------------------------|
| waiting   | later: `SCHEDULE`, `Retry-After`    |              | due, at that time               |
| due       | past                                |              | taken, by one replica           |
| taken     | `LEASE_S` later in a shared journal |              | under way; put off if too many  |
|           |                                     |              | are under way to its receiver,  |
|           |                                     |              | or to slow ones                 |
| under way | as taken                            | `_under_way` | dropped, or waiting             |
| put off   | `BUSY_S` later or more              | `_busy`      | waiting, once that is committed |

What a replica has taken and does not send is due again only after `LEASE_S`. So in a shared journal
it takes no more than it has room for.

An attempt and the change in the journal that says how it has ended are two steps. After a crash
between them the webhook is sent once more, with the same id.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Final, Protocol

import msgspec
import trio
from msgspec.structs import replace

from streams.clock import wall
from streams.engine.retry import patiently
from streams.journal.contract import Journal
from streams.journal.webhooks import DropWebhook, SaveWebhook, Webhook, WebhookChange
from streams.limits import DAY_S
from streams.logs import STREAM_LETTERS, log
from streams.webhooks.queue import Queue
from streams.webhooks.receivers import addresses_of, origin, receiver
from streams.webhooks.signatures import Signer

# "Immediately, 5 seconds, 5 minutes, 30 minutes, 2 hours, 5 hours, 10 hours, 14 hours, 20 hours,
# 24 hours" (Standard Webhooks); then every day.
SCHEDULE: Final = (
    *(5.0, 300.0, 1800.0),
    *(hours * 3600.0 for hours in (2, 5, 10, 14, 20, 24)),
)
ATTEMPTS_MAX: Final = 24
JITTER: Final = 0.1  # of a pause, more or less: receivers come back to a stream, not to a burst

ATTEMPT_S: Final = 15.0  # from the look at the name to the status of the answer
LEASE_S: Final = 60.0  # longer than an attempt and the commit that follows it
AT_ONCE: Final = 16  # attempts that are under way
PER_RECEIVER: Final = 8  # of them: one that hangs must not keep all others waiting
# Receivers whose last attempt took longer than this are *slow*. All of them together have a part of
# the attempts, so that the others do not wait for some that hang.
PROMPT_S: Final = 1.0
SLOW_AT_ONCE: Final = 8
PER_SLOW: Final = 4
SLOW_MAX: Final = 1000  # receivers that are known to be slow
# Until a webhook to a receiver with so many is looked at again; longer where many wait, because
# each look writes to the journal.
BUSY_S: Final = 2.0
MANY: Final = 1000  # that wait: then it is twice as long
# The longest time between two looks at the journal. In a shared one, dead replicas leave webhooks.
LOOK_S: Final = 600.0
LOOK_SHARED_S: Final = 10.0
RETRY_AFTER_MAX_S: Final = DAY_S

OK: Final = range(200, 300)
REDIRECTS: Final = range(300, 400)
GONE: Final = 410


class Answer(msgspec.Struct, frozen=True):
    """The head of an answer, as far as it matters."""

    status: int
    retry_after: str = ""


class Post(Protocol):
    """Posts a body and returns the answer. Redirects are answers.

    Raises `OSError`, or `ValueError` where no request can be made of what is given.
    """

    async def __call__(
        self, url: str, addresses: Sequence[str], headers: Mapping[str, str], body: bytes
    ) -> Answer:
        """`addresses` are those of the URL's host that may be connected to."""


Resolve = Callable[[str], Awaitable[Sequence[str]]]


class Failed(Exception):
    """An attempt has failed; it says why."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Unsendable(Exception):
    """No request can be made of a webhook, now or later; it says why."""


class Sender:
    """Sends what waits; `run` it in a task of its own."""

    def __init__(
        self,
        journal: Journal,
        queue: Queue,
        signer: Signer,
        post: Post,
        *,
        is_private_allowed: bool = False,
        resolve: Resolve | None = None,
        clock: Callable[[], float] = wall,
        schedule: Sequence[float] = SCHEDULE,
    ) -> None:
        """`resolve` finds the addresses of a URL. It raises `OSError`, or `ValueError`."""
        self._journal = journal
        self._queue = queue
        self._signer = signer
        self._post = post
        self._resolve = resolve or partial(addresses_of, is_private_allowed=is_private_allowed)
        self._clock = clock
        self._schedule = schedule
        self._look_s = LOOK_SHARED_S if journal.replica else LOOK_S
        self._under_way: dict[str, str] = {}  # receivers, by the ids of webhooks
        self._busy: set[str] = set()  # ids that are being put off
        self._slow: dict[str, None] = {}  # receivers, the one that was found so last at the end

    async def run(self) -> None:
        """Send for ever. Raises `JournalUnusable` where the journal cannot be used any more."""
        await self._count()
        async with trio.open_nursery() as nursery:
            while True:
                self._queue.has_more = trio.Event()
                pause_s = await patiently(partial(self._send_due, nursery))
                with trio.move_on_after(pause_s):
                    await self._queue.has_more.wait()

    async def _count(self) -> None:
        """Webhooks that other replicas add and send are counted from time to time."""
        self._queue.waiting = await patiently(self._journal.count_webhooks)

    async def _send_due(self, nursery: trio.Nursery) -> float:
        """Begin to send what is due; returns how long to wait for the next. Raises `Unavailable`.

        Only the end of an attempt ends the wait where so many are under way already.
        """
        room = AT_ONCE - len(self._under_way) - len(self._busy)
        if room <= 0:
            return self._look_s
        now = self._clock()
        # Without a lease those that are under way are due still, and may be the first ones.
        limit = room if self._journal.replica else AT_ONCE
        taken = await self._journal.take_webhooks(now, now + LEASE_S, limit=limit)
        news = [each for each in taken if not self._has(each)][:room]
        if news:
            self._begin(news, nursery)
            return 0.0
        await self._count()
        waiting = await self._journal.webhooks(limit=AT_ONCE + 1)
        due = [each.due_at for each in waiting if not self._has(each)]
        next_s = max(0.0, min(due) - self._clock()) if due else self._look_s
        return min(next_s, self._look_s)

    def _has(self, webhook: Webhook) -> bool:
        return webhook.id in self._under_way or webhook.id in self._busy

    def _begin(self, webhooks: Sequence[Webhook], nursery: trio.Nursery) -> None:
        counts = Counter(self._under_way.values())
        for webhook in webhooks:
            where = origin(webhook.url)
            if self._has_room_for(where, counts):
                counts[where] += 1
                self._under_way[webhook.id] = where
                nursery.start_soon(self._send, webhook)
            else:
                self._busy.add(webhook.id)
        busy = [each for each in webhooks if each.id in self._busy]
        if busy:
            nursery.start_soon(self._put_off, busy)

    def _has_room_for(self, where: str, counts: Counter[str]) -> bool:
        """Whether a receiver may have one more attempt, of these that are under way."""
        if where not in self._slow:
            return counts[where] < PER_RECEIVER
        slow = sum(count for each, count in counts.items() if each in self._slow)
        return slow < SLOW_AT_ONCE and counts[where] < PER_SLOW

    async def _put_off(self, webhooks: Sequence[Webhook]) -> None:
        """Make room for webhooks to other receivers."""
        later = self._clock() + BUSY_S * (1 + self._queue.waiting / MANY)
        await self._save(*(SaveWebhook(replace(each, due_at=later)) for each in webhooks))
        self._busy.difference_update(each.id for each in webhooks)
        self._queue.has_more.set()

    async def _send(self, webhook: Webhook) -> None:
        """Make one attempt, and tell the journal how it has ended."""
        began_at = trio.current_time()
        ended = await self._attempted(webhook)
        self._learn(origin(webhook.url), trio.current_time() - began_at)
        await self._save(ended)
        del self._under_way[webhook.id]
        self._queue.has_more.set()

    def _learn(self, where: str, took_s: float) -> None:
        """An attempt to a receiver took so long. One that fails at once keeps no others waiting."""
        self._slow.pop(where, None)
        if took_s > PROMPT_S:
            self._slow[where] = None
        if len(self._slow) > SLOW_MAX:
            del self._slow[next(iter(self._slow))]

    async def _attempted(self, webhook: Webhook) -> WebhookChange:
        where = receiver(webhook.url)
        stream = webhook.stream[:STREAM_LETTERS]
        about = {"webhook": webhook.id, "receiver": where, "stream": stream}
        try:
            answer = await self._attempt(webhook)
        except Failed as failure:
            return self._failed(webhook, failure, about)
        except Unsendable as error:
            about["webhook"] = ascii(webhook.id)[1:-1]  # it may be what is wrong
            log.warning("a webhook that cannot be sent is dropped", why=str(error)[:200], **about)
            return DropWebhook(webhook.id)
        if answer.status == GONE:
            log.warning("a receiver of webhooks is gone: this one is not sent again", **about)
        else:
            log.debug("a webhook was sent", status=answer.status, **about)
        return DropWebhook(webhook.id)

    async def _attempt(self, webhook: Webhook) -> Answer:
        """The answer of a receiver that is done with the webhook. Raises `Failed`, `Unsendable`."""
        try:
            headers = self._signer.headers(webhook.id, self._clock(), webhook.body)
            with trio.fail_after(ATTEMPT_S):
                addresses = await self._resolve(webhook.url)
                answer = await self._post(webhook.url, addresses, headers, webhook.body)
        except trio.TooSlowError:
            raise Failed(f"no answer within {ATTEMPT_S:g} s") from None
        except OSError as error:
            raise Failed(_without_url(str(error), webhook.url)) from error
        except ValueError as error:  # another program has written it to the journal
            raise Unsendable(_without_url(str(error), webhook.url)) from error
        if answer.status in OK or answer.status == GONE:
            return answer
        is_redirect = answer.status in REDIRECTS
        why = ", a redirect: name its target instead" if is_redirect else ""
        raise Failed(f"HTTP {answer.status}{why}", _seconds(answer.retry_after, self._clock()))

    def _failed(self, webhook: Webhook, failure: Failed, about: Mapping[str, str]) -> WebhookChange:
        attempts = webhook.attempts + 1
        if attempts >= ATTEMPTS_MAX:
            log.error("a webhook is given up", attempts=attempts, why=str(failure), **about)
            return DropWebhook(webhook.id)
        step = min(webhook.attempts, len(self._schedule) - 1)
        jitter = 1 + JITTER * random.uniform(-1, 1)  # nosec B311 # spreads load
        pause_s = max(self._schedule[step] * jitter, failure.retry_after_s)
        log.warning(
            "a webhook was not taken",
            attempts=attempts,
            why=str(failure)[:200],
            again_in_s=round(pause_s),
            **about,
        )
        return SaveWebhook(replace(webhook, attempts=attempts, due_at=self._clock() + pause_s))

    async def _save(self, *changes: WebhookChange) -> None:
        async def commit() -> None:
            await self._journal.commit(changes)

        await patiently(commit, doing="the journal takes no news of webhooks; trying again")
        self._queue.waiting -= sum(isinstance(change, DropWebhook) for change in changes)


def _without_url(text: str, url: str) -> str:
    """The text of an error without the path of a URL, which may be a secret."""
    for form in (url, url.replace("https:", "http:", 1), repr(url)[1:-1]):
        if form:
            text = text.replace(form, receiver(url))
    return text


def _seconds(retry_after: str, now: float) -> float:
    """The seconds in a `Retry-After`, which may be a date; 0 where it is neither."""
    text = retry_after.strip()
    try:
        asked_s = float(text) if text.isdecimal() else parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
        return 0.0
    return min(max(0.0, asked_s), RETRY_AFTER_MAX_S)
