"""Webhooks as the engine sees them: `streams.webhooks` knows what to tell, and to which URLs.

A webhook belongs to the change that adds the lines it tells of, so that no crash separates them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from streams.engine.lifecycle import Question
from streams.journal.records import Append, Record
from streams.journal.webhooks import WebhookChange


class Hooks(Protocol):
    """Makes the webhooks of calls."""

    def check(self, url: Any, principal: str) -> None:
        """Raise `Refusal` unless this caller may have its call's events sent to `url`."""

    def wants(self, record: Record) -> bool:
        """Whether the events of this call are sent anywhere: then the journal needs its record."""

    def told(self, record: Record, append: Append, questions: Sequence[Question]) -> Append:
        """The same change, with the webhooks that tell of it.

        `questions` are the requests to the client among its lines, if no client is attached.
        """

    def left(
        self, record: Record, questions: Sequence[Question], after_s: float
    ) -> Sequence[WebhookChange]:
        """Webhooks that tell of these questions after so many seconds."""

    def taken_back(self, record: Record, seq: int) -> Sequence[WebhookChange]:
        """Changes that remove the webhooks of the question at `seq`."""

    def committed(self) -> None:
        """Changes that `told` has returned before may be durable now."""
