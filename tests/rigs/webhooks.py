"""Receivers of webhooks, and what tests need to see of a queue."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from streams.journal.contract import Journal
from streams.journal.webhooks import Webhook
from streams.webhooks.queue import Queue
from streams.webhooks.receivers import Receivers
from streams.webhooks.sender import Answer, Sender
from streams.webhooks.signatures import Signer

SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
OTHER_SECRET = "whsec_eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHg="
URL = "https://example.com/in"
BEGAN_AT = 1.75e9

Received = tuple[float, str, Mapping[str, str], bytes]  # when, URL, headers, body


def virtual() -> float:
    """A wall clock that goes with trio's."""
    return BEGAN_AT + trio.current_time()


class Inbox:
    """Receivers in this process: `answers` says how each request is answered, the last one for all
    that follow; `math.inf` for a request without an answer.
    """

    def __init__(self, *answers: int | Answer | OSError | float) -> None:
        self._answers = list(answers) or [204]
        self.received: list[Received] = []
        self.under_way = self.most_under_way = 0

    async def post(
        self, url: str, addresses: Sequence[str], headers: Mapping[str, str], body: bytes
    ) -> Answer:
        self.received.append((trio.current_time(), url, headers, body))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if isinstance(answer, float):
                await trio.sleep(answer)
                return Answer(204)
            await trio.lowlevel.checkpoint()
        finally:
            self.under_way -= 1
        if isinstance(answer, OSError):
            raise answer
        return answer if isinstance(answer, Answer) else Answer(answer)

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for _, _, headers, _ in self.received]

    @property
    def times(self) -> list[float]:
        return [at for at, _, _, _ in self.received]


async def anywhere(url: str) -> Sequence[str]:
    return ["192.0.2.1"]


def queue(*urls: str, allow: Sequence[str] = (), **more: Any) -> Queue:
    return Queue(Receivers(allow, is_private_allowed=False), urls, **more)


def webhook(number: int = 1, url: str = URL, **more: Any) -> Webhook:
    given = {"due_at": BEGAN_AT} | more
    return Webhook(f"msg_{number}", "stream", url, b'{"n":%d}' % number, **given)


@asynccontextmanager
async def sending(
    journal: Journal, post: Callable[..., Any], of: Queue | None = None, **more: Any
) -> AsyncIterator[Sender]:
    """A sender that runs for the length of a block, in virtual time."""
    settings = {"resolve": anywhere, "clock": virtual} | more
    sender = Sender(journal, of or queue(), Signer([SECRET]), post, **settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run)
        yield sender
        nursery.cancel_scope.cancel()


async def until_empty(journal: Journal, within_s: float = 1e9) -> None:
    """Wait until no webhook waits. It looks from time to time: a journal tells of no change."""
    pause_s = 0.05
    with trio.fail_after(within_s):
        while await journal.count_webhooks():
            await trio.sleep(pause_s)
            pause_s = min(60.0, 1.5 * pause_s)


def decoded(body: bytes) -> Any:
    return msgspec.json.decode(body)
